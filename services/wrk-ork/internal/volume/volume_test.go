package volume

import (
	"strings"
	"testing"
	"time"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/rack"
)

// TestWhatIsSeenOfAVolumeDecidesItsState goes through what a report may say.
func TestWhatIsSeenOfAVolumeDecidesItsState(t *testing.T) {
	t.Parallel()
	now := time.Now()
	entry := &orkv1.RackEntry{Id: "rk-1"}
	seen := func(fault string, all ...*workerv1.VolumeStatus) sight {
		return sight{now: now, known: true, grace: time.Second,
			view: rack.NewView(entry, true, now, &workerv1.WatchRackResponse{RackId: "rk-1", Synced: true, ClusterFault: fault, Volumes: all})}
	}
	with := func(s sight, change func(*sight)) sight { change(&s); return s }
	usable := &workerv1.VolumeStatus{VolumeId: "v-1", Usable: true}
	going := &workerv1.VolumeStatus{VolumeId: "v-1", Usable: true, Deleting: true}
	pending := &workerv1.VolumeStatus{VolumeId: "v-1", Message: "Pending: no space in the pool"}
	broken := &workerv1.VolumeStatus{VolumeId: "v-1", Failed: true, Message: "ErrClaimNotValid"}
	absentLong := func(s *sight) { s.absentSince = now.Add(-time.Minute) }
	for _, c := range []struct {
		what  string
		is    orkv1.VolumeState
		s     sight
		want  orkv1.VolumeState
		due   order
		words string
	}{
		{"rack without an entry", creating, sight{now: now}, creating, nothing, ""},
		{"rack that is away", deleting, with(seen(""), func(s *sight) { s.view.Connected = false }), deleting, nothing, ""},
		{"cluster that does not answer", ready, with(seen("no route to host"), absentLong), ready, nothing, ""},
		{"new", creating, seen(""), creating, apply, ""},
		{"being made", creating, seen("", pending), creating, nothing, "no space"},
		{"made", creating, seen("", usable), ready, nothing, ""},
		{"not taken", creating, seen("", broken), failed, nothing, "ErrClaimNotValid"},
		{"mended", failed, seen("", usable), ready, nothing, ""},
		{"absent for a moment", ready, with(seen(""), func(s *sight) { s.absentSince = now }), ready, nothing, ""},
		{"removed by somebody else", ready, with(seen(""), absentLong), lost, nothing, "somebody else removed it"},
		{"lost stays lost", lost, with(seen(""), absentLong), lost, nothing, ""},
		{"refused stays failed", failed, with(seen(""), absentLong), failed, nothing, ""},
		{"found again", lost, seen("", usable), ready, nothing, ""},
		{"somebody else removes it", ready, seen("", going), ready, nothing, "copy it away"},
		{"to be deleted", deleting, seen("", usable), deleting, remove, ""},
		{"to be deleted, never made", deleting, seen(""), deleting, remove, ""},
		{"being deleted", deleting, seen("", going), deleting, nothing, "removing"},
		{"the report is older than the order", deleting, with(seen(""), func(s *sight) { s.removedAt = now.Add(time.Second) }), deleting, nothing, ""},
		{"gone", deleting, with(seen(""), func(s *sight) { s.removedAt = now.Add(-time.Second) }), deleting, forget, ""},
	} {
		state, words, due := decide(&orkv1.Volume{Id: "v-1", RackId: "rk-1", Location: "us", State: c.is}, c.s)
		if state != c.want || due != c.due || !strings.Contains(words, c.words) {
			t.Errorf("%s: %v, %q, order %d; want %v, order %d", c.what, state, words, due, c.want, c.due)
		}
	}
	if _, _, due := decide(&orkv1.Volume{Id: "v-1", RackId: "rk-1", State: deleting}, sight{now: now}); due != forget {
		t.Errorf("a deleted volume of a rack without an entry is kept: order %d", due)
	}
}
