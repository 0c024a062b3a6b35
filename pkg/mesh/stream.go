package mesh

import (
	"context"
	"errors"
	"io"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/mesh/rpc"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	"github.com/libp2p/go-libp2p/core/network"
	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/multiformats/go-multistream"
	"google.golang.org/grpc"
)

const (
	// chunk is the most that one write of bulk puts on a connection before others
	// get their turn.
	chunk = 64 << 10
	// linksPerSession and streamsPerSession bound one connection's streams.
	linksPerSession   = 8
	streamsPerSession = 256
	streamsPerClient  = 64
)

// Stream is a byte stream with an admitted peer. Writes are paced so that calls
// on the same connection are not starved. Close ends both ways; a peer's refusal
// shows as kind denied on the first Read.
type Stream struct {
	net.Conn
	caller Caller
}

// Caller is who opened the stream.
func (s *Stream) Caller() Caller { return s.caller }

// CloseWrite ends this side's bytes; the peer reads to their end. On a stream of
// this node to itself it closes both ways.
func (s *Stream) CloseWrite() error { return closeWrite(s.Conn) }

// Reset breaks the stream: the peer sees an error, not an end.
func (s *Stream) Reset() error {
	if w, ok := s.Conn.(*wire); ok {
		return w.Reset()
	}
	return s.Conn.Close()
}

func closeWrite(c net.Conn) error {
	if h, ok := c.(interface{ CloseWrite() error }); ok {
		return h.CloseWrite()
	}
	return c.Close()
}

type handler struct {
	right *meshv1.Right
	serve func(context.Context, *Stream)
}

// Handle answers streams of a name for callers whom the right covers; before
// Start only. The stream is closed when h returns; its context ends with the
// node and with the connection.
func (n *Node) Handle(name string, right *meshv1.Right, h func(ctx context.Context, s *Stream)) {
	n.mu.Lock()
	n.handlers[name] = handler{right, h}
	n.mu.Unlock()
	n.host.SetStreamHandler(n.protocol(name), func(stream network.Stream) { n.serveStream(stream, handler{right, h}) })
}

func (n *Node) serveStream(stream network.Stream, h handler) {
	s, caller, done, ok := n.accept(stream)
	if !ok {
		return
	}
	defer done()
	if !caller.allows(h.right) {
		n.log.Debug("stream refused", "protocol", stream.Protocol(), "key", caller.ID, "class", className(caller.Class))
		_ = stream.ResetWithError(network.StreamGated)
		return
	}
	limit := int32(streamsPerSession)
	if caller.Class == meshv1.Class_CLASS_CLIENT {
		limit = streamsPerClient
	}
	w := n.wire(stream, s, true)
	if s.streams.Load() > limit {
		_ = w.fail(network.StreamResourceLimitExceeded)
		return
	}
	defer w.Close()
	ctx, cancel := context.WithCancel(WithCaller(n.ctx, caller))
	var following sync.WaitGroup
	defer following.Wait()
	defer cancel()
	following.Go(func() {
		select {
		case <-s.gone:
			cancel()
		case <-ctx.Done():
		}
	})
	h.serve(ctx, &Stream{Conn: w, caller: caller})
}

// accept finds who opened a stream, waiting for a dialogue that still runs.
func (n *Node) accept(stream network.Stream) (s *session, c Caller, done func(), ok bool) {
	done, ok = n.work()
	if !ok {
		_ = stream.ResetWithError(network.StreamShutdown)
		return nil, Caller{}, nil, false
	}
	if s = n.sessions.get(stream.Conn()); s != nil {
		s.heard.Store(n.monotonic())
		if c, ok = s.admitted(admitLimit); ok {
			return s, c, done, true
		}
	}
	done()
	_ = stream.ResetWithError(network.StreamGated)
	return nil, Caller{}, nil, false
}

// serveRPC hands a gRPC stream to the server of the caller's class.
func (n *Node) serveRPC(stream network.Stream) {
	s, caller, done, ok := n.accept(stream)
	if !ok {
		return
	}
	defer done()
	w, ok := n.link(stream, s)
	if !ok {
		return
	}
	server := n.small
	if caller.Class == meshv1.Class_CLASS_MEMBER || caller.Class == meshv1.Class_CLASS_AGENT {
		server = n.server
	}
	_ = server.Serve(w)
}

