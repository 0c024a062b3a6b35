package rpc

import (
	"context"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

const (
	// DefaultDeadline is the deadline of a unary call whose context has none.
	DefaultDeadline = 30 * time.Second

	handshakeTimeout = 10 * time.Second
	// slowPeriod is how long a peer that does not serve the stream of calls is
	// taken to stay so; it may be of an older version and upgraded meanwhile.
	slowPeriod = time.Minute
)

// Open makes the one connection that a client's calls share. Its errors reach
// the caller as they are. A connection with a method Ready(context.Context) error
// is asked before each call that is to use it: its error ends the call, except
// net.ErrClosed, which asks for a new connection.
type Open func(ctx context.Context) (net.Conn, error)

// Client is a grpc.ClientConnInterface over connections from two Opens: the
// stream of calls for unary calls with requests up to FastBytes, gRPC for all
// else. It makes each with the first call that needs it and a new one after the
// old one ended.
type Client struct {
	peer string // for error text

	mu      sync.Mutex
	running sync.WaitGroup
	grpc    slot[*channel]
	fast    slot[*callLink]
	slow    atomic.Int64 // until when the peer does not serve the stream of calls, Unix nanoseconds
}

// ErrClosed ends calls of a client that was closed or retired.
var ErrClosed error = fault.New(fault.Unreachable, "this node is closing")

// NewClient makes a client; peer names the other side in errors. openCalls makes
// the stream of calls; when it fails with kind unsupported the calls take gRPC,
// nil does the same.
func NewClient(peer string, openGRPC, openCalls Open) *Client {
	c := &Client{peer: peer}
	c.grpc = slot[*channel]{peer: peer, mu: &c.mu, running: &c.running, dial: func(ctx context.Context) (*channel, error) {
		conn, err := openGRPC(ctx)
		if err != nil {
			return nil, err
		}
		return newChannel(conn, c.grpc.drop)
	}}
	c.fast = slot[*callLink]{peer: peer, mu: &c.mu, running: &c.running, dial: func(ctx context.Context) (*callLink, error) {
		conn, err := openCalls(ctx)
		if err != nil {
			return nil, err
		}
		return newCallLink(conn, c.fast.drop), nil
	}}
	if openCalls == nil {
		c.slow.Store(1<<63 - 1)
	}
	return c
}

// Close ends the connections; calls in flight end with kind unreachable. It
// waits for an attempt to connect that is under way, so end what Open waits for
// before.
func (c *Client) Close() {
	c.mu.Lock()
	g, f := c.grpc.shut(), c.fast.shut()
	c.mu.Unlock()
	if g != nil {
		g.close()
	}
	if f != nil {
		f.close()
	}
	c.running.Wait()
}

// Retire closes the client if it has no connection and makes none.
func (c *Client) Retire() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.grpc.idle() || !c.fast.idle() {
		return false
	}
	c.grpc.closed, c.fast.closed = true, true
	return true
}

// Rest ends the connections on which no call ran since Rest was last called: an idle
// one costs some 40 KB at each end, and a new one a round trip.
func (c *Client) Rest() {
	c.grpc.rest()
	c.fast.rest()
}

// Invoke makes one unary call.
func (c *Client) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, DefaultDeadline)
		defer cancel()
	}
	ctx = forwardTrace(ctx)
	if slow := c.slow.Load(); slow == 0 || time.Now().UnixNano() >= slow {
		if taken, err := c.invokeFast(ctx, method, args, reply, opts); taken {
			return err
		}
	}
	l, err := c.channel(ctx)
	if err != nil {
		return err
	}
	defer l.finish()
	if err := l.grpc.Invoke(ctx, method, args, reply, opts...); err != nil {
		return c.classify(ctx, method, err)
	}
	return nil
}

