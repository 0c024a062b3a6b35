package record

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"slices"

	"github.com/cosmicac/cosmicac/pkg/fault"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
)

// Jobs that are not settled are kept in memory, and read from there: every pass and
// every watcher asks for them. Open loads them; a change of one is staged by its
// transaction and taken over once that is committed, before the next one begins and
// before anybody is told. The folder is locked, so nobody else writes the file.

// load reads every job that is not settled into memory.
func (s *Store) load(ctx context.Context) error {
	var jobs []*job.Job
	err := s.read(ctx, func(tx *sql.Tx) (err error) {
		jobs, err = loadJobs(ctx, tx, `SELECT `+jobColumns+` FROM jobs WHERE settled = 0`)
		return err
	})
	for _, j := range jobs {
		s.live[j.ID] = j
	}
	return err
}

// write runs f in a transaction, and what it staged is kept.
func (s *Store) write(ctx context.Context, f func(*sql.Tx) error) error {
	select {
	case s.turn <- struct{}{}:
	case <-ctx.Done():
		return fault.Wrap(fault.KindOf(ctx.Err()), ctx.Err(), "wait to write to the job record")
	}
	defer func() { <-s.turn }()
	clear(s.staged)
	if err := s.db.Write(ctx, f); err != nil {
		return storage(err)
	}
	s.mu.Lock()
	for id, j := range s.staged {
		if j == nil || j.Settled() {
			delete(s.live, id)
		} else {
			s.live[id] = j
		}
	}
	s.mu.Unlock()
	if s.closed.Swap(false) {
		if err := s.loadQuarantined(ctx); err != nil {
			// What was written stands; the next write reads it again. Until then a
			// node is open that should not be.
			s.closed.Store(true)
		}
	}
	return nil
}

func (s *Store) kept(id string) *job.Job {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.live[id]
}

// known is loadOne for a reader, from memory where it is there.
func (s *Store) known(ctx context.Context, tx *sql.Tx, id string) (*job.Job, error) {
	if have := s.kept(id); have != nil {
		return have, nil
	}
	return loadOne(ctx, tx, id)
}

// current is loadOne for a transaction that writes: its own changes come first.
func (s *Store) current(ctx context.Context, tx *sql.Tx, id string) (*job.Job, error) {
	if j := s.staged[id]; j != nil {
		return j, nil
	}
	return s.known(ctx, tx, id)
}

// Job reads one job. A deleted one is not_found, with the time in the message
// for as long as its tombstone lasts. The job is shared with other readers: read only.
func (s *Store) Job(ctx context.Context, id string) (*job.Job, error) {
	if have := s.kept(id); have != nil {
		return have, nil
	}
	var j *job.Job
	err := s.read(ctx, func(tx *sql.Tx) (err error) {
		j, err = loadOne(ctx, tx, id)
		return err
	})
	return j, err
}

// Live lists the jobs that need work: not settled, oldest first. The jobs are
// shared with later calls: read only, clone before a change. They come from memory;
// the file is asked for a word, so that one that cannot be read is noticed by the
// caller.
func (s *Store) Live(ctx context.Context) ([]*job.Job, error) {
	err := s.read(ctx, func(tx *sql.Tx) error {
		var id string
		err := tx.QueryRowContext(ctx, `SELECT id FROM jobs WHERE settled = 0 LIMIT 1`).Scan(&id)
		if errors.Is(err, sql.ErrNoRows) {
			return nil
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	jobs := make([]*job.Job, 0, len(s.live))
	for _, j := range s.live {
		jobs = append(jobs, j)
	}
	s.mu.Unlock()
	slices.SortFunc(jobs, func(a, b *job.Job) int { return cmp.Compare(a.ID, b.ID) })
	return jobs, nil
}
