package record

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cosmicac/cosmicac/pkg/fault"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
)

// Create records a new job under its project's idempotency key (empty for
// none). When the key was used before for an equal spec, the job of that time
// is returned and existed is true; for another spec it is a conflict.
func (s *Store) Create(ctx context.Context, j *job.Job, events []job.Event, key string, specHash []byte) (made *job.Job, existed bool, err error) {
	spec, err := proto.MarshalOptions{Deterministic: true}.Marshal(j.Spec)
	if err != nil {
		return nil, false, fault.Wrap(fault.Internal, err, "encode the spec of job %s", j.ID)
	}
	err = s.write(ctx, func(tx *sql.Tx) error {
		made, existed = nil, false
		if key != "" {
			old, err := byKey(ctx, tx, j.Owner.ProjectId, key, specHash)
			if err != nil {
				return err
			}
			if old != nil {
				made, existed = old, true
				return nil
			}
			if _, err := tx.ExecContext(ctx, `INSERT INTO idempotency (project_id, key, job_id, spec_hash, created_at) VALUES (?, ?, ?, ?, ?)`,
				j.Owner.ProjectId, key, j.ID, specHash, micros(s.clock())); err != nil {
				return err
			}
		}
		j.Revision = 1
		if _, err := tx.ExecContext(ctx, `INSERT INTO jobs (id, project_id, user_id, kind, name, state, settled, revision, spec, doc)
			VALUES (?, ?, ?, ?, ?, 0, 0, 1, ?, '{}')`,
			j.ID, j.Owner.ProjectId, j.Owner.UserId, int(j.Spec.Kind), j.Spec.Name, spec); err != nil {
			return err
		}
		if err := attachAsked(ctx, tx, j); err != nil {
			return err
		}
		if err := saveJob(ctx, tx, j); err != nil {
			return err
		}
		if err := s.saveEvents(ctx, tx, j.ID, events); err != nil {
			return err
		}
		made, s.staged[j.ID] = j, j
		return nil
	})
	if err != nil {
		return nil, false, err
	}
	if !existed {
		s.hub.Publish(j.ID)
	}
	return made, existed, nil
}

func byKey(ctx context.Context, tx *sql.Tx, project, key string, specHash []byte) (*job.Job, error) {
	var id string
	var hash []byte
	err := tx.QueryRowContext(ctx, `SELECT job_id, spec_hash FROM idempotency WHERE project_id = ? AND key = ?`, project, key).Scan(&id, &hash)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return nil, nil
	case err != nil:
		return nil, err
	case !bytes.Equal(hash, specHash):
		return nil, fault.New(fault.Conflict, "this idempotency key was used for job %s with another specification; use a new key", id)
	}
	old, err := loadOne(ctx, tx, id)
	if fault.KindOf(err) == fault.NotFound {
		return nil, fault.New(fault.Conflict, "this idempotency key was used for job %s, which was deleted; use a new key", id)
	}
	return old, err
}

// loadOne reads a job, or says when it was deleted.
func loadOne(ctx context.Context, tx *sql.Tx, id string) (*job.Job, error) {
	jobs, err := loadJobs(ctx, tx, `SELECT `+jobColumns+` FROM jobs WHERE id = ?`, id)
	if err != nil {
		return nil, err
	}
	if len(jobs) == 1 {
		return jobs[0], nil
	}
	var deleted int64
	err = tx.QueryRowContext(ctx, `SELECT deleted_at FROM tombstones WHERE job_id = ?`, id).Scan(&deleted)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, fault.New(fault.NotFound, "no job has the id %q", id)
	}
	if err != nil {
		return nil, err
	}
	return nil, fault.New(fault.NotFound, "job %s was deleted at %s", id, fromMicros(deleted).Format(time.RFC3339))
}

// Query filters a list. Empty fields do not filter.
type Query struct {
	ProjectIDs []string
	States     []orkv1.State
	Kind       orkv1.JobKind
	Name       string
	// Before is the id after which the page starts, newest first.
	Before string
	Limit  int
}

