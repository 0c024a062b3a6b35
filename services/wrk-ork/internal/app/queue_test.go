package app

import (
	"flag"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

// motion is how many jobs move while creates are timed; 500 for the figure.
var motion = flag.Int("motion", 40, "jobs in motion while creates are timed")

// otherApp starts a second app-node and returns its way to ork.
func (l *lab) otherApp() orkv1.JobsClient {
	l.t.Helper()
	n := l.node(l.app2Key, meshv1.Role_ROLE_APP_NODE, nil)
	return orkv1.NewJobsClient(n.Client(l.orkKey.ID(), l.address))
}

// createFor makes a job of a project, as an app-node that knows its quota does.
func (l *lab) createFor(jobs orkv1.JobsClient, project string, s *orkv1.JobSpec, q *orkv1.ProjectQuota) *orkv1.Job {
	l.t.Helper()
	if q != nil {
		q.ProjectId = project
	}
	r, err := jobs.CreateJob(l.ctx, &orkv1.CreateJobRequest{Spec: s, Owner: &orkv1.Owner{ProjectId: project, UserId: "u-1"}, Quota: q})
	if err != nil {
		l.t.Error(err)
		return &orkv1.Job{}
	}
	return r.Job
}

// census counts jobs by "state" or, of those that wait, by "state reason".
func (l *lab) census() map[string]int {
	l.t.Helper()
	out := map[string]int{}
	r, err := l.jobs.ListJobs(l.ctx, &orkv1.ListJobsRequest{PageSize: 500})
	if err != nil {
		return out // ork is away: asked again
	}
	for _, j := range r.Jobs {
		word := strings.ToLower(strings.TrimPrefix(j.State.String(), "STATE_"))
		if j.State == orkv1.State_STATE_QUEUED {
			word += " " + strings.ToLower(strings.TrimPrefix(j.Reason.String(), "REASON_"))
		}
		out[word]++
	}
	return out
}

func (l *lab) delete(id string) {
	l.t.Helper()
	l.eventually("the delete is taken", func() bool {
		_, err := l.jobs.DeleteJob(l.ctx, &orkv1.DeleteJobRequest{Id: id})
		return err == nil
	})
	l.eventually("the job is gone", func() bool {
		_, err := l.jobs.GetJob(l.ctx, &orkv1.GetJobRequest{Id: id})
		return err != nil
	})
}

func TestTwentyJobsThroughTwoAppNodesNeverHoldACardTwice(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 4), gpuNode("n2", 4))
	apps := []orkv1.JobsClient{l.jobs, l.otherApp()}
	var all sync.WaitGroup
	for i := range 20 {
		all.Go(func() { l.createFor(apps[i%2], "p-1", containerSpec(fmt.Sprintf("j%d", i), 1), nil) })
	}
	all.Wait()
	l.eventually("8 hold, 12 wait with the reason", func() bool {
		c := l.census()
		return c["provisioning"] == 8 && c["queued busy"] == 12
	})
	l.worker.mu.Lock()
	defer l.worker.mu.Unlock()
	for _, n := range l.worker.nodes {
		if held, _ := l.worker.held(n.Name); held != 4 {
			t.Errorf("node %s holds %d of 4: no replica stands on a full node while another is idle", n.Name, held)
		}
	}
	if l.worker.mostHeld > 8 {
		t.Errorf("%d GPUs were held at once", l.worker.mostHeld)
	}
}

