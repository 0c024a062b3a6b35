package api

import (
	"context"
	"encoding/json"

	"github.com/danielgtaylor/huma/v2"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/services/app-node/internal/store"
)

// Quota is how many GPUs the jobs of a project may hold at once, and how much its
// volumes together.
type Quota struct {
	ProjectID        string  `json:"project_id"`
	MaximumGPUs      *uint32 `json:"maximum_gpus" nullable:"true" doc:"null for no bound"`
	HeldGPUs         *uint32 `json:"held_gpus,omitempty" doc:"What its jobs hold now, those that stop included; left out while the orchestrator cannot be asked"`
	MaximumVolumeGiB *uint64 `json:"maximum_volume_gib" nullable:"true" doc:"null for no bound"`
	HeldVolumeGiB    *uint64 `json:"held_volume_gib,omitempty" doc:"What its volumes hold now, those being deleted included; left out while the orchestrator cannot be asked"`
	Admitted         bool    `json:"admitted" doc:"The orchestrator admits by this setting; until it was told it goes on with the one before, or admits nothing"`
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
		MaximumGPUs      *uint32    `json:"maximum_gpus" nullable:"true" required:"true" maximum:"4294967295" doc:"null for no bound"`
		MaximumVolumeGiB givenBound `json:"maximum_volume_gib,omitempty" required:"false"`
	}
}

// givenBound tells a bound that is null, for none, from one that is left out.
type givenBound struct {
	Given bool
	Value *uint64
}

// UnmarshalJSON reads a number or null.
func (b *givenBound) UnmarshalJSON(text []byte) error {
	b.Given = true
	return json.Unmarshal(text, &b.Value)
}

// Schema says what it may be.
func (givenBound) Schema(huma.Registry) *huma.Schema {
	least, most := 0.0, float64(1<<53-1)
	return &huma.Schema{Type: huma.TypeInteger, Nullable: true, Minimum: &least, Maximum: &most, Description: "GiB; null for no bound; left as it is when left out"}
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
	q, err := s.Store.SetQuota(ctx, in.ID, store.QuotaChange{
		MaximumGPUs: in.Body.MaximumGPUs, MaximumVolumeGiB: in.Body.MaximumVolumeGiB.Value, KeepVolumes: !in.Body.MaximumVolumeGiB.Given,
	}, s.Now())
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
	out := Quota{ProjectID: q.ProjectID, MaximumVolumeGiB: q.MaximumVolumeGiB}
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
		gpus, volumes := known.GetHeldGpus(), known.GetHeldVolumeGib()
		out.HeldGPUs, out.HeldVolumeGiB, out.Admitted = &gpus, &volumes, known.GetQuota().GetRevision() == q.Revision
	}
	return out
}
