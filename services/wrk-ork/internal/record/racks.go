package record

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cosmicac/cosmicac/pkg/fault"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

// Racks reads every entry, by id.
func (s *Store) Racks(ctx context.Context) ([]*orkv1.RackEntry, error) {
	var out []*orkv1.RackEntry
	err := s.read(ctx, func(tx *sql.Tx) (err error) {
		out, err = loadRacks(ctx, tx, `ORDER BY id`)
		return err
	})
	return out, err
}

// Rack reads one entry; not_found when there is none.
func (s *Store) Rack(ctx context.Context, id string) (*orkv1.RackEntry, error) {
	var out *orkv1.RackEntry
	err := s.read(ctx, func(tx *sql.Tx) (err error) {
		out, err = loadRack(ctx, tx, id)
		return err
	})
	return out, err
}

func loadRack(ctx context.Context, tx *sql.Tx, id string) (*orkv1.RackEntry, error) {
	racks, err := loadRacks(ctx, tx, `WHERE id = ?`, id)
	if err != nil {
		return nil, err
	}
	if len(racks) == 0 {
		return nil, fault.New(fault.NotFound, "no rack has the id %.64q", id)
	}
	return racks[0], nil
}

func loadRacks(ctx context.Context, tx *sql.Tx, tail string, args ...any) ([]*orkv1.RackEntry, error) {
	rows, err := tx.QueryContext(ctx, `SELECT id, location, key, allowed_models, maximum_gpus, cordoned, board_gpu_counts, type, drain_since, drain_deadline, drain_actor FROM racks `+tail, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var out []*orkv1.RackEntry
	for rows.Next() {
		e := &orkv1.RackEntry{}
		var models, counts []byte
		var since, deadline int64
		if err := rows.Scan(&e.Id, &e.Location, &e.Key, &models, &e.MaximumGpus, &e.Cordoned, &counts, &e.Type, &since, &deadline, &e.DrainActor); err != nil {
			return nil, err
		}
		if since > 0 {
			e.DrainSince, e.DrainDeadline = timestamppb.New(fromMicros(since)), timestamppb.New(fromMicros(deadline))
		} else {
			e.DrainActor = ""
		}
		if err := json.Unmarshal(models, &e.AllowedModels); err != nil {
			return nil, fmt.Errorf("allowed models of rack %s: %w", e.Id, err)
		}
		if err := json.Unmarshal(counts, &e.BoardGpuCounts); err != nil {
			return nil, fmt.Errorf("board counts of rack %s: %w", e.Id, err)
		}
		out = append(out, e)
	}
	return out, rows.Err()
}

// PutRack makes or changes an entry and returns it as it is recorded. An id keeps
// its key, and a key its id, also over a removal that left something. Whether it
// is drained stays as it is; opening it ends that.
func (s *Store) PutRack(ctx context.Context, e *orkv1.RackEntry) (*orkv1.RackEntry, error) {
	var out *orkv1.RackEntry
	err := s.write(ctx, func(tx *sql.Tx) (err error) {
		if err := putRack(ctx, tx, e, s.clock()); err != nil {
			return err
		}
		out, err = loadRack(ctx, tx, e.Id)
		return err
	})
	return out, err
}

func putRack(ctx context.Context, tx *sql.Tx, e *orkv1.RackEntry, now time.Time) error {
	models, err := json.Marshal(e.AllowedModels)
	if err != nil {
		return fault.Wrap(fault.Internal, err, "encode the models of rack %s", e.Id)
	}
	counts, err := json.Marshal(e.BoardGpuCounts)
	if err != nil {
		return fault.Wrap(fault.Internal, err, "encode the board counts of rack %s", e.Id)
	}
	same, err := loadRacks(ctx, tx, `WHERE id = ? OR key = ?`, e.Id, e.Key)
	if err != nil {
		return err
	}
	for _, old := range same {
		switch {
		case old.Id == e.Id && old.Key != e.Key:
			return fault.New(fault.Conflict, "rack %s belongs to another worker's key; choose another id, or remove that rack first", e.Id).
				With(fault.Detail{Field: "id", Rule: "ERR_RACK_ID_INVALID"})
		case old.Id != e.Id:
			return fault.New(fault.Conflict, "this worker's key is the key of rack %s already", old.Id).
				With(fault.Detail{Field: "key", Rule: "ERR_RACK_INFO_RPC_PUBKEY_INVALID"})
		}
	}
	if err := checkReturn(ctx, tx, e); err != nil {
		return err
	}
	_, err = tx.ExecContext(ctx, `INSERT INTO racks (id, location, key, allowed_models, maximum_gpus, cordoned, created_at, board_gpu_counts, type)
			VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
			ON CONFLICT (id) DO UPDATE SET location = excluded.location, allowed_models = excluded.allowed_models,
				maximum_gpus = excluded.maximum_gpus, cordoned = excluded.cordoned, board_gpu_counts = excluded.board_gpu_counts,
				type = excluded.type, drain_since = CASE excluded.cordoned WHEN 0 THEN 0 ELSE drain_since END`,
		e.Id, e.Location, e.Key, string(models), e.MaximumGpus, flag(e.Cordoned), micros(now), string(counts), e.Type)
	return err
}

// CordonRack closes or opens an entry for new plans. Opening it ends its drain.
func (s *Store) CordonRack(ctx context.Context, id string, cordoned bool) (*orkv1.RackEntry, error) {
	return s.changeRack(ctx, id, `UPDATE racks SET cordoned = ?1, drain_since = CASE ?1 WHEN 0 THEN 0 ELSE drain_since END WHERE id = ?2`, flag(cordoned), id)
}

// DrainRack closes an entry until it is opened again, and keeps from when and
// until when it is drained and by whom. Asking again moves the deadline.
func (s *Store) DrainRack(ctx context.Context, id string, deadline time.Time, actor string) (*orkv1.RackEntry, error) {
	now := micros(s.clock())
	return s.changeRack(ctx, id, `UPDATE racks SET cordoned = 1, drain_since = CASE drain_since WHEN 0 THEN ? ELSE drain_since END,
		drain_deadline = ?, drain_actor = ? WHERE id = ?`, now, micros(deadline), actor, id)
}

func (s *Store) changeRack(ctx context.Context, id, query string, args ...any) (*orkv1.RackEntry, error) {
	var out *orkv1.RackEntry
	err := s.write(ctx, func(tx *sql.Tx) (err error) {
		if _, err := tx.ExecContext(ctx, query, args...); err != nil {
			return err
		}
		out, err = loadRack(ctx, tx, id)
		return err
	})
	return out, err
}

// ForgetRack removes an entry. It is refused while any attempt was given the
// rack and is not gone, and while a job that is not deleted may keep its root disk
// there, and while volumes are: nobody else could remove them. A plan made at the same moment finds no entry.
func (s *Store) ForgetRack(ctx context.Context, id string) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		if _, err := loadRack(ctx, tx, id); err != nil {
			return err
		}
		var live int
		var one sql.NullString
		if err := tx.QueryRowContext(ctx, `SELECT count(*), min(job_id) FROM attempts WHERE rack_id = ? AND gone = 0`, id).Scan(&live, &one); err != nil {
			return err
		}
		if live > 0 {
			return fault.New(fault.FailedPrecondition, "rack %s still holds %d attempts (job %s is one of theirs); stop or delete the jobs first", id, live, one.String)
		}
		if err := tx.QueryRowContext(ctx, `SELECT count(DISTINCT job_id), min(job_id) FROM attempts WHERE rack_id = ?`, id).Scan(&live, &one); err != nil {
			return err
		}
		if live > 0 {
			return fault.New(fault.FailedPrecondition, "rack %s may still hold the root disks of %d ended jobs (%s is one of them); delete the jobs first", id, live, one.String)
		}
		if err := keepsVolumes(ctx, tx, id); err != nil {
			return err
		}
		for _, q := range []string{`DELETE FROM quarantines WHERE rack_id = ?`, `DELETE FROM start_failures WHERE rack_id = ?`, `DELETE FROM racks WHERE id = ?`} {
			if _, err := tx.ExecContext(ctx, q, id); err != nil {
				return err
			}
		}
		s.closed.Store(true)
		return nil
	})
}

// notFound tells an empty row from a failing store.
func notFound(err error) bool { return errors.Is(err, sql.ErrNoRows) }
