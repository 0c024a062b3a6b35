package rpc

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// DefaultDeadline is the deadline of a unary call whose context has none.
const DefaultDeadline = 30 * time.Second

const handshakeTimeout = 10 * time.Second

// Open makes the one connection that a client's calls share. Its errors reach
// the caller as they are. A connection with a method Ready(context.Context) error
// is asked before each call that is to use it: its error ends the call, except
// net.ErrClosed, which asks for a new connection.
type Open func(ctx context.Context) (net.Conn, error)

// Client is a grpc.ClientConnInterface over connections from Open. It makes one
// with the first call and a new one after the old one ended.
type Client struct {
	peer string // for error text
	open Open

	mu      sync.Mutex
	link    *link
	opening *opening
	closed  bool
	running sync.WaitGroup // attempts, and the end of dead connections
}

// ErrClosed ends calls of a client that was closed or retired.
var ErrClosed error = fault.New(fault.Unreachable, "this node is closing")

// Retire closes the client if it has no connection and makes none.
func (c *Client) Retire() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.link != nil || c.opening != nil {
		return false
	}
	c.closed = true
	return true
}

// opening is one attempt to open a connection, shared by all who wait for it.
type opening struct {
	done chan struct{}
	link *link
	err  error
}

// NewClient makes a client; peer names the other side in errors.
func NewClient(peer string, open Open) *Client { return &Client{peer: peer, open: open} }

// Close ends the connection; calls in flight end with kind unreachable. It
// waits for an attempt to connect that is under way, so end what Open waits for
// before.
func (c *Client) Close() {
	c.mu.Lock()
	c.closed = true
	l := c.link
	c.link = nil
	c.mu.Unlock()
	if l != nil {
		l.close()
	}
	c.running.Wait()
}

// drop forgets a connection that ended. It runs on the connection's own
// goroutine, which closing the channel may wait for, hence the detour.
func (c *Client) drop(l *link) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.link == l {
		c.link = nil
	}
	if c.closed {
		return // Close or attempt sees to it
	}
	c.running.Add(1)
	go func() {
		defer c.running.Done()
		l.close()
	}()
}

// Invoke makes one unary call.
func (c *Client) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, DefaultDeadline)
		defer cancel()
	}
	l, err := c.get(ctx)
	if err != nil {
		return err
	}
	if err := l.grpc.Invoke(forwardTrace(ctx), method, args, reply, opts...); err != nil {
		return c.classify(ctx, l, method, err)
	}
	return nil
}

// NewStream opens one streaming call.
func (c *Client) NewStream(ctx context.Context, desc *grpc.StreamDesc, method string, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	l, err := c.get(ctx)
	if err != nil {
		return nil, err
	}
	s, err := l.grpc.NewStream(forwardTrace(ctx), desc, method, opts...)
	if err != nil {
		return nil, c.classify(ctx, l, method, err)
	}
	return &clientStream{ClientStream: s, client: c, link: l, method: method}, nil
}

// get returns the live connection or makes one. Callers share one attempt; each
// gives up by its own context, the attempt goes on for the others.
func (c *Client) get(ctx context.Context) (*link, error) {
	c.mu.Lock()
	for !c.closed && c.link != nil && !c.link.dead() {
		l := c.link
		c.mu.Unlock()
		ready, ok := l.conn.Conn.(interface{ Ready(context.Context) error })
		if !ok {
			return l, nil
		}
		if err := ready.Ready(ctx); err == nil {
			return l, nil
		} else if !errors.Is(err, net.ErrClosed) {
			return nil, err
		}
		l.conn.end() // forgets it, a new one is made below
		c.mu.Lock()
	}
	if c.closed {
		c.mu.Unlock()
		return nil, ErrClosed
	}
	o := c.opening
	if o == nil {
		o = &opening{done: make(chan struct{})}
		c.opening = o
		c.running.Add(1)
		// The attempt must outlive this caller's cancellation: others may share it.
		go c.attempt(context.WithoutCancel(ctx), o)
	}
	c.mu.Unlock()
	select {
	case <-o.done:
		return o.link, o.err
	case <-ctx.Done():
		return nil, c.gaveUp(ctx)
	}
}

func (c *Client) gaveUp(ctx context.Context) error {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		// Nothing was sent, so this is more than a missing answer.
		return fault.New(fault.Unreachable, "connect to %s: no connection when the deadline came", c.peer)
	}
	return fault.Wrap(fault.Canceled, ctx.Err(), "connect to %s", c.peer)
}

