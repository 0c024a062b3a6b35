package life

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/cosmicac/cosmicac/pkg/fault"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
)

// Update gives a running inference job another specification, which then goes from
// replica to replica by roll. Replicas that are too many begin to leave at once. A
// specification that is the newest already changes nothing, but that an update that
// was stopped goes on. Refused for other jobs and for one that is stopped or deleted.
func Update(was *job.Job, to *orkv1.JobSpec, strategy orkv1.UpdateStrategy, actor string, now time.Time, id NewID) (*job.Job, []job.Event, error) {
	switch {
	case !was.Inference():
		return nil, nil, fault.New(fault.FailedPrecondition, "job %s is a GPU Container Job; only replicas of a Managed Inference Job can be replaced one by one", was.ID)
	case was.Intent == job.IntentStop:
		return nil, nil, fault.New(fault.FailedPrecondition, "job %s is stopped; start it, then update it", was.ID)
	}
	if err := startable(was, now); err != nil {
		return nil, nil, err
	}
	j := was.Clone()
	instead := ""
	if was.Update.UnderWay() {
		instead = fmt.Sprintf("; it takes the place of the update to specification %d, which was under way", was.SpecRevision)
	}
	if !proto.Equal(was.Spec, to) {
		j.Former = append(j.Former, job.Former{Revision: was.SpecRevision, Spec: was.Spec})
		j.Spec, j.SpecRevision = to, was.SpecRevision+1
	} else if was.Update.UnderWay() && was.Update.Strategy == strategy || was.Update == nil {
		return j, nil, nil
	}
	j.Actor = actor
	j.Update = &job.Update{Strategy: strategy, StartedAt: now.UTC().Round(0)}
	staying := j.Staying()
	byUse(j, staying)
	for _, r := range staying[:max(len(staying)-j.Wanted(), 0)] {
		retire(r, orkv1.Reason_REASON_REPLICAS_REDUCED)
	}
	for _, r := range j.Staying() {
		r.Failures, r.StartFailures = 0, 0
		if job.Ended(r.Newest().State) {
			newAttempt(r, now, id).SpecRevision = j.SpecRevision
		}
	}
	forget(j)
	settle(j, Sight{Now: now})
	return j, []job.Event{{State: j.State, Reason: j.Reason, Actor: actor,
		Message: fmt.Sprintf("update asked: specification %d, %s, %d replicas%s", j.SpecRevision, strategyName(strategy), j.Wanted(), instead)}}, nil
}

// Surges reports whether an update begins with a replica beside those that serve.
func Surges(j *job.Job) bool {
	return j.Update.UnderWay() && j.Update.Strategy == orkv1.UpdateStrategy_UPDATE_STRATEGY_SURGE_FIRST &&
		slices.ContainsFunc(j.Staying(), func(r *job.Replica) bool { return !j.Current(r.Newest()) && serves(r.Newest()) })
}

// AddReplica gives a job one replica more, of its newest specification, at the lowest
// index that is free: root disks go by it.
func AddReplica(j *job.Job, now time.Time, id NewID) *job.Replica {
	r := &job.Replica{ID: id("r")}
	for slices.ContainsFunc(j.Replicas, func(o *job.Replica) bool { return o.Index == r.Index }) {
		r.Index++
	}
	newAttempt(r, now, id).SpecRevision = j.SpecRevision
	j.Replicas = append(j.Replicas, r)
	slices.SortFunc(j.Replicas, func(a, b *job.Replica) int { return int(a.Index) - int(b.Index) })
	return r
}

// roll takes an update one step further: nothing while a step is under way, so that
// at most one replica is missing (stop first) or too many (surge first).
func roll(j *job.Job, s Sight, id NewID) {
	u := j.Update
	if !u.UnderWay() || j.Intent != job.IntentRun {
		return
	}
	staying := j.Staying()
	var stale []*job.Replica
	for _, r := range staying {
		switch a := r.Newest(); {
		case !j.Current(a):
			stale = append(stale, r)
		case job.Ended(a.State): // and nothing follows it
			u.StoppedBy, u.StoppedAt = a.ID, s.Now.UTC().Round(0)
			u.Message = bound(fmt.Sprintf("replica %d did not come up with specification %d (attempt %s: %s: %s); the update goes no further, and those of before serve on",
				r.Index, j.SpecRevision, a.ID, job.ReasonName(a.Reason), a.Message))
			return
		}
	}
	if pending(j, s.Now) != nil {
		return
	}
	byUse(j, stale)
	switch {
	case len(stale) == 0 && len(staying) < j.Wanted():
		for range j.Wanted() - len(staying) {
			AddReplica(j, s.Now, id)
		}
	case len(stale) == 0 && len(staying) > j.Wanted():
		byUse(j, staying)
		retire(staying[0], orkv1.Reason_REASON_REPLICAS_REDUCED)
	case len(stale) == 0:
		j.Update = nil
		forget(j)
	case u.Strategy == orkv1.UpdateStrategy_UPDATE_STRATEGY_SURGE_FIRST && serves(stale[0].Newest()):
		if len(staying) > j.Wanted() {
			retire(stale[0], orkv1.Reason_REASON_UPDATED)
		} else {
			AddReplica(j, s.Now, id)
		}
	default:
		replace(j, stale[0], s.Now, id)
	}
}

