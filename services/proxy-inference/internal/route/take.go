package route

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

// Reason says why no replica was given. Closed, append-only; it is the code
// that clients see.
type Reason string

const (
	// Gone: the endpoint is no longer in the table.
	Gone Reason = "model_not_found"
	// Busy: every replica has as much as it may.
	Busy Reason = "all_replicas_busy"
	// Loading: a replica is on its way, and the time to wait is over.
	Loading Reason = "model_loading"
	// Waiting: the job waits for capacity.
	Waiting Reason = "waiting_for_capacity"
	// Ended: the job was stopped or has failed.
	Ended Reason = "endpoint_stopped"
	// Tried: each replica that could serve was tried for this request.
	Tried Reason = "replicas_unreachable"
	// None: there is no replica, and none is on its way.
	None Reason = "no_ready_replica"
)

// Refusal is why a request got no replica.
type Refusal struct {
	Reason  Reason
	Message string
	// RetryAfter is when it may be worth to ask again; zero for unknown.
	RetryAfter time.Duration
	// hold: it may pass by itself within the time that a request waits.
	hold bool
}

// Lease is one request's place on a replica. Release it on every path.
type Lease struct {
	Replica
	table    *Table
	load     *load
	released bool
}

// Take gives a request a replica of an endpoint that is not among those tried.
// While none is ready and one is on its way, or may come back, it waits, up to the hold and as
// long as ctx lives. It never waits when something was tried already.
func (t *Table) Take(ctx context.Context, endpointID string, affinity uint64, tried []string) (*Lease, *Refusal) {
	lease, refusal, changed := t.take(endpointID, affinity, tried)
	if lease != nil || !refusal.hold || len(tried) > 0 || !t.hold() {
		return lease, refusal
	}
	defer t.unhold()
	timer := time.NewTimer(t.o.Hold)
	defer timer.Stop()
	for {
		select {
		case <-changed:
			lease, refusal, changed = t.take(endpointID, affinity, tried)
			if lease != nil || !refusal.hold {
				return lease, refusal
			}
		case <-timer.C:
			return nil, refusal
		case <-ctx.Done():
			return nil, refusal
		}
	}
}

func (t *Table) hold() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.held >= t.o.MaximumHeld {
		return false
	}
	t.held++
	return true
}

func (t *Table) unhold() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.held--
}

// take is Take without waiting. The channel is closed when it may differ.
func (t *Table) take(endpointID string, affinity uint64, tried []string) (*Lease, *Refusal, <-chan struct{}) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e, ok := t.endpoints[endpointID]
	if !ok {
		return nil, &Refusal{Reason: Gone, Message: "the model does not exist or you do not have access to it"}, t.changed
	}
	if over(e.State) {
		return nil, t.refuse(e, tried), t.changed
	}
	now := t.o.Now()
	var good, poor []Replica
	for _, r := range e.replicas {
		if !r.ready || r.draining || slices.Contains(tried, r.AttemptID) {
			continue
		}
		if l := t.load(r.AttemptID); l.silent || now.Before(l.until) {
			poor = append(poor, r)
		} else {
			good = append(good, r)
		}
	}
	if len(good) == 0 {
		good = poor
	}
	if len(good) == 0 {
		return nil, t.refuse(e, tried), t.changed
	}
	free := make([]Candidate, 0, len(good))
	at := make([]int, 0, len(good))
	for i, r := range good {
		if n := t.load(r.AttemptID).inFlight; n < t.o.MaximumInFlight {
			free = append(free, Candidate{ID: r.AttemptID, InFlight: n})
			at = append(at, i)
		}
	}
	if len(free) == 0 {
		return nil, &Refusal{Reason: Busy, RetryAfter: time.Second,
			Message: fmt.Sprintf("all %d replicas of this model are busy; try again shortly", len(good))}, t.changed
	}
	r := good[at[Pick(free, affinity, t.o.Random)]]
	l := t.load(r.AttemptID)
	l.inFlight++
	return &Lease{Replica: r, table: t, load: l}, nil, t.changed
}

func (t *Table) refuse(e *Endpoint, tried []string) *Refusal {
	detail := ""
	if e.Message != "" {
		detail = ": " + e.Message
	}
	switch {
	case e.Over():
		state := strings.ToLower(strings.TrimPrefix(e.State.String(), "STATE_"))
		return &Refusal{Reason: Ended, Message: "the job behind this model is " + state + "; start it to use the model" + detail}
	case len(tried) > 0:
		return &Refusal{Reason: Tried, RetryAfter: 2 * time.Second, Message: "no replica of this model could be reached"}
	case e.loading():
		return &Refusal{Reason: Loading, RetryAfter: 10 * time.Second, hold: true, Message: "the model is loading" + detail}
	case e.State == orkv1.State_STATE_QUEUED || e.State == orkv1.State_STATE_RESERVING:
		return &Refusal{Reason: Waiting, RetryAfter: 30 * time.Second, Message: "the job behind this model waits for capacity" + detail}
	default:
		return &Refusal{Reason: None, RetryAfter: 5 * time.Second, hold: e.lost(), Message: "no replica of this model is ready" + detail}
	}
}

// Others tells whether a replica that was not tried could take over now.
func (t *Table) Others(endpointID string, tried []string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	e, ok := t.endpoints[endpointID]
	if !ok || over(e.State) {
		return false
	}
	now := t.o.Now()
	for _, r := range e.replicas {
		if !r.ready || r.draining || slices.Contains(tried, r.AttemptID) {
			continue
		}
		if l := t.load(r.AttemptID); !l.silent && !now.Before(l.until) && l.inFlight < t.o.MaximumInFlight {
			return true
		}
	}
	return false
}

// Release gives the place back. Later calls do nothing.
func (l *Lease) Release() {
	l.table.mu.Lock()
	defer l.table.mu.Unlock()
	if l.released {
		return
	}
	l.released = true
	l.load.inFlight--
	delete(l.load.onSilent, l)
}

// firstRest and longestRest bound how long a connection fault lowers a rank.
const (
	firstRest   = time.Second
	longestRest = 30 * time.Second
)

// Faulted says that the connection failed, by no fault of the client: the
// replica is ranked last for 1 s, twice as long each further time in a row. It
// reports whether that began now: one burst of faults counts once.
func (l *Lease) Faulted() bool {
	l.table.mu.Lock()
	defer l.table.mu.Unlock()
	now := l.table.o.Now()
	if now.Before(l.load.until) {
		return false
	}
	l.load.until = now.Add(min(firstRest<<min(l.load.faults, 5), longestRest))
	l.load.faults++
	return true
}

// Answered says that the replica answered, whatever it said.
func (l *Lease) Answered() {
	l.table.mu.Lock()
	defer l.table.mu.Unlock()
	l.load.faults, l.load.until = 0, time.Time{}
}

// OnSilent calls f, once, if the replica's link turns suspect before Release or
// the returned stop. f must not block.
func (l *Lease) OnSilent(f func()) (stop func()) {
	t := l.table
	t.mu.Lock()
	defer t.mu.Unlock()
	if l.load.onSilent == nil {
		l.load.onSilent = map[*Lease]func(){}
	}
	l.load.onSilent[l] = f
	return func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		delete(l.load.onSilent, l)
	}
}
