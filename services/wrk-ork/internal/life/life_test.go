package life

import (
	"strings"
	"testing"
	"time"

	agentv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
)

var t0 = time.Unix(1_800_000_000, 0).UTC()

func newID() NewID {
	n := 0
	return func(prefix string) string { n++; return prefix + "-" + strings.Repeat("x", n) }
}

// runningJob is a job whose only attempt runs since t0.
func runningJob(kind orkv1.JobKind) (*job.Job, *job.Attempt) {
	j, _ := New(&orkv1.JobSpec{Kind: kind, Gpu: &orkv1.GpuRequest{Model: "m", Count: 1}, Inference: &orkv1.InferenceSpec{Model: "m", Replicas: 1}},
		&orkv1.Owner{ProjectId: "p"}, t0, newID())
	a := j.Replicas[0].Newest()
	Placed(a, "rk", "m", []*orkv1.AttemptNode{{NodeName: "n", GpuCount: 1}})
	a.Sent, a.Seen, a.Anchored = true, true, true
	a.State, a.ClaimedAt, a.UpAt, a.HelloAt, a.RunningAt, a.AgentKey, a.AgentReady = running, t0, t0, t0, t0, "key", true
	j.Touch("rk")
	return j, a
}

func up(a *job.Attempt) Attempt {
	return Attempt{
		Status: &workerv1.AttemptStatus{AttemptId: a.ID, Phase: workerv1.AttemptPhase_ATTEMPT_PHASE_UP},
		Agent:  Agent{Attending: true, HeardAt: t0, NodesReady: true, Report: &agentv1.Report{Phase: agentv1.Phase_PHASE_READY}},
	}
}

func at(d time.Duration, rack Rack, a *job.Attempt, seen Attempt) Sight {
	return Sight{Now: t0.Add(d), Started: t0, Racks: map[string]Rack{"rk": rack}, Attempts: map[string]Attempt{a.ID: seen}}
}

var open = Rack{Connected: true, Synced: true, Since: t0, ReportedAt: t0.Add(time.Hour)}

func conditions(j *job.Job) map[string]string {
	out := map[string]string{}
	for _, c := range j.Conditions {
		out[c.Kind] = c.Message
	}
	return out
}

func TestSilenceOfWorkerAndAgentForHoursChangesNoState(t *testing.T) {
	t.Parallel()
	j, a := runningJob(orkv1.JobKind_JOB_KIND_MANAGED_INFERENCE)
	cut := Rack{Connected: false, Since: t0}
	is, _ := Advance(DefaultLimits(), j, at(5*time.Hour, cut, a, Attempt{}), newID())
	if is.State != running || len(is.Replicas[0].Attempts) != 1 || is.Replicas[0].Newest().ID != a.ID {
		t.Fatalf("state %s with %d attempts", is.State, len(is.Replicas[0].Attempts))
	}
	if !strings.Contains(conditions(is)[job.ConditionUnreachable], "rk") {
		t.Errorf("no word that it is unreachable: %v", is.Conditions)
	}
	if is.Replicas[0].Newest().AgentReady {
		t.Error("a lost agent still counts as ready")
	}
	if orders := Orders(DefaultLimits(), is, at(5*time.Hour, cut, a, Attempt{})); len(orders) != 0 {
		t.Errorf("orders about what cannot be seen: %v", orders)
	}
	back, _ := Advance(DefaultLimits(), is, at(6*time.Hour, open, a, up(a)), newID())
	if len(back.Conditions) != 0 || !back.Replicas[0].Newest().AgentReady || back.Replicas[0].Newest().ID != a.ID {
		t.Errorf("did not come back by itself: %v", back.View())
	}
}

func TestARestartedOrchestratorKeepsReadyAgentsUntilTheyHadTimeToCall(t *testing.T) {
	t.Parallel()
	j, a := runningJob(orkv1.JobKind_JOB_KIND_MANAGED_INFERENCE)
	is, _ := Advance(DefaultLimits(), j, at(5*time.Second, Rack{}, a, Attempt{}), newID())
	if !is.Replicas[0].Newest().AgentReady || len(is.Conditions) != 0 {
		t.Errorf("judged before anybody could be heard: %v", is.View())
	}
}

