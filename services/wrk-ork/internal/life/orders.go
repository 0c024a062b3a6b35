package life

import (
	"time"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
)

// OrderKind says what is to be done.
type OrderKind int

// The orders. Each may be repeated without harm.
const (
	// Propose the attempt's plan to its rack's worker.
	Propose OrderKind = iota + 1
	// Delete the attempt at its rack's worker.
	Delete
	// DeleteDisks removes the job's root disks on a rack.
	DeleteDisks
	// Drain tells the attempt's agent to finish what it has.
	Drain
	// Remove the job's record: nothing is left anywhere.
	Remove
)

// Order is one thing to do about a job.
type Order struct {
	Kind      OrderKind
	RackID    string
	ReplicaID string
	AttemptID string
	Reason    orkv1.Reason
	// Deadline of a drain.
	Deadline time.Time
}

// Orders lists what is due for a job as it is recorded. Whether the rack can
// be reached, and how soon to repeat, is the caller's matter.
func Orders(l Limits, j *job.Job, s Sight) []Order {
	var orders []Order
	settled := true
	for _, r := range j.Replicas {
		for _, a := range r.Attempts {
			seen := s.Attempts[a.ID]
			if !a.Settled() {
				settled = false
			}
			o := Order{RackID: a.RackID, ReplicaID: r.ID, AttemptID: a.ID, Reason: a.Reason}
			switch {
			case a.Abandoned.Set():
				continue // an operator decides about it
			case a.State == reserving:
				o.Kind = Propose
			case a.State == stopping && j.Inference() && !drained(l, a, seen, s.Now):
				o.Kind, o.Deadline = Drain, a.StoppingAt.Add(l.Drain)
			case seen.Proposing:
				// A delete that overtakes a proposal would be answered "nothing
				// here" by a worker that claims a moment later.
				continue
			case a.State == stopping, job.Ended(a.State) && !a.Gone && a.Sent:
				o.Kind = Delete
			default:
				continue
			}
			orders = append(orders, o)
		}
	}
	if j.Intent != job.IntentDelete || !settled {
		return orders
	}
	clean := true
	for _, id := range j.Touched {
		rack, ok := s.Racks[id]
		if !ok || disksGone(rack) {
			// A rack whose entry was removed cannot be asked; removing it was
			// refused while it held attempts.
			continue
		}
		clean = false
		if rack.Disk || rack.DisksDeletedAt.IsZero() {
			orders = append(orders, Order{Kind: DeleteDisks, RackID: id})
		}
	}
	if clean {
		orders = append(orders, Order{Kind: Remove})
	}
	return orders
}
