package app

import (
	"context"
	"strings"
	"sync"
	"testing"

	"github.com/cosmicac/cosmicac/pkg/fault"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
)

// ApplyVolume makes a volume in the made-up cluster.
func (w *fakeWorker) ApplyVolume(_ context.Context, req *workerv1.ApplyVolumeRequest) (*workerv1.ApplyVolumeResponse, error) {
	resp := &workerv1.ApplyVolumeResponse{}
	w.change(func() {
		w.applied[req.VolumeId]++
		if resp.Refusal = w.refusal; resp.Refusal == "" && w.volumes[req.VolumeId] == nil {
			w.volumes[req.VolumeId] = &workerv1.VolumeStatus{VolumeId: req.VolumeId, Usable: !w.pending, StorageClass: "simulated"}
		}
	})
	return resp, nil
}

// DeleteVolume removes it.
func (w *fakeWorker) DeleteVolume(_ context.Context, req *workerv1.DeleteVolumeRequest) (*workerv1.DeleteVolumeResponse, error) {
	w.change(func() { delete(w.volumes, req.VolumeId) })
	return &workerv1.DeleteVolumeResponse{}, nil
}

func (l *lab) volumes() orkv1.VolumesClient {
	return orkv1.NewVolumesClient(l.app.Client(l.orkKey.ID(), l.address))
}

var owner = &orkv1.Owner{ProjectId: "p-1", UserId: "u-1"}

func (l *lab) createVolume(name string, change ...func(*orkv1.CreateVolumeRequest)) *orkv1.Volume {
	l.t.Helper()
	req := &orkv1.CreateVolumeRequest{Name: name, Owner: owner, SizeGib: 10, Location: "us"}
	for _, c := range change {
		c(req)
	}
	r, err := l.volumes().CreateVolume(l.ctx, req)
	if err != nil {
		l.t.Fatal(err)
	}
	return r.Volume
}

func (l *lab) awaitVolume(id string, want orkv1.VolumeState) *orkv1.Volume {
	l.t.Helper()
	var v *orkv1.Volume
	l.eventually("volume is "+want.String(), func() bool {
		r, err := l.volumes().GetVolume(l.ctx, &orkv1.GetVolumeRequest{Id: id})
		v = r.GetVolume()
		return err == nil && v.State == want
	})
	return v
}

func (l *lab) volumeGone(id string) {
	l.t.Helper()
	l.eventually("the record of the volume goes", func() bool {
		_, err := l.volumes().GetVolume(l.ctx, &orkv1.GetVolumeRequest{Id: id})
		return fault.KindOf(fault.FromGRPC(err)) == fault.NotFound
	})
}

func with(s *orkv1.JobSpec, readOnly bool, volumes ...string) *orkv1.JobSpec {
	for _, v := range volumes {
		s.Volumes = append(s.Volumes, &orkv1.VolumeMount{Volume: v, ReadOnly: readOnly})
	}
	return s
}

// turnedDown checks that a call was refused in words.
func turnedDown(t *testing.T, err error, kind fault.Kind, words ...string) {
	t.Helper()
	err = fault.FromGRPC(err)
	if fault.KindOf(err) != kind {
		t.Fatalf("want a refusal of kind %s, have %v", kind, err)
	}
	text := err.Error()
	for _, d := range fault.DetailsOf(err) {
		text += "\n" + d.Field + " " + d.Rule
	}
	for _, w := range words {
		if !strings.Contains(text, w) {
			t.Errorf("nothing of %q in: %s", w, text)
		}
	}
}

