package app

import (
	"context"
	"fmt"

	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	"github.com/cosmicac/cosmicac/pkg/store/storetest"
	agentv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
)

// deleteAll deletes jobs at once and waits until neither a record nor the cluster
// holds anything of them.
func (l *lab) deleteAll(ids ...string) {
	l.t.Helper()
	var all sync.WaitGroup
	for _, id := range ids {
		all.Go(func() {
			for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
				if _, err := l.jobs.DeleteJob(l.ctx, &orkv1.DeleteJobRequest{Id: id}); err == nil || fault.KindOf(err) == fault.NotFound {
					return
				}
			}
		})
	}
	all.Wait()
	l.eventually("no record and nothing in the cluster", func() bool {
		r, err := l.jobs.ListJobs(l.ctx, &orkv1.ListJobsRequest{PageSize: 500})
		return err == nil && len(r.Jobs) == 0 && l.worker.empty()
	})
}

// letIn plays the agent of an attempt, which says nothing yet; nil when its token is
// not taken now.
func (l *lab) letIn(attemptID string) *agent {
	l.t.Helper()
	a, err := l.redeem(seedOf(l, attemptID), newKey(l.t))
	if err != nil {
		return nil
	}
	return a
}

// agentOf is letIn once the orchestrator has heard of the attempt's machine.
func (l *lab) agentOf(attemptID string) (a *agent) {
	l.t.Helper()
	l.eventually("the agent is let in", func() bool { a = l.letIn(attemptID); return a != nil })
	return a
}

// quiet waits until the orchestrator in this process has looked at everything a few
// more times.
func (l *lab) quiet() {
	l.t.Helper()
	for range 4 {
		seen := l.passes.Load()
		l.eventually("it looks again", func() bool { return l.passes.Load() > seen })
	}
}

// TestKillsInTheMiddleOfCreatesMakeEachJobOnce is try P15: two app-nodes create while
// the orchestrator is killed again and again; nothing has to be unlocked by hand.
func TestKillsInTheMiddleOfCreatesMakeEachJobOnce(t *testing.T) {
	t.Parallel()
	l := startLab(t, true, []*orkv1.RackNode{gpuNode("n1", 8)})
	apps := []orkv1.JobsClient{l.jobs, l.otherApp()}
	const jobs = 24
	ids := make([]string, jobs)
	var answered atomic.Int32
	var all sync.WaitGroup
	for i := range jobs {
		all.Go(func() {
			for end := time.Now().Add(2 * patience); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
				ctx, cancel := context.WithTimeout(l.ctx, 5*time.Second)
				r, err := apps[i%2].CreateJob(ctx, &orkv1.CreateJobRequest{
					Spec: containerSpec(fmt.Sprintf("j%d", i), 1), Owner: &orkv1.Owner{ProjectId: "p-1", UserId: "u-1"}, IdempotencyKey: fmt.Sprintf("k%d", i),
				})
				cancel()
				if err == nil {
					ids[i] = r.Job.Id
					answered.Add(1)
					return
				}
				if k := fault.KindOf(err); k == fault.Conflict || k == fault.Invalid {
					t.Errorf("create %d: %v", i, err)
					return
				}
			}
		})
		if i%8 == 7 { // in the middle of it
			l.stop()
			l.startOrk()
		}
	}
	all.Wait()
	if answered.Load() != jobs {
		t.Fatalf("%d of %d creates were answered", answered.Load(), jobs)
	}
	l.eventually("8 hold and 16 wait", func() bool { c := l.census(); return c["provisioning"] == 8 && c["queued busy"] == 16 })
	seen := map[string]bool{}
	for _, id := range ids {
		if seen[id] {
			t.Errorf("two keys made one job, %s", id)
		}
		seen[id] = true
	}
	if n, most := l.worker.count(); n != 8 || most != 8 {
		t.Errorf("%d attempts, %d GPUs at most", n, most)
	}
	l.deleteAll(ids...)
}

