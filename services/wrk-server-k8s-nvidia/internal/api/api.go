// Package api answers worker.v1.Rack, ork's way to the rack's worker. It turns
// requests into calls of package graph and streams reports.
//
// It keeps only the operator's rack entry, as ork last told it, and checks no
// role: the mesh lets in whom the wire file's options name.
package api

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/proto"

	"github.com/cosmicac/cosmicac/pkg/fault"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/graph"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/probe"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/report"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/tenure"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/volume"
)

// Entry holds the operator's rack entry. Its zero value holds none. Safe for
// concurrent use.
type Entry struct {
	p atomic.Pointer[orkv1.RackEntry]
}

// Get is the entry, nil when ork has not told it yet. It must not be changed.
func (e *Entry) Get() *orkv1.RackEntry { return e.p.Load() }

// Put takes an entry and says whether it differs from the one before.
func (e *Entry) Put(entry *orkv1.RackEntry) bool {
	return !proto.Equal(e.p.Swap(proto.CloneOf(entry)), entry)
}

// Server implements workerv1.RackServer. Its fields are set before it is
// registered.
type Server struct {
	workerv1.UnimplementedRackServer
	RackID string
	Engine *graph.Engine
	// Volumes makes and removes what outlives attempts.
	Volumes *volume.Keeper
	Hub     *report.Hub
	Entry   *Entry
	Tenure  *tenure.Tenure
	Log     hclog.Logger
	// Check runs the readiness check of the cluster.
	Check func(context.Context) []*workerv1.CheckFinding
	// Prober starts probes in the cluster.
	Prober *probe.Prober
	// Answers counts answers of ApplyAttempt by their reason; may be nil.
	Answers *prometheus.CounterVec
}

// NewAnswers makes the counter for Server.Answers. Its label is the reason, a
// closed list.
func NewAnswers(r prometheus.Registerer) *prometheus.CounterVec {
	c := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "cosmicac_rack_claims_total", Help: "Answers to plans, by reason; \"claimed\" when granted, \"error\" when left open.",
	}, []string{"reason"})
	r.MustRegister(c)
	return c
}

// serving says why this process does not answer for the rack.
func (s *Server) serving() error {
	if other, ok := s.Tenure.Other(); ok {
		return fault.New(fault.Unavailable, "rack %s is served by another process: key %s on %s", s.RackID, other.Key, other.Place)
	}
	return nil
}

// WatchRack implements workerv1.RackServer.
func (s *Server) WatchRack(req *workerv1.WatchRackRequest, stream workerv1.Rack_WatchRackServer) error {
	if err := s.serving(); err != nil {
		return err
	}
	if id := req.GetEntry().GetId(); id != s.RackID {
		return fault.New(fault.Invalid, "this worker serves rack %q, not %.64q", s.RackID, id).With(fault.Detail{Field: "entry.id", Rule: "must be the worker's rack"})
	}
	if s.Entry.Put(req.Entry) {
		s.Log.Info("rack entry", "location", req.Entry.Location, "allowed_models", req.Entry.AllowedModels,
			"maximum_gpus", req.Entry.MaximumGpus, "cordoned", req.Entry.Cordoned)
	}
	return s.Hub.Watch(stream.Context(), func(r *workerv1.WatchRackResponse) error {
		if err := s.serving(); err != nil {
			return err
		}
		return stream.Send(r)
	})
}

// ApplyAttempt implements workerv1.RackServer.
func (s *Server) ApplyAttempt(ctx context.Context, req *workerv1.ApplyAttemptRequest) (*workerv1.ApplyAttemptResponse, error) {
	if err := s.serving(); err != nil {
		return nil, err
	}
	refused, err := s.Engine.Apply(ctx, req)
	switch {
	case err != nil:
		s.count("error")
		return nil, err
	case refused.OK():
		s.count("claimed")
		s.Hub.Changed()
		return &workerv1.ApplyAttemptResponse{Claimed: true}, nil
	default:
		s.count(refused.Reason.String())
		s.Log.Info("refused a plan", "attempt", req.AttemptId, "reason", refused.Reason, "why", refused.Message)
		return &workerv1.ApplyAttemptResponse{Reason: refused.Reason, Message: refused.Message}, nil
	}
}

func (s *Server) count(reason string) {
	if s.Answers != nil {
		s.Answers.WithLabelValues(reason).Inc()
	}
}

// DeleteAttempt implements workerv1.RackServer.
func (s *Server) DeleteAttempt(ctx context.Context, req *workerv1.DeleteAttemptRequest) (*workerv1.DeleteAttemptResponse, error) {
	if err := s.serving(); err != nil {
		return nil, err
	}
	if err := s.Engine.Delete(ctx, req.AttemptId, req.Reason); err != nil {
		return nil, err
	}
	return &workerv1.DeleteAttemptResponse{}, nil
}

// DeleteJobDisks implements workerv1.RackServer.
func (s *Server) DeleteJobDisks(ctx context.Context, req *workerv1.DeleteJobDisksRequest) (*workerv1.DeleteJobDisksResponse, error) {
	if err := s.serving(); err != nil {
		return nil, err
	}
	if err := s.Engine.DeleteDisks(ctx, req.JobId); err != nil {
		return nil, err
	}
	s.Hub.Changed()
	return &workerv1.DeleteJobDisksResponse{}, nil
}

// callTime bounds what is asked of the cluster on behalf of a caller.
const callTime = time.Minute

// ListHoldings implements workerv1.RackServer.
func (s *Server) ListHoldings(ctx context.Context, _ *workerv1.ListHoldingsRequest) (*workerv1.ListHoldingsResponse, error) {
	if err := s.serving(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	return s.Engine.Holdings(ctx), nil
}

// CheckRack implements workerv1.RackServer. It answers also while another
// process works on the rack: it only looks.
func (s *Server) CheckRack(ctx context.Context, _ *workerv1.CheckRackRequest) (*workerv1.CheckRackResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	return &workerv1.CheckRackResponse{Findings: s.Check(ctx)}, nil
}

// ProbeRack implements workerv1.RackServer.
func (s *Server) ProbeRack(req *workerv1.ProbeRackRequest, stream workerv1.Rack_ProbeRackServer) error {
	if err := s.serving(); err != nil {
		return err
	}
	return s.Prober.Run(stream.Context(), req.GetImage(), func(f *workerv1.CheckFinding) error {
		return stream.Send(&workerv1.ProbeRackResponse{Finding: f})
	})
}
