package reconcile

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/life"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/rack"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/record"
)

func cut(key string) (before, after string, found bool) { return strings.Cut(key, "/") }

// carryOut starts an order unless it is under way, was given a moment ago, or
// its rack cannot be called.
func (l *Loop) carryOut(ctx context.Context, j *job.Job, o life.Order) {
	switch o.Kind {
	case life.Drain:
		l.o.Agents.Drain(o.AttemptID, o.Deadline)
	case life.Remove:
		if err := l.o.Store.Remove(ctx, j.ID); err != nil {
			l.failed(ctx, "remove", err)
			return
		}
		l.o.Log.Info("job removed", "job", j.ID)
	case life.Propose:
		_, a := j.Attempt(o.AttemptID)
		if !l.starts().admit(a) {
			return // given at a later pass
		}
		l.mu.Lock()
		l.word(a.ID).proposed = a.Plan
		l.mu.Unlock()
		l.call(ctx, fmt.Sprintf("propose/%s/%d", a.ID, a.Plan), j.ID, o, func(ctx context.Context, c workerv1.RackClient) error {
			return l.propose(ctx, c, j.ID, a.ID, a.Plan)
		})
	case life.Delete:
		l.call(ctx, "delete/"+o.AttemptID, j.ID, o, func(ctx context.Context, c workerv1.RackClient) error {
			if _, err := c.DeleteAttempt(ctx, &workerv1.DeleteAttemptRequest{AttemptId: o.AttemptID, Reason: o.Reason}); err != nil {
				return err
			}
			l.mu.Lock()
			defer l.mu.Unlock()
			if w := l.word(o.AttemptID); w.deletedAt.IsZero() {
				w.deletedAt = l.o.Clock()
			}
			return nil
		})
	case life.DeleteDisks:
		l.call(ctx, "disks/"+j.ID+"/"+o.RackID, j.ID, o, func(ctx context.Context, c workerv1.RackClient) error {
			if _, err := c.DeleteJobDisks(ctx, &workerv1.DeleteJobDisksRequest{JobId: j.ID}); err != nil {
				return err
			}
			l.mu.Lock()
			defer l.mu.Unlock()
			if key := j.ID + "/" + o.RackID; l.disks[key].IsZero() {
				l.disks[key] = l.o.Clock()
			}
			return nil
		})
	}
}

// stray is about what a worker reports of a job without a record. If its
// tombstone says that it was deleted here, what is left is deleted; if nothing
// is known of it (another orchestrator's, or an older copy of the record was
// brought back), it is named and left alone until an operator decides.
func (l *Loop) stray(ctx context.Context, jobID string, views []rack.View) {
	_, ours, err := l.o.Store.DeletedProject(ctx, jobID)
	if err != nil {
		l.failed(ctx, "read", err)
		l.Poke(jobID)
		return
	}
	found := false
	for _, v := range views {
		for _, a := range v.Report.GetAttempts() {
			if a.JobId != jobID {
				continue
			}
			found = true
			if !ours {
				continue
			}
			o := life.Order{Kind: life.Delete, RackID: v.Entry.Id, AttemptID: a.AttemptId, Reason: orkv1.Reason_REASON_DELETE_REQUESTED}
			l.call(ctx, "delete/"+a.AttemptId, jobID, o, func(ctx context.Context, c workerv1.RackClient) error {
				_, err := c.DeleteAttempt(ctx, &workerv1.DeleteAttemptRequest{AttemptId: o.AttemptID, Reason: o.Reason})
				return err
			})
		}
		if !v.Disk(jobID) {
			continue
		}
		found = true
		if ours {
			// The worker refuses this while it has an attempt of the job.
			o := life.Order{Kind: life.DeleteDisks, RackID: v.Entry.Id}
			l.call(ctx, "disks/"+jobID+"/"+o.RackID, jobID, o, func(ctx context.Context, c workerv1.RackClient) error {
				_, err := c.DeleteJobDisks(ctx, &workerv1.DeleteJobDisksRequest{JobId: jobID})
				return err
			})
		}
	}
	l.mu.Lock()
	_, known := l.strays[jobID]
	if found {
		l.strays[jobID] = ours
	} else {
		delete(l.strays, jobID)
	}
	l.mu.Unlock()
	if found && !ours && !known {
		l.o.Log.Warn("a rack holds something of a job that is not recorded here; it is left alone", "job", jobID)
	}
}

