package mesh

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	"github.com/libp2p/go-libp2p"
	"github.com/libp2p/go-libp2p/core/connmgr"
	"github.com/libp2p/go-libp2p/core/control"
	"github.com/libp2p/go-libp2p/core/host"
	"github.com/libp2p/go-libp2p/core/network"
	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/libp2p/go-libp2p/p2p/muxer/yamux"
	"github.com/libp2p/go-libp2p/p2p/protocol/autonatv2"
	libp2ptls "github.com/libp2p/go-libp2p/p2p/security/tls"
	quic "github.com/libp2p/go-libp2p/p2p/transport/quic"
	"github.com/libp2p/go-libp2p/p2p/transport/tcp"
	ma "github.com/multiformats/go-multiaddr"
	manet "github.com/multiformats/go-multiaddr/net"
	"google.golang.org/protobuf/types/known/timestamppb"
)

const (
	// dialBackTick is how often the next address is looked for.
	dialBackTick = 10 * time.Second
	// dialBackAgain and dialBackRetry are how long a known and an unknown result
	// count; a bootstrap itself is asked at most once in two minutes.
	dialBackAgain, dialBackRetry = 30 * time.Minute, 3 * time.Minute
	dialBackLimit                = 25 * time.Second
	// dialBackMost bounds the addresses that are looked after.
	dialBackMost = 16
)

// dialBacks asks bootstraps to dial this node back (AutoNAT v2), one address at a
// time, and remembers what they found.
//
// The library could do it by itself (libp2p.EnableAutoNATv2). That would take
// addresses out of what this node announces, and let a private node with one
// reachable address drop its relays: the design forces reachability instead of
// guessing it. It would also look at public addresses alone, which says nothing on
// a LAN. So the protocol is the library's, and the rest is here.
type dialBacks struct {
	nat     *autonatv2.AutoNAT
	probing atomic.Int32 // questions under way: dial-backs are expected

	mu       sync.Mutex
	observed []ma.Multiaddr // where the last check saw this node listen, from outside
	results  map[string]*meshv1.DialBack
}

// onLoopbackAlone tells whether this node listens on loopback addresses only.
func (n *Node) onLoopbackAlone() bool {
	return !slices.ContainsFunc(n.o.Listen, func(text string) bool {
		a, err := ma.NewMultiaddr(text)
		return err != nil || !manet.IsIPLoopback(a)
	})
}

// makeDialBacks is for members that listen. Bootstraps answer, too.
func (n *Node) makeDialBacks() error {
	if n.credential().kind != showsRoster || len(n.o.Listen) == 0 {
		return nil
	}
	serves := n.o.Role == meshv1.Role_ROLE_BOOTSTRAP
	var dialer host.Host = noDialer{}
	if serves {
		var err error
		// A key of its own, so that nothing is reused of what stands.
		transports := libp2p.Transport(tcp.NewTCPTransport, tcp.DisableReuseport())
		if !n.onLoopbackAlone() {
			// It dials from a UDP port on all addresses; on one host there is nothing
			// to learn by that, and nothing may be open beyond loopback.
			transports = libp2p.ChainOptions(transports, libp2p.Transport(quic.NewTransport))
		}
		dialer, err = libp2p.New(libp2p.NoListenAddrs, libp2p.DisableRelay(), libp2p.DisableMetrics(), libp2p.Ping(false), libp2p.DisableIdentifyAddressDiscovery(),
			libp2p.Security(libp2ptls.ID, libp2ptls.New), libp2p.Muxer(yamux.ID, yamux.DefaultTransport),
			transports,
			libp2p.ConnectionGater(dialBackGate{n}), libp2p.UDPBlackHoleSuccessCounter(nil), libp2p.IPv6BlackHoleSuccessCounter(nil))
		if err != nil {
			return fault.Wrap(fault.Internal, flat(err), "make the host that dials back")
		}
	}
	nat, err := autonatv2.New(dialer, autonatv2.AllowPrivateAddrs)
	if err == nil {
		err = nat.Start(n.host)
	}
	if err != nil {
		_ = dialer.Close()
		return fault.Wrap(fault.Internal, flat(err), "make the dial-back")
	}
	if !serves {
		n.host.RemoveStreamHandler(autonatv2.DialProtocol)
	}
	n.dialBacks = &dialBacks{nat: nat, results: make(map[string]*meshv1.DialBack)}
	return nil
}

// noDialer stands where the library wants a host to dial back with, in a node that
// does not.
type noDialer struct{ host.Host }

func (noDialer) Close() error { return nil }

// dialBackGate keeps a member from making a bootstrap dial the bootstrap's own
// host, except for its neighbours on it.
type dialBackGate struct{ n *Node }

var _ connmgr.ConnectionGater = dialBackGate{}

