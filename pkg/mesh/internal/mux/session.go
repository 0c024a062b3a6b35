package mux

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/libp2p/go-libp2p/core/network"
)

// Transport makes sessions.
type Transport struct {
	// KeepAlive is the silence after which a peer is asked for a sign of life.
	KeepAlive time.Duration
	// WriteTimeout is how long one write, and the answer to a keep-alive, may take.
	WriteTimeout time.Duration
}

var _ network.Multiplexer = (*Transport)(nil)

// NewConn begins a session on a connection, which it owns from now on.
func (t *Transport) NewConn(c net.Conn, isServer bool, scope network.PeerScope) (network.MuxedConn, error) {
	s := &session{
		conn: c, o: *t, scope: scope, streams: make(map[uint32]*stream), next: 1, parity: 0,
		arrived: make(chan struct{}, 1), opening: make(chan struct{}, backlog),
		ended: make(chan struct{}), readDone: make(chan struct{}), finished: make(chan struct{}),
	}
	if isServer {
		s.next, s.parity = 2, 1
	}
	s.out.session = s
	s.mu.Lock() // the timer's function waits for it
	s.keepAlive = time.AfterFunc(t.KeepAlive, s.askForLife)
	s.mu.Unlock()
	go func() {
		err := s.read()
		close(s.readDone)
		s.end(err, nil)
	}()
	return s, nil
}

// session is one connection.
type session struct {
	conn  net.Conn
	o     Transport
	scope network.PeerScope // nil in tests
	out   outlet

	mu       sync.Mutex
	streams  map[uint32]*stream
	next     uint32
	parity   uint32    // of the ids that the peer gives
	incoming []*stream // that wait for AcceptStream
	err      error     // why it ended

	arrived  chan struct{} // capacity 1: incoming has grown
	opening  chan struct{} // streams that the peer has not answered, at most backlog
	ended    chan struct{} // closed when err is set
	readDone chan struct{} // closed when the reader is through
	finished chan struct{} // closed when nothing of the session is left

	heard     atomic.Bool // since the keep-alive's last look
	asked     time.Time   // when life was asked for; the timer's own
	keepAlive *time.Timer

	rttMu   sync.Mutex
	rtt     time.Duration // 0 while unknown
	measure uint32        // number of the ping under way; 0 for none
	pings   uint32
	sent    time.Time
	updated time.Time
}

// OpenStream tells the peer of a new stream at once.
func (s *session) OpenStream(ctx context.Context) (network.MuxedStream, error) {
	select {
	case s.opening <- struct{}{}:
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-s.ended:
		return nil, s.why()
	}
	span, err := s.reserve()
	if err != nil {
		<-s.opening
		return nil, err
	}
	s.mu.Lock()
	if s.err != nil || s.next >= 1<<32-2 {
		err = s.err
		s.mu.Unlock()
		<-s.opening
		span.Done()
		if err == nil {
			err = errors.New("all numbers of streams are used up")
		}
		return nil, err
	}
	st := newStream(s, s.next, span)
	st.unanswered = true
	s.streams[s.next] = st
	s.next += 2
	s.mu.Unlock()
	if err := s.out.send(newHeader(kindWindow, flagOpen, st.id, 0), nil, ctx.Done()); err != nil {
		s.remove(st)
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return nil, err
	}
	return st, nil
}

// AcceptStream waits for a stream of the peer's.
func (s *session) AcceptStream() (network.MuxedStream, error) {
	for {
		s.mu.Lock()
		if s.err != nil {
			s.mu.Unlock()
			return nil, s.why()
		}
		if len(s.incoming) > 0 {
			st := s.incoming[0]
			s.incoming[0] = nil
			if s.incoming = s.incoming[1:]; len(s.incoming) == 0 {
				s.incoming = nil
			}
			s.mu.Unlock()
			return st, nil
		}
		s.mu.Unlock()
		select {
		case <-s.arrived:
		case <-s.ended:
		}
	}
}

