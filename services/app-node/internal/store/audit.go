package store

import (
	"context"
	"database/sql"
	"time"
)

// AuditEntry says who did what, when, and how it ended. It never holds a secret
// or the body of a request.
type AuditEntry struct {
	Sequence int64
	Time     time.Time
	// Actor is a user id, "bootstrap", or empty for nobody known.
	Actor  string
	Action string
	// Target is the id of what was acted on.
	Target string
	// Outcome is "ok" or a kind of pkg/fault.
	Outcome string
	Address string
}

// AddAudit appends an entry.
func (s *Store) AddAudit(ctx context.Context, e AuditEntry) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, "INSERT INTO audit (time, actor, action, target, outcome, address) VALUES (?, ?, ?, ?, ?, ?)",
			milliseconds(e.Time), e.Actor, e.Action, e.Target, e.Outcome, e.Address)
		return err
	})
}

// Audit lists up to `limit` entries older than `before` (0 for the newest), newest first.
func (s *Store) Audit(ctx context.Context, before int64, limit int) (entries []AuditEntry, err error) {
	err = s.read(ctx, func(tx *sql.Tx) error {
		rows, err := tx.QueryContext(ctx, `SELECT sequence, time, actor, action, target, outcome, address FROM audit
			WHERE ? = 0 OR sequence < ? ORDER BY sequence DESC LIMIT ?`, before, before, limit)
		return each(rows, err, func(row scanner) error {
			var e AuditEntry
			var ms int64
			err := row.Scan(&e.Sequence, &ms, &e.Actor, &e.Action, &e.Target, &e.Outcome, &e.Address)
			e.Time = at(ms)
			entries = append(entries, e)
			return err
		})
	})
	return entries, err
}

// PruneAudit removes entries older than `before`.
func (s *Store) PruneAudit(ctx context.Context, before time.Time) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, "DELETE FROM audit WHERE time < ?", milliseconds(before))
		return err
	})
}
