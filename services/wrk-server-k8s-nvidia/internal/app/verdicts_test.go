package app

import (
	"fmt"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/label"
)

// TestWhatGoesWrongInTheClusterEndsWithItsCauseAndLeavesNothing switches one fault
// for each of many attempts of one rack.
func TestWhatGoesWrongInTheClusterEndsWithItsCauseAndLeavesNothing(t *testing.T) {
	t.Parallel()
	d := start(t)
	const limit = 20 * time.Second // longer than anything takes that is not meant to fail here
	w := begin(t, d, "fault", joinedBy, func(s *Setup) {
		l := &s.Config.Deadlines
		l.Bound, l.ImportIdle, l.Scheduling, l.Scheduled = limit, limit/2, limit, limit
	}).serves()
	const (
		image, refused = orkv1.Reason_REASON_IMAGE_UNAVAILABLE, orkv1.Reason_REASON_CLUSTER_REFUSED
		vm, late       = orkv1.Reason_REASON_VM_FAILED, orkv1.Reason_REASON_DEADLINE
	)
	cases := []struct {
		fault  string // of the node when it has one, else of the disk
		node   string
		reason orkv1.Reason
		words  []string
	}{
		{"import-too-small", "", image, []string{"the image needs a disk of 80 GiB and the root disk has room for 20 GiB"}},
		{"import-no-scratch", "", refused, []string{"no scratch space for imports", "scratchSpaceStorageClass"}},
		{"import-refused", "", image, []string{"cannot be pulled"}},
		{"import-stalled", "", late, []string{"no progress", "37 %"}},
		{"storage-pending", "", late, []string{"no storage after 20s"}},
		{"vfio-busy", "fault-gpu-00", vm, []string{"node fault-gpu-00 could not hand over the GPU", "/dev/vfio/42"}},
		{"vfio-missing", "fault-gpu-01", vm, []string{"node fault-gpu-01 could not hand over the GPU", "no such file"}},
		{"stuck-scheduled", "fault-gpu-02", late, []string{"does not start on node fault-gpu-02 after 20s"}},
		{"stuck-scheduling", "fault-gpu-03", late, []string{"is not up after 20s", "pod sandbox"}},
		{"oom-killed", "fault-gpu-04", vm, []string{"OOMKilled", "additionalGuestMemoryOverheadRatio"}},
		{"reject-pods", "fault-gpu-05", vm, []string{"refused the pod its devices", "UnexpectedAdmissionError"}},
	}
	for i := range cases {
		c := &cases[i]
		target := c.node
		if target == "" {
			c.node, target = "fault-gpu-06", "j-"+c.fault+"-"
		}
		d.breaks(t, c.fault, target)
	}
	time.Sleep(2 * time.Second) // the switches are read each second
	ids := func(i int) (job, attempt string) {
		return fmt.Sprintf("j-%s-%d", cases[i].fault, i), fmt.Sprintf("a-%s-%d", cases[i].fault, i)
	}
	for i, c := range cases { // all at once: each takes its time
		job, attempt := ids(i)
		w.claim(request("fault", job, attempt, 1, c.node))
	}
	gang := id(t, "a") // over a node where no machine starts and a good one
	w.claim(vllm(id(t, "j"), gang, 2, "fault-gpu-07", "fault-gpu-00"))
	t.Run("half a gang", func(t *testing.T) {
		eventually(t, "all of it is given up, and the node named", func() string {
			if st := w.status(gang); st.GetPhase() != failed1 || !strings.Contains(st.Message, "node fault-gpu-00 could not hand over the GPU") {
				return fmt.Sprint(st)
			}
			return ""
		})
		if g := w.gpu("fault-gpu-07"); g.Holders[gang] != 2 {
			t.Errorf("the good half is held until it is gone: %v", g)
		}
		w.remove(gang)
		w.gone(gang)
		for _, node := range []string{"fault-gpu-07", "fault-gpu-00"} {
			if g := w.gpu(node); g.Holders[gang] != 0 {
				t.Errorf("node %s still counts it: %v", node, g)
			}
		}
		if left := d.left(t, of(gang)); len(left) > 0 {
			t.Errorf("left %v", left)
		}
	})
	for i, c := range cases {
		t.Run(c.fault, func(t *testing.T) {
			job, attempt := ids(i)
			var st *workerv1.AttemptStatus
			eventually(t, "it is given up", func() string {
				if st = w.status(attempt); st.GetPhase() == failed1 || st.GetPhase() == ended1 {
					return ""
				}
				return fmt.Sprint(st)
			})
			if st.Reason != c.reason || st.GuestSucceeded {
				t.Errorf("reason %v: %s", st.Reason, st.Message)
			}
			for _, words := range c.words {
				if !strings.Contains(st.Message, words) {
					t.Errorf("nothing of %q in: %s", words, st.Message)
				}
			}
			w.remove(attempt)
			w.gone(attempt)
			if left := d.left(t, label.Job+"="+job); len(left) > 0 && !strings.HasPrefix(left[0], "DataVolume") {
				t.Errorf("left %v", left)
			}
			w.insist("delete the disks", deleteDisks(w, job))
			eventually(t, "nothing is left", func() string { return strings.Join(d.left(t, label.Job+"="+job), ", ") })
			r, _ := w.Hub.Latest()
			for _, n := range r.Nodes {
				for _, g := range n.Gpus {
					if g.Holders[attempt] > 0 {
						t.Errorf("node %s still counts it: %v", n.Name, g)
					}
				}
			}
		})
	}
}

