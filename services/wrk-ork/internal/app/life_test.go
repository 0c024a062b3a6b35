package app

import (
	"fmt"
	"strings"
	"sync"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/cosmicac/cosmicac/pkg/fault"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

func TestAJobFromCreateOverStopAndStartToDelete(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 8))
	watch, err := l.jobs.WatchJobs(l.ctx, &orkv1.WatchJobsRequest{ProjectIds: []string{"p-1"}})
	if err != nil {
		t.Fatal(err)
	}
	j := l.create(containerSpec("campaña 模型-1 🚀", 2))
	if j.State != orkv1.State_STATE_QUEUED || j.Spec.Name != "campaña 模型-1 🚀" {
		t.Fatalf("created as %v", j)
	}
	up := l.awaitThat(j.Id, "waiting for its agent", func(j *orkv1.Job) bool { return j.Reason == orkv1.Reason_REASON_WAITING_FOR_AGENT })
	first := newest(up)
	if first.RackId != "rk-test" || first.Nodes[0].GpuCount != 2 || first.Nodes[0].VmiUid == "" || !first.Simulated {
		t.Errorf("attempt: %v", first)
	}
	a := l.boot(first.Id)
	running := newest(l.awaitThat(j.Id, "running and ready", func(j *orkv1.Job) bool {
		return j.State == orkv1.State_STATE_RUNNING && newest(j).AgentReady && len(newest(j).AgentAddresses) > 0
	}))
	if running.AgentKey != a.key.ID().String() || running.DefaultUser != "ubuntu" || running.RunningAt == nil {
		t.Errorf("running: %v", running)
	}

	if _, err := l.jobs.StopJob(l.ctx, &orkv1.StopJobRequest{Id: j.Id, Actor: "u-1"}); err != nil {
		t.Fatal(err)
	}
	stopped := l.awaitThat(j.Id, "stopped and gone", func(j *orkv1.Job) bool { return j.State == orkv1.State_STATE_STOPPED && newest(j).Gone })
	if stopped.Reason != orkv1.Reason_REASON_STOP_REQUESTED || !strings.Contains(stopped.Message, "GPUs are given up") {
		t.Errorf("stopped: %v %q", stopped.Reason, stopped.Message)
	}
	if _, err := a.client.RenewCertificate(l.ctx, &orkv1.RenewCertificateRequest{}); err == nil {
		t.Error("the agent of a stopped attempt got a new certificate")
	}
	a.stop()

	if _, err := l.jobs.StartJob(l.ctx, &orkv1.StartJobRequest{Id: j.Id, Actor: "u-1"}); err != nil {
		t.Fatal(err)
	}
	again := newest(l.await(j.Id, orkv1.State_STATE_PROVISIONING))
	if again.Id == first.Id || again.Number != 2 {
		t.Errorf("second attempt: %v", again)
	}
	l.boot(again.Id)
	l.await(j.Id, orkv1.State_STATE_RUNNING)

	if _, err := l.jobs.DeleteJob(l.ctx, &orkv1.DeleteJobRequest{Id: j.Id, Actor: "u-1"}); err != nil {
		t.Fatal(err)
	}
	l.eventually("the record is gone and says when", func() bool {
		_, err := l.jobs.GetJob(l.ctx, &orkv1.GetJobRequest{Id: j.Id})
		return fault.KindOf(err) == fault.NotFound && strings.Contains(err.Error(), "was deleted at")
	})
	if !l.worker.empty() {
		t.Error("the record went before the cluster was empty")
	}
	synced := false
	for {
		change, err := watch.Recv()
		if err != nil {
			t.Fatal(err)
		}
		synced = synced || change.GetSynced()
		if change.GetDeletedJobId() == j.Id {
			break
		}
	}
	if !synced {
		t.Error("the watch never said synced")
	}
}