// List reads one page, newest first, and whether there is more.
func (s *Store) List(ctx context.Context, q Query) (jobs []*job.Job, more bool, err error) {
	var where []string
	var args []any
	in := func(column string, n int) string {
		return column + " IN (" + strings.TrimSuffix(strings.Repeat("?,", n), ",") + ")"
	}
	if len(q.ProjectIDs) > 0 {
		where = append(where, in("project_id", len(q.ProjectIDs)))
		for _, p := range q.ProjectIDs {
			args = append(args, p)
		}
	}
	if len(q.States) > 0 {
		where = append(where, in("state", len(q.States)))
		for _, st := range q.States {
			args = append(args, int(st))
		}
	}
	if q.Kind != 0 {
		where, args = append(where, "kind = ?"), append(args, int(q.Kind))
	}
	if q.Name != "" {
		where, args = append(where, "name = ?"), append(args, q.Name)
	}
	if q.Before != "" {
		where, args = append(where, "id < ?"), append(args, q.Before)
	}
	query := `SELECT ` + jobColumns + ` FROM jobs`
	if len(where) > 0 {
		query += ` WHERE ` + strings.Join(where, " AND ")
	}
	query += fmt.Sprintf(` ORDER BY id DESC LIMIT %d`, q.Limit+1)
	err = s.read(ctx, func(tx *sql.Tx) (err error) {
		jobs, err = loadJobs(ctx, tx, query, args...)
		return err
	})
	if err != nil {
		return nil, false, err
	}
	if len(jobs) > q.Limit {
		return jobs[:q.Limit], true, nil
	}
	return jobs, false, nil
}

// All reads every job of the projects (all when empty), oldest first.
func (s *Store) All(ctx context.Context, projects []string) ([]*job.Job, error) {
	var out []*job.Job
	after := Query{ProjectIDs: projects, Limit: 500}
	for {
		page, more, err := s.List(ctx, after)
		if err != nil {
			return nil, err
		}
		out = append(out, page...)
		if !more {
			break
		}
		after.Before = page[len(page)-1].ID
	}
	for i, k := 0, len(out)-1; i < k; i, k = i+1, k-1 {
		out[i], out[k] = out[k], out[i]
	}
	return out, nil
}

// Change is what a function makes of a job: the new version and its events.
type Change func(*job.Job) (*job.Job, []job.Event, error)

// Update changes one job in a transaction of its own. An error of the
// function, or a version that is the Same, changes nothing.
func (s *Store) Update(ctx context.Context, id string, change Change) (*job.Job, error) {
	var is *job.Job
	changed := false
	err := s.write(ctx, func(tx *sql.Tx) (err error) {
		changed = false
		is, changed, err = s.update(ctx, tx, id, change)
		return err
	})
	if err != nil {
		return nil, err
	}
	if changed {
		s.hub.Publish(id)
	}
	return is, nil
}

func (s *Store) update(ctx context.Context, tx *sql.Tx, id string, change Change) (*job.Job, bool, error) {
	was, err := s.current(ctx, tx, id)
	if err != nil {
		return nil, false, err
	}
	is, events, err := change(was.Clone())
	if err != nil {
		return nil, false, err
	}
	if Same(was, is) && len(events) == 0 {
		return was, false, nil
	}
	is.Revision = was.Revision + 1
	is.UpdatedAt = s.clock()
	s.staged[id] = is
	if err := saveJob(ctx, tx, is); err != nil {
		return nil, false, err
	}
	if err := saveReplaced(ctx, tx, was, is); err != nil {
		return nil, false, err
	}
	if err := s.saveVoid(ctx, tx, was, is); err != nil {
		return nil, false, err
	}
	if err := s.saveStartFailures(ctx, tx, was, is); err != nil {
		return nil, false, err
	}
	return is, true, s.saveEvents(ctx, tx, id, events)
}

// Place is Update for plans: in the same transaction it checks that the rack's
// entry is there and open, that the project's quota has room and that the job's
// volumes can be used there, and files the join tokens of the attempt's new plan, so that a rack cannot be removed under a
// job and no quota is passed. What is refused so is a conflict.
func (s *Store) Place(ctx context.Context, id, rackID string, tokens []Token, change Change) (*job.Job, error) {
	var is *job.Job
	changed := false
	err := s.write(ctx, func(tx *sql.Tx) (err error) {
		is, changed = nil, false
		var cordoned bool
		err = tx.QueryRowContext(ctx, `SELECT cordoned FROM racks WHERE id = ?`, rackID).Scan(&cordoned)
		if errors.Is(err, sql.ErrNoRows) {
			return fault.New(fault.Conflict, "rack %s was removed", rackID)
		}
		if err != nil {
			return err
		}
		if cordoned {
			return fault.New(fault.Conflict, "rack %s was cordoned", rackID)
		}
		if is, changed, err = s.update(ctx, tx, id, change); err != nil {
			return err
		}
		if err := admit(ctx, tx, is); err != nil {
			return err
		}
		if err := volumesUsable(ctx, tx, id, rackID); err != nil {
			return err
		}
		return saveTokens(ctx, tx, tokens)
	})
	if err != nil {
		return nil, err
	}
	if changed {
		s.hub.Publish(id)
	}
	return is, nil
}