// Close ends the session; what has not left yet is lost.
func (s *session) Close() error {
	s.end(&network.ConnError{}, nil)
	return nil
}

// CloseWithError tells the peer why, if it takes that in.
func (s *session) CloseWithError(code network.ConnErrorCode) error {
	var last *header
	if code != 0 {
		h := newHeader(kindGoAway, 0, 0, uint32(code))
		last = &h
	}
	s.end(&network.ConnError{ErrorCode: code}, last)
	return nil
}

// IsClosed tells whether the session has ended.
func (s *session) IsClosed() bool {
	select {
	case <-s.ended:
		return true
	default:
		return false
	}
}

// As finds nothing below.
func (s *session) As(any) bool { return false }

func (s *session) why() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// end ends the session and waits for its goroutines; the first reason counts.
func (s *session) end(err error, last *header) {
	var conn *network.ConnError
	if !errors.As(err, &conn) {
		err = fmt.Errorf("%w: the connection ended: %w", network.ErrReset, err)
	}
	s.mu.Lock()
	if s.err != nil {
		s.mu.Unlock()
		<-s.finished
		return
	}
	s.err = err
	close(s.ended)
	s.mu.Unlock()
	s.keepAlive.Stop()
	idle := s.out.stop()
	if last != nil {
		<-idle // a frame under way goes first; its own time is limited
		if s.conn.SetWriteDeadline(time.Now().Add(farewell)) == nil {
			_, _ = s.conn.Write(last[:])
		}
	}
	_ = s.conn.Close()
	<-idle
	<-s.readDone
	s.mu.Lock()
	left := s.streams
	s.streams, s.incoming = nil, nil
	s.mu.Unlock()
	for _, st := range left {
		st.breakOff(err)
		st.span.Done()
	}
	close(s.finished)
}

// span is a stream's part of the peer's memory.
type span interface {
	ReserveMemory(size int, prio uint8) error
	Done()
}

type noSpan struct{}

func (noSpan) ReserveMemory(int, uint8) error { return nil }
func (noSpan) Done()                          {}

func (s *session) reserve() (span, error) {
	if s.scope == nil {
		return noSpan{}, nil
	}
	sp, err := s.scope.BeginSpan()
	if err != nil {
		return nil, err
	}
	if err := sp.ReserveMemory(firstWindow, network.ReservationPriorityAlways); err != nil {
		sp.Done()
		return nil, err
	}
	return sp, nil
}

// remove forgets a stream that is over.
func (s *session) remove(st *stream) {
	s.mu.Lock()
	known := s.streams[st.id] == st
	if known {
		delete(s.streams, st.id)
		if st.unanswered {
			st.unanswered = false
			<-s.opening
		}
	}
	s.mu.Unlock()
	if known {
		st.span.Done()
	}
}

func (s *session) answered(st *stream) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if st.unanswered {
		st.unanswered = false
		<-s.opening
	}
}

func malformed(format string, args ...any) error {
	return fmt.Errorf("read a frame of streams: "+format, args...)
}

