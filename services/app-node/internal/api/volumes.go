package api

import (
	"context"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/lexicon"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	"github.com/cosmicac/cosmicac/services/app-node/internal/quotas"
)

// VolumeState is how far a volume is.
type VolumeState string

// Schema names every state, with what it means.
func (VolumeState) Schema(huma.Registry) *huma.Schema { return words(lexicon.VolumeStates(), false) }

// Volume is a disk of a project in one rack that outlives jobs.
type Volume struct {
	ID                string             `json:"id"`
	Name              string             `json:"name"`
	ProjectID         string             `json:"project_id"`
	UserID            string             `json:"user_id" doc:"Who made it"`
	RackID            string             `json:"rack_id"`
	Location          string             `json:"location" doc:"Empty while its rack has no entry"`
	SizeGiB           uint32             `json:"size_gib"`
	StorageClass      string             `json:"storage_class" doc:"Empty for the rack's own, until the cluster has said which"`
	Shared            bool               `json:"shared" doc:"Several jobs may read it at once; one that writes has it alone"`
	State             VolumeState        `json:"state"`
	Message           string             `json:"message"`
	Attachments       []VolumeAttachment `json:"attachments" doc:"Who has it"`
	CreatedAt         *time.Time         `json:"created_at,omitempty"`
	DeleteRequestedAt *time.Time         `json:"delete_requested_at,omitempty"`
}

// VolumeAttachment is a job that has a volume.
type VolumeAttachment struct {
	JobID    string `json:"job_id"`
	JobName  string `json:"job_name"`
	JobState State  `json:"job_state"`
	ReadOnly bool   `json:"read_only"`
}

// VolumeMount asks for a volume at create.
type VolumeMount struct {
	Volume   string `json:"volume" maxLength:"64" doc:"A name or an id of GET /volumes"`
	ReadOnly bool   `json:"read_only,omitempty"`
}

// AttachedVolume is a volume as a job has it.
type AttachedVolume struct {
	ID       string `json:"id"`
	Name     string `json:"name"`
	ReadOnly bool   `json:"read_only"`
	Path     string `json:"path" doc:"Where the VM mounts it"`
}

func wireMounts(all []VolumeMount) []*orkv1.VolumeMount {
	var out []*orkv1.VolumeMount
	for _, m := range all {
		out = append(out, &orkv1.VolumeMount{Volume: m.Volume, ReadOnly: m.ReadOnly})
	}
	return out
}

func attachedVolumes(all []*orkv1.AttachedVolume) []AttachedVolume {
	out := []AttachedVolume{}
	for _, v := range all {
		out = append(out, AttachedVolume{ID: v.GetId(), Name: v.GetName(), ReadOnly: v.GetReadOnly(), Path: v.GetPath()})
	}
	return out
}

func volume(v *orkv1.Volume) Volume {
	out := Volume{ID: v.GetId(), Name: v.GetName(), ProjectID: v.GetOwner().GetProjectId(), UserID: v.GetOwner().GetUserId(), RackID: v.GetRackId(),
		Location: v.GetLocation(), SizeGiB: v.GetSizeGib(), StorageClass: v.GetStorageClass(), Shared: v.GetShared(),
		State: VolumeState(lexicon.Name(v.GetState())), Message: v.GetMessage(), Attachments: []VolumeAttachment{},
		CreatedAt: stamp(v.GetCreatedAt()), DeleteRequestedAt: stamp(v.GetDeleteRequestedAt())}
	for _, a := range v.GetAttachments() {
		out.Attachments = append(out.Attachments, VolumeAttachment{JobID: a.GetJobId(), JobName: a.GetJobName(), JobState: stateName(a.GetJobState()), ReadOnly: a.GetReadOnly()})
	}
	return out
}

type volumeOutput struct {
	Body Volume
}

type createVolumeInput struct {
	Body struct {
		Name         string `json:"name" maxLength:"256" doc:"1 to 20 of a-z, 0-9 and hyphens; of no other volume of the project"`
		SizeGiB      uint32 `json:"size_gib" maximum:"4294967295" doc:"1 to 65536"`
		StorageClass string `json:"storage_class,omitempty" maxLength:"256" doc:"A storage class of the rack's cluster; the rack's own when left out"`
		Shared       bool   `json:"shared,omitempty" doc:"Several jobs may read it at once; the class must offer ReadWriteMany"`
		RackID       string `json:"rack_id,omitempty" maxLength:"64" doc:"The rack; chosen in the location when left out"`
		Location     string `json:"location,omitempty" maxLength:"64" doc:"A location's code, like us"`
	}
}

type createVolumeOutput struct {
	Replayed string `header:"Idempotency-Replayed" doc:"true when the project had this very volume already"`
	Body     Volume
}

func (s *Server) createVolume(ctx context.Context, in *createVolumeInput) (*createVolumeOutput, error) {
	p, b := caller(ctx), in.Body
	quota, err := s.Store.Quota(ctx, p.Personal())
	if err != nil {
		return nil, err
	}
	v, existed, err := s.Ork.CreateVolume(ctx, &orkv1.CreateVolumeRequest{
		Name: b.Name, SizeGib: b.SizeGiB, StorageClass: b.StorageClass, Shared: b.Shared, RackId: b.RackID, Location: strings.ToLower(b.Location),
		Owner: &orkv1.Owner{ProjectId: p.Personal(), UserId: p.User.ID}, Quota: quotas.Wire(quota),
	})
	if err != nil {
		return nil, err
	}
	target(ctx, v.GetId())
	out := &createVolumeOutput{Body: volume(v)}
	if existed {
		out.Replayed = "true"
	}
	return out, nil
}

