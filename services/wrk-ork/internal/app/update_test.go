package app

import (
	"slices"
	"strings"
	"testing"

	"github.com/cosmicac/cosmicac/pkg/fault"
	agentv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

const (
	stopFirst  = orkv1.UpdateStrategy_UPDATE_STRATEGY_STOP_FIRST
	surgeFirst = orkv1.UpdateStrategy_UPDATE_STRATEGY_SURGE_FIRST
)

func arguments(values ...string) *orkv1.EngineArguments {
	return &orkv1.EngineArguments{Values: values}
}

func (l *lab) update(req *orkv1.UpdateJobRequest) *orkv1.UpdateJobResponse {
	l.t.Helper()
	r, err := l.jobs.UpdateJob(l.ctx, req)
	if err != nil {
		l.t.Fatal(err)
	}
	return r
}

// replica finds a replica by its index and its newest attempt, nil for none.
func replica(j *orkv1.Job, index uint32) (*orkv1.Replica, *orkv1.Attempt) {
	for _, r := range j.Replicas {
		if r.Index == index {
			return r, r.Attempts[len(r.Attempts)-1]
		}
	}
	return nil, nil
}

// comes waits until the newest attempt of a replica waits for its agent and is of a
// specification.
func (l *lab) comes(id string, index uint32, revision uint64) *orkv1.Attempt {
	l.t.Helper()
	var a *orkv1.Attempt
	l.awaitThat(id, "a new attempt's machine runs", func(j *orkv1.Job) bool {
		_, a = replica(j, index)
		return a != nil && a.SpecRevision == revision && a.State == orkv1.State_STATE_PROVISIONING
	})
	return a
}

// serve makes a job whose replicas all serve.
func (l *lab) serve(s *orkv1.JobSpec) *orkv1.Job {
	l.t.Helper()
	j := l.create(s)
	for i := range s.Inference.Replicas {
		l.boot(l.comes(j.Id, i, 1).Id)
	}
	return l.awaitThat(j.Id, "all replicas serve", func(j *orkv1.Job) bool { return len(serving(j, 1)) == int(s.Inference.Replicas) })
}

// serving are the indices of replicas that serve with a specification.
func serving(j *orkv1.Job, revision uint64) []uint32 {
	var out []uint32
	for _, r := range j.Replicas {
		if a := r.Attempts[len(r.Attempts)-1]; a.SpecRevision == revision && a.State == orkv1.State_STATE_RUNNING && a.AgentReady {
			out = append(out, r.Index)
		}
	}
	return out
}

func (l *lab) said(id, words string) {
	l.t.Helper()
	l.eventually("the history says "+words, func() bool {
		r, err := l.jobs.ListEvents(l.ctx, &orkv1.ListEventsRequest{JobId: id})
		return err == nil && slices.ContainsFunc(r.Events, func(e *orkv1.Event) bool { return strings.Contains(e.Message, words) })
	})
}

// TestTwoReplicasThatFillTheRackAreUpdatedOneAtATimeThroughAKill is try P20: a surge
// has no place and is refused before anything changes; stop first replaces one, is
// killed in the middle, and goes on to the other.
func TestTwoReplicasThatFillTheRackAreUpdatedOneAtATimeThroughAKill(t *testing.T) {
	t.Parallel()
	l := startLab(t, true, []*orkv1.RackNode{gpuNode("n1", 2)})
	j := l.serve(inferenceSpec("m", 2))
	if j.SpecRevision != 1 {
		t.Errorf("a new job has specification %d", j.SpecRevision)
	}
	_, err := l.jobs.UpdateJob(l.ctx, &orkv1.UpdateJobRequest{Id: j.Id, Strategy: surgeFirst, Arguments: arguments("--max-num-seqs", "8")})
	turnedDown(t, err, fault.FailedPrecondition, "nothing is changed", "busy", "stop_first", "strategy")
	_, err = l.jobs.UpdateJob(l.ctx, &orkv1.UpdateJobRequest{Id: j.Id})
	turnedDown(t, err, fault.Invalid, "strategy is stop_first or surge_first", "engine_arguments")
	_, err = l.jobs.UpdateJob(l.ctx, &orkv1.UpdateJobRequest{Id: j.Id, Strategy: stopFirst, Arguments: arguments("a\nb")})
	turnedDown(t, err, fault.Invalid, "engine_arguments[0]")
	if is := l.get(j.Id); is.SpecRevision != 1 || len(is.Spec.Inference.Arguments) != 0 || len(is.Conditions) != 0 || len(serving(is, 1)) != 2 {
		t.Fatalf("a refusal changed something: %v", is)
	}

	req := &orkv1.UpdateJobRequest{Id: j.Id, Strategy: stopFirst, Arguments: arguments("--max-num-seqs", "8"), IdempotencyKey: "k", ExpectedSpecRevision: 1, Actor: "u-7"}
	if r := l.update(req); r.Existed || r.Job.SpecRevision != 2 || condition(r.Job, "updating") == "" {
		t.Fatalf("the update is not under way: %v", r)
	}
	first := l.comes(j.Id, 1, 2)
	if got := l.worker.plan(first.Id).Nodes[0].Seed.Engine.Arguments; !slices.Equal(got, []string{"--max-num-seqs", "8"}) {
		t.Errorf("the new replica's engine gets %q", got)
	}
	// The other serves on, also over a kill and for as long as the new one is not up.
	l.stop()
	l.startOrk()
	is := l.awaitThat(j.Id, "the other serves on", func(j *orkv1.Job) bool {
		return slices.Equal(serving(j, 1), []uint32{0}) && strings.Contains(condition(j, "updating"), "waits for replica 1")
	})
	if _, a := replica(is, 1); a.Id != first.Id {
		t.Errorf("the kill made another attempt: %v", is)
	}
	// Asked again with the same key it is the same update, also after the kill; who saw
	// an older specification is told so.
	if r := l.update(req); !r.Existed || r.Job.SpecRevision != 2 {
		t.Errorf("repeated: %v", r)
	}
	_, err = l.jobs.UpdateJob(l.ctx, &orkv1.UpdateJobRequest{Id: j.Id, Strategy: stopFirst, Arguments: arguments("--other"), IdempotencyKey: "k"})
	turnedDown(t, err, fault.Conflict, "idempotency key")
	_, err = l.jobs.UpdateJob(l.ctx, &orkv1.UpdateJobRequest{Id: j.Id, Strategy: stopFirst, Arguments: arguments("--other"), ExpectedSpecRevision: 1})
	turnedDown(t, err, fault.Conflict, "number 2 by now", "expected_spec_revision is 2")

	l.boot(first.Id)
	second := l.comes(j.Id, 0, 2)
	if is := l.get(j.Id); !slices.Equal(serving(is, 2), []uint32{1}) {
		t.Errorf("the second was taken down while the first does not serve: %v", is)
	}
	l.boot(second.Id)
	is = l.awaitThat(j.Id, "updated", func(j *orkv1.Job) bool { return len(serving(j, 2)) == 2 && condition(j, "updating") == "" })
	if _, most := l.worker.count(); most > 2 || len(is.Replicas) != 2 || len(is.Replicas[0].Attempts) != 2 {
		t.Errorf("%d GPUs were held at once: %v", most, is)
	}
	if a := is.Replicas[0].Attempts[0]; a.SpecRevision != 1 || a.Reason != orkv1.Reason_REASON_UPDATED {
		t.Errorf("the record of the one before: %v", a)
	}
	l.said(j.Id, "update asked: specification 2, stop first")
	l.said(j.Id, "update finished: all of 2 replicas are of specification 2")
}

func TestAnUpdateInTheMiddleOfAnotherTakesItsPlaceAndSaysSo(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 2))
	j := l.serve(inferenceSpec("m", 2))
	l.update(&orkv1.UpdateJobRequest{Id: j.Id, Strategy: stopFirst, Arguments: arguments("--second")})
	l.comes(j.Id, 1, 2)
	l.update(&orkv1.UpdateJobRequest{Id: j.Id, Strategy: stopFirst, Arguments: arguments("--third")})
	l.said(j.Id, "update asked: specification 3, stop first, 2 replicas; it takes the place of the update to specification 2, which was under way")
	third := l.comes(j.Id, 1, 3)
	if is := l.get(j.Id); !slices.Equal(serving(is, 1), []uint32{0}) {
		t.Errorf("the other does not serve on: %v", is)
	}
	l.boot(third.Id)
	l.boot(l.comes(j.Id, 0, 3).Id)
	l.awaitThat(j.Id, "updated", func(j *orkv1.Job) bool { return len(serving(j, 3)) == 2 && condition(j, "updating") == "" })
	l.said(j.Id, "update finished: all of 2 replicas are of specification 3")
}

