package app

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/label"
)

const (
	up1     = workerv1.AttemptPhase_ATTEMPT_PHASE_UP
	ended1  = workerv1.AttemptPhase_ATTEMPT_PHASE_ENDED
	failed1 = workerv1.AttemptPhase_ATTEMPT_PHASE_FAILED
)

func TestAMachineComesUpWithItsAgentAndNothingIsLeftAfterDelete(t *testing.T) {
	t.Parallel()
	d := start(t)
	w := begin(t, d, "life").serves()
	job, first := id(t, "j"), id(t, "a")
	w.claim(request("life", job, first, 2))
	w.claim(request("life", job, first, 2)) // asked again: the same answer
	if g := w.gpu("life-gpu-00"); g.Total != 8 {
		t.Fatalf("capacity %v", g)
	}
	st := w.until(first, up1)
	if n := st.Nodes[0]; n.VmiUid == "" || n.VmiName != first+"-n0" || n.GpuCount != 2 || len(n.Graph) != 5 {
		t.Fatalf("node %v", n)
	}
	for _, g := range st.Nodes[0].Graph {
		if g.State != "ready" {
			t.Errorf("%s %s is %s: %s", g.Kind, g.Name, g.State, g.Message)
		}
	}
	eventually(t, "the agent runs", func() string {
		if !d.ran(first) {
			return "no trace of it"
		}
		return ""
	})
	r, _ := w.Hub.Latest()
	if !r.Simulated || !r.Synced || r.RackId != "life" {
		t.Errorf("report %v", r)
	}
	if g := w.gpu("life-gpu-00"); g.Held != 2 || g.Offerable != 6 || g.Holders[first] != 2 {
		t.Errorf("capacity %v", g)
	}
	dv, err := d.admin.CDI.DataVolumes(namespace).Get(t.Context(), job+"-r0-n0-root", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if len(dv.OwnerReferences) > 0 {
		t.Errorf("the disk belongs to the attempt: %v", dv.OwnerReferences)
	}
	cm, err := d.admin.Core.ConfigMaps(namespace).Get(t.Context(), first, metav1.GetOptions{})
	if err != nil || strings.Contains(fmt.Sprint(cm.Data), "once") {
		t.Fatalf("anchor %v, %v", cm.Data, err)
	}

	// Stop keeps the disk; the next attempt has the same one.
	w.remove(first)
	w.gone(first)
	if left := d.left(t, of(first)); len(left) > 0 {
		t.Fatalf("left: %v", left)
	}
	if g := w.gpu("life-gpu-00"); g.Held != 0 || g.Offerable != 8 {
		t.Errorf("capacity %v", g)
	}
	second := id(t, "a")
	w.claim(request("life", job, second, 2))
	w.until(second, up1)
	again, err := d.admin.CDI.DataVolumes(namespace).Get(t.Context(), dv.Name, metav1.GetOptions{})
	if err != nil || again.UID != dv.UID {
		t.Fatalf("disk %v then %v, %v", dv.UID, again.UID, err)
	}
	if _, err := w.Server.DeleteJobDisks(t.Context(), &workerv1.DeleteJobDisksRequest{JobId: job}); err == nil {
		t.Fatal("disks of a job with an attempt were deleted")
	}
	w.remove(second)
	w.gone(second)
	if r, _ := w.Hub.Latest(); !contains(r.DiskJobIds, job) {
		t.Fatalf("disks of %v", r.DiskJobIds)
	}
	if _, err := w.Server.DeleteJobDisks(t.Context(), &workerv1.DeleteJobDisksRequest{JobId: job}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the disk is in no report", func() string {
		if r, _ := w.Hub.Latest(); contains(r.DiskJobIds, job) {
			return fmt.Sprint(r.DiskJobIds)
		}
		return ""
	})
	if left := d.left(t, label.Job+"="+job); len(left) > 0 {
		t.Fatalf("left: %v", left)
	}
	w.remove(second) // deleting what is absent is no error
}

func TestAGuestThatShutsItselfDownSucceeded(t *testing.T) {
	t.Parallel()
	d := start(t)
	w := begin(t, d, "gang").serves()
	job, attempt := id(t, "j"), id(t, "a")
	req := request("gang", job, attempt, 0)
	req.Nodes[0].Seed.StartScript = "poweroff"
	req.Spec.Gpu = nil
	w.claim(req)
	eventually(t, "it is over", func() string {
		st := w.status(attempt)
		if st.GetPhase() == ended1 && st.Reason == orkv1.Reason_REASON_GUEST_SHUTDOWN && st.GuestSucceeded {
			return ""
		}
		return fmt.Sprint(st)
	})
	// The outcome stays when the worker starts again.
	w.end()
	w = begin(t, d, "gang").serves()
	if st := w.until(attempt, ended1); !st.GuestSucceeded {
		t.Fatalf("after a restart: %v", st)
	}
	w.remove(attempt)
	w.gone(attempt)
}

