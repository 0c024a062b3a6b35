package record

import (
	"context"
	"database/sql"

	"github.com/cosmicac/cosmicac/pkg/fault"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

// HeldVolumes is how much a project's volumes hold together, in GiB. One that is
// being deleted counts until the cluster says that nothing of it is left.
func (s *Store) HeldVolumes(ctx context.Context, projectID string) (gib uint64, err error) {
	err = s.read(ctx, func(tx *sql.Tx) (err error) {
		gib, err = heldVolumes(ctx, tx, projectID)
		return err
	})
	return gib, err
}

func heldVolumes(ctx context.Context, tx *sql.Tx, projectID string) (gib uint64, err error) {
	err = tx.QueryRowContext(ctx, `SELECT coalesce(sum(size_gib), 0) FROM volumes WHERE project_id = ?`, projectID).Scan(&gib)
	return gib, err
}

// admitVolume is the one place where a project's volumes are counted against its
// quota, in the transaction that records the new one: two never see the same room.
func admitVolume(ctx context.Context, tx *sql.Tx, v *orkv1.Volume) error {
	project := v.Owner.GetProjectId()
	q, _, err := quotaOf(ctx, tx, project)
	if err != nil {
		return err
	}
	if q == nil {
		return fault.New(fault.FailedPrecondition, "the volume cannot be created: quota_unknown: the quota of project %s is not known to the orchestrator, and what is not known is not given; app-node tells it when both are up", project)
	}
	if q.MaximumVolumeGib == nil {
		return nil
	}
	held, err := heldVolumes(ctx, tx, project)
	if err != nil {
		return err
	}
	most, left := *q.MaximumVolumeGib, uint64(0)
	if held < most {
		left = most - held
	}
	if uint64(v.SizeGib) <= left {
		return nil
	}
	help := "delete a volume"
	if left > 0 {
		help = "ask for less, delete a volume"
	}
	return fault.New(fault.Exhausted, "the volume cannot be created: over_quota: %d GiB wanted; the volumes of project %s hold %d of the %d GiB of its quota; %s, or have an administrator raise the quota",
		v.SizeGib, project, held, most, help).With(fault.Detail{Field: "size_gib", Rule: "is above what is left of the quota"})
}
