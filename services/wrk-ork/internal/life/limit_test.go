package life

import (
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	agentv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
)

func TestAJobIsStoppedWhenItsGPUsHaveCostWhatTheyMay(t *testing.T) {
	t.Parallel()
	j, a := runningJob(orkv1.JobKind_JOB_KIND_GPU_CONTAINER)
	a.Nodes[0].GpuCount = 2
	j.Price = &orkv1.Price{CentsPerGpuHour: 250, Currency: "USD"}
	j.Spec.CostLimitCents = 500
	j.Spec.Alerts = &orkv1.Alerts{CostPercent: 80}
	is, _ := Advance(DefaultLimits(), j, at(47*time.Minute, open, a, up(a)), newID())
	if is.State != running || conditions(is)[job.ConditionAlert] != "" {
		t.Fatalf("too early: %v", is.View())
	}
	is, events := Advance(DefaultLimits(), is, at(49*time.Minute, open, a, up(a)), newID())
	if !strings.Contains(conditions(is)[job.ConditionAlert], "80 % of its limit of 5.00 USD") || len(events) != 1 || !strings.HasPrefix(events[0].Message, "alert: ") {
		t.Errorf("no alert at 80 %%: %v %v", is.Conditions, events)
	}
	is, _ = Advance(DefaultLimits(), is, at(time.Hour, open, a, up(a)), newID())
	if is.State != stopping || is.Reason != orkv1.Reason_REASON_COST_LIMIT || !strings.Contains(is.Message, "cost 5.00 USD of the 5.00 USD") {
		t.Fatalf("%s %s %q", is.State, is.Reason, is.Message)
	}
	// GPUs are paid for until the cluster gives them back, and not a moment longer.
	is, _ = Advance(DefaultLimits(), is, at(66*time.Minute, open, a, Attempt{}), newID())
	if is.State != stopped || is.CostCents(t0.Add(50*time.Hour)) != 550 {
		t.Errorf("%s, cost %d", is.State, is.CostCents(t0.Add(50*time.Hour)))
	}
	if _, _, err := Start(is, "u", t0.Add(2*time.Hour), newID()); err == nil || !strings.Contains(err.Error(), "higher cost limit") {
		t.Errorf("started beyond its cost limit: %v", err)
	}
}

func TestAnUnusedContainerIsWarnedAndThenStopped(t *testing.T) {
	t.Parallel()
	j, a := runningJob(orkv1.JobKind_JOB_KIND_GPU_CONTAINER)
	j.Spec.IdleStop = durationpb.New(time.Hour)
	seen := up(a)
	seen.Agent.Since = t0
	seen.Agent.Report.GpuUseKnown = true
	seen.Agent.GPUUsedAt = t0.Add(10 * time.Minute)
	seen.Agent.ShellAt = t0.Add(20 * time.Minute)
	look := func(d time.Duration, seen Attempt) *job.Job {
		is, _ := Advance(DefaultLimits(), j, at(d, open, a, seen), newID())
		return is
	}
	if is := look(45*time.Minute, seen); conditions(is)[job.ConditionIdle] != "" {
		t.Errorf("warned too early: %v", is.Conditions)
	}
	if is := look(55*time.Minute, seen); !strings.Contains(conditions(is)[job.ConditionIdle], "stopped at "+t0.Add(80*time.Minute).Format(time.RFC3339)) {
		t.Errorf("no warning with the time: %v", is.Conditions)
	}
	if is := look(81*time.Minute, seen); is.State != stopping || is.Reason != orkv1.Reason_REASON_IDLE || !strings.Contains(is.Message, "no GPU use and no shell for 1h0m0s") {
		t.Errorf("%s %s %q", is.State, is.Reason, is.Message)
	}
	busy := seen
	busy.Agent.GPUUsedAt = t0.Add(79 * time.Minute)
	if is := look(81*time.Minute, busy); is.State != running {
		t.Errorf("stopped while its GPU works: %q", is.Message)
	}
	shell := seen
	shell.Agent.Report = &agentv1.Report{Phase: agentv1.Phase_PHASE_READY, ShellSessions: 1}
	if is := look(10*time.Hour, shell); is.State != running {
		t.Errorf("stopped under an open shell: %q", is.Message)
	}
	// Who cannot be heard is not idle, and the time before it was heard again counts for nothing.
	away := seen
	away.Agent.Attending = false
	if is := look(10*time.Hour, away); is.State != running {
		t.Errorf("stopped while not heard: %q", is.Message)
	}
	back := seen
	back.Agent.Since = t0.Add(9*time.Hour + 30*time.Minute)
	if is := look(10*time.Hour, back); is.State != running {
		t.Errorf("stopped right after it was heard again: %q", is.Message)
	}
	// Where GPU use cannot be told, shells alone are judged, and that is said.
	blind := up(a)
	blind.Agent.Since = t0
	if is := look(61*time.Minute, blind); is.State != stopping || !strings.Contains(is.Message, "cannot be told") {
		t.Errorf("%s %q", is.State, is.Message)
	}
}

