package life

import (
	"fmt"
	"strings"
	"time"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
)

// limit ends what has run for as long, cost as much or idled as long as it may,
// and what is left on a rack whose drain is over. Each is a stop like the user's:
// disks stay.
func limit(j *job.Job, s Sight) {
	if j.Intent != job.IntentRun {
		return
	}
	stopAll := func(reason orkv1.Reason, message, actor string) {
		j.Intent, j.IntentReason, j.IntentMessage, j.Actor = job.IntentStop, reason, message, actor
	}
	if reached(j, s.Now) {
		for _, r := range j.Replicas {
			if !job.Ended(r.Newest().State) {
				stopAll(orkv1.Reason_REASON_COST_LIMIT, costWords(j, s.Now), "ork")
				return
			}
		}
	}
	for _, r := range j.Replicas {
		a := r.Newest()
		if most := j.Spec.GetMaxDuration().AsDuration(); most > 0 && a.State == running && s.Now.Sub(a.RunningAt) >= most {
			stopAll(orkv1.Reason_REASON_MAX_DURATION, "ran for its maximum duration of "+most.String(), "ork")
			return
		}
		if most := j.Spec.GetIdleStop().AsDuration(); most > 0 && a.State == running {
			if since, known := idleSince(a, s); !since.IsZero() && s.Now.Sub(since) >= most {
				stopAll(orkv1.Reason_REASON_IDLE, idleWords(known)+" for "+most.String(), "ork")
				return
			}
		}
		rack := s.Racks[a.RackID]
		drained := !rack.DrainDeadline.IsZero() && !s.Now.Before(rack.DrainDeadline)
		if !drained || (a.State != provisioning && a.State != starting && a.State != running) {
			continue // a plan that is not claimed yet is refused by the worker
		}
		if !j.Inference() {
			stopAll(orkv1.Reason_REASON_DRAINED, fmt.Sprintf("rack %s was drained and the time for that is over", a.RackID), rack.DrainActor)
			return
		}
		a.Recycle = orkv1.Reason_REASON_DRAINED
		j.Actor = rack.DrainActor
	}
}

// reached reports whether the job has cost as much as it may.
func reached(j *job.Job, now time.Time) bool {
	most := j.Spec.GetCostLimitCents()
	return most > 0 && j.Price != nil && j.CostCents(now) >= most
}

func costWords(j *job.Job, now time.Time) string {
	return fmt.Sprintf("cost %s of the %s that it may", money(j.CostCents(now), j.Price), money(j.Spec.GetCostLimitCents(), j.Price))
}

func money(cents uint64, p *orkv1.Price) string {
	return strings.TrimSpace(fmt.Sprintf("%d.%02d %s", cents/100, cents%100, p.GetCurrency()))
}

// idleSince is since when nobody used the attempt, as far as that could be heard:
// zero while its agent is not heard. known says whether GPU use could be told;
// where it could not, shells alone are judged.
func idleSince(a *job.Attempt, s Sight) (since time.Time, known bool) {
	g := s.Attempts[a.ID].Agent
	if !g.Attending || g.Report == nil || g.Report.ShellSessions > 0 {
		return time.Time{}, false
	}
	since = latest(a.RunningAt, s.Started, g.Since, g.ShellAt)
	if g.Report.GpuUseKnown {
		since = latest(since, g.GPUUsedAt)
	}
	return since, g.Report.GpuUseKnown
}

func idleWords(known bool) string {
	if known {
		return "no GPU use and no shell"
	}
	return "no shell (its GPU use cannot be told: the VM has no nvidia-smi that answers, or is simulated)"
}

// idleMark is the warning that comes in the second half of the time.
func idleMark(j *job.Job, a *job.Attempt, s Sight) (since time.Time, why string) {
	most := j.Spec.GetIdleStop().AsDuration()
	if most <= 0 || a.State != running {
		return time.Time{}, ""
	}
	since, known := idleSince(a, s)
	if since.IsZero() || s.Now.Sub(since) < most/2 {
		return time.Time{}, ""
	}
	return since, fmt.Sprintf("%s; it is stopped at %s", idleWords(known), since.Add(most).UTC().Format(time.RFC3339))
}

// alerts says what the job was told to watch and has come to pass.
func alerts(j *job.Job, s Sight) string {
	w := j.Spec.GetAlerts()
	if w == nil {
		return ""
	}
	var out []string
	if p, most := uint64(w.CostPercent), j.Spec.GetCostLimitCents(); p > 0 && most > 0 && j.Price != nil && j.CostCents(s.Now)*100 >= most*p {
		out = append(out, fmt.Sprintf("its cost reached %d %% of its limit of %s", p, money(most, j.Price)))
	}
	for _, r := range j.Replicas {
		a := r.Newest()
		if d := w.QueuedAfter.AsDuration(); d > 0 && a.State == queued && s.Now.Sub(a.CreatedAt) >= d {
			out = append(out, fmt.Sprintf("replica %d has waited for placement for more than %s", r.Index, d))
		}
		if d := w.UnreachableAfter.AsDuration(); d > 0 && a.Unreachable.Set() && s.Now.Sub(a.Unreachable.Since) >= d {
			out = append(out, fmt.Sprintf("replica %d has not been heard of for more than %s", r.Index, d))
		}
	}
	return bound(strings.Join(out, "; "))
}
