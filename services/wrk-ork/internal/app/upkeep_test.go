package app

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/health"
	agentv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

func (l *lab) quarantines() []*orkv1.Quarantine {
	l.t.Helper()
	r, err := l.racks.ListQuarantines(l.ctx, &orkv1.ListQuarantinesRequest{RackId: "rk-test"})
	if err != nil {
		l.t.Fatal(err)
	}
	return r.Quarantines
}

func TestABrokenNodeIsClosedAfterAFewFailuresAndEveryJobRunsElsewhere(t *testing.T) {
	t.Parallel()
	// The broken node is the one that fits best, and always looks free.
	l := newLab(t, gpuNode("bad", 8), gpuNode("n2", 16), gpuNode("n3", 16))
	before := l.await(l.create(containerSpec("before", 1)).Id, orkv1.State_STATE_PROVISIONING)
	if newest(before).Nodes[0].NodeName != "bad" {
		t.Fatalf("%v", before)
	}
	l.worker.change(func() { l.worker.reject = map[string]int{"bad": 1000} })
	var ids []string
	for i := range 20 {
		ids = append(ids, l.create(containerSpec(fmt.Sprintf("j%d", i), 1)).Id)
	}
	for _, id := range ids {
		j := l.awaitThat(id, "up on a good node", func(j *orkv1.Job) bool { return j.Reason == orkv1.Reason_REASON_WAITING_FOR_AGENT })
		if newest(j).Nodes[0].NodeName == "bad" {
			t.Errorf("up on the broken node: %v", j)
		}
	}
	l.worker.change(func() {
		if l.worker.rejections < 1 || l.worker.rejections > 5 {
			t.Errorf("%d attempts were rejected", l.worker.rejections)
		}
	})
	all := l.quarantines()
	if len(all) != 1 || !all[0].Active || all[0].NodeName != "bad" || all[0].GpuModel != model || all[0].Actor != "ork" ||
		len(all[0].Evidence) < 2 || !strings.Contains(all[0].Evidence[0].Message, "UnexpectedAdmissionError") ||
		all[0].Evidence[0].AttemptId == all[0].Evidence[1].AttemptId {
		t.Fatalf("%v", all)
	}
	r, err := l.racks.ListRacks(l.ctx, &orkv1.ListRacksRequest{})
	if err != nil || !strings.Contains(r.Racks[0].Nodes[0].Gpus[0].Quarantine, "could not be started") {
		t.Errorf("the rack does not show it: %v %v", r, err)
	}
	// It outlives a restart, and an operator takes it back.
	l.stop()
	l.startOrk()
	l.connected(true)
	if all := l.quarantines(); len(all) != 1 || !all[0].Active {
		t.Fatalf("after a restart: %v", all)
	}
	l.worker.change(func() { l.worker.reject = nil })
	if _, err := l.racks.LiftQuarantine(l.ctx, &orkv1.LiftQuarantineRequest{RackId: "rk-test", NodeName: "bad", GpuModel: model}); err != nil {
		t.Fatal(err)
	}
	if all := l.quarantines(); len(all) != 0 {
		t.Errorf("after it was lifted: %v", all)
	}
	full := l.create(containerSpec("rest", 7))
	if j := l.await(full.Id, orkv1.State_STATE_PROVISIONING); newest(j).Nodes[0].NodeName != "bad" {
		t.Errorf("the repaired node is not used: %v", j)
	}
}

