package app

import (
	"database/sql"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	agentv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
)

func condition(j *orkv1.Job, kind string) string {
	for _, c := range j.Conditions {
		if c.Kind == kind {
			return c.Message
		}
	}
	return ""
}

func TestAWorkerCutOffChangesNoAttempt(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 2))
	j := l.create(containerSpec("x", 1))
	before := newest(l.await(j.Id, orkv1.State_STATE_PROVISIONING))
	l.boot(before.Id)
	l.await(j.Id, orkv1.State_STATE_RUNNING)
	l.cutWorker()
	cut := l.awaitThat(j.Id, "shown unreachable", func(j *orkv1.Job) bool { return condition(j, "unreachable") != "" })
	if cut.State != orkv1.State_STATE_RUNNING || newest(cut).Id != before.Id {
		t.Errorf("%v", cut)
	}
	waits := l.create(containerSpec("later", 1))
	l.awaitThat(waits.Id, "queued for the rack", func(j *orkv1.Job) bool { return j.Reason == orkv1.Reason_REASON_RACK_UNREACHABLE })
	l.startWorker()
	back := l.awaitThat(j.Id, "reachable again", func(j *orkv1.Job) bool { return len(j.Conditions) == 0 })
	if back.State != orkv1.State_STATE_RUNNING || newest(back).Id != before.Id || newest(back).Nodes[0].VmiUid != "uid-"+before.Id {
		t.Errorf("%v", back)
	}
	l.await(waits.Id, orkv1.State_STATE_PROVISIONING)
}

func TestARestartOfTheOrchestratorInTheMiddleGoesOnWithTheSameAttempts(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 3))
	l.worker.change(func() { l.worker.boot = false })
	coming := l.create(containerSpec("coming", 1))
	provisioning := newest(l.await(coming.Id, orkv1.State_STATE_PROVISIONING))
	l.worker.change(func() { l.worker.boot = true })
	steady := l.create(containerSpec("steady", 1))
	ran := newest(l.await(steady.Id, orkv1.State_STATE_PROVISIONING))
	l.boot(ran.Id)
	l.awaitThat(steady.Id, "ready", func(j *orkv1.Job) bool { return newest(j).AgentReady })
	queued := l.create(containerSpec("queued", 3))
	l.awaitThat(queued.Id, "busy", func(j *orkv1.Job) bool { return j.Reason == orkv1.Reason_REASON_BUSY })
	l.worker.change(func() { l.worker.holdDelete = true })
	leaving := l.create(containerSpec("leaving", 1))
	l.await(leaving.Id, orkv1.State_STATE_PROVISIONING)
	if _, err := l.jobs.DeleteJob(l.ctx, &orkv1.DeleteJobRequest{Id: leaving.Id}); err != nil {
		t.Fatal(err)
	}
	l.await(leaving.Id, orkv1.State_STATE_STOPPING)

	l.stop()
	// While nobody looks, the cluster goes on.
	l.worker.phase(provisioning.Id, func(s *workerv1.AttemptStatus) { s.Phase = workerv1.AttemptPhase_ATTEMPT_PHASE_UP })
	l.worker.change(func() { l.worker.holdDelete = false })
	l.startOrk()

	if a := newest(l.awaitThat(coming.Id, "waiting for its agent", func(j *orkv1.Job) bool {
		return j.Reason == orkv1.Reason_REASON_WAITING_FOR_AGENT
	})); a.Id != provisioning.Id {
		t.Errorf("another attempt: %v", a)
	}
	// The token of before the restart is still the token.
	l.boot(provisioning.Id)
	l.await(coming.Id, orkv1.State_STATE_RUNNING)
	j := l.awaitThat(steady.Id, "ready again", func(j *orkv1.Job) bool { return newest(j).AgentReady && len(j.Conditions) == 0 })
	if j.State != orkv1.State_STATE_RUNNING || newest(j).Id != ran.Id || len(j.Replicas[0].Attempts) != 1 {
		t.Errorf("%v", j)
	}
	if j := l.get(queued.Id); j.State != orkv1.State_STATE_QUEUED {
		t.Errorf("%v", j)
	}
	l.eventually("the deletion is finished", func() bool {
		_, err := l.jobs.GetJob(l.ctx, &orkv1.GetJobRequest{Id: leaving.Id})
		return fault.KindOf(err) == fault.NotFound
	})
}

