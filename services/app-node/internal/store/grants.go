package store

import (
	"context"
	"database/sql"
	"time"
)

// GrantFloor voids a user's grants for a project's jobs that were signed below
// an epoch. An empty ProjectID stands for every project.
type GrantFloor struct {
	UserID, ProjectID string
	Epoch             uint64
	RaisedAt          time.Time
}

// revokeGrants voids every grant that a user holds, in the projects that the user
// sees as u says. It belongs into the transaction that takes a right away, before
// the change: grants are signed under the epoch that was read with the right.
func revokeGrants(ctx context.Context, tx *sql.Tx, u User, now time.Time) error {
	if _, err := tx.ExecContext(ctx, "UPDATE grant_epoch SET value = value + 1"); err != nil {
		return err
	}
	_, err := tx.ExecContext(ctx, `INSERT INTO grant_floors (user_id, project_id, epoch, raised_at)
		SELECT ?1, p.id, value, ?2 FROM grant_epoch,
			(SELECT '' AS id WHERE ?3 UNION ALL SELECT project_id FROM memberships WHERE user_id = ?1 AND NOT ?3) p WHERE true
		ON CONFLICT (user_id, project_id) DO UPDATE SET epoch = excluded.epoch, raised_at = excluded.raised_at`,
		u.ID, milliseconds(now), u.Administrator)
	return err
}

func grantEpoch(ctx context.Context, tx *sql.Tx) (epoch uint64, err error) {
	return epoch, tx.QueryRowContext(ctx, "SELECT value FROM grant_epoch").Scan(&epoch)
}

// GrantFloors lists the floors above an epoch, lowest first, and the epoch that
// grants are signed under now.
func (s *Store) GrantFloors(ctx context.Context, above uint64) (floors []GrantFloor, epoch uint64, err error) {
	err = s.read(ctx, func(tx *sql.Tx) error {
		floors = nil
		if epoch, err = grantEpoch(ctx, tx); err != nil {
			return err
		}
		rows, err := tx.QueryContext(ctx, "SELECT user_id, project_id, epoch, raised_at FROM grant_floors WHERE epoch > ? ORDER BY epoch", int64(above))
		return each(rows, err, func(row scanner) error {
			var f GrantFloor
			var raised int64
			err := row.Scan(&f.UserID, &f.ProjectID, &f.Epoch, &raised)
			f.RaisedAt = at(raised)
			floors = append(floors, f)
			return err
		})
	})
	return floors, epoch, err
}

// LiftGrantEpoch moves the epoch up to at least this one. It never moves down.
func (s *Store) LiftGrantEpoch(ctx context.Context, epoch uint64) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, "UPDATE grant_epoch SET value = ? WHERE value < ?", int64(epoch), int64(epoch))
		return err
	})
}

// PruneGrantFloors forgets floors that were raised before a moment.
func (s *Store) PruneGrantFloors(ctx context.Context, before time.Time) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, "DELETE FROM grant_floors WHERE raised_at < ?", milliseconds(before))
		return err
	})
}

// EndSessions ends every sign-in of a user and voids every grant.
func (s *Store) EndSessions(ctx context.Context, userID string, now time.Time) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		u, err := userIn(ctx, tx, userID)
		if err != nil {
			return err
		}
		if err := revokeGrants(ctx, tx, u, now); err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, "DELETE FROM tokens WHERE user_id = ?", userID)
		return err
	})
}
