package life

import (
	"fmt"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"pgregory.net/rapid"

	agentv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
)

// world is a cluster, its worker, its agents and the lines between, in one
// value: what is true, beside what the orchestrator has seen of it.
type world struct {
	t       *rapid.T
	limits  Limits
	now     time.Time
	started time.Time
	ids     int
	job     *job.Job
	removed bool

	// The truth.
	held  map[string]*workerv1.AttemptStatus
	disk  bool
	alive bool // the worker can be reached
	// What was seen.
	rack    Rack
	listed  map[string]*workerv1.AttemptStatus
	words   map[string]*Attempt
	agents  map[string]*Agent
	flying  map[string]bool // proposals sent and not yet delivered
	ended   map[string]orkv1.State
	charged map[string]time.Duration // GPU time of what is gone
	entry   bool                     // the operator's entry is there
	history []string
}

func newWorld(t *rapid.T, kind orkv1.JobKind) *world {
	w := &world{
		t: t, limits: DefaultLimits(), now: time.Unix(1_800_000_000, 0).UTC(), alive: true,
		held: map[string]*workerv1.AttemptStatus{}, listed: map[string]*workerv1.AttemptStatus{},
		words: map[string]*Attempt{}, agents: map[string]*Agent{}, flying: map[string]bool{}, ended: map[string]orkv1.State{},
		charged: map[string]time.Duration{}, entry: true,
	}
	w.started = w.now
	spec := &orkv1.JobSpec{
		Kind: kind, Name: "x", Location: "us", Gpu: &orkv1.GpuRequest{Model: "m", Count: 1},
		CostLimitCents: rapid.SampledFrom([]uint64{0, 0, 20}).Draw(t, "cost limit"),
		Alerts:         &orkv1.Alerts{QueuedAfter: durationpb.New(time.Minute), UnreachableAfter: durationpb.New(time.Minute)},
	}
	if kind == orkv1.JobKind_JOB_KIND_GPU_CONTAINER && rapid.Bool().Draw(t, "idle stop") {
		spec.IdleStop = durationpb.New(2 * time.Minute)
	}
	if kind == orkv1.JobKind_JOB_KIND_MANAGED_INFERENCE {
		spec.Inference = &orkv1.InferenceSpec{Model: "m", Runtime: "vllm", Replicas: 2}
	}
	w.job, _ = New(spec, &orkv1.Owner{ProjectId: "p"}, w.now, w.id)
	w.job.Price = &orkv1.Price{CentsPerGpuHour: 60}
	return w
}

func (w *world) id(prefix string) string {
	w.ids++
	return fmt.Sprintf("%s-%d", prefix, w.ids)
}

func (w *world) note(format string, a ...any) {
	w.history = append(w.history, fmt.Sprintf(format, a...))
	if len(w.history) > 60 {
		w.history = w.history[1:]
	}
}

func (w *world) fail(format string, a ...any) {
	w.t.Fatalf("%s\nhistory: %v\njob: %v", fmt.Sprintf(format, a...), w.history, w.job.View())
}

func (w *world) word(id string) *Attempt {
	if w.words[id] == nil {
		w.words[id] = &Attempt{}
	}
	return w.words[id]
}

func (w *world) sight() Sight {
	s := Sight{Now: w.now, Started: w.started, Racks: map[string]Rack{}, Attempts: map[string]Attempt{}}
	if w.entry {
		s.Racks["rk"] = w.rack
	}
	for _, r := range w.job.Replicas {
		for _, a := range r.Attempts {
			seen := *w.word(a.ID)
			if a.RackID != "" && w.entry {
				seen.Status = w.listed[a.ID]
			}
			if g := w.agents[a.ID]; g != nil {
				seen.Agent = *g
			}
			s.Attempts[a.ID] = seen
		}
	}
	return s
}

