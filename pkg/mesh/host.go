package mesh

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/mesh/internal/mux"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	"github.com/hashicorp/go-hclog"
	"github.com/libp2p/go-libp2p"
	coreconnmgr "github.com/libp2p/go-libp2p/core/connmgr"
	"github.com/libp2p/go-libp2p/core/crypto"
	"github.com/libp2p/go-libp2p/core/network"
	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/libp2p/go-libp2p/core/pnet"
	"github.com/libp2p/go-libp2p/core/protocol"
	"github.com/libp2p/go-libp2p/core/transport"
	"github.com/libp2p/go-libp2p/p2p/host/autorelay"
	bhost "github.com/libp2p/go-libp2p/p2p/host/basic"
	"github.com/libp2p/go-libp2p/p2p/net/connmgr"
	"github.com/libp2p/go-libp2p/p2p/net/swarm"
	"github.com/libp2p/go-libp2p/p2p/protocol/autonatv2"
	"github.com/libp2p/go-libp2p/p2p/protocol/circuitv2/relay"
	"github.com/libp2p/go-libp2p/p2p/protocol/identify"
	libp2ptls "github.com/libp2p/go-libp2p/p2p/security/tls"
	quic "github.com/libp2p/go-libp2p/p2p/transport/quic"
	"github.com/libp2p/go-libp2p/p2p/transport/quicreuse"
	"github.com/libp2p/go-libp2p/p2p/transport/tcp"
	"github.com/libp2p/go-libp2p/p2p/transport/tcpreuse"
	ma "github.com/multiformats/go-multiaddr"
	manet "github.com/multiformats/go-multiaddr/net"
	"go.uber.org/fx"
	"golang.org/x/time/rate"
)

// makeHost assembles the libp2p host: TCP with TLS 1.3 and QUIC, nothing else.
// It does not listen yet.
func (n *Node) makeHost() error {
	var err error
	if n.announced, err = parseAddresses(n.o.Announce); err != nil {
		return err
	}
	resources, err := newResources()
	if err != nil {
		return fault.Wrap(fault.Internal, err, "make the resource limits")
	}
	conns, err := connmgr.NewConnManager(8192, 12288, connmgr.WithGracePeriod(time.Minute))
	if err != nil {
		_ = resources.Close()
		return fault.Wrap(fault.Internal, err, "make the connection limits")
	}
	n.sockets = &sockets{gate: n.gate, by: make(map[string]socket)}
	// Second line behind the ping watcher, for connections that nobody watches. Half of
	// a write's time must let a frame of 64 KiB pass at a kilobyte a second.
	streams := &mux.Transport{KeepAlive: 20 * time.Second, WriteTimeout: 140 * time.Second}

	options := []libp2p.Option{
		libp2p.Identity(n.o.Key.Private()),
		libp2p.UserAgent("cosmicac"),
		libp2p.EnableRelay(), // the client side, so that relayed addresses can be dialed
		libp2p.NoListenAddrs,
		libp2p.Security(libp2ptls.ID, libp2ptls.New),
		libp2p.Muxer(mux.ID, streams),
		libp2p.Transport(n.watchedQUIC),
		libp2p.ResourceManager(&gatedResources{ResourceManager: resources, n: n}),
		libp2p.ConnectionManager(conns),
		libp2p.ConnectionGater(n.sockets),
		libp2p.Ping(false), // ours is behind admission
		libp2p.SwarmOpts(swarm.WithDialRanker(preferTCP), swarm.WithDialTimeout(6*time.Second), swarm.WithDialTimeoutLocal(3*time.Second)),
		libp2p.UDPBlackHoleSuccessCounter(nil), libp2p.IPv6BlackHoleSuccessCounter(nil),
	}
	if len(n.announced) > 0 {
		options = append(options, libp2p.AddrsFactory(func(own []ma.Multiaddr) []ma.Multiaddr {
			all := slices.Clone(n.announced)
			for _, a := range own {
				if isRelayed(a) {
					all = append(all, a)
				}
			}
			return all
		}))
	}
	if n.o.Metrics != nil {
		options = append(options, libp2p.PrometheusRegisterer(n.o.Metrics))
	} else {
		options = append(options, libp2p.DisableMetrics())
	}
	switch {
	case n.o.Private:
		// One port for dialing and listening, so that a hole can be punched.
		options = append(options, libp2p.Transport(n.watchedTCP()), libp2p.ForceReachabilityPrivate(),
			libp2p.EnableAutoRelayWithPeerSource(n.relaySource,
				autorelay.WithBootDelay(0), autorelay.WithMinCandidates(1), autorelay.WithNumRelays(2),
				autorelay.WithBackoff(5*time.Second), autorelay.WithMinInterval(time.Second)))
	case n.o.Relay:
		limits := relay.DefaultResources()
		limits.Limit = nil // members, live certificates and grants only, see AllowReserve
		limits.MaxReservations, limits.MaxCircuits, limits.BufferSize = 16384, 1024, 16<<10
		limits.MaxReservationsPerIP, limits.MaxReservationsPerASN = peersPerAddress, 16384
		options = append(options, libp2p.Transport(n.watchedTCP(tcp.DisableReuseport())), libp2p.ForceReachabilityPublic(),
			libp2p.EnableRelayService(relay.WithResources(limits), relay.WithACL(relayRule{n}), relay.WithMetricsTracer(newRelayMetrics(n.o.Metrics, n.metrics)),
				relay.WithReservationAddressFilter(func(ma.Multiaddr) bool { return true })))
	default:
		// A port that two processes share goes unnoticed; better an error at start.
		options = append(options, libp2p.Transport(n.watchedTCP(tcp.DisableReuseport())), libp2p.ForceReachabilityPublic())
	}
	var observed bhost.ObservedAddrsManager
	n.host, err = libp2p.New(append(options, libp2p.WithFxOption(fx.Populate(&observed)))...)
	if err != nil {
		return fault.Wrap(fault.Internal, flat(err), "make the libp2p host")
	}
	if !n.o.Relay {
		if err := n.makeHoles(observed); err != nil {
			_ = n.host.Close()
			return err
		}
	}
	n.host.Network().Notify(&network.NotifyBundle{ConnectedF: n.connected, DisconnectedF: n.disconnected})
	return nil
}

