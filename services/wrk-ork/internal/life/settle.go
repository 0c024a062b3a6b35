package life

import (
	"fmt"
	"time"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
)

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
	var away, draining, idle, abandoned, diskless *job.Attempt
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
		if a.Idle.Set() && idle == nil {
			idle = a
		}
		if a.Abandoned.Set() && abandoned == nil {
			abandoned = a
		}
		if a.DiskLost.Set() && diskless == nil {
			diskless = a
		}
	}
	if away != nil {
		text := away.Unreachable.Message
		if len(j.Replicas) > 1 {
			text = fmt.Sprintf("%d of %d replicas: %s", lost, len(j.Replicas), text)
		}
		add(job.ConditionUnreachable, text, away.Unreachable.Since)
	}
	if j.State == running && up < j.Wanted() {
		add(job.ConditionDegraded, fmt.Sprintf("degraded %d/%d", up, j.Wanted()), s.Now)
	}
	switch u := j.Update; {
	case u.UnderWay():
		add(job.ConditionUpdating, updating(j, s.Now), u.StartedAt)
	case u != nil:
		add(job.ConditionUpdateStopped, u.Message, u.StoppedAt)
	}
	if draining != nil {
		add(job.ConditionDraining, draining.Draining.Message, draining.Draining.Since)
	}
	if idle != nil {
		add(job.ConditionIdle, idle.Idle.Message, idle.Idle.Since)
	}
	if abandoned != nil {
		add(job.ConditionAbandoned, abandoned.Abandoned.Message, abandoned.Abandoned.Since)
	}
	if diskless != nil {
		text := diskless.DiskLost.Message
		if job.Ended(diskless.State) {
			text = "its root disk was deleted by somebody else and is lost; a start begins with a new one"
		}
		add(job.ConditionDiskLost, text, diskless.DiskLost.Since)
	}
	if why := alerts(j, s); why != "" {
		add(job.ConditionAlert, why, s.Now)
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
			if !job.Ended(a.State) || a.Settled() {
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

// events lists what happened to attempts between two versions of a job: their
// transitions, and the marks that came and went.
func events(was, is *job.Job, s Sight) []job.Event {
	var out []job.Event
	for _, r := range is.Replicas {
		for _, a := range r.Attempts {
			_, old := was.Attempt(a.ID)
			add := func(actor, message string) {
				out = append(out, job.Event{ReplicaID: r.ID, AttemptID: a.ID, State: a.State, Reason: a.Reason, Message: message, Actor: actor})
			}
			if old == nil {
				old = &job.Attempt{}
			}
			switch {
			case old.State != a.State || old.Reason != a.Reason:
				add(causedBy(is, a), a.Message)
			case !old.Gone && a.Gone:
				add(a.RackID, "the cluster says that nothing of it is left")
			}
			if old.Unreachable.Set() != a.Unreachable.Set() && !job.Ended(a.State) {
				add("ork", orText(a.Unreachable.Message, "it is heard of again"))
			}
			if a.Draining.Set() && old.Draining.Message != a.Draining.Message {
				add(orText(s.Racks[a.RackID].DrainActor, "ork"), a.Draining.Message)
			}
			if !old.DiskLost.Set() && a.DiskLost.Set() {
				add(a.RackID, a.DiskLost.Message)
			}
			if !old.Idle.Set() && a.Idle.Set() {
				add("ork", a.Idle.Message)
			}
		}
	}
	switch {
	case is.Update != nil && !is.Update.UnderWay() && was.Update.UnderWay():
		out = append(out, job.Event{AttemptID: is.Update.StoppedBy, State: is.State, Reason: is.Reason, Message: is.Update.Message, Actor: "ork"})
	case was.Update.UnderWay() && is.Update == nil:
		out = append(out, job.Event{State: is.State, Reason: is.Reason, Message: fmt.Sprintf("update finished: all of %d replicas are of specification %d", is.Wanted(), is.SpecRevision), Actor: "ork"})
	}
	if had, has := condition(was, job.ConditionAlert), condition(is, job.ConditionAlert); has != "" && had == "" {
		out = append(out, job.Event{State: is.State, Reason: is.Reason, Message: "alert: " + has, Actor: "ork"})
	}
	return out
}

// causedBy is who an attempt's state comes from: who asked for its end, the rack
// whose cluster said so, or the orchestrator.
func causedBy(j *job.Job, a *job.Attempt) string {
	switch {
	case a.State == stopping || a.State == cancelled || a.State == stopped:
		return orText(j.Actor, "ork")
	case a.State == queued || a.State == reserving || a.RackID == "":
		return "ork"
	}
	return a.RackID
}

func condition(j *job.Job, kind string) string {
	for _, c := range j.Conditions {
		if c.Kind == kind {
			return c.Message
		}
	}
	return ""
}
