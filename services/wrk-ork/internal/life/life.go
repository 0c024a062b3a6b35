// Package life is the orchestrator's state machine: pure functions from a job
// and what is seen of it to the job as it should now be recorded, and to the
// orders that are due. It has no clock, no randomness and no I/O; the caller
// stores the result and then carries out the orders, in that order, so that a
// process killed between the two only repeats an order. Every order may be
// repeated at any time.
//
// It does not choose nodes (package placement) and does not store.
//
// The one rule above all: what is not seen is not judged. An attempt fails
// because the cluster or its agent said so, or because a deadline passed in
// which both could be heard; never because somebody is silent.
package life

import (
	"fmt"
	"time"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
)

// NewID makes an id with a prefix.
type NewID func(prefix string) string

// attemptsKept bounds the history of a replica.
const attemptsKept = 40

// Advance returns the job as it follows from what is seen, and the transitions
// that led there. The job passed in is not changed.
func Advance(l Limits, was *job.Job, s Sight, id NewID) (*job.Job, []job.Event) {
	j := was.Clone()
	limitDuration(j, s.Now)
	for _, r := range j.Replicas {
		for _, a := range r.Attempts {
			advance(l, j, a, s)
		}
		restart(l, j, r, s.Now, id)
		trim(r)
	}
	settle(j, s)
	return j, events(was, j)
}

// limitDuration turns a passed max_duration into a stop.
func limitDuration(j *job.Job, now time.Time) {
	most := j.Spec.GetMaxDuration().AsDuration()
	if most <= 0 || j.Intent != job.IntentRun {
		return
	}
	for _, r := range j.Replicas {
		if a := r.Newest(); a.State == running && !a.RunningAt.IsZero() && now.Sub(a.RunningAt) >= most {
			j.Intent, j.IntentReason, j.Actor = job.IntentStop, orkv1.Reason_REASON_MAX_DURATION, "ork"
			return
		}
	}
}

// restart gives a failed inference replica a new attempt. Containers are not
// restarted: what ran in them may have side effects.
func restart(l Limits, j *job.Job, r *job.Replica, now time.Time, id NewID) {
	a := r.Newest()
	if !j.Inference() || j.Intent != job.IntentRun || a.State != failed || !restartable(a.Reason) {
		return
	}
	if !a.RunningAt.IsZero() && a.EndedAt.Sub(a.RunningAt) >= l.HealthyAfter {
		r.Failures = 0
	}
	if r.Failures >= l.RestartCount {
		return
	}
	r.Failures++
	n := newAttempt(r, now, id)
	n.Reason = a.Reason
	n.NotBefore = now.Add(backoff(l.RestartFirst, l.RestartMost, r.Failures))
	n.Message = bound(fmt.Sprintf("restart %d of %d after %s: %s", r.Failures, l.RestartCount, job.ReasonName(a.Reason), a.Message))
}

// restartable: waiting and trying again can help.
func restartable(r orkv1.Reason) bool {
	switch r {
	case orkv1.Reason_REASON_NEVER_FITS, orkv1.Reason_REASON_UNKNOWN_MODEL,
		orkv1.Reason_REASON_UNKNOWN_LOCATION, orkv1.Reason_REASON_NO_FABRIC,
		orkv1.Reason_REASON_IMAGE_UNAVAILABLE, orkv1.Reason_REASON_RACK_FORGOTTEN,
		orkv1.Reason_REASON_CLUSTER_REFUSED, orkv1.Reason_REASON_OVER_QUOTA:
		return false
	}
	return true
}

func newAttempt(r *job.Replica, now time.Time, id NewID) *job.Attempt {
	number := uint32(1)
	if len(r.Attempts) > 0 {
		number = r.Newest().Number + 1
	}
	a := &job.Attempt{ID: id("a"), Number: number, State: queued, CreatedAt: now, Message: "waits for placement"}
	r.Attempts = append(r.Attempts, a)
	return a
}

// trim drops the oldest attempts that are over and done with.
func trim(r *job.Replica) {
	for len(r.Attempts) > attemptsKept && r.Attempts[0].Settled() {
		r.Attempts = r.Attempts[1:]
	}
}