// TestASurgeNeverHasFewerReplicasServeThanWereAskedFor starts one beside the others,
// takes an old one away, and does so again; root disks' places are used anew.
func TestASurgeNeverHasFewerReplicasServeThanWereAskedFor(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 3))
	j := l.serve(inferenceSpec("m", 2))
	l.update(&orkv1.UpdateJobRequest{Id: j.Id, Strategy: surgeFirst, Arguments: arguments("--new")})
	beside := l.comes(j.Id, 2, 2)
	if is := l.get(j.Id); len(serving(is, 1)) != 2 {
		t.Errorf("an old one left before the new one serves: %v", is)
	}
	l.boot(beside.Id)
	next := l.comes(j.Id, 1, 2)
	is := l.get(j.Id)
	if !slices.Equal(serving(is, 1), []uint32{0}) || !slices.Equal(serving(is, 2), []uint32{2}) {
		t.Errorf("in the middle: %v", is)
	}
	if r, a := replica(is, 1); r.Id == j.Replicas[1].Id || a.Number != 1 {
		t.Errorf("the place of the one that left is taken by %v", r)
	}
	l.boot(next.Id)
	is = l.awaitThat(j.Id, "updated", func(j *orkv1.Job) bool { return len(j.Replicas) == 2 && len(j.Conditions) == 0 })
	if !slices.Equal(serving(is, 2), []uint32{1, 2}) {
		t.Errorf("%v", is)
	}
	if held, most := l.worker.count(); held != 2 || most != 3 {
		t.Errorf("%d attempts are held, %d GPUs were at once", held, most)
	}
	if _, err := l.jobs.DeleteJob(l.ctx, &orkv1.DeleteJobRequest{Id: j.Id}); err != nil {
		t.Fatal(err)
	}
	l.eventually("nothing is left", l.worker.empty)
}

