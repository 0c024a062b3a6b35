package mesh

import (
	"context"
	"encoding/hex"
	"slices"
	"sync"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/mesh/rpc"
	"github.com/cosmicac/cosmicac/pkg/trust"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	"github.com/hashicorp/go-hclog"
	dht "github.com/libp2p/go-libp2p-kad-dht"
	"github.com/libp2p/go-libp2p/core/host"
	"github.com/libp2p/go-libp2p/core/network"
	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/libp2p/go-libp2p/core/protocol"
	"github.com/libp2p/go-libp2p/p2p/net/swarm"
	"github.com/libp2p/go-libp2p/p2p/protocol/holepunch"
	ma "github.com/multiformats/go-multiaddr"
	"google.golang.org/grpc"
)

type protocolID = protocol.ID

// Names of the mesh's own streams.
const (
	admitName = "admit"
	grpcName  = "grpc"
	callsName = "calls"
	pingName  = "ping"
)

// Node is one daemon's, agent's or client's place in the mesh. It is safe for
// concurrent use once started.
type Node struct {
	o       Options
	id      peer.ID
	log     hclog.Logger
	network *trust.Network
	born    time.Time
	prefix  string

	host host.Host
	kad  *dht.IpfsDHT // nil when off

	sockets   *sockets
	announced []ma.Multiaddr     // in place of the listen addresses
	holes     *holepunch.Service // nil on relays

	ctx    context.Context // ends with Close
	cancel context.CancelFunc

	gate     *gate
	sessions *sessions
	admits   *counter
	refusals *limitedLog
	metrics  *metrics
	dials    *dials
	book     *book

	turnedAway refusalCount
	speedTests speedTests
	dialBacks  *dialBacks // nil when off

	rightOf func(fullMethod string) *meshv1.Right
	server  *rpc.Server // members and agents
	small   *rpc.Server // everyone else: small messages, few calls

	mu          sync.Mutex
	cred        Credential
	credentials uint64 // how often cred was set
	clients     map[peer.ID]*client
	former      []*client // whose peers are called over better connections now
	handlers    map[string]handler
	services    []string // full names
	keeping     map[peer.ID]*keeping
	bringing    map[peer.ID]struct{} // members, see bringNext
	started     bool
	closing     bool
	workers     sync.WaitGroup // guarded by closing
	sequence    uint64         // of the last card

	listening chan struct{} // closed by Start once it listens

	announceNow   chan struct{}
	spreadNow     chan struct{}
	bootstrapsNow chan struct{}
	spreading     chan struct{} // turns taken, see spread
	closeOnce     sync.Once
	closeErr      error
}

var _ grpc.ServiceRegistrar = (*Node)(nil)

// New makes a node that listens to nobody yet. Register services and handlers,
// then Start. A node that was made must be closed, started or not.
func New(ctx context.Context, o Options) (*Node, error) {
	if err := o.complete(); err != nil {
		return nil, err
	}
	id := o.Network.ID()
	n := &Node{
		o: o, id: o.Key.ID(), log: o.Log, network: o.Network, born: time.Now(),
		prefix: "/cosmicac/" + hex.EncodeToString(id[:]), cred: o.Credential,
		rightOf: rpc.RightOf, gate: newGate(), sessions: newSessions(), admits: newCounter(), refusals: newLimitedLog(), metrics: newMetrics(), dials: newDials(),
		clients: make(map[peer.ID]*client), handlers: make(map[string]handler), keeping: make(map[peer.ID]*keeping), bringing: make(map[peer.ID]struct{}),
		listening:   make(chan struct{}),
		announceNow: make(chan struct{}, 1), spreadNow: make(chan struct{}, 1), bootstrapsNow: make(chan struct{}, 1), spreading: make(chan struct{}, spreadWidth),
	}
	n.ctx, n.cancel = context.WithCancel(context.WithoutCancel(ctx))
	n.book = openBook(o.StateDirectory, n.log)
	n.server = rpc.NewServer(rpc.ServerOptions{Authorize: n.authorizeCounted, Log: n.log})
	n.small = rpc.NewServer(rpc.ServerOptions{Authorize: n.authorizeCounted, Log: n.log, MaxReceiveBytes: 64 << 10, MaxStreams: 16})
	if err := n.makeHost(); err != nil {
		n.cancel()
		n.server.Close()
		n.small.Close()
		return nil, err
	}
	// Before anything can ask for a peer: a call may be made before Start.
	err := n.makeDHT()
	if err == nil {
		err = n.makeDialBacks()
	}
	if err == nil {
		err = n.metrics.register(o.Metrics, n)
	}
	if err != nil {
		_ = n.Close(ctx)
		return nil, err
	}
	n.Handle(speedTestName, &meshv1.Right{Members: true}, n.serveSpeedTest)
	return n, nil
}