// TestADiskThatFillsUnderMovingJobsFailsNoneAndAllCatchUp is the second half of try
// P16; TestABusyDiskFailsNoJob is the first.
func TestADiskThatFillsUnderMovingJobsFailsNoneAndAllCatchUp(t *testing.T) {
	t.Parallel()
	disk := storetest.SmallDisk(t, 6<<20)
	l := newLab(t, gpuNode("n1", 3))
	l.stop()
	files, err := filepath.Glob(filepath.Join(l.dir, "ork.db*"))
	if err != nil || len(files) == 0 {
		t.Fatalf("%v %v", files, err)
	}
	for _, f := range files {
		raw, err := os.ReadFile(f)
		if err == nil {
			err = os.WriteFile(filepath.Join(disk.Folder, filepath.Base(f)), raw, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	l.dir = disk.Folder
	l.startOrk()
	l.connected(true)
	coming, leaving, waits := l.create(containerSpec("coming", 1)), l.create(containerSpec("leaving", 1)), l.create(containerSpec("waits", 3))
	attempt := newest(l.await(coming.Id, orkv1.State_STATE_PROVISIONING))
	l.await(leaving.Id, orkv1.State_STATE_PROVISIONING)
	l.awaitThat(waits.Id, "busy", func(j *orkv1.Job) bool { return j.Reason == orkv1.Reason_REASON_BUSY })
	if _, err := l.jobs.DeleteJob(l.ctx, &orkv1.DeleteJobRequest{Id: leaving.Id}); err != nil {
		t.Fatal(err)
	}

	disk.Fill(t)
	for n := 0; ; n++ {
		_, err := l.jobs.CreateJob(l.ctx, &orkv1.CreateJobRequest{Spec: containerSpec(strings.Repeat("n", 60), 3), Owner: &orkv1.Owner{ProjectId: "p-1"}})
		if err != nil {
			turnedDown(t, err, fault.Unavailable, "disk is full")
			break
		}
		if n > 5000 {
			t.Fatal("the small disk is never full")
		}
	}
	// The cluster goes on meanwhile.
	agent := l.letIn(attempt.Id)
	l.worker.phase(attempt.Id, func(s *workerv1.AttemptStatus) { s.Message = strings.Repeat("moving on ", 100) })
	l.quiet()
	for _, id := range []string{coming.Id, waits.Id} {
		if j := l.get(id); j.State == orkv1.State_STATE_FAILED {
			t.Errorf("failed by a full disk: %v", j)
		}
	}

	disk.Free(t)
	if agent == nil {
		agent = l.agentOf(attempt.Id)
	}
	l.attend(agent, agentv1.Phase_PHASE_READY)
	if a := newest(l.await(coming.Id, orkv1.State_STATE_RUNNING)); a.Id != attempt.Id {
		t.Errorf("another attempt: %v", a)
	}
	l.eventually("what was deleted is gone", func() bool {
		_, err := l.jobs.GetJob(l.ctx, &orkv1.GetJobRequest{Id: leaving.Id})
		return fault.KindOf(err) == fault.NotFound
	})
	r, err := l.jobs.ListJobs(l.ctx, &orkv1.ListJobsRequest{PageSize: 500})
	if err != nil {
		t.Fatal(err)
	}
	var ids []string
	for _, j := range r.Jobs {
		if j.State == orkv1.State_STATE_FAILED {
			t.Errorf("failed by a full disk: %v", j)
		}
		ids = append(ids, j.Id)
	}
	l.deleteAll(ids...)
}

// TestAStoppedJobWaitsForItsGPUAndStartsWhenTheOtherEnds is try P26.
func TestAStoppedJobWaitsForItsGPUAndStartsWhenTheOtherEnds(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 1))
	a := l.create(containerSpec("a", 1))
	l.await(a.Id, orkv1.State_STATE_PROVISIONING)
	if _, err := l.jobs.StopJob(l.ctx, &orkv1.StopJobRequest{Id: a.Id}); err != nil {
		t.Fatal(err)
	}
	if s := l.await(a.Id, orkv1.State_STATE_STOPPED); !strings.Contains(s.Message, "GPUs are given up") {
		t.Errorf("nobody said that stop gives its GPU up: %q", s.Message)
	}
	b := l.create(containerSpec("b", 1))
	l.await(b.Id, orkv1.State_STATE_PROVISIONING)
	if _, err := l.jobs.StartJob(l.ctx, &orkv1.StartJobRequest{Id: a.Id}); err != nil {
		t.Fatal(err)
	}
	if w := l.awaitThat(a.Id, "waits", func(j *orkv1.Job) bool { return j.Reason == orkv1.Reason_REASON_BUSY }); !strings.Contains(w.Message, "0 of 1") {
		t.Errorf("it waits for %q", w.Message)
	}
	l.delete(b.Id)
	if again := newest(l.await(a.Id, orkv1.State_STATE_PROVISIONING)); again.Number != 2 {
		t.Errorf("%v", again)
	}
	if _, most := l.worker.count(); most != 1 {
		t.Errorf("%d GPUs of 1 were held at once", most)
	}
	l.deleteAll(a.Id)
}

// TestMemoryThatNoNodeHasFailsAndMemoryThatIsTakenIsWaitedFor is try P29.
func TestMemoryThatNoNodeHasFailsAndMemoryThatIsTakenIsWaitedFor(t *testing.T) {
	t.Parallel()
	node := gpuNode("n1", 8)
	const gib = 1 << 30
	node.TotalMemoryBytes, node.FreeMemoryBytes = 1000*gib, 1000*gib
	l := newLab(t, node)
	sized := func(name string, gibs uint32) *orkv1.JobSpec {
		s := containerSpec(name, 1)
		s.MemoryGibPerGpu = gibs
		return s
	}
	larger := l.create(sized("larger than a node", 1200))
	if j := l.await(larger.Id, orkv1.State_STATE_FAILED); j.Reason != orkv1.Reason_REASON_NEVER_FITS || !strings.Contains(j.Message, "memory") {
		t.Errorf("%v %q", j.Reason, j.Message)
	}
	first := l.create(sized("first", 600))
	a := newest(l.await(first.Id, orkv1.State_STATE_PROVISIONING))
	if got := l.worker.plan(a.Id).Spec.MemoryGibPerGpu; got != 600 {
		t.Errorf("the worker is told %d GiB", got)
	}
	l.worker.change(func() { l.worker.nodes[0].FreeMemoryBytes = 390 * gib })
	l.eventually("the orchestrator knows what is left", func() bool {
		r, err := l.racks.ListRacks(l.ctx, &orkv1.ListRacksRequest{})
		return err == nil && r.Racks[0].Nodes[0].FreeMemoryBytes == 390*gib
	})
	second := l.create(sized("second", 600))
	if j := l.awaitThat(second.Id, "waits", func(j *orkv1.Job) bool { return j.Reason == orkv1.Reason_REASON_BUSY }); !strings.Contains(j.Message, "memory") {
		t.Errorf("it waits for %q", j.Message)
	}
	l.delete(first.Id)
	l.worker.change(func() { l.worker.nodes[0].FreeMemoryBytes = 1000 * gib })
	l.await(second.Id, orkv1.State_STATE_PROVISIONING)
	l.deleteAll(larger.Id, second.Id)
}

// TestASlowLinkToTheWorkerLeavesNoOrphan is try P35: jobs come and go while a kilobyte
// a second passes.
func TestASlowLinkToTheWorkerLeavesNoOrphan(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 8))
	link := slowLinkTo(t, l.address)
	l.cutWorker()
	l.connected(false)
	l.rack = l.node(l.key, meshv1.Role_ROLE_WORKER, func(n *mesh.Node) { workerv1.RegisterRackServer(n, l.worker) })
	l.rack.Keep(l.orkKey.ID(), link.address)
	l.connected(true)
	if link.open.Load() == 0 {
		t.Fatal("the worker found another way: the test would prove nothing")
	}
	before := l.create(containerSpec("before", 1))
	first := newest(l.await(before.Id, orkv1.State_STATE_PROVISIONING))

	link.rate.Store(1000)
	var stay, leave []string
	for i := range 3 {
		stay = append(stay, l.create(containerSpec(fmt.Sprintf("stays %d", i), 1)).Id)
		leave = append(leave, l.create(containerSpec(fmt.Sprintf("leaves %d", i), 1)).Id)
	}
	time.Sleep(8 * time.Second)
	for _, id := range leave {
		if _, err := l.jobs.DeleteJob(l.ctx, &orkv1.DeleteJobRequest{Id: id}); err != nil {
			t.Fatal(err)
		}
	}
	time.Sleep(12 * time.Second)
	link.rate.Store(0)

	for _, id := range stay {
		if j := l.await(id, orkv1.State_STATE_PROVISIONING); len(j.Replicas[0].Attempts) != 1 {
			t.Errorf("made again on a slow link: %v", j)
		}
	}
	l.eventually("those that were deleted are gone", func() bool {
		r, err := l.jobs.ListJobs(l.ctx, &orkv1.ListJobsRequest{PageSize: 500})
		return err == nil && len(r.Jobs) == 4
	})
	if a := newest(l.awaitThat(before.Id, "seen", func(j *orkv1.Job) bool { return len(j.Conditions) == 0 })); a.Id != first.Id {
		t.Errorf("replaced on a slow link: %v", a)
	}
	l.eventually("ledger and truth are the same four", func() bool {
		n, _ := l.worker.count()
		return n == 4
	})
	if link.slowly.Load() < 1000 {
		t.Errorf("only %d bytes passed slowly: the test proves nothing", link.slowly.Load())
	}
	l.deleteAll(append(stay, before.Id)...)
}

