package rpc

import (
	"context"
	"errors"
	"net"
	"runtime/debug"
	"sync"
	"sync/atomic"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/hashicorp/go-hclog"
	"google.golang.org/grpc"
	"google.golang.org/grpc/peer"
)

// MaxMessageBytes bounds one message of a call, each way.
const MaxMessageBytes = 4 << 20

// Authorize decides about one call. conn is the remote address of the
// connection, as its owner made it. The returned context is the handler's.
type Authorize func(ctx context.Context, conn net.Addr, fullMethod string) (context.Context, error)

// ServerOptions sets up a Server.
type ServerOptions struct {
	// Authorize is asked before each call.
	Authorize Authorize
	// MaxReceiveBytes bounds one request message; MaxMessageBytes if 0.
	MaxReceiveBytes int
	// MaxStreams bounds the calls at a time on one connection; 512 if 0.
	MaxStreams uint32
	// Log gets a line for each handler that panics.
	Log hclog.Logger
}

// Server answers calls on connections handed to it: with Serve as gRPC, with
// ServeCalls as a stream of calls. Both reach the same handlers with the same
// authorisation and the same kinds of errors.
type Server struct {
	o     ServerOptions
	grpc  *grpc.Server
	conns *queue
	done  chan struct{}
	start sync.Once

	turns   turns
	unary   map[string]*unary // by full method; written before the first ServeCalls only
	jobs    chan *job
	stop    chan struct{}
	workers sync.WaitGroup
	idle    atomic.Int32
	streams sync.WaitGroup

	mu      sync.Mutex
	closed  bool
	serving map[*answers]struct{}
}

// NewServer makes a server. Register services before the first Serve.
func NewServer(o ServerOptions) *Server {
	if o.MaxReceiveBytes == 0 {
		o.MaxReceiveBytes = MaxMessageBytes
	}
	if o.MaxStreams == 0 {
		o.MaxStreams = 512
	}
	if o.Log == nil {
		o.Log = hclog.NewNullLogger()
	}
	s := &Server{
		o: o, conns: newQueue(), done: make(chan struct{}),
		unary: make(map[string]*unary), jobs: make(chan *job), stop: make(chan struct{}), serving: make(map[*answers]struct{}),
	}
	s.grpc = grpc.NewServer(
		grpc.MaxRecvMsgSize(o.MaxReceiveBytes),
		grpc.MaxSendMsgSize(MaxMessageBytes),
		grpc.MaxConcurrentStreams(o.MaxStreams),
		grpc.ConnectionTimeout(handshakeTimeout),
		// Thousands of agents keep a quiet stream each: little for one that waits.
		grpc.ReadBufferSize(4<<10),
		grpc.MaxHeaderListSize(16<<10),
		grpc.WaitForHandlers(true),
		grpc.UnaryInterceptor(func(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (resp any, err error) {
			ctx, end, err := s.begin(ctx, info.FullMethod, RightOf(info.FullMethod).GetAtATime())
			if err != nil {
				return nil, fault.ToGRPC(err)
			}
			defer end()
			defer o.recover(info.FullMethod, &err)
			resp, err = next(ctx, req)
			return resp, fault.ToGRPC(cutOff(ctx, info.FullMethod, err))
		}),
		grpc.StreamInterceptor(func(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) (err error) {
			ctx, end, err := s.begin(stream.Context(), info.FullMethod, RightOf(info.FullMethod).GetAtATime())
			if err != nil {
				return fault.ToGRPC(err)
			}
			defer end()
			defer o.recover(info.FullMethod, &err)
			return fault.ToGRPC(cutOff(ctx, info.FullMethod, next(srv, &serverStream{stream, ctx})))
		}),
	)
	return s
}

// begin authorises a call and counts it, if its method bounds how many one caller may
// have at a time; end when it is over.
func (s *Server) begin(ctx context.Context, fullMethod string, most uint32) (_ context.Context, end func(), err error) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return nil, nil, fault.New(fault.Denied, "call %s: the caller is not known", fullMethod)
	}
	if ctx, err = s.o.Authorize(ctx, p.Addr, fullMethod); err != nil {
		return nil, nil, err
	}
	if most > 0 {
		end, err = s.turns.take(p.Addr.String(), fullMethod, most)
		return ctx, end, err
	}
	return ctx, noTurn, nil
}

// cutOff is what a call is told whose handler gave up because its own context
// ended: a caller that did not end it itself may still hear, when it is the
// connection that goes, and must not read that it canceled.
func cutOff(ctx context.Context, fullMethod string, err error) error {
	if ctx.Err() == nil || !fault.Is(err, fault.Canceled) {
		return err
	}
	return fault.New(fault.Unreachable, "call %s: the connection ended beneath it", fullMethod)
}

// recover keeps one broken handler from ending the daemon, and says so.
func (o *ServerOptions) recover(fullMethod string, err *error) {
	if r := recover(); r != nil {
		o.Log.Error("a handler panicked", "method", fullMethod, "panic", r, "stack", string(debug.Stack()))
		*err = fault.ToGRPC(fault.New(fault.Internal, "the handler of %s broke", fullMethod))
	}
}

// RegisterService adds a service; before the first Serve and ServeCalls only.
func (s *Server) RegisterService(desc *grpc.ServiceDesc, impl any) {
	s.grpc.RegisterService(desc, impl)
	for _, m := range desc.Methods {
		name := "/" + desc.ServiceName + "/" + m.MethodName
		s.unary[name] = &unary{name: name, impl: impl, handle: m.Handler, most: RightOf(name).GetAtATime()}
	}
}

// Serve answers calls on c until it ends; it returns at once.
func (s *Server) Serve(c net.Conn) error {
	s.start.Do(func() {
		go func() {
			defer close(s.done)
			_ = s.grpc.Serve(s.conns) // ends with the queue
		}()
	})
	return s.conns.put(c)
}

// Close ends every connection and waits for the handlers.
func (s *Server) Close() {
	s.start.Do(func() { close(s.done) })
	s.conns.Close()
	s.mu.Lock()
	first := !s.closed
	s.closed = true
	for a := range s.serving {
		a.out.end()
		_ = a.conn.Close()
	}
	s.mu.Unlock()
	s.grpc.Stop()
	<-s.done
	s.streams.Wait()
	if first {
		close(s.stop)
	}
	s.workers.Wait()
}

type serverStream struct {
	grpc.ServerStream
	ctx context.Context
}

func (s *serverStream) Context() context.Context { return s.ctx }

// queue is a net.Listener whose connections are put into it.
type queue struct {
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func newQueue() *queue { return &queue{conns: make(chan net.Conn), closed: make(chan struct{})} }

var errClosed = errors.New("the server is closed")

func (q *queue) put(c net.Conn) error {
	select {
	case q.conns <- c:
		return nil
	case <-q.closed:
		_ = c.Close()
		return errClosed
	}
}

func (q *queue) Accept() (net.Conn, error) {
	select {
	case c := <-q.conns:
		return c, nil
	case <-q.closed:
		return nil, net.ErrClosed
	}
}

func (q *queue) Close() error {
	q.once.Do(func() { close(q.closed) })
	return nil
}

func (q *queue) Addr() net.Addr { return queueAddr{} }

type queueAddr struct{}

func (queueAddr) Network() string { return "mesh" }
func (queueAddr) String() string  { return "mesh" }