func TestALostAgentIsShownAndNotReplaced(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 1))
	j := l.create(containerSpec("x", 1))
	a := l.boot(newest(l.await(j.Id, orkv1.State_STATE_PROVISIONING)).Id)
	l.awaitThat(j.Id, "ready", func(j *orkv1.Job) bool { return newest(j).AgentReady })
	a.stop()
	lost := l.awaitThat(j.Id, "unreachable", func(j *orkv1.Job) bool { return condition(j, "unreachable") != "" })
	if lost.State != orkv1.State_STATE_RUNNING || newest(lost).AgentReady || len(lost.Replicas[0].Attempts) != 1 {
		t.Errorf("%v", lost)
	}
	l.attend(a, agentv1.Phase_PHASE_READY)
	l.awaitThat(j.Id, "ready again by itself", func(j *orkv1.Job) bool { return newest(j).AgentReady && len(j.Conditions) == 0 })
}

func TestProxiesSeeReplicasComeDrainAndGo(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 2))
	ctx := l.ctx
	table, err := orkv1.NewEndpointsClient(l.app.Client(l.orkKey.ID(), l.address)).WatchEndpoints(ctx, &orkv1.WatchEndpointsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	until := func(what string, holds func([]*orkv1.Endpoint) bool) {
		t.Helper()
		timer := time.AfterFunc(patience, func() { t.Errorf("never seen: %s", what); _ = table.CloseSend() })
		defer timer.Stop()
		for {
			r, err := table.Recv()
			if err != nil {
				t.Fatalf("%s: %v", what, err)
			}
			if holds(r.Endpoints) {
				return
			}
		}
	}
	j := l.create(inferenceSpec("m", 2))
	var agents []*agent
	for i := range 2 {
		up := l.awaitThat(j.Id, "claimed", func(j *orkv1.Job) bool {
			a := j.Replicas[i].Attempts
			return a[len(a)-1].State == orkv1.State_STATE_PROVISIONING
		})
		a := up.Replicas[i].Attempts
		agents = append(agents, l.boot(a[len(a)-1].Id))
	}
	until("two ready replicas", func(e []*orkv1.Endpoint) bool {
		return len(e) == 1 && strings.HasPrefix(e[0].Id, "ep-") && e[0].ModelNames[0] == "Qwen/Qwen3-32B" &&
			e[0].Replicas[0].Ready && e[0].Replicas[1].Ready && e[0].Replicas[0].AgentKey != ""
	})
	agents[1].stop()
	until("one of two ready", func(e []*orkv1.Endpoint) bool { return e[0].Replicas[0].Ready && !e[0].Replicas[1].Ready })
	if _, err := l.jobs.StopJob(ctx, &orkv1.StopJobRequest{Id: j.Id}); err != nil {
		t.Fatal(err)
	}
	until("none ready, draining", func(e []*orkv1.Endpoint) bool { return !e[0].Replicas[0].Ready && e[0].Replicas[0].Draining })
	select {
	case r := <-agents[0].drain:
		if !r.DrainDeadline.IsValid() {
			t.Errorf("%v", r)
		}
	case <-time.After(patience):
		t.Error("the agent was never told to drain")
	}
	until("stopped", func(e []*orkv1.Endpoint) bool { return e[0].JobState == orkv1.State_STATE_STOPPED })
	if _, err := l.jobs.DeleteJob(ctx, &orkv1.DeleteJobRequest{Id: j.Id}); err != nil {
		t.Fatal(err)
	}
	until("no endpoint", func(e []*orkv1.Endpoint) bool { return len(e) == 0 })
}

