// Package record is the orchestrator's memory: rack entries, jobs with their
// replicas and attempts, events, idempotency keys, join-token hashes, what was
// revoked and tombstones, in one SQLite file. All SQL of the service is here.
//
// Guarantees: what a call returned without error survives the process. Changes
// of one job are serial. After a change is on disk, its job's id is published
// on the hub, so a watcher that reads then sees it. An error of the storage is
// returned as such (kind unavailable) and leaves everything as it was: it
// never picks a transition.
//
// It decides no state, and keeps nothing that a worker or an agent reports for
// its own sake.
package record

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"io/fs"
	"sync"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/store"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/notice"
)

//go:embed migrations/*.sql
var migrations embed.FS

// Bounds of what is kept.
const (
	// TombstoneLife is how long a deleted job is remembered.
	TombstoneLife = 30 * 24 * time.Hour
	// keyLife is how long an idempotency key outlives its job.
	keyLife = 7 * 24 * time.Hour
	// eventsKept bounds the history of one job.
	eventsKept = 1000
)

// Store is the open record. It is safe for concurrent use.
type Store struct {
	db    *store.Store
	hub   *notice.Hub
	clock func() time.Time

	mu   sync.Mutex
	live map[string]*job.Job // what Live returned last, by id
}

// Open opens or makes the record at path. Changes are published on hub.
func Open(ctx context.Context, path string, hub *notice.Hub, clock func() time.Time) (*Store, error) {
	files, err := fs.Sub(migrations, "migrations")
	if err != nil {
		return nil, fault.Wrap(fault.Internal, err, "read the migrations of the job record")
	}
	db, err := store.Open(ctx, path, files)
	if err != nil {
		return nil, err
	}
	return &Store{db: db, hub: hub, clock: clock}, nil
}

// Close closes the file; calls after it fail.
func (s *Store) Close() error { return s.db.Close() }

// Backup writes a consistent copy to path while the record is in use.
func (s *Store) Backup(ctx context.Context, path string) error { return s.db.Backup(ctx, path) }

func (s *Store) read(ctx context.Context, f func(*sql.Tx) error) error {
	return storage(s.db.Read(ctx, f))
}

func (s *Store) write(ctx context.Context, f func(*sql.Tx) error) error {
	return storage(s.db.Write(ctx, f))
}

// storage leaves errors that have a kind, which are the store's and the code's
// inside the transaction; what is left is a record that cannot be read.
func storage(err error) error {
	if err == nil {
		return nil
	}
	if known := (*fault.Error)(nil); errors.As(err, &known) {
		return err
	}
	return fault.Wrap(fault.Internal, err, "the job record holds something unreadable")
}

func micros(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMicro()
}

func fromMicros(n int64) time.Time {
	if n == 0 {
		return time.Time{}
	}
	return time.UnixMicro(n).UTC()
}

func flag(b bool) int {
	if b {
		return 1
	}
	return 0
}

// Prune forgets tombstones, idempotency keys and revocations whose time is over,
// and events beyond the bound. It is called now and then; skipping it loses nothing.
func (s *Store) Prune(ctx context.Context) error {
	now := s.clock()
	return s.write(ctx, func(tx *sql.Tx) error {
		if _, err := tx.ExecContext(ctx, `DELETE FROM tombstones WHERE deleted_at < ?`, micros(now.Add(-TombstoneLife))); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, `DELETE FROM idempotency WHERE created_at < ?
			AND NOT EXISTS (SELECT 1 FROM jobs WHERE jobs.id = idempotency.job_id)`, micros(now.Add(-keyLife))); err != nil {
			return err
		}
		for _, q := range []string{`DELETE FROM grant_floors WHERE until < ?`, `DELETE FROM void_certificates WHERE until < ?`} {
			if _, err := tx.ExecContext(ctx, q, micros(now)); err != nil {
				return err
			}
		}
		_, err := tx.ExecContext(ctx, `DELETE FROM events WHERE sequence IN (
			SELECT sequence FROM (SELECT sequence, row_number() OVER (PARTITION BY job_id ORDER BY sequence DESC) AS n FROM events)
			WHERE n > ?)`, eventsKept)
		return err
	})
}
