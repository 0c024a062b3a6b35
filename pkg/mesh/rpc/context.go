package rpc

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// callContext is the context of one call at the answering end. It becomes a
// context of the standard library when somebody first asks for Done, or once it
// has ended: most handlers never ask, and a timer for each call costs more than
// the call's own work.
type callContext struct {
	stream   context.Context // of the stream of calls
	deadline time.Time       // zero for none

	whole  atomic.Pointer[wholeContext]
	mu     sync.Mutex // of what follows, and of making whole
	cancel bool       // end was called
}

type wholeContext struct {
	context.Context
	end context.CancelFunc
}

// become returns the whole context.
func (c *callContext) become() *wholeContext {
	if w := c.whole.Load(); w != nil {
		return w
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if w := c.whole.Load(); w != nil {
		return w
	}
	w := &wholeContext{}
	if c.deadline.IsZero() {
		w.Context, w.end = context.WithCancel(c.stream)
	} else {
		w.Context, w.end = context.WithDeadline(c.stream, c.deadline)
	}
	if c.cancel {
		w.end()
	}
	c.whole.Store(w)
	return w
}

// end ends the context: the call is over, or its caller gave up.
func (c *callContext) end() {
	c.mu.Lock()
	c.cancel = true
	w := c.whole.Load()
	c.mu.Unlock()
	if w != nil {
		w.end()
	}
}

func (c *callContext) Deadline() (time.Time, bool) {
	if c.deadline.IsZero() {
		return c.stream.Deadline()
	}
	return c.deadline, true
}

func (c *callContext) Done() <-chan struct{} { return c.become().Done() }

func (c *callContext) Err() error {
	if w := c.whole.Load(); w != nil {
		return w.Err()
	}
	c.mu.Lock()
	over := c.cancel
	c.mu.Unlock()
	over = over || c.stream.Err() != nil || !c.deadline.IsZero() && !time.Now().Before(c.deadline)
	if !over {
		return nil
	}
	return c.become().Err()
}

// Value asks the whole context once there is one: the standard library finds it by
// that, and need not watch this one with a goroutine.
func (c *callContext) Value(key any) any {
	if w := c.whole.Load(); w != nil {
		return w.Value(key)
	}
	return c.stream.Value(key)
}
