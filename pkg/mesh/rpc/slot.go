package rpc

import (
	"context"
	"errors"
	"net"
	"sync"

	"github.com/cosmicac/cosmicac/pkg/fault"
)

// link is a live connection that calls share.
type link interface {
	comparable
	dead() bool
	// abandon makes it dead: nobody takes it any more.
	abandon()
	// close ends it and its calls, and waits for its goroutines.
	close()
	// rest ends it if no call ran on it since rest was last asked.
	rest()
	// under is the connection below, to be asked whether it is ready.
	under() net.Conn
}

// slot holds the one link of a kind that a client's calls share. It makes one with
// the first call and a new one after the old one ended.
type slot[L link] struct {
	peer string
	dial func(ctx context.Context) (L, error)

	mu      *sync.Mutex // the client's
	link    L           // zero when there is none
	opening *opening[L]
	closed  bool
	running *sync.WaitGroup // attempts, and the end of dead links
}

// opening is one attempt to make a link, shared by all who wait for it.
type opening[L link] struct {
	done chan struct{}
	link L
	err  error
}

// get returns the live link or makes one. Callers share one attempt; each gives up
// by its own context, the attempt goes on for the others.
func (s *slot[L]) get(ctx context.Context) (L, error) {
	var none L
	s.mu.Lock()
	for !s.closed && s.link != none && !s.link.dead() {
		l := s.link
		s.mu.Unlock()
		ready, ok := l.under().(interface{ Ready(context.Context) error })
		if !ok {
			return l, nil
		}
		if err := ready.Ready(ctx); err == nil {
			return l, nil
		} else if !errors.Is(err, net.ErrClosed) {
			return none, err
		}
		l.abandon() // a new one is made below
		s.mu.Lock()
	}
	if s.closed {
		s.mu.Unlock()
		return none, ErrClosed
	}
	o := s.opening
	if o == nil {
		o = &opening[L]{done: make(chan struct{})}
		s.opening = o
		s.running.Add(1)
		// The attempt must outlive this caller's cancellation: others may share it.
		go s.attempt(context.WithoutCancel(ctx), o)
	}
	s.mu.Unlock()
	select {
	case <-o.done:
		return o.link, o.err
	case <-ctx.Done():
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			// Nothing was sent, so this is more than a missing answer.
			return none, fault.New(fault.Unreachable, "connect to %s: no connection when the deadline came", s.peer)
		}
		return none, fault.Wrap(fault.Canceled, ctx.Err(), "connect to %s", s.peer)
	}
}

func (s *slot[L]) attempt(ctx context.Context, o *opening[L]) {
	defer s.running.Done()
	var none L
	l, err := s.dial(ctx)
	s.mu.Lock()
	s.opening = nil
	if err == nil && s.closed {
		err = ErrClosed
	}
	old := s.link
	if err == nil {
		s.link = l
	} else {
		s.link = none
	}
	s.mu.Unlock()
	if old != none {
		old.close()
	}
	if err != nil {
		if l != none {
			l.close()
		}
		o.err = err
	} else {
		o.link = l
	}
	close(o.done)
}

// drop forgets a link that ended. It runs on the link's own goroutine, which
// closing the link may wait for, hence the detour.
func (s *slot[L]) drop(l L) {
	var none L
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.link == l {
		s.link = none
	}
	if s.closed {
		return // take or attempt sees to it
	}
	s.running.Add(1)
	go func() {
		defer s.running.Done()
		l.close()
	}()
}

func (s *slot[L]) rest() {
	var none L
	s.mu.Lock()
	l := s.link
	s.mu.Unlock()
	if l != none {
		l.rest()
	}
}

// shut refuses further calls and returns the link to be closed; the lock is held.
func (s *slot[L]) shut() (last L) {
	var none L
	s.closed = true
	last, s.link = s.link, none
	return last
}

// idle tells whether there is no link and none is being made; the lock is held.
func (s *slot[L]) idle() bool {
	var none L
	return s.link == none && s.opening == nil
}