func TestAVMThatEndsByItself(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		kind   orkv1.JobKind
		well   bool
		state  orkv1.State
		reason orkv1.Reason
	}{
		"container, clean shutdown": {orkv1.JobKind_JOB_KIND_GPU_CONTAINER, true, succeeded, orkv1.Reason_REASON_GUEST_SHUTDOWN},
		"container, crash":          {orkv1.JobKind_JOB_KIND_GPU_CONTAINER, false, failed, orkv1.Reason_REASON_VM_FAILED},
		"inference, clean shutdown": {orkv1.JobKind_JOB_KIND_MANAGED_INFERENCE, true, failed, orkv1.Reason_REASON_GUEST_SHUTDOWN},
	} {
		j, a := runningJob(c.kind)
		seen := up(a)
		seen.Status.Phase, seen.Status.GuestSucceeded = workerv1.AttemptPhase_ATTEMPT_PHASE_ENDED, c.well
		s := at(time.Minute, open, a, seen)
		is, _ := Advance(DefaultLimits(), j, s, newID())
		_, ended := is.Attempt(a.ID)
		if ended.State != c.state || ended.Reason != c.reason || ended.Gone {
			t.Errorf("%s: %s %s gone=%v", name, ended.State, ended.Reason, ended.Gone)
		}
		if conditions(is)[job.ConditionCleanupPending] == "" {
			t.Errorf("%s: no word that objects are left", name)
		}
		if orders := Orders(DefaultLimits(), is, s); len(orders) != 1 || orders[0].Kind != Delete {
			t.Errorf("%s: orders %v", name, orders)
		}
	}
}

func TestFailedInferenceRestartsWithPausesAndContainersDoNot(t *testing.T) {
	t.Parallel()
	l := DefaultLimits()
	for _, kind := range []orkv1.JobKind{orkv1.JobKind_JOB_KIND_GPU_CONTAINER, orkv1.JobKind_JOB_KIND_MANAGED_INFERENCE} {
		j, a := runningJob(kind)
		seen := up(a)
		seen.Agent.Report = &agentv1.Report{Phase: agentv1.Phase_PHASE_FAILED, Message: "CUDA error"}
		is, _ := Advance(l, j, at(time.Minute, open, a, seen), newID())
		if kind == orkv1.JobKind_JOB_KIND_GPU_CONTAINER {
			if is.State != failed || len(is.Replicas[0].Attempts) != 1 {
				t.Errorf("container: %v", is.View())
			}
			continue
		}
		n := is.Replicas[0].Newest()
		if is.State != queued || n.ID == a.ID || !n.NotBefore.Equal(t0.Add(time.Minute+l.RestartFirst)) || !strings.Contains(n.Message, "CUDA error") {
			t.Errorf("inference: %v not before %s", is.View(), n.NotBefore)
		}
		if Eligible(is.Replicas[0], n, t0.Add(time.Hour)) {
			t.Error("placed again while the former attempt may hold its GPUs")
		}
		// The last of a row of failures stays failed.
		is.Replicas[0].Failures = l.RestartCount
		end(n, failed, orkv1.Reason_REASON_ENGINE_FAILED, "again", t0.Add(time.Minute))
		last, _ := Advance(l, is, at(2*time.Minute, open, n, Attempt{}), newID())
		if last.State != failed || len(last.Replicas[0].Attempts) != 2 {
			t.Errorf("restarted for ever: %v", last.View())
		}
	}
}

