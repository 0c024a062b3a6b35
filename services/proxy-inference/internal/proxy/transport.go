package proxy

import (
	"context"
	"io"
	"net"
	"net/http"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/services/proxy-inference/internal/route"
)

// connectionsPerReplica bounds streams to one agent, idle ones included. A mesh
// peer takes 256 from one connection.
const connectionsPerReplica = 240

type replicaKey struct{}

// dialError says that no connection was made, so the engine saw nothing.
type dialError struct{ err error }

func (e *dialError) Error() string { return "connect: " + e.err.Error() }
func (e *dialError) Unwrap() error { return e.err }

// newTransport makes the HTTP/1.1 client to engines. Hosts are attempt ids; the
// replica itself travels in the request's context.
func (h *Handler) newTransport() *http.Transport {
	return &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			r, ok := ctx.Value(replicaKey{}).(route.Replica)
			if !ok {
				return nil, &dialError{fault.New(fault.Internal, "connect to an engine: the request names no replica")}
			}
			ctx, cancel := context.WithTimeout(ctx, h.Timeouts.Connect)
			defer cancel()
			conn, err := h.Dial(ctx, r)
			if err != nil {
				return nil, &dialError{err}
			}
			return engineConn{conn}, nil
		},
		MaxIdleConnsPerHost:    connectionsPerReplica,
		MaxConnsPerHost:        connectionsPerReplica,
		IdleConnTimeout:        h.Timeouts.KeepAlive,
		DisableCompression:     true,
		MaxResponseHeaderBytes: 64 << 10,
		ReadBufferSize:         16 << 10,
		WriteBufferSize:        16 << 10,
	}
}

// engineConn breaks its stream on Close, so that an agent tells an engine at once
// that the client is gone; a half-closed stream could look like the end of a
// request.
type engineConn struct{ net.Conn }

func (c engineConn) Close() error {
	if s, ok := c.Conn.(interface{ Reset() error }); ok {
		return s.Reset()
	}
	return c.Conn.Close()
}

// sentHeaders are what an engine gets of the client's headers. Keys, cookies and
// addresses are not among them.
var sentHeaders = []string{"Accept", "Content-Type", "Traceparent", "Tracestate"}

// outgoing makes the request to an engine. It may be sent again by the transport
// when a kept connection turns out dead before any byte of an answer.
func (c *call) outgoing(ctx context.Context, r route.Replica) (*http.Request, error) {
	ctx = context.WithValue(ctx, replicaKey{}, r)
	q, err := http.NewRequestWithContext(ctx, c.r.Method, "http://"+r.AttemptID+c.path, newPieceReader(c.pieces))
	if err != nil {
		return nil, fault.Wrap(fault.Internal, err, "make a request to attempt %s", r.AttemptID)
	}
	q.Host = "localhost"
	for _, p := range c.pieces {
		q.ContentLength += int64(len(p))
	}
	q.GetBody = func() (io.ReadCloser, error) { return newPieceReader(c.pieces), nil }
	for _, name := range sentHeaders {
		if v := c.r.Header.Values(name); len(v) > 0 {
			q.Header[name] = v
		}
	}
	q.Header.Set("X-Request-Id", c.id)
	q.Header.Set("User-Agent", "cosmicac-proxy")
	// Present and empty: not sent, and tells the transport that a kept connection
	// that died unanswered may be replaced. Engines keep no state by request.
	q.Header["Idempotency-Key"] = nil
	return q, nil
}

// passedHeaders are what a client gets of an engine's headers.
var passedHeaders = []string{"Content-Type", "Content-Encoding", "Content-Language", "Openai-Processing-Ms", "Openai-Version", "Retry-After"}
