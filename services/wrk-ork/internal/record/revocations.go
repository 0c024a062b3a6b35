package record

import (
	"context"
	"database/sql"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/trust"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
)

// Bounds of what is kept of revocations.
const (
	// LongestCertificate is the longest life of a certificate that may be
	// configured; what is void is remembered for as long.
	LongestCertificate = 7 * 24 * time.Hour
	// floorsKept bounds the floors of grants. One more, and a single floor for
	// everybody takes the place of all: too much is void then, never too little.
	floorsKept = 4096
)

// Floor voids the grants of a user to a project's agents that were signed below
// an epoch. An empty ProjectID or UserID stands for all.
type Floor struct {
	ProjectID, UserID string
	Epoch             uint64
	// Until is when all of them have run out by themselves.
	Until time.Time
}

// RaiseFloors files floors. One that is lower than what is filed changes nothing.
func (s *Store) RaiseFloors(ctx context.Context, floors []Floor) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		for _, f := range floors {
			if err := raiseFloor(ctx, tx, f); err != nil {
				return err
			}
		}
		var count, epoch, until int64
		if err := tx.QueryRowContext(ctx, `SELECT count(*), coalesce(max(epoch), 0), coalesce(max(until), 0) FROM grant_floors`).Scan(&count, &epoch, &until); err != nil {
			return err
		}
		if count <= floorsKept {
			return nil
		}
		if err := raiseFloor(ctx, tx, Floor{Epoch: uint64(epoch), Until: fromMicros(until)}); err != nil {
			return err
		}
		_, err := tx.ExecContext(ctx, `DELETE FROM grant_floors WHERE project_id <> '' OR user_id <> ''`)
		return err
	})
}

func raiseFloor(ctx context.Context, tx *sql.Tx, f Floor) error {
	if f.Epoch > 1<<62 {
		return fault.New(fault.Invalid, "minimum_epoch %d is beyond what is counted", f.Epoch).With(fault.Detail{Field: "minimum_epoch", Rule: "must be at most 2^62"})
	}
	_, err := tx.ExecContext(ctx, `INSERT INTO grant_floors (project_id, user_id, epoch, until) VALUES (?, ?, ?, ?)
		ON CONFLICT (project_id, user_id) DO UPDATE SET epoch = max(epoch, excluded.epoch), until = max(until, excluded.until)`,
		f.ProjectID, f.UserID, int64(f.Epoch), micros(f.Until))
	return err
}

// Floors reads every floor that is filed.
func (s *Store) Floors(ctx context.Context) ([]Floor, error) {
	var out []Floor
	err := s.read(ctx, func(tx *sql.Tx) error {
		out = nil
		rows, err := tx.QueryContext(ctx, `SELECT project_id, user_id, epoch, until FROM grant_floors ORDER BY project_id, user_id`)
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			var f Floor
			var until int64
			if err := rows.Scan(&f.ProjectID, &f.UserID, &f.Epoch, &until); err != nil {
				return err
			}
			f.Until = fromMicros(until)
			out = append(out, f)
		}
		return rows.Err()
	})
	return out, err
}

// saveVoid files the attempts whose agents lose their certificates by a change,
// in its transaction.
func (s *Store) saveVoid(ctx context.Context, tx *sql.Tx, was, is *job.Job) error {
	until := micros(s.clock().Add(LongestCertificate + 2*trust.Skew))
	for _, r := range was.Replicas {
		for _, a := range r.Attempts {
			if !was.Certified(a) {
				continue
			}
			if _, now := is.Attempt(a.ID); now == nil || len(now.NodeKeys) == 0 || is.Certified(now) {
				continue
			}
			if _, err := tx.ExecContext(ctx, `INSERT OR IGNORE INTO void_certificates (attempt_id, until) VALUES (?, ?)`, a.ID, until); err != nil {
				return err
			}
		}
	}
	return nil
}

// VoidCertificates reads the attempts whose certificates are void and may still
// be in date, with the moment from which they are not.
func (s *Store) VoidCertificates(ctx context.Context) (map[string]time.Time, error) {
	out := make(map[string]time.Time)
	err := s.read(ctx, func(tx *sql.Tx) error {
		clear(out)
		rows, err := tx.QueryContext(ctx, `SELECT attempt_id, until FROM void_certificates`)
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			var id string
			var until int64
			if err := rows.Scan(&id, &until); err != nil {
				return err
			}
			out[id] = fromMicros(until)
		}
		return rows.Err()
	})
	return out, err
}
