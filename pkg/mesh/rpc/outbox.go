package rpc

import (
	"context"
	"net"
	"runtime"
	"sync"
)

// outboxBytes is how much may wait for the connection before those who add more
// wait themselves.
const outboxBytes = 256 << 10

// outbox gathers the frames of many calls and writes them to one connection, in
// the order of put. While a write runs, what comes meanwhile becomes the next
// write: the more calls, the fewer writes a call. The frame of a lone call is
// written by its own goroutine: to wake another would cost more than the write.
type outbox struct {
	conn  net.Conn
	wake  chan struct{}
	ended chan struct{} // closed by the reader of the connection, or a failed write
	once  sync.Once

	mu      sync.Mutex
	writing bool
	waiting *buffer       // nil when nothing waits
	room    chan struct{} // made by who waits for room, closed by the writer
}

func newOutbox(c net.Conn) *outbox {
	return &outbox{conn: c, wake: make(chan struct{}, 1), ended: make(chan struct{})}
}

// end makes put fail and the writer stop. It does not close the connection.
func (o *outbox) end() { o.once.Do(func() { close(o.ended) }) }

// urgency is how a frame goes out.
type urgency int

const (
	inTurn urgency = iota
	// atOnce is for a few bytes that must not wait: it never blocks.
	atOnce
	// alone is for a call beside which no other runs on the stream: the other end has
	// taken in all that was sent before, so its write does not wait for it.
	alone
	// held is for who is to say flush before anything that may wait: until then nobody
	// is woken to write, unless heldMost have come together.
	held
)

// heldMost bytes are held back at most.
const heldMost = 32 << 10

// put adds a whole frame. With a slow reader at the other end it blocks until
// there is room, ctx ends or the connection ended; ok is false then and nothing
// was added, or it was lost with the connection.
func (o *outbox) put(ctx context.Context, frame []byte, how urgency) (ok bool) {
	for {
		o.mu.Lock()
		if o.isEnded() {
			o.mu.Unlock()
			return false
		}
		if how == alone && !o.writing && o.waiting == nil {
			o.writing = true
			o.mu.Unlock()
			return o.write(frame)
		}
		if how == atOnce || o.waiting == nil || len(o.waiting.bytes)+len(frame) <= outboxBytes {
			if o.waiting == nil {
				o.waiting = newBuffer(maxFrameBytes)
			}
			o.waiting.bytes = append(o.waiting.bytes, frame...)
			quiet := how == held && len(o.waiting.bytes) < heldMost
			o.mu.Unlock()
			if !quiet {
				o.poke()
			}
			return true
		}
		if o.room == nil {
			o.room = make(chan struct{})
		}
		room := o.room
		o.mu.Unlock()
		select {
		case <-room:
		case <-ctx.Done():
			return false
		case <-o.ended:
			return false
		}
	}
}

func (o *outbox) isEnded() bool {
	select {
	case <-o.ended:
		return true
	default:
		return false
	}
}

// flush writes what waits, unless another is about to.
func (o *outbox) flush() {
	o.mu.Lock()
	if o.waiting == nil || o.writing || o.isEnded() {
		o.mu.Unlock()
		return
	}
	b := o.take()
	o.mu.Unlock()
	o.write(b.bytes)
	b.free()
}

// take takes what waits, nil if nothing does, and the turn to write it; the lock is held.
func (o *outbox) take() *buffer {
	b := o.waiting
	o.waiting = nil
	if o.room != nil {
		close(o.room)
		o.room = nil
	}
	o.writing = b != nil
	return b
}

// write writes what the caller has taken the turn for, and gives the turn back.
func (o *outbox) write(b []byte) (ok bool) {
	_, err := o.conn.Write(b)
	o.mu.Lock()
	o.writing = false
	more := o.waiting != nil
	o.mu.Unlock()
	if err != nil {
		o.end()
		_ = o.conn.Close()
		return false
	}
	if more {
		o.poke()
	}
	return true
}

func (o *outbox) poke() {
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

// run writes until the connection ends.
func (o *outbox) run() {
	for {
		select {
		case <-o.wake:
		case <-o.ended:
			return
		}
		for {
			// Others that are about to put get their turn first: one write for many
			// calls costs little more than one for one.
			runtime.Gosched()
			o.mu.Lock()
			if o.writing { // who does wakes this again
				o.mu.Unlock()
				break
			}
			b := o.take()
			o.mu.Unlock()
			if b == nil {
				break
			}
			ok := o.write(b.bytes)
			b.free()
			if !ok {
				return
			}
		}
	}
}