func TestAFailedReplicaRestartsAfterItIsGone(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 1))
	j := l.create(inferenceSpec("m", 1))
	first := newest(l.await(j.Id, orkv1.State_STATE_PROVISIONING))
	a, err := l.redeem(seedOf(l, first.Id), newKey(t))
	if err != nil {
		t.Fatal(err)
	}
	l.attend(a, agentv1.Phase_PHASE_FAILED)
	second := l.awaitThat(j.Id, "in a second attempt", func(j *orkv1.Job) bool {
		return newest(j).Number == 2 && newest(j).State == orkv1.State_STATE_PROVISIONING
	})
	old := second.Replicas[0].Attempts[0]
	if old.State != orkv1.State_STATE_FAILED || old.Reason != orkv1.Reason_REASON_ENGINE_FAILED || !old.Gone {
		t.Errorf("%v", old)
	}
	if _, most := l.worker.count(); most > 1 {
		t.Errorf("%d GPUs held at once", most)
	}
}

func TestRackEntriesAndTheirKeys(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 1))
	rules := func(err error) (all string) {
		for _, d := range fault.DetailsOf(err) {
			all += d.Rule + " "
		}
		return all
	}
	put := func(e *orkv1.RackEntry) error {
		_, err := l.racks.PutRack(l.ctx, &orkv1.PutRackRequest{Entry: e})
		return err
	}
	other := newKey(t)
	if err := put(&orkv1.RackEntry{Id: "Not A Label", Location: "us", Key: other.Hex()}); !strings.Contains(rules(err), "ERR_RACK_ID_INVALID") {
		t.Errorf("bad id: %v", err)
	}
	if err := put(&orkv1.RackEntry{Id: "rk-2", Location: "us", Key: "xyz"}); !strings.Contains(rules(err), "ERR_RACK_INFO_RPC_PUBKEY_INVALID") {
		t.Errorf("bad key: %v", err)
	}
	if err := put(&orkv1.RackEntry{Id: "rk-2", Location: "us", Key: l.orkKey.Hex()}); !strings.Contains(rules(err), "ERR_RACK_TYPE_INVALID") {
		t.Errorf("a key of another role: %v", err)
	}
	if err := put(&orkv1.RackEntry{Id: "rk-test", Location: "us", Key: other.Hex()}); fault.KindOf(err) != fault.Conflict {
		t.Errorf("an id taken by another key: %v", err)
	}
	register := func(id string) error {
		_, err := orkv1.NewRacksClient(l.rack.Client(l.orkKey.ID(), l.address)).RegisterRack(l.ctx, &orkv1.RegisterRackRequest{RackId: id})
		return err
	}
	if err := register("rk-none"); fault.KindOf(err) != fault.NotFound {
		t.Errorf("no entry: %v", err)
	}
	if err := put(&orkv1.RackEntry{Id: "rk-2", Location: "us", Key: other.Hex()}); err != nil {
		t.Fatal(err)
	}
	if err := register("rk-2"); fault.KindOf(err) != fault.Conflict {
		t.Errorf("another's entry: %v", err)
	}

	j := l.create(containerSpec("x", 1))
	l.await(j.Id, orkv1.State_STATE_PROVISIONING)
	if _, err := l.racks.ForgetRack(l.ctx, &orkv1.ForgetRackRequest{Id: "rk-test"}); fault.KindOf(err) != fault.FailedPrecondition {
		t.Errorf("forgot a rack with a live attempt: %v", err)
	}
	if _, err := l.racks.CordonRack(l.ctx, &orkv1.CordonRackRequest{Id: "rk-test", Cordoned: true}); err != nil {
		t.Fatal(err)
	}
	if _, err := l.racks.ForgetRack(l.ctx, &orkv1.ForgetRackRequest{Id: "rk-2"}); err != nil {
		t.Fatal(err)
	}
	closed := l.create(containerSpec("y", 1))
	l.awaitThat(closed.Id, "waiting for a cordoned rack", func(j *orkv1.Job) bool { return j.Reason == orkv1.Reason_REASON_CORDONED })
	if _, err := l.jobs.DeleteJob(l.ctx, &orkv1.DeleteJobRequest{Id: j.Id}); err != nil {
		t.Fatal(err)
	}
	if _, err := l.racks.CordonRack(l.ctx, &orkv1.CordonRackRequest{Id: "rk-test"}); err != nil {
		t.Fatal(err)
	}
	l.await(closed.Id, orkv1.State_STATE_PROVISIONING)

	// A stopped job keeps its disk there, which nobody else could remove.
	if _, err := l.jobs.StopJob(l.ctx, &orkv1.StopJobRequest{Id: closed.Id}); err != nil {
		t.Fatal(err)
	}
	l.awaitThat(closed.Id, "stopped and gone", func(j *orkv1.Job) bool {
		return j.State == orkv1.State_STATE_STOPPED && newest(j).Gone
	})
	if _, err := l.racks.ForgetRack(l.ctx, &orkv1.ForgetRackRequest{Id: "rk-test"}); fault.KindOf(err) != fault.FailedPrecondition || !strings.Contains(err.Error(), "root disks") {
		t.Errorf("forgot a rack with a kept disk: %v", err)
	}
}

