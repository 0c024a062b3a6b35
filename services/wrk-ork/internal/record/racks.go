package record

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"

	"google.golang.org/protobuf/proto"

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
	rows, err := tx.QueryContext(ctx, `SELECT id, location, key, allowed_models, maximum_gpus, cordoned, board_gpu_counts FROM racks `+tail, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var out []*orkv1.RackEntry
	for rows.Next() {
		e := &orkv1.RackEntry{}
		var models, counts []byte
		if err := rows.Scan(&e.Id, &e.Location, &e.Key, &models, &e.MaximumGpus, &e.Cordoned, &counts); err != nil {
			return nil, err
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

// PutRack makes or changes an entry. An id keeps its key, and a key its id.
func (s *Store) PutRack(ctx context.Context, e *orkv1.RackEntry) error {
	models, err := json.Marshal(e.AllowedModels)
	if err != nil {
		return fault.Wrap(fault.Internal, err, "encode the models of rack %s", e.Id)
	}
	counts, err := json.Marshal(e.BoardGpuCounts)
	if err != nil {
		return fault.Wrap(fault.Internal, err, "encode the board counts of rack %s", e.Id)
	}
	return s.write(ctx, func(tx *sql.Tx) error {
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
		_, err = tx.ExecContext(ctx, `INSERT INTO racks (id, location, key, allowed_models, maximum_gpus, cordoned, created_at, board_gpu_counts)
			VALUES (?, ?, ?, ?, ?, ?, ?, ?)
			ON CONFLICT (id) DO UPDATE SET location = excluded.location, allowed_models = excluded.allowed_models,
				maximum_gpus = excluded.maximum_gpus, cordoned = excluded.cordoned, board_gpu_counts = excluded.board_gpu_counts`,
			e.Id, e.Location, e.Key, string(models), e.MaximumGpus, flag(e.Cordoned), micros(s.clock()), string(counts))
		return err
	})
}

// CordonRack closes or opens an entry for new plans.
func (s *Store) CordonRack(ctx context.Context, id string, cordoned bool) (*orkv1.RackEntry, error) {
	var out *orkv1.RackEntry
	err := s.write(ctx, func(tx *sql.Tx) error {
		e, err := loadRack(ctx, tx, id)
		if err != nil {
			return err
		}
		out = proto.Clone(e).(*orkv1.RackEntry)
		out.Cordoned = cordoned
		_, err = tx.ExecContext(ctx, `UPDATE racks SET cordoned = ? WHERE id = ?`, flag(cordoned), id)
		return err
	})
	return out, err
}

// ForgetRack removes an entry. It is refused while any attempt was given the
// rack and is not gone, and while a job that is not deleted may keep its root disk
// there: nobody else could remove it. A plan made at the same moment finds no entry.
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
		_, err := tx.ExecContext(ctx, `DELETE FROM racks WHERE id = ?`, id)
		return err
	})
}

// notFound tells an empty row from a failing store.
func notFound(err error) bool { return errors.Is(err, sql.ErrNoRows) }