func TestTwentyJobsOnEightGPUsNeverHoldMoreThanEight(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 4), gpuNode("n2", 4))
	ids := make([]string, 20)
	var all sync.WaitGroup
	for i := range ids {
		all.Go(func() { ids[i] = l.create(containerSpec(fmt.Sprintf("j%d", i), 1)).Id })
	}
	all.Wait()
	counts := func() (held, busy int) {
		r, err := l.jobs.ListJobs(l.ctx, &orkv1.ListJobsRequest{PageSize: 100})
		if err != nil {
			t.Fatal(err)
		}
		for _, j := range r.Jobs {
			switch {
			case j.State == orkv1.State_STATE_PROVISIONING:
				held++
			case j.State == orkv1.State_STATE_QUEUED && j.Reason == orkv1.Reason_REASON_BUSY && j.Message != "":
				busy++
			}
		}
		return held, busy
	}
	l.eventually("8 hold, 12 wait with a reason", func() bool { held, busy := counts(); return held == 8 && busy == 12 })
	// One leaves: the next takes its place.
	for _, id := range ids {
		if l.get(id).State == orkv1.State_STATE_PROVISIONING {
			if _, err := l.jobs.DeleteJob(l.ctx, &orkv1.DeleteJobRequest{Id: id}); err != nil {
				t.Fatal(err)
			}
			break
		}
	}
	l.eventually("the freed GPU is used", func() bool { held, busy := counts(); return held == 8 && busy == 11 })
	if _, most := l.worker.count(); most > 8 {
		t.Errorf("%d GPUs were held at once", most)
	}
}

func TestEightGPUsWhereNodesHaveFourFailAtOnce(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 4), gpuNode("n2", 4))
	j := l.await(l.create(containerSpec("big", 8)).Id, orkv1.State_STATE_FAILED)
	if j.Reason != orkv1.Reason_REASON_NEVER_FITS || !strings.Contains(j.Message, "ask for 4 or fewer") {
		t.Errorf("%v %q", j.Reason, j.Message)
	}
	s := containerSpec("elsewhere", 1)
	s.Location = "mars"
	if j := l.await(l.create(s).Id, orkv1.State_STATE_FAILED); j.Reason != orkv1.Reason_REASON_UNKNOWN_LOCATION {
		t.Errorf("%v", j.Reason)
	}
	s = containerSpec("typo", 1)
	s.Gpu.Model = "H1OO"
	if j := l.await(l.create(s).Id, orkv1.State_STATE_FAILED); j.Reason != orkv1.Reason_REASON_UNKNOWN_MODEL || !strings.Contains(j.Message, model) {
		t.Errorf("%v %q", j.Reason, j.Message)
	}
	v := inferenceSpec("spans", 1)
	v.Gpu.Count = 8
	if j := l.await(l.create(v).Id, orkv1.State_STATE_FAILED); j.Reason != orkv1.Reason_REASON_NO_FABRIC {
		t.Errorf("%v %q", j.Reason, j.Message)
	}
}

func TestTheSameKeyMakesOneJobAndAnotherSpecConflicts(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 8))
	ask := func(project, key string, s *orkv1.JobSpec) (*orkv1.CreateJobResponse, error) {
		return l.jobs.CreateJob(l.ctx, &orkv1.CreateJobRequest{Spec: s, Owner: &orkv1.Owner{ProjectId: project}, IdempotencyKey: key})
	}
	var mu sync.Mutex
	seen := map[string]bool{}
	var all sync.WaitGroup
	for range 10 {
		all.Go(func() {
			r, err := ask("p-1", "k", containerSpec("one", 1))
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			seen[r.Job.Id] = true
		})
	}
	all.Wait()
	if len(seen) != 1 {
		t.Errorf("%d jobs were made", len(seen))
	}
	if _, err := ask("p-1", "k", containerSpec("two", 1)); fault.KindOf(err) != fault.Conflict {
		t.Errorf("another spec: %v", err)
	}
	if r, err := ask("p-2", "k", containerSpec("one", 1)); err != nil || r.Existed {
		t.Errorf("another project: %v %v", r, err)
	}
	dry, err := l.jobs.CreateJob(l.ctx, &orkv1.CreateJobRequest{Spec: containerSpec("dry", 99), Owner: &orkv1.Owner{ProjectId: "p-1"}, DryRun: true})
	if err != nil || dry.Job.Id != "" || dry.Job.Reason != orkv1.Reason_REASON_NEVER_FITS {
		t.Errorf("dry run: %v %v", dry, err)
	}
}

func TestAllProblemsOfASpecArriveWithTheirFields(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 8))
	s := containerSpec("a\nb", 5000)
	s.DiskGib, s.CostLimitCents = 70_000, 100
	_, err := l.jobs.CreateJob(l.ctx, &orkv1.CreateJobRequest{Spec: s, Owner: &orkv1.Owner{}, IdempotencyKey: "\n"})
	if fault.KindOf(err) != fault.Invalid || len(fault.DetailsOf(err)) != 6 {
		t.Errorf("%v %v", err, fault.DetailsOf(err))
	}
}

