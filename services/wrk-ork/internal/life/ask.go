package life

import (
	"fmt"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
)

// New is a job as CreateJob records it: every replica queued.
func New(spec *orkv1.JobSpec, owner *orkv1.Owner, now time.Time, id NewID) (*job.Job, []job.Event) {
	j := &job.Job{ID: id("j"), Spec: spec, Owner: owner, CreatedAt: now, UpdatedAt: now, Actor: owner.GetUserId()}
	replicas := uint32(1)
	if j.Inference() {
		j.EndpointID = id("ep")
		replicas = max(spec.GetInference().GetReplicas(), 1)
	}
	for i := range replicas {
		r := &job.Replica{ID: id("r"), Index: i}
		newAttempt(r, now, id)
		j.Replicas = append(j.Replicas, r)
	}
	settle(j, Sight{Now: now})
	return j, []job.Event{{State: queued, Message: "created", Actor: j.Actor}}
}

// Stop asks for the end of every attempt. A job that ended is left as it is.
func Stop(was *job.Job, actor string) (*job.Job, []job.Event) {
	j := was.Clone()
	if j.Intent != job.IntentRun || job.Ended(j.State) {
		return j, nil
	}
	j.Intent, j.IntentReason, j.Actor = job.IntentStop, orkv1.Reason_REASON_STOP_REQUESTED, actor
	return j, []job.Event{{State: j.State, Reason: j.IntentReason, Message: "stop asked", Actor: actor}}
}

// Start gives every ended replica a new attempt. A job that is deleted, or has
// not ended yet after a stop, is refused.
func Start(was *job.Job, actor string, now time.Time, id NewID) (*job.Job, []job.Event, error) {
	if was.Intent == job.IntentDelete {
		return nil, nil, fault.New(fault.FailedPrecondition, "job %s is being deleted; create another", was.ID)
	}
	j := was.Clone()
	started := 0
	for _, r := range j.Replicas {
		a := r.Newest()
		if a.State == stopping || (was.Intent == job.IntentStop && !job.Ended(a.State)) {
			return nil, nil, fault.New(fault.FailedPrecondition, "job %s is still stopping; start it when it is stopped", was.ID)
		}
		if !job.Ended(a.State) {
			continue
		}
		r.Failures = 0
		newAttempt(r, now, id)
		started++
	}
	if started == 0 {
		return j, nil, nil
	}
	j.Intent, j.IntentReason, j.Actor = job.IntentRun, orkv1.Reason_REASON_UNSPECIFIED, actor
	settle(j, Sight{Now: now})
	text := "start asked"
	if len(j.Replicas) > 1 {
		text = fmt.Sprintf("start asked of %d of %d replicas", started, len(j.Replicas))
	}
	return j, []job.Event{{State: j.State, Message: text, Actor: actor}}, nil
}

// AskDelete asks for the end of the job and of all that it left. Asking again
// changes nothing.
func AskDelete(was *job.Job, actor string, now time.Time) (*job.Job, []job.Event) {
	j := was.Clone()
	if j.Intent == job.IntentDelete {
		return j, nil
	}
	j.Intent, j.IntentReason, j.Actor = job.IntentDelete, orkv1.Reason_REASON_DELETE_REQUESTED, actor
	j.DeleteRequestedAt = now
	return j, []job.Event{{State: j.State, Reason: j.IntentReason, Message: "delete asked", Actor: actor}}
}

// Placed writes a plan into a queued attempt: it is reserving from here.
func Placed(a *job.Attempt, rackID, model string, nodes []*orkv1.AttemptNode) {
	a.State, a.Reason = reserving, orkv1.Reason_REASON_UNSPECIFIED
	a.Message = fmt.Sprintf("a plan on rack %s waits for its worker's claim", rackID)
	a.RackID, a.Model, a.Nodes = rackID, model, nodes
	a.Plan++
	a.Judged = true
}

// Waits writes why a queued attempt has no plan, or ends it when waiting
// cannot help. Only the first judgement of an attempt ends it: later the same
// refusal may be a rack that is being repaired.
func Waits(a *job.Attempt, reason orkv1.Reason, message string, final bool, now time.Time) {
	if final && (!a.Judged || reason == orkv1.Reason_REASON_RACK_FORGOTTEN) {
		end(a, failed, reason, message, now)
		a.Gone = true
		return
	}
	if reason != orkv1.Reason_REASON_RACK_UNREACHABLE {
		a.Judged = true
	}
	a.Reason, a.Message = reason, bound(message)
}

// Eligible reports whether a queued attempt may be placed: its time has come
// and nothing is left of the attempts before it, so that no disk and no GPU is
// used twice.
func Eligible(r *job.Replica, a *job.Attempt, now time.Time) bool {
	if a.State != queued || a != r.Newest() || now.Before(a.NotBefore) {
		return false
	}
	for _, old := range r.Attempts {
		if old != a && !old.Settled() {
			return false
		}
	}
	return true
}

// Settle derives state and conditions again after a caller changed attempts.
func Settle(j *job.Job, was *job.Job, s Sight) []job.Event {
	settle(j, s)
	return events(was, j)
}
