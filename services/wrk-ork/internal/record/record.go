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
	"sync/atomic"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/store"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/notice"
)

//go:embed migrations/*.sql
var migrations embed.FS

// Policy is how long what is kept, and when a node is closed to placement.
type Policy struct {
	// Tombstones is how long a deleted job is remembered.
	Tombstones time.Duration
	// IdempotencyKeys is how long a key outlives its job.
	IdempotencyKeys time.Duration
	// Events is how long an event is kept, EventsPerJob how many of one job are.
	Events       time.Duration
	EventsPerJob int
	// QuarantineFailures is how many attempts a node must fail to start within
	// QuarantineWindow before it is closed for their GPU model.
	QuarantineFailures int
	QuarantineWindow   time.Duration
	// QuarantineMostPercent is the share of a rack's nodes, one at least, that may
	// stand closed so without anybody having looked: when more of them fail, the
	// cause is not theirs.
	QuarantineMostPercent int
	// Nodes says how many nodes a rack has, 0 for not known. It may be nil.
	Nodes func(rackID string) int
}

// DefaultPolicy is the documented default.
func DefaultPolicy() Policy {
	return Policy{
		Tombstones: 30 * 24 * time.Hour, IdempotencyKeys: 7 * 24 * time.Hour, Events: 90 * 24 * time.Hour, EventsPerJob: 1000,
		QuarantineFailures: 2, QuarantineWindow: 24 * time.Hour, QuarantineMostPercent: 25,
	}
}

// Store is the open record. It is safe for concurrent use.
type Store struct {
	db    *store.Store
	hub   *notice.Hub
	clock func() time.Time

	policy Policy
	closed atomic.Bool // a quarantine was written that the memory does not know

	turn   chan struct{}       // holds the turn of the one who writes
	staged map[string]*job.Job // the writer's: what its transaction made of jobs; nil for a removed one

	mu          sync.Mutex
	live        map[string]*job.Job // by id
	quarantined map[string][]*orkv1.Quarantine
	failing     map[string]failing // by rack
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
	s := &Store{
		db: db, hub: hub, clock: clock, policy: DefaultPolicy(),
		turn: make(chan struct{}, 1), staged: make(map[string]*job.Job), live: make(map[string]*job.Job),
	}
	if err := errors.Join(s.load(ctx), s.loadQuarantined(ctx)); err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return s, nil
}

// Keep sets the policy; call it before the store is used by several.
func (s *Store) Keep(p Policy) { s.policy = p }

// Close closes the file; calls after it fail.
func (s *Store) Close() error { return s.db.Close() }

// Backup writes a consistent copy to path while the record is in use.
func (s *Store) Backup(ctx context.Context, path string) error { return s.db.Backup(ctx, path) }

func (s *Store) read(ctx context.Context, f func(*sql.Tx) error) error {
	return storage(s.db.Read(ctx, f))
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
// and events that are old or beyond the bound. It is called now and then; skipping it loses nothing.
func (s *Store) Prune(ctx context.Context) error {
	now := s.clock()
	return s.write(ctx, func(tx *sql.Tx) error {
		if _, err := tx.ExecContext(ctx, `DELETE FROM tombstones WHERE deleted_at < ?`, micros(now.Add(-s.policy.Tombstones))); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, `DELETE FROM idempotency WHERE created_at < ?
			AND NOT EXISTS (SELECT 1 FROM jobs WHERE jobs.id = idempotency.job_id)`, micros(now.Add(-s.policy.IdempotencyKeys))); err != nil {
			return err
		}
		for _, q := range []string{`DELETE FROM grant_floors WHERE until < ?`, `DELETE FROM void_certificates WHERE until < ?`} {
			if _, err := tx.ExecContext(ctx, q, micros(now)); err != nil {
				return err
			}
		}
		if err := s.pruneStartFailures(ctx, tx, now); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, `DELETE FROM events WHERE time < ?`, micros(now.Add(-s.policy.Events))); err != nil {
			return err
		}
		_, err := tx.ExecContext(ctx, `DELETE FROM events WHERE sequence IN (
			SELECT sequence FROM (SELECT sequence, row_number() OVER (PARTITION BY job_id ORDER BY sequence DESC) AS n FROM events)
			WHERE n > ?)`, s.policy.EventsPerJob)
		return err
	})
}