// invokeFast makes a call on the stream of calls; taken is false when the peer
// serves none, or the call is not one for it. A call that was not sent because the
// link had just ended is tried once on a new one.
func (c *Client) invokeFast(ctx context.Context, method string, args, reply any, opts []grpc.CallOption) (taken bool, err error) {
	q := callPool.Get().(*call)
	defer q.free()
	if !q.set(ctx, method, args, reply, opts) {
		return false, nil
	}
	q.peer = c.peer
	for again := true; ; {
		l, err := c.fast.get(ctx)
		if fault.Is(err, fault.Unsupported) {
			c.slow.Store(time.Now().Add(slowPeriod).UnixNano())
			return false, nil
		}
		if err != nil {
			return true, err
		}
		sent, err := l.invoke(ctx, q)
		if err == errRested {
			continue
		}
		if !sent && again && !q.lost && ctx.Err() == nil && l.dead() {
			again = false
			continue
		}
		return true, err
	}
}

// channel returns the channel with one call counted.
func (c *Client) channel(ctx context.Context) (*channel, error) {
	for {
		l, err := c.grpc.get(ctx)
		if err != nil || l.begin() {
			return l, err
		}
		l.abandon() // it went to rest just now
	}
}

// NewStream opens one streaming call.
func (c *Client) NewStream(ctx context.Context, desc *grpc.StreamDesc, method string, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	l, err := c.channel(ctx)
	if err != nil {
		return nil, err
	}
	s, err := l.grpc.NewStream(forwardTrace(ctx), desc, method, opts...)
	if err != nil {
		l.finish()
		return nil, c.classify(ctx, method, err)
	}
	context.AfterFunc(s.Context(), l.finish)
	return &clientStream{ClientStream: s, ctx: ctx, client: c, method: method}, nil
}

// classify turns what gRPC says into a fault. A status that the other side's
// handler sent carries its kind; one that gRPC itself made does not. ctx is the
// caller's: the one of a stream ends with the stream.
func (c *Client) classify(ctx context.Context, method string, err error) error {
	st, ok := status.FromError(err)
	if !ok || len(st.Details()) > 0 {
		return fault.FromGRPC(err)
	}
	switch st.Code() {
	case codes.Unavailable:
		return fault.New(fault.Unreachable, "call %s on %s: the connection broke: %s", method, c.peer, st.Message())
	case codes.Canceled:
		// Of the caller's doing only if its own context ended.
		if ctx.Err() == nil {
			return fault.New(fault.Unreachable, "call %s on %s: the connection broke", method, c.peer)
		}
		return fault.New(fault.Canceled, "call %s on %s: canceled", method, c.peer)
	case codes.DeadlineExceeded:
		return fault.New(fault.Timeout, "call %s on %s: no answer in time", method, c.peer)
	}
	return fault.FromGRPC(err)
}

type clientStream struct {
	grpc.ClientStream
	ctx    context.Context // the caller's
	client *Client
	method string
}

func (s *clientStream) Header() (metadata.MD, error) {
	md, err := s.ClientStream.Header()
	return md, s.fix(err)
}
func (s *clientStream) SendMsg(m any) error { return s.fix(s.ClientStream.SendMsg(m)) }
func (s *clientStream) RecvMsg(m any) error { return s.fix(s.ClientStream.RecvMsg(m)) }
func (s *clientStream) CloseSend() error    { return s.fix(s.ClientStream.CloseSend()) }

func (s *clientStream) fix(err error) error {
	if err == nil || err == io.EOF {
		return err
	}
	return s.client.classify(s.ctx, s.method, err)
}

// forwardTrace passes the W3C trace of an incoming call on to the calls it makes.
func forwardTrace(ctx context.Context) context.Context {
	trace := metadata.ValueFromIncomingContext(ctx, "traceparent")
	if len(trace) != 1 || len(trace[0]) > 64 {
		return ctx
	}
	if out, ok := metadata.FromOutgoingContext(ctx); ok && len(out.Get("traceparent")) > 0 {
		return ctx
	}
	return metadata.AppendToOutgoingContext(ctx, "traceparent", trace[0])
}
