package record

import (
	"context"
	"database/sql"
	"fmt"

	"google.golang.org/protobuf/proto"

	"github.com/cosmicac/cosmicac/pkg/fault"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
)

// former is a specification of before as a job's record keeps it, in protobuf.
type former struct {
	Revision uint64 `json:"revision"`
	Spec     []byte `json:"spec"`
}

func encodeSpec(s *orkv1.JobSpec) ([]byte, error) {
	return proto.MarshalOptions{Deterministic: true}.Marshal(s)
}

func formersOf(j *job.Job) []former {
	var out []former
	for _, f := range j.Former {
		// What was decoded, or checked at its update, can be encoded.
		text, err := encodeSpec(f.Spec)
		if err != nil {
			panic(fmt.Sprintf("specification %d of job %s cannot be encoded: %v", f.Revision, j.ID, err))
		}
		out = append(out, former{f.Revision, text})
	}
	return out
}

func (d *jobDoc) formers(j *job.Job) error {
	for _, f := range d.Former {
		spec := &orkv1.JobSpec{}
		if err := proto.Unmarshal(f.Spec, spec); err != nil {
			return fmt.Errorf("specification %d of job %s: %w", f.Revision, j.ID, err)
		}
		j.Former = append(j.Former, job.Former{Revision: f.Revision, Spec: spec})
	}
	return nil
}

// saveReplaced writes what an update changes beside replicas and attempts that are
// there: a new specification, and replicas that left.
func saveReplaced(ctx context.Context, tx *sql.Tx, was, is *job.Job) error {
	if is.SpecRevision != was.SpecRevision {
		text, err := encodeSpec(is.Spec)
		if err != nil {
			return fault.Wrap(fault.Internal, err, "encode the spec of job %s", is.ID)
		}
		if _, err := tx.ExecContext(ctx, `UPDATE jobs SET spec = ? WHERE id = ?`, text, is.ID); err != nil {
			return err
		}
	}
	stays := make(map[string]bool, len(is.Replicas))
	for _, r := range is.Replicas {
		stays[r.ID] = true
	}
	for _, r := range was.Replicas {
		if stays[r.ID] {
			continue
		}
		for _, a := range r.Attempts {
			if _, err := tx.ExecContext(ctx, `DELETE FROM join_tokens WHERE attempt_id = ?`, a.ID); err != nil {
				return err
			}
		}
		for _, q := range []string{`DELETE FROM attempts WHERE replica_id = ?`, `DELETE FROM replicas WHERE id = ?`} {
			if _, err := tx.ExecContext(ctx, q, r.ID); err != nil {
				return err
			}
		}
	}
	return nil
}

// once is the key of an update among its project's idempotency keys; those of creates
// never begin so long.
func once(jobID, key string) string { return "update of " + jobID + ": " + key }

// Updated reports whether an update was recorded under this key, and returns the job
// as it is now. Another request under the key is a conflict.
func (s *Store) Updated(ctx context.Context, id, key string, hash []byte) (j *job.Job, found bool, err error) {
	err = s.read(ctx, func(tx *sql.Tx) (err error) {
		j, found, err = updated(ctx, tx, id, key, hash)
		return err
	})
	return j, found, err
}

func updated(ctx context.Context, tx *sql.Tx, id, key string, hash []byte) (*job.Job, bool, error) {
	j, err := loadOne(ctx, tx, id)
	if err != nil || key == "" {
		return j, false, err
	}
	old, err := byKey(ctx, tx, j.Owner.GetProjectId(), once(id, key), hash)
	return j, old != nil, err
}

// UpdateOnce is Update under an idempotency key of the job (empty for none): the same
// key and request change the job once.
func (s *Store) UpdateOnce(ctx context.Context, id, key string, hash []byte, change Change) (is *job.Job, existed bool, err error) {
	changed := false
	err = s.write(ctx, func(tx *sql.Tx) (err error) {
		changed = false
		if is, existed, err = updated(ctx, tx, id, key, hash); err != nil || existed {
			return err
		}
		if key != "" {
			if _, err := tx.ExecContext(ctx, `INSERT INTO idempotency (project_id, key, job_id, spec_hash, created_at) VALUES (?, ?, ?, ?, ?)`,
				is.Owner.GetProjectId(), once(id, key), id, hash, micros(s.clock())); err != nil {
				return err
			}
		}
		is, changed, err = s.update(ctx, tx, id, change)
		return err
	})
	if err != nil {
		return nil, false, err
	}
	if changed {
		s.hub.Publish(id)
	}
	return is, existed, nil
}
