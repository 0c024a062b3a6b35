package life

import (
	"fmt"
	"slices"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
)

// New is a job as CreateJob records it: every replica queued.
func New(spec *orkv1.JobSpec, owner *orkv1.Owner, now time.Time, id NewID) (*job.Job, []job.Event) {
	j := &job.Job{ID: id("j"), Spec: spec, SpecRevision: 1, Owner: owner, CreatedAt: now, UpdatedAt: now, Actor: owner.GetUserId()}
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

// Stop asks for the end of every attempt; GPUs are given up, root disks kept. A
// job that ended is left as it is.
func Stop(was *job.Job, actor string) (*job.Job, []job.Event) {
	j := was.Clone()
	if j.Intent != job.IntentRun || job.Ended(j.State) {
		return j, nil
	}
	intend(j, job.IntentStop, orkv1.Reason_REASON_STOP_REQUESTED, actor)
	return j, []job.Event{{State: j.State, Reason: j.IntentReason, Message: "stop asked: gives up its GPUs, " + keepsDisk(lostDisk(was)), Actor: actor}}
}

// lostDisk reports whether somebody else deleted a root disk under the job.
func lostDisk(j *job.Job) bool {
	return slices.ContainsFunc(j.Replicas, func(r *job.Replica) bool { return r.Newest().DiskLost.Set() })
}

func intend(j *job.Job, what job.Intent, reason orkv1.Reason, actor string) {
	j.Intent, j.IntentReason, j.IntentMessage, j.Actor = what, reason, "", actor
}

// startable refuses new attempts of a job that is deleted or has cost what it may.
func startable(j *job.Job, now time.Time) error {
	if j.Intent == job.IntentDelete {
		return fault.New(fault.FailedPrecondition, "job %s is being deleted; create another", j.ID)
	}
	if reached(j, now) {
		return fault.New(fault.FailedPrecondition, "job %s %s; create another with a higher cost limit", j.ID, costWords(j, now)).
			With(fault.Detail{Field: "cost_limit_cents", Rule: "is reached"})
	}
	return nil
}

// Start gives every ended replica a new attempt. A job that is deleted, has cost
// what it may, or has not ended yet after a stop, is refused.
func Start(was *job.Job, actor string, now time.Time, id NewID) (*job.Job, []job.Event, error) {
	if err := startable(was, now); err != nil {
		return nil, nil, err
	}
	j := was.Clone()
	started := 0
	for _, r := range j.Staying() {
		a := r.Newest()
		if a.State == stopping || (was.Intent == job.IntentStop && !job.Ended(a.State)) {
			return nil, nil, fault.New(fault.FailedPrecondition, "job %s is still stopping; start it when it is stopped", was.ID)
		}
		if !job.Ended(a.State) {
			continue
		}
		r.Failures, r.StartFailures = 0, 0
		newAttempt(r, now, id)
		started++
	}
	if started == 0 {
		return j, nil, nil
	}
	intend(j, job.IntentRun, orkv1.Reason_REASON_UNSPECIFIED, actor)
	settle(j, Sight{Now: now})
	text := "start asked"
	if len(j.Replicas) > 1 {
		text = fmt.Sprintf("start asked of %d of %d replicas", started, len(j.Replicas))
	}
	if lostDisk(was) {
		text += ": with a new root disk, the one it had was deleted by somebody else"
	}
	return j, []job.Event{{State: j.State, Message: text, Actor: actor}}, nil
}

// Restart ends the attempts that hold something, and each gets one that follows
// as soon as nothing is left of it; what has ended gets one at once, and what
// waits for placement goes on waiting. Refused as Start is.
func Restart(was *job.Job, actor string, now time.Time, id NewID) (*job.Job, []job.Event, error) {
	if err := startable(was, now); err != nil {
		return nil, nil, err
	}
	j := was.Clone()
	for _, r := range j.Staying() {
		a := r.Newest()
		switch {
		case was.Intent == job.IntentStop && !job.Ended(a.State):
			return nil, nil, fault.New(fault.FailedPrecondition, "job %s is still stopping; start it when it is stopped", was.ID)
		case a.Abandoned.Set():
			return nil, nil, fault.New(fault.FailedPrecondition, "attempt %s of job %s is abandoned: its rack %s was removed by force; stop the job first", a.ID, was.ID, a.RackID)
		case job.Ended(a.State):
			newAttempt(r, now, id)
		case a.State != queued && a.Recycle == orkv1.Reason_REASON_UNSPECIFIED:
			a.Recycle = orkv1.Reason_REASON_RESTART_REQUESTED
		}
		r.Failures, r.StartFailures = 0, 0
	}
	intend(j, job.IntentRun, orkv1.Reason_REASON_UNSPECIFIED, actor)
	settle(j, Sight{Now: now})
	return j, []job.Event{{State: j.State, Reason: orkv1.Reason_REASON_RESTART_REQUESTED, Message: "restart asked: " + keepsDisk(lostDisk(was)), Actor: actor}}, nil
}

// Fence gives up an attempt that is not heard of, on an operator's word. Its
// outcome is written, and it stays held until the cluster says that nothing of it
// is left. Refused for one that is heard of or has ended.
func Fence(was *job.Job, attemptID, actor string, now time.Time) (*job.Job, []job.Event, error) {
	j := was.Clone()
	r, a := j.Attempt(attemptID)
	switch {
	case a == nil:
		return nil, nil, fault.New(fault.NotFound, "job %s has no attempt %q", was.ID, attemptID)
	case a.FencedByOperator:
		return j, nil, nil
	case job.Ended(a.State):
		return nil, nil, fault.New(fault.FailedPrecondition, "attempt %s has ended (%s); there is nothing to replace", a.ID, job.StateName(a.State))
	case a.Abandoned.Set():
		return nil, nil, fault.New(fault.FailedPrecondition, "attempt %s is abandoned with its rack %s; stop its job instead", a.ID, a.RackID)
	case !a.Unreachable.Set():
		return nil, nil, fault.New(fault.FailedPrecondition, "attempt %s is %s and heard of; stop or restart its job instead: a fence is for a silent node alone", a.ID, job.StateName(a.State))
	}
	silent := a.Unreachable.Message
	if j.Intent == job.IntentRun {
		end(a, failed, orkv1.Reason_REASON_FENCED_BY_OPERATOR, "given up by an operator while not heard of: "+silent, now)
	} else {
		finish(j, a, now)
	}
	a.FencedByOperator = true
	settle(j, Sight{Now: now})
	return j, []job.Event{{ReplicaID: r.ID, AttemptID: a.ID, State: a.State, Reason: orkv1.Reason_REASON_FENCED_BY_OPERATOR,
		Message: "fenced: " + silent, Actor: actor}}, nil
}

// Abandon notes that a rack was removed by force under a job: what was there may
// still be, and nobody can say.
func Abandon(j *job.Job, rackID, actor string, now time.Time) []job.Event {
	var out []job.Event
	for _, r := range j.Replicas {
		for _, a := range r.Attempts {
			if a.RackID != rackID || a.Gone || a.Abandoned.Set() || a.State == queued {
				continue
			}
			if a.State == reserving && !a.Sent {
				replan(a) // nobody there ever heard of it
				a.State, a.Reason = queued, orkv1.Reason_REASON_UNSPECIFIED
				a.Message = "another plan is made: rack " + rackID + " was removed"
				continue
			}
			a.Abandoned = job.Mark{Since: now, Message: fmt.Sprintf("rack %s was removed by force; attempt %s may still run there and nobody can say", rackID, a.ID)}
			a.Unreachable, a.Draining, a.Idle = job.Mark{}, job.Mark{}, job.Mark{}
			out = append(out, job.Event{ReplicaID: r.ID, AttemptID: a.ID, State: a.State, Reason: orkv1.Reason_REASON_RACK_FORGOTTEN,
				Message: a.Abandoned.Message, Actor: actor})
		}
	}
	settle(j, Sight{Now: now})
	return out
}

// Reclaim takes back what was abandoned on a rack that has returned: it is adopted
// and goes on as it was, or its job is stopped. It returns how many attempts that
// were.
func Reclaim(j *job.Job, rackID string, adopt bool, actor string, now time.Time) (n uint32, out []job.Event) {
	for _, r := range j.Replicas {
		for _, a := range r.Attempts {
			if a.RackID != rackID || !a.Abandoned.Set() {
				continue
			}
			n++
			a.Abandoned = job.Mark{}
			text := "adopted again with its rack"
			if !adopt {
				text = "to be taken down with what was abandoned on its rack"
			}
			if !adopt && !job.Ended(a.State) && j.Intent == job.IntentRun {
				intend(j, job.IntentStop, orkv1.Reason_REASON_RACK_FORGOTTEN, actor)
				j.IntentMessage = "stopped with what was abandoned on rack " + rackID
			}
			out = append(out, job.Event{ReplicaID: r.ID, AttemptID: a.ID, State: a.State, Reason: a.Reason, Message: text, Actor: actor})
		}
	}
	settle(j, Sight{Now: now})
	return n, out
}

// AskDelete asks for the end of the job and of all that it left. Asking again
// changes nothing.
func AskDelete(was *job.Job, actor string, now time.Time) (*job.Job, []job.Event) {
	j := was.Clone()
	if j.Intent == job.IntentDelete {
		return j, nil
	}
	intend(j, job.IntentDelete, orkv1.Reason_REASON_DELETE_REQUESTED, actor)
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
		a.Leave(now)
		return
	}
	if reason != orkv1.Reason_REASON_RACK_UNREACHABLE && reason != orkv1.Reason_REASON_VOLUME_NOT_READY {
		a.Judged = true
	}
	a.Reason, a.Message = reason, bound(message)
}

// Eligible reports whether a queued attempt may be placed: its time has come
// and nothing is left of the attempts before it, so that no disk and no GPU is
// used twice; but for what an operator gave up, who answers for that.
func Eligible(r *job.Replica, a *job.Attempt, now time.Time) bool {
	if a.State != queued || a != r.Newest() || now.Before(a.NotBefore) {
		return false
	}
	for _, old := range r.Attempts {
		if old != a && !old.Settled() && !old.FencedByOperator {
			return false
		}
	}
	return true
}

// Settle derives state and conditions again after a caller changed attempts.
func Settle(j *job.Job, was *job.Job, s Sight) []job.Event {
	settle(j, s)
	return events(was, j, s)
}
