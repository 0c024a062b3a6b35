package api

import (
	"context"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/id"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/life"
)

// RestartJob implements orkv1.JobsServer.
func (s *Jobs) RestartJob(ctx context.Context, req *orkv1.RestartJobRequest) (*orkv1.RestartJobResponse, error) {
	j, err := s.change(ctx, req.Id, req.Actor, func(j *job.Job, actor string) (*job.Job, []job.Event, error) {
		return life.Restart(j, actor, s.Clock(), s.NewID)
	})
	return &orkv1.RestartJobResponse{Job: j}, err
}

// FenceAttempt implements orkv1.JobsServer.
func (s *Jobs) FenceAttempt(ctx context.Context, req *orkv1.FenceAttemptRequest) (*orkv1.FenceAttemptResponse, error) {
	if !id.Valid(id.Attempt, req.AttemptId) {
		return nil, fault.New(fault.NotFound, "no attempt has the id %.64q", req.AttemptId)
	}
	if req.Confirm != req.AttemptId {
		return nil, fault.New(fault.Invalid, "fence attempt %s: it is not confirmed; make sure that its machine is off, then confirm with its id", req.AttemptId).
			With(fault.Detail{Field: "confirm", Rule: "is the attempt's id again"})
	}
	jobID, err := s.Store.JobOf(ctx, req.AttemptId)
	if err != nil {
		return nil, err
	}
	j, err := s.change(ctx, jobID, req.Actor, func(j *job.Job, actor string) (*job.Job, []job.Event, error) {
		return life.Fence(j, req.AttemptId, actor, s.Clock())
	})
	return &orkv1.FenceAttemptResponse{Job: j}, err
}

// priced checks what a job's GPUs cost. A limit that nobody could hold it to is
// refused.
func priced(spec *orkv1.JobSpec, p *orkv1.Price) error {
	if p == nil && spec.GetCostLimitCents() > 0 && spec.GetGpu().GetCount() > 0 {
		return fault.New(fault.Invalid, "the job cannot be created: no price of %s is known, so its cost limit cannot be held", spec.GetGpu().GetModel()).
			With(fault.Detail{Field: "cost_limit_cents", Rule: "needs a price of the GPU model, and none is known; an operator sets it at app-node"})
	}
	if len(p.GetCurrency()) > 16 || p.GetCentsPerGpuHour() > 1<<40 {
		return fault.New(fault.Invalid, "the price of a GPU is not a price").With(fault.Detail{Field: "price", Rule: "is at most 2^40 cents, in a currency of at most 16 letters"})
	}
	return nil
}

// view is the job with its cost so far.
func (s *Jobs) view(j *job.Job) *orkv1.Job {
	v := j.View()
	v.CostCents = j.CostCents(s.Clock())
	return v
}
