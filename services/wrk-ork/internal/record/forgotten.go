package record

import (
	"context"
	"database/sql"
	"errors"
	"slices"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cosmicac/cosmicac/pkg/fault"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
)

// AbandonRack removes an entry whatever is on the rack, and keeps what was left
// there, in one transaction. abandon changes each job that has something there and
// returns the change's events. The result is nil when nothing was left.
func (s *Store) AbandonRack(ctx context.Context, id, actor string, abandon func(*job.Job) []job.Event) (*orkv1.ForgottenRack, error) {
	var left *orkv1.ForgottenRack
	var changed []string
	err := s.write(ctx, func(tx *sql.Tx) error {
		left, changed = nil, nil
		entry, err := loadRack(ctx, tx, id)
		if err != nil {
			return err
		}
		left = &orkv1.ForgottenRack{RackId: id, Key: entry.Key, Location: entry.Location, Actor: actor, ForgottenAt: timestamppb.New(s.clock())}
		// What a removal before left, and nobody decided about.
		if old, err := loadForgotten(ctx, tx, id); err != nil {
			return err
		} else if len(old) == 1 {
			left.Attempts, left.DiskJobIds = old[0].Attempts, old[0].DiskJobIds
		}
		jobs, err := loadJobs(ctx, tx, `SELECT `+jobColumns+` FROM jobs WHERE id IN (SELECT job_id FROM attempts WHERE rack_id = ?) ORDER BY id`, id)
		if err != nil {
			return err
		}
		for _, j := range jobs {
			if !slices.Contains(left.DiskJobIds, j.ID) {
				left.DiskJobIds = append(left.DiskJobIds, j.ID)
			}
			_, did, err := s.update(ctx, tx, j.ID, func(j *job.Job) (*job.Job, []job.Event, error) {
				events := abandon(j)
				return j, events, nil
			})
			if err != nil {
				return err
			}
			if did {
				changed = append(changed, j.ID)
			}
			left.Attempts = append(left.Attempts, leftBehind(j, id, left.Attempts)...)
		}
		if left.VolumeIds, err = volumesOn(ctx, tx, id); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, `DELETE FROM racks WHERE id = ?`, id); err != nil {
			return err
		}
		if len(left.Attempts)+len(left.DiskJobIds)+len(left.VolumeIds) == 0 {
			left = nil
			return nil
		}
		return saveForgotten(ctx, tx, left)
	})
	if err != nil {
		return nil, err
	}
	s.hub.Publish(changed...)
	return left, nil
}

// leftBehind are a job's attempts that the rack may still hold.
func leftBehind(j *job.Job, rackID string, known []*orkv1.AbandonedAttempt) []*orkv1.AbandonedAttempt {
	var out []*orkv1.AbandonedAttempt
	for _, r := range j.Replicas {
		for _, a := range r.Attempts {
			if a.RackID != rackID || a.Gone || slices.ContainsFunc(known, func(k *orkv1.AbandonedAttempt) bool { return k.AttemptId == a.ID }) {
				continue
			}
			left := &orkv1.AbandonedAttempt{AttemptId: a.ID, JobId: j.ID, ProjectId: j.Owner.GetProjectId(), JobName: j.Spec.GetName(), GpuCount: a.GPUs()}
			for _, n := range a.Nodes {
				left.NodeNames = append(left.NodeNames, n.NodeName)
			}
			out = append(out, left)
		}
	}
	return out
}

func saveForgotten(ctx context.Context, tx *sql.Tx, f *orkv1.ForgottenRack) error {
	text, err := protojson.Marshal(f)
	if err != nil {
		return fault.Wrap(fault.Internal, err, "encode what was left on rack %s", f.RackId)
	}
	_, err = tx.ExecContext(ctx, `INSERT INTO forgotten_racks (rack_id, key, doc) VALUES (?, ?, ?)
		ON CONFLICT (rack_id) DO UPDATE SET key = excluded.key, doc = excluded.doc`, f.RackId, f.Key, string(text))
	return err
}