func TestANodeIsClosedByHandAndWhoWaitsForItReadsWhy(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 1))
	set := func(node, message string) error {
		_, err := l.racks.SetQuarantine(l.ctx, &orkv1.SetQuarantineRequest{RackId: "rk-test", NodeName: node, Message: message, Actor: "op"})
		return err
	}
	if err := set("n 1", ""); fault.KindOf(err) != fault.Invalid || len(fault.DetailsOf(err)) != 2 {
		t.Errorf("%v", err)
	}
	if err := set("n1", "XID 79 on GPU-1234"); err != nil {
		t.Fatal(err)
	}
	j := l.create(containerSpec("x", 1))
	l.awaitThat(j.Id, "waiting for a quarantined node", func(j *orkv1.Job) bool {
		return j.State == orkv1.State_STATE_QUEUED && j.Reason == orkv1.Reason_REASON_QUARANTINED && strings.Contains(j.Message, "XID 79 on GPU-1234")
	})
	if _, err := l.racks.LiftQuarantine(l.ctx, &orkv1.LiftQuarantineRequest{RackId: "rk-test", NodeName: "n1"}); err != nil {
		t.Fatal(err)
	}
	l.await(j.Id, orkv1.State_STATE_PROVISIONING)
	_, err := l.racks.LiftQuarantine(l.ctx, &orkv1.LiftQuarantineRequest{RackId: "rk-test", NodeName: "n1"})
	refused(t, err, fault.NotFound, "nothing of node")
}

func TestAFailedStartIsTriedOnceMoreAndTheNodeIsSuspect(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 2))
	l.worker.change(func() { l.worker.reject = map[string]int{"n1": 1} })
	j := l.create(containerSpec("x", 1))
	up := l.awaitThat(j.Id, "up at the second try", func(j *orkv1.Job) bool { return j.Reason == orkv1.Reason_REASON_WAITING_FOR_AGENT })
	if first := up.Replicas[0].Attempts[0]; newest(up).Number != 2 || first.State != orkv1.State_STATE_FAILED || !strings.Contains(first.Message, "vfio: no such file") {
		t.Errorf("%v", up)
	}
	all := l.quarantines()
	if len(all) != 1 || all[0].Active || all[0].NodeName != "n1" || len(all[0].Evidence) != 1 || !strings.Contains(all[0].Message, "suspect") {
		t.Errorf("%v", all)
	}
}

func TestRestartIsOneCommandAndKeepsTheDisk(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 1))
	j := l.create(containerSpec("x", 1))
	first := newest(l.await(j.Id, orkv1.State_STATE_PROVISIONING))
	l.boot(first.Id)
	l.await(j.Id, orkv1.State_STATE_RUNNING)
	if _, err := l.jobs.RestartJob(l.ctx, &orkv1.RestartJobRequest{Id: j.Id, Actor: "u-1"}); err != nil {
		t.Fatal(err)
	}
	again := l.awaitThat(j.Id, "in its second attempt", func(j *orkv1.Job) bool {
		return newest(j).Number == 2 && j.State == orkv1.State_STATE_PROVISIONING
	})
	if old := again.Replicas[0].Attempts[0]; old.State != orkv1.State_STATE_STOPPED || old.Reason != orkv1.Reason_REASON_RESTART_REQUESTED || !old.Gone {
		t.Errorf("%v", old)
	}
	if _, most := l.worker.count(); most != 1 {
		t.Errorf("%d GPUs were held at once", most)
	}
	r, err := l.jobs.ListEvents(l.ctx, &orkv1.ListEventsRequest{JobId: j.Id})
	if err != nil {
		t.Fatal(err)
	}
	var by []string
	for _, e := range r.Events {
		if e.State == orkv1.State_STATE_STOPPING || e.State == orkv1.State_STATE_STOPPED {
			by = append(by, e.Actor)
		}
		if e.Actor == "" || e.Time == nil {
			t.Errorf("an event without actor or time: %v", e)
		}
	}
	if len(by) < 2 || slices.ContainsFunc(by, func(a string) bool { return a != "u-1" && a != "rk-test" }) {
		t.Errorf("the end was caused by %v", by)
	}
}