func (g dialBackGate) InterceptAddrDial(p peer.ID, a ma.Multiaddr) bool {
	if !manet.IsIPLoopback(a) {
		return true
	}
	for _, s := range g.n.sessions.to(p) {
		if manet.IsIPLoopback(s.conn.RemoteMultiaddr()) {
			return true
		}
	}
	return false
}
func (dialBackGate) InterceptPeerDial(peer.ID) bool              { return true }
func (dialBackGate) InterceptAccept(network.ConnMultiaddrs) bool { return false }
func (dialBackGate) InterceptSecured(d network.Direction, _ peer.ID, _ network.ConnMultiaddrs) bool {
	return d == network.DirOutbound
}
func (dialBackGate) InterceptUpgraded(network.Conn) (bool, control.DisconnectReason) { return true, 0 }

// expected tells whether somebody who does not introduce itself may tell this node
// that it was dialed back.
func (d *dialBacks) expected() bool { return d != nil && d.probing.Load() > 0 }

func (d *dialBacks) close() {
	if d != nil {
		d.nat.Close()
	}
}

// dialBackLoop looks after the addresses, the unknown ones first.
func (n *Node) dialBackLoop() {
	for wait := time.Second; sleep(n.ctx, wait); wait = dialBackTick {
		a, ok := n.dialBacks.next(n.dialBackAddresses(), n.now())
		if !ok {
			continue
		}
		ctx, cancel := context.WithTimeout(n.ctx, dialBackLimit)
		n.dialBacks.probing.Add(1)
		r, err := n.dialBacks.nat.GetReachability(ctx, []autonatv2.Request{{Addr: a, SendDialData: true}})
		n.dialBacks.probing.Add(-1)
		cancel()
		if n.ctx.Err() == nil && !errors.Is(err, autonatv2.ErrNoPeers) {
			n.dialBacks.note(a, r, err, n.now())
		}
	}
}

// dialBackAddresses are those that others could be told: the announced ones and
// the observed ones. Loopback says something only where there is nothing else.
func (n *Node) dialBackAddresses() []ma.Multiaddr {
	n.dialBacks.mu.Lock()
	all := append(n.host.Addrs(), n.dialBacks.observed...)
	n.dialBacks.mu.Unlock()
	all = slices.DeleteFunc(ma.Unique(all), isRelayed)
	if outside := slices.DeleteFunc(slices.Clone(all), manet.IsIPLoopback); len(outside) > 0 {
		all = outside
	}
	return all[:min(len(all), dialBackMost)]
}

// next picks an address that was never asked for, else one whose result is old.
// Results of addresses that are gone are forgotten.
func (d *dialBacks) next(addrs []ma.Multiaddr, now time.Time) (ma.Multiaddr, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	wanted := make(map[string]bool, len(addrs))
	var oldest ma.Multiaddr
	var at time.Time
	for _, a := range addrs {
		wanted[a.String()] = true
		r := d.results[a.String()]
		if r == nil {
			d.results[a.String()] = &meshv1.DialBack{Address: a.String(), Result: "unknown", Reason: "not asked yet"}
			r = d.results[a.String()]
		}
		checked := r.GetCheckedAt().AsTime()
		if r.GetCheckedAt() == nil {
			checked = time.Time{}
		}
		life := dialBackAgain
		if r.GetResult() == "unknown" {
			life = dialBackRetry
		}
		if age := now.Sub(checked); age > life && (oldest == nil || checked.Before(at)) {
			oldest, at = a, checked
		}
	}
	for a := range d.results {
		if !wanted[a] {
			delete(d.results, a)
		}
	}
	return oldest, oldest != nil
}

func (d *dialBacks) note(a ma.Multiaddr, r autonatv2.Result, err error, now time.Time) {
	result := &meshv1.DialBack{Address: a.String(), Result: "unknown", CheckedAt: timestamppb.New(now)}
	switch {
	case err != nil:
		result.Reason = shortError(err)
	case r.AllAddrsRefused:
		result.Reason = "the bootstrap does not dial such an address"
	case r.Reachability == network.ReachabilityPublic:
		result.Result = "reachable"
	case r.Reachability == network.ReachabilityPrivate:
		result.Result, result.Reason = "unreachable", "the bootstrap could not dial it"
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.results[a.String()] = result
}

// list is what is known, by address.
func (d *dialBacks) list() []*meshv1.DialBack {
	if d == nil {
		return nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	var list []*meshv1.DialBack
	for _, r := range d.results {
		list = append(list, r)
	}
	slices.SortFunc(list, func(a, b *meshv1.DialBack) int { return strings.Compare(a.GetAddress(), b.GetAddress()) })
	return list
}

// saw keeps where this node's listeners were seen from outside.
func (d *dialBacks) saw(observed []ma.Multiaddr) {
	if d == nil {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.observed = observed[:min(len(observed), dialBackMost/2)]
}
