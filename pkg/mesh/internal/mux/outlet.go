package mux

import (
	"errors"
	"os"
	"sync"
	"time"

	pool "github.com/libp2p/go-buffer-pool"
)

// outlet writes frames to the connection in the order they come. The first one is
// written by its own goroutine; what comes meanwhile is gathered and written by
// one that lives until nothing waits.
type outlet struct {
	session *session
	until   time.Time // the write deadline that stands; of who is busy

	mu      sync.Mutex
	busy    bool          // somebody writes
	waiting []byte        // of the pool; nil when nothing waits
	room    chan struct{} // made by who waits for room, closed when there is
	stopped bool
	idle    chan struct{} // closed when stopped and nobody writes
	err     error         // of a write
}

// send puts one frame out. It may wait until cancel or the session's end.
func (o *outlet) send(h header, body []byte, cancel <-chan struct{}) error {
	size := headerBytes + len(body)
	for {
		o.mu.Lock()
		if o.over() != nil {
			o.mu.Unlock()
			return o.ended()
		}
		// Who may be called off must not be caught in a write.
		if !o.busy && o.waiting == nil && cancel == nil {
			o.busy = true
			o.mu.Unlock()
			b := pool.Get(size)
			copy(b[copy(b, h[:]):], body)
			err := o.write(b)
			pool.Put(b)
			o.next()
			if err != nil {
				return o.ended()
			}
			return nil
		}
		if len(o.waiting) == 0 || len(o.waiting)+size <= queueBytes {
			o.gather(h[:], body)
			o.mu.Unlock()
			return nil
		}
		if o.room == nil {
			o.room = make(chan struct{})
		}
		room := o.room
		o.mu.Unlock()
		select {
		case <-room:
		case <-cancel:
			return os.ErrDeadlineExceeded
		case <-o.session.ended:
		}
	}
}

// add puts a frame out without waiting, for who must not; an error ends the session.
func (o *outlet) add(h header) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if err := o.over(); err != nil {
		return err
	}
	if len(o.waiting)+headerBytes > answersBytes {
		return errors.New("the peer takes in none of the answers that it causes")
	}
	o.gather(h[:], nil)
	return nil
}

// ended waits for the session's end, which is near, and says why it ended: the
// peer's reason comes before that of a write which it made fail.
func (o *outlet) ended() error {
	<-o.session.ended
	return o.session.why()
}

// over says why nothing can be sent any more; the lock is held.
func (o *outlet) over() error {
	if o.err != nil {
		return o.err
	}
	if o.stopped {
		return o.session.why()
	}
	return nil
}

// gather appends what is to be written next; the lock is held.
func (o *outlet) gather(h, body []byte) {
	if need := len(o.waiting) + len(h) + len(body); need > cap(o.waiting) {
		grown := pool.Get(max(need, 2*cap(o.waiting), 1<<10))[:len(o.waiting)]
		copy(grown, o.waiting)
		if o.waiting != nil {
			pool.Put(o.waiting)
		}
		o.waiting = grown
	}
	o.waiting = append(append(o.waiting, h...), body...)
	if !o.busy {
		o.busy = true
		go o.drain()
	}
}

// next writes what waits until nothing does, after a write by its caller: that one
// need not stay for the frames of others.
func (o *outlet) next() {
	o.mu.Lock()
	if len(o.waiting) > 0 && !o.stopped && o.err == nil {
		o.mu.Unlock()
		go o.drain()
		return
	}
	o.rest()
	o.mu.Unlock()
}

func (o *outlet) drain() {
	for {
		o.mu.Lock()
		if len(o.waiting) == 0 || o.stopped || o.err != nil {
			o.rest()
			o.mu.Unlock()
			return
		}
		b := o.waiting
		o.waiting = nil
		if o.room != nil {
			close(o.room)
			o.room = nil
		}
		o.mu.Unlock()
		_ = o.write(b)
		pool.Put(b)
	}
}

// rest is said by who was busy; the lock is held.
func (o *outlet) rest() {
	o.busy = false
	if o.stopped {
		close(o.idle)
	}
}

// stop refuses further frames; the channel closes once nobody writes.
func (o *outlet) stop() (idle <-chan struct{}) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.stopped, o.idle = true, make(chan struct{})
	if !o.busy {
		close(o.idle)
	}
	return o.idle
}

// write writes, and has the session end when that fails.
func (o *outlet) write(b []byte) error {
	limit := o.session.o.WriteTimeout
	// Setting a deadline costs something, so it is done when half of one has passed.
	var err error
	if now := time.Now(); o.until.Sub(now) < limit/2 {
		o.until = now.Add(limit)
		err = o.session.conn.SetWriteDeadline(o.until)
	}
	if err == nil {
		_, err = o.session.conn.Write(b)
	}
	if err == nil {
		return nil
	}
	o.mu.Lock()
	first := o.err == nil
	o.err = err
	room := o.room
	o.room = nil
	o.mu.Unlock()
	if room != nil {
		close(room)
	}
	if first {
		go o.session.endByWrite(err)
	}
	return err
}

// endByWrite ends a session that cannot be written to. Its reader may still find the
// peer's reason, which says more, unless the peer merely takes in nothing.
func (s *session) endByWrite(err error) {
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		t := time.NewTimer(time.Second)
		defer t.Stop()
		select {
		case <-s.readDone:
		case <-s.ended:
		case <-t.C:
		}
	}
	s.end(err, nil)
}