func TestARackGoingAndAJobComingAtOnceNeverLeavesAJobWithoutARack(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 4))
	for range 50 {
		done := make(chan error, 1)
		go func() {
			_, err := l.racks.ForgetRack(l.ctx, &orkv1.ForgetRackRequest{Id: "rk-test"})
			done <- err
		}()
		j := l.create(containerSpec("x", 1))
		forgot := <-done == nil
		l.awaitThat(j.Id, "decided", func(j *orkv1.Job) bool {
			return j.State == orkv1.State_STATE_PROVISIONING || j.State == orkv1.State_STATE_FAILED
		})
		if forgot {
			if _, err := l.racks.PutRack(l.ctx, &orkv1.PutRackRequest{Entry: &orkv1.RackEntry{Id: "rk-test", Location: "us", Key: l.key.Hex()}}); err != nil {
				t.Fatal(err)
			}
			l.connected(true)
			if s := l.get(j.Id).State; s == orkv1.State_STATE_PROVISIONING {
				t.Error("placed on a rack that was forgotten")
			}
		}
		if _, err := l.jobs.DeleteJob(l.ctx, &orkv1.DeleteJobRequest{Id: j.Id}); err != nil {
			t.Fatal(err)
		}
		l.eventually("the job is gone", func() bool {
			_, err := l.jobs.GetJob(l.ctx, &orkv1.GetJobRequest{Id: j.Id})
			return fault.KindOf(err) == fault.NotFound
		})
	}
	if !l.worker.empty() {
		t.Error("something is left in the cluster")
	}
}

func TestWhatWeakCallersMayNotDo(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 1))
	asWorker := orkv1.NewJobsClient(l.rack.Client(l.orkKey.ID(), l.address))
	if _, err := asWorker.ListJobs(l.ctx, &orkv1.ListJobsRequest{}); fault.KindOf(err) != fault.Denied {
		t.Errorf("a worker lists jobs: %v", err)
	}
	j := l.create(containerSpec("x", 1))
	a := l.boot(newest(l.await(j.Id, orkv1.State_STATE_PROVISIONING)).Id)
	// Its certificate is shown beside what runs; until then it is one that joins.
	l.eventually("an agent may ask where the orchestrator is", func() bool {
		_, err := meshv1.NewCardsClient(a.node.Client(l.orkKey.ID())).ListCards(l.ctx, &meshv1.ListCardsRequest{Role: meshv1.Role_ROLE_ORK})
		return err == nil
	})
	if _, err := orkv1.NewJobsClient(a.node.Client(l.orkKey.ID())).DeleteJob(l.ctx, &orkv1.DeleteJobRequest{Id: j.Id}); fault.KindOf(err) != fault.Denied {
		t.Errorf("an agent deletes its job: %v", err)
	}
	if _, err := meshv1.NewCardsClient(a.node.Client(l.orkKey.ID())).ListCards(l.ctx, &meshv1.ListCardsRequest{}); fault.KindOf(err) != fault.Denied {
		t.Errorf("an agent lists cards: %v", err)
	}
}