func TestASilentNodesAttemptIsReplacedByTheOperatorsFenceAlone(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 1), gpuNode("n2", 1))
	j := l.create(containerSpec("x", 1))
	first := newest(l.await(j.Id, orkv1.State_STATE_PROVISIONING))
	l.boot(first.Id)
	l.await(j.Id, orkv1.State_STATE_RUNNING)
	fence := func(confirm string) error {
		_, err := l.jobs.FenceAttempt(l.ctx, &orkv1.FenceAttemptRequest{AttemptId: first.Id, Confirm: confirm, Actor: "op"})
		return err
	}
	refused(t, fence(first.Id), fault.FailedPrecondition, "heard of")
	l.worker.silence(first.Id, true)
	l.awaitThat(j.Id, "unreachable", func(j *orkv1.Job) bool { return condition(j, "unreachable") != "" })
	l.worker.silence(first.Id, false)
	back := l.awaitThat(j.Id, "heard of again", func(j *orkv1.Job) bool { return condition(j, "unreachable") == "" })
	if len(back.Replicas[0].Attempts) != 1 || back.State != orkv1.State_STATE_RUNNING {
		t.Fatalf("replaced by itself: %v", back)
	}

	l.worker.silence(first.Id, true)
	l.worker.change(func() { l.worker.holdDelete = true })
	l.awaitThat(j.Id, "unreachable", func(j *orkv1.Job) bool { return condition(j, "unreachable") != "" })
	refused(t, fence(""), fault.Invalid, "not confirmed")
	refused(t, fence(j.Id), fault.Invalid, "not confirmed")
	if err := fence(first.Id); err != nil {
		t.Fatal(err)
	}
	moved := l.awaitThat(j.Id, "up elsewhere", func(j *orkv1.Job) bool {
		return newest(j).Number == 2 && j.Reason == orkv1.Reason_REASON_WAITING_FOR_AGENT
	})
	old := moved.Replicas[0].Attempts[0]
	if newest(moved).Nodes[0].NodeName == first.Nodes[0].NodeName || old.Reason != orkv1.Reason_REASON_FENCED_BY_OPERATOR || old.Gone {
		t.Errorf("%v", moved)
	}
	if n, _ := l.worker.count(); n != 2 {
		t.Errorf("the cluster holds %d attempts", n)
	}
	refused(t, func() error {
		_, err := l.jobs.FenceAttempt(l.ctx, &orkv1.FenceAttemptRequest{AttemptId: newest(moved).Id, Confirm: newest(moved).Id})
		return err
	}(), fault.FailedPrecondition, "heard of")
	l.worker.change(func() { l.worker.holdDelete = false; delete(l.worker.attempts, first.Id) })
	l.awaitThat(j.Id, "the old one gone", func(j *orkv1.Job) bool {
		return j.Replicas[0].Attempts[0].Gone && condition(j, "cleanup_pending") == ""
	})
}

func TestAnUnusedContainerIsStoppedAndSaysSo(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 1))
	s := containerSpec("x", 1)
	s.IdleStop = durationpb.New(30 * time.Second)
	_, err := l.jobs.CreateJob(l.ctx, &orkv1.CreateJobRequest{Spec: s, Owner: &orkv1.Owner{ProjectId: "p-1"}})
	refused(t, err, fault.Invalid, "idle_stop_seconds")
	s.IdleStop = durationpb.New(time.Minute)
	j := l.create(s)
	l.boot(newest(l.await(j.Id, orkv1.State_STATE_PROVISIONING)).Id)
	l.await(j.Id, orkv1.State_STATE_RUNNING)
	// Time goes by, in steps that are no stand-still, and slowly enough for the loop to
	// look at every job in between.
	stopping := false
	now := l.get(j.Id)
	for deadline := time.Now().Add(5 * patience); now.State != orkv1.State_STATE_STOPPED && time.Now().Before(deadline); now = l.get(j.Id) {
		l.ahead.Add(int64(2 * time.Second))
		time.Sleep(400 * time.Millisecond)
		before := l.passes.Load()
		l.eventually("the loop looks", func() bool { return l.passes.Load() > before })
		c := condition(now, "idle")
		stopping = stopping || strings.Contains(c, "cannot be told") && strings.Contains(c, "stopped at")
	}
	if now.State != orkv1.State_STATE_STOPPED || now.Reason != orkv1.Reason_REASON_IDLE {
		t.Errorf("%v", now)
	}
	if !stopping {
		t.Error("nobody was warned that it would be stopped, and by what it is judged")
	}
}

