package spec

import (
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

// ShortestIdle is the shortest time of disuse after which a job may be stopped.
const ShortestIdle = time.Minute

// limits checks what ends a job by itself, and what is worth an alert.
func (p *problems) limits(s *orkv1.JobSpec) {
	duration := func(field string, d *durationpb.Duration, shortest time.Duration) {
		switch {
		case d == nil || (d.IsValid() && d.AsDuration() == 0):
		case !d.IsValid() || d.AsDuration() < shortest || d.AsDuration() > 10*365*24*time.Hour:
			p.add(field, "is 0 (none), or %d seconds to ten years", int64(shortest.Seconds()))
		}
	}
	duration("idle_stop_seconds", s.IdleStop, ShortestIdle)
	if s.IdleStop.AsDuration() > 0 && s.Kind == orkv1.JobKind_JOB_KIND_MANAGED_INFERENCE {
		p.add("idle_stop_seconds", "is for gpu_container only: a model that nobody asks is ready, not idle")
	}
	if len(s.Cuda) > 64 || !graphicWords(s.Cuda) {
		p.add("cuda", "is a release like CUDA 12.8, of at most 64 visible ASCII characters")
	}
	a := s.Alerts
	if a == nil {
		return
	}
	if a.CostPercent > 100 {
		p.add("alerts.cost_percent", "is %d; 1 to 100 are allowed, 0 for none", a.CostPercent)
	}
	if a.CostPercent > 0 && s.CostLimitCents == 0 {
		p.add("alerts.cost_percent", "is a share of cost_limit_cents, which is not set")
	}
	duration("alerts.queued_after_seconds", a.QueuedAfter, time.Second)
	duration("alerts.unreachable_after_seconds", a.UnreachableAfter, time.Second)
}

// graphicWords allows visible ASCII and single blanks.
func graphicWords(text string) bool {
	for i := range len(text) {
		if text[i] < ' ' || text[i] > '~' || (text[i] == ' ' && (i == 0 || i == len(text)-1)) {
			return false
		}
	}
	return true
}