func TestABusyDiskFailsNoJob(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 2))
	j := l.create(containerSpec("x", 1))
	attempt := newest(l.await(j.Id, orkv1.State_STATE_PROVISIONING))
	// Another program holds the file's write lock for longer than the store waits.
	db, err := sql.Open("sqlite", filepath.Join(l.dir, "ork.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	conn, err := db.Conn(l.ctx)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := conn.ExecContext(l.ctx, "PRAGMA busy_timeout=30000; BEGIN IMMEDIATE"); err != nil {
		t.Fatal(err)
	}
	l.worker.phase(attempt.Id, func(s *workerv1.AttemptStatus) { s.Message = "something to record" })
	_, err = l.jobs.CreateJob(l.ctx, &orkv1.CreateJobRequest{Spec: containerSpec("y", 1), Owner: &orkv1.Owner{ProjectId: "p-1"}})
	if fault.KindOf(err) != fault.Unavailable || len(fault.DetailsOf(err)) == 0 || fault.DetailsOf(err)[0].Rule != "storage" {
		t.Errorf("create while the disk is busy: %v %v", err, fault.DetailsOf(err))
	}
	if s := l.get(j.Id).State; s != orkv1.State_STATE_PROVISIONING {
		t.Errorf("a storage error picked state %s", s)
	}
	if _, err := conn.ExecContext(l.ctx, "ROLLBACK"); err != nil {
		t.Fatal(err)
	}
	_ = conn.Close()
	l.boot(attempt.Id)
	l.await(j.Id, orkv1.State_STATE_RUNNING)
}

func TestAKilledDaemonLosesNothingThatWasAnswered(t *testing.T) {
	t.Parallel()
	l := startLab(t, true, []*orkv1.RackNode{gpuNode("n1", 3)})
	steady := l.create(containerSpec("steady", 1))
	attempt := newest(l.await(steady.Id, orkv1.State_STATE_PROVISIONING))
	l.boot(attempt.Id)
	l.awaitThat(steady.Id, "ready", func(j *orkv1.Job) bool { return newest(j).AgentReady })
	var ids []string
	for range 4 {
		// Killed right after the answer, wherever the job is by then.
		ids = append(ids, l.create(containerSpec("x", 1)).Id)
		l.stop()
		l.startOrk()
		l.get(steady.Id)
	}
	for _, id := range ids[:2] {
		j := l.await(id, orkv1.State_STATE_PROVISIONING)
		if len(j.Replicas[0].Attempts) != 1 {
			t.Errorf("%v", j)
		}
	}
	for _, id := range ids[2:] {
		l.awaitThat(id, "busy", func(j *orkv1.Job) bool { return j.Reason == orkv1.Reason_REASON_BUSY })
	}
	j := l.awaitThat(steady.Id, "ready", func(j *orkv1.Job) bool { return newest(j).AgentReady && len(j.Conditions) == 0 })
	if j.State != orkv1.State_STATE_RUNNING || newest(j).Id != attempt.Id {
		t.Errorf("%v", j)
	}
	if n, most := l.worker.count(); n != 3 || most != 3 {
		t.Errorf("%d attempts, %d GPUs at most", n, most)
	}
}