// TestAnUpdateWhoseReplicaFailsStopsThereAndTheOthersServeOn also goes back to what
// was before, which touches nothing but what failed.
func TestAnUpdateWhoseReplicaFailsStopsThereAndTheOthersServeOn(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 3))
	s := inferenceSpec("m", 3)
	s.Inference.Arguments = []string{"--well"}
	j := l.serve(s)
	l.update(&orkv1.UpdateJobRequest{Id: j.Id, Strategy: stopFirst, Arguments: arguments("--no-such-flag")})
	bad := l.comes(j.Id, 2, 2)
	a, err := l.redeem(seedOf(l, bad.Id), newKey(t))
	if err != nil {
		t.Fatal(err)
	}
	l.attend(a, agentv1.Phase_PHASE_FAILED)
	is := l.awaitThat(j.Id, "stopped", func(j *orkv1.Job) bool { return condition(j, "update_stopped") != "" })
	for _, words := range []string{"replica 2 did not come up with specification 2", bad.Id, "engine_failed", "as told"} {
		if !strings.Contains(condition(is, "update_stopped"), words) {
			t.Errorf("nothing of %q in %q", words, condition(is, "update_stopped"))
		}
	}
	// It is let be: nothing follows by itself, and those of before serve on.
	l.stop()
	l.startOrk()
	seen := l.passes.Load()
	l.eventually("some passes go by", func() bool { return l.passes.Load() > seen+5 })
	is = l.awaitThat(j.Id, "the others serve", func(j *orkv1.Job) bool { return slices.Equal(serving(j, 1), []uint32{0, 1}) })
	if r, last := replica(is, 2); last.Id != bad.Id || last.State != orkv1.State_STATE_FAILED || len(r.Attempts) != 2 || condition(is, "update_stopped") == "" || condition(is, "degraded") != "degraded 2/3" {
		t.Errorf("%v", is)
	}
	l.said(j.Id, "the update goes no further")

	r := l.update(&orkv1.UpdateJobRequest{Id: j.Id, Strategy: stopFirst, Arguments: arguments("--well")})
	if r.Job.SpecRevision != 3 || condition(r.Job, "update_stopped") != "" {
		t.Errorf("%v", r.Job)
	}
	l.boot(l.comes(j.Id, 2, 3).Id)
	is = l.awaitThat(j.Id, "back", func(j *orkv1.Job) bool { return len(j.Conditions) == 0 && len(serving(j, 3)) == 1 })
	if !slices.Equal(serving(is, 1), []uint32{0, 1}) {
		t.Errorf("what ran well was replaced, too: %v", is)
	}
}