// read takes in frames until the connection ends. It never waits for a write: the
// peer's reader may be waiting for this one.
func (s *session) read() error {
	var h header
	var small []byte
	for {
		if _, err := io.ReadFull(s.conn, h[:]); err != nil {
			return err
		}
		if !s.heard.Load() {
			s.heard.Store(true)
		}
		if h[0] != 0 {
			return malformed("version %d", h[0])
		}
		switch h.kind() {
		case kindPing:
			if h.flags()&flagOpen == 0 {
				s.pong(h.length())
			} else if err := s.out.add(newHeader(kindPing, flagOpened, 0, h.length())); err != nil {
				return err
			}
			continue
		case kindGoAway:
			return &network.ConnError{Remote: true, ErrorCode: network.ConnErrorCode(h.length())}
		case kindData, kindWindow:
		default:
			return malformed("kind %d", h.kind())
		}
		if h.flags()&flagOpen != 0 {
			if err := s.opened(h.stream()); err != nil {
				return err
			}
		}
		s.mu.Lock()
		st := s.streams[h.stream()]
		s.mu.Unlock()
		if st == nil { // it was reset or closed here; the peer does not know yet
			if h.kind() == kindData && h.length() > 0 {
				if _, err := io.CopyN(io.Discard, s.conn, int64(h.length())); err != nil {
					return err
				}
			}
			continue
		}
		if h.flags()&flagOpened != 0 {
			s.answered(st)
		}
		if h.kind() == kindData && h.length() > 0 {
			if small == nil && h.length() <= smallBytes {
				small = make([]byte, smallBytes)
			}
			if err := st.take(s.conn, h.length(), small); err != nil {
				return err
			}
		}
		st.told(&h)
	}
}

// opened begins a stream of the peer's.
func (s *session) opened(id uint32) error {
	if id == 0 || id%2 != s.parity%2 {
		return malformed("stream %d is not the peer's to open", id)
	}
	span, err := s.reserve()
	if err != nil {
		return s.out.add(newHeader(kindWindow, flagReset, id, uint32(network.StreamResourceLimitExceeded)))
	}
	s.mu.Lock()
	_, twice := s.streams[id]
	full := len(s.incoming) >= backlog
	if s.streams == nil || twice || full {
		s.mu.Unlock()
		span.Done()
		if twice {
			return malformed("stream %d is open already", id)
		}
		return s.out.add(newHeader(kindWindow, flagReset, id, uint32(network.StreamResourceLimitExceeded)))
	}
	st := newStream(s, id, span)
	st.owes = flagOpened
	s.streams[id] = st
	s.incoming = append(s.incoming, st)
	s.mu.Unlock()
	poke(s.arrived)
	return nil
}

// askForLife runs when nothing was heard for a while.
func (s *session) askForLife() {
	next := s.o.KeepAlive
	s.mu.Lock()
	over, timer := s.err != nil, s.keepAlive
	s.mu.Unlock()
	switch now := time.Now(); {
	case over:
		return
	case s.heard.Swap(false):
		s.asked = time.Time{}
	case s.asked.IsZero():
		s.asked = now
		_ = s.out.add(newHeader(kindPing, flagOpen, 0, 0)) // when it fails the session ends
		next = min(next, s.o.WriteTimeout)
	case now.Sub(s.asked) >= s.o.WriteTimeout:
		s.end(errors.New("no sign of life"), nil)
		return
	default:
		next = min(next, s.o.WriteTimeout-now.Sub(s.asked))
	}
	timer.Reset(next)
}

// roundTrip is how long the peer takes to answer, 0 while that is not known. It has
// that measured anew when the last time is long ago.
func (s *session) roundTrip() time.Duration {
	s.rttMu.Lock()
	defer s.rttMu.Unlock()
	now := time.Now()
	stale := s.rtt == 0 || now.Sub(s.updated) > freshRTT
	if stale && (s.measure == 0 || now.Sub(s.sent) > freshRTT) {
		s.pings++
		if s.pings == 0 {
			s.pings = 1 // 0 is the keep-alive's
		}
		s.measure, s.sent = s.pings, now
		_ = s.out.add(newHeader(kindPing, flagOpen, 0, s.measure)) // when it fails the session ends
	}
	return s.rtt
}

func (s *session) pong(number uint32) {
	s.rttMu.Lock()
	defer s.rttMu.Unlock()
	if number == 0 || number != s.measure {
		return
	}
	now := time.Now()
	took := max(now.Sub(s.sent), time.Microsecond)
	if s.rtt == 0 {
		s.rtt = took
	} else {
		s.rtt = s.rtt/2 + took/2
	}
	s.measure, s.updated = 0, now
}

func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
