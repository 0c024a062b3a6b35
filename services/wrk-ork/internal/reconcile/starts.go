package reconcile

import (
	"strings"
	"time"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
)

// starts counts, for one pass, the starts under way on each node and model of
// which none is known to have come up there. With the quarantine it bounds how
// many attempts a broken node can spoil before it is closed.
type starts struct {
	most   int
	proven map[string]bool
	under  map[string]int
}

// unprovenLife is how long a start counts that has not come up: one whose disk is
// filled for an hour must not hold up the others for as long.
const unprovenLife = 5 * time.Minute

func (l *Loop) countStarts(live []*job.Job) *starts {
	s := &starts{most: l.o.Unproven, proven: make(map[string]bool), under: make(map[string]int)}
	now := l.o.Clock()
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, j := range live {
		for _, r := range j.Replicas {
			for _, a := range r.Attempts {
				if a.Gone || a.RackID == "" || a.Abandoned.Set() {
					continue
				}
				w := l.seen[a.ID]
				for _, key := range placesOf(a) {
					switch {
					case !a.UpAt.IsZero():
						s.proven[key] = true
					case job.Ended(a.State) || !a.ClaimedAt.IsZero() && now.Sub(a.ClaimedAt) > unprovenLife:
					case a.Sent || (w != nil && w.proposing):
						s.under[key]++
					}
				}
			}
		}
	}
	return s
}

// admit reports whether a plan may be proposed now, and counts it. One that was
// proposed before goes on.
func (s *starts) admit(a *job.Attempt) bool {
	if a.Sent || s.most == 0 {
		return true
	}
	places := placesOf(a)
	for _, key := range places {
		if !s.proven[key] && s.under[key] >= s.most {
			return false
		}
	}
	for _, key := range places {
		s.under[key]++
	}
	return true
}

func placesOf(a *job.Attempt) []string {
	var out []string
	for _, n := range a.Nodes {
		out = append(out, a.RackID+"/"+n.NodeName+"/"+strings.ToLower(a.Model))
	}
	return out
}