func TestACostLimitNeedsAPriceAndIsHeld(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 1))
	s := containerSpec("x", 1)
	s.CostLimitCents = 2000
	_, err := l.jobs.CreateJob(l.ctx, &orkv1.CreateJobRequest{Spec: s, Owner: &orkv1.Owner{ProjectId: "p-1"}})
	refused(t, err, fault.Invalid, "no price of "+model+" is known")
	// A GPU for 10 in a second: two seconds.
	r, err := l.jobs.CreateJob(l.ctx, &orkv1.CreateJobRequest{
		Spec: s, Owner: &orkv1.Owner{ProjectId: "p-1", UserId: "u-1"}, Price: &orkv1.Price{CentsPerGpuHour: 3_600_000, Currency: "USD"},
	})
	if err != nil {
		t.Fatal(err)
	}
	stopped := l.await(r.Job.Id, orkv1.State_STATE_STOPPED)
	if stopped.Reason != orkv1.Reason_REASON_COST_LIMIT || stopped.CostCents < 2000 || !strings.Contains(stopped.Message, "of the 20.00 USD that it may") {
		t.Errorf("%v %d %q", stopped.Reason, stopped.CostCents, stopped.Message)
	}
	_, err = l.jobs.StartJob(l.ctx, &orkv1.StartJobRequest{Id: r.Job.Id})
	refused(t, err, fault.FailedPrecondition, "higher cost limit")
	after := l.get(r.Job.Id).CostCents
	time.Sleep(100 * time.Millisecond)
	if again := l.get(r.Job.Id).CostCents; again != after {
		t.Errorf("a stopped job goes on to cost: %d, then %d", after, again)
	}
}

func TestADrainedRackWarnsItsJobsAndStopsThemAtTheDeadline(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 2))
	j := l.create(containerSpec("x", 1))
	l.boot(newest(l.await(j.Id, orkv1.State_STATE_PROVISIONING)).Id)
	l.await(j.Id, orkv1.State_STATE_RUNNING)
	drain := func(d time.Duration) *orkv1.DrainRackResponse {
		r, err := l.racks.DrainRack(l.ctx, &orkv1.DrainRackRequest{Id: "rk-test", Deadline: durationpb.New(d), Actor: "op"})
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	r := drain(time.Hour)
	deadline := r.Entry.DrainDeadline.AsTime().Format(time.RFC3339)
	if r.Jobs != 1 || !r.Entry.Cordoned {
		t.Errorf("%v", r)
	}
	told := l.awaitThat(j.Id, "told of the drain and its deadline", func(j *orkv1.Job) bool { return strings.Contains(condition(j, "draining"), deadline) })
	if told.State != orkv1.State_STATE_RUNNING {
		t.Errorf("%v", told)
	}
	events, err := l.jobs.ListEvents(l.ctx, &orkv1.ListEventsRequest{JobId: j.Id})
	if err != nil || !slices.ContainsFunc(events.Events, func(e *orkv1.Event) bool { return e.Actor == "op" && strings.Contains(e.Message, deadline) }) {
		t.Errorf("no event with the operator and the deadline: %v %v", events, err)
	}
	later := l.create(containerSpec("later", 1))
	l.awaitThat(later.Id, "not placed there", func(j *orkv1.Job) bool { return j.Reason == orkv1.Reason_REASON_CORDONED })
	open := func() {
		if _, err := l.racks.CordonRack(l.ctx, &orkv1.CordonRackRequest{Id: "rk-test"}); err != nil {
			t.Fatal(err)
		}
	}
	open()
	l.awaitThat(j.Id, "no longer drained", func(j *orkv1.Job) bool { return condition(j, "draining") == "" && j.State == orkv1.State_STATE_RUNNING })
	l.await(later.Id, orkv1.State_STATE_PROVISIONING)
	drain(0)
	if s := l.await(j.Id, orkv1.State_STATE_STOPPED); s.Reason != orkv1.Reason_REASON_DRAINED || !strings.Contains(s.Message, "root disk is kept") {
		t.Errorf("%v %q", s.Reason, s.Message)
	}
	open()
	if _, err := l.jobs.StartJob(l.ctx, &orkv1.StartJobRequest{Id: j.Id}); err != nil {
		t.Fatal(err)
	}
	l.await(j.Id, orkv1.State_STATE_PROVISIONING)
}

