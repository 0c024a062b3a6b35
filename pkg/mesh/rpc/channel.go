package rpc

import (
	"context"
	"errors"
	"net"
	"sync"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// channel is one connection and the gRPC channel inside it.
type channel struct {
	grpc *grpc.ClientConn
	conn *watchedConn
	once sync.Once

	mu      sync.Mutex
	running int    // calls
	made    uint64 // calls so far
	seen    uint64 // made, when rest looked last
	rested  bool
}

func newChannel(conn net.Conn, drop func(*channel)) (*channel, error) {
	l := &channel{}
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
				return nil, errors.New("the connection ended") // a new one is a new channel
			}
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(MaxMessageBytes), grpc.MaxCallSendMsgSize(MaxMessageBytes)),
		grpc.WithReadBufferSize(4<<10),
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

// begin counts a call, until finish; false when the channel rests: take another.
func (l *channel) begin() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.rested {
		return false
	}
	l.running++
	l.made++
	return true
}

func (l *channel) finish() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.running--
}

func (l *channel) rest() {
	l.mu.Lock()
	l.rested = l.rested || l.running == 0 && l.made == l.seen
	l.seen = l.made
	rested := l.rested
	l.mu.Unlock()
	if rested {
		l.abandon()
	}
}

func (l *channel) under() net.Conn { return l.conn.Conn }
func (l *channel) abandon()        { l.conn.end() }

func (l *channel) dead() bool {
	select {
	case <-l.conn.ended:
		return true
	default:
		return false
	}
}

func (l *channel) close() {
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
