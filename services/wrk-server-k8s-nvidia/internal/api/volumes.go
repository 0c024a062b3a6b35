package api

import (
	"context"

	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
)

// ApplyVolume implements workerv1.RackServer.
func (s *Server) ApplyVolume(ctx context.Context, req *workerv1.ApplyVolumeRequest) (*workerv1.ApplyVolumeResponse, error) {
	if err := s.serving(); err != nil {
		return nil, err
	}
	refusal, err := s.Volumes.Apply(ctx, req)
	if err != nil {
		return nil, err
	}
	s.Hub.Changed()
	return &workerv1.ApplyVolumeResponse{Refusal: refusal}, nil
}

// DeleteVolume implements workerv1.RackServer.
func (s *Server) DeleteVolume(ctx context.Context, req *workerv1.DeleteVolumeRequest) (*workerv1.DeleteVolumeResponse, error) {
	if err := s.serving(); err != nil {
		return nil, err
	}
	if err := s.Volumes.Delete(ctx, req.VolumeId); err != nil {
		return nil, err
	}
	s.Hub.Changed()
	return &workerv1.DeleteVolumeResponse{}, nil
}