func TestAGangIsMadeAndTakenDownWhole(t *testing.T) {
	t.Parallel()
	d := start(t)
	w := begin(t, d, "gang", func(s *Setup) { s.Config.Rack.ID = "gang-two"; joinedBy(s) })
	w.rack = "gang-two"
	w.Entry.Put(&orkv1.RackEntry{Id: "gang-two"})
	w.serves()
	job, attempt := id(t, "j"), id(t, "a")
	w.claim(request("gang", job, attempt, 8, "gang-gpu-00", "gang-gpu-01"))
	st := w.until(attempt, up1)
	if len(st.Nodes) != 2 || st.Nodes[0].VmiUid == st.Nodes[1].VmiUid || st.Nodes[1].NodeName != "gang-gpu-01" || len(st.Nodes[1].Graph) != 3 {
		t.Fatalf("nodes %v", st.Nodes)
	}
	// Somebody removes one member: the gang has failed, and says which.
	if err := d.admin.KubeVirt.VirtualMachineInstances(namespace).Delete(t.Context(), attempt+"-n1", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the gang is over", func() string {
		st := w.status(attempt)
		if (st.GetPhase() == failed1 || st.GetPhase() == ended1) && !st.GuestSucceeded && strings.Contains(st.Message, attempt+"-n1") {
			return ""
		}
		return fmt.Sprint(st)
	})
	w.remove(attempt)
	w.gone(attempt)
	if left := d.left(t, of(attempt)); len(left) > 0 {
		t.Fatalf("left: %v", left)
	}
}

// TestAKilledWorkerGoesOnWhereItWas kills the worker's process at many moments
// of an attempt's making.
func TestAKilledWorkerGoesOnWhereItWas(t *testing.T) {
	t.Parallel()
	d := start(t)
	for _, after := range []time.Duration{0, 30 * time.Millisecond, 120 * time.Millisecond, 600 * time.Millisecond, 2 * time.Second, 4 * time.Second} {
		job, attempt := id(t, "j"), id(t, "a")
		req := request("kill", job, attempt, 1)
		kill := startHelper(t, d, "kill", req)
		time.Sleep(after)
		before, err := d.admin.KubeVirt.VirtualMachineInstances(namespace).List(t.Context(), metav1.ListOptions{LabelSelector: of(attempt)})
		kill()
		if err != nil {
			t.Fatal(err)
		}
		w := begin(t, d, "kill").serves()
		w.claim(req)
		st := w.until(attempt, up1)
		if len(before.Items) > 0 && string(before.Items[0].UID) != st.Nodes[0].VmiUid {
			t.Fatalf("killed after %s: machine %s before, %s after", after, before.Items[0].UID, st.Nodes[0].VmiUid)
		}
		all, err := d.admin.KubeVirt.VirtualMachineInstances(namespace).List(t.Context(), metav1.ListOptions{LabelSelector: label.Job + "=" + job})
		if err != nil || len(all.Items) != 1 {
			t.Fatalf("killed after %s: %d machines, %v", after, len(all.Items), err)
		}
		// And killed again while it takes it down.
		w.remove(attempt)
		w.end()
		w = begin(t, d, "kill").serves()
		w.gone(attempt)
		if left := d.left(t, of(attempt)); len(left) > 0 {
			t.Fatalf("killed after %s: left %v", after, left)
		}
		w.end()
	}
}

func TestMoreAskThanTheRackHas(t *testing.T) {
	t.Parallel()
	d := start(t)
	w := begin(t, d, "race").serves()
	var wg sync.WaitGroup
	var mu sync.Mutex
	var granted []string
	for i := range 20 {
		job, attempt := fmt.Sprintf("j-race%d", i), fmt.Sprintf("a-race%d", i)
		wg.Go(func() {
			res, err := w.Server.ApplyAttempt(context.Background(), request("race", job, attempt, 1))
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err != nil:
				t.Errorf("%s: %v", attempt, err)
			case res.Claimed:
				granted = append(granted, attempt)
			case res.Reason != orkv1.Reason_REASON_BUSY:
				t.Errorf("%s: %v %s", attempt, res.Reason, res.Message)
			}
		})
	}
	wg.Wait()
	if len(granted) != 8 {
		t.Fatalf("%d granted: %v", len(granted), granted)
	}
	for _, a := range granted {
		w.until(a, up1)
	}
	if g := w.gpu("race-gpu-00"); g.Held != 8 || g.Offerable != 0 {
		t.Fatalf("capacity %v", g)
	}
	for _, a := range granted {
		w.remove(a)
	}
	for _, a := range granted {
		w.gone(a)
	}
	if g := w.gpu("race-gpu-00"); g.Held != 0 || g.Offerable != 8 {
		t.Fatalf("capacity %v", g)
	}
}

func contains(list []string, s string) bool {
	for _, x := range list {
		if x == s {
			return true
		}
	}
	return false
}

func TestNamesOfAnyScriptPassThroughTheClusterByteForByte(t *testing.T) {
	t.Parallel()
	d := start(t)
	w := begin(t, d, "names").serves()
	names := map[string]string{}
	for _, name := range []string{"campaña", "模型-1", "🦙🦙", "مرحبا", "e\u0301", "\u00e9", "../x", strings.Repeat("é", 64)} {
		a := id(t, "a")
		req := request("names", id(t, "j"), a, 1)
		req.Spec.Name = name
		w.claim(req)
		names[a] = name
	}
	for a, name := range names {
		vmi, err := d.admin.KubeVirt.VirtualMachineInstances(namespace).Get(t.Context(), w.until(a, up1).Nodes[0].VmiName, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if vmi.Annotations[label.JobName] != name {
			t.Errorf("%q became %q", name, vmi.Annotations[label.JobName])
		}
		w.remove(a)
	}
	for a := range names {
		w.gone(a)
	}
}
