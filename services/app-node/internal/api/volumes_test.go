package api_test

import (
	"context"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/id"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

// fakeVolumes answers the orchestrator's volumes out of memory.
type fakeVolumes struct {
	orkv1.UnimplementedVolumesServer
	ork *fakeOrk
	all []*orkv1.Volume
}

func (f *fakeVolumes) find(volumeID string) (*orkv1.Volume, error) {
	for _, v := range f.all {
		if v.Id == volumeID {
			return v, nil
		}
	}
	return nil, fault.ToGRPC(fault.New(fault.NotFound, "no volume has the id %q", volumeID))
}

func (f *fakeVolumes) CreateVolume(_ context.Context, r *orkv1.CreateVolumeRequest) (*orkv1.CreateVolumeResponse, error) {
	f.ork.mu.Lock()
	defer f.ork.mu.Unlock()
	for _, v := range f.all {
		if v.Name == r.Name && v.Owner.ProjectId == r.Owner.ProjectId {
			return &orkv1.CreateVolumeResponse{Volume: v, Existed: true}, nil
		}
	}
	if r.SizeGib == 0 {
		return nil, fault.ToGRPC(fault.New(fault.Invalid, "the volume cannot be created").With(fault.Detail{Field: "size_gib", Rule: "is 0; 1 to 65536 are allowed"}))
	}
	v := &orkv1.Volume{Id: id.New(id.Volume), Name: r.Name, Owner: r.Owner, RackId: "rk-1", Location: r.Location, SizeGib: r.SizeGib, Shared: r.Shared,
		State: orkv1.VolumeState_VOLUME_STATE_CREATING, CreatedAt: timestamppb.Now()}
	f.all = append(f.all, v)
	return &orkv1.CreateVolumeResponse{Volume: v}, nil
}

func (f *fakeVolumes) GetVolume(_ context.Context, r *orkv1.GetVolumeRequest) (*orkv1.GetVolumeResponse, error) {
	f.ork.mu.Lock()
	defer f.ork.mu.Unlock()
	v, err := f.find(r.Id)
	return &orkv1.GetVolumeResponse{Volume: v}, err
}

func (f *fakeVolumes) ListVolumes(_ context.Context, r *orkv1.ListVolumesRequest) (*orkv1.ListVolumesResponse, error) {
	f.ork.mu.Lock()
	defer f.ork.mu.Unlock()
	out := &orkv1.ListVolumesResponse{}
	for _, v := range f.all {
		// Every project's, as if the filter were forgotten: the API has to see to it.
		if r.Name == "" || r.Name == v.Name {
			out.Volumes = append(out.Volumes, proto.Clone(v).(*orkv1.Volume))
		}
	}
	return out, nil
}

func (f *fakeVolumes) AttachVolume(_ context.Context, r *orkv1.AttachVolumeRequest) (*orkv1.AttachVolumeResponse, error) {
	f.ork.mu.Lock()
	defer f.ork.mu.Unlock()
	v, err := f.find(r.Id)
	if err != nil {
		return nil, err
	}
	if len(v.Attachments) > 0 {
		return nil, fault.ToGRPC(fault.New(fault.FailedPrecondition, "volume %s cannot be attached: job %s has it", v.Name, v.Attachments[0].JobId).
			With(fault.Detail{Field: "volume", Rule: "is attached to job " + v.Attachments[0].JobId}))
	}
	v.Attachments = []*orkv1.VolumeAttachment{{JobId: r.JobId, JobName: "a job", ReadOnly: r.ReadOnly, JobState: orkv1.State_STATE_STOPPED}}
	return &orkv1.AttachVolumeResponse{Volume: v}, nil
}

func (f *fakeVolumes) DetachVolume(_ context.Context, r *orkv1.DetachVolumeRequest) (*orkv1.DetachVolumeResponse, error) {
	f.ork.mu.Lock()
	defer f.ork.mu.Unlock()
	v, err := f.find(r.Id)
	if err != nil {
		return nil, err
	}
	v.Attachments = nil
	return &orkv1.DetachVolumeResponse{Volume: v}, nil
}

func (f *fakeVolumes) DeleteVolume(_ context.Context, r *orkv1.DeleteVolumeRequest) (*orkv1.DeleteVolumeResponse, error) {
	f.ork.mu.Lock()
	defer f.ork.mu.Unlock()
	v, err := f.find(r.Id)
	if err != nil {
		return nil, err
	}
	if r.Confirm != v.Name {
		return nil, fault.ToGRPC(fault.New(fault.Invalid, "it is not confirmed").With(fault.Detail{Field: "confirm", Rule: "is the volume's name again"}))
	}
	v.State = orkv1.VolumeState_VOLUME_STATE_DELETING
	return &orkv1.DeleteVolumeResponse{Volume: v}, nil
}

type volumeAnswer struct {
	ID, Name, State, Message string
	ProjectID                string `json:"project_id"`
	SizeGiB                  uint32 `json:"size_gib"`
	Attachments              []struct {
		JobID    string `json:"job_id"`
		JobState string `json:"job_state"`
		ReadOnly bool   `json:"read_only"`
	}
}

func TestVolumesAreTheirProjectsAndNobodyElseSeesThem(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	_, ana := l.user("ana@example.org")
	_, ben := l.user("ben@example.org")
	var v volumeAnswer
	r := l.ok(201, &v, "POST", "/api/v1/volumes", ana, map[string]any{"name": "data", "size_gib": 10, "location": "us"})
	if v.Name != "data" || v.SizeGiB != 10 || v.State != "creating" || !strings.HasPrefix(v.ID, "v-") || v.ProjectID == "" || r.header.Get("Idempotency-Replayed") != "" {
		t.Fatalf("made %+v", v)
	}
	if r := l.ok(201, nil, "POST", "/api/v1/volumes", ana, map[string]any{"name": "data", "size_gib": 10}); r.header.Get("Idempotency-Replayed") != "true" {
		t.Error("the same volume again is not said to be the same")
	}
	if p := l.refused("invalid", "POST", "/api/v1/volumes", ana, map[string]any{"name": "data2", "size_gib": 0}); !p.names("body.size_gib") {
		t.Errorf("no field: %+v", p)
	}
	path := "/api/v1/volumes/" + v.ID
	job := l.job(ana, container("a job"))
	foreign := l.job(ben, container("another"))
	l.refused("not_found", "GET", path, ben, nil)
	l.refused("not_found", "POST", path+"/attach", ben, map[string]any{"job_id": foreign})
	l.refused("not_found", "POST", path+"/detach", ben, map[string]any{"job_id": foreign})
	l.refused("not_found", "DELETE", path+"?confirm=data", ben, nil)
	var list struct{ Volumes []volumeAnswer }
	if l.ok(200, &list, "GET", "/api/v1/volumes", ben, nil); len(list.Volumes) != 0 {
		t.Errorf("somebody else sees %+v", list.Volumes)
	}
	l.refused("not_found", "POST", path+"/attach", ana, map[string]any{"job_id": foreign})
	l.refused("not_found", "GET", "/api/v1/volumes/v-0000000000000", ana, nil)
	l.ok(200, &v, "POST", path+"/attach", ana, map[string]any{"job_id": job, "read_only": true})
	if len(v.Attachments) != 1 || v.Attachments[0].JobID != job || !v.Attachments[0].ReadOnly || v.Attachments[0].JobState != "stopped" {
		t.Errorf("attached: %+v", v)
	}
	if p := l.refused("failed_precondition", "POST", path+"/attach", ana, map[string]any{"job_id": job}); !strings.Contains(p.Detail, "job "+job+" has it") {
		t.Errorf("it does not say who: %+v", p)
	}
	l.ok(200, &v, "POST", path+"/detach", ana, map[string]any{"job_id": job})
	l.refused("invalid", "DELETE", path, ana, nil)
	l.ok(202, &v, "DELETE", path+"?confirm=data", ana, nil)
	l.ok(200, &list, "GET", "/api/v1/volumes?name=data", l.admin, nil)
	if v.State != "deleting" || len(list.Volumes) != 1 {
		t.Errorf("deleted: %+v, listed %+v", v, list)
	}
}

func TestAJobAsksForVolumesByNameAndShowsWhatItHas(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	body := container("a job")
	body["volumes"] = []map[string]any{{"volume": "data"}, {"volume": "set", "read_only": true}}
	var job struct {
		ID      string
		Volumes []struct {
			ID, Name, Path string
			ReadOnly       bool `json:"read_only"`
		}
	}
	l.ok(201, &job, "POST", "/api/v1/jobs", l.admin, body)
	if asked := l.ork.spec(job.ID).GetVolumes(); len(asked) != 2 || asked[0].GetVolume() != "data" || asked[0].GetReadOnly() || !asked[1].GetReadOnly() {
		t.Fatalf("the orchestrator got %v", asked)
	}
	l.ork.change(job.ID, func(j *orkv1.Job) {
		j.Volumes = []*orkv1.AttachedVolume{{Id: "v-1", Name: "data", Path: "/volumes/data"}}
	})
	l.ok(200, &job, "GET", "/api/v1/jobs/"+job.ID, l.admin, nil)
	if len(job.Volumes) != 1 || job.Volumes[0].Path != "/volumes/data" {
		t.Errorf("it shows %+v", job.Volumes)
	}
}
