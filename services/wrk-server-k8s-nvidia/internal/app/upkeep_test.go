package app

import (
	"fmt"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/label"
)

// TestARootDiskDeletedUnderAMachineIsSaidWhileThereIsTimeToCopy deletes it by hand.
func TestARootDiskDeletedUnderAMachineIsSaidWhileThereIsTimeToCopy(t *testing.T) {
	t.Parallel()
	d := start(t)
	w := begin(t, d, "disk").serves()
	job, attempt := id(t, "j"), id(t, "a")
	w.claim(request("disk", job, attempt, 1))
	up := w.until(attempt, up1)
	if up.DiskLostSince != nil {
		t.Fatalf("a disk that is there: %v", up)
	}
	disk := job + "-r0-n0-root"
	if err := d.admin.CDI.DataVolumes(namespace).Delete(t.Context(), disk, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "its owner is told", func() string {
		st := w.status(attempt)
		for _, g := range st.GetNodes()[0].GetGraph() {
			if g.Kind == "DataVolume" && g.State == "gone" && st.DiskLostSince != nil && strings.Contains(st.Message, "copy it away") {
				return ""
			}
		}
		return fmt.Sprint(st)
	})
	if st := w.status(attempt); st.Phase != up1 || st.Nodes[0].VmiUid != up.Nodes[0].VmiUid {
		t.Fatalf("the running machine: %v", st)
	}
	w.remove(attempt)
	w.gone(attempt)
	eventually(t, "nothing is left and nothing is said to be kept", func() string {
		if r, _ := w.Hub.Latest(); contains(r.DiskJobIds, job) {
			return "the report lists its disk"
		}
		return strings.Join(d.left(t, label.Job+"="+job), ", ")
	})
	// The next attempt begins with an empty disk, and that can be read.
	second := id(t, "a")
	req := request("disk", job, second, 1)
	req.AttemptNumber = 2
	w.claim(req)
	if st := w.until(second, up1); !strings.Contains(fmt.Sprint(st.Nodes[0].Graph), "none of an earlier attempt was here") {
		t.Errorf("a new disk passes for the old one: %v", st.Nodes[0].Graph)
	}
	w.remove(second)
	w.gone(second)
}

// TestANodeThatWasDeletedKeepsItsGPUsInTheLedger deletes the Node object under
// running machines.
func TestANodeThatWasDeletedKeepsItsGPUsInTheLedger(t *testing.T) {
	t.Parallel()
	d := start(t)
	w := begin(t, d, "vanish").serves()
	job, attempt := id(t, "j"), id(t, "a")
	w.claim(request("vanish", job, attempt, 2))
	w.until(attempt, up1)
	if err := d.admin.Core.Nodes().Delete(t.Context(), "vanish-gpu-00", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the ledger says what is held there", func() string {
		r, _ := w.Hub.Latest()
		for _, n := range r.Nodes {
			if n.Name == "vanish-gpu-00" && strings.Contains(n.Message, "missing") && len(n.Gpus) == 1 && n.Gpus[0].Held == 2 && n.Gpus[0].Offerable == 0 {
				return ""
			}
		}
		return fmt.Sprint(r.Nodes)
	})
	// The pods are collected with the node some time later: then it was lost, and
	// it did not shut itself down.
	var last string
	eventually(t, "it ends as lost with its node, or waits for that", func() string {
		st := w.status(attempt)
		last = fmt.Sprint(st)
		switch {
		case st.GetPhase() == ended1 && st.Reason == orkv1.Reason_REASON_NODE_LOST && !st.GuestSucceeded:
			return ""
		case st.GetPhase() == ended1 || st.GetPhase() == failed1:
			t.Fatalf("ended as %v", st)
		}
		return last
	})
	if g := w.gpu("vanish-gpu-00"); g.Held != 2 {
		t.Errorf("its GPUs are free before it was taken down: %v", g)
	}
	w.remove(attempt)
	w.gone(attempt)
	eventually(t, "the missing node is in no report any more", func() string {
		if r, _ := w.Hub.Latest(); len(r.Nodes) > 0 {
			return fmt.Sprint(r.Nodes)
		}
		return ""
	})
	if left := d.left(t, of(attempt)); len(left) > 0 {
		t.Fatalf("left %v", left)
	}
}

// TestADrainedNodeIsGivenUpAfterTheDeadlineAndNotBefore drains the node as kubectl
// does: its pods are evicted, and KubeVirt's webhook marks their machines.
func TestADrainedNodeIsGivenUpAfterTheDeadlineAndNotBefore(t *testing.T) {
	t.Parallel()
	d := start(t)
	w := begin(t, d, "drain", func(s *Setup) { s.Config.Deadlines.Eviction = 6 * time.Second }).serves()
	job, attempt := id(t, "j"), id(t, "a")
	w.claim(request("drain", job, attempt, 1))
	w.until(attempt, up1)
	draining := func(yes bool) {
		eventually(t, fmt.Sprintf("draining is %v", yes), func() string {
			if st := w.status(attempt); st.GetPhase() != up1 || (st.Reason == orkv1.Reason_REASON_DRAINED) != yes {
				return fmt.Sprint(st)
			}
			return ""
		})
	}
	d.breaks(t, "node-drained", "drain-gpu-00")
	draining(true)
	if st := w.status(attempt); !strings.Contains(st.Message, "is being drained since") || !strings.Contains(st.Message, "is stopped at") {
		t.Errorf("what its owner reads: %q", st.Message)
	}
	d.breaks(t, "node-drained", "") // uncordoned: taken back
	draining(false)
	d.breaks(t, "node-drained", "drain-gpu-00")
	if st := w.until(attempt, failed1); st.Reason != orkv1.Reason_REASON_DRAINED || !strings.Contains(st.Message, "drain-gpu-00") {
		t.Fatalf("status %v", st)
	}
	if g := w.gpu("drain-gpu-00"); g.Held != 1 {
		t.Errorf("its GPU is free already: %v", g)
	}
	w.remove(attempt)
	w.gone(attempt)
	d.breaks(t, "node-drained", "")
	if g := w.gpu("drain-gpu-00"); g.Held != 0 {
		t.Errorf("capacity %v", g)
	}
}
