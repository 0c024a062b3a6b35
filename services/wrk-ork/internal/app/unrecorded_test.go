package app

import (
	"slices"
	"strings"
	"testing"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/health"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
)

// TestWhatNoRecordKnowsIsToldAndClearedByAnOperatorAlone: an older copy of the
// record was brought back, and a rack holds a VM and a disk that are newer.
func TestWhatNoRecordKnowsIsToldAndClearedByAnOperatorAlone(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 2))
	known := l.create(containerSpec("known", 1))
	attempt := newest(l.await(known.Id, orkv1.State_STATE_PROVISIONING)).Id
	l.worker.change(func() {
		l.worker.attempts["a-newer"] = &workerv1.AttemptStatus{AttemptId: "a-newer", JobId: "j-newer", Phase: workerv1.AttemptPhase_ATTEMPT_PHASE_UP}
		l.worker.disks["j-newer"], l.worker.disks["j-newer-two"] = true, true
	})
	told := func() bool {
		return slices.ContainsFunc(l.health.List(), func(w *meshv1.Warning) bool {
			return w.Code == string(health.UnrecordedWork) && strings.Contains(w.Text, "2 jobs") && strings.Contains(w.Text, "j-newer")
		})
	}
	l.eventually("the operator is told", told)
	// However often it is looked at, nothing of it is touched.
	for range 3 {
		before := l.passes.Load()
		l.eventually("it is looked at again", func() bool { return l.passes.Load() > before })
	}
	l.worker.change(func() {
		if st := l.worker.attempts["a-newer"]; st == nil || st.Phase != workerv1.AttemptPhase_ATTEMPT_PHASE_UP || !l.worker.disks["j-newer"] {
			t.Error("it was touched without a word from anybody")
		}
	})

	clearRack := func(confirm string) (*orkv1.ResolveAbandonedResponse, error) {
		return l.racks.ResolveAbandoned(l.ctx, &orkv1.ResolveAbandonedRequest{
			RackId: "rk-test", Action: orkv1.AbandonedAction_ABANDONED_ACTION_DELETE, Confirm: confirm, Actor: "op",
		})
	}
	_, err := clearRack("")
	refused(t, err, fault.Invalid, "not confirmed")
	r, err := clearRack("rk-test")
	if err != nil || r.Attempts != 1 {
		t.Fatalf("%v, %v", r, err)
	}
	l.eventually("only what is recorded is left", func() bool {
		l.worker.mu.Lock()
		defer l.worker.mu.Unlock()
		return len(l.worker.attempts) == 1 && l.worker.attempts[attempt] != nil && len(l.worker.disks) == 1 && l.worker.disks[known.Id]
	})
	l.eventually("the warning is gone", func() bool { return !l.health.Has(health.UnrecordedWork) })
	if _, err = clearRack("rk-test"); fault.KindOf(err) != fault.NotFound {
		t.Errorf("nothing more to clear: %v", err)
	}
}
