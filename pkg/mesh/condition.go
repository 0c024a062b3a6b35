package mesh

import (
	"cmp"
	"slices"
	"sync"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	"github.com/libp2p/go-libp2p/core/peer"
)

// KeptPeer is a peer that this node keeps a link to.
type KeptPeer struct {
	ID peer.ID
	// Name is from the roster, "" for agents.
	Name string
	// Path is the connection that calls take, nil while the peer is away.
	Path *meshv1.Peer
	// Err is why the last search failed, nil while the peer is connected.
	Err error
}

// Kept lists the kept peers, by key.
func (n *Node) Kept() []KeptPeer {
	n.mu.Lock()
	ids := make([]peer.ID, 0, len(n.keeping))
	for p := range n.keeping {
		ids = append(ids, p)
	}
	n.mu.Unlock()
	list := make([]KeptPeer, 0, len(ids))
	for _, p := range ids {
		k := KeptPeer{ID: p}
		if m, ok := n.network.Known(p); ok {
			k.Name = m.GetName()
		}
		if s := n.sessions.best(p); s != nil {
			k.Path = s.describe()
		} else {
			n.dials.mu.Lock()
			last := n.dials.past[p]
			n.dials.mu.Unlock()
			if last != nil {
				k.Err = last.failure()
			}
		}
		list = append(list, k)
	}
	slices.SortFunc(list, func(a, b KeptPeer) int { return cmp.Compare(a.ID, b.ID) })
	return list
}

func (s *search) failure() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// Refusals are the peers that introduced themselves and were turned away, without
// a pause of RefusalPause. Whoever does not speak the protocol at all is not
// counted: strangers on the internet do not. Nor is an agent whose certificate is good
// and was voided, which Vet says.
type Refusals struct {
	// Count of dialogues, not of peers.
	Count int
	Last  time.Time
	// Key and Reason are of the last.
	Key    peer.ID
	Reason string
}

// RefusalPause ends a run of refusals.
const RefusalPause = 10 * time.Minute

// refusalCount keeps the Refusals of a node.
type refusalCount struct {
	mu   sync.Mutex
	last Refusals
}

func (c *refusalCount) add(p peer.ID, err error, now time.Time) {
	switch fault.KindOf(err) {
	case fault.Denied, fault.Unauthenticated, fault.FailedPrecondition:
	default:
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if now.Sub(c.last.Last) > RefusalPause {
		c.last = Refusals{}
	}
	c.last = Refusals{Count: c.last.Count + 1, Last: now, Key: p, Reason: cutLine(clean(err.Error()), 200)}
}

// Refusals returns the run of refusals that was the last, the zero value if there
// was none. Its times are of Options.Clock.
func (n *Node) Refusals() Refusals {
	n.turnedAway.mu.Lock()
	defer n.turnedAway.mu.Unlock()
	return n.turnedAway.last
}