// ID is the node's key.
func (n *Node) ID() peer.ID { return n.id }

// Network is what the node holds of its network.
func (n *Node) Network() *trust.Network { return n.network }

// Addresses are where others are told to dial, with the /p2p part.
func (n *Node) Addresses() []string {
	var list []string
	for _, a := range n.host.Addrs() {
		list = append(list, a.String()+"/p2p/"+n.id.String())
	}
	return list
}

// SetCredential changes what the node shows and introduces it anew to the peers
// it is connected to (an agent that redeemed its token or renewed its
// certificate). It returns at once.
func (n *Node) SetCredential(c Credential) {
	n.mu.Lock()
	n.cred = c
	n.credentials++
	n.mu.Unlock()
	poke(n.bootstrapsNow)
	for _, s := range n.sessions.all() {
		n.spawn(func() {
			if s.wait(n.ctx) == nil {
				_ = n.introduce(n.ctx, s)
			}
		})
	}
	n.Announce()
}

func (n *Node) credential() Credential {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.cred
}

// RegisterService adds a gRPC service; before Start only.
func (n *Node) RegisterService(desc *grpc.ServiceDesc, impl any) {
	counted := n.metrics.counted(desc)
	n.server.RegisterService(counted, impl)
	n.small.RegisterService(counted, impl)
	n.mu.Lock()
	n.services = append(n.services, desc.ServiceName)
	n.mu.Unlock()
}

// Services are the full names of the registered gRPC services, sorted.
func (n *Node) Services() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Sorted(slices.Values(n.services))
}

// Peers lists every connection.
func (n *Node) Peers() []*meshv1.Peer {
	var list []*meshv1.Peer
	for _, s := range n.sessions.all() {
		list = append(list, s.describe())
	}
	slices.SortFunc(list, func(a, b *meshv1.Peer) int { return a.ConnectedAt.AsTime().Compare(b.ConnectedAt.AsTime()) })
	return list
}

// Connected tells whether p is admitted both ways and not suspect.
func (n *Node) Connected(p peer.ID) bool {
	s := n.sessions.best(p)
	return s != nil && !s.suspect.Load()
}

// Disconnect closes every connection of p; reason goes to the log.
func (n *Node) Disconnect(p peer.ID, reason string) {
	for _, s := range n.sessions.to(p) {
		n.log.Info("disconnecting", "key", p, "reason", reason)
		s.fail(fault.New(fault.Unreachable, "this node disconnected %s: %s", p, reason))
		_ = s.conn.Close()
	}
}

// Start listens, admits, dials the bootstraps and announces the node. It returns
// when the node listens; the rest goes on.
func (n *Node) Start(ctx context.Context) error {
	n.mu.Lock()
	if n.started || n.closing {
		n.mu.Unlock()
		return fault.New(fault.FailedPrecondition, "start a mesh node: it was started or closed before")
	}
	n.started = true
	n.mu.Unlock()

	// Handlers stand before the first connection can.
	n.host.SetStreamHandler(n.protocol(admitName), n.serveAdmit)
	n.host.SetStreamHandler(n.protocol(grpcName), n.serveRPC)
	n.host.SetStreamHandler(n.protocol(pingName), n.servePing)
	if !n.o.GRPCOnly {
		n.host.SetStreamHandler(n.protocol(callsName), n.serveCalls)
	}
	for _, text := range n.o.Listen {
		a, err := listenAddress(text)
		if err != nil {
			return err
		}
		if err := n.host.Network().Listen(a); err != nil {
			return fault.Wrap(fault.Unavailable, flat(err), "listen on %s", text)
		}
	}
	close(n.listening)
	n.spawn(n.watch)        // silence, expiries, lingering strangers
	n.spawn(n.followRoster) // cuts and spreads on change
	n.spawn(n.keepBootstraps)
	n.spawn(n.announceLoop)
	if n.kad != nil {
		n.spawn(n.bootstrapLoop)
	}
	if n.dialBacks != nil {
		n.spawn(n.dialBackLoop)
	}
	return n.awaitAddresses(ctx)
}

// awaitAddresses waits until the library knows its own listen addresses; it
// learns them a moment after Listen.
func (n *Node) awaitAddresses(ctx context.Context) error {
	if len(n.o.Listen) == 0 {
		return nil
	}
	deadline := time.Now().Add(2 * time.Second)
	for len(n.host.Addrs()) == 0 && time.Now().Before(deadline) {
		if !sleep(ctx, 5*time.Millisecond) {
			return ctxFault(ctx, "start", n.id)
		}
	}
	return nil
}