// pass is one turn of the reconciler; carry says which orders get through.
func (w *world) pass(carry func(Order) bool) {
	if w.removed {
		return
	}
	next, _ := Advance(w.limits, w.job, w.sight(), w.id)
	w.set(next)
	for _, r := range w.job.Replicas {
		for _, a := range r.Attempts {
			if word := w.word(a.ID); a.State != reserving || (word.Answer != nil && word.Answer.Plan != a.Plan) {
				word.Answer = nil
			}
		}
		if a := r.Newest(); w.job.Intent == job.IntentRun && Eligible(r, a, w.now) && w.entry && w.rack.complete() && w.rack.DrainDeadline.IsZero() {
			next := w.job.Clone()
			_, b := next.Attempt(a.ID)
			Placed(b, "rk", "m", []*orkv1.AttemptNode{{NodeName: "n", GpuCount: 1}})
			Settle(next, w.job, w.sight())
			w.set(next)
		}
	}
	for _, o := range Orders(w.limits, w.job, w.sight()) {
		if carry(o) {
			w.do(o)
		}
	}
	w.check()
}

func (w *world) set(next *job.Job) {
	w.job = next
	for _, r := range next.Replicas {
		for _, a := range r.Attempts {
			if was, ok := w.ended[a.ID]; ok && was != a.State {
				w.fail("the outcome of %s was %s and is %s", a.ID, was, a.State)
			}
			if job.Ended(a.State) {
				w.ended[a.ID] = a.State
			}
			if was, ok := w.charged[a.ID]; ok && a.Gone && a.GPUTime(w.now.Add(time.Hour)) != was {
				w.fail("%s was charged for %s and is for %s, and is gone", a.ID, was, a.GPUTime(w.now))
			}
			if a.Gone {
				w.charged[a.ID] = a.GPUTime(w.now)
			} else {
				delete(w.charged, a.ID)
			}
		}
	}
}

func (w *world) do(o Order) {
	if !w.entry && o.Kind != Remove && o.Kind != Drain {
		return
	}
	switch o.Kind {
	case Propose:
		if w.rack.Connected && !w.word(o.AttemptID).Proposing {
			next := w.job.Clone()
			_, a := next.Attempt(o.AttemptID)
			a.Sent = true
			next.Touch("rk")
			w.set(next)
			w.word(o.AttemptID).Proposing = true
			w.flying[o.AttemptID] = true
			w.note("propose %s", o.AttemptID)
		}
	case Delete:
		if w.rack.Connected && w.alive {
			if st := w.held[o.AttemptID]; st != nil {
				st.Phase = workerv1.AttemptPhase_ATTEMPT_PHASE_DELETING
			}
			if word := w.word(o.AttemptID); word.DeletedAt.IsZero() {
				word.DeletedAt = w.now
			}
			w.note("delete %s", o.AttemptID)
		}
	case DeleteDisks:
		if w.rack.Connected && w.alive {
			w.disk = false
			if w.rack.DisksDeletedAt.IsZero() {
				w.rack.DisksDeletedAt = w.now
			}
		}
	case Remove:
		// What an operator abandoned is his to look after; all else must be gone.
		if (len(w.held) > 0 || w.disk) && w.entry {
			w.fail("removed while the cluster holds %v, disk %v", w.held, w.disk)
		}
		w.removed = true
	}
}

// deliver lets one proposal arrive; its answer may be lost.
func (w *world) deliver(id string, claim, lost bool) {
	delete(w.flying, id)
	word := w.word(id)
	word.Proposing = false
	_, a := w.job.Attempt(id)
	if !w.alive || a == nil {
		return
	}
	st := w.held[id]
	if st == nil && claim {
		st = &workerv1.AttemptStatus{AttemptId: id, Phase: workerv1.AttemptPhase_ATTEMPT_PHASE_CREATING}
		w.held[id], w.disk = st, true
	}
	if !lost {
		word.Answer = &Answer{Plan: a.Plan, Claimed: st != nil, Reason: orkv1.Reason_REASON_BUSY}
	}
	w.note("deliver %s claimed=%v lost=%v", id, st != nil, lost)
}

