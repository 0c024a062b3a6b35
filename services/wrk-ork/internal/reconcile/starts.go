package reconcile

import (
	"strings"
	"time"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
)

// starts counts, for one pass, the VMs that are being started on each node for each
// GPU model. With the quarantine it bounds how many attempts a node can spoil that
// has broken and looks empty.
type starts struct {
	most    int
	under   map[string]int
	counted map[string]bool // attempts
}

// startLife is how long a start counts: one whose disk is filled for an hour must
// not hold up the others for as long.
const startLife = 5 * time.Minute

func (l *Loop) countStarts(live []*job.Job) *starts {
	s := &starts{most: l.o.StartsAtOnce, under: make(map[string]int), counted: make(map[string]bool)}
	now := l.o.Clock()
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, j := range live {
		for _, r := range j.Replicas {
			a := r.Newest()
			if a.Gone || a.Abandoned.Set() || job.Ended(a.State) || !a.UpAt.IsZero() || !a.ClaimedAt.IsZero() && now.Sub(a.ClaimedAt) > startLife {
				continue
			}
			// These jobs were read when the pass began, and a proposal may have been
			// made and answered since: what was proposed counts, not what is recorded.
			if w := l.seen[a.ID]; a.Sent || w != nil && a.Plan > 0 && w.proposed == a.Plan {
				s.counted[a.ID] = true
				for _, key := range placesOf(a) {
					s.under[key]++
				}
			}
		}
	}
	return s
}

// admit reports whether a plan may be proposed now, and counts it. One that was
// proposed before goes on.
func (s *starts) admit(a *job.Attempt) bool {
	if a.Sent || s.counted[a.ID] || s.most == 0 {
		return true
	}
	places := placesOf(a)
	for _, key := range places {
		if s.under[key] >= s.most {
			return false
		}
	}
	for _, key := range places {
		s.under[key]++
	}
	s.counted[a.ID] = true
	return true
}

func placesOf(a *job.Attempt) []string {
	var out []string
	for _, n := range a.Nodes {
		out = append(out, a.RackID+"/"+n.NodeName+"/"+strings.ToLower(a.Model))
	}
	return out
}