func TestMaximumDurationStopsTheJob(t *testing.T) {
	t.Parallel()
	j, a := runningJob(orkv1.JobKind_JOB_KIND_GPU_CONTAINER)
	j.Spec.MaxDuration = durationpb.New(time.Hour)
	is, _ := Advance(DefaultLimits(), j, at(59*time.Minute, open, a, up(a)), newID())
	if is.State != running {
		t.Fatalf("stopped early: %s", is.State)
	}
	is, _ = Advance(DefaultLimits(), is, at(61*time.Minute, open, a, up(a)), newID())
	if is.State != stopping || is.Reason != orkv1.Reason_REASON_MAX_DURATION {
		t.Fatalf("%s %s", is.State, is.Reason)
	}
	is, _ = Advance(DefaultLimits(), is, at(62*time.Minute, open, a, Attempt{}), newID())
	if is.State != stopped || !is.Replicas[0].Newest().Gone {
		t.Errorf("%v", is.View())
	}
}

func TestAFencedAttemptFailsAndItsObjectsAreTakenDown(t *testing.T) {
	t.Parallel()
	j, a := runningJob(orkv1.JobKind_JOB_KIND_GPU_CONTAINER)
	a.Fenced = true
	s := at(time.Minute, open, a, up(a))
	is, _ := Advance(DefaultLimits(), j, s, newID())
	if is.State != failed || is.Reason != orkv1.Reason_REASON_FENCED {
		t.Errorf("%s %s", is.State, is.Reason)
	}
	if o := Orders(DefaultLimits(), is, s); len(o) != 1 || o[0].Kind != Delete {
		t.Errorf("orders %v", o)
	}
}

func TestAStoppedReplicaDrainsFirstAndAContainerDoesNot(t *testing.T) {
	t.Parallel()
	l := DefaultLimits()
	for kind, first := range map[orkv1.JobKind]OrderKind{
		orkv1.JobKind_JOB_KIND_GPU_CONTAINER: Delete, orkv1.JobKind_JOB_KIND_MANAGED_INFERENCE: Drain,
	} {
		j, a := runningJob(kind)
		asked, _ := Stop(j, "u")
		s := at(time.Second, open, a, up(a))
		is, _ := Advance(l, asked, s, newID())
		if o := Orders(l, is, s); len(o) != 1 || o[0].Kind != first {
			t.Errorf("%s: orders %v, want %d", kind, o, first)
		}
		s.Now = s.Now.Add(l.Drain)
		if o := Orders(l, is, s); len(o) != 1 || o[0].Kind != Delete {
			t.Errorf("%s: after the drain's time %v", kind, o)
		}
	}
}

func TestDegradedNamesHowManyRun(t *testing.T) {
	t.Parallel()
	j, _ := runningJob(orkv1.JobKind_JOB_KIND_MANAGED_INFERENCE)
	r := &job.Replica{ID: "r-2", Index: 1}
	newAttempt(r, t0, newID())
	j.Spec.Inference.Replicas, j.Replicas = 2, append(j.Replicas, r)
	settle(j, Sight{Now: t0})
	if j.State != running || conditions(j)[job.ConditionDegraded] != "degraded 1/2" {
		t.Errorf("%s %v", j.State, j.Conditions)
	}
}

func TestClaimThatLapsedBeforeAnythingWasMadeIsProposedAgain(t *testing.T) {
	t.Parallel()
	j, a := runningJob(orkv1.JobKind_JOB_KIND_GPU_CONTAINER)
	a.State, a.Anchored, a.AgentKey = provisioning, false, ""
	is, _ := Advance(DefaultLimits(), j, at(time.Minute, open, a, Attempt{}), newID())
	if n := is.Replicas[0].Newest(); n.ID != a.ID || n.State != reserving {
		t.Errorf("%v", is.View())
	}
}

func TestStartIsRefusedWhileStoppingAndAfterDelete(t *testing.T) {
	t.Parallel()
	j, _ := runningJob(orkv1.JobKind_JOB_KIND_GPU_CONTAINER)
	asked, _ := Stop(j, "u")
	if _, _, err := Start(asked, "u", t0, newID()); err == nil {
		t.Error("started while it stops")
	}
	gone, _ := AskDelete(j, "u", t0)
	if _, _, err := Start(gone, "u", t0, newID()); err == nil {
		t.Error("started while it is deleted")
	}
}
