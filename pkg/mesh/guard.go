package mesh

import (
	"context"
	"net"
	"sync"
	"sync/atomic"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/libp2p/go-libp2p/core/network"
	"github.com/libp2p/go-libp2p/core/transport"
)

// guarded is a connection that a peer made. This node opens no stream on it before
// it has admitted the peer: the library would ask each comer at once who it is, and
// keep what it says, and that of strangers costs more than to refuse them.
type guarded struct {
	transport.CapableConn
	known    chan struct{} // the session's: the peer is judged
	admitted atomic.Bool

	ending sync.Once
	ended  chan struct{} // also of what never had a session
}

var errUnadmitted = fault.New(fault.Denied, "open a stream: the peer is not admitted")

// OpenStream waits for the judgement, which comes within admitLimit and the watch's
// second. The library counts the time that its own question has from before that;
// a peer that is admitted late is asked all the same.
func (c *guarded) OpenStream(ctx context.Context) (network.MuxedStream, error) {
	select {
	case <-c.known:
	case <-c.ended:
		return nil, net.ErrClosed
	}
	if !c.admitted.Load() {
		return nil, errUnadmitted
	}
	if ctx.Err() == context.DeadlineExceeded {
		late, cancel := context.WithTimeout(context.WithoutCancel(ctx), admitLimit)
		defer cancel()
		ctx = late
	}
	return c.CapableConn.OpenStream(ctx)
}

func (c *guarded) Close() error {
	c.ending.Do(func() { close(c.ended) })
	return c.CapableConn.Close()
}

func (c *guarded) CloseWithError(code network.ConnErrorCode) error {
	c.ending.Do(func() { close(c.ended) })
	return c.CapableConn.CloseWithError(code)
}

// As finds the connection beneath the library's own.
func (c *guarded) As(target any) bool {
	if t, ok := target.(**guarded); ok {
		*t = c
		return true
	}
	return c.CapableConn.As(target)
}

// Stat is asked for by the library where there is one.
func (c *guarded) Stat() network.ConnStats {
	if s, ok := c.CapableConn.(network.ConnStat); ok {
		return s.Stat()
	}
	return network.ConnStats{}
}

// guardedListener guards what it accepts, and makes QUIC able to stand aside.
type guardedListener struct {
	transport.Listener
	quic bool
}

func (l guardedListener) Accept() (transport.CapableConn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	c = &guarded{CapableConn: c, known: make(chan struct{}), ended: make(chan struct{})}
	if l.quic {
		c = &aside{CapableConn: c}
	}
	return c, nil
}
