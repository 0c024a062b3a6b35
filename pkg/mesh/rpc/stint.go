package rpc

import (
	"sync/atomic"
	"time"
)

// A call that is soon over is run by the goroutine that read it: waking another one
// costs more than the call. How long a call takes is known only afterwards, so a
// method is run there as long as its calls have been quick, and when one is not
// after all, another goroutine reads on in its place.
const (
	// hereLone is how long the calls of a method may take, as a mean, to be run by
	// the reader when no other is there; hereMany when others wait behind it.
	hereLone = 200 * time.Microsecond
	hereMany = 5 * time.Microsecond
	// stintMost is how long one may hold up the reader, to twice that.
	stintMost = time.Millisecond
	// slowFor is how long the calls of a method that held it up run elsewhere.
	slowFor = 10 * time.Second
)

// pace is how long the calls of one method take.
type pace struct {
	mean atomic.Int64 // nanoseconds, of those run by readers; moving
	slow atomic.Int64 // until when none is, Unix nanoseconds
}

// here tells whether the reader is to run the next call itself.
func (p *pace) here(lone bool) bool {
	if until := p.slow.Load(); until != 0 {
		if !lone || time.Now().UnixNano() < until {
			return false
		}
		p.slow.Store(0) // it may be quick by now
		p.mean.Store(0)
	}
	mean := time.Duration(p.mean.Load())
	return lone || mean > 0 && mean <= hereMany
}

func (p *pace) took(d time.Duration) {
	mean := p.mean.Load()
	if mean == 0 {
		mean = int64(d)
	} else {
		mean += (int64(d) - mean) / 8
	}
	p.mean.Store(max(mean, 1))
	if time.Duration(mean) > hereLone {
		p.slow.Store(time.Now().Add(slowFor).UnixNano())
	}
}

// stint is the reader's own run of a call; the lock of answers guards it.
type stint struct {
	timer  *time.Timer
	armed  bool
	runs   uint64 // so far
	looked uint64 // runs at the last look
	job    *job   // that the reader runs, nil for none
}

// runHere runs a call on the reader's goroutine. It is false when that took so long
// that another reads on.
func (a *answers) runHere(j *job) (reads bool) {
	a.mu.Lock()
	t := &a.stint
	t.runs++
	t.job = j
	if !t.armed {
		t.armed, t.looked = true, t.runs
		t.timer.Reset(stintMost)
	}
	a.mu.Unlock()
	j.here = true
	j.run()
	a.mu.Lock()
	defer a.mu.Unlock()
	if t.job != j {
		return false
	}
	t.job = nil
	return true
}

// look runs while the reader runs calls, and reads on for one that is held up.
func (a *answers) look() {
	a.mu.Lock()
	t := &a.stint
	t.armed = false
	switch {
	case a.ended:
	case t.job != nil && t.looked == t.runs: // the same as at the last look
		t.job.unary.pace.slow.Store(time.Now().Add(slowFor).UnixNano())
		t.job = nil
		a.mu.Unlock()
		a.read()
		return
	case t.looked != t.runs:
		t.armed, t.looked = true, t.runs
		t.timer.Reset(stintMost)
	}
	a.mu.Unlock()
}