func (c *Client) attempt(ctx context.Context, o *opening) {
	defer c.running.Done()
	conn, err := c.open(ctx)
	var l *link
	if err == nil {
		l, err = newLink(conn, c.drop)
	}
	c.mu.Lock()
	c.opening = nil
	if err == nil && c.closed {
		err = ErrClosed
	}
	old := c.link
	if err == nil {
		c.link = l
	} else {
		c.link = nil
	}
	c.mu.Unlock()
	if old != nil {
		old.close()
	}
	if err != nil {
		if l != nil {
			l.close()
		}
		o.err = err
	} else {
		o.link = l
	}
	close(o.done)
}

// classify turns what gRPC says into a fault. A status that the other side's
// handler sent carries its kind; one that gRPC itself made does not.
func (c *Client) classify(ctx context.Context, l *link, method string, err error) error {
	st, ok := status.FromError(err)
	if !ok || len(st.Details()) > 0 {
		return fault.FromGRPC(err)
	}
	switch st.Code() {
	case codes.Unavailable:
		return fault.New(fault.Unreachable, "call %s on %s: the connection broke: %s", method, c.peer, st.Message())
	case codes.Canceled:
		if ctx.Err() == nil && l.dead() {
			return fault.New(fault.Unreachable, "call %s on %s: the connection broke", method, c.peer)
		}
		return fault.New(fault.Canceled, "call %s on %s: canceled", method, c.peer)
	case codes.DeadlineExceeded:
		return fault.New(fault.Timeout, "call %s on %s: no answer in time", method, c.peer)
	}
	return fault.FromGRPC(err)
}

// link is one connection and the gRPC channel inside it.
type link struct {
	grpc *grpc.ClientConn
	conn *watchedConn
	once sync.Once
}

func newLink(conn net.Conn, drop func(*link)) (*link, error) {
	l := &link{}
	w := &watchedConn{Conn: conn, ended: make(chan struct{}), dropped: func() { drop(l) }}
	handed := make(chan net.Conn, 1)
	handed <- w
	cc, err := grpc.NewClient("passthrough:///mesh",
		grpc.WithTransportCredentials(insecure.NewCredentials()), // the stream below is encrypted and proven
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) {
			select {
			case c := <-handed:
				return c, nil
			default:
				return nil, errors.New("the connection ended") // a new one is a new link
			}
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(MaxMessageBytes), grpc.MaxCallSendMsgSize(MaxMessageBytes)),
		grpc.WithDisableServiceConfig(), grpc.WithDisableRetry(), grpc.WithIdleTimeout(0),
	)
	if err != nil {
		_ = conn.Close()
		return nil, fault.Wrap(fault.Internal, err, "make a channel")
	}
	l.grpc, l.conn = cc, w
	cc.Connect()
	return l, nil
}

func (l *link) dead() bool {
	select {
	case <-l.conn.ended:
		return true
	default:
		return false
	}
}

func (l *link) close() {
	l.once.Do(func() {
		_ = l.grpc.Close()
		_ = l.conn.Close() // in case the channel never took it
	})
}

// watchedConn tells when its connection ended.
type watchedConn struct {
	net.Conn
	once    sync.Once
	ended   chan struct{}
	dropped func()
}

func (w *watchedConn) end() {
	w.once.Do(func() {
		close(w.ended)
		w.dropped()
	})
}

func (w *watchedConn) Read(b []byte) (int, error) {
	n, err := w.Conn.Read(b)
	if err != nil {
		w.end()
	}
	return n, err
}

func (w *watchedConn) Write(b []byte) (int, error) {
	n, err := w.Conn.Write(b)
	if err != nil {
		w.end()
	}
	return n, err
}

func (w *watchedConn) Close() error {
	w.end()
	return w.Conn.Close()
}

type clientStream struct {
	grpc.ClientStream
	client *Client
	link   *link
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
	return s.client.classify(s.Context(), s.link, s.method, err)
}

// forwardTrace passes the W3C trace of an incoming call on to the calls it makes.
func forwardTrace(ctx context.Context) context.Context {
	in, _ := metadata.FromIncomingContext(ctx)
	trace := in.Get("traceparent")
	if len(trace) != 1 || len(trace[0]) > 64 {
		return ctx
	}
	if out, ok := metadata.FromOutgoingContext(ctx); ok && len(out.Get("traceparent")) > 0 {
		return ctx
	}
	return metadata.AppendToOutgoingContext(ctx, "traceparent", trace[0])
}