func TestARestartMakesTheNextAttemptAsSoonAsNothingIsLeft(t *testing.T) {
	t.Parallel()
	j, a := runningJob(orkv1.JobKind_JOB_KIND_GPU_CONTAINER)
	asked, _, err := Restart(j, "u", t0, newID())
	if err != nil {
		t.Fatal(err)
	}
	s := at(time.Minute, open, a, up(a))
	is, events := Advance(DefaultLimits(), asked, s, newID())
	if is.State != stopping || is.Reason != orkv1.Reason_REASON_RESTART_REQUESTED || events[0].Actor != "u" {
		t.Fatalf("%s %s %v", is.State, is.Reason, events)
	}
	if o := Orders(DefaultLimits(), is, s); len(o) != 1 || o[0].Kind != Delete {
		t.Errorf("orders %v", o)
	}
	is, _ = Advance(DefaultLimits(), is, at(2*time.Minute, open, a, Attempt{}), newID())
	n := is.Replicas[0].Newest()
	if is.State != queued || n.Number != 2 || !Eligible(is.Replicas[0], n, t0.Add(2*time.Minute)) {
		t.Errorf("%v", is.View())
	}
	// A stop that comes in the middle is a stop.
	ended, _ := Stop(asked, "u")
	is, _ = Advance(DefaultLimits(), ended, at(time.Minute, open, a, Attempt{}), newID())
	if is.State != stopped || len(is.Replicas[0].Attempts) != 1 {
		t.Errorf("%v", is.View())
	}
}

func TestOnlyASilentAttemptCanBeFencedAndItStaysHeld(t *testing.T) {
	t.Parallel()
	j, a := runningJob(orkv1.JobKind_JOB_KIND_GPU_CONTAINER)
	if _, _, err := Fence(j, a.ID, "op", t0); err == nil || !strings.Contains(err.Error(), "heard of") {
		t.Fatalf("a fence of one that is heard of: %v", err)
	}
	a.Unreachable = job.Mark{Since: t0, Message: "its node is not heard of; it may still run there"}
	is, _, err := Fence(j, a.ID, "op", t0.Add(time.Minute))
	if err != nil {
		t.Fatal(err)
	}
	s := at(2*time.Minute, open, a, up(a))
	is, _ = Advance(DefaultLimits(), is, s, newID())
	old, n := is.Replicas[0].Attempts[0], is.Replicas[0].Newest()
	if old.State != failed || old.Reason != orkv1.Reason_REASON_FENCED_BY_OPERATOR || old.Gone || n.ID == old.ID ||
		!Eligible(is.Replicas[0], n, s.Now) || len(n.RefusedNodes) != 1 {
		t.Fatalf("%v", is.View())
	}
	if conditions(is)[job.ConditionCleanupPending] == "" {
		t.Error("no word that the cluster still holds the old one")
	}
	if o := Orders(DefaultLimits(), is, s); len(o) != 1 || o[0].Kind != Delete || o[0].AttemptID != old.ID {
		t.Errorf("orders %v", o)
	}
	is, _ = Advance(DefaultLimits(), is, at(3*time.Minute, open, a, Attempt{}), newID())
	if !is.Replicas[0].Attempts[0].Gone {
		t.Error("the node came back, and the old one is not gone")
	}
}