// settle derives state and conditions from the replicas.
func settle(j *job.Job, s Sight) {
	j.State, j.Reason, j.Message = Fold(j.Replicas)
	old := j.Conditions
	j.Conditions = nil
	add := func(kind, message string, since time.Time) {
		for _, c := range old {
			if c.Kind == kind {
				since = c.Since
			}
		}
		j.Conditions = append(j.Conditions, job.Condition{Kind: kind, Message: message, Since: since})
	}
	var away, draining *job.Attempt
	up, lost := 0, 0
	for _, r := range j.Replicas {
		a := r.Newest()
		if a.State == running {
			up++
		}
		if a.Unreachable.Set() {
			lost++
			if away == nil {
				away = a
			}
		}
		if a.Draining.Set() && draining == nil {
			draining = a
		}
	}
	if away != nil {
		text := away.Unreachable.Message
		if len(j.Replicas) > 1 {
			text = fmt.Sprintf("%d of %d replicas: %s", lost, len(j.Replicas), text)
		}
		add(job.ConditionUnreachable, text, away.Unreachable.Since)
	}
	if j.State == running && up < len(j.Replicas) {
		add(job.ConditionDegraded, fmt.Sprintf("degraded %d/%d", up, len(j.Replicas)), s.Now)
	}
	if draining != nil {
		add(job.ConditionDraining, draining.Draining.Message, draining.Draining.Since)
	}
	if why := remains(j, s); why != "" {
		add(job.ConditionCleanupPending, why, s.Now)
	}
}

// Fold is a job's state as a pure function of its replicas' newest attempts:
// running if one runs; else the furthest of those on their way; else stopping;
// else how they ended, a failure before all.
func Fold(replicas []*job.Replica) (orkv1.State, orkv1.Reason, string) {
	order := []orkv1.State{running, starting, provisioning, reserving, queued, stopping, failed, cancelled, stopped, succeeded}
	for _, state := range order {
		for _, r := range replicas {
			if a := r.Newest(); a.State == state {
				return a.State, a.Reason, a.Message
			}
		}
	}
	return orkv1.State_STATE_UNSPECIFIED, orkv1.Reason_REASON_UNSPECIFIED, ""
}

// remains says what of an ended job is still in a cluster.
func remains(j *job.Job, s Sight) string {
	for _, r := range j.Replicas {
		for _, a := range r.Attempts {
			if !job.Ended(a.State) || a.Gone {
				continue
			}
			if a.Unreachable.Set() {
				return fmt.Sprintf("attempt %s: %s", a.ID, a.Unreachable.Message)
			}
			for _, n := range a.Nodes {
				for _, g := range n.Graph {
					if g.State == "deleting" {
						return bound(fmt.Sprintf("attempt %s on rack %s: %s %s is being deleted %s", a.ID, a.RackID, g.Kind, g.Name, g.Message))
					}
				}
			}
			return fmt.Sprintf("attempt %s: waits until rack %s says that nothing of it is left", a.ID, a.RackID)
		}
	}
	if j.Intent != job.IntentDelete {
		return ""
	}
	for _, id := range j.Touched {
		if rack, ok := s.Racks[id]; ok && !disksGone(rack) {
			if !rack.Connected {
				return fmt.Sprintf("the worker of rack %s cannot be reached to remove the root disks", id)
			}
			return fmt.Sprintf("waits until rack %s says that the root disks are gone", id)
		}
	}
	return ""
}

// disksGone: the worker took the order, and a later complete report lists none.
func disksGone(r Rack) bool {
	return r.complete() && !r.Disk && !r.DisksDeletedAt.IsZero() && r.ReportedAt.After(r.DisksDeletedAt)
}

// events lists the attempts' transitions between two versions of a job.
func events(was, is *job.Job) []job.Event {
	var out []job.Event
	for _, r := range is.Replicas {
		for _, a := range r.Attempts {
			_, old := was.Attempt(a.ID)
			if old != nil && old.State == a.State && old.Reason == a.Reason && old.Gone == a.Gone {
				continue
			}
			e := job.Event{ReplicaID: r.ID, AttemptID: a.ID, State: a.State, Reason: a.Reason, Message: a.Message, Actor: "ork"}
			if a.RackID != "" {
				e.Actor = a.RackID
			}
			if old != nil && old.State == a.State && old.Gone != a.Gone {
				if !a.Gone {
					continue
				}
				e.Message = "the cluster says that nothing of it is left"
			}
			out = append(out, e)
		}
	}
	return out
}