// serveCalls answers a stream of calls. Members and agents alone have one: what
// others may call is little, and gRPC's own bounds hold them.
func (n *Node) serveCalls(stream network.Stream) {
	s, caller, done, ok := n.accept(stream)
	if !ok {
		return
	}
	defer done()
	if caller.Class != meshv1.Class_CLASS_MEMBER && caller.Class != meshv1.Class_CLASS_AGENT {
		_ = stream.ResetWithError(network.StreamGated)
		return
	}
	w, ok := n.link(stream, s)
	if !ok {
		return
	}
	defer w.Close()
	n.server.ServeCalls(w)
}

// link counts a stream that carries calls; ok is false, and the stream reset, when
// the connection has too many.
func (n *Node) link(stream network.Stream, s *session) (w *wire, ok bool) {
	w = n.wire(stream, s, false)
	if s.calls.Add(1) > linksPerSession {
		s.calls.Add(-1)
		_ = w.fail(network.StreamResourceLimitExceeded)
		return nil, false
	}
	w.ended = func() { s.calls.Add(-1) }
	return w, true
}

// Client returns the calls to a peer. It dials when needed: given addresses,
// address book, last good on disk, DHT, cards, relays. All callers of one peer
// share one stream of calls (unary, requests up to 64 KiB) and one of gRPC (all
// else); their order against each other is open. Its errors are of pkg/fault: unreachable, denied, timeout, or
// what the peer's handler said. A call to this node itself stays in process.
func (n *Node) Client(p peer.ID, addrs ...string) grpc.ClientConnInterface {
	n.learn(p, addrs)
	return calls{n, p}
}

// calls are the calls to one peer. It looks the client up each time, so that
// clients of peers long gone can be forgotten.
type calls struct {
	n *Node
	p peer.ID
}

func (c calls) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	for {
		client, ok := c.n.client(c.p)
		err := client.Invoke(ctx, method, args, reply, opts...)
		client.calls.Add(-1)
		if !errors.Is(err, rpc.ErrClosed) || !ok {
			c.n.metrics.called(method, err)
			return err
		}
	}
}

func (c calls) NewStream(ctx context.Context, desc *grpc.StreamDesc, method string, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	for {
		client, ok := c.n.client(c.p)
		s, err := client.NewStream(ctx, desc, method, opts...)
		if err == nil {
			context.AfterFunc(s.Context(), func() { client.calls.Add(-1) })
		} else {
			client.calls.Add(-1)
		}
		if !errors.Is(err, rpc.ErrClosed) || !ok {
			c.n.metrics.called(method, err)
			return s, err
		}
	}
}

// client makes the calls to one peer.
type client struct {
	*rpc.Client
	calls atomic.Int32 // that run
}

// client returns the client of a peer, with one call counted; ok is false when the
// node is closing, the client then refuses.
func (n *Node) client(p peer.ID) (c *client, ok bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closing {
		c = &client{Client: rpc.NewClient(p.String(), nil, nil)}
		c.Close()
		return c, false
	}
	if c = n.clients[p]; c == nil {
		c = &client{Client: rpc.NewClient(p.String(),
			func(ctx context.Context) (net.Conn, error) { return n.openRPC(ctx, p) },
			func(ctx context.Context) (net.Conn, error) { return n.openCalls(ctx, p) })}
		n.clients[p] = c
	}
	c.calls.Add(1)
	return c, true
}

// restClients ends the streams of calls that were idle since it ran last.
func (n *Node) restClients() {
	n.mu.Lock()
	clients := slices.Collect(maps.Values(n.clients))
	n.mu.Unlock()
	for _, c := range clients {
		c.Rest()
	}
}

// forgetClients drops the clients of peers that are not connected.
func (n *Node) forgetClients() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for p, c := range n.clients {
		if n.keeping[p] == nil && len(n.sessions.to(p)) == 0 && c.Retire() {
			delete(n.clients, p)
		}
	}
}

func (n *Node) openRPC(ctx context.Context, p peer.ID) (net.Conn, error) {
	if p == n.id {
		near, far := net.Pipe()
		if err := n.server.Serve(&selfConn{far, &addr{id: n.id, self: true}}); err != nil {
			return nil, fault.Wrap(fault.Unavailable, err, "call this node itself")
		}
		return near, nil
	}
	return n.openLink(ctx, p, grpcName)
}

