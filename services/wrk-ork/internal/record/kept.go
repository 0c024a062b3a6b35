package record

import (
	"context"
	"database/sql"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
)

// Jobs that are not settled are kept in memory as they were read or written last, by
// id. The file stays the truth: a kept job counts only when its revision is the one
// that the reader's transaction sees. One that is missing here is read.

func (s *Store) kept(id string) *job.Job {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.live[id]
}

// keep takes a version whose transaction was committed.
func (s *Store) keep(j *job.Job) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if have := s.live[j.ID]; have != nil && have.Revision < j.Revision {
		s.live[j.ID] = j
	}
}

// known is loadOne, from memory where that is the same.
func (s *Store) known(ctx context.Context, tx *sql.Tx, id string) (*job.Job, error) {
	if have := s.kept(id); have != nil {
		var revision uint64
		err := tx.QueryRowContext(ctx, `SELECT revision FROM jobs WHERE id = ?`, id).Scan(&revision)
		if err == nil && revision == have.Revision {
			return have, nil
		}
	}
	return loadOne(ctx, tx, id)
}
