// Package reconcile is the orchestrator's loop: it brings together what is
// recorded, what the racks' workers report and what agents say, lets package
// life decide, stores the result and carries out the orders that follow.
//
// It is level-triggered. What wakes it (a change of the record, a report, an
// agent's word, a timer) only says where to look; every pass decides from what
// is there. A pass that was missed, or a process killed at any point, costs a
// repetition: orders are repeated until their effect is seen, and each may be
// repeated without harm. One goroutine decides; calls to workers run beside it
// and come back as something seen.
//
// It never concludes anything from an error of the storage or of a call.
package reconcile

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/cosmicac/cosmicac/pkg/fault"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/life"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/notice"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/rack"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/record"
)

// Racks is what the loop needs of the fleet.
type Racks interface {
	Views() []rack.View
	Client(id string) (workerv1.RackClient, bool)
}

// Agents is what the loop needs of the agents' desk.
type Agents interface {
	Sight(*job.Attempt) life.Agent
	Drain(attemptID string, deadline time.Time)
	Forget(attemptID string)
	Token(attemptID string, plan, node uint32) string
}

// Counters is told what happened, for metrics.
type Counters interface {
	// Placement counts one decision; result is "placed" or a reason's name.
	Placement(result string)
	// Outcome counts an attempt that ended.
	Outcome(state, reason string)
	// Failure counts a pass over a job, or a call, that failed. Doing is one
	// of a few words.
	Failure(doing string)
	// Storage is told how the record answered at each pass; nil is well.
	Storage(err error)
}

// Options sets up a Loop.
type Options struct {
	Store  *record.Store
	Hub    *notice.Hub
	Racks  Racks
	Agents Agents
	// Seeds is what every seed has in common, asked at each proposal.
	Seeds    func() Seeds
	Limits   life.Limits
	NewID    life.NewID
	Counters Counters
	Clock    func() time.Time
	Log      hclog.Logger
	// Every is the time between passes over all live jobs.
	Every time.Duration
	// CallTimeout bounds one call to a worker.
	CallTimeout time.Duration
	// Repeat is how long after a worker took an order it is given again, while
	// its effect is not seen.
	Repeat time.Duration
	// ReserveAfter is how long a job waits for capacity before what it needs is
	// kept for it.
	ReserveAfter time.Duration
	// Age is how long a wait counts for one step of priority.
	Age time.Duration
	// StartsAtOnce is how many VMs are started at once on a node for one GPU model: a
	// node that fails every start must not take in all that waits.
	StartsAtOnce int
	// Stood is told when the process had stood still for a while; may be nil.
	Stood func(time.Duration)
	// Alive is told at each pass; may be nil.
	Alive func()
}

// Loop is the reconciler. Run owns everything it starts.
type Loop struct {
	o       Options
	started time.Time
	looked  time.Time      // when the clock was last looked at
	starts  func() *starts // of the pass under way, counted when it is first asked
	wake    chan struct{}
	calls   sync.WaitGroup
	slots   chan struct{} // bounds calls under way

	mu    sync.Mutex
	dirty map[string]struct{}
	seen  map[string]*word     // by attempt id
	disks map[string]time.Time // job id + "/" + rack id: the order was taken
	pace  map[string]*pace     // by order

	// strays are jobs without a record of which racks report something: true for
	// those that were deleted here.
	strays map[string]bool
}

// word is what calls brought back about an attempt.
type word struct {
	answer    *life.Answer
	proposing bool
	proposed  uint32 // the newest plan that was proposed, 0 for none
	deletedAt time.Time
}

// pace keeps an order from being given too often.
type pace struct {
	running  bool
	failures uint32
	next     time.Time
}

// New makes a loop. Silence is counted from now on.
func New(o Options) *Loop {
	for d, def := range map[*time.Duration]time.Duration{
		&o.Every: 2 * time.Second, &o.CallTimeout: 20 * time.Second, &o.Repeat: 30 * time.Second, &o.ReserveAfter: 10 * time.Minute,
		&o.Age: 10 * time.Minute,
	} {
		if *d == 0 {
			*d = def
		}
	}
	return &Loop{
		o: o, started: o.Clock(), wake: make(chan struct{}, 1), slots: make(chan struct{}, 64),
		dirty: make(map[string]struct{}), seen: make(map[string]*word),
		disks: make(map[string]time.Time), pace: make(map[string]*pace),
		strays: make(map[string]bool),
	}
}