// TestReplicasComeAndGoWithTheirNumber takes it up and down; those that serve stay.
func TestReplicasComeAndGoWithTheirNumber(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 4))
	j := l.serve(inferenceSpec("m", 1))
	l.update(&orkv1.UpdateJobRequest{Id: j.Id, Strategy: stopFirst, Replicas: 3})
	one, two := l.comes(j.Id, 1, 2), l.comes(j.Id, 2, 2)
	l.boot(two.Id)
	l.awaitThat(j.Id, "degraded", func(j *orkv1.Job) bool { return condition(j, "degraded") == "degraded 2/3" })
	l.boot(one.Id)
	is := l.awaitThat(j.Id, "three serve", func(j *orkv1.Job) bool { return len(j.Conditions) == 0 && len(serving(j, 2)) == 2 })
	if !slices.Equal(serving(is, 1), []uint32{0}) {
		t.Errorf("the one that served was replaced: %v", is)
	}
	l.update(&orkv1.UpdateJobRequest{Id: j.Id, Strategy: surgeFirst, Replicas: 1})
	is = l.awaitThat(j.Id, "one is left", func(j *orkv1.Job) bool { return len(j.Replicas) == 1 && len(j.Conditions) == 0 })
	if a := is.Replicas[0].Attempts; is.Replicas[0].Index != 0 || len(a) != 1 || a[0].State != orkv1.State_STATE_RUNNING {
		t.Errorf("%v", is)
	}
	if held, _ := l.worker.count(); held != 1 {
		t.Errorf("%d attempts are held", held)
	}
	// A stopped job is updated once it is started; a container never.
	if _, err := l.jobs.StopJob(l.ctx, &orkv1.StopJobRequest{Id: j.Id}); err != nil {
		t.Fatal(err)
	}
	_, err := l.jobs.UpdateJob(l.ctx, &orkv1.UpdateJobRequest{Id: j.Id, Strategy: stopFirst, Replicas: 2})
	turnedDown(t, err, fault.FailedPrecondition, "start it, then update it")
	c := l.create(containerSpec("c", 1))
	_, err = l.jobs.UpdateJob(l.ctx, &orkv1.UpdateJobRequest{Id: c.Id, Strategy: stopFirst, Replicas: 2})
	turnedDown(t, err, fault.FailedPrecondition, "GPU Container Job")
}
