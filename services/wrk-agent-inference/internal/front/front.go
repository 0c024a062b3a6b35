// Package front passes proxies' streams on to the engine: one HTTP/1.1 connection
// for each stream, byte for byte. A proxy pools its streams and sends one request
// after another on each; when the engine closes an idle connection the stream is
// closed too, at once, so that the proxy does not send into it.
//
// When the proxy's side of a stream ends, the engine's connection is closed, so
// the engine stops generating for a client that went away.
//
// It reads nothing of what passes, strips nothing, retries nothing and keeps no
// queue; which paths may be asked for is the proxy's list.
package front

import (
	"context"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
)

// Front passes streams. It is safe for concurrent use.
type Front struct {
	dial func(context.Context) (net.Conn, error)
	now  func() time.Time

	mu       sync.Mutex
	draining bool
	streams  map[*exchange]struct{}
	last     atomic.Int64 // when a byte last came from the engine, Unix nanoseconds
}

// exchange is one stream. It is busy from a byte of the client on until the
// engine has been silent for a moment after an answer.
type exchange struct {
	up, down atomic.Int64 // last byte each way, Unix nanoseconds
}

// settle is how long an answer must be silent to count as ended. Bytes alone do
// not tell, and this package reads no more than bytes.
const settle = 2 * time.Second

// New makes a front over an engine's dialer.
func New(dial func(context.Context) (net.Conn, error), now func() time.Time) *Front {
	return &Front{dial: dial, now: now, streams: map[*exchange]struct{}{}}
}

// Serve passes one stream until either side ends it or ctx ends. It closes both.
// An error means that nothing was passed, so the caller can refuse the stream
// and its proxy can try elsewhere.
func (f *Front) Serve(ctx context.Context, stream net.Conn) error {
	x := &exchange{}
	f.mu.Lock()
	if f.draining {
		f.mu.Unlock()
		return fault.New(fault.Unavailable, "this replica drains")
	}
	f.streams[x] = struct{}{}
	f.mu.Unlock()
	defer func() {
		f.mu.Lock()
		delete(f.streams, x)
		f.mu.Unlock()
	}()
	engine, err := f.dial(ctx)
	if err != nil {
		return err
	}
	both := func() {
		stream.Close()
		engine.Close()
	}
	defer both()
	stop := context.AfterFunc(ctx, both)
	defer stop()
	var copies sync.WaitGroup
	copies.Go(func() {
		defer both()
		_, _ = io.Copy(engine, f.counted(stream, &x.up, nil))
	})
	copies.Go(func() {
		defer both()
		_, _ = io.Copy(stream, f.counted(engine, &x.down, &f.last))
	})
	copies.Wait()
	return nil
}

// counted notes when a byte was read.
func (f *Front) counted(r io.Reader, at, also *atomic.Int64) io.Reader {
	return readerFunc(func(p []byte) (int, error) {
		n, err := r.Read(p)
		if n > 0 {
			now := f.now().UnixNano()
			at.Store(now)
			if also != nil {
				also.Store(now)
			}
		}
		return n, err
	})
}

type readerFunc func([]byte) (int, error)

func (r readerFunc) Read(p []byte) (int, error) { return r(p) }

// Traffic is how many streams are busy and when a byte last came from the engine.
func (f *Front) Traffic() (busy int, last time.Time) {
	now := f.now().UnixNano()
	f.mu.Lock()
	for x := range f.streams {
		up, down := x.up.Load(), x.down.Load()
		if up > down || down > 0 && now-down < int64(settle) {
			busy++
		}
	}
	f.mu.Unlock()
	if n := f.last.Load(); n > 0 {
		last = time.Unix(0, n)
	}
	return busy, last
}

// Streams is how many are open, idle ones included.
func (f *Front) Streams() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.streams)
}

// Drain refuses new streams; open ones go on.
func (f *Front) Drain() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.draining = true
}