func TestARackRemovedByForceLeavesAListAndIsAdoptedOrCleared(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 2))
	var ids, attempts []string
	for i := range 2 {
		j := l.create(containerSpec(fmt.Sprintf("j%d", i), 1))
		a := newest(l.await(j.Id, orkv1.State_STATE_PROVISIONING))
		l.boot(a.Id)
		l.await(j.Id, orkv1.State_STATE_RUNNING)
		ids, attempts = append(ids, j.Id), append(attempts, a.Id)
	}
	forget := func(force bool, confirm string) (*orkv1.ForgetRackResponse, error) {
		return l.racks.ForgetRack(l.ctx, &orkv1.ForgetRackRequest{Id: "rk-test", Force: force, Confirm: confirm, Actor: "op"})
	}
	put := func(id, key string) error {
		_, err := l.racks.PutRack(l.ctx, &orkv1.PutRackRequest{Entry: &orkv1.RackEntry{Id: id, Location: "us", Key: key}})
		return err
	}
	_, err := forget(false, "")
	refused(t, err, fault.FailedPrecondition, "still holds 2 attempts")
	_, err = forget(true, "rk")
	refused(t, err, fault.Invalid, "not confirmed")
	left, err := forget(true, "rk-test")
	if err != nil || len(left.Abandoned.GetAttempts()) != 2 {
		t.Fatalf("%v %v", left, err)
	}
	for i, id := range ids {
		j := l.awaitThat(id, "shown abandoned", func(j *orkv1.Job) bool { return condition(j, "abandoned") != "" })
		if j.State != orkv1.State_STATE_RUNNING || newest(j).Id != attempts[i] || !newest(j).Abandoned {
			t.Errorf("%v", j)
		}
	}
	if n, _ := l.worker.count(); n != 2 {
		t.Errorf("%d attempts are left in the cluster: removing an entry stops nothing", n)
	}
	// Nobody else takes the id, and the worker takes no other.
	refused(t, put("rk-test", newKey(t).Hex()), fault.Conflict, "another worker's key")
	refused(t, put("rk-other", l.key.Hex()), fault.Conflict, "register it as rk-test")

	comeBack := func() {
		l.eventually("the rack is registered again", func() bool { return put("rk-test", l.key.Hex()) == nil })
		l.connected(true)
		l.eventually("what was abandoned is listed as present", func() bool {
			r, err := l.racks.ListForgottenRacks(l.ctx, &orkv1.ListForgottenRacksRequest{})
			return err == nil && len(r.Racks) == 1 && r.Racks[0].Returned && len(r.Racks[0].Attempts) == 2 &&
				r.Racks[0].Attempts[0].Present && r.Racks[0].Attempts[1].Present
		})
		l.eventually("doctor is told", func() bool {
			return slices.ContainsFunc(l.health.List(), func(w *meshv1.Warning) bool {
				return w.Code == string(health.AbandonedWork) && strings.Contains(w.Text, attempts[0])
			})
		})
	}
	comeBack()
	resolve := func(action orkv1.AbandonedAction, confirm string) (uint32, error) {
		r, err := l.racks.ResolveAbandoned(l.ctx, &orkv1.ResolveAbandonedRequest{RackId: "rk-test", Action: action, Confirm: confirm, Actor: "op"})
		return r.GetAttempts(), err
	}
	if n, err := resolve(orkv1.AbandonedAction_ABANDONED_ACTION_ADOPT, ""); err != nil || n != 2 {
		t.Fatalf("adopted %d: %v", n, err)
	}
	for i, id := range ids {
		j := l.awaitThat(id, "adopted", func(j *orkv1.Job) bool { return len(j.Conditions) == 0 && newest(j).AgentReady })
		if j.State != orkv1.State_STATE_RUNNING || newest(j).Id != attempts[i] || len(j.Replicas[0].Attempts) != 1 {
			t.Errorf("%v", j)
		}
	}
	l.eventually("doctor has nothing more to tell", func() bool {
		return !l.health.Has(health.AbandonedWork)
	})

	if _, err := forget(true, "rk-test"); err != nil {
		t.Fatal(err)
	}
	comeBack()
	_, err = resolve(orkv1.AbandonedAction_ABANDONED_ACTION_DELETE, "")
	refused(t, err, fault.Invalid, "not confirmed")
	if n, err := resolve(orkv1.AbandonedAction_ABANDONED_ACTION_DELETE, "rk-test"); err != nil || n != 2 {
		t.Fatalf("cleared %d: %v", n, err)
	}
	for _, id := range ids {
		if j := l.await(id, orkv1.State_STATE_STOPPED); j.Reason != orkv1.Reason_REASON_RACK_FORGOTTEN {
			t.Errorf("%v", j)
		}
	}
	if n, _ := l.worker.count(); n != 0 {
		t.Errorf("%d attempts are left in the cluster", n)
	}
}

