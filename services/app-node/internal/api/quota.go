package api

import (
	"context"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/services/app-node/internal/store"
)

// Quota is how many GPUs the jobs of a project may hold at once.
type Quota struct {
	ProjectID   string  `json:"project_id"`
	MaximumGPUs *uint32 `json:"maximum_gpus" nullable:"true" doc:"null for no bound"`
	HeldGPUs    *uint32 `json:"held_gpus,omitempty" doc:"What its jobs hold now, those that stop included; left out while the orchestrator cannot be asked"`
	Admitted    bool    `json:"admitted" doc:"The orchestrator admits by this setting; until it was told it goes on with the one before, or admits nothing"`
}

// ProjectPath names a project.
type ProjectPath struct {
	ID string `path:"id" maxLength:"64" doc:"p-..."`
}

type quotaOutput struct {
	Body Quota
}

type setQuotaInput struct {
	ProjectPath
	Body struct {
		MaximumGPUs *uint32 `json:"maximum_gpus" nullable:"true" required:"true" maximum:"4294967295" doc:"null for no bound"`
	}
}

func (s *Server) getQuota(ctx context.Context, in *ProjectPath) (*quotaOutput, error) {
	if !caller(ctx).Sees(in.ID) {
		return nil, fault.New(fault.NotFound, "there is no such project")
	}
	q, err := s.Store.Quota(ctx, in.ID)
	if err != nil {
		return nil, err
	}
	return &quotaOutput{Body: s.quota(ctx, q)}, nil
}

func (s *Server) setQuota(ctx context.Context, in *setQuotaInput) (*quotaOutput, error) {
	target(ctx, in.ID)
	q, err := s.Store.SetQuota(ctx, in.ID, in.Body.MaximumGPUs, s.Now())
	if err != nil {
		return nil, err
	}
	// Told now, so that the answer can say that it holds; if that fails, told later.
	if err := s.Quotas.Tell(ctx, q); err != nil {
		s.Log.Warn("a changed quota is told to wrk-ork when it is back", "project", q.ProjectID, "error", err)
	}
	return &quotaOutput{Body: s.quota(ctx, q)}, nil
}

func setting(q store.Quota) Quota {
	out := Quota{ProjectID: q.ProjectID}
	if !q.Unlimited {
		out.MaximumGPUs = &q.MaximumGPUs
	}
	return out
}

// quota joins the setting with what the orchestrator knows of it, as far as it can
// be asked.
func (s *Server) quota(ctx context.Context, q store.Quota) Quota {
	out := setting(q)
	if known, err := s.Ork.Quota(ctx, q.ProjectID); err == nil {
		held := known.GetHeldGpus()
		out.HeldGPUs, out.Admitted = &held, known.GetQuota().GetRevision() == q.Revision
	}
	return out
}
