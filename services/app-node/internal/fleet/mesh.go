package fleet

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"

	"github.com/cosmicac/cosmicac/pkg/fault"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

// Mesh is the network as its daemons see it.
type Mesh struct {
	AskedAt time.Time
	// Complete tells whether every daemon answered both questions.
	Complete bool
	// Nodes are the daemons of the roster, by name.
	Nodes []MeshNode
	// Links are between two of them, one of each pair.
	Links []MeshLink
}

// MeshNode is one daemon.
type MeshNode struct {
	Key, Name string
	Roles     []meshv1.Role
	// Info is nil when it did not answer; Reason is why then, a kind of pkg/fault.
	Info   *meshv1.GetInfoResponse
	Reason string
	// ClockAhead is how far its clock is ahead of this host's.
	ClockAhead time.Duration
	// PeersKnown tells whether it said whom it is connected to.
	PeersKnown bool
	// Agents, Clients and Others count its further connections.
	Agents, Clients, Others int
}

// MeshLink is the best connection between two daemons.
type MeshLink struct {
	// From dialed To, both keys.
	From, To string
	Peer     *meshv1.Peer
	// Connections counts those that stand between the two.
	Connections int
	// SeenByFrom and SeenByTo tell who reported it.
	SeenByFrom, SeenByTo bool
}

// Mesh asks every daemon of the roster who it is and whom it is connected to, or
// answers what was just heard. Who does not answer in time is marked.
func (f *Fleet) Mesh(ctx context.Context) (Mesh, error) { return f.mesh.get(ctx, f.Now, f.askMesh) }

func (f *Fleet) askMesh(ctx context.Context) Mesh {
	ctx, cancel := context.WithTimeout(ctx, f.Timeout)
	defer cancel()
	m := Mesh{AskedAt: f.Now(), Complete: true}
	var keys []peer.ID
	for _, member := range f.Members() {
		if key, ok := daemon(member); ok {
			keys = append(keys, key)
			m.Nodes = append(m.Nodes, MeshNode{Key: key.String(), Name: member.GetName(), Roles: member.GetRoles()})
		}
	}
	peers := make([][]*meshv1.Peer, len(keys))
	var asking sync.WaitGroup
	slots := make(chan struct{}, atOnce)
	for i := range m.Nodes {
		asking.Go(func() {
			select {
			case slots <- struct{}{}:
				defer func() { <-slots }()
				peers[i] = f.askNode(ctx, keys[i], &m.Nodes[i])
			case <-ctx.Done():
				m.Nodes[i].Reason = string(fault.Timeout)
			}
		})
	}
	asking.Wait()
	m.Links = links(m.Nodes, peers)
	for _, n := range m.Nodes {
		m.Complete = m.Complete && n.Info != nil && n.PeersKnown
	}
	slices.SortFunc(m.Nodes, func(a, b MeshNode) int { return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Key, b.Key)) })
	return m
}

// askNode asks both questions at once.
func (f *Fleet) askNode(ctx context.Context, key peer.ID, n *MeshNode) (peers []*meshv1.Peer) {
	client := meshv1.NewNodeClient(f.Node.Client(key))
	var listing sync.WaitGroup
	listing.Go(func() {
		answer, err := client.ListPeers(ctx, &meshv1.ListPeersRequest{})
		n.PeersKnown = err == nil
		peers = answer.GetPeers()[:min(len(answer.GetPeers()), mostPeers)]
	})
	began := f.Now()
	info, err := client.GetInfo(ctx, &meshv1.GetInfoRequest{})
	took := f.Now().Sub(began)
	listing.Wait()
	if err != nil {
		n.Reason = string(fault.KindOf(fault.FromGRPC(err)))
		return peers
	}
	n.Info = info
	if info.GetNow().IsValid() {
		n.ClockAhead = info.GetNow().AsTime().Sub(began.Add(took / 2)) // it answered half way
	}
	if len(info.GetWarnings()) > mostWarnings {
		info.Warnings = info.Warnings[:mostWarnings]
	}
	return peers
}

// sighting is one connection as one of its ends reports it.
type sighting struct {
	by string
	*meshv1.Peer
}

// links joins what both ends say of each pair, and counts the other peers.
func links(nodes []MeshNode, peers [][]*meshv1.Peer) []MeshLink {
	daemons := make(map[string]bool, len(nodes))
	for _, n := range nodes {
		daemons[n.Key] = true
	}
	pairs := make(map[[2]string][]sighting)
	for i := range nodes {
		n := &nodes[i]
		for _, p := range peers[i] {
			switch {
			case daemons[p.GetKey()]:
				pair := [2]string{min(n.Key, p.GetKey()), max(n.Key, p.GetKey())}
				pairs[pair] = append(pairs[pair], sighting{n.Key, p})
			case p.GetClass() == meshv1.Class_CLASS_AGENT, p.GetClass() == meshv1.Class_CLASS_JOINING:
				n.Agents++
			case p.GetClass() == meshv1.Class_CLASS_CLIENT:
				n.Clients++
			default:
				n.Others++
			}
		}
	}
	list := make([]MeshLink, 0, len(pairs))
	for _, seen := range pairs {
		best, counts := seen[0], make(map[string]int)
		for _, s := range seen {
			counts[s.by]++
			if better(s.Peer, best.Peer) {
				best = s
			}
		}
		l := MeshLink{From: best.by, To: best.GetKey(), Peer: best.Peer}
		if best.GetInbound() {
			l.From, l.To = l.To, l.From
		}
		l.SeenByFrom, l.SeenByTo = counts[l.From] > 0, counts[l.To] > 0
		l.Connections = max(counts[l.From], counts[l.To])
		list = append(list, l)
	}
	slices.SortFunc(list, func(a, b MeshLink) int { return cmp.Or(cmp.Compare(a.From, b.From), cmp.Compare(a.To, b.To)) })
	return list
}

// better tells whether calls would rather take a, as pkg/mesh chooses: not suspect
// before suspect, direct before relayed. Of equals the one with a measured round
// trip says more.
func better(a, b *meshv1.Peer) bool {
	if a.GetSuspect() != b.GetSuspect() {
		return b.GetSuspect()
	}
	if a.GetRelayed() != b.GetRelayed() {
		return b.GetRelayed()
	}
	return a.GetRoundTripMicroseconds() > 0 && b.GetRoundTripMicroseconds() == 0
}
