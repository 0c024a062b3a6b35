// Package volume sees each recorded volume through its life: it compares what is
// recorded with what the racks' workers report, writes down what follows, and has
// workers make and remove.
//
// It is level-triggered: every pass decides from what is there, an order is repeated
// until its effect is seen, and a process killed at any point costs a repetition. One
// goroutine decides; at most one call is under way for a volume, so that a removal
// never overtakes a creation. It concludes nothing from silence: a volume of a rack
// that is away stays as it was.
//
// A volume that was ready once is never made again: under its name there would be an
// empty disk. Who may have a volume is decided where that is recorded (package record).
package volume

import (
	"fmt"
	"time"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/rack"
)

// The states of a volume.
const (
	creating = orkv1.VolumeState_VOLUME_STATE_CREATING
	ready    = orkv1.VolumeState_VOLUME_STATE_READY
	failed   = orkv1.VolumeState_VOLUME_STATE_FAILED
	lost     = orkv1.VolumeState_VOLUME_STATE_LOST
	deleting = orkv1.VolumeState_VOLUME_STATE_DELETING
)

// order is what is due for a volume.
type order int

const (
	nothing order = iota
	apply         // have its worker make it
	remove        // have its worker remove it
	forget        // nothing of it is left: the record goes
)

// sight is what is seen of one volume.
type sight struct {
	now time.Time
	// known: its rack has an entry.
	known bool
	view  rack.View
	// absentSince is when a complete report was first without it; zero while none was.
	absentSince time.Time
	// removedAt is when its worker took the order to remove it, zero when it did not.
	removedAt time.Time
	// grace is how long a ready volume must be absent before it counts as lost.
	grace time.Duration
}

// complete reports whether the absence of something in the report means anything.
func (s sight) complete() bool {
	r := s.view.Report
	return s.known && s.view.Connected && r != nil && r.Synced && r.ClusterFault == ""
}

// decide is the state that follows from what is seen, its words, and what is due. It
// is a pure function.
func decide(v *orkv1.Volume, s sight) (orkv1.VolumeState, string, order) {
	if v.State == deleting && v.Location == "" {
		// Its rack was removed by force and cannot be asked; what is there is listed with
		// what that removal left.
		return deleting, v.Message, forget
	}
	if !s.complete() {
		return v.State, v.Message, nothing
	}
	st := s.view.Volume(v.Id)
	if v.State == deleting {
		switch {
		case st == nil && s.removedAt.IsZero(), st != nil && !st.Deleting:
			return deleting, "the rack's worker is told to remove it", remove
		case st == nil && s.view.ReportedAt.After(s.removedAt):
			return deleting, v.Message, forget
		case st == nil:
			return deleting, v.Message, nothing
		}
		return deleting, orText(st.Message, "the cluster is removing it"), nothing
	}
	switch {
	case st == nil && v.State == creating:
		return creating, v.Message, apply
	case st == nil && v.State == ready && !s.absentSince.IsZero() && s.now.Sub(s.absentSince) >= s.grace:
		return lost, fmt.Sprintf("somebody else removed it from the cluster of rack %s: what was on it is gone", v.RackId), nothing
	case st == nil:
		return v.State, v.Message, nothing
	case st.Deleting && v.State == creating:
		return creating, "a former volume of this id is still being removed", nothing
	case st.Deleting:
		return v.State, "somebody else asked the cluster to remove it; what is on it goes when its VM stops, copy it away before that", nothing
	case st.Usable:
		return ready, st.Message, nothing
	case st.Failed:
		return failed, orText(st.Message, "the cluster says no more"), nothing
	}
	return v.State, st.Message, nothing
}

func orText(text, otherwise string) string {
	if text == "" {
		return otherwise
	}
	return text
}

// Show adds to a recorded volume what only its rack's newest report can say.
func Show(v *orkv1.Volume, view rack.View, known bool) *orkv1.Volume {
	switch {
	case !known:
		v.Message = fmt.Sprintf("rack %s was removed from the network; nothing can be said of what is there until it is back", v.RackId)
	case !view.Connected:
		v.Message = fmt.Sprintf("the worker of rack %s cannot be reached; nothing is assumed of it", v.RackId)
	case view.Report.GetClusterFault() != "":
		v.Message = fmt.Sprintf("the cluster of rack %s cannot be asked: %s", v.RackId, view.Report.ClusterFault)
	}
	if st := view.Volume(v.Id); st != nil && st.StorageClass != "" {
		v.StorageClass = st.StorageClass
	}
	return v
}