// TestOrdersGivenWhileTheWorkerWasAwayAreCarriedOutWhenItReturns is the other half of
// try P35: a delete and a stop that nobody could take.
func TestOrdersGivenWhileTheWorkerWasAwayAreCarriedOutWhenItReturns(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 3))
	deleted, stopped, kept := l.create(containerSpec("deleted", 1)), l.create(containerSpec("stopped", 1)), l.create(containerSpec("kept", 1))
	for _, j := range []*orkv1.Job{deleted, stopped, kept} {
		l.boot(newest(l.await(j.Id, orkv1.State_STATE_PROVISIONING)).Id)
		l.await(j.Id, orkv1.State_STATE_RUNNING)
	}
	l.cutWorker()
	l.connected(false)
	if _, err := l.jobs.DeleteJob(l.ctx, &orkv1.DeleteJobRequest{Id: deleted.Id}); err != nil {
		t.Fatal(err)
	}
	if _, err := l.jobs.StopJob(l.ctx, &orkv1.StopJobRequest{Id: stopped.Id}); err != nil {
		t.Fatal(err)
	}
	waits := l.create(containerSpec("waits", 1))
	l.quiet()
	for _, id := range []string{deleted.Id, stopped.Id} {
		if j := l.get(id); j.State != orkv1.State_STATE_STOPPING || newest(j).Gone {
			t.Errorf("said to be gone while nobody could look: %v", j)
		}
	}
	l.startWorker()
	l.eventually("the deleted one is gone", func() bool {
		_, err := l.jobs.GetJob(l.ctx, &orkv1.GetJobRequest{Id: deleted.Id})
		return fault.KindOf(err) == fault.NotFound
	})
	l.await(stopped.Id, orkv1.State_STATE_STOPPED)
	l.await(waits.Id, orkv1.State_STATE_PROVISIONING)
	if j := l.get(kept.Id); j.State != orkv1.State_STATE_RUNNING || len(j.Replicas[0].Attempts) != 1 {
		t.Errorf("%v", j)
	}
	if _, most := l.worker.count(); most > 3 {
		t.Errorf("%d GPUs of 3 were held at once", most)
	}
	l.deleteAll(stopped.Id, waits.Id, kept.Id)
}