// openCalls opens the stream of calls; kind unsupported says that calls to p take
// gRPC: the peer is of an older version, or has no such stream for this node.
func (n *Node) openCalls(ctx context.Context, p peer.ID) (net.Conn, error) {
	own := n.credential()
	if n.o.GRPCOnly || (own.kind != showsRoster && own.kind != showsCertificate) || own.tokenFor(p) != "" {
		return nil, fault.New(fault.Unsupported, "this node opens no streams of calls")
	}
	if p == n.id {
		near, far := net.Pipe()
		n.spawn(func() { n.server.ServeCalls(&selfConn{far, &addr{id: n.id, self: true}}) })
		return near, nil
	}
	return n.openLink(ctx, p, callsName)
}

func (n *Node) openLink(ctx context.Context, p peer.ID, name string) (net.Conn, error) {
	s, err := n.connect(ctx, p)
	if err != nil {
		return nil, err
	}
	stream, err := n.open(ctx, s, name)
	if err != nil {
		return nil, err
	}
	w := n.wire(stream, s, false)
	s.calls.Add(1)
	s.watched.Add(1)
	w.ended = func() {
		s.calls.Add(-1)
		s.watched.Add(-1)
	}
	return w, nil
}

// OpenStream opens a byte stream of a name to a peer, dialing as Client does. It
// returns once the peer speaks the protocol; whether it takes the stream shows
// with the first byte read.
func (n *Node) OpenStream(ctx context.Context, p peer.ID, name string, addrs ...string) (net.Conn, error) {
	if p == n.id {
		return n.openSelf(name)
	}
	n.learn(p, addrs)
	s, err := n.connect(ctx, p)
	if err != nil {
		return nil, err
	}
	stream, err := n.open(ctx, s, name)
	if err != nil {
		return nil, err
	}
	return n.wire(stream, s, true), nil
}

func (n *Node) openSelf(name string) (net.Conn, error) {
	n.mu.Lock()
	h, ok := n.handlers[name]
	n.mu.Unlock()
	caller := n.self()
	switch {
	case !ok:
		return nil, fault.New(fault.Unsupported, "open %s to this node itself: it serves no such stream", name)
	case !caller.allows(h.right):
		return nil, fault.New(fault.Denied, "open %s to this node itself: its class has no right to it", name)
	}
	near, far := net.Pipe()
	n.spawn(func() {
		defer far.Close()
		ctx, cancel := context.WithCancel(WithCaller(n.ctx, caller))
		defer cancel()
		stop := context.AfterFunc(ctx, func() { _ = far.Close() })
		defer stop()
		h.serve(ctx, &Stream{Conn: &selfConn{far, &addr{id: n.id, self: true}}, caller: caller})
	})
	return near, nil
}

// selfConn is a connection of the node to itself.
type selfConn struct {
	net.Conn
	remote net.Addr
}

func (c *selfConn) RemoteAddr() net.Addr { return c.remote }

// open opens a stream of a name on a session.
func (n *Node) open(ctx context.Context, s *session, name string) (network.Stream, error) {
	stream, err := n.negotiate(ctx, s, n.protocol(name))
	if err == nil {
		return stream, nil
	}
	var unsupported multistream.ErrNotSupported[protocolID]
	switch {
	case errors.As(err, &unsupported):
		return nil, fault.New(fault.Unsupported, "open %s to %s: it serves no such stream", name, s.peer)
	case ctx.Err() != nil:
		return nil, ctxFault(ctx, "open "+name+" to", s.peer)
	}
	if kind, ok := resetKind(err); ok {
		return nil, fault.Wrap(kind, flat(err), "open %s to %s", name, s.peer)
	}
	return nil, fault.Wrap(fault.Unreachable, flat(err), "open %s to %s", name, s.peer)
}

// negotiate opens a stream on this very connection and settles its protocol: the
// host's own NewStream could take another connection, not admitted yet, and does
// not notice a refusal before the first read.
func (n *Node) negotiate(ctx context.Context, s *session, proto protocolID) (network.Stream, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	stream, err := s.conn.NewStream(network.WithAllowLimitedConn(ctx, "mesh"))
	if err != nil {
		return nil, err
	}
	if err := stream.SetProtocol(proto); err != nil {
		_ = stream.Reset()
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = stream.Reset() })
	err = multistream.SelectProtoOrFail(proto, stream)
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		_ = stream.Reset()
		return nil, err
	}
	s.heard.Store(n.monotonic())
	return stream, nil
}

// wire is a libp2p stream as a net.Conn.
type wire struct {
	network.Stream
	n       *Node
	session *session
	bulk    bool
	paced   bool
	once    sync.Once
	done    atomic.Bool
	closed  chan struct{} // of bulk
	writing atomic.Int32
	ended   func()
}