func TestTheReasonShownIsTheOneThatStandsInTheWay(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 4), gpuNode("n2", 4))
	ended := func(s *orkv1.JobSpec, reason orkv1.Reason, words string) {
		t.Helper()
		j := l.await(l.create(s).Id, orkv1.State_STATE_FAILED)
		if j.Reason != reason || !strings.Contains(j.Message, words) {
			t.Errorf("%s is told %s %q, want %s with %q", s.Name, j.Reason, j.Message, reason, words)
		}
	}
	unknown := containerSpec("unknown model", 1)
	unknown.Gpu.Model = "TYPO"
	ended(unknown, orkv1.Reason_REASON_UNKNOWN_MODEL, model)
	ended(containerSpec("8 where nodes have 4", 8), orkv1.Reason_REASON_NEVER_FITS, "ask for 4 or fewer")

	for i := range 2 {
		l.await(l.create(containerSpec(fmt.Sprintf("fills %d", i), 4)).Id, orkv1.State_STATE_PROVISIONING)
	}
	waits := func(project string, s *orkv1.JobSpec, q *orkv1.ProjectQuota, reason orkv1.Reason, words string) string {
		t.Helper()
		j := l.createFor(l.jobs, project, s, q)
		j = l.awaitThat(j.Id, "waits with "+reason.String(), func(j *orkv1.Job) bool { return j.Reason == reason })
		if j.State != orkv1.State_STATE_QUEUED || !strings.Contains(j.Message, words) {
			t.Errorf("%s is told %s %q, want %q", s.Name, j.State, j.Message, words)
		}
		return j.Id
	}
	busy := waits("p-1", containerSpec("all busy", 1), nil, orkv1.Reason_REASON_BUSY, "0 of 8")
	waits("p-small", containerSpec("over quota", 2), &orkv1.ProjectQuota{Revision: 1, MaximumGpus: 1}, orkv1.Reason_REASON_OVER_QUOTA, "ask for fewer")
	untold := waits("p-untold", containerSpec("quota unknown", 1), nil, orkv1.Reason_REASON_QUOTA_UNKNOWN, "app-node")

	// A dry run names all of it and leaves nothing behind.
	before := l.census()
	dry, err := l.jobs.CreateJob(l.ctx, &orkv1.CreateJobRequest{Spec: containerSpec("dry", 2), Owner: &orkv1.Owner{ProjectId: "p-small"}, DryRun: true})
	if err != nil {
		t.Fatal(err)
	}
	var reasons []orkv1.Reason
	for _, why := range dry.Plan.Replicas[0].Refusals {
		reasons = append(reasons, why.Reason)
	}
	if want := []orkv1.Reason{orkv1.Reason_REASON_OVER_QUOTA, orkv1.Reason_REASON_BUSY}; !slices.Equal(reasons, want) || dry.Job.Id != "" {
		t.Errorf("the dry run says %v", dry)
	}
	if after := l.census(); fmt.Sprint(before) != fmt.Sprint(after) {
		t.Errorf("a dry run changed %v to %v", before, after)
	}

	// What would have to change is what helps.
	l.quota("p-untold", &orkv1.ProjectQuota{Revision: 1, Unlimited: true})
	l.awaitThat(untold, "told, it waits for a GPU", func(j *orkv1.Job) bool { return j.Reason == orkv1.Reason_REASON_BUSY })
	for _, n := range []string{"fills 0"} {
		r, err := l.jobs.ListJobs(l.ctx, &orkv1.ListJobsRequest{Name: n})
		if err != nil {
			t.Fatal(err)
		}
		l.delete(r.Jobs[0].Id)
	}
	l.await(busy, orkv1.State_STATE_PROVISIONING)
	l.await(untold, orkv1.State_STATE_PROVISIONING)

	// Without known partitions an NVSwitch board gives one GPU or all.
	if _, err := l.racks.PutRack(l.ctx, &orkv1.PutRackRequest{Entry: &orkv1.RackEntry{Id: "rk-test", Location: "us", Key: l.key.Hex()}}); err != nil {
		t.Fatal(err)
	}
	ended(containerSpec("half a board", 2), orkv1.Reason_REASON_FABRIC_COUNT, "1, 4")
}

