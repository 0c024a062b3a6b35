package keys

import (
	"math"
	"time"
)

// limit is what one key uses. Guarded by Table.mu.
type limit struct {
	running uint32
	// The minute's budget as a bucket that refills evenly. It starts full.
	left   float64
	filled time.Time
	begun  bool
}

// Lease is one request's share of its key's limits. End it on every path; the
// zero value belongs to an anonymous request and limits nothing.
type Lease struct {
	table   *Table
	key     Key
	charged bool
	ended   bool
}

// Begin takes one of the key's concurrent places, or reports false.
func (t *Table) Begin(k Key) (*Lease, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	l := t.limits[k.ID]
	if l == nil {
		l = &limit{}
		t.limits[k.ID] = l
	}
	if k.concurrent > 0 && l.running >= k.concurrent {
		return nil, false
	}
	l.running++
	return &Lease{table: t, key: k}, true
}

// Charge takes one request of the minute's budget, or reports false and after
// how long to ask again. A refused request costs nothing.
func (l *Lease) Charge() (wait time.Duration, ok bool) {
	if l.table == nil || l.key.requestsPerMinute == 0 || l.charged {
		return 0, true
	}
	t := l.table
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.limits[l.key.ID]
	perMinute := float64(l.key.requestsPerMinute)
	now := t.now()
	if !s.begun {
		s.begun, s.left, s.filled = true, perMinute, now
	}
	if passed := now.Sub(s.filled); passed > 0 {
		s.left += passed.Minutes() * perMinute
		s.filled = now
	}
	s.left = min(s.left, perMinute)
	if s.left < 1 {
		minutes := (1 - s.left) / perMinute
		return time.Duration(math.Ceil(minutes * float64(time.Minute))), false
	}
	s.left--
	l.charged = true
	return 0, true
}

// Refund gives the charge back: the request was refused before any engine saw it.
func (l *Lease) Refund() {
	if l.table == nil || !l.charged {
		return
	}
	l.table.mu.Lock()
	defer l.table.mu.Unlock()
	l.charged = false
	if s := l.table.limits[l.key.ID]; s != nil {
		s.left++
	}
}

// End gives the place back. Later calls do nothing.
func (l *Lease) End() {
	if l.table == nil || l.ended {
		return
	}
	l.table.mu.Lock()
	defer l.table.mu.Unlock()
	l.ended = true
	if s := l.table.limits[l.key.ID]; s != nil && s.running > 0 {
		s.running--
	}
}
