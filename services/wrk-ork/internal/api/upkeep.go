package api

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/life"
)

// longestDrain bounds the time that is left to what runs on a rack.
const longestDrain = 30 * 24 * time.Hour

// DrainRack implements orkv1.RacksServer. The owners' jobs show it from the next
// pass over them, which comes at once.
func (s *Racks) DrainRack(ctx context.Context, req *orkv1.DrainRackRequest) (*orkv1.DrainRackResponse, error) {
	who, err := actor(ctx, req.Actor)
	if err != nil {
		return nil, err
	}
	within := req.Deadline.AsDuration()
	if within < 0 || within > longestDrain {
		return nil, fault.New(fault.Invalid, "drain rack %.64s: the deadline is not valid", req.Id).
			With(fault.Detail{Field: "deadline", Rule: "is 0 to 30 days from now"})
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	e, err := s.Store.DrainRack(ctx, req.Id, s.Clock().Add(within), who)
	if err != nil {
		return nil, err
	}
	s.Log.Info("rack is drained", "rack", e.Id, "deadline", e.DrainDeadline.AsTime(), "actor", who)
	s.Fleet.Put(e)
	live, err := s.Store.Live(ctx)
	if err != nil {
		return nil, err
	}
	var told []string
	for _, j := range live {
		for _, r := range j.Replicas {
			if a := r.Newest(); a.RackID == e.Id && !job.Ended(a.State) && !slices.Contains(told, j.ID) {
				told = append(told, j.ID)
			}
		}
	}
	s.Changed(told...)
	return &orkv1.DrainRackResponse{Entry: e, Jobs: uint32(len(told))}, nil
}

// ForgetRack implements orkv1.RacksServer.
func (s *Racks) ForgetRack(ctx context.Context, req *orkv1.ForgetRackRequest) (*orkv1.ForgetRackResponse, error) {
	who, err := actor(ctx, req.Actor)
	if err != nil {
		return nil, err
	}
	if req.Force && req.Confirm != req.Id {
		return nil, fault.New(fault.Invalid, "forget rack %.64s by force: it is not confirmed; what runs there is abandoned, not stopped", req.Id).
			With(fault.Detail{Field: "confirm", Rule: "is the rack's id again"})
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	out := &orkv1.ForgetRackResponse{}
	if !req.Force {
		err = s.Store.ForgetRack(ctx, req.Id)
	} else {
		now := s.Clock()
		out.Abandoned, err = s.Store.AbandonRack(ctx, req.Id, who, func(j *job.Job) []job.Event { return life.Abandon(j, req.Id, who, now) })
	}
	if err != nil {
		return nil, err
	}
	s.Log.Warn("rack forgotten", "rack", req.Id, "force", req.Force, "actor", who, "abandoned", len(out.Abandoned.GetAttempts()))
	s.Fleet.Forget(req.Id)
	s.Changed()
	return out, nil
}

// ListForgottenRacks implements orkv1.RacksServer.
func (s *Racks) ListForgottenRacks(ctx context.Context, _ *orkv1.ListForgottenRacksRequest) (*orkv1.ListForgottenRacksResponse, error) {
	all, err := s.Store.Forgotten(ctx)
	if err != nil {
		return nil, err
	}
	for _, f := range all {
		v, back := s.Fleet.View(f.RackId)
		f.Returned = back
		for _, a := range f.Attempts {
			a.Present = back && v.Status(a.AttemptId) != nil
		}
	}
	return &orkv1.ListForgottenRacksResponse{Racks: all}, nil
}

// ResolveAbandoned implements orkv1.RacksServer.
func (s *Racks) ResolveAbandoned(ctx context.Context, req *orkv1.ResolveAbandonedRequest) (*orkv1.ResolveAbandonedResponse, error) {
	who, err := actor(ctx, req.Actor)
	if err != nil {
		return nil, err
	}
	adopt := req.Action == orkv1.AbandonedAction_ABANDONED_ACTION_ADOPT
	switch {
	case !adopt && req.Action != orkv1.AbandonedAction_ABANDONED_ACTION_DELETE:
		return nil, fault.New(fault.Invalid, "what was abandoned on rack %.64s: nothing was decided", req.RackId).
			With(fault.Detail{Field: "action", Rule: "is adopt or delete"})
	case !adopt && req.Confirm != req.RackId:
		return nil, fault.New(fault.Invalid, "delete what was abandoned on rack %.64s: it is not confirmed", req.RackId).
			With(fault.Detail{Field: "confirm", Rule: "is the rack's id again"})
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	out := &orkv1.ResolveAbandonedResponse{}
	now := s.Clock()
	seen := make(map[string]bool)
	err = s.Store.Reclaim(ctx, req.RackId, func(j *job.Job) []job.Event {
		n, events := life.Reclaim(j, req.RackId, adopt, who, now)
		if !seen[j.ID] {
			out.Attempts += n
		}
		seen[j.ID] = true
		return events
	})
	var strays []string
	if !adopt && (err == nil || fault.KindOf(err) == fault.NotFound) {
		var left uint32
		if strays, left = s.unrecorded(req.RackId); len(strays) > 0 {
			err = s.Store.Bury(ctx, strays)
		}
		out.Attempts += left
	}
	if err != nil {
		return nil, err
	}
	s.Log.Info("what was abandoned is decided", "rack", req.RackId, "adopted", adopt, "attempts", out.Attempts, "unrecorded", strays, "actor", who)
	s.Changed(strays...)
	return out, nil
}

// unrecorded are the jobs that a rack holds something of and that no record knows,
// with the number of their attempts.
func (s *Racks) unrecorded(rackID string) (jobs []string, attempts uint32) {
	v, ok := s.Fleet.View(rackID)
	if !ok {
		return nil, 0
	}
	unknown := s.Unrecorded()
	for _, a := range v.Report.GetAttempts() {
		if unknown[a.JobId] {
			jobs, attempts = append(jobs, a.JobId), attempts+1
		}
	}
	for _, id := range v.Report.GetDiskJobIds() {
		if unknown[id] {
			jobs = append(jobs, id)
		}
	}
	slices.Sort(jobs)
	return slices.Compact(jobs), attempts
}

// ListQuarantines implements orkv1.RacksServer.
func (s *Racks) ListQuarantines(ctx context.Context, req *orkv1.ListQuarantinesRequest) (*orkv1.ListQuarantinesResponse, error) {
	all, err := s.Store.Quarantines(ctx, req.RackId)
	return &orkv1.ListQuarantinesResponse{Quarantines: all}, err
}

// SetQuarantine implements orkv1.RacksServer.
func (s *Racks) SetQuarantine(ctx context.Context, req *orkv1.SetQuarantineRequest) (*orkv1.SetQuarantineResponse, error) {
	who, err := actor(ctx, req.Actor)
	if err != nil {
		return nil, err
	}
	var problems []fault.Detail
	if !nameLike(req.NodeName, 253) || req.NodeName == "" {
		problems = append(problems, fault.Detail{Field: "node_name", Rule: "is the name of a node"})
	}
	if !nameLike(req.GpuModel, 100) {
		problems = append(problems, fault.Detail{Field: "gpu_model", Rule: "is a model code, or empty for the whole node"})
	}
	if n := len(req.Message); n == 0 || n > 1024 || strings.ContainsFunc(req.Message, func(r rune) bool { return r < ' ' }) {
		problems = append(problems, fault.Detail{Field: "message", Rule: "says why, in one line of 1 to 1024 bytes"})
	}
	if problems != nil {
		return nil, fault.New(fault.Invalid, "the quarantine is not valid: %s %s", problems[0].Field, problems[0].Rule).With(problems...)
	}
	q := &orkv1.Quarantine{RackId: req.RackId, NodeName: req.NodeName, GpuModel: req.GpuModel, Message: req.Message, Actor: who, Active: true}
	if err := s.Store.SetQuarantine(ctx, q); err != nil {
		return nil, err
	}
	s.Log.Info("node quarantined", "rack", q.RackId, "node", q.NodeName, "model", q.GpuModel, "actor", who)
	s.Changed()
	return &orkv1.SetQuarantineResponse{Quarantine: q}, nil
}

// LiftQuarantine implements orkv1.RacksServer.
func (s *Racks) LiftQuarantine(ctx context.Context, req *orkv1.LiftQuarantineRequest) (*orkv1.LiftQuarantineResponse, error) {
	who, err := actor(ctx, req.Actor)
	if err != nil {
		return nil, err
	}
	if err := s.Store.LiftQuarantine(ctx, req.RackId, req.NodeName, req.GpuModel); err != nil {
		return nil, err
	}
	s.Log.Info("quarantine lifted", "rack", req.RackId, "node", req.NodeName, "model", req.GpuModel, "actor", who)
	s.Changed()
	return &orkv1.LiftQuarantineResponse{}, nil
}

// nameLike allows what the cluster could call something; empty too.
func nameLike(text string, most int) bool {
	return len(text) <= most && !strings.ContainsFunc(text, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '-' && r != '_' && r != '.'
	})
}
