package mux

import (
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	pool "github.com/libp2p/go-buffer-pool"
	"github.com/libp2p/go-libp2p/core/network"
)

// stream is one of a session's.
type stream struct {
	session    *session
	id         uint32
	span       span
	unanswered bool // opened here and not answered; guarded by the session's lock

	readable, writable chan struct{} // capacity 1: something changed

	mu       sync.Mutex
	owes     uint16 // flags of the next frame
	window   uint32 // what the peer takes
	credit   uint32 // what it may send
	size     uint32 // of this end's window
	updated  time.Time
	pieces   [][]byte // of the pool, that arrived
	at       int      // read of the first piece
	unread   uint32
	eof      bool  // the peer sends no more
	readErr  error // reading is over
	writeErr error // writing is over
	over     bool  // both are, and the session was told
	readBy   deadline
	writeBy  deadline
}

func newStream(s *session, id uint32, sp span) *stream {
	return &stream{session: s, id: id, span: sp, readable: make(chan struct{}, 1), writable: make(chan struct{}, 1),
		window: firstWindow, credit: firstWindow, size: firstWindow, updated: time.Now()}
}

// Read returns what there is, or waits for it.
func (st *stream) Read(b []byte) (int, error) {
	for {
		st.mu.Lock()
		switch {
		case st.readErr != nil:
			err := st.readErr
			st.mu.Unlock()
			poke(st.readable) // another may wait
			return 0, err
		case st.unread > 0:
			n := st.copyOut(b)
			update, flags, grown := st.grow()
			st.mu.Unlock()
			if update {
				// A connection that ended tells the next Read; these bytes count.
				_ = st.session.out.send(newHeader(kindWindow, flags, st.id, grown), nil, nil)
			}
			return n, nil
		case st.eof:
			st.mu.Unlock()
			poke(st.readable)
			return 0, io.EOF
		}
		late, flags := st.readBy.passed, st.owes
		st.owes = 0
		st.mu.Unlock()
		if flags != 0 { // the opener waits for it, and nothing else may come to carry it
			if err := st.session.out.send(newHeader(kindWindow, flags, st.id, 0), nil, nil); err != nil {
				return 0, err
			}
		}
		select {
		case <-st.readable:
		case <-late:
			return 0, os.ErrDeadlineExceeded
		}
	}
}

// copyOut fills b; the lock is held.
func (st *stream) copyOut(b []byte) (n int) {
	for n < len(b) && len(st.pieces) > 0 {
		piece := st.pieces[0]
		k := copy(b[n:], piece[st.at:])
		n, st.at = n+k, st.at+k
		if st.at < len(piece) {
			break
		}
		pool.Put(piece)
		st.pieces[0], st.at = nil, 0
		if st.pieces = st.pieces[1:]; len(st.pieces) == 0 {
			st.pieces = nil
		}
	}
	st.unread -= uint32(n)
	return n
}

// grow gives the peer leave to send more, once half of the window is used. A reader
// that keeps up with what arrives within a few round trips gets a larger window. The
// lock is held.
func (st *stream) grow() (update bool, flags uint16, grown uint32) {
	grown = st.size - st.credit - st.unread
	if grown < st.size/2 {
		return false, 0, 0
	}
	flags, st.owes = st.owes, 0
	now := time.Now()
	if trip := st.session.roundTrip(); trip > 0 && st.size < largeWindow && now.Sub(st.updated) < 4*trip {
		if more := min(st.size, largeWindow-st.size); st.span.ReserveMemory(int(more), network.ReservationPriorityMedium) == nil {
			st.size += more
			grown += more
		}
	}
	st.updated = now
	st.credit += grown
	return true, flags, grown
}

// Write waits for the peer's leave and for the connection.
func (st *stream) Write(b []byte) (int, error) {
	sent := 0
	for sent < len(b) {
		st.mu.Lock()
		if st.writeErr != nil {
			err := st.writeErr
			st.mu.Unlock()
			poke(st.writable)
			return sent, err
		}
		late := st.writeBy.passed
		if isClosed(late) {
			st.mu.Unlock()
			return sent, os.ErrDeadlineExceeded
		}
		if st.window == 0 {
			st.mu.Unlock()
			select {
			case <-st.writable:
			case <-late:
				return sent, os.ErrDeadlineExceeded
			}
			continue
		}
		n := min(st.window, frameBytes, uint32(len(b)-sent))
		flags := st.owes
		st.window -= n
		st.owes = 0
		st.mu.Unlock()
		if err := st.session.out.send(newHeader(kindData, flags, st.id, n), b[sent:sent+int(n)], late); err != nil {
			st.mu.Lock()
			st.window += n
			st.owes |= flags
			st.mu.Unlock()
			return sent, err
		}
		sent += int(n)
	}
	return sent, nil
}

// take reads a frame's data from the connection; small is for that of a small one.
func (st *stream) take(r io.Reader, length uint32, small []byte) error {
	st.mu.Lock()
	credit := st.credit
	st.mu.Unlock()
	if length > credit {
		return malformed("%d bytes on stream %d, which may take %d", length, st.id, credit)
	}
	b := small
	if length <= smallBytes {
		b = small[:length]
	} else {
		b = pool.Get(int(length))
	}
	if _, err := io.ReadFull(r, b); err != nil {
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return err
	}
	st.mu.Lock()
	defer st.mu.Unlock()
	st.credit -= length
	if st.readErr != nil {
		return nil // nobody will ask for it
	}
	st.unread += length
	if length <= smallBytes {
		last := len(st.pieces) - 1
		if last >= 0 && cap(st.pieces[last])-len(st.pieces[last]) >= len(b) {
			st.pieces[last] = append(st.pieces[last], b...)
			return nil
		}
		b = append(pool.Get(smallBytes)[:0], b...)
	}
	st.pieces = append(st.pieces, b)
	return nil
}

