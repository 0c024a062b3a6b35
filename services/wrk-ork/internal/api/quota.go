package api

import (
	"context"
	"fmt"

	"github.com/cosmicac/cosmicac/pkg/fault"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/record"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/spec"
)

// mostQuotas bounds one PutQuotas.
const mostQuotas = 1000

// Quotas answers orkv1.Quotas.
type Quotas struct {
	orkv1.UnimplementedQuotasServer
	Store *record.Store
	// Changed is told when a project may have more room. It must not block.
	Changed func()
}

// PutQuotas implements orkv1.QuotasServer.
func (s *Quotas) PutQuotas(ctx context.Context, req *orkv1.PutQuotasRequest) (*orkv1.PutQuotasResponse, error) {
	if len(req.Quotas) > mostQuotas {
		return nil, fault.New(fault.TooLarge, "put quotas: %d at once; at most %d are taken", len(req.Quotas), mostQuotas)
	}
	for i, q := range req.Quotas {
		if err := checkQuota(fmt.Sprintf("quotas[%d]", i), q); err != nil {
			return nil, err
		}
	}
	if err := s.Store.PutQuotas(ctx, req.Quotas); err != nil {
		return nil, err
	}
	s.Changed()
	return &orkv1.PutQuotasResponse{}, nil
}

// GetQuota implements orkv1.QuotasServer.
func (s *Quotas) GetQuota(ctx context.Context, req *orkv1.GetQuotaRequest) (*orkv1.GetQuotaResponse, error) {
	if err := spec.Owner(&orkv1.Owner{ProjectId: req.ProjectId}); err != nil {
		return nil, err
	}
	q, held, err := s.Store.Quota(ctx, req.ProjectId)
	if err != nil {
		return nil, err
	}
	volumes, err := s.Store.HeldVolumes(ctx, req.ProjectId)
	if err != nil {
		return nil, err
	}
	return &orkv1.GetQuotaResponse{Quota: q, HeldGpus: held, HeldVolumeGib: volumes}, nil
}

// keepQuota keeps the quota that came with a request of its project, if one came.
func keepQuota(ctx context.Context, store *record.Store, q *orkv1.ProjectQuota, owner *orkv1.Owner) error {
	if q == nil {
		return nil
	}
	if err := checkQuota("quota", q); err != nil {
		return err
	}
	if q.ProjectId != owner.GetProjectId() {
		return fault.New(fault.Invalid, "the quota is not that of the owner's project").
			With(fault.Detail{Field: "quota.project_id", Rule: "is the owner's project"})
	}
	return store.PutQuotas(ctx, []*orkv1.ProjectQuota{q})
}

func checkQuota(field string, q *orkv1.ProjectQuota) error {
	id := q.GetProjectId()
	if id == "" || len(id) > 128 || q.GetRevision() == 0 || q.GetRevision() > 1<<62 {
		return fault.New(fault.Invalid, "the quota of project %.64q is not valid", id).
			With(fault.Detail{Field: field, Rule: "names a project, with a revision from 1 on"})
	}
	return nil
}
