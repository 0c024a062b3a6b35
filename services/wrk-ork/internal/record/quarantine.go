package record

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cosmicac/cosmicac/pkg/fault"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
)

// evidenceShown bounds the failures that are listed with a quarantine, newest first.
const evidenceShown = 10

// saveStartFailures files, in the transaction of a change, what could not be
// started on a node, and closes node and model to placement once that has happened
// to as many attempts within the window as the policy says.
func (s *Store) saveStartFailures(ctx context.Context, tx *sql.Tx, was, is *job.Job) error {
	now := s.clock()
	for _, r := range is.Replicas {
		for _, a := range r.Attempts {
			if !a.StartFailed {
				continue
			}
			if _, old := was.Attempt(a.ID); old != nil && old.StartFailed {
				continue
			}
			gpus, err := json.Marshal(a.GPUUUIDs)
			if err != nil {
				return fmt.Errorf("encode the GPUs of attempt %s: %w", a.ID, err)
			}
			for node, words := range blamed(a) {
				if _, err := tx.ExecContext(ctx, `INSERT OR IGNORE INTO start_failures (rack_id, node, model, attempt_id, job_id, time, reason, message, gpu_uuids)
					VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)`, a.RackID, node, a.Model, a.ID, is.ID, micros(now), int(a.Reason), words, string(gpus)); err != nil {
					return err
				}
				var count int
				if err := tx.QueryRowContext(ctx, `SELECT count(DISTINCT attempt_id) FROM start_failures WHERE rack_id = ? AND node = ? AND model = ? AND time >= ?`,
					a.RackID, node, a.Model, micros(now.Add(-s.policy.QuarantineWindow))).Scan(&count); err != nil {
					return err
				}
				if count < s.policy.QuarantineFailures {
					continue
				}
				s.closed.Store(true) // or left open: what is remembered of the rack changes
				if open, err := s.brake(ctx, tx, a.RackID, node); err != nil {
					return err
				} else if open {
					continue
				}
				message := fmt.Sprintf("%d attempts could not be started there within %s, the last one: %s", count, s.policy.QuarantineWindow, words)
				if _, err := tx.ExecContext(ctx, `INSERT OR IGNORE INTO quarantines (rack_id, node, model, since, actor, message) VALUES (?, ?, ?, ?, 'ork', ?)`,
					a.RackID, node, a.Model, micros(now), message); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// blamed are the nodes of an attempt that failed to start, with the cluster's
// words: those with a failed object; or the only one. Of several none is blamed
// when the cluster blames none.
func blamed(a *job.Attempt) map[string]string {
	out := make(map[string]string)
	for _, n := range a.Nodes {
		for _, g := range n.Graph {
			if g.State == "failed" {
				out[n.NodeName] = a.Message
				if g.Message != "" && !strings.Contains(a.Message, g.Message) {
					out[n.NodeName] = a.Message + " (" + g.Kind + ": " + g.Message + ")"
				}
			}
		}
	}
	if len(out) == 0 && len(a.Nodes) == 1 {
		out[a.Nodes[0].NodeName] = a.Message
	}
	return out
}

// Quarantined lists what of a rack is left out of placement, from memory. The
// messages are shared: read only.
func (s *Store) Quarantined(rackID string) []*orkv1.Quarantine {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.quarantined[rackID]
}

// loadQuarantined brings the memory up to date with the record.
func (s *Store) loadQuarantined(ctx context.Context) error {
	all := make(map[string][]*orkv1.Quarantine)
	var failing map[string]failing
	err := s.read(ctx, func(tx *sql.Tx) (err error) {
		clear(all)
		if failing, err = s.loadFailing(ctx, tx); err != nil {
			return err
		}
		list, err := loadQuarantines(ctx, tx, "")
		for _, q := range list {
			all[q.RackId] = append(all[q.RackId], q)
		}
		return err
	})
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.quarantined, s.failing = all, failing
	return nil
}

func loadQuarantines(ctx context.Context, tx *sql.Tx, rackID string) ([]*orkv1.Quarantine, error) {
	rows, err := tx.QueryContext(ctx, `SELECT rack_id, node, model, since, actor, message FROM quarantines WHERE ? IN ('', rack_id) ORDER BY rack_id, node, model`, rackID)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var out []*orkv1.Quarantine
	for rows.Next() {
		q := &orkv1.Quarantine{Active: true}
		var since int64
		if err := rows.Scan(&q.RackId, &q.NodeName, &q.GpuModel, &since, &q.Actor, &q.Message); err != nil {
			return nil, err
		}
		q.Since = timestamppb.New(fromMicros(since))
		out = append(out, q)
	}
	return out, rows.Err()
}

// Quarantines lists what is left out of placement, and what is suspect: it failed
// to start something within the window, but not often enough. Each with its
// evidence, newest first. An empty rack id lists every rack's.
func (s *Store) Quarantines(ctx context.Context, rackID string) ([]*orkv1.Quarantine, error) {
	var out []*orkv1.Quarantine
	err := s.read(ctx, func(tx *sql.Tx) (err error) {
		if out, err = loadQuarantines(ctx, tx, rackID); err != nil {
			return err
		}
		rows, err := tx.QueryContext(ctx, `SELECT rack_id, node, model, attempt_id, job_id, time, reason, message, gpu_uuids
			FROM start_failures WHERE ? IN ('', rack_id) ORDER BY time DESC`, rackID)
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			var rack, node, model string
			var at int64
			var gpus []byte
			f := &orkv1.StartFailure{}
			if err := rows.Scan(&rack, &node, &model, &f.AttemptId, &f.JobId, &at, &f.Reason, &f.Message, &gpus); err != nil {
				return err
			}
			if err := json.Unmarshal(gpus, &f.GpuUuids); err != nil {
				return fmt.Errorf("GPUs of attempt %s: %w", f.AttemptId, err)
			}
			f.Time = timestamppb.New(fromMicros(at))
			i := slices.IndexFunc(out, func(q *orkv1.Quarantine) bool {
				return q.RackId == rack && q.NodeName == node && (q.GpuModel == "" || strings.EqualFold(q.GpuModel, model))
			})
			if i < 0 {
				if fromMicros(at).Before(s.clock().Add(-s.policy.QuarantineWindow)) {
					continue
				}
				out = append(out, &orkv1.Quarantine{RackId: rack, NodeName: node, GpuModel: model, Since: f.Time, Actor: "ork",
					Message: "suspect: " + f.Message})
				i = len(out) - 1
			}
			if q := out[i]; len(q.Evidence) < evidenceShown {
				q.Evidence = append(q.Evidence, f)
			}
		}
		return rows.Err()
	})
	return out, err
}

// SetQuarantine leaves a node, or one GPU model of it, out of placement. One that
// stands keeps its time; its words are the newest.
func (s *Store) SetQuarantine(ctx context.Context, q *orkv1.Quarantine) error {
	err := s.write(ctx, func(tx *sql.Tx) error {
		if _, err := loadRack(ctx, tx, q.RackId); err != nil {
			return err
		}
		_, err := tx.ExecContext(ctx, `INSERT INTO quarantines (rack_id, node, model, since, actor, message) VALUES (?, ?, ?, ?, ?, ?)
			ON CONFLICT (rack_id, node, model) DO UPDATE SET actor = excluded.actor, message = excluded.message`,
			q.RackId, q.NodeName, q.GpuModel, micros(s.clock()), q.Actor, q.Message)
		return err
	})
	if err != nil {
		return err
	}
	return s.loadQuarantined(ctx)
}

// LiftQuarantine opens a node or a model of it again, and forgets the failures
// there: as many are needed again. An empty model lifts every model's.
func (s *Store) LiftQuarantine(ctx context.Context, rackID, node, model string) error {
	err := s.write(ctx, func(tx *sql.Tx) error {
		var n int64
		for _, table := range []string{"quarantines", "start_failures"} {
			r, err := tx.ExecContext(ctx, `DELETE FROM `+table+` WHERE rack_id = ? AND node = ? AND ? IN ('', model)`, rackID, node, model)
			if err != nil {
				return err
			}
			gone, err := r.RowsAffected()
			if err != nil {
				return err
			}
			n += gone
		}
		if n == 0 {
			return fault.New(fault.NotFound, "nothing of node %.64q on rack %.64q is quarantined or suspect", node, rackID)
		}
		return nil
	})
	if err != nil {
		return err
	}
	return s.loadQuarantined(ctx)
}

// pruneStartFailures forgets failures that count for nothing any more, but for
// the evidence of a quarantine that stands.
func (s *Store) pruneStartFailures(ctx context.Context, tx *sql.Tx, now time.Time) error {
	_, err := tx.ExecContext(ctx, `DELETE FROM start_failures WHERE time < ? AND NOT EXISTS (
		SELECT 1 FROM quarantines q WHERE q.rack_id = start_failures.rack_id AND q.node = start_failures.node AND q.model IN ('', start_failures.model))`,
		micros(now.Add(-s.policy.QuarantineWindow)))
	return err
}