// told takes in what a frame says besides its data.
func (st *stream) told(h *header) {
	st.mu.Lock()
	if h.kind() == kindWindow && h.flags()&flagReset == 0 {
		if sum := st.window + h.length(); sum >= st.window {
			st.window = sum
		} else {
			st.window = 1<<32 - 1
		}
	}
	if h.flags()&flagEnd != 0 {
		st.eof = true
	}
	if h.flags()&flagReset != 0 {
		var err error = network.ErrReset
		if h.kind() == kindWindow {
			err = &network.StreamError{Remote: true, ErrorCode: network.StreamErrorCode(h.length())}
		}
		st.breakBoth(err)
	}
	gone := st.ends()
	st.mu.Unlock()
	if gone {
		st.session.remove(st)
	}
	poke(st.readable)
	poke(st.writable)
}

// ends tells, once, that both ways are over; the lock is held.
func (st *stream) ends() bool {
	if st.over || st.writeErr == nil || st.readErr == nil && !st.eof {
		return false
	}
	st.over = true
	st.readBy.set(time.Time{})
	st.writeBy.set(time.Time{})
	return true
}

// breakBoth ends what is open with err; the lock is held.
func (st *stream) breakBoth(err error) {
	if st.readErr == nil && !(st.eof && st.unread == 0) {
		st.readErr = err
		st.drop()
	}
	if st.writeErr == nil {
		st.writeErr = err
	}
}

// drop forgets what was not read; the lock is held.
func (st *stream) drop() {
	for _, piece := range st.pieces {
		pool.Put(piece)
	}
	st.pieces, st.at, st.unread = nil, 0, 0
}

// breakOff is the session's end.
func (st *stream) breakOff(err error) {
	st.mu.Lock()
	st.breakBoth(err)
	st.ends()
	st.mu.Unlock()
	poke(st.readable)
	poke(st.writable)
}

// CloseWrite tells the peer that no more comes.
func (st *stream) CloseWrite() error {
	st.mu.Lock()
	if st.writeErr != nil {
		err := st.writeErr
		st.mu.Unlock()
		if err == errWriteClosed {
			return nil
		}
		return err
	}
	st.writeErr = errWriteClosed
	flags := st.owes | flagEnd
	st.owes = 0
	gone := st.ends()
	st.mu.Unlock()
	poke(st.writable)
	err := st.session.out.send(newHeader(kindWindow, flags, st.id, 0), nil, nil)
	if gone {
		st.session.remove(st)
	}
	return err
}

// errWriteClosed ends writes after CloseWrite.
var errWriteClosed = fmt.Errorf("write on a closed stream: %w", net.ErrClosed)

// CloseRead has what arrives dropped; the peer is not told.
func (st *stream) CloseRead() error {
	st.mu.Lock()
	if st.readErr == nil && !(st.eof && st.unread == 0) {
		st.readErr = fmt.Errorf("%w: reading was closed", network.ErrReset)
		st.drop()
	}
	gone := st.ends()
	st.mu.Unlock()
	poke(st.readable)
	if gone {
		st.session.remove(st)
	}
	return nil
}

// Close closes both ways.
func (st *stream) Close() error {
	_ = st.CloseRead() // cannot fail
	return st.CloseWrite()
}

// Reset breaks both ways, here and at the peer.
func (st *stream) Reset() error { return st.ResetWithError(0) }

// ResetWithError is Reset, and tells the peer why. It does not wait for the connection.
func (st *stream) ResetWithError(code network.StreamErrorCode) error {
	st.mu.Lock()
	if st.over {
		st.mu.Unlock()
		return nil
	}
	flags := st.owes | flagReset
	st.owes = 0
	st.breakBoth(&network.StreamError{ErrorCode: code})
	st.ends()
	st.mu.Unlock()
	poke(st.readable)
	poke(st.writable)
	if err := st.session.out.add(newHeader(kindWindow, flags, st.id, uint32(code))); err != nil {
		go st.session.end(err, nil) // a peer that never hears of it would go on; it may have ended already
	}
	st.session.remove(st)
	return nil
}

// SetDeadline sets both deadlines.
func (st *stream) SetDeadline(t time.Time) error {
	_ = st.SetReadDeadline(t) // neither can fail
	return st.SetWriteDeadline(t)
}

// SetReadDeadline ends a Read that waits at t.
func (st *stream) SetReadDeadline(t time.Time) error {
	st.mu.Lock()
	if !st.over {
		st.readBy.set(t)
	}
	st.mu.Unlock()
	poke(st.readable) // who waits must wait for the new one
	return nil
}

// SetWriteDeadline ends a Write that waits at t.
func (st *stream) SetWriteDeadline(t time.Time) error {
	st.mu.Lock()
	if !st.over {
		st.writeBy.set(t)
	}
	st.mu.Unlock()
	poke(st.writable)
	return nil
}

// deadline is a point in time that one can wait for. The stream's lock guards it.
type deadline struct {
	timer  *time.Timer
	passed chan struct{} // nil for none
}

func (d *deadline) set(t time.Time) {
	if d.timer != nil {
		d.timer.Stop()
		d.timer = nil
	}
	d.passed = nil
	if t.IsZero() {
		return
	}
	passed := make(chan struct{})
	d.passed = passed
	if wait := time.Until(t); wait > 0 {
		d.timer = time.AfterFunc(wait, func() { close(passed) })
	} else {
		close(passed)
	}
}

func isClosed(c chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
