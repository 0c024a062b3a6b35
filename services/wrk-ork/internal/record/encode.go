package record

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
)

// jobDoc is the JSON of a job's row beside its columns.
type jobDoc struct {
	Intent            job.Intent      `json:"intent"`
	IntentReason      orkv1.Reason    `json:"intent_reason,omitempty"`
	IntentMessage     string          `json:"intent_message,omitempty"`
	Price             *price          `json:"price,omitempty"`
	FormerGPUTime     time.Duration   `json:"former_gpu_time,omitempty"`
	Actor             string          `json:"actor,omitempty"`
	EndpointID        string          `json:"endpoint_id,omitempty"`
	SpecRevision      uint64          `json:"spec_revision,omitempty"`
	Former            []former        `json:"former,omitempty"`
	Update            *job.Update     `json:"update,omitempty"`
	Reason            orkv1.Reason    `json:"reason,omitempty"`
	Message           string          `json:"message,omitempty"`
	Conditions        []job.Condition `json:"conditions,omitempty"`
	Touched           []string        `json:"touched,omitempty"`
	CreatedAt         time.Time       `json:"created_at"`
	UpdatedAt         time.Time       `json:"updated_at"`
	DeleteRequestedAt time.Time       `json:"delete_requested_at,omitzero"`
}

type price struct {
	CentsPerGPUHour uint64 `json:"cents_per_gpu_hour"`
	Currency        string `json:"currency,omitempty"`
}

func docOf(j *job.Job) jobDoc {
	d := jobDoc{
		Intent: j.Intent, IntentReason: j.IntentReason, IntentMessage: j.IntentMessage, Actor: j.Actor, EndpointID: j.EndpointID,
		FormerGPUTime: j.FormerGPUTime, SpecRevision: j.SpecRevision, Former: formersOf(j), Update: j.Update,
		Reason: j.Reason, Message: j.Message, Touched: j.Touched,
		CreatedAt: j.CreatedAt.UTC(), UpdatedAt: j.UpdatedAt.UTC(), DeleteRequestedAt: j.DeleteRequestedAt.UTC(),
	}
	if j.Price != nil {
		d.Price = &price{j.Price.CentsPerGpuHour, j.Price.Currency}
	}
	for _, c := range j.Conditions {
		c.Since = c.Since.UTC()
		d.Conditions = append(d.Conditions, c)
	}
	return d
}

func encode(v any) ([]byte, error) {
	text, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("encode %T: %w", v, err)
	}
	return text, nil
}

// encodeAttempt writes times in UTC without a monotonic reading, so that equal
// attempts have equal text.
func encodeAttempt(a *job.Attempt) ([]byte, error) {
	c := *a
	for _, t := range []*time.Time{
		&c.NotBefore, &c.CreatedAt, &c.ClaimedAt, &c.UpAt, &c.HelloAt, &c.RunningAt, &c.StoppingAt, &c.EndedAt,
		&c.GoneAt, &c.Unreachable.Since, &c.Draining.Since, &c.Idle.Since, &c.Abandoned.Since, &c.DiskLost.Since,
	} {
		*t = t.UTC().Round(0)
	}
	return encode(&c)
}

// Same reports whether two versions of a job would be stored alike, the time
// of change and revision apart.
func Same(a, b *job.Job) bool {
	if a.State != b.State || len(a.Replicas) != len(b.Replicas) {
		return false
	}
	da, db := docOf(a), docOf(b)
	db.UpdatedAt = da.UpdatedAt
	ta, errA := encode(da)
	tb, errB := encode(db)
	if errA != nil || errB != nil || !bytes.Equal(ta, tb) {
		return false
	}
	for i, r := range a.Replicas {
		o := b.Replicas[i]
		if r.ID != o.ID || r.Failures != o.Failures || r.StartFailures != o.StartFailures || len(r.Attempts) != len(o.Attempts) {
			return false
		}
		for k := range r.Attempts {
			if sameAttempt(r.Attempts[k], o.Attempts[k]) {
				continue
			}
			ta, errA := encodeAttempt(r.Attempts[k])
			tb, errB := encodeAttempt(o.Attempts[k])
			if errA != nil || errB != nil || !bytes.Equal(ta, tb) {
				return false
			}
		}
	}
	return true
}

// sameAttempt reports quickly that two attempts are stored alike; false says nothing.
func sameAttempt(a, b *job.Attempt) bool {
	if !slices.EqualFunc(a.Nodes, b.Nodes, func(m, n *orkv1.AttemptNode) bool { return proto.Equal(m, n) }) {
		return false
	}
	was, is := *a, *b
	was.Nodes, is.Nodes = nil, nil
	return reflect.DeepEqual(&was, &is)
}

const jobColumns = `id, project_id, user_id, state, revision, spec, doc`