// Unrecorded are the jobs that racks report something of and that were never
// recorded here, nor deleted: they are left alone until an operator decides.
func (l *Loop) Unrecorded() map[string]bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := make(map[string]bool)
	for id, ours := range l.strays {
		if !ours {
			out[id] = true
		}
	}
	return out
}

// word is the memory of an attempt; the caller holds the lock.
func (l *Loop) word(attemptID string) *word {
	w := l.seen[attemptID]
	if w == nil {
		w = &word{}
		l.seen[attemptID] = w
	}
	return w
}

// call runs one call to a rack's worker beside the loop.
func (l *Loop) call(ctx context.Context, key, jobID string, o life.Order, f func(context.Context, workerv1.RackClient) error) {
	client, ok := l.o.Racks.Client(o.RackID)
	if !ok {
		return // shown as unreachable; given when the rack is back
	}
	now := l.o.Clock()
	l.mu.Lock()
	p := l.pace[key]
	if p == nil {
		p = &pace{}
		l.pace[key] = p
	}
	if p.running || now.Before(p.next) {
		l.mu.Unlock()
		return
	}
	p.running = true
	if o.Kind == life.Propose {
		l.word(o.AttemptID).proposing = true
	}
	l.mu.Unlock()

	// At most one waits here for each order that is due.
	l.calls.Go(func() {
		var err error
		select {
		case l.slots <- struct{}{}:
			callCtx, cancel := context.WithTimeout(ctx, l.o.CallTimeout)
			err = f(callCtx, client)
			cancel()
			<-l.slots
		case <-ctx.Done():
			err = ctx.Err()
		}
		l.mu.Lock()
		p.running = false
		if o.Kind == life.Propose {
			l.word(o.AttemptID).proposing = false
		}
		if err != nil {
			p.failures++
			p.next = l.o.Clock().Add(min(time.Second<<min(p.failures-1, 5), 30*time.Second))
		} else {
			p.failures = 0
			p.next = l.o.Clock().Add(l.o.Repeat)
		}
		l.mu.Unlock()
		if err != nil {
			l.failed(ctx, key[:strings.IndexByte(key, '/')], fault.Wrap(fault.KindOf(err), err, "rack %s: %s of job %s", o.RackID, key, jobID))
		}
		l.Poke(jobID)
	})
}

// propose sends a plan. The record says first that it may have been sent. A node may
// have been closed since the pass under way looked at the racks: only here, where
// failures are filed, is it known that none was.
func (l *Loop) propose(ctx context.Context, c workerv1.RackClient, jobID, attemptID string, plan uint32) error {
	stale := fault.New(fault.Canceled, "the plan is no longer wanted")
	j, err := l.o.Store.Update(ctx, jobID, func(j *job.Job) (*job.Job, []job.Event, error) {
		_, a := j.Attempt(attemptID)
		if a == nil || a.Plan != plan || a.State != orkv1.State_STATE_RESERVING || j.Intent != job.IntentRun {
			return nil, nil, stale
		}
		if !a.Sent && life.Closed(a, l.o.Store.Quarantined(a.RackID)) != "" {
			return nil, nil, stale
		}
		a.Sent = true
		j.Touch(a.RackID)
		return j, nil, nil
	})
	if err == stale {
		return nil
	}
	if err != nil {
		return err
	}
	r, a := j.Attempt(attemptID)
	resp, err := c.ApplyAttempt(ctx, l.request(j, r, a))
	if err != nil {
		// Whether it was claimed is not known: the same plan is proposed again.
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.word(attemptID).answer = &life.Answer{Plan: plan, Claimed: resp.Claimed, Reason: resp.Reason, Message: resp.Message}
	return nil
}

// tokens are the join tokens of an attempt's plan as they are filed.
func (l *Loop) tokens(jobID string, a *job.Attempt, plan uint32, nodes int, hash func(string) []byte) []record.Token {
	var out []record.Token
	for i := range uint32(nodes) {
		out = append(out, record.Token{Hash: hash(l.o.Agents.Token(a.ID, plan, i)), JobID: jobID, AttemptID: a.ID, Plan: plan, NodeIndex: i})
	}
	return out
}