// spoiled reports whether an ended attempt is not tried again by itself: an update
// ended at it, or ends there, since it is of what the update brings and never served.
// What a node failed to start says nothing of the specification and is tried elsewhere.
func spoiled(j *job.Job, a *job.Attempt) bool {
	switch {
	case j.Update == nil:
		return false
	case !j.Update.UnderWay():
		return j.Update.StoppedBy == a.ID
	}
	return a.SpecRevision == j.SpecRevision && a.State == failed && a.RunningAt.IsZero() && !a.StartFailed && !a.FencedByOperator &&
		a.Recycle == orkv1.Reason_REASON_UNSPECIFIED
}

func serves(a *job.Attempt) bool { return a.State == running && a.AgentReady }

// byUse puts first what is missed least: what does not serve, then what is of an
// older specification, then the highest index.
func byUse(j *job.Job, replicas []*job.Replica) {
	rank := func(r *job.Replica) int {
		a := r.Newest()
		n := 0
		if serves(a) {
			n += 2
		}
		if j.Current(a) {
			n++
		}
		return n
	}
	slices.SortFunc(replicas, func(a, b *job.Replica) int {
		return cmp.Or(cmp.Compare(rank(a), rank(b)), cmp.Compare(b.Index, a.Index))
	})
}

// minimumReady is how long a new replica serves before the next one is taken down:
// proxies hear of it and connect to it meanwhile.
const minimumReady = 5 * time.Second

// pending is a replica that an update waits for, nil for none.
func pending(j *job.Job, now time.Time) *job.Replica {
	for _, r := range j.Replicas {
		if a := r.Newest(); a.Retire || a.Recycle == orkv1.Reason_REASON_UPDATED || j.Current(a) && (!serves(a) || now.Sub(a.RunningAt) < minimumReady) {
			return r
		}
	}
	return nil
}

// updating says how far an update is and for what it waits.
func updating(j *job.Job, now time.Time) string {
	of := 0
	for _, r := range j.Staying() {
		if a := r.Newest(); j.Current(a) && serves(a) {
			of++
		}
	}
	text := fmt.Sprintf("%d of %d replicas serve with specification %d, %s", of, j.Wanted(), j.SpecRevision, strategyName(j.Update.Strategy))
	if r := pending(j, now); r != nil {
		a := r.Newest()
		text += fmt.Sprintf("; waits for replica %d, which is %s: %s", r.Index, job.StateName(a.State), a.Message)
	}
	return bound(text)
}

func strategyName(s orkv1.UpdateStrategy) string {
	if s == orkv1.UpdateStrategy_UPDATE_STRATEGY_SURGE_FIRST {
		return "surge first"
	}
	return "stop first"
}

// replace has a replica's next attempt be of the newest specification.
func replace(j *job.Job, r *job.Replica, now time.Time, id NewID) {
	r.Failures, r.StartFailures = 0, 0
	switch a := r.Newest(); {
	case job.Ended(a.State):
		newAttempt(r, now, id).SpecRevision = j.SpecRevision
	case a.State == queued:
		a.SpecRevision, a.NotBefore = j.SpecRevision, time.Time{}
	default:
		a.Recycle = orkv1.Reason_REASON_UPDATED
	}
}

// retire ends a replica for good; its record goes once nothing is left of it.
func retire(r *job.Replica, why orkv1.Reason) {
	a := r.Newest()
	a.Retire = true
	if !job.Ended(a.State) {
		a.Recycle = why
	}
}

// dropRetired takes out replicas that have left, at the pass after the one that
// recorded their end; what they cost stays.
func dropRetired(j *job.Job) {
	j.Replicas = slices.DeleteFunc(j.Replicas, func(r *job.Replica) bool {
		if !r.Newest().Retire || slices.ContainsFunc(r.Attempts, func(a *job.Attempt) bool { return !a.Settled() }) {
			return false
		}
		for _, a := range r.Attempts {
			j.FormerGPUTime += a.GPUTime(a.EndedAt)
		}
		return true
	})
}

// forget drops specifications that no replica is made of any more.
func forget(j *job.Job) {
	j.Former = slices.DeleteFunc(j.Former, func(f job.Former) bool {
		return !slices.ContainsFunc(j.Replicas, func(r *job.Replica) bool {
			return slices.ContainsFunc(r.Attempts, func(a *job.Attempt) bool {
				return max(a.SpecRevision, 1) == f.Revision && (a == r.Newest() || !a.Settled())
			})
		})
	})
}