// TestAModelThatCannotBeHadEndsItsJobOnceAndGivesTheGPUBack is try P23 as the
// orchestrator sees it.
func TestAModelThatCannotBeHadEndsItsJobOnceAndGivesTheGPUBack(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 1))
	j := l.create(inferenceSpec("m", 1))
	a := l.agentOf(newest(l.await(j.Id, orkv1.State_STATE_PROVISIONING)).Id)
	const words = "the model cannot be had: 404 Client Error. Repository Not Found for url: https://hub/Qwen/Qwne3"
	l.says(a, &agentv1.Report{Phase: agentv1.Phase_PHASE_FAILED, Message: words, Final: true, Simulated: true})
	failed := l.awaitThat(j.Id, "failed and gone", func(j *orkv1.Job) bool { return j.State == orkv1.State_STATE_FAILED && newest(j).Gone })
	if failed.Reason != orkv1.Reason_REASON_ENGINE_FAILED || !strings.Contains(failed.Message, words) {
		t.Errorf("its owner reads %v %q", failed.Reason, failed.Message)
	}
	l.quiet()
	if j := l.get(j.Id); len(j.Replicas[0].Attempts) != 1 || j.State != orkv1.State_STATE_FAILED {
		t.Errorf("tried again: %v", j)
	}
	// The GPU is free for others at once.
	next := l.create(containerSpec("next", 1))
	l.await(next.Id, orkv1.State_STATE_PROVISIONING)
	if _, most := l.worker.count(); most != 1 {
		t.Errorf("%d GPUs of 1 were held at once", most)
	}
	l.deleteAll(j.Id, next.Id)
}