// TestOfTwoJobsThatWantOneVolumeOneGetsItAndTheOtherHearsWho races them, restarts the
// orchestrator between the steps, and takes the volume through its life.
func TestOfTwoJobsThatWantOneVolumeOneGetsItAndTheOtherHearsWho(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 8))
	v := l.createVolume("data")
	if again := l.createVolume("data"); again.Id != v.Id || v.RackId != "rk-test" || v.Location != "us" {
		t.Fatalf("made %v, then %v", v, again)
	}
	_, err := l.volumes().CreateVolume(l.ctx, &orkv1.CreateVolumeRequest{Name: "data", Owner: owner, SizeGib: 20})
	turnedDown(t, err, fault.Conflict, "size_gib is 10")
	_, err = l.volumes().CreateVolume(l.ctx, &orkv1.CreateVolumeRequest{Name: "Data!", Owner: owner, StorageClass: "no such", Location: "US"})
	turnedDown(t, err, fault.Invalid, "name is 1 to 20", "size_gib is 0", "storage_class", "location")
	_, err = l.volumes().CreateVolume(l.ctx, &orkv1.CreateVolumeRequest{Name: "far", Owner: owner, SizeGib: 1, Location: "mars"})
	turnedDown(t, err, fault.FailedPrecondition, "no rack in mars", "rk-test in us")
	l.stop()
	l.startOrk()
	l.connected(true)
	if v = l.awaitVolume(v.Id, orkv1.VolumeState_VOLUME_STATE_READY); v.StorageClass != "simulated" {
		t.Errorf("the cluster's class is not shown: %v", v)
	}

	var wg sync.WaitGroup
	var mu sync.Mutex
	var won []*orkv1.Job
	var lost []error
	for range 2 {
		wg.Go(func() {
			r, err := l.jobs.CreateJob(l.ctx, &orkv1.CreateJobRequest{Spec: with(containerSpec("lab", 1), false, "data"), Owner: owner})
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				lost = append(lost, err)
			} else {
				won = append(won, r.Job)
			}
		})
	}
	wg.Wait()
	if len(won) != 1 || len(lost) != 1 {
		t.Fatalf("%d won, %v", len(won), lost)
	}
	j := won[0]
	turnedDown(t, lost[0], fault.FailedPrecondition, j.Id+" (lab) has it", "volumes[0].volume is attached to job "+j.Id)
	_, err = l.jobs.CreateJob(l.ctx, &orkv1.CreateJobRequest{Spec: with(containerSpec("dry", 1), false, v.Id, "none"), Owner: owner, DryRun: true})
	turnedDown(t, err, fault.FailedPrecondition, "volumes[0].volume is attached to", "volumes[1].volume does not exist")
	_, err = l.jobs.CreateJob(l.ctx, &orkv1.CreateJobRequest{Spec: with(inferenceSpec("chat", 1), false, "data"), Owner: owner})
	turnedDown(t, err, fault.Invalid, "volumes are for gpu_container only")
	_, err = l.jobs.CreateJob(l.ctx, &orkv1.CreateJobRequest{Spec: with(containerSpec("x", 1), false, "data"), Owner: &orkv1.Owner{ProjectId: "p-2"}})
	turnedDown(t, err, fault.NotFound, "no volume", "p-2")

	attempt := newest(j).Id
	seed := seedOf(l, attempt)
	plan := l.worker.plan(attempt)
	if len(plan.Volumes) != 1 || plan.Volumes[0].Id != v.Id || plan.Volumes[0].Name != "data" || len(seed.Volumes) != 1 || seed.Volumes[0].Name != "data" {
		t.Fatalf("the plan has %v, its seed %v", plan.Volumes, seed.Volumes)
	}
	l.boot(attempt)
	if j = l.await(j.Id, orkv1.State_STATE_RUNNING); len(j.Volumes) != 1 || j.Volumes[0].Path != "/volumes/data" {
		t.Errorf("the job shows %v", j.Volumes)
	}
	_, err = l.volumes().DetachVolume(l.ctx, &orkv1.DetachVolumeRequest{Id: v.Id, JobId: j.Id})
	turnedDown(t, err, fault.FailedPrecondition, "is running", "stop the job")
	_, err = l.volumes().DeleteVolume(l.ctx, &orkv1.DeleteVolumeRequest{Id: v.Id, Confirm: "data"})
	turnedDown(t, err, fault.FailedPrecondition, "attached to job "+j.Id+" (lab)")
	other := l.create(containerSpec("other", 1))
	_, err = l.volumes().AttachVolume(l.ctx, &orkv1.AttachVolumeRequest{Id: v.Id, JobId: other.Id})
	turnedDown(t, err, fault.FailedPrecondition)

	// The first one goes, with a restart in the middle; the volume stays and serves the next.
	if _, err := l.jobs.DeleteJob(l.ctx, &orkv1.DeleteJobRequest{Id: j.Id}); err != nil {
		t.Fatal(err)
	}
	l.stop()
	l.startOrk()
	l.eventually("the first job is gone", func() bool {
		_, err := l.jobs.GetJob(l.ctx, &orkv1.GetJobRequest{Id: j.Id})
		return fault.KindOf(fault.FromGRPC(err)) == fault.NotFound
	})
	if v = l.awaitVolume(v.Id, orkv1.VolumeState_VOLUME_STATE_READY); len(v.Attachments) != 0 {
		t.Fatalf("who has it: %v", v.Attachments)
	}
	_, err = l.volumes().AttachVolume(l.ctx, &orkv1.AttachVolumeRequest{Id: v.Id, JobId: other.Id})
	turnedDown(t, err, fault.FailedPrecondition, "no disk is plugged into")
	if _, err := l.jobs.StopJob(l.ctx, &orkv1.StopJobRequest{Id: other.Id}); err != nil {
		t.Fatal(err)
	}
	l.awaitThat(other.Id, "stopped and gone", func(j *orkv1.Job) bool { return newest(j).Gone })
	for range 2 { // repeating it changes nothing
		if _, err := l.volumes().AttachVolume(l.ctx, &orkv1.AttachVolumeRequest{Id: v.Id, JobId: other.Id, ReadOnly: true, Actor: "u-1"}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := l.jobs.StartJob(l.ctx, &orkv1.StartJobRequest{Id: other.Id}); err != nil {
		t.Fatal(err)
	}
	second := newest(l.get(other.Id)).Id
	seedOf(l, second)
	if plan := l.worker.plan(second); len(plan.Volumes) != 1 || !plan.Volumes[0].ReadOnly {
		t.Fatalf("the second job's plan has %v", plan.Volumes)
	}
	if _, err := l.jobs.StopJob(l.ctx, &orkv1.StopJobRequest{Id: other.Id}); err != nil {
		t.Fatal(err)
	}
	l.awaitThat(other.Id, "stopped and gone", func(j *orkv1.Job) bool { return newest(j).Gone })
	if _, err := l.volumes().DetachVolume(l.ctx, &orkv1.DetachVolumeRequest{Id: v.Id, JobId: other.Id}); err != nil {
		t.Fatal(err)
	}
	_, err = l.volumes().DeleteVolume(l.ctx, &orkv1.DeleteVolumeRequest{Id: v.Id, Confirm: "yes"})
	turnedDown(t, err, fault.Invalid, "confirm is the volume's name")
	if _, err := l.volumes().DeleteVolume(l.ctx, &orkv1.DeleteVolumeRequest{Id: v.Id, Confirm: "data"}); err != nil {
		t.Fatal(err)
	}
	l.stop()
	l.startOrk()
	l.volumeGone(v.Id)
	l.worker.change(func() {
		if len(l.worker.volumes) != 0 {
			t.Errorf("left in the cluster: %v", l.worker.volumes)
		}
	})
}

// TestAJobWaitsForItsVolumeAndTakesNoGPUMeanwhile holds the volume up, then has the
// cluster make it, then takes it away.
func TestAJobWaitsForItsVolumeAndTakesNoGPUMeanwhile(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 8))
	l.worker.change(func() { l.worker.pending = true })
	v := l.createVolume("slow")
	j := l.create(with(containerSpec("lab", 1), false, "slow"))
	j = l.awaitThat(j.Id, "waiting for the volume", func(j *orkv1.Job) bool { return j.Reason == orkv1.Reason_REASON_VOLUME_NOT_READY })
	if !strings.Contains(j.Message, "volume slow") || !strings.Contains(j.Message, "creating") || newest(j).RackId != "" {
		t.Errorf("it says %q on rack %q", j.Message, newest(j).RackId)
	}
	dry, err := l.jobs.CreateJob(l.ctx, &orkv1.CreateJobRequest{Spec: containerSpec("dry", 1), Owner: owner, DryRun: true})
	if err != nil || len(dry.Plan.Replicas) != 1 || dry.Plan.Replicas[0].RackId != "rk-test" {
		t.Errorf("a job without the volume would wait, too: %v, %v", dry, err)
	}
	l.eventually("the worker makes the volume", func() (made bool) {
		l.worker.change(func() {
			if made = l.worker.volumes[v.Id] != nil; made {
				l.worker.pending = false
				l.worker.volumes[v.Id].Usable = true
			}
		})
		return made
	})
	l.awaitVolume(v.Id, orkv1.VolumeState_VOLUME_STATE_READY)
	l.awaitThat(j.Id, "placed", func(j *orkv1.Job) bool { return newest(j).RackId == "rk-test" })

	// Somebody else removes it: it is lost, and not made again as an empty one.
	l.worker.change(func() { delete(l.worker.volumes, v.Id) })
	v = l.awaitVolume(v.Id, orkv1.VolumeState_VOLUME_STATE_LOST)
	if !strings.Contains(v.Message, "somebody else removed it") {
		t.Errorf("it says %q", v.Message)
	}
	l.worker.change(func() {
		if n := l.worker.applied[v.Id]; n != 1 {
			t.Errorf("it was asked for %d times", n)
		}
	})
	other := l.create(containerSpec("other", 1))
	if _, err := l.jobs.DeleteJob(l.ctx, &orkv1.DeleteJobRequest{Id: other.Id}); err != nil {
		t.Fatal(err)
	}
	_, err = l.jobs.CreateJob(l.ctx, &orkv1.CreateJobRequest{Spec: with(containerSpec("late", 1), false, "slow"), Owner: owner})
	turnedDown(t, err, fault.FailedPrecondition, "it is lost")

	l.worker.change(func() { l.worker.refusal = "there is no storage class \"fast\"" })
	bad := l.createVolume("bad", func(r *orkv1.CreateVolumeRequest) { r.StorageClass = "fast" })
	if bad = l.awaitVolume(bad.Id, orkv1.VolumeState_VOLUME_STATE_FAILED); !strings.Contains(bad.Message, "no storage class") {
		t.Errorf("it says %q", bad.Message)
	}
}

