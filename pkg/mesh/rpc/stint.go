package rpc

import (
	"sync/atomic"
	"time"
)

// A call that is soon over is run by the goroutine that read it: waking another one
// costs more than the call. How long a call takes is known only afterwards, so a
// method is run there while its calls are quick, wherever they run; and when one is
// not after all, another goroutine reads on in its place.
const (
	// hereLone is how long the calls of a method may take, as a mean, to be run by
	// the reader when no other is there; hereMany when others wait behind it.
	hereLone = 200 * time.Microsecond
	hereMany = 10 * time.Microsecond
	// stintMost is how long one may hold up the reader, to twice that.
	stintMost = time.Millisecond
	// A method that holds up the reader is run elsewhere for slowLeast, each time
	// twice as long, to slowMost; unless goodRuns went well before: it was the
	// machine then, which let the goroutine wait.
	slowLeast = 10 * time.Millisecond
	slowMost  = 10 * time.Second
	goodRuns  = 4096
)

// pace is how long the calls of one method take.
type pace struct {
	mean atomic.Int64 // nanoseconds, moving; 0 while unknown
	good atomic.Int64 // runs by readers since one was held up
	slow atomic.Int64 // for how long the method ran elsewhere, nanoseconds
	till atomic.Int64 // and until when it does, Unix nanoseconds
}

// here tells whether the reader is to run the next call itself.
func (p *pace) here(lone bool, now time.Time) bool {
	mean := time.Duration(p.mean.Load())
	if lone && mean > hereLone || !lone && (mean == 0 || mean > hereMany) {
		return false
	}
	if till := p.till.Load(); till != 0 {
		if now.UnixNano() < till {
			return false
		}
		p.till.Store(0)
	}
	p.good.Add(1)
	return true
}

// took takes in how long a call took. One that took much longer than the mean counts
// little: it may have had to wait for a processor.
func (p *pace) took(d time.Duration) {
	took, mean := int64(d), p.mean.Load()
	if mean == 0 {
		mean = took
	} else {
		mean += (min(took, 4*mean) - mean) / 8
	}
	p.mean.Store(max(mean, 8)) // from less it could not rise
}

// heldUp is said when a call held up the reader.
func (p *pace) heldUp(now time.Time) {
	if p.good.Swap(0) >= goodRuns {
		p.slow.Store(0)
		return
	}
	slow := min(max(2*time.Duration(p.slow.Load()), slowLeast), slowMost)
	p.slow.Store(int64(slow))
	p.till.Store(now.Add(slow).UnixNano())
}

// stint is the reader's own run of a call; the lock of answers guards it.
type stint struct {
	timer  *time.Timer
	armed  bool
	runs   uint64 // so far
	looked uint64 // runs at the last look
	job    *job   // that the reader runs, nil for none
}

// begin is said before the reader runs a call; the lock is held.
func (t *stint) begin(j *job) {
	t.runs++
	t.job = j
	if !t.armed {
		t.armed, t.looked = true, t.runs
		t.timer.Reset(stintMost)
	}
}

// end is said after a call. It is false when that was not the reader's, or took so long
// that another reads on. The lock is held.
func (t *stint) end(j *job) (reads bool) {
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
		t.job.unary.pace.heldUp(time.Now())
		a.count(t.job)
		a.in.leave() // its request may not be decoded yet
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