func (w *world) report() {
	if !w.alive || !w.entry {
		return
	}
	if !w.rack.Connected {
		w.rack.Connected, w.rack.Since = true, w.now
	}
	w.rack.Synced, w.rack.ReportedAt, w.rack.Disk = true, w.now, w.disk
	w.listed = map[string]*workerv1.AttemptStatus{}
	for id, st := range w.held {
		w.listed[id] = &workerv1.AttemptStatus{AttemptId: id, Phase: st.Phase, Reason: st.Reason, GuestSucceeded: st.GuestSucceeded}
	}
	w.note("report %d", len(w.held))
}

// check holds after every pass.
func (w *world) check() {
	for _, r := range w.job.Replicas {
		holding := 0
		for _, a := range r.Attempts {
			if w.held[a.ID] != nil || w.flying[a.ID] {
				if !a.FencedByOperator && !a.Abandoned.Set() {
					holding++
				}
				if a.Gone {
					w.fail("%s counts as gone while the cluster holds it (in flight: %v)", a.ID, w.flying[a.ID])
				}
			}
		}
		if holding > 1 {
			w.fail("two attempts of one replica hold GPUs")
		}
		if a := r.Newest(); w.job.Intent == job.IntentRun && job.Ended(a.State) && (a.Recycle != 0 || a.FencedByOperator) {
			w.fail("%s was ended for another to follow, and none does", a.ID)
		}
	}
	if state, reason, _ := Fold(w.job.Replicas); state != w.job.State || reason != w.job.Reason {
		w.fail("the job's state is not what its replicas say: %s %s", state, reason)
	}
}