// routed tells which replicas of the only endpoint get requests.
func (l *lab) routed() map[uint32]bool {
	l.t.Helper()
	ctx, cancel := context.WithTimeout(l.ctx, 10*time.Second)
	defer cancel()
	out := map[uint32]bool{}
	table, err := orkv1.NewEndpointsClient(l.app.Client(l.orkKey.ID(), l.address)).WatchEndpoints(ctx, &orkv1.WatchEndpointsRequest{})
	if err != nil {
		return out
	}
	r, err := table.Recv()
	if err != nil {
		return out
	}
	for _, e := range r.Endpoints {
		for i, replica := range e.Replicas {
			out[uint32(i)] = replica.Ready
		}
	}
	return out
}

// TestASilentReplicaGetsNoRequestsAndNoTwinUntilItIsFenced is try P24 for a replica.
func TestASilentReplicaGetsNoRequestsAndNoTwinUntilItIsFenced(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 1), gpuNode("n2", 1), gpuNode("n3", 1))
	j := l.create(inferenceSpec("m", 2))
	first := l.comes(j.Id, 0, 1)
	a := l.agentOf(first.Id)
	l.attend(a, agentv1.Phase_PHASE_READY)
	l.boot(l.comes(j.Id, 1, 1).Id)
	l.eventually("both get requests", func() bool { r := l.routed(); return r[0] && r[1] })

	silent := func() {
		t.Helper()
		l.worker.silence(first.Id, true)
		a.stop()
		l.eventually("the silent one gets none, the other does", func() bool { r := l.routed(); return !r[0] && r[1] })
		is := l.awaitThat(j.Id, "shown unreachable", func(j *orkv1.Job) bool { return condition(j, "unreachable") != "" })
		l.quiet()
		if n, _ := l.worker.count(); n != 2 || is.State != orkv1.State_STATE_RUNNING {
			t.Fatalf("%d machines, %v", n, is)
		}
	}
	silent()
	l.worker.silence(first.Id, false)
	l.attend(a, agentv1.Phase_PHASE_READY)
	l.eventually("it gets requests again by itself", func() bool { r := l.routed(); return r[0] && r[1] })
	if _, is := replica(l.get(j.Id), 0); is.Id != first.Id {
		t.Fatalf("replaced: %v", is)
	}

	silent()
	l.worker.change(func() { l.worker.holdDelete = true })
	if _, err := l.jobs.FenceAttempt(l.ctx, &orkv1.FenceAttemptRequest{AttemptId: first.Id, Confirm: first.Id, Actor: "op"}); err != nil {
		t.Fatal(err)
	}
	var next *orkv1.Attempt
	l.awaitThat(j.Id, "made elsewhere", func(j *orkv1.Job) bool {
		_, next = replica(j, 0)
		return next.Number == 2 && next.State == orkv1.State_STATE_PROVISIONING
	})
	l.boot(next.Id)
	l.eventually("both get requests", func() bool { r := l.routed(); return r[0] && r[1] })
	l.quiet()
	if n, _ := l.worker.count(); n != 3 || next.Nodes[0].NodeName == first.Nodes[0].NodeName {
		t.Errorf("%d machines, want the two that serve and the silent one; the new one is on %v", n, next.Nodes)
	}
	// The node returns, and what it still held is taken down.
	l.worker.silence(first.Id, false)
	l.worker.change(func() { l.worker.holdDelete = false; delete(l.worker.attempts, first.Id) })
	l.awaitThat(j.Id, "nothing is left to clean up", func(j *orkv1.Job) bool { return len(j.Conditions) == 0 })
	l.deleteAll(j.Id)
}