func loadForgotten(ctx context.Context, tx *sql.Tx, idOrKey string) ([]*orkv1.ForgottenRack, error) {
	rows, err := tx.QueryContext(ctx, `SELECT doc FROM forgotten_racks WHERE ? IN ('', rack_id, key) ORDER BY rack_id`, idOrKey)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var out []*orkv1.ForgottenRack
	for rows.Next() {
		var text []byte
		if err := rows.Scan(&text); err != nil {
			return nil, err
		}
		f := &orkv1.ForgottenRack{}
		if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(text, f); err != nil {
			return nil, err
		}
		out = append(out, f)
	}
	return out, rows.Err()
}

// Forgotten lists the racks that were removed by force and left something, until
// somebody decided about that.
func (s *Store) Forgotten(ctx context.Context) ([]*orkv1.ForgottenRack, error) {
	var out []*orkv1.ForgottenRack
	err := s.read(ctx, func(tx *sql.Tx) (err error) {
		out, err = loadForgotten(ctx, tx, "")
		return err
	})
	return out, err
}

// checkReturn refuses an entry for what was removed by force under another id or
// with another key: what was left there would be nobody's.
func checkReturn(ctx context.Context, tx *sql.Tx, e *orkv1.RackEntry) error {
	for _, by := range []string{e.Id, e.Key} {
		left, err := loadForgotten(ctx, tx, by)
		if err != nil {
			return err
		}
		for _, f := range left {
			switch {
			case f.Key != e.Key:
				return fault.New(fault.Conflict, "rack %s was removed by force and left work under another worker's key; choose another id", e.Id).
					With(fault.Detail{Field: "id", Rule: "ERR_RACK_ID_INVALID"})
			case f.RackId != e.Id:
				return fault.New(fault.Conflict, "this worker's key was rack %s, which was removed by force and left work; register it as %s", f.RackId, f.RackId).
					With(fault.Detail{Field: "id", Rule: "ERR_RACK_ID_INVALID"})
			}
		}
	}
	return nil
}

// Reclaim ends what is kept of a forced removal, once its rack is back. reclaim
// changes each job that was left there; its events are the change's.
func (s *Store) Reclaim(ctx context.Context, rackID string, reclaim func(*job.Job) []job.Event) error {
	var changed []string
	err := s.write(ctx, func(tx *sql.Tx) error {
		changed = nil
		if _, err := loadRack(ctx, tx, rackID); fault.KindOf(err) == fault.NotFound {
			return fault.New(fault.FailedPrecondition, "rack %s has no entry; register it again first", rackID)
		} else if err != nil {
			return err
		}
		left, err := loadForgotten(ctx, tx, rackID)
		if err != nil {
			return err
		}
		if len(left) == 0 {
			return fault.New(fault.NotFound, "nothing was abandoned on rack %s", rackID)
		}
		for _, a := range left[0].Attempts {
			_, did, err := s.update(ctx, tx, a.JobId, func(j *job.Job) (*job.Job, []job.Event, error) {
				events := reclaim(j)
				return j, events, nil
			})
			if fault.KindOf(err) == fault.NotFound {
				continue // deleted meanwhile: what is left of it is taken down anyway
			}
			if err != nil {
				return err
			}
			if did {
				changed = append(changed, a.JobId)
			}
		}
		_, err = tx.ExecContext(ctx, `DELETE FROM forgotten_racks WHERE rack_id = ?`, rackID)
		return err
	})
	if err == nil {
		s.hub.Publish(changed...)
	}
	return err
}

// Bury remembers jobs as deleted that have no record, so that what racks hold of
// them is taken down. Those that have one are left as they are.
func (s *Store) Bury(ctx context.Context, ids []string) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		for _, id := range ids {
			if _, err := tx.ExecContext(ctx, `INSERT OR IGNORE INTO tombstones (job_id, project_id, name, deleted_at)
				SELECT ?1, '', '', ?2 WHERE NOT EXISTS (SELECT 1 FROM jobs WHERE id = ?1)`, id, micros(s.clock())); err != nil {
				return err
			}
		}
		return nil
	})
}

// JobOf is the id of the job that an attempt belongs to.
func (s *Store) JobOf(ctx context.Context, attemptID string) (string, error) {
	var id string
	err := s.read(ctx, func(tx *sql.Tx) error {
		return tx.QueryRowContext(ctx, `SELECT job_id FROM attempts WHERE id = ?`, attemptID).Scan(&id)
	})
	if errors.Is(err, sql.ErrNoRows) {
		return "", fault.New(fault.NotFound, "no attempt has the id %.64q", attemptID)
	}
	return id, err
}