// TestMachinesOfOneNodeThatFailTogetherAreTheNodesDoing ends three at once.
func TestMachinesOfOneNodeThatFailTogetherAreTheNodesDoing(t *testing.T) {
	t.Parallel()
	d := start(t)
	w := begin(t, d, "reject").serves()
	var attempts []string
	for i := range 3 {
		attempt := fmt.Sprintf("%s-%d", id(t, "a"), i)
		w.claim(request("reject", strings.Replace(attempt, "a-", "j-", 1), attempt, 1))
		attempts = append(attempts, attempt)
	}
	var uids []string
	for _, a := range attempts {
		uids = append(uids, w.until(a, up1).Nodes[0].VmiUid)
	}
	for _, uid := range uids {
		d.kill(t, uid)
	}
	for _, a := range attempts {
		if st := w.until(a, ended1); st.Reason != orkv1.Reason_REASON_NODE_LOST || !strings.Contains(st.Message, "3 VMs of node reject-gpu-00 failed within a minute") {
			t.Errorf("%s: %v %s", a, st.Reason, st.Message)
		}
	}
	if g := w.gpu("reject-gpu-00"); g.Held != 3 {
		t.Errorf("capacity %v", g)
	}
	for _, a := range attempts {
		w.remove(a)
		w.gone(a)
		if left := d.left(t, of(a)); len(left) > 0 {
			t.Errorf("left %v", left)
		}
	}
	// One alone is its own.
	attempt := id(t, "a")
	w.claim(request("reject", strings.Replace(attempt, "a-", "j-", 1), attempt, 1))
	d.kill(t, w.until(attempt, up1).Nodes[0].VmiUid)
	if st := w.until(attempt, ended1); st.Reason != orkv1.Reason_REASON_VM_FAILED {
		t.Errorf("%v %s", st.Reason, st.Message)
	}
	w.remove(attempt)
	w.gone(attempt)
	if g := w.gpu("reject-gpu-00"); g.Held != 0 {
		t.Errorf("capacity %v", g)
	}
}

// TestADiskThatWaitsForItsConsumerIsBoundWhereTheClaimIs uses a storage class of
// which volumes are made on the node of their first pod.
func TestADiskThatWaitsForItsConsumerIsBoundWhereTheClaimIs(t *testing.T) {
	t.Parallel()
	d := start(t)
	w := begin(t, d, "wait", func(s *Setup) { s.Config.StorageClass = "simulated-wait" }).serves()
	job, attempt := id(t, "j"), id(t, "a")
	w.claim(request("wait", job, attempt, 2, "wait-gpu-01"))
	held := func() string {
		if g := w.gpu("wait-gpu-01"); g.Held != 2 || g.Offerable != 0 {
			return g.String()
		}
		return ""
	}
	eventually(t, "its GPUs are held", held)
	var st *workerv1.AttemptStatus
	eventually(t, "it is up, and its GPUs are held all along", func() string {
		if words := held(); words != "" {
			t.Fatalf("capacity on the way: %s", words)
		}
		if st = w.status(attempt); st.GetPhase() != up1 {
			return fmt.Sprint(st)
		}
		return ""
	})
	pods, err := d.admin.Core.Pods(namespace).List(t.Context(), metav1.ListOptions{LabelSelector: of(attempt)})
	if err != nil || len(pods.Items) != 1 || pods.Items[0].Spec.NodeName != "wait-gpu-01" {
		t.Fatalf("%d pods, %v", len(pods.Items), err)
	}
	w.remove(attempt)
	w.gone(attempt)
	w.insist("delete the disks", deleteDisks(w, job))
	eventually(t, "nothing is left", func() string { return strings.Join(d.left(t, label.Job+"="+job), ", ") })
	if g := w.gpu("wait-gpu-01"); g.Held != 0 || g.Offerable != 2 {
		t.Errorf("capacity %v", g)
	}
}
