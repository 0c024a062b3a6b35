package placement

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

// Waiting is one replica in the queue.
type Waiting struct {
	// ID is the attempt's; it breaks ties.
	ID      string
	JobID   string
	Project string
	// Priority is -100 to 100.
	Priority int32
	// Waited is how long it has been in the queue.
	Waited  time.Duration
	Request Request
}

// Quota is how many GPUs a project may hold at once, and how many it holds.
type Quota struct {
	Unlimited bool
	Maximum   uint32
	Held      uint32

	// kept for keptFor, which has waited too long.
	kept    uint32
	keptFor string
}

// Policy is how a queue is served.
type Policy struct {
	// Quotas are by project. A project that is missing is blocked: a limit that
	// is not known is not "no limit".
	Quotas map[string]Quota
	// ReserveAfter is how long smaller work may pass the head of a line; then
	// capacity is kept for the head.
	ReserveAfter time.Duration
	// Age is how long a wait counts for one step of priority, so that no
	// priority keeps others waiting for ever; zero for never.
	Age time.Duration
}

// Decision is what becomes of one that waits: a plan, or why not.
type Decision struct {
	Waiting Waiting
	Plan    Plan
	Refusal *Refusal
	// Kept are nodes that are kept for it until it fits.
	Kept []string
}

// Decide serves a queue on a pass and returns a decision for each, in the order
// in which they were served: by priority, which grows with the wait, then the
// longest wait. Who does not fit is passed by those behind, until it has waited
// ReserveAfter and is the first of its line (location and model, or the rack of
// its disk): then nodes that could hold it are kept, those nearest to it, and
// those behind only take what is elsewhere. The same holds for a project's
// quota. So nobody waits for ever: the first of a line waits for what ran on its
// nodes when they were first kept, and those who may still be served before it are
// the ones that came earlier, or later with more priority than its wait has made
// up for. Plans count against quotas and capacity as they are made.
func Decide(p *Pass, queue []Waiting, policy Policy) []Decision {
	queue = slices.Clone(queue)
	slices.SortFunc(queue, func(a, b Waiting) int {
		return cmp.Or(-cmp.Compare(a.priority(policy), b.priority(policy)), -cmp.Compare(a.Waited, b.Waited), cmp.Compare(a.ID, b.ID))
	})
	quotas := make(map[string]*Quota, len(policy.Quotas))
	for project, q := range policy.Quotas {
		quotas[project] = &q
	}
	lines := make(map[string]bool)
	planned := make(map[string][]string) // of jobs that spread, in this pass
	out := make([]Decision, 0, len(queue))
	for _, w := range queue {
		d := Decision{Waiting: w}
		q, known := quotas[w.Project]
		overdue := w.Waited > policy.ReserveAfter
		if w.Request.Spread {
			w.Request.Beside = append(slices.Clone(w.Request.Beside), planned[w.JobID]...)
		}
		switch count := w.Request.Count; {
		case p.hopeless(w.Request, &d.Refusal):
			// What can never be placed says so at once, whatever its quota.
		case count > 0 && !known:
			d.Refusal = unknownQuota(w.Project)
		case count > 0 && !q.admits(count):
			d.Refusal = q.refuse(w)
			if overdue && count <= q.Maximum && q.keptFor == "" {
				q.kept, q.keptFor = count, w.JobID
			}
		default:
			d.Plan, d.Refusal = p.Plan(w.Request)
			line := w.line()
			switch {
			case d.Refusal == nil:
				p.Take(d.Plan, w.Request)
				if count > 0 {
					q.Held += count
				}
				for _, n := range d.Plan.Nodes {
					planned[w.JobID] = append(planned[w.JobID], d.Plan.RackID+"/"+n.Node)
				}
			case overdue && d.Refusal.Reason == orkv1.Reason_REASON_BUSY && !lines[line]:
				lines[line] = true
				d.Kept = p.Hold(w.Request, w.JobID)
				if count > 0 {
					q.kept, q.keptFor = q.kept+count, w.JobID
				}
			}
		}
		out = append(out, d)
	}
	return out
}

// hopeless reports whether no rack could hold the request even when empty, or
// none can be judged, and says why.
func (p *Pass) hopeless(q Request, why **Refusal) bool {
	_, *why = p.ask(q).capable()
	return *why != nil
}

// priority is what is left of a wait once it is counted in steps.
func (w Waiting) priority(policy Policy) int64 {
	if policy.Age <= 0 {
		return int64(w.Priority)
	}
	return int64(w.Priority) + int64(w.Waited/policy.Age)
}

// line is who waits for the same thing.
func (w Waiting) line() string {
	where := "in " + w.Request.Location
	if w.Request.RackID != "" {
		where = "on " + w.Request.RackID
	}
	if w.Request.Count == 0 {
		return strings.ToLower(where)
	}
	return strings.ToLower(where + "/" + w.Request.Model)
}

func (q *Quota) admits(count uint32) bool {
	return q.Unlimited || uint64(q.Held)+uint64(q.kept)+uint64(count) <= uint64(q.Maximum)
}

func unknownQuota(project string) *Refusal {
	return &Refusal{
		Reason:  orkv1.Reason_REASON_QUOTA_UNKNOWN,
		Message: fmt.Sprintf("the GPU quota of project %s is not known to the orchestrator, and what is not known is not given; app-node tells it when both are up", project),
	}
}

func (q *Quota) refuse(w Waiting) *Refusal {
	count := w.Request.Count
	text := fmt.Sprintf("%s wanted; project %s holds %d of the %d GPUs of its quota", w.Request.gpus(count), w.Project, q.Held, q.Maximum)
	switch {
	case count > q.Maximum:
		text += "; ask for fewer, or have an administrator raise the quota"
	case q.kept > 0 && uint64(q.Held)+uint64(count) <= uint64(q.Maximum):
		text += fmt.Sprintf(", and %d are kept for %s, which has waited longest", q.kept, q.keptFor)
	default:
		text += fmt.Sprintf(", %d too many; waits for others of the project to end", q.Held+count-q.Maximum)
	}
	return &Refusal{Reason: orkv1.Reason_REASON_OVER_QUOTA, Message: text}
}