// Close takes the node's card back, ends every connection and waits for every
// goroutine. The context bounds the farewell only.
func (n *Node) Close(ctx context.Context) error {
	n.closeOnce.Do(func() {
		n.farewell(ctx)
		n.mu.Lock()
		n.closing = true
		clients := make([]*client, 0, len(n.clients)+len(n.former))
		for _, c := range n.clients {
			clients = append(clients, c)
		}
		clients = append(clients, n.former...)
		n.mu.Unlock()
		n.cancel()
		if n.kad != nil {
			_ = n.kad.Close()
		}
		n.dialBacks.close()
		if n.holes != nil {
			_ = n.holes.Close()
		}
		n.closeErr = n.host.Close()
		for _, c := range clients {
			c.Close()
		}
		n.server.Close()
		n.small.Close()
		n.workers.Wait()
		n.book.save()
	})
	return n.closeErr
}

// work counts one unit that Close waits for; ok is false once closing.
func (n *Node) work() (done func(), ok bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closing {
		return nil, false
	}
	n.workers.Add(1)
	return n.workers.Done, true
}

// spawn runs f on a goroutine of the node; f ends with n.ctx.
func (n *Node) spawn(f func()) {
	done, ok := n.work()
	if !ok {
		return
	}
	go func() {
		defer done()
		f()
	}()
}

func (n *Node) now() time.Time        { return n.o.Clock() }
func (n *Node) monotonic() int64      { return int64(time.Since(n.born)) }
func (n *Node) rosterVersion() uint64 { return n.network.Roster().GetVersion() }

func (n *Node) protocol(name string) protocol.ID { return protocol.ID(n.prefix + "/" + name + "/1") }

// is tells whether this node has the role, by its options or the roster.
func (n *Node) is(role meshv1.Role) bool { return n.o.Role == role || n.network.HasRole(n.id, role) }

func (n *Node) swarm() *swarm.Swarm { return n.host.Network().(*swarm.Swarm) }

// learnKey takes the daemons' shared key from a member that admitted this one.
func (n *Node) learnKey(from Caller, key []byte) {
	if len(key) == 0 || from.Class != meshv1.Class_CLASS_MEMBER || n.network.NetworkKey() != nil {
		return
	}
	if err := n.network.SetNetworkKey(key); err != nil {
		n.log.Warn("the network key was not taken", "key", from.ID, "reason", err)
		return
	}
	n.Announce()
}

// connected runs for each new connection; it must not block.
func (n *Node) connected(_ network.Network, c network.Conn) {
	s := n.sessions.begin(c, n.sockets.take(c), n.monotonic())
	if circuit, ok := c.Scope().(*watchedCircuit); ok {
		circuit.end(nil)
	}
	if s.inbound {
		return // the dialer speaks first; watch cuts the silent
	}
	s.asking.Add(1) // from the first moment, see sessions.end
	n.spawn(func() {
		_ = n.introduce(n.ctx, s)
		if s.asking.Add(-1); closed(s.gone) {
			s.failEnded()
		}
	})
}

func (n *Node) disconnected(_ network.Network, c network.Conn) { n.sessions.end(c) }

// settled runs once a session is admitted both ways.
func (n *Node) settled(s *session) {
	c, ok := s.caller()
	if !ok {
		return
	}
	n.log.Debug("peer admitted", "key", s.peer, "class", className(c.Class), "name", c.Name(), "address", s.conn.RemoteMultiaddr().String())
	if !s.inbound && !s.relayed && c.Class == meshv1.Class_CLASS_MEMBER {
		n.book.good(s.peer, s.conn.RemoteMultiaddr(), n.now())
	}
	n.gate.good(s.peer)
	poke(n.spreadNow)
	n.doubt(s)
	n.overtake(s)
	if n.network.HasRole(s.peer, meshv1.Role_ROLE_BOOTSTRAP) || n.network.HasRole(s.peer, meshv1.Role_ROLE_ORK) {
		n.Announce()
	}
}

func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// sleep waits, false when the context ended first.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

func listenAddress(text string) (ma.Multiaddr, error) {
	a, err := ma.NewMultiaddr(text)
	if err != nil {
		return nil, fault.Wrap(fault.Invalid, err, "listen address %q is no multiaddress such as /ip4/0.0.0.0/tcp/4810", text)
	}
	_, tcp := a.ValueForProtocol(ma.P_TCP)
	_, quic := a.ValueForProtocol(ma.P_QUIC_V1)
	if (tcp != nil && quic != nil) || len(a) > 3 {
		return nil, fault.New(fault.Invalid, "listen address %q: use /tcp/PORT or /udp/PORT/quic-v1", text)
	}
	return a, nil
}

// Streams counts the open streams of all connections, the library's own among
// them.
func (n *Node) Streams() int {
	count := 0
	for _, c := range n.host.Network().Conns() {
		count += len(c.GetStreams())
	}
	return count
}