func TestWhatANodeCouldNotStartIsTriedElsewhereAndWhatTheUserBroughtIsNot(t *testing.T) {
	t.Parallel()
	l := DefaultLimits()
	fails := func(reason orkv1.Reason, stage workerv1.AttemptPhase, up bool) (*job.Job, *job.Attempt) {
		j, a := runningJob(orkv1.JobKind_JOB_KIND_GPU_CONTAINER)
		a.State, a.AgentKey, a.UpAt, a.HelloAt, a.RunningAt, a.Stage = provisioning, "", time.Time{}, time.Time{}, time.Time{}, stage
		if up {
			a.UpAt = t0
		}
		seen := Attempt{Status: &workerv1.AttemptStatus{AttemptId: a.ID, Phase: workerv1.AttemptPhase_ATTEMPT_PHASE_FAILED, Reason: reason, Message: "vfio: no such file"}}
		is, _ := Advance(l, j, at(time.Minute, open, a, seen), newID())
		_, old := is.Attempt(a.ID)
		return is, old
	}
	booting, importing := workerv1.AttemptPhase_ATTEMPT_PHASE_BOOTING, workerv1.AttemptPhase_ATTEMPT_PHASE_IMPORTING
	for name, c := range map[string]struct {
		reason orkv1.Reason
		stage  workerv1.AttemptPhase
		up     bool
		again  bool
	}{
		"pod rejected":            {orkv1.Reason_REASON_VM_FAILED, booting, false, true},
		"stuck on its node":       {orkv1.Reason_REASON_DEADLINE, booting, false, true},
		"slow registry":           {orkv1.Reason_REASON_DEADLINE, importing, false, false},
		"image missing":           {orkv1.Reason_REASON_IMAGE_UNAVAILABLE, importing, false, false},
		"died after it ran":       {orkv1.Reason_REASON_VM_FAILED, booting, true, false},
		"removed by another hand": {orkv1.Reason_REASON_VM_REMOVED, booting, false, false},
	} {
		is, old := fails(c.reason, c.stage, c.up)
		if old.StartFailed != c.again || (len(is.Replicas[0].Attempts) == 2) != c.again {
			t.Errorf("%s: %v", name, is.View())
		}
		if c.again && (is.State != queued || is.Replicas[0].Newest().RefusedNodes[0] != "rk/n" || !strings.Contains(is.Message, "vfio: no such file")) {
			t.Errorf("%s: %v", name, is.View())
		}
	}
	// Not for ever.
	is, _ := fails(orkv1.Reason_REASON_VM_FAILED, booting, false)
	is.Replicas[0].StartFailures = l.StartCount
	n := is.Replicas[0].Newest()
	n.State, n.StartFailed, n.Gone = failed, true, true
	last, _ := Advance(l, is, at(time.Hour, open, n, Attempt{}), newID())
	if last.State != failed || len(last.Replicas[0].Attempts) != 2 {
		t.Errorf("tried for ever: %v", last.View())
	}
}

func TestADrainWarnsAndStopsContainersAndMovesReplicas(t *testing.T) {
	t.Parallel()
	drained := open
	drained.DrainSince, drained.DrainDeadline, drained.DrainActor = t0.Add(time.Minute), t0.Add(time.Hour), "op"
	for kind, reason := range map[orkv1.JobKind]orkv1.Reason{
		orkv1.JobKind_JOB_KIND_GPU_CONTAINER: orkv1.Reason_REASON_DRAINED, orkv1.JobKind_JOB_KIND_MANAGED_INFERENCE: orkv1.Reason_REASON_DRAINED,
	} {
		j, a := runningJob(kind)
		is, events := Advance(DefaultLimits(), j, at(2*time.Minute, drained, a, up(a)), newID())
		if is.State != running || !strings.Contains(conditions(is)[job.ConditionDraining], t0.Add(time.Hour).Format(time.RFC3339)) ||
			len(events) != 1 || events[0].Actor != "op" {
			t.Fatalf("%s: %v %v", kind, is.Conditions, events)
		}
		if open, _ := Advance(DefaultLimits(), is, at(3*time.Minute, open, a, up(a)), newID()); len(open.Conditions) != 0 {
			t.Errorf("%s: an opened rack still drains: %v", kind, open.Conditions)
		}
		is, _ = Advance(DefaultLimits(), is, at(61*time.Minute, drained, a, up(a)), newID())
		if is.State != stopping || is.Reason != reason {
			t.Fatalf("%s: %s %s", kind, is.State, is.Reason)
		}
		is, _ = Advance(DefaultLimits(), is, at(62*time.Minute, drained, a, Attempt{}), newID())
		if j.Inference() && is.State != queued || !j.Inference() && is.State != stopped {
			t.Errorf("%s: %v", kind, is.View())
		}
	}
}

func TestAfterAStandStillNothingOfThatTimeCounts(t *testing.T) {
	t.Parallel()
	j, a := runningJob(orkv1.JobKind_JOB_KIND_GPU_CONTAINER)
	a.State, a.AgentKey = provisioning, ""
	seen := Attempt{Status: &workerv1.AttemptStatus{AttemptId: a.ID, Phase: workerv1.AttemptPhase_ATTEMPT_PHASE_UP}}
	s := at(3*time.Hour, open, a, seen)
	s.Started = s.Now
	if is, _ := Advance(DefaultLimits(), j, s, newID()); is.State != provisioning {
		t.Errorf("failed for what was not heard: %v", is.View())
	}
	// A report from before, read after, says nothing about a deletion since.
	j, a = runningJob(orkv1.JobKind_JOB_KIND_GPU_CONTAINER)
	a.State, a.Seen = stopping, false
	s = at(3*time.Hour, Rack{Connected: true, Synced: true, Since: t0, ReportedAt: t0.Add(3 * time.Hour)}, a, Attempt{DeletedAt: t0.Add(time.Second)})
	s.Started = s.Now
	if is, _ := Advance(DefaultLimits(), j, s, newID()); is.State != stopping {
		t.Errorf("an old report counted as absence: %v", is.View())
	}
}
