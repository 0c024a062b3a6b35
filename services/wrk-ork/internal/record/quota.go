package record

import (
	"context"
	"database/sql"

	"github.com/cosmicac/cosmicac/pkg/fault"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
)

// PutQuotas keeps each quota that is newer than what is kept of its project. It
// may be repeated and come in any order.
func (s *Store) PutQuotas(ctx context.Context, quotas []*orkv1.ProjectQuota) error {
	known, err := s.Quotas(ctx)
	if err != nil {
		return err
	}
	var newer []*orkv1.ProjectQuota
	for _, q := range quotas {
		if have := known[q.ProjectId]; have == nil || q.Revision > have.Revision {
			newer = append(newer, q)
		}
	}
	if len(newer) == 0 {
		return nil // the usual case costs no write
	}
	return s.write(ctx, func(tx *sql.Tx) error {
		for _, q := range newer {
			if _, err := tx.ExecContext(ctx, `INSERT INTO quotas (project_id, revision, unlimited, maximum_gpus, maximum_volume_gib) VALUES (?, ?, ?, ?, ?)
				ON CONFLICT (project_id) DO UPDATE SET revision = excluded.revision, unlimited = excluded.unlimited,
					maximum_gpus = excluded.maximum_gpus, maximum_volume_gib = excluded.maximum_volume_gib WHERE excluded.revision > quotas.revision`,
				q.ProjectId, int64(q.Revision), flag(q.Unlimited), q.MaximumGpus, q.MaximumVolumeGib); err != nil {
				return err
			}
		}
		return nil
	})
}

// Quotas reads what is kept of every project.
func (s *Store) Quotas(ctx context.Context) (map[string]*orkv1.ProjectQuota, error) {
	out := make(map[string]*orkv1.ProjectQuota)
	err := s.read(ctx, func(tx *sql.Tx) error {
		clear(out)
		rows, err := tx.QueryContext(ctx, `SELECT project_id, revision, unlimited, maximum_gpus, maximum_volume_gib FROM quotas`)
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			q := &orkv1.ProjectQuota{}
			if err := rows.Scan(&q.ProjectId, &q.Revision, &q.Unlimited, &q.MaximumGpus, &q.MaximumVolumeGib); err != nil {
				return err
			}
			out[q.ProjectId] = q
		}
		return rows.Err()
	})
	return out, err
}

// Quota reads what is kept of one project, nil for nothing, and how many GPUs it
// holds: those of every plan until the cluster says that nothing is left of it.
func (s *Store) Quota(ctx context.Context, projectID string) (q *orkv1.ProjectQuota, held uint32, err error) {
	err = s.read(ctx, func(tx *sql.Tx) (err error) {
		q, held, err = quotaOf(ctx, tx, projectID)
		return err
	})
	return q, held, err
}

func quotaOf(ctx context.Context, tx *sql.Tx, projectID string) (*orkv1.ProjectQuota, uint32, error) {
	q := &orkv1.ProjectQuota{ProjectId: projectID}
	err := tx.QueryRowContext(ctx, `SELECT revision, unlimited, maximum_gpus, maximum_volume_gib FROM quotas WHERE project_id = ?`, projectID).
		Scan(&q.Revision, &q.Unlimited, &q.MaximumGpus, &q.MaximumVolumeGib)
	switch {
	case notFound(err):
		q = nil
	case err != nil:
		return nil, 0, err
	}
	var held uint32
	err = tx.QueryRowContext(ctx, `SELECT coalesce(sum(a.gpus), 0) FROM attempts a JOIN jobs j ON j.id = a.job_id
		WHERE a.gone = 0 AND a.rack_id <> '' AND j.project_id = ?`, projectID).Scan(&held)
	return q, held, err
}

// admit is the one place where a project's GPUs are counted against its quota,
// in the transaction that records the plan: two plans never see the same room.
func admit(ctx context.Context, tx *sql.Tx, j *job.Job) error {
	wanted := uint32(0)
	for _, r := range j.Replicas {
		for _, a := range r.Attempts {
			if a.RackID == "" || a.Gone {
				continue
			}
			wanted += a.GPUs()
			if _, err := tx.ExecContext(ctx, `UPDATE attempts SET gpus = ? WHERE id = ? AND gpus <> ?`, a.GPUs(), a.ID, a.GPUs()); err != nil {
				return err
			}
		}
	}
	if wanted == 0 {
		return nil
	}
	q, held, err := quotaOf(ctx, tx, j.Owner.GetProjectId())
	switch {
	case err != nil:
		return err
	case q == nil:
		return fault.New(fault.Conflict, "the quota of project %s is not known", j.Owner.GetProjectId())
	case !q.Unlimited && held > q.MaximumGpus:
		return fault.New(fault.Conflict, "project %s would hold %d GPUs, and its quota is %d", j.Owner.GetProjectId(), held, q.MaximumGpus)
	}
	return nil
}