// Promise is what an attempt holds or was promised on a rack.
type Promise struct {
	JobID   string
	Project string
	Spec    *orkv1.JobSpec
	*job.Attempt
}

// PromisesOf picks the promises out of live jobs.
func PromisesOf(jobs []*job.Job) []Promise {
	var out []Promise
	for _, j := range jobs {
		for _, r := range j.Replicas {
			for _, a := range r.Attempts {
				if a.RackID != "" && !a.Gone {
					out = append(out, Promise{JobID: j.ID, Project: j.Owner.GetProjectId(), Spec: j.Spec, Attempt: a})
				}
			}
		}
	}
	return out
}

// Remove deletes a job's record and leaves a tombstone. Its id is published:
// who reads then gets not_found.
func (s *Store) Remove(ctx context.Context, id string) error {
	err := s.write(ctx, func(tx *sql.Tx) error {
		j, err := s.current(ctx, tx, id)
		if err != nil {
			return err
		}
		if j.Intent != job.IntentDelete {
			return fault.New(fault.FailedPrecondition, "job %s is not being deleted", id)
		}
		if _, err := tx.ExecContext(ctx, `INSERT OR REPLACE INTO tombstones (job_id, project_id, name, deleted_at) VALUES (?, ?, ?, ?)`,
			id, j.Owner.ProjectId, j.Spec.Name, micros(s.clock())); err != nil {
			return err
		}
		for _, q := range []string{
			`DELETE FROM join_tokens WHERE job_id = ?`, `DELETE FROM volume_attachments WHERE job_id = ?`, `DELETE FROM events WHERE job_id = ?`,
			`DELETE FROM attempts WHERE job_id = ?`, `DELETE FROM replicas WHERE job_id = ?`, `DELETE FROM jobs WHERE id = ?`,
		} {
			if _, err := tx.ExecContext(ctx, q, id); err != nil {
				return err
			}
		}
		s.staged[id] = nil
		return nil
	})
	if err == nil {
		s.hub.Publish(id)
	}
	return err
}

// Counts is how many jobs are recorded in each state.
func (s *Store) Counts(ctx context.Context) (map[orkv1.State]int, error) {
	out := make(map[orkv1.State]int)
	err := s.read(ctx, func(tx *sql.Tx) error {
		clear(out)
		rows, err := tx.QueryContext(ctx, `SELECT state, count(*) FROM jobs GROUP BY state`)
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			var state orkv1.State
			var n int
			if err := rows.Scan(&state, &n); err != nil {
				return err
			}
			out[state] = n
		}
		return rows.Err()
	})
	return out, err
}

// DeletedProject is the project of a deleted job, while its tombstone lasts.
func (s *Store) DeletedProject(ctx context.Context, id string) (string, bool, error) {
	var project string
	err := s.read(ctx, func(tx *sql.Tx) error {
		return tx.QueryRowContext(ctx, `SELECT project_id FROM tombstones WHERE job_id = ?`, id).Scan(&project)
	})
	if errors.Is(err, sql.ErrNoRows) {
		return "", false, nil
	}
	return project, err == nil, err
}

func (s *Store) saveEvents(ctx context.Context, tx *sql.Tx, jobID string, events []job.Event) error {
	for _, e := range events {
		if _, err := tx.ExecContext(ctx, `INSERT INTO events (job_id, replica_id, attempt_id, time, state, reason, message, actor)
			VALUES (?, ?, ?, ?, ?, ?, ?, ?)`,
			jobID, e.ReplicaID, e.AttemptID, micros(s.clock()), int(e.State), int(e.Reason), e.Message, e.Actor); err != nil {
			return err
		}
	}
	return nil
}

// Events reads up to 1,000 events of a job after a sequence number, oldest first.
func (s *Store) Events(ctx context.Context, jobID string, after uint64) ([]*orkv1.Event, error) {
	var out []*orkv1.Event
	err := s.read(ctx, func(tx *sql.Tx) error {
		out = nil
		if _, err := loadOne(ctx, tx, jobID); err != nil {
			return err
		}
		rows, err := tx.QueryContext(ctx, `SELECT sequence, replica_id, attempt_id, time, state, reason, message, actor
			FROM events WHERE job_id = ? AND sequence > ? ORDER BY sequence LIMIT 1000`, jobID, int64(min(after, 1<<62)))
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			e := &orkv1.Event{JobId: jobID}
			var at int64
			if err := rows.Scan(&e.Sequence, &e.ReplicaId, &e.AttemptId, &at, &e.State, &e.Reason, &e.Message, &e.Actor); err != nil {
				return err
			}
			e.Time = timestamppb.New(fromMicros(at))
			out = append(out, e)
		}
		return rows.Err()
	})
	return out, err
}
