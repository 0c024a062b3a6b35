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
	"slices"
	"strings"
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
	dropRetired(j)
	limit(j, s)
	for _, r := range j.Replicas {
		for _, a := range r.Attempts {
			advance(l, j, a, s)
		}
		restart(l, j, r, s, id)
		trim(j, r)
	}
	roll(j, s, id)
	settle(j, s)
	return j, events(was, j, s)
}

// restart gives a replica the attempt that follows: after one that was ended for
// it, one that an operator gave up, one that a node failed to start; and after a
// failure of a replica that serves a model. A container in which something ran is
// not restarted: that may have had side effects.
func restart(l Limits, j *job.Job, r *job.Replica, s Sight, id NewID) {
	now := s.Now
	a := r.Newest()
	if a.State == running {
		r.StartFailures = 0
	}
	switch {
	case j.Intent != job.IntentRun || !job.Ended(a.State) || a.Retire || spoiled(j, a):
	case a.Recycle != orkv1.Reason_REASON_UNSPECIFIED:
		n := newAttempt(r, now, id)
		if a.Recycle == orkv1.Reason_REASON_UPDATED {
			n.SpecRevision = j.SpecRevision
		}
		n.Message = "follows attempt " + a.ID + ", which was stopped for it"
	case a.FencedByOperator:
		n := newAttempt(r, now, id)
		n.RefusedNodes = places(a)
		n.Message = "follows attempt " + a.ID + ", which an operator gave up"
	case a.StartFailed:
		restartElsewhere(l, r, a, s, id)
	case j.Inference() && a.State == failed && restartable(a.Reason) && !a.Final:
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
}

// restartElsewhere tries a start again, on other nodes where there are some. While
// a whole rack fails that is not the job's fault, and its tries are not counted.
func restartElsewhere(l Limits, r *job.Replica, a *job.Attempt, s Sight, id NewID) {
	now, failing := s.Now, s.Racks[a.RackID].Failing
	if r.StartFailures >= l.StartCount && failing == "" {
		return
	}
	r.StartFailures = min(r.StartFailures+1, l.StartCount)
	var avoid []string
	for _, old := range slices.Backward(r.Attempts) {
		if old.StartFailed {
			avoid = append(avoid, places(old)...)
		}
	}
	n := newAttempt(r, now, id)
	n.Reason, n.RefusedNodes = a.Reason, avoid[:min(len(avoid), nodesAvoided)]
	n.NotBefore = now.Add(backoff(l.RestartFirst, l.RestartMost, r.StartFailures))
	if failing != "" {
		n.Message = bound(fmt.Sprintf("tried again: rack %s fails as a whole: %s", a.RackID, failing))
		return
	}
	n.Message = bound(fmt.Sprintf("start %d of %d after %s on %s: %s", r.StartFailures+1, l.StartCount+1,
		job.ReasonName(a.Reason), strings.Join(places(a), ", "), a.Message))
}

// nodesAvoided bounds the nodes that placement is told to avoid.
const nodesAvoided = 16

// places are an attempt's nodes as placement is told to avoid them.
func places(a *job.Attempt) []string {
	var out []string
	for _, n := range a.Nodes[:min(len(a.Nodes), nodesAvoided)] {
		out = append(out, a.RackID+"/"+n.NodeName)
	}
	return out
}

// restartable: waiting and trying again can help.
func restartable(r orkv1.Reason) bool {
	switch r {
	case orkv1.Reason_REASON_NEVER_FITS, orkv1.Reason_REASON_UNKNOWN_MODEL,
		orkv1.Reason_REASON_UNKNOWN_LOCATION, orkv1.Reason_REASON_NO_FABRIC, orkv1.Reason_REASON_FABRIC_COUNT,
		orkv1.Reason_REASON_IMAGE_UNAVAILABLE, orkv1.Reason_REASON_RACK_FORGOTTEN,
		orkv1.Reason_REASON_CLUSTER_REFUSED, orkv1.Reason_REASON_OVER_QUOTA:
		return false
	}
	return true
}

// newAttempt is of the specification of the one before; only an update changes that.
func newAttempt(r *job.Replica, now time.Time, id NewID) *job.Attempt {
	number, revision := uint32(1), uint64(1)
	if len(r.Attempts) > 0 {
		number, revision = r.Newest().Number+1, r.Newest().SpecRevision
	}
	a := &job.Attempt{ID: id("a"), Number: number, SpecRevision: revision, State: queued, CreatedAt: now, Message: "waits for placement"}
	r.Attempts = append(r.Attempts, a)
	return a
}

// trim drops the oldest attempts that are over and done with; what they cost stays.
func trim(j *job.Job, r *job.Replica) {
	for len(r.Attempts) > attemptsKept && r.Attempts[0].Settled() {
		j.FormerGPUTime += r.Attempts[0].GPUTime(r.Attempts[0].EndedAt)
		r.Attempts = r.Attempts[1:]
	}
}