func TestAJobOnARackRemovedByForceCanBeDeleted(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 1))
	j := l.create(containerSpec("x", 1))
	l.await(j.Id, orkv1.State_STATE_PROVISIONING)
	if _, err := l.racks.ForgetRack(l.ctx, &orkv1.ForgetRackRequest{Id: "rk-test", Force: true, Confirm: "rk-test"}); err != nil {
		t.Fatal(err)
	}
	if _, err := l.jobs.DeleteJob(l.ctx, &orkv1.DeleteJobRequest{Id: j.Id}); err != nil {
		t.Fatal(err)
	}
	l.eventually("its record is gone", func() bool {
		_, err := l.jobs.GetJob(l.ctx, &orkv1.GetJobRequest{Id: j.Id})
		return fault.KindOf(err) == fault.NotFound
	})
	// When the rack comes back, what is left of a deleted job is taken down: its VM,
	// which takes a while, and after that its disk.
	l.worker.change(func() { l.worker.slowDelete = 300 * time.Millisecond })
	l.eventually("the rack is registered again", func() bool {
		_, err := l.racks.PutRack(l.ctx, &orkv1.PutRackRequest{Entry: &orkv1.RackEntry{Id: "rk-test", Location: "us", Key: l.key.Hex()}})
		return err == nil
	})
	l.eventually("nothing of it is left in the cluster", l.worker.empty)
}

func TestAProcessThatStoodStillJudgesNothingOfThatTime(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 3))
	steady := l.create(containerSpec("steady", 1))
	l.boot(newest(l.await(steady.Id, orkv1.State_STATE_PROVISIONING)).Id)
	l.awaitThat(steady.Id, "ready", func(j *orkv1.Job) bool { return newest(j).AgentReady })
	coming := l.create(containerSpec("coming", 1))
	l.awaitThat(coming.Id, "waiting for its agent", func(j *orkv1.Job) bool { return j.Reason == orkv1.Reason_REASON_WAITING_FOR_AGENT })
	starting := l.create(containerSpec("starting", 1))
	a, err := l.redeem(seedOf(l, newest(l.await(starting.Id, orkv1.State_STATE_PROVISIONING)).Id), newKey(t))
	if err != nil {
		t.Fatal(err)
	}
	l.attend(a, agentv1.Phase_PHASE_STARTING)
	l.await(starting.Id, orkv1.State_STATE_STARTING)

	// Longer than any deadline that stands here.
	l.ahead.Add(int64(10 * time.Hour))
	l.eventually("one notice says so", func() bool {
		return l.health.Has(health.StoodStill)
	})
	later := l.create(containerSpec("later", 1))
	l.awaitThat(later.Id, "looked at after that", func(j *orkv1.Job) bool { return j.Reason == orkv1.Reason_REASON_BUSY })
	for id, want := range map[string]orkv1.State{
		steady.Id: orkv1.State_STATE_RUNNING, coming.Id: orkv1.State_STATE_PROVISIONING, starting.Id: orkv1.State_STATE_STARTING,
	} {
		if j := l.get(id); j.State != want || len(j.Replicas[0].Attempts) != 1 {
			t.Errorf("moved by a stand-still: %v", j)
		}
	}
	if !newest(l.get(steady.Id)).AgentReady {
		t.Error("out of routing although it was heard all the time")
	}
}