// TestUsersWhoChangeOneJobAtOnceLeaveItWhole has two people stop, start, restart and
// update the same two jobs through two app-nodes.
func TestUsersWhoChangeOneJobAtOnceLeaveItWhole(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 4))
	apps := []orkv1.JobsClient{l.jobs, l.otherApp()}
	container, serves := l.create(containerSpec("c", 1)), l.create(inferenceSpec("m", 1))
	var all sync.WaitGroup
	for user, jobs := range apps {
		all.Go(func() {
			actor := fmt.Sprintf("u-%d", user)
			for i := range 40 {
				id := []string{container.Id, serves.Id}[i%2]
				var err error
				switch (i/2 + user) % 4 {
				case 0:
					_, err = jobs.StopJob(l.ctx, &orkv1.StopJobRequest{Id: id, Actor: actor})
				case 1:
					_, err = jobs.StartJob(l.ctx, &orkv1.StartJobRequest{Id: id, Actor: actor})
				case 2:
					_, err = jobs.RestartJob(l.ctx, &orkv1.RestartJobRequest{Id: id, Actor: actor})
				case 3:
					_, err = jobs.UpdateJob(l.ctx, &orkv1.UpdateJobRequest{Id: id, Strategy: stopFirst, Arguments: arguments(fmt.Sprintf("--%s-%d", actor, i)), Actor: actor})
				}
				// What does not apply now is refused in words, and nothing else goes wrong.
				switch k := fault.KindOf(fault.FromGRPC(err)); {
				case err == nil, k == fault.FailedPrecondition, k == fault.Conflict:
				default:
					t.Errorf("%s, step %d: %v", actor, i, err)
				}
			}
		})
	}
	all.Wait()
	if n, most := l.worker.count(); n > 2 || most > 2 {
		t.Errorf("two jobs of one GPU each hold %d attempts, %d GPUs at most", n, most)
	}
	for _, id := range []string{container.Id, serves.Id} {
		l.eventually("at most one attempt of it lives", func() bool {
			live := 0
			for _, a := range l.get(id).Replicas[0].Attempts {
				if a.ClaimedAt != nil && !a.Gone {
					live++
				}
			}
			return live <= 1
		})
		r, err := l.jobs.ListEvents(l.ctx, &orkv1.ListEventsRequest{JobId: id})
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range r.Events {
			if e.Actor == "" || e.Message == "" {
				t.Errorf("nobody did this: %v", e)
			}
		}
	}
	// Both delete, too; one of them may find it gone.
	for _, jobs := range apps {
		for _, id := range []string{container.Id, serves.Id} {
			all.Go(func() {
				if _, err := jobs.DeleteJob(l.ctx, &orkv1.DeleteJobRequest{Id: id}); err != nil && fault.KindOf(fault.FromGRPC(err)) != fault.NotFound {
					t.Errorf("delete: %v", err)
				}
			})
		}
	}
	all.Wait()
	l.deleteAll()
}