// watchedTCP makes the TCP transport, whose dials are told of.
func (n *Node) watchedTCP(options ...tcp.Option) any {
	return func(u transport.Upgrader, r network.ResourceManager, shared *tcpreuse.ConnMgr) (*watchedTransport, error) {
		t, err := tcp.NewTCPTransport(u, r, shared, options...)
		return &watchedTransport{t, n}, err
	}
}

func (n *Node) watchedQUIC(key crypto.PrivKey, conns *quicreuse.ConnManager, psk pnet.PSK, gater coreconnmgr.ConnectionGater, r network.ResourceManager) (*watchedTransport, error) {
	conns.ClientConfig().HandshakeIdleTimeout = patientLimit // the dial's context ends it sooner, see patient
	t, err := quic.NewTransport(key, conns, psk, gater, r)
	return &watchedTransport{t, n}, err
}

// allowStream is asked for every incoming stream before its handler. The mesh's
// own handlers look for themselves, by connection; identify carries addresses
// only and must come first.
func (n *Node) allowStream(p peer.ID, proto protocol.ID) bool {
	if proto == identify.ID || strings.HasPrefix(string(proto), n.prefix+"/") && !strings.HasPrefix(string(proto), n.prefix+"/kad/") {
		return true
	}
	if proto == autonatv2.DialBackProtocol && n.dialBacks.expected() {
		return true // from a key that nobody knows; it carries a number that this node made
	}
	deadline := time.Now().Add(admitLimit)
	for {
		c, ok := n.sessions.anyAdmitted(p)
		switch {
		case ok && (strings.HasPrefix(string(proto), n.prefix+"/kad/") || proto == autonatv2.DialProtocol):
			return c.Class == meshv1.Class_CLASS_MEMBER
		case ok:
			return c.Class != meshv1.Class_CLASS_GUEST
		case len(n.sessions.to(p)) == 0 || time.Now().After(deadline):
			return false
		}
		// The dialogue of this connection may still run.
		for _, s := range n.sessions.to(p) {
			s.admitted(50 * time.Millisecond)
			break
		}
		if !sleep(n.ctx, 5*time.Millisecond) {
			return false
		}
	}
}

// relayRule says who may use the relay: reserve by roster or live certificate,
// connect where the source's class or grant names the destination.
type relayRule struct{ n *Node }

func (r relayRule) AllowReserve(p peer.ID, _ ma.Multiaddr) bool {
	c, ok := r.n.sessions.anyAdmitted(p)
	return ok && (c.Class == meshv1.Class_CLASS_MEMBER || c.Class == meshv1.Class_CLASS_AGENT)
}