func TestWhatAUserGivesReachesTheVM(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 1))
	s := containerSpec("x", 1)
	s.StartScript, s.Environment = "#!/bin/sh\necho hello\n", map[string]string{"A": "1"}
	s.SshAuthorizedKeys = []string{"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ5bWvZ2rQF2XvDSpZ2mYGZp1pJr0rYy1bT0cPzVvX0d someone"}
	s.Tags, s.CpuCoresPerGpu, s.MemoryGibPerGpu, s.Cuda = []string{"lab", "éclair"}, 4, 16, "CUDA 12.8"
	j := l.create(s)
	a := newest(l.await(j.Id, orkv1.State_STATE_PROVISIONING))
	seed := seedOf(l, a.Id)
	if seed.StartScript != s.StartScript || seed.Environment["A"] != "1" || len(seed.SshAuthorizedKeys) != 1 ||
		seed.SshAuthorizedKeys[0] != s.SshAuthorizedKeys[0] || seed.DefaultUser != "ubuntu" || seed.GpuCount != 1 {
		t.Errorf("%v", seed)
	}
	if spec := l.worker.plan(a.Id).Spec; spec.CpuCoresPerGpu != 4 || spec.MemoryGibPerGpu != 16 || spec.DiskGib != 10 || spec.Cuda != "CUDA 12.8" {
		t.Errorf("%v", spec)
	}
}

func TestRacksAreListedByTypeAndKeysOnlyWhenAskedFor(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 1))
	list := func(q *orkv1.ListRacksRequest) []*orkv1.Rack {
		r, err := l.racks.ListRacks(l.ctx, q)
		if err != nil {
			t.Fatal(err)
		}
		return r.Racks
	}
	if r := list(&orkv1.ListRacksRequest{TypePrefix: "server"}); len(r) != 1 || r[0].Entry.Key != "" || r[0].Entry.Type != "server-k8s-nvidia" {
		t.Errorf("%v", r)
	}
	if r := list(&orkv1.ListRacksRequest{TypePrefix: "miner"}); len(r) != 0 {
		t.Errorf("%v", r)
	}
	if r := list(&orkv1.ListRacksRequest{Location: "US", Keys: true}); len(r) != 1 || r[0].Entry.Key != l.key.ID().String() {
		t.Errorf("%v", r)
	}
	_, err := l.racks.PutRack(l.ctx, &orkv1.PutRackRequest{Entry: &orkv1.RackEntry{Id: "rk-2", Location: "us", Key: newKey(t).Hex(), Type: "No Word"}})
	refused(t, err, fault.Invalid, "ERR_RACK_TYPE_INVALID")
}