// TestASharedVolumeIsReadByManyOrWrittenByOne attaches it to several jobs.
func TestASharedVolumeIsReadByManyOrWrittenByOne(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 8))
	v := l.createVolume("set", func(r *orkv1.CreateVolumeRequest) { r.Shared = true })
	l.awaitVolume(v.Id, orkv1.VolumeState_VOLUME_STATE_READY)
	one := l.create(with(containerSpec("one", 1), true, "set"))
	two := l.create(with(containerSpec("two", 1), true, v.Id))
	_, err := l.jobs.CreateJob(l.ctx, &orkv1.CreateJobRequest{Spec: with(containerSpec("writer", 1), false, "set"), Owner: owner})
	turnedDown(t, err, fault.FailedPrecondition, one.Id, "to read", "read-only")
	if all := l.awaitVolume(v.Id, orkv1.VolumeState_VOLUME_STATE_READY).Attachments; len(all) != 2 || all[1].JobId != two.Id || !all[1].ReadOnly {
		t.Errorf("who has it: %v", all)
	}
	for _, j := range []*orkv1.Job{one, two} {
		if _, err := l.jobs.DeleteJob(l.ctx, &orkv1.DeleteJobRequest{Id: j.Id}); err != nil {
			t.Fatal(err)
		}
	}
	l.eventually("nobody has it", func() bool {
		r, err := l.volumes().GetVolume(l.ctx, &orkv1.GetVolumeRequest{Id: v.Id})
		return err == nil && len(r.Volume.Attachments) == 0
	})
	writer := l.create(with(containerSpec("writer", 1), false, "set"))
	_, err = l.jobs.CreateJob(l.ctx, &orkv1.CreateJobRequest{Spec: with(containerSpec("reader", 1), true, "set"), Owner: owner})
	turnedDown(t, err, fault.FailedPrecondition, writer.Id, "to write")
}

