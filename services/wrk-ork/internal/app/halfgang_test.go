package app

import (
	"strings"
	"testing"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

// TestAGangWithANodeThatFailsIsGivenUpWholeAndNamesIt: a replica over two nodes,
// the second of which fails every VM.
func TestAGangWithANodeThatFailsIsGivenUpWholeAndNamesIt(t *testing.T) {
	t.Parallel()
	l := startLab(t, false, []*orkv1.RackNode{gpuNode("n1", 4), gpuNode("n2", 4)}, func(w *fakeWorker) {
		w.fabric, w.reject = true, map[string]int{"n2": 1000}
	})
	s := inferenceSpec("gang", 1)
	s.Gpu.Count = 8
	gang := l.create(s).Id
	waits := l.awaitThat(gang, "waiting for the node that is closed", func(j *orkv1.Job) bool {
		return j.State == orkv1.State_STATE_QUEUED && j.Reason == orkv1.Reason_REASON_QUARANTINED
	})
	if !strings.Contains(waits.Message, "n2") {
		t.Errorf("it waits for %q", waits.Message)
	}
	attempts := waits.Replicas[0].Attempts
	if len(attempts) != 3 {
		t.Errorf("%d attempts, want two that failed and one that waits", len(attempts))
	}
	for _, a := range attempts[:len(attempts)-1] {
		if len(a.Nodes) != 2 || a.State != orkv1.State_STATE_FAILED || !strings.Contains(a.Message, "node n2") || a.RunningAt != nil || !a.Gone {
			t.Errorf("%v", a)
		}
	}
	if all := l.quarantines(); len(all) != 1 || all[0].NodeName != "n2" {
		t.Errorf("the good node is blamed too: %v", all)
	}
	// Nothing is held of the good half.
	half := l.create(containerSpec("half", 4)).Id
	if a := newest(l.await(half, orkv1.State_STATE_PROVISIONING)); a.Nodes[0].NodeName != "n1" {
		t.Errorf("placed on %v", a.Nodes)
	}
	l.delete(gang)
	l.delete(half)
	if !l.worker.empty() {
		t.Error("something of the gang is left")
	}
}