// Poke asks for a pass over the jobs soon; without ids, for placement alone. It
// does not block.
func (l *Loop) Poke(jobIDs ...string) {
	l.mu.Lock()
	for _, id := range jobIDs {
		l.dirty[id] = struct{}{}
	}
	l.mu.Unlock()
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// Wakes that come together are gathered into one pass: for settleTime, or as long as
// the last pass took, so that with many jobs in motion half of a processor is left to
// those who ask.
const (
	settleTime = 20 * time.Millisecond
	settleMost = 500 * time.Millisecond
)

// Run decides until ctx ends, and waits for the calls under way.
func (l *Loop) Run(ctx context.Context) error {
	defer l.calls.Wait()
	sub := l.o.Hub.Subscribe()
	defer sub.Close()
	full := time.NewTicker(l.o.Every)
	defer full.Stop()
	all := true
	for {
		began := time.Now()
		l.pass(ctx, all)
		all = false
		pause := min(max(settleTime, time.Since(began)), settleMost)
		select {
		case <-ctx.Done():
			return nil
		case <-full.C:
			all = true
		case <-sub.Ready():
			l.Poke(sub.Take()...)
		case <-l.wake:
			settle := time.NewTimer(pause)
			select {
			case <-ctx.Done():
				settle.Stop()
				return nil
			case <-settle.C:
			}
		}
	}
}

// pass looks at the dirty jobs, or at all live ones too, and then places.
func (l *Loop) pass(ctx context.Context, all bool) {
	l.mu.Lock()
	if all {
		for id := range l.strays {
			l.dirty[id] = struct{}{} // until no rack reports it
		}
	}
	ids := slices.Sorted(maps.Keys(l.dirty))
	clear(l.dirty)
	l.mu.Unlock()
	if l.o.Alive != nil {
		l.o.Alive()
	}
	l.now()
	views := l.o.Racks.Views()
	live, err := l.o.Store.Live(ctx)
	if ctx.Err() == nil {
		l.o.Counters.Storage(err)
	}
	if err != nil {
		l.failed(ctx, "read", err)
		l.Poke(ids...) // nothing is lost: looked at again
		return
	}
	l.starts = sync.OnceValue(func() *starts { return l.countStarts(live) })
	known := make(map[string]bool, len(live))
	for i, j := range live {
		known[j.ID] = true
		if all || contains(ids, j.ID) {
			if is := l.look(ctx, j, views); is != nil {
				live[i] = is
			}
		}
	}
	for _, id := range ids {
		if known[id] {
			continue
		}
		// Settled, or removed; a worker may still report something of it.
		j, err := l.o.Store.Job(ctx, id)
		switch {
		case fault.KindOf(err) == fault.NotFound:
			l.stray(ctx, id, views)
		case err != nil:
			l.failed(ctx, "read", err)
			l.Poke(id)
		default:
			l.look(ctx, j, views)
		}
	}
	l.place(ctx, live, views)
	if all {
		l.sweep(live)
	}
}

// stillness is how much later than a pass is due the clock may be looked at again
// before the process counts as having stood still: stopped, swapped out, or on a host
// that slept.
const stillness = 10 * time.Second

// now is the time to judge by. When the process stood still since it was last asked,
// also in the middle of a pass, it begins to listen anew: what happened meanwhile was
// not heard, so nobody's silence and no deadline of that time counts.
func (l *Loop) now() time.Time {
	now := l.o.Clock()
	still := now.Sub(l.looked)
	if !l.looked.IsZero() && still >= l.o.Every+stillness {
		l.started = now
		l.o.Log.Warn("this process stood still; nothing is judged by what was not heard meanwhile", "for", still)
		if l.o.Stood != nil {
			l.o.Stood(still)
		}
	}
	l.looked = now
	return now
}

func contains(sorted []string, id string) bool {
	_, ok := slices.BinarySearch(sorted, id)
	return ok
}

// look decides about one job and gives the orders that are due. It returns the
// job as it is recorded now, nil when it could not be recorded.
func (l *Loop) look(ctx context.Context, j *job.Job, views []rack.View) *job.Job {
	sight := l.sight(j, views)
	is, events := life.Advance(l.o.Limits, j, sight, l.o.NewID)
	if !record.Same(j, is) || len(events) > 0 {
		// Decided again on what is recorded at this moment: somebody may have
		// asked for something in between.
		var ended []job.Event
		stored, err := l.o.Store.Update(ctx, j.ID, func(was *job.Job) (*job.Job, []job.Event, error) {
			next, events := life.Advance(l.o.Limits, was, sight, l.o.NewID)
			ended = events
			return next, events, nil
		})
		if err != nil {
			l.failed(ctx, "record", err)
			return nil
		}
		is = stored
		for _, e := range ended {
			if job.Ended(e.State) && !was(j, e.AttemptID) {
				l.o.Counters.Outcome(job.StateName(e.State), job.ReasonName(e.Reason))
			}
			l.o.Log.Info("attempt changed", "job", j.ID, "attempt", e.AttemptID, "state", job.StateName(e.State), "reason", job.ReasonName(e.Reason), "message", e.Message)
		}
	}
	l.consume(is)
	for _, o := range life.Orders(l.o.Limits, is, sight) {
		l.carryOut(ctx, is, o)
	}
	return is
}

// was reports whether the attempt had ended in this version.
func was(j *job.Job, attemptID string) bool {
	_, a := j.Attempt(attemptID)
	return a != nil && job.Ended(a.State)
}

// sight gathers what is seen of a job.
func (l *Loop) sight(j *job.Job, views []rack.View) life.Sight {
	now := l.now()
	s := life.Sight{
		Now: now, Started: l.started,
		Racks: make(map[string]life.Rack), Attempts: make(map[string]life.Attempt),
	}
	byID := make(map[string]rack.View, len(views))
	for _, v := range views {
		byID[v.Entry.Id] = v
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	add := func(id string) {
		v, ok := byID[id]
		if !ok {
			return
		}
		r := life.Rack{
			Connected: v.Connected, Since: v.Since, ReportedAt: v.ReportedAt, Disk: v.Disk(j.ID),
			DisksDeletedAt: l.disks[j.ID+"/"+id],
		}
		if v.Report != nil {
			r.Synced, r.Simulated, r.Fault = v.Report.Synced, v.Report.Simulated, v.Report.ClusterFault
			if v.Report.ClusterFaultSince.IsValid() {
				r.FaultSince = v.Report.ClusterFaultSince.AsTime()
			}
		}
		r.Quarantined, r.Failing = v.Quarantined, l.o.Store.Failing(id)
		if e := v.Entry; e.DrainSince.IsValid() {
			r.DrainSince, r.DrainDeadline, r.DrainActor = e.DrainSince.AsTime(), e.DrainDeadline.AsTime(), e.DrainActor
		}
		s.Racks[id] = r
	}
	for _, id := range j.Touched {
		add(id)
	}
	for _, r := range j.Replicas {
		for _, a := range r.Attempts {
			seen := life.Attempt{}
			if w := l.seen[a.ID]; w != nil {
				seen.Answer, seen.Proposing, seen.DeletedAt = w.answer, w.proposing, w.deletedAt
			}
			if a.RackID != "" {
				add(a.RackID)
				if v, ok := byID[a.RackID]; ok {
					seen.Status = v.Status(a.ID)
				}
			}
			if !job.Ended(a.State) {
				seen.Agent = l.o.Agents.Sight(a)
			}
			s.Attempts[a.ID] = seen
		}
	}
	return s
}

// consume forgets answers that were taken in, and what is over.
func (l *Loop) consume(j *job.Job) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, r := range j.Replicas {
		for _, a := range r.Attempts {
			w := l.seen[a.ID]
			if a.Settled() {
				l.o.Agents.Forget(a.ID)
			}
			if w == nil {
				continue
			}
			if a.State != orkv1.State_STATE_RESERVING || (w.answer != nil && w.answer.Plan != a.Plan) {
				w.answer = nil
			}
			if a.Settled() && !w.proposing {
				delete(l.seen, a.ID)
			}
		}
	}
}

// sweep forgets the paces and acknowledgements of jobs that are over.
func (l *Loop) sweep(live []*job.Job) {
	alive := make(map[string]bool)
	for _, j := range live {
		alive[j.ID] = true
		for _, r := range j.Replicas {
			for _, a := range r.Attempts {
				alive[a.ID] = true
			}
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	now := l.o.Clock()
	for key, p := range l.pace {
		if !p.running && now.Sub(p.next) > time.Minute {
			delete(l.pace, key)
		}
	}
	for key := range l.disks {
		if id, _, _ := cut(key); !alive[id] {
			delete(l.disks, key)
		}
	}
}

// failed notes a failure that changes nothing.
func (l *Loop) failed(ctx context.Context, doing string, err error) {
	if ctx.Err() != nil {
		return
	}
	l.o.Counters.Failure(doing)
	l.o.Log.Warn("nothing was decided, tried again", "doing", doing, "error", err)
}