// step does one thing that can happen.
func (w *world) step() {
	t := w.t
	pick := func(m map[string]*workerv1.AttemptStatus) string {
		for _, r := range w.job.Replicas {
			for _, a := range r.Attempts {
				if m[a.ID] != nil && rapid.Bool().Draw(t, "this") {
					return a.ID
				}
			}
		}
		return ""
	}
	switch rapid.IntRange(0, 18).Draw(t, "happens") {
	case 0:
		w.now = w.now.Add(time.Duration(rapid.IntRange(1, 60).Draw(t, "seconds")) * time.Second)
	case 1:
		w.alive = false
		w.rack.Connected, w.rack.Since = false, w.now
		w.note("cut")
	case 2:
		w.alive = true
		w.report()
	case 3, 4:
		w.report()
	case 5:
		for _, r := range w.job.Replicas {
			if id := r.Newest().ID; w.flying[id] {
				w.deliver(id, rapid.Bool().Draw(t, "claim"), rapid.SampledFrom([]bool{false, false, true}).Draw(t, "lost"))
			}
		}
	case 6, 7:
		if id := pick(w.held); id != "" {
			st := w.held[id]
			if st.Phase < workerv1.AttemptPhase_ATTEMPT_PHASE_UP {
				st.Phase++
			} else if st.Phase == workerv1.AttemptPhase_ATTEMPT_PHASE_DELETING {
				delete(w.held, id)
				w.note("absent %s", id)
			}
		}
	case 8:
		if id := pick(w.held); id != "" && w.held[id].Phase == workerv1.AttemptPhase_ATTEMPT_PHASE_UP {
			next := w.job.Clone()
			_, a := next.Attempt(id)
			if a.AgentKey == "" && !job.Ended(a.State) && a.State != queued {
				a.AgentKey = "key-" + id
				w.set(next)
			}
			w.agents[id] = &Agent{Attending: true, Since: w.now, HeardAt: w.now, NodesReady: true, Report: &agentv1.Report{
				Phase: rapid.SampledFrom([]agentv1.Phase{agentv1.Phase_PHASE_STARTING, agentv1.Phase_PHASE_READY, agentv1.Phase_PHASE_READY, agentv1.Phase_PHASE_FAILED}).Draw(t, "phase"),
			}}
		}
	case 9:
		for _, g := range w.agents {
			g.Attending, g.HeardAt = false, w.now
		}
	case 10:
		if id := pick(w.held); id != "" && w.held[id].Phase == workerv1.AttemptPhase_ATTEMPT_PHASE_UP {
			w.held[id].Phase = rapid.SampledFrom([]workerv1.AttemptPhase{workerv1.AttemptPhase_ATTEMPT_PHASE_ENDED, workerv1.AttemptPhase_ATTEMPT_PHASE_FAILED}).Draw(t, "ends")
			w.held[id].GuestSucceeded = rapid.Bool().Draw(t, "well")
		}
	case 11:
		next, _ := Stop(w.job, "u")
		w.set(next)
		w.note("stop")
	case 14:
		if next, _, err := Restart(w.job, "u", w.now, w.id); err == nil {
			w.set(next)
			w.note("restart asked")
		}
	case 15:
		for _, r := range w.job.Replicas {
			if next, _, err := Fence(w.job, r.Newest().ID, "op", w.now); err == nil {
				w.set(next)
				w.note("fence %s", r.Newest().ID)
			}
		}
	case 16:
		if w.rack.DrainDeadline.IsZero() {
			w.rack.DrainSince, w.rack.DrainDeadline, w.rack.DrainActor = w.now, w.now.Add(time.Minute), "op"
		} else {
			w.rack.DrainDeadline = time.Time{}
		}
		w.note("drained %v", !w.rack.DrainDeadline.IsZero())
	case 17:
		if len(w.rack.Quarantined) == 0 {
			w.rack.Quarantined = []*orkv1.Quarantine{{NodeName: "n", Message: "evidence"}}
		} else {
			w.rack.Quarantined = nil
		}
	case 18:
		next := w.job.Clone()
		if w.entry {
			Abandon(next, "rk", "op", w.now)
			w.entry, w.rack, w.listed = false, Rack{}, map[string]*workerv1.AttemptStatus{}
		} else {
			w.entry = true
			Reclaim(next, "rk", rapid.Bool().Draw(t, "adopt"), "op", w.now)
		}
		w.set(next)
		w.note("entry %v", w.entry)
	case 12:
		if next, _, err := Start(w.job, "u", w.now, w.id); err == nil {
			w.set(next)
			w.note("start")
		}
	case 13:
		// The orchestrator restarts: memory is lost, the record stays, and calls
		// that were under way may still arrive at the worker.
		for id := range w.flying {
			w.deliver(id, true, true)
		}
		w.words, w.agents, w.listed = map[string]*Attempt{}, map[string]*Agent{}, map[string]*workerv1.AttemptStatus{}
		w.rack, w.started = Rack{}, w.now
		w.note("restart")
	}
}

func TestAnyCourseOfEventsKeepsTheRulesAndCanBeDeleted(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(t, rapid.SampledFrom([]orkv1.JobKind{orkv1.JobKind_JOB_KIND_GPU_CONTAINER, orkv1.JobKind_JOB_KIND_MANAGED_INFERENCE}).Draw(t, "kind"))
		for range rapid.IntRange(1, 80).Draw(t, "steps") {
			w.step()
			w.pass(func(Order) bool { return rapid.SampledFrom([]bool{true, true, true, false}).Draw(t, "carried") })
		}
		// Whatever happened: with all lines open a delete ends with nothing left.
		next, _ := AskDelete(w.job, "u", w.now)
		w.set(next)
		w.alive = true
		for range 60 {
			for id := range w.flying {
				w.deliver(id, true, false)
			}
			for id, st := range w.held {
				if st.Phase == workerv1.AttemptPhase_ATTEMPT_PHASE_DELETING {
					delete(w.held, id)
				}
			}
			w.now = w.now.Add(10 * time.Second)
			w.report()
			w.pass(func(Order) bool { return true })
		}
		if !w.removed {
			w.fail("the job was never removed")
		}
	})
}