func TestAQuotaHoldsThroughTwoAppNodesAndAKill(t *testing.T) {
	t.Parallel()
	l := startLab(t, true, []*orkv1.RackNode{gpuNode("n1", 16)})
	apps := []orkv1.JobsClient{l.jobs, l.otherApp()}
	ids := make([]string, 10)
	var all sync.WaitGroup
	for i := range ids {
		all.Go(func() {
			ids[i] = l.createFor(apps[i%2], "p-four", containerSpec(fmt.Sprintf("j%d", i), 1), &orkv1.ProjectQuota{Revision: 1, MaximumGpus: 4}).Id
		})
	}
	all.Wait()
	four := func() bool { c := l.census(); return c["provisioning"] == 4 && c["queued over_quota"] == 6 }
	l.eventually("4 hold, 6 wait for the quota", four)

	l.stop()
	l.startOrk()
	l.eventually("after a kill 4 hold, 6 wait and are told how much too many", func() bool {
		told := 0
		for _, id := range ids {
			if j := l.get(id); j.State == orkv1.State_STATE_QUEUED && strings.Contains(j.Message, "1 too many") {
				told++
			}
		}
		return told == 6 && four()
	})
	for _, id := range ids {
		if l.get(id).State == orkv1.State_STATE_PROVISIONING {
			l.delete(id)
			break
		}
	}
	l.eventually("another takes the free place", func() bool { c := l.census(); return c["provisioning"] == 4 && c["queued over_quota"] == 5 })
	if _, most := l.worker.count(); most > 4 {
		t.Errorf("%d GPUs of a quota of 4 were held at once", most)
	}

	// The newest word counts, whoever brings it and in whatever order.
	l.quota("p-four", &orkv1.ProjectQuota{Revision: 3, MaximumGpus: 6})
	l.quota("p-four", &orkv1.ProjectQuota{Revision: 2, Unlimited: true})
	l.eventually("6 hold", func() bool { c := l.census(); return c["provisioning"] == 6 && c["queued over_quota"] == 3 })
	kept, err := orkv1.NewQuotasClient(l.app.Client(l.orkKey.ID(), l.address)).GetQuota(l.ctx, &orkv1.GetQuotaRequest{ProjectId: "p-four"})
	if err != nil || kept.Quota.GetRevision() != 3 || kept.HeldGpus != 6 {
		t.Errorf("ork keeps %v: %v", kept, err)
	}
	if _, most := l.worker.count(); most > 6 {
		t.Errorf("%d GPUs of a quota of 6 were held at once", most)
	}
}

func TestAHeadThatNeedsAWholeNodeIsPassedForAWhileAndThenNoMore(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 8))
	var running []string
	for i := range 7 {
		j := l.create(containerSpec(fmt.Sprintf("first %d", i), 1))
		running = append(running, l.await(j.Id, orkv1.State_STATE_PROVISIONING).Id)
	}
	head := l.create(containerSpec("head", 8)).Id
	l.awaitThat(head, "waits for the node to empty", func(j *orkv1.Job) bool { return j.Reason == orkv1.Reason_REASON_BUSY })
	// What can never be placed fails now and holds nobody up.
	l.await(l.create(containerSpec("impossible", 9)).Id, orkv1.State_STATE_FAILED)

	var behind []string
	for i := range 5 {
		behind = append(behind, l.create(containerSpec(fmt.Sprintf("behind %d", i), 1)).Id)
	}
	l.eventually("one of those behind takes the eighth GPU", func() bool {
		c := l.census()
		return c["provisioning"] == 8 && c["queued busy"] == 5
	})
	for _, id := range behind {
		if l.get(id).State == orkv1.State_STATE_PROVISIONING {
			running = append(running, id)
		}
	}
	l.ahead.Add(int64(l.config.Placement.ReserveAfter + time.Minute))
	l.eventually("the node is kept for the head", func() bool {
		n := 0
		for _, id := range behind {
			if j := l.get(id); j.State == orkv1.State_STATE_QUEUED && strings.Contains(j.Message, head) {
				n++
			}
		}
		return n == 4
	})
	for _, id := range running[:7] {
		l.delete(id)
		if c := l.census(); c["queued busy"] != 5 {
			t.Fatalf("a GPU came free and somebody passed the head: %v", c)
		}
	}
	l.delete(running[7])
	l.await(head, orkv1.State_STATE_PROVISIONING)
	l.delete(head)
	l.eventually("those behind run", func() bool { return l.census()["provisioning"] == 4 })
}

