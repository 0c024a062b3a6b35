package account

import (
	"sync"
	"time"
)

// Limiter slows guessing: it counts failures of a key over a sliding pair of
// windows. It holds a bounded number of keys; when full, a key that is not in it
// is refused, so that a flood of made-up keys frees nobody.
type Limiter struct {
	window  time.Duration
	allowed int
	most    int
	now     func() time.Time

	mu      sync.Mutex
	current map[string]int
	last    map[string]int
	began   time.Time
}

// NewLimiter allows `allowed` failures of one key in one to two windows.
func NewLimiter(allowed int, window time.Duration, now func() time.Time) *Limiter {
	return &Limiter{window: window, allowed: allowed, most: 20_000, now: now,
		current: map[string]int{}, last: map[string]int{}, began: now()}
}

// Take counts an attempt before it is checked, so that parallel guesses count
// too. It answers how long to wait, 0 for go ahead.
func (l *Limiter) Take(key string) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.turn()
	wait := max(time.Second, l.began.Add(l.window).Sub(l.now()))
	if l.current[key] >= l.allowed {
		// This window's count is held against it for the whole of the next one.
		wait += l.window
	}
	if l.current[key]+l.last[key] >= l.allowed {
		return wait
	}
	if _, known := l.current[key]; !known && len(l.current) >= l.most {
		return wait
	}
	l.current[key]++
	return 0
}

// Forgive forgets a key's attempts after one that succeeded.
func (l *Limiter) Forgive(key string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.current, key)
	delete(l.last, key)
}

// Return takes back one attempt that succeeded, for a key shared by many people.
func (l *Limiter) Return(key string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.current[key] > 1 {
		l.current[key]--
	} else {
		delete(l.current, key)
	}
}

func (l *Limiter) turn() {
	age := l.now().Sub(l.began)
	if age < 0 || age >= 2*l.window {
		l.current, l.last, l.began = map[string]int{}, map[string]int{}, l.now()
	} else if age >= l.window {
		l.last, l.current, l.began = l.current, map[string]int{}, l.began.Add(l.window)
	}
}
