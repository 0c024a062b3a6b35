package mesh

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/libp2p/go-libp2p/core/network"
	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/libp2p/go-libp2p/core/transport"
	bhost "github.com/libp2p/go-libp2p/p2p/host/basic"
	"github.com/libp2p/go-libp2p/p2p/protocol/holepunch"
	"github.com/libp2p/go-libp2p/p2p/protocol/identify"
	ma "github.com/multiformats/go-multiaddr"
	manet "github.com/multiformats/go-multiaddr/net"
)

// A connection that works is not always the best there could be: a relayed one
// costs its relay, and QUIC costs thrice the work of TCP. A better one is made
// beside it as soon as one can be. New streams and calls take the better one, what
// runs on the old one goes on there, and the old one is closed once nothing does.

// upgradePauses are the waits before each try to better a connection; the last one
// stays. The first is short: a peer that has just started does not know yet what
// address it has outside, or listens with QUIC alone so far.
var upgradePauses = []time.Duration{time.Second, 5 * time.Second, 30 * time.Second, 2 * time.Minute, 5 * time.Minute}

// upgrades is how far the tries to better one connection have come. Who set running
// may touch the rest.
type upgrades struct {
	running atomic.Bool
	tries   int
	next    time.Time
}

// upgrade makes a try to better s when one is due.
func (n *Node) upgrade(s *session) {
	var try func(*session) error
	switch {
	case s.relayed && s.inbound && n.canPunch():
		try = n.punch // the side that was reached through the relay begins: it is the protocol's rule
	case s.aside != nil && !s.inbound && slices.ContainsFunc(n.sessions.to(s.peer), (*session).inUse):
		try = n.dialTCP
	}
	u := &s.upgrades
	if try == nil || !s.ready() || slices.ContainsFunc(n.sessions.to(s.peer), func(o *session) bool { return o.ready() && o.outranks(s) }) ||
		!u.running.CompareAndSwap(false, true) {
		return
	}
	if u.next.IsZero() {
		u.next = s.opened.Add(upgradePauses[0])
	}
	if time.Now().Before(u.next) {
		u.running.Store(false)
		return
	}
	n.spawn(func() {
		defer u.running.Store(false)
		err := try(s)
		switch {
		case err == nil, errors.Is(err, errNothing):
		case errors.Is(err, holepunch.ErrHolePunchActive): // the service's own first try
			u.next = time.Now().Add(upgradePauses[0])
			return
		case n.ctx.Err() == nil:
			n.log.Debug("no better connection yet", "key", s.peer, "address", s.conn.RemoteMultiaddr().String(), "reason", flat(err))
		}
		u.tries++
		u.next = time.Now().Add(upgradePauses[min(u.tries, len(upgradePauses)-1)])
	})
}

func (n *Node) punch(s *session) error { return n.holes.DirectConnect(s.peer) }

// dialTCP dials the peer's TCP addresses at the place where QUIC reached it.
func (n *Node) dialTCP(s *session) error {
	at := prefixOf(s.conn.RemoteMultiaddr())
	if !slices.ContainsFunc(n.host.Peerstore().Addrs(s.peer), func(a ma.Multiaddr) bool {
		return transportOf(a) == "tcp" && prefixOf(a) == at
	}) {
		return errNothing
	}
	ctx, cancel := context.WithTimeout(network.WithForceDirectDial(n.ctx, "upgrade"), 10*time.Second)
	defer cancel()
	for _, o := range n.sessions.to(s.peer) { // each side may have dialed one
		if o.aside != nil {
			o.aside.stands.Add(1)
			defer o.aside.stands.Add(-1)
		}
	}
	n.swarm().Backoff().Clear(s.peer)
	conn, err := n.swarm().DialPeer(ctx, s.peer)
	if err != nil {
		return err
	}
	better := n.sessions.dialed(conn)
	if better == nil {
		return fault.New(fault.Unreachable, "the connection to %s ended at once", s.peer)
	}
	return better.wait(ctx)
}

// seeksTCP tells whether dialTCP runs for the peer: QUIC would be no gain.
func (n *Node) seeksTCP(p peer.ID) bool {
	return slices.ContainsFunc(n.sessions.to(p), func(s *session) bool { return s.aside != nil && s.aside.stands.Load() > 0 })
}

// aside is a QUIC connection that can stand aside: the library makes no second
// direct connection to a peer, and asks a connection's transport whether it is one.
type aside struct {
	transport.CapableConn
	stands atomic.Int32
}

// As finds the connection beneath the library's own.
func (c *aside) As(target any) bool {
	if t, ok := target.(**aside); ok {
		*t = c
		return true
	}
	return c.CapableConn.As(target)
}

func (c *aside) Transport() transport.Transport {
	if c.stands.Load() > 0 {
		return asideTransport{c.CapableConn.Transport()}
	}
	return c.CapableConn.Transport()
}

type asideTransport struct{ transport.Transport }

func (asideTransport) Proxy() bool { return true }

// makeHoles makes the hole punching service. The host's own would try once, when a
// relayed connection begins, and never again.
func (n *Node) makeHoles(observed bhost.ObservedAddrsManager) error {
	h := n.host.(interface {
		IDService() identify.IDService
		AllAddrs() []ma.Multiaddr
	})
	addresses := func() []ma.Multiaddr {
		// An address that a single peer has seen this node come from is good enough.
		return slices.DeleteFunc(ma.Unique(slices.Concat(n.announced, h.AllAddrs(), observed.Addrs(1))),
			func(a ma.Multiaddr) bool { return !manet.IsPublicAddr(a) })
	}
	holes, err := holepunch.NewService(n.host, h.IDService(), addresses, holepunch.DirectDialTimeout(5*time.Second))
	if err != nil {
		return fault.Wrap(fault.Internal, flat(err), "make the hole punching service")
	}
	n.holes = holes
	return nil
}

// canPunch tells whether the service knows an address to punch from. Asked before,
// it would wait for one without end.
func (n *Node) canPunch() bool {
	return n.holes != nil && slices.Contains(n.host.Mux().Protocols(), holepunch.Protocol)
}

// inUse tells whether somebody cares for the connection.
func (s *session) inUse() bool { return s.watched.Load() > 0 || s.streams.Load() > 0 }

// outranks tells whether s is of a better kind than o.
func (s *session) outranks(o *session) bool { return s.rank() > o.rank() }

// overtake moves new calls, and the watch over a kept peer, to a connection that
// has just been admitted when it is of a better kind than those before it.
func (n *Node) overtake(s *session) {
	if !slices.ContainsFunc(n.sessions.to(s.peer), s.outranks) {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if c := n.clients[s.peer]; c != nil {
		delete(n.clients, s.peer)
		n.former = append(n.former, c)
	}
	if k := n.keeping[s.peer]; k != nil {
		poke(k.wake)
	}
}

// dropFormer closes the overtaken clients whose calls have ended.
func (n *Node) dropFormer() {
	var idle []*client
	n.mu.Lock()
	n.former = slices.DeleteFunc(n.former, func(c *client) bool {
		if c.calls.Load() > 0 {
			return false
		}
		idle = append(idle, c)
		return true
	})
	n.mu.Unlock()
	for _, c := range idle {
		n.spawn(c.Close)
	}
}
