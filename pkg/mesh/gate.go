package mesh

import (
	"container/list"
	"io"
	"net/netip"
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
// again and again, before they cost more than a handshake, and those who connect
// and say nothing from taking the room of those who do. Rates per address are the
// resource manager's.
type gate struct {
	mu   sync.Mutex
	keys map[peer.ID]*record

	mute   *list.List // of *mute: accepted over TCP, no handshake yet; oldest first
	byAddr map[string]*list.Element
	counts map[netip.Prefix]int
}

// mute is a connection that has not finished its handshake.
type mute struct {
	conn   io.Closer
	addr   string
	prefix netip.Prefix
}

type record struct {
	refused int
	last    time.Time
}

const (
	gateAfter  = 20               // refusals in a row
	gateFor    = 15 * time.Second // shut time, and the memory of a refusal
	gateMemory = 8192             // keys remembered

	// The library gives a handshake 15 s. These stand well below its limit of
	// connections in handshake (see limits.go), so that the oldest mute one goes
	// and not the newest comer. An address' share is close to a full backlog of the
	// kernel's (4,096): who comes behind a crowd of its own neighbours has the time
	// that this many accepts take to finish its handshake.
	mutePerPrefix, muteTotal = 3072, 6144
)

func newGate() *gate {
	return &gate{keys: make(map[peer.ID]*record), mute: list.New(), byAddr: make(map[string]*list.Element), counts: make(map[netip.Prefix]int)}
}

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

// InterceptAccept remembers a TCP connection as mute and closes the oldest one
// above the bounds. A QUIC connection has its handshake behind it.
func (g *gate) InterceptAccept(c network.ConnMultiaddrs) bool {
	conn, ok := c.(io.Closer)
	if _, err := c.RemoteMultiaddr().ValueForProtocol(ma.P_TCP); !ok || err != nil {
		return true
	}
	m := &mute{conn: conn, addr: c.RemoteMultiaddr().String(), prefix: prefixOf(c.RemoteMultiaddr())}
	g.mu.Lock()
	g.forget(m.addr)
	var out *mute
	for e := g.mute.Front(); e != nil; e = e.Next() {
		if o := e.Value.(*mute); g.mute.Len() >= muteTotal || g.counts[m.prefix] >= mutePerPrefix && o.prefix == m.prefix {
			out = o
			g.forget(o.addr)
			break
		} else if g.counts[m.prefix] < mutePerPrefix {
			break
		}
	}
	g.byAddr[m.addr] = g.mute.PushBack(m)
	g.counts[m.prefix]++
	g.mu.Unlock()
	if out != nil {
		_ = out.conn.Close()
	}
	return true
}

// forget takes a connection off the mute ones; the lock is held.
func (g *gate) forget(addr string) {
	e := g.byAddr[addr]
	if e == nil {
		return
	}
	m := g.mute.Remove(e).(*mute)
	delete(g.byAddr, addr)
	if g.counts[m.prefix]--; g.counts[m.prefix] == 0 {
		delete(g.counts, m.prefix)
	}
}

func (g *gate) InterceptSecured(d network.Direction, p peer.ID, c network.ConnMultiaddrs) bool {
	if d == network.DirOutbound {
		return true
	}
	g.mu.Lock()
	g.forget(c.RemoteMultiaddr().String())
	g.mu.Unlock()
	return g.open(p)
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