func (n *Node) wire(stream network.Stream, s *session, bulk bool) *wire {
	s.streams.Add(1)
	w := &wire{Stream: stream, n: n, session: s, bulk: bulk}
	if bulk {
		w.paced, w.closed = s.transport() == "tcp", make(chan struct{})
	}
	return w
}

func (w *wire) LocalAddr() net.Addr  { return &addr{id: w.n.id} }
func (w *wire) RemoteAddr() net.Addr { return &addr{id: w.session.peer, session: w.session} }

// Ready holds new calls back from a peer that fell silent.
func (w *wire) Ready(ctx context.Context) error {
	if !w.session.suspect.Load() {
		return nil
	}
	if s := w.n.sessions.best(w.session.peer); w.session.suspect.Load() && s != nil && s != w.session && !s.suspect.Load() {
		return net.ErrClosed // a better connection stands: take that
	}
	_, err := w.n.unsuspected(ctx, w.session)
	return err
}

func (w *wire) Read(b []byte) (int, error) {
	k, err := w.Stream.Read(b)
	if k > 0 {
		w.session.heard.Store(w.n.monotonic())
	}
	return k, w.classify(err)
}

func (w *wire) Write(b []byte) (int, error) {
	w.writing.Add(1)
	defer w.writing.Add(-1)
	if !w.bulk {
		k, err := w.Stream.Write(b)
		return k, w.classify(err)
	}
	var sent int
	for len(b) > 0 {
		part := b[:min(chunk, len(b))]
		if w.paced {
			w.session.pace.enter(w.n, w.session, int64(len(part)), w.closed)
		}
		k, err := w.Stream.Write(part)
		sent += k
		if err != nil {
			return sent, w.classify(err)
		}
		b = b[k:]
	}
	return sent, nil
}

func (w *wire) finish() {
	w.once.Do(func() {
		w.done.Store(true)
		w.session.streams.Add(-1)
		if w.closed != nil {
			close(w.closed)
		}
		if w.ended != nil {
			w.ended()
		}
	})
}

// Close ends both ways. Errors of a peer that closed first are not errors. A Write
// that waits for the peer is cut short, and the peer sees that: a QUIC stream's own
// Close would leave it waiting, and a plain end would look whole.
func (w *wire) Close() error {
	w.finish()
	if w.writing.Load() > 0 {
		_ = w.Stream.Reset()
		return nil
	}
	_ = w.Stream.Close()
	return nil
}

// Reset breaks the stream.
func (w *wire) Reset() error {
	w.finish()
	return w.Stream.Reset()
}

func (w *wire) fail(code network.StreamErrorCode) error {
	w.finish()
	return w.Stream.ResetWithError(code)
}

// classify keeps io.EOF and time-outs as net.Conn's users expect them and names
// the rest.
func (w *wire) classify(err error) error {
	if err == nil || err == io.EOF {
		return err
	}
	if kind, ok := resetKind(err); ok {
		return fault.Wrap(kind, flat(err), "%s refused the stream", w.session.peer)
	}
	if cut := new(network.ConnError); errors.As(err, &cut) && cut.Remote && cut.ErrorCode == network.ConnGated {
		return fault.New(fault.Denied, "%s cut this key off: it is no longer a member, or its certificate or grant has ended or was revoked", w.session.peer)
	}
	if ended := w.session.ending(); !w.done.Load() && (ended != nil || w.session.conn.IsClosed()) {
		// However its end shows here: QUIC's looks like a deadline or a closed stream.
		if ended != nil {
			err = ended
		}
		return fault.Wrap(fault.Unreachable, flat(err), "the stream with %s broke", w.session.peer)
	}
	var timeout net.Error
	if errors.As(err, &timeout) && timeout.Timeout() {
		return err
	}
	if strings.Contains(err.Error(), "closed stream") || errors.Is(err, net.ErrClosed) {
		return net.ErrClosed
	}
	return fault.Wrap(fault.Unreachable, flat(err), "the stream with %s broke", w.session.peer)
}

// resetKind reads the reason that a peer gave for resetting a stream.
func resetKind(err error) (fault.Kind, bool) {
	var reset *network.StreamError
	if !errors.As(err, &reset) || !reset.Remote {
		return "", false
	}
	switch reset.ErrorCode {
	case network.StreamGated:
		return fault.Denied, true
	case network.StreamResourceLimitExceeded, network.StreamRateLimited:
		return fault.Exhausted, true
	case network.StreamShutdown:
		return fault.Unavailable, true
	}
	return "", false
}
