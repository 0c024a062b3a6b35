package store

import (
	"context"
	"database/sql"
	"time"
)

// Quota is how many GPUs the jobs of a project may hold at once, and how much its
// volumes together.
type Quota struct {
	ProjectID string
	// Unlimited: MaximumGPUs says nothing.
	Unlimited   bool
	MaximumGPUs uint32
	// MaximumVolumeGiB is nil for no bound.
	MaximumVolumeGiB *uint64
	// Revision grows with every change.
	Revision uint64
}

const quotaColumns = "id, maximum_gpus, maximum_volume_gib, quota_revision"

// scanQuota reads quotaColumns, and what was selected beside them into more.
func scanQuota(row scanner, more ...any) (Quota, error) {
	var q Quota
	var maximum sql.NullInt64
	var revision int64
	err := row.Scan(append([]any{&q.ProjectID, &maximum, &q.MaximumVolumeGiB, &revision}, more...)...)
	q.Unlimited, q.MaximumGPUs, q.Revision = !maximum.Valid, uint32(maximum.Int64), uint64(revision)
	return q, err
}

// Quota reads the quota of a project.
func (s *Store) Quota(ctx context.Context, projectID string) (q Quota, err error) {
	err = s.read(ctx, func(tx *sql.Tx) error {
		q, err = scanQuota(tx.QueryRowContext(ctx, "SELECT "+quotaColumns+" FROM projects WHERE id = ?", projectID))
		return notFound(err, "project")
	})
	return q, err
}

// Quotas reads the quota of every project.
func (s *Store) Quotas(ctx context.Context) (all []Quota, err error) {
	err = s.read(ctx, func(tx *sql.Tx) error {
		all = nil
		rows, err := tx.QueryContext(ctx, "SELECT "+quotaColumns+" FROM projects ORDER BY id")
		return each(rows, err, func(row scanner) error {
			q, err := scanQuota(row)
			all = append(all, q)
			return err
		})
	})
	return all, err
}

// QuotaChange is what becomes of a quota.
type QuotaChange struct {
	// MaximumGPUs and MaximumVolumeGiB are nil for no bound.
	MaximumGPUs      *uint32
	MaximumVolumeGiB *uint64
	// KeepVolumes leaves the bound of volumes as it is.
	KeepVolumes bool
}

// SetQuota changes the quota of a project. The new
// revision is at least the time in milliseconds, so that it is above every one of
// before, also in a database that was restored from an older backup.
func (s *Store) SetQuota(ctx context.Context, projectID string, to QuotaChange, now time.Time) (q Quota, err error) {
	err = s.write(ctx, func(tx *sql.Tx) error {
		q, err = scanQuota(tx.QueryRowContext(ctx, "UPDATE projects SET maximum_gpus = ?, maximum_volume_gib = iif(?, maximum_volume_gib, ?), quota_revision = max(quota_revision + 1, ?) WHERE id = ? RETURNING "+quotaColumns,
			to.MaximumGPUs, to.KeepVolumes, to.MaximumVolumeGiB, milliseconds(now), projectID))
		return notFound(err, "project")
	})
	return q, err
}