func (r relayRule) AllowConnect(from peer.ID, _ ma.Multiaddr, to peer.ID) bool {
	c, ok := r.n.sessions.anyAdmitted(from)
	if !ok {
		return false
	}
	switch c.Class {
	case meshv1.Class_CLASS_MEMBER:
		return true
	case meshv1.Class_CLASS_CLIENT:
		return c.Grant.GetAgentKey() == to.String()
	case meshv1.Class_CLASS_AGENT:
		if r.n.network.HasRole(to, meshv1.Role_ROLE_ORK) {
			return true
		}
		other, ok := r.n.sessions.anyAdmitted(to)
		return ok && other.Class == meshv1.Class_CLASS_AGENT && other.Certificate.GetJobId() == c.Certificate.GetJobId()
	}
	return false
}

// relaySource offers the network's bootstraps as relays.
func (n *Node) relaySource(ctx context.Context, num int) <-chan peer.AddrInfo {
	var list []peer.AddrInfo
	select {
	case <-n.listening: // see makeDHT
	case <-ctx.Done():
	}
	if n.usesBootstraps() {
		list = n.bootstraps()
	}
	c := make(chan peer.AddrInfo, len(list))
	for i, b := range list {
		if i < num && b.ID != n.id {
			c <- b
		}
	}
	close(c)
	return c
}

// preferTCP ranks TCP before QUIC (faster, and loud when its peer dies), direct
// before relayed. A failed attempt starts the next at once.
func preferTCP(addrs []ma.Multiaddr) []network.AddrDelay {
	var tcps, quics, relays []ma.Multiaddr
	for _, a := range addrs {
		_, notQUIC := a.ValueForProtocol(ma.P_QUIC_V1)
		switch {
		case isRelayed(a):
			relays = append(relays, a)
		case notQUIC != nil:
			tcps = append(tcps, a)
		default:
			quics = append(quics, a)
		}
	}
	var ranked []network.AddrDelay
	var at time.Duration
	for _, group := range []struct {
		addrs []ma.Multiaddr
		step  time.Duration
	}{{tcps, 50 * time.Millisecond}, {quics, 50 * time.Millisecond}, {relays, 100 * time.Millisecond}} {
		if len(ranked) > 0 && len(group.addrs) > 0 {
			at += 250 * time.Millisecond
		}
		for _, a := range group.addrs {
			ranked = append(ranked, network.AddrDelay{Addr: a, Delay: at})
			at += group.step
		}
	}
	return ranked
}

func parseAddresses(texts []string) ([]ma.Multiaddr, error) {
	var list []ma.Multiaddr
	for _, t := range texts {
		a, err := ma.NewMultiaddr(t)
		if err != nil {
			return nil, fault.Wrap(fault.Invalid, err, "address %q is no multiaddress", t)
		}
		list = append(list, a)
	}
	return list, nil
}

// prefixOf is the network that a connection's rates count for: an IPv4 address
// or an IPv6 /56. Relayed connections count for their relay.
func prefixOf(a ma.Multiaddr) netip.Prefix {
	ip, err := manet.ToIP(a)
	if err != nil {
		return netip.Prefix{}
	}
	at, ok := netip.AddrFromSlice(ip)
	if !ok {
		return netip.Prefix{}
	}
	at = at.Unmap()
	bits := 32
	if at.Is6() {
		bits = 56
	}
	p, _ := at.Prefix(bits)
	return p
}

// flat makes one short line of the library's page-long errors; kinds stay.
func flat(err error) error {
	if err == nil {
		return nil
	}
	text := strings.Join(strings.Fields(err.Error()), " ")
	if len(text) > 400 {
		text = text[:400] + "..."
	}
	return errors.New(text)
}

// counter bounds what runs at a time, by network prefix and in all.
type counter struct {
	mu    sync.Mutex
	total int
	by    map[netip.Prefix]int
}

func newCounter() *counter { return &counter{by: make(map[netip.Prefix]int)} }

func (c *counter) acquire(p netip.Prefix, perPrefix, total int) (release func(), ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.by[p] >= perPrefix || c.total >= total {
		return nil, false
	}
	c.by[p]++
	c.total++
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.total--
		if c.by[p]--; c.by[p] == 0 {
			delete(c.by, p)
		}
	}, true
}

// limitedLog bounds lines that strangers can cause.
type limitedLog struct {
	mu      sync.Mutex
	rate    *rate.Limiter
	skipped int
}

func newLimitedLog() *limitedLog { return &limitedLog{rate: rate.NewLimiter(10, 100)} }

func (l *limitedLog) line(log hclog.Logger, message string, pairs ...any) {
	l.mu.Lock()
	if !l.rate.Allow() {
		l.skipped++
		l.mu.Unlock()
		return
	}
	if l.skipped > 0 {
		pairs = append(pairs, "lines_skipped", l.skipped)
		l.skipped = 0
	}
	l.mu.Unlock()
	log.Warn(message, pairs...)
}
