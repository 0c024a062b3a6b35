package mesh

import (
	"sync"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/libp2p/go-libp2p/core/control"
	"github.com/libp2p/go-libp2p/core/network"
	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/libp2p/go-libp2p/core/protocol"
	ma "github.com/multiformats/go-multiaddr"
)

// gate does the cheap part of admission: it keeps out keys that were refused
// again and again, before they cost more than a handshake. Rates per address
// are the resource manager's.
type gate struct {
	mu   sync.Mutex
	keys map[peer.ID]*record
}

type record struct {
	refused int
	last    time.Time
}

const (
	gateAfter  = 20               // refusals in a row
	gateFor    = 15 * time.Second // shut time, and the memory of a refusal
	gateMemory = 8192             // keys remembered
)

func newGate() *gate { return &gate{keys: make(map[peer.ID]*record)} }

// refused counts one refusal.
func (g *gate) refused(p peer.ID) {
	g.mu.Lock()
	defer g.mu.Unlock()
	now := time.Now()
	r := g.keys[p]
	if r == nil {
		if len(g.keys) >= gateMemory {
			for k, o := range g.keys {
				if now.Sub(o.last) > gateFor {
					delete(g.keys, k)
				}
			}
			if len(g.keys) >= gateMemory {
				clear(g.keys)
			}
		}
		r = &record{}
		g.keys[p] = r
	} else if now.Sub(r.last) > gateFor {
		r.refused = 0
	}
	r.refused, r.last = r.refused+1, now
}

// pardon forgets all: the roster changed.
func (g *gate) pardon() {
	g.mu.Lock()
	defer g.mu.Unlock()
	clear(g.keys)
}

// good forgets the refusals of a key that was admitted.
func (g *gate) good(p peer.ID) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.keys, p)
}

func (g *gate) open(p peer.ID) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	r := g.keys[p]
	return r == nil || r.refused < gateAfter || time.Since(r.last) > gateFor
}

func (g *gate) InterceptPeerDial(peer.ID) bool               { return true }
func (g *gate) InterceptAddrDial(peer.ID, ma.Multiaddr) bool { return true }
func (g *gate) InterceptAccept(network.ConnMultiaddrs) bool  { return true }
func (g *gate) InterceptSecured(d network.Direction, p peer.ID, _ network.ConnMultiaddrs) bool {
	return d == network.DirOutbound || g.open(p)
}
func (g *gate) InterceptUpgraded(network.Conn) (bool, control.DisconnectReason) { return true, 0 }

// gatedResources refuses streams of unadmitted peers for protocols that are the
// library's own (relay, hole punching, identify push, kad): the resource manager
// is the one place that every incoming stream passes before its handler. It is
// also the one place where a dial through a relay shows, see watchedCircuit.
type gatedResources struct {
	network.ResourceManager
	n *Node
}

func (g *gatedResources) OpenConnection(dir network.Direction, usesFD bool, a ma.Multiaddr) (network.ConnManagementScope, error) {
	s, err := g.ResourceManager.OpenConnection(dir, usesFD, a)
	if err != nil || dir != network.DirOutbound || !isRelayed(a) {
		return s, err
	}
	return &watchedCircuit{ConnManagementScope: s, n: g.n, address: a}, nil
}

func (g *gatedResources) OpenStream(p peer.ID, dir network.Direction) (network.StreamManagementScope, error) {
	s, err := g.ResourceManager.OpenStream(p, dir)
	if err != nil || dir != network.DirInbound {
		return s, err
	}
	return &gatedStream{StreamManagementScope: s, peer: p, allow: g.n.allowStream}, nil
}

type gatedStream struct {
	network.StreamManagementScope
	peer  peer.ID
	allow func(p peer.ID, proto protocol.ID) bool
}

func (s *gatedStream) SetProtocol(proto protocol.ID) error {
	if !s.allow(s.peer, proto) {
		return fault.New(fault.Denied, "stream %s of %s: the peer is not admitted", proto, s.peer)
	}
	return s.StreamManagementScope.SetProtocol(proto)
}