// TestAVolumeOfARackThatIsAwayOrRemovedSaysSo takes its rack from it.
func TestAVolumeOfARackThatIsAwayOrRemovedSaysSo(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 8))
	v := l.createVolume("data")
	l.awaitVolume(v.Id, orkv1.VolumeState_VOLUME_STATE_READY)
	l.cutWorker()
	l.connected(false)
	if v = l.awaitVolume(v.Id, orkv1.VolumeState_VOLUME_STATE_READY); !strings.Contains(v.Message, "cannot be reached") {
		t.Errorf("of a rack that is away it says %q", v.Message)
	}
	j := l.create(with(containerSpec("lab", 1), false, "data"))
	l.awaitThat(j.Id, "waiting for the rack", func(j *orkv1.Job) bool { return j.Reason == orkv1.Reason_REASON_RACK_UNREACHABLE })
	_, err := l.racks.ForgetRack(l.ctx, &orkv1.ForgetRackRequest{Id: "rk-test"})
	turnedDown(t, err, fault.FailedPrecondition, "holds 1 volumes (data")
	r, err := l.racks.ForgetRack(l.ctx, &orkv1.ForgetRackRequest{Id: "rk-test", Force: true, Confirm: "rk-test"})
	if err != nil || len(r.Abandoned.GetVolumeIds()) != 1 {
		t.Fatalf("left behind: %v, %v", r, err)
	}
	if v = l.awaitVolume(v.Id, orkv1.VolumeState_VOLUME_STATE_READY); !strings.Contains(v.Message, "was removed from the network") || v.Location != "" {
		t.Errorf("of a removed rack it says %q in %q", v.Message, v.Location)
	}
	j = l.await(j.Id, orkv1.State_STATE_FAILED)
	if j.Reason != orkv1.Reason_REASON_RACK_FORGOTTEN || !strings.Contains(j.Message, "its volume data is on rack rk-test") {
		t.Errorf("the job says %v %q", j.Reason, j.Message)
	}
	_, err = l.jobs.CreateJob(l.ctx, &orkv1.CreateJobRequest{Spec: with(containerSpec("late", 1), false, "data"), Owner: &orkv1.Owner{ProjectId: "p-1"}})
	turnedDown(t, err, fault.FailedPrecondition, "its rack rk-test was removed")
	if _, err := l.volumes().DetachVolume(l.ctx, &orkv1.DetachVolumeRequest{Id: v.Id, JobId: j.Id}); err != nil {
		t.Fatal(err)
	}
	if _, err := l.volumes().DeleteVolume(l.ctx, &orkv1.DeleteVolumeRequest{Id: v.Id, Confirm: "data"}); err != nil {
		t.Fatal(err)
	}
	l.volumeGone(v.Id)
}