func TestARefusedClaimIsPlannedAgain(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 2), gpuNode("n2", 2))
	l.worker.change(func() { l.worker.refuse = 2 })
	j := l.await(l.create(containerSpec("x", 1)).Id, orkv1.State_STATE_PROVISIONING)
	r, err := l.jobs.ListEvents(l.ctx, &orkv1.ListEventsRequest{JobId: j.Id})
	if err != nil {
		t.Fatal(err)
	}
	refusals := 0
	for _, e := range r.Events {
		if e.Reason == orkv1.Reason_REASON_CLAIM_REFUSED {
			refusals++
			if !strings.Contains(e.Message, "another pod took the GPU") {
				t.Errorf("the worker's words are missing: %q", e.Message)
			}
		}
	}
	if refusals != 2 {
		t.Errorf("%d refusals in %v", refusals, r.Events)
	}
	if len(j.Replicas[0].Attempts) != 1 {
		t.Errorf("%d attempts", len(j.Replicas[0].Attempts))
	}
}

func TestALostReplyOfAClaimMakesNoSecondVM(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 2))
	l.worker.change(func() { l.worker.dropReply = 1 })
	l.await(l.create(containerSpec("x", 1)).Id, orkv1.State_STATE_PROVISIONING)
	if n, most := l.worker.count(); n != 1 || most != 1 {
		t.Errorf("%d attempts, %d GPUs", n, most)
	}
}

func TestCreateRacingDeleteLeavesNothing(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 4))
	var all sync.WaitGroup
	for i := range 12 {
		all.Go(func() {
			j := l.create(containerSpec(fmt.Sprintf("race%d", i), 1))
			if _, err := l.jobs.DeleteJob(l.ctx, &orkv1.DeleteJobRequest{Id: j.Id}); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	l.eventually("no job and nothing in the cluster", func() bool {
		r, err := l.jobs.ListJobs(l.ctx, &orkv1.ListJobsRequest{})
		return err == nil && len(r.Jobs) == 0 && l.worker.empty()
	})
}

func TestNothingIsGoneBeforeTheClusterSaysSo(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 1))
	l.worker.change(func() { l.worker.holdDelete = true })
	a := l.await(l.create(containerSpec("a", 1)).Id, orkv1.State_STATE_PROVISIONING)
	if _, err := l.jobs.StopJob(l.ctx, &orkv1.StopJobRequest{Id: a.Id}); err != nil {
		t.Fatal(err)
	}
	l.await(a.Id, orkv1.State_STATE_STOPPING)
	b := l.create(containerSpec("b", 1))
	l.awaitThat(b.Id, "waiting with a reason", func(j *orkv1.Job) bool { return j.Reason == orkv1.Reason_REASON_BUSY })
	if j := l.get(a.Id); j.State != orkv1.State_STATE_STOPPING || newest(j).Gone {
		t.Errorf("%v", j)
	}
	l.worker.change(func() { l.worker.holdDelete = false; clear(l.worker.attempts) })
	l.await(a.Id, orkv1.State_STATE_STOPPED)
	l.await(b.Id, orkv1.State_STATE_PROVISIONING)
	// Started again, the first waits and says for what.
	if _, err := l.jobs.StartJob(l.ctx, &orkv1.StartJobRequest{Id: a.Id}); err != nil {
		t.Fatal(err)
	}
	l.awaitThat(a.Id, "waiting for the GPU that it gave up", func(j *orkv1.Job) bool {
		return j.State == orkv1.State_STATE_QUEUED && j.Reason == orkv1.Reason_REASON_BUSY
	})
}

func TestPagesHoldEveryJobOnce(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 1))
	for i := range 7 {
		l.create(containerSpec(fmt.Sprintf("p%d", i), 1))
	}
	seen := map[string]bool{}
	req := &orkv1.ListJobsRequest{PageSize: 3, ProjectIds: []string{"p-1"}}
	for {
		r, err := l.jobs.ListJobs(l.ctx, proto.Clone(req).(*orkv1.ListJobsRequest))
		if err != nil {
			t.Fatal(err)
		}
		for _, j := range r.Jobs {
			if seen[j.Id] {
				t.Errorf("%s twice", j.Id)
			}
			seen[j.Id] = true
		}
		if req.PageToken = r.NextPageToken; req.PageToken == "" {
			break
		}
	}
	if len(seen) != 7 {
		t.Errorf("%d jobs", len(seen))
	}
}
