package api

import (
	"cmp"
	"context"
	"strings"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/id"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/life"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/rack"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/record"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/spec"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/volume"
)

// Volumes answers orkv1.Volumes.
type Volumes struct {
	orkv1.UnimplementedVolumesServer
	Store *record.Store
	Fleet *rack.Fleet
	NewID life.NewID
	Clock func() time.Time
	// Changed is told when a volume is to be looked at. It must not block.
	Changed func()
	Log     hclog.Logger
}

func (s *Volumes) show(v *orkv1.Volume) *orkv1.Volume {
	view, known := s.Fleet.View(v.RackId)
	return volume.Show(v, view, known)
}

// CreateVolume implements orkv1.VolumesServer.
func (s *Volumes) CreateVolume(ctx context.Context, req *orkv1.CreateVolumeRequest) (*orkv1.CreateVolumeResponse, error) {
	if err := spec.Volume(req); err != nil {
		return nil, err
	}
	if err := keepQuota(ctx, s.Store, req.Quota, req.Owner); err != nil {
		return nil, err
	}
	asked := &orkv1.Volume{
		Id: s.NewID(id.Volume), Name: req.Name, Owner: &orkv1.Owner{ProjectId: req.Owner.GetProjectId(), UserId: req.Owner.GetUserId()},
		SizeGib: req.SizeGib, StorageClass: req.StorageClass, Shared: req.Shared, RackId: req.RackId, Location: req.Location,
	}
	made, existed, err := s.Store.CreateVolume(ctx, asked, func() (string, error) { return s.pick(req.Location) })
	if err != nil {
		return nil, err
	}
	if !existed {
		s.Log.Info("volume created", "volume", made.Id, "name", made.Name, "rack", made.RackId, "size_gib", made.SizeGib)
		s.Changed()
	}
	return &orkv1.CreateVolumeResponse{Volume: s.show(made), Existed: existed}, nil
}

// pick is the rack of a location, or of all, that takes new work and has the most
// GPUs: jobs that use the volume can run nowhere else.
func (s *Volumes) pick(location string) (string, error) {
	var best rack.View
	var most uint32
	var elsewhere []string
	for _, v := range s.Fleet.Views() {
		if location != "" && !strings.EqualFold(location, v.Entry.Location) {
			elsewhere = append(elsewhere, v.Entry.Id+" in "+v.Entry.Location)
			continue
		}
		if !v.Connected || !v.Report.GetSynced() || v.Entry.Cordoned {
			elsewhere = append(elsewhere, v.Entry.Id+", which takes no new work now")
			continue
		}
		total := uint32(0)
		for _, n := range v.Report.Nodes {
			for _, g := range n.Gpus {
				total += g.Total
			}
		}
		if best.Entry == nil || cmp.Compare(total, most) > 0 {
			best, most = v, total
		}
	}
	if best.Entry != nil {
		return best.Entry.Id, nil
	}
	where, have := "", "there is no rack at all"
	if location != "" {
		where = " in " + location
	}
	if len(elsewhere) > 0 {
		have = "racks are " + strings.Join(elsewhere[:min(len(elsewhere), 8)], ", ")
	}
	return "", fault.New(fault.FailedPrecondition, "the volume cannot be created: no rack%s takes new work now; %s", where, have).
		With(fault.Detail{Field: "location", Rule: "is one with a rack that takes new work; or name a rack"})
}

// checkVolumeID refuses what cannot be a volume's id before the record is asked.
func checkVolumeID(volumeID string) error {
	if !id.Valid(id.Volume, volumeID) {
		return fault.New(fault.NotFound, "no volume has the id %.64q", volumeID)
	}
	return nil
}

// GetVolume implements orkv1.VolumesServer.
func (s *Volumes) GetVolume(ctx context.Context, req *orkv1.GetVolumeRequest) (*orkv1.GetVolumeResponse, error) {
	if err := checkVolumeID(req.Id); err != nil {
		return nil, err
	}
	v, err := s.Store.Volume(ctx, req.Id)
	if err != nil {
		return nil, err
	}
	return &orkv1.GetVolumeResponse{Volume: s.show(v)}, nil
}

// ListVolumes implements orkv1.VolumesServer.
func (s *Volumes) ListVolumes(ctx context.Context, req *orkv1.ListVolumesRequest) (*orkv1.ListVolumesResponse, error) {
	if len(req.ProjectIds) > 1000 {
		return nil, fault.New(fault.TooLarge, "list volumes: at most 1000 projects")
	}
	all, err := s.Store.Volumes(ctx, req.ProjectIds, req.Name)
	if err != nil {
		return nil, err
	}
	for _, v := range all {
		s.show(v)
	}
	return &orkv1.ListVolumesResponse{Volumes: all}, nil
}

// AttachVolume implements orkv1.VolumesServer.
func (s *Volumes) AttachVolume(ctx context.Context, req *orkv1.AttachVolumeRequest) (*orkv1.AttachVolumeResponse, error) {
	who, err := s.both(ctx, req.Id, req.JobId, req.Actor)
	if err != nil {
		return nil, err
	}
	v, err := s.Store.AttachVolume(ctx, req.Id, req.JobId, req.ReadOnly, who)
	if err != nil {
		return nil, err
	}
	return &orkv1.AttachVolumeResponse{Volume: s.show(v)}, nil
}

// DetachVolume implements orkv1.VolumesServer.
func (s *Volumes) DetachVolume(ctx context.Context, req *orkv1.DetachVolumeRequest) (*orkv1.DetachVolumeResponse, error) {
	who, err := s.both(ctx, req.Id, req.JobId, req.Actor)
	if err != nil {
		return nil, err
	}
	v, err := s.Store.DetachVolume(ctx, req.Id, req.JobId, who)
	if err != nil {
		return nil, err
	}
	return &orkv1.DetachVolumeResponse{Volume: s.show(v)}, nil
}

func (s *Volumes) both(ctx context.Context, volumeID, jobID, said string) (string, error) {
	if err := checkVolumeID(volumeID); err != nil {
		return "", err
	}
	if err := checkID(jobID); err != nil {
		return "", err
	}
	return actor(ctx, said)
}

// DeleteVolume implements orkv1.VolumesServer.
func (s *Volumes) DeleteVolume(ctx context.Context, req *orkv1.DeleteVolumeRequest) (*orkv1.DeleteVolumeResponse, error) {
	if err := checkVolumeID(req.Id); err != nil {
		return nil, err
	}
	who, err := actor(ctx, req.Actor)
	if err != nil {
		return nil, err
	}
	v, err := s.Store.Volume(ctx, req.Id)
	if err != nil {
		return nil, err
	}
	if req.Confirm != v.Name {
		return nil, fault.New(fault.Invalid, "delete volume %s (%s): it is not confirmed; all that is on it goes with it", v.Name, v.Id).
			With(fault.Detail{Field: "confirm", Rule: "is the volume's name again"})
	}
	if v, err = s.Store.AskDeleteVolume(ctx, req.Id); err != nil {
		return nil, err
	}
	s.Log.Info("volume is deleted", "volume", v.Id, "name", v.Name, "rack", v.RackId, "actor", who)
	s.Changed()
	return &orkv1.DeleteVolumeResponse{Volume: s.show(v)}, nil
}