func TestAJobOfTheSameNameIsAnotherJob(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 2))
	l.worker.change(func() { l.worker.holdDelete = true })
	first := l.create(containerSpec("same", 1))
	l.boot(newest(l.await(first.Id, orkv1.State_STATE_PROVISIONING)).Id)
	l.await(first.Id, orkv1.State_STATE_RUNNING)
	if _, err := l.jobs.DeleteJob(l.ctx, &orkv1.DeleteJobRequest{Id: first.Id}); err != nil {
		t.Fatal(err)
	}
	second := l.create(containerSpec("same", 1))
	up := l.awaitThat(second.Id, "waiting for its own agent", func(j *orkv1.Job) bool { return j.Reason == orkv1.Reason_REASON_WAITING_FOR_AGENT })
	if second.Id == first.Id || newest(up).AgentKey != "" || newest(up).Nodes[0].VmiUid == "uid-"+newest(l.get(first.Id)).Id {
		t.Errorf("the second job took over what the first left: %v", up)
	}
	if s := l.get(first.Id).State; s != orkv1.State_STATE_STOPPING {
		t.Errorf("the first is %s", s)
	}
}

func TestWhatExistsCanBeReadAndDeletedWhateverTodaysRulesSay(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 2))
	runs, waits := l.create(containerSpec("runs", 1)), l.create(containerSpec("waits", 2))
	l.await(runs.Id, orkv1.State_STATE_PROVISIONING)
	l.awaitThat(waits.Id, "busy", func(j *orkv1.Job) bool { return j.Reason == orkv1.Reason_REASON_BUSY })
	// The location is renamed and the model no longer allowed.
	if _, err := l.racks.PutRack(l.ctx, &orkv1.PutRackRequest{Entry: &orkv1.RackEntry{
		Id: "rk-test", Location: "elsewhere", Key: l.key.Hex(), AllowedModels: []string{"OTHER"},
	}}); err != nil {
		t.Fatal(err)
	}
	l.stop()
	l.startOrk()
	for _, id := range []string{runs.Id, waits.Id} {
		l.get(id)
		l.eventually("the deletion is taken", func() bool {
			_, err := l.jobs.DeleteJob(l.ctx, &orkv1.DeleteJobRequest{Id: id})
			return err == nil
		})
		l.eventually("its record is gone", func() bool {
			_, err := l.jobs.GetJob(l.ctx, &orkv1.GetJobRequest{Id: id})
			return fault.KindOf(err) == fault.NotFound
		})
	}
	l.eventually("nothing is left in the cluster", l.worker.empty)
}

func TestEveryTransitionSaysWhoWhyAndWhen(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 1))
	j := l.create(containerSpec("x", 1))
	l.boot(newest(l.await(j.Id, orkv1.State_STATE_PROVISIONING)).Id)
	l.await(j.Id, orkv1.State_STATE_RUNNING)
	if _, err := l.jobs.StopJob(l.ctx, &orkv1.StopJobRequest{Id: j.Id, Actor: "u-2"}); err != nil {
		t.Fatal(err)
	}
	l.awaitThat(j.Id, "stopped and gone", func(j *orkv1.Job) bool { return j.State == orkv1.State_STATE_STOPPED && newest(j).Gone })
	r, err := l.jobs.ListEvents(l.ctx, &orkv1.ListEventsRequest{JobId: j.Id})
	if err != nil {
		t.Fatal(err)
	}
	by := map[orkv1.State]string{}
	for _, e := range r.Events {
		by[e.State] = e.Actor
		if !e.Time.IsValid() || e.Actor == "" || e.Message == "" {
			t.Errorf("%v", e)
		}
	}
	for state, want := range map[orkv1.State]string{
		orkv1.State_STATE_QUEUED: "u-1", orkv1.State_STATE_PROVISIONING: "rk-test",
		orkv1.State_STATE_STARTING: "rk-test", orkv1.State_STATE_STOPPING: "u-2", orkv1.State_STATE_STOPPED: "u-2",
	} {
		if by[state] != want {
			t.Errorf("%s was caused by %q, not %q: %v", state, by[state], want, r.Events)
		}
	}
	if a := newest(l.get(j.Id)); a.ClaimedAt == nil || a.GoneAt == nil || a.GoneAt.AsTime().Before(a.ClaimedAt.AsTime()) {
		t.Errorf("GPUs held from %v to %v", a.ClaimedAt, a.GoneAt)
	}
}
