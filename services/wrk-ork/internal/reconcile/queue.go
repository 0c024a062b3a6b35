package reconcile

import (
	"context"
	"time"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/life"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/placement"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/rack"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/record"
)

// Queue is everything that one planning pass works on. Whoever holds it may serve
// it as a trial: nothing is recorded by it.
type Queue struct {
	Pass    *placement.Pass
	Waiting []placement.Waiting
	Policy  placement.Policy
	Views   []rack.View

	turns map[string]turn // by attempt id
	// unready wait for a volume, and not for capacity.
	unready []placement.Decision
}

// turn is a queued attempt that may be placed.
type turn struct {
	job     *job.Job
	replica *job.Replica
	attempt *job.Attempt
}

// Decide serves the queue on its pass.
func (q *Queue) Decide() []placement.Decision {
	return append(placement.Decide(q.Pass, q.Waiting, q.Policy), q.unready...)
}

// Join puts the replicas of a job that is not recorded behind those that wait.
func (q *Queue) Join(ctx context.Context, store *record.Store, j *job.Job) error {
	for _, r := range j.Replicas {
		q.add(j, r, 0)
	}
	return q.holdBack(ctx, store)
}

func (q *Queue) add(j *job.Job, r *job.Replica, waited time.Duration) {
	a := r.Newest()
	q.turns[a.ID] = turn{j, r, a}
	q.Waiting = append(q.Waiting, placement.Waiting{
		ID: a.ID, JobID: j.ID, Project: j.Owner.GetProjectId(), Priority: j.Spec.Priority, Waited: waited,
		Request: RequestOf(j, r, a, diskOf(q.Views, j.ID)),
	})
}

// Queue reads the queue as it is now.
func (l *Loop) Queue(ctx context.Context) (*Queue, error) {
	live, err := l.o.Store.Live(ctx)
	if err != nil {
		return nil, err
	}
	quotas, err := l.o.Store.Quotas(ctx)
	if err != nil {
		return nil, err
	}
	q := l.queue(live, l.o.Racks.Views(), quotas)
	return q, q.holdBack(ctx, l.o.Store)
}

func (l *Loop) queue(live []*job.Job, views []rack.View, quotas map[string]*orkv1.ProjectQuota) *Queue {
	q := &Queue{
		Policy: placement.Policy{Quotas: make(map[string]placement.Quota, len(quotas)), ReserveAfter: l.o.ReserveAfter, Age: l.o.Age},
		Views:  views, turns: make(map[string]turn),
	}
	now := l.o.Clock()
	for _, j := range live {
		if j.Intent != job.IntentRun {
			continue
		}
		for _, r := range j.Replicas {
			if a := r.Newest(); life.Eligible(r, a, now) {
				q.add(j, r, now.Sub(a.CreatedAt))
			}
		}
	}
	promises := record.PromisesOf(live)
	for project, is := range quotas {
		q.Policy.Quotas[project] = placement.Quota{Unlimited: is.Unlimited, Maximum: is.MaximumGpus}
	}
	for _, p := range promises {
		if is, ok := q.Policy.Quotas[p.Project]; ok {
			is.Held += p.GPUs()
			q.Policy.Quotas[p.Project] = is
		}
	}
	q.Pass = placement.Open(Snapshot(views, promises))
	return q
}