func TestAGangIsClaimedWholeOrWaitsWithNothing(t *testing.T) {
	t.Parallel()
	l := newFabricLab(t, gpuNode("n1", 4), gpuNode("n2", 4))
	small := l.create(containerSpec("in the way", 1)).Id
	l.await(small, orkv1.State_STATE_PROVISIONING)
	s := inferenceSpec("gang", 1)
	s.Gpu.Count = 8
	gang := l.create(s).Id
	waits := l.awaitThat(gang, "waits for whole nodes", func(j *orkv1.Job) bool { return j.Reason == orkv1.Reason_REASON_BUSY })
	if a := newest(waits); a.RackId != "" || len(a.Nodes) != 0 {
		t.Errorf("a gang that waits holds %v", a)
	}
	l.delete(small)
	a := newest(l.await(gang, orkv1.State_STATE_PROVISIONING))
	if len(a.Nodes) != 2 || a.Nodes[0].GpuCount != 4 || a.Nodes[1].GpuCount != 4 {
		t.Errorf("the gang's nodes are %v, want 4 GPUs of each", a.Nodes)
	}
	l.delete(gang)
	if !l.worker.empty() {
		t.Error("something of the gang is left")
	}
}

func TestWhatOneCouldGetNowAndHowLongOthersWait(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 8), gpuNode("n2", 4))
	l.await(l.create(containerSpec("some", 5)).Id, orkv1.State_STATE_PROVISIONING)
	waits := l.create(containerSpec("large", 8)).Id
	l.awaitThat(waits, "waits", func(j *orkv1.Job) bool { return j.Reason == orkv1.Reason_REASON_BUSY })
	l.ahead.Add(int64(5 * time.Minute))
	l.eventually("what is available", func() bool {
		r, err := l.racks.GetAvailability(l.ctx, &orkv1.GetAvailabilityRequest{Location: "us", GpuModel: strings.ToLower(model)})
		if err != nil || len(r.Gpus) != 1 {
			return false
		}
		g := r.Gpus[0]
		return g.Total == 12 && g.Held == 5 && g.Available == 7 && g.LargestVm == 4 && g.Waiting == 1 && g.WaitingGpus == 8 &&
			g.LongestWait.AsDuration() >= 5*time.Minute && len(g.Racks) == 1 && g.Racks[0].LargestVm == 4
	})
	if _, err := l.racks.CordonRack(l.ctx, &orkv1.CordonRackRequest{Id: "rk-test", Cordoned: true}); err != nil {
		t.Fatal(err)
	}
	l.eventually("nothing of a cordoned rack, and why", func() bool {
		r, err := l.racks.GetAvailability(l.ctx, &orkv1.GetAvailabilityRequest{})
		return err == nil && r.Gpus[0].Available == 0 && r.Gpus[0].Racks[0].Reason == orkv1.Reason_REASON_CORDONED
	})
}

// TestCreateAnswersWhileManyJobsMove logs how fast; -motion sets how many move.
func TestCreateAnswersWhileManyJobsMove(t *testing.T) {
	t.Parallel()
	var nodes []*orkv1.RackNode
	for i := range *motion/8 + 1 {
		nodes = append(nodes, gpuNode(fmt.Sprintf("n%03d", i), 8))
	}
	l := newLab(t, nodes...)
	var all sync.WaitGroup
	slots := make(chan struct{}, 16)
	for i := range *motion {
		all.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			l.create(containerSpec(fmt.Sprintf("m%d", i), 1))
		})
	}
	all.Wait()
	var took []time.Duration
	for i := range 100 {
		start := time.Now()
		j := l.create(containerSpec(fmt.Sprintf("timed %d", i), 1))
		took = append(took, time.Since(start))
		if j.State != orkv1.State_STATE_QUEUED {
			t.Errorf("create answers %v", j)
		}
	}
	moving := l.census()
	slices.Sort(took)
	t.Logf("100 creates with %v: p50 %s, p95 %s, slowest %s", moving, took[50], took[95], took[99])
	l.eventually("everybody is served", func() bool {
		c := l.census()
		return c["provisioning"]+c["queued busy"] == min(*motion+100, 500)
	})
}