// VolumePath names a volume.
type VolumePath struct {
	ID string `path:"id" maxLength:"64" doc:"v-..."`
}

type listVolumesInput struct {
	Name string `query:"name" maxLength:"256" doc:"Exactly this name"`
}

type listVolumesOutput struct {
	Body struct {
		Volumes []Volume `json:"volumes" doc:"Oldest first"`
	}
}

func (s *Server) listVolumes(ctx context.Context, in *listVolumesInput) (*listVolumesOutput, error) {
	p := caller(ctx)
	var projects []string
	if !p.User.Administrator {
		// No project would mean every project.
		if projects = p.ProjectIDs(); len(projects) == 0 {
			return nil, fault.New(fault.Internal, "user %s belongs to no project", p.User.ID)
		}
	}
	all, err := s.Ork.Volumes(ctx, projects, in.Name)
	if err != nil {
		return nil, err
	}
	out := &listVolumesOutput{}
	out.Body.Volumes = []Volume{}
	for _, v := range all {
		if p.Sees(v.GetOwner().GetProjectId()) {
			out.Body.Volumes = append(out.Body.Volumes, volume(v))
		}
	}
	return out, nil
}

// ownedVolume reads a volume that the caller may see. Another's is not found, in the
// same words as one that does not exist.
func (s *Server) ownedVolume(ctx context.Context, volumeID string) (*orkv1.Volume, error) {
	missing := fault.New(fault.NotFound, "there is no volume %q", volumeID)
	if !plainID(volumeID) {
		return nil, missing
	}
	v, err := s.Ork.Volume(ctx, volumeID)
	if fault.Is(err, fault.NotFound) {
		return nil, missing
	}
	if err != nil {
		return nil, err
	}
	if !caller(ctx).Sees(v.GetOwner().GetProjectId()) {
		return nil, missing
	}
	return v, nil
}

func (s *Server) getVolume(ctx context.Context, in *VolumePath) (*volumeOutput, error) {
	v, err := s.ownedVolume(ctx, in.ID)
	if err != nil {
		return nil, err
	}
	return &volumeOutput{Body: volume(v)}, nil
}

type attachVolumeInput struct {
	VolumePath
	Body struct {
		JobID    string `json:"job_id" maxLength:"64" doc:"A job that is stopped, or waits for its first start"`
		ReadOnly bool   `json:"read_only,omitempty"`
	}
}

func (s *Server) attachVolume(ctx context.Context, in *attachVolumeInput) (*volumeOutput, error) {
	target(ctx, in.ID)
	v, j, err := s.pair(ctx, in.ID, in.Body.JobID)
	if err != nil {
		return nil, err
	}
	if v, err = s.Ork.AttachVolume(ctx, &orkv1.AttachVolumeRequest{Id: v.GetId(), JobId: j.GetId(), ReadOnly: in.Body.ReadOnly, Actor: caller(ctx).User.ID}); err != nil {
		return nil, err
	}
	return &volumeOutput{Body: volume(v)}, nil
}

type detachVolumeInput struct {
	VolumePath
	Body struct {
		JobID string `json:"job_id" maxLength:"64"`
	}
}

func (s *Server) detachVolume(ctx context.Context, in *detachVolumeInput) (*volumeOutput, error) {
	target(ctx, in.ID)
	v, j, err := s.pair(ctx, in.ID, in.Body.JobID)
	if err != nil {
		return nil, err
	}
	if v, err = s.Ork.DetachVolume(ctx, &orkv1.DetachVolumeRequest{Id: v.GetId(), JobId: j.GetId(), Actor: caller(ctx).User.ID}); err != nil {
		return nil, err
	}
	return &volumeOutput{Body: volume(v)}, nil
}

// pair reads a volume and a job that the caller may both see.
func (s *Server) pair(ctx context.Context, volumeID, jobID string) (*orkv1.Volume, *orkv1.Job, error) {
	v, err := s.ownedVolume(ctx, volumeID)
	if err != nil {
		return nil, nil, err
	}
	j, err := s.owned(ctx, jobID)
	return v, j, err
}

type deleteVolumeInput struct {
	VolumePath
	Confirm string `query:"confirm" maxLength:"64" doc:"The volume's name again: all that is on it goes with it"`
}

func (s *Server) deleteVolume(ctx context.Context, in *deleteVolumeInput) (*volumeOutput, error) {
	target(ctx, in.ID)
	v, err := s.ownedVolume(ctx, in.ID)
	if err != nil {
		return nil, err
	}
	if v, err = s.Ork.DeleteVolume(ctx, &orkv1.DeleteVolumeRequest{Id: v.GetId(), Confirm: in.Confirm, Actor: caller(ctx).User.ID}); err != nil {
		return nil, err
	}
	return &volumeOutput{Body: volume(v)}, nil
}
