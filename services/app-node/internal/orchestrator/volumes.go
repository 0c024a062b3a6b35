package orchestrator

import (
	"context"

	"github.com/cosmicac/cosmicac/pkg/fault"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

// CreateVolume records a volume; existed says that the project had it before.
func (c *Client) CreateVolume(ctx context.Context, request *orkv1.CreateVolumeRequest) (v *orkv1.Volume, existed bool, err error) {
	r, err := call(ctx, c, "CreateVolume", orkv1.NewVolumesClient, orkv1.VolumesClient.CreateVolume, request)
	return r.GetVolume(), r.GetExisted(), err
}

// Volume reads one volume.
func (c *Client) Volume(ctx context.Context, id string) (*orkv1.Volume, error) {
	r, err := call(ctx, c, "GetVolume", orkv1.NewVolumesClient, orkv1.VolumesClient.GetVolume, &orkv1.GetVolumeRequest{Id: id})
	if err == nil && r.GetVolume() == nil {
		return nil, fault.New(fault.NotFound, "there is no volume %q", id)
	}
	return r.GetVolume(), err
}

// Volumes lists the volumes of some projects, or of all when none is named.
func (c *Client) Volumes(ctx context.Context, projects []string, name string) ([]*orkv1.Volume, error) {
	r, err := call(ctx, c, "ListVolumes", orkv1.NewVolumesClient, orkv1.VolumesClient.ListVolumes, &orkv1.ListVolumesRequest{ProjectIds: projects, Name: name})
	return r.GetVolumes(), err
}

// AttachVolume gives a job a volume from its next start on.
func (c *Client) AttachVolume(ctx context.Context, request *orkv1.AttachVolumeRequest) (*orkv1.Volume, error) {
	r, err := call(ctx, c, "AttachVolume", orkv1.NewVolumesClient, orkv1.VolumesClient.AttachVolume, request)
	return r.GetVolume(), err
}

// DetachVolume takes it back.
func (c *Client) DetachVolume(ctx context.Context, request *orkv1.DetachVolumeRequest) (*orkv1.Volume, error) {
	r, err := call(ctx, c, "DetachVolume", orkv1.NewVolumesClient, orkv1.VolumesClient.DetachVolume, request)
	return r.GetVolume(), err
}

// DeleteVolume removes a volume with what is on it.
func (c *Client) DeleteVolume(ctx context.Context, request *orkv1.DeleteVolumeRequest) (*orkv1.Volume, error) {
	r, err := call(ctx, c, "DeleteVolume", orkv1.NewVolumesClient, orkv1.VolumesClient.DeleteVolume, request)
	return r.GetVolume(), err
}