// scanJob reads one row of jobColumns, without replicas.
func scanJob(scan func(...any) error) (*job.Job, error) {
	j := &job.Job{Owner: &orkv1.Owner{}, Spec: &orkv1.JobSpec{}}
	var spec, text []byte
	if err := scan(&j.ID, &j.Owner.ProjectId, &j.Owner.UserId, &j.State, &j.Revision, &spec, &text); err != nil {
		return nil, err
	}
	if err := proto.Unmarshal(spec, j.Spec); err != nil {
		return nil, fmt.Errorf("spec of job %s: %w", j.ID, err)
	}
	var d jobDoc
	if err := json.Unmarshal(text, &d); err != nil {
		return nil, fmt.Errorf("record of job %s: %w", j.ID, err)
	}
	j.Intent, j.IntentReason, j.IntentMessage, j.Actor, j.EndpointID = d.Intent, d.IntentReason, d.IntentMessage, d.Actor, d.EndpointID
	j.FormerGPUTime, j.SpecRevision, j.Update = d.FormerGPUTime, max(d.SpecRevision, 1), d.Update
	if err := d.formers(j); err != nil {
		return nil, err
	}
	if d.Price != nil {
		j.Price = &orkv1.Price{CentsPerGpuHour: d.Price.CentsPerGPUHour, Currency: d.Price.Currency}
	}
	j.Reason, j.Message, j.Conditions, j.Touched = d.Reason, d.Message, d.Conditions, d.Touched
	j.CreatedAt, j.UpdatedAt, j.DeleteRequestedAt = d.CreatedAt, d.UpdatedAt, d.DeleteRequestedAt
	return j, nil
}

// loadJobs runs a query of jobColumns and completes each job.
func loadJobs(ctx context.Context, tx *sql.Tx, query string, args ...any) ([]*job.Job, error) {
	rows, err := tx.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var jobs []*job.Job
	for rows.Next() {
		j, err := scanJob(rows.Scan)
		if err != nil {
			return nil, err
		}
		jobs = append(jobs, j)
	}
	if err := rows.Err(); err != nil {
		return nil, err
	}
	if err := rows.Close(); err != nil {
		return nil, err
	}
	for _, j := range jobs {
		if err := loadReplicas(ctx, tx, j); err != nil {
			return nil, err
		}
		if err := loadJobVolumes(ctx, tx, j); err != nil {
			return nil, err
		}
	}
	return jobs, nil
}

func loadReplicas(ctx context.Context, tx *sql.Tx, j *job.Job) error {
	rows, err := tx.QueryContext(ctx, `SELECT id, idx, failures, start_failures FROM replicas WHERE job_id = ? ORDER BY idx`, j.ID)
	if err != nil {
		return err
	}
	defer rows.Close()
	byID := make(map[string]*job.Replica)
	for rows.Next() {
		r := &job.Replica{}
		if err := rows.Scan(&r.ID, &r.Index, &r.Failures, &r.StartFailures); err != nil {
			return err
		}
		byID[r.ID] = r
		j.Replicas = append(j.Replicas, r)
	}
	if err := rows.Err(); err != nil {
		return err
	}
	if err := rows.Close(); err != nil {
		return err
	}
	attempts, err := tx.QueryContext(ctx, `SELECT replica_id, doc FROM attempts WHERE job_id = ? ORDER BY number`, j.ID)
	if err != nil {
		return err
	}
	defer attempts.Close()
	for attempts.Next() {
		var replica string
		var text []byte
		if err := attempts.Scan(&replica, &text); err != nil {
			return err
		}
		a := &job.Attempt{}
		if err := json.Unmarshal(text, a); err != nil {
			return fmt.Errorf("attempt of job %s: %w", j.ID, err)
		}
		r := byID[replica]
		if r == nil {
			return fmt.Errorf("attempt %s of job %s names no replica", a.ID, j.ID)
		}
		r.Attempts = append(r.Attempts, a)
	}
	if err := attempts.Err(); err != nil {
		return err
	}
	for _, r := range j.Replicas {
		if len(r.Attempts) == 0 {
			return fmt.Errorf("replica %s of job %s has no attempt", r.ID, j.ID)
		}
	}
	return nil
}

// saveJob writes a job over what is stored of it.
func saveJob(ctx context.Context, tx *sql.Tx, j *job.Job) error {
	text, err := encode(docOf(j))
	if err != nil {
		return err
	}
	if _, err := tx.ExecContext(ctx, `UPDATE jobs SET state = ?, settled = ?, revision = ?, doc = ? WHERE id = ?`,
		int(j.State), flag(j.Settled()), j.Revision, string(text), j.ID); err != nil {
		return err
	}
	for _, r := range j.Replicas {
		if _, err := tx.ExecContext(ctx, `INSERT INTO replicas (id, job_id, idx, failures, start_failures) VALUES (?, ?, ?, ?, ?)
			ON CONFLICT (id) DO UPDATE SET failures = excluded.failures, start_failures = excluded.start_failures`,
			r.ID, j.ID, r.Index, r.Failures, r.StartFailures); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, `DELETE FROM attempts WHERE replica_id = ? AND number < ?`, r.ID, r.Attempts[0].Number); err != nil {
			return err
		}
		for _, a := range r.Attempts {
			if err := saveAttempt(ctx, tx, j.ID, r.ID, a); err != nil {
				return err
			}
		}
	}
	return nil
}

func saveAttempt(ctx context.Context, tx *sql.Tx, jobID, replicaID string, a *job.Attempt) error {
	text, err := encodeAttempt(a)
	if err != nil {
		return err
	}
	var outcome any
	if job.Ended(a.State) {
		outcome = int(a.State)
	}
	// Unchanged rows are left alone.
	_, err = tx.ExecContext(ctx, `INSERT INTO attempts (id, job_id, replica_id, number, state, outcome, rack_id, gone, doc)
		VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
		ON CONFLICT (id) DO UPDATE SET state = excluded.state, outcome = excluded.outcome, rack_id = excluded.rack_id,
			gone = excluded.gone, doc = excluded.doc WHERE doc <> excluded.doc`,
		a.ID, jobID, replicaID, a.Number, int(a.State), outcome, a.RackID, flag(a.Gone), string(text))
	return err
}
