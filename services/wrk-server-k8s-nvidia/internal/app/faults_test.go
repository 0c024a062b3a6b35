package app

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	kubevirt "kubevirt.io/api/core/v1"

	"github.com/cosmicac/cosmicac/pkg/health"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/claim"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/graph"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/label"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/preflight"
)

func TestAnImageThatCannotBePulled(t *testing.T) {
	t.Parallel()
	d := start(t)
	w := begin(t, d, "image").serves()
	job, attempt := id(t, "j"), id(t, "a")
	req := request("image", job, attempt, 1)
	req.Spec.Image.Reference = "images.example/does-not-exist:1"
	w.claim(req)
	st := w.until(attempt, failed1)
	if st.Reason != orkv1.Reason_REASON_IMAGE_UNAVAILABLE || !strings.Contains(st.Message, "manifest unknown") {
		t.Fatalf("status %v", st)
	}
	if g := w.gpu("image-gpu-00"); g.Held != 1 {
		t.Errorf("its GPU is free before it is removed: %v", g)
	}
	w.remove(attempt)
	w.gone(attempt)
	// The disk that was never filled does not wait for the next attempt.
	eventually(t, "nothing is left of the job", func() string {
		return strings.Join(d.left(t, label.Job+"="+job), ", ")
	})
}

func TestAGPUThatKubeVirtDoesNotPermit(t *testing.T) {
	t.Parallel()
	d := start(t)
	w := begin(t, d, "permit").serves()
	job, attempt := id(t, "j"), id(t, "a")
	req := request("permit", job, attempt, 1)
	req.Spec.Gpu.Model = "AD104GL_L4"
	w.claim(req)
	// Taken off the list between the claim and the machine.
	forbid(t, d, "nvidia.com/AD104GL_L4")
	st := w.until(attempt, failed1)
	if st.Reason != orkv1.Reason_REASON_CLUSTER_REFUSED || !strings.Contains(st.Message, "not permitted") {
		t.Fatalf("status %v", st)
	}
	w.remove(attempt)
	w.gone(attempt)
	// From now on the plan itself is refused.
	req = request("permit", id(t, "j"), id(t, "a"), 1)
	req.Spec.Gpu.Model = "AD104GL_L4"
	if res := w.apply(req); res.Claimed || res.Reason != orkv1.Reason_REASON_CLUSTER_REFUSED {
		t.Fatalf("answer %v", res)
	}
}

// strayVMI is a machine as the rack's worker would make it.
func strayVMI(rack, attempt string) *kubevirt.VirtualMachineInstance {
	settings := graph.Settings{Rack: rack, Network: network, AgentImage: "agents:test"}
	rec := &claim.Record{
		Version: 1, AttemptID: attempt, JobID: "j-stray", ReplicaID: "r-stray", Image: "docker://x", DiskBytes: 1 << 30,
		Nodes: []claim.RecordNode{{Node: rack + "-gpu-00", CPUCores: 1, MemoryBytes: 1 << 30}},
	}
	return settings.VMI(rec, "", 0)
}

// forbid takes a resource off KubeVirt's list.
func forbid(t *testing.T, d *devcluster, resource string) {
	t.Helper()
	eventually(t, resource+" is off the list", func() string {
		list, err := d.admin.KubeVirt.KubeVirts(metav1.NamespaceAll).List(t.Context(), metav1.ListOptions{})
		if err != nil || len(list.Items) != 1 {
			return fmt.Sprintf("%d KubeVirt objects, %v", len(list.Items), err)
		}
		k := &list.Items[0]
		var keep []kubevirt.PciHostDevice
		for _, p := range k.Spec.Configuration.PermittedHostDevices.PciHostDevices {
			if p.ResourceName != resource {
				keep = append(keep, p)
			}
		}
		k.Spec.Configuration.PermittedHostDevices.PciHostDevices = keep
		if _, err := d.admin.KubeVirt.KubeVirts(k.Namespace).Update(t.Context(), k, metav1.UpdateOptions{}); err != nil {
			return err.Error()
		}
		return ""
	})
}

func TestTheDevicePluginReportsNothingWhileMachinesRun(t *testing.T) {
	t.Parallel()
	d := start(t)
	w := begin(t, d, "plugin").serves()
	job, attempt := id(t, "j"), id(t, "a")
	w.claim(request("plugin", job, attempt, 3))
	uid := w.until(attempt, up1).Nodes[0].VmiUid
	d.breaks(t, "allocatable-zero", "plugin-gpu-00")
	eventually(t, "the count says so", func() string {
		g := w.gpu("plugin-gpu-00")
		if g.Total == 8 && g.Held == 3 && g.Offerable == 0 && g.Healthy == 0 && strings.Contains(g.Message, "not reporting") {
			return ""
		}
		return g.String()
	})
	if res := w.apply(request("plugin", id(t, "j"), id(t, "a"), 1)); res.Claimed || res.Reason != orkv1.Reason_REASON_BUSY {
		t.Errorf("a plan meanwhile: %v", res)
	}
	if st := w.status(attempt); st.Phase != up1 || st.Nodes[0].VmiUid != uid {
		t.Errorf("the running attempt: %v", st)
	}
	d.breaks(t, "allocatable-zero", "")
	eventually(t, "the count heals", func() string {
		if g := w.gpu("plugin-gpu-00"); g.Offerable != 5 || g.Message != "" {
			return g.String()
		}
		return ""
	})
	w.remove(attempt)
	w.gone(attempt)
}

func TestANodeThatIsNotHeardOfKeepsItsMachine(t *testing.T) {
	t.Parallel()
	d := start(t)
	w := begin(t, d, "node").serves()
	job, attempt := id(t, "j"), id(t, "a")
	w.claim(request("node", job, attempt, 1))
	uid := w.until(attempt, up1).Nodes[0].VmiUid
	d.breaks(t, "node-not-ready", "node-gpu-00")
	eventually(t, "the attempt is unreachable", func() string {
		if st := w.status(attempt); st.GetUnreachableSince() == nil {
			return fmt.Sprint(st)
		}
		return ""
	})
	if st := w.status(attempt); st.Phase != up1 || st.Nodes[0].VmiUid != uid {
		t.Fatalf("status %v", st)
	}
	eventually(t, "the node takes nothing", func() string {
		if r, _ := w.Hub.Latest(); r.Nodes[0].Schedulable {
			return "it does"
		}
		return ""
	})
	if res := w.apply(request("node", id(t, "j"), id(t, "a"), 1)); res.Claimed || res.Reason != orkv1.Reason_REASON_CORDONED {
		t.Errorf("a plan meanwhile: %v", res)
	}
	d.breaks(t, "node-not-ready", "")
	eventually(t, "the attempt is back", func() string {
		if st := w.status(attempt); st.GetUnreachableSince() != nil || st.GetPhase() != up1 || st.Nodes[0].VmiUid != uid {
			return fmt.Sprint(st)
		}
		return ""
	})
	all, err := d.admin.KubeVirt.VirtualMachineInstances(namespace).List(t.Context(), metav1.ListOptions{LabelSelector: label.Job + "=" + job})
	if err != nil || len(all.Items) != 1 {
		t.Fatalf("%d machines, %v", len(all.Items), err)
	}
	w.remove(attempt)
	w.gone(attempt)
}

func TestGPUsAreHeldUntilTheLauncherPodIsGone(t *testing.T) {
	t.Parallel()
	d := start(t)
	w := begin(t, d, "stuck", func(s *Setup) { s.Config.Deadlines.Deletion = 3 * time.Second }).serves()
	job, attempt := id(t, "j"), id(t, "a")
	d.breaks(t, "stuck-terminating", "stuck-gpu-00")
	time.Sleep(2 * time.Second) // switches are read each second
	w.claim(request("stuck", job, attempt, 2))
	w.until(attempt, up1)
	w.remove(attempt)
	eventually(t, "an alarm is raised", func() string {
		if !w.health.Has(health.CleanupPending) {
			return fmt.Sprint(w.status(attempt))
		}
		return ""
	})
	if g := w.gpu("stuck-gpu-00"); g.Held != 2 || g.Offerable != 0 {
		t.Fatalf("capacity %v", g)
	}
	eventually(t, "the status says so", func() string {
		if st := w.status(attempt); st.GetPhase() != workerv1.AttemptPhase_ATTEMPT_PHASE_DELETING || !strings.Contains(st.Message, "takes longer than 3s") {
			return fmt.Sprint(st)
		}
		return ""
	})
	// A new process holds them as well.
	w.end()
	w = begin(t, d, "stuck").serves()
	if g := w.gpu("stuck-gpu-00"); g.Held != 2 {
		t.Fatalf("capacity after a restart %v", g)
	}
	d.breaks(t, "stuck-terminating", "")
	w.gone(attempt)
	if g := w.gpu("stuck-gpu-00"); g.Held != 0 {
		t.Fatalf("capacity %v", g)
	}
}

func TestAnObjectOfAnotherUnderOurNameIsNotAdopted(t *testing.T) {
	t.Parallel()
	d := start(t)
	w := begin(t, d, "foreign").serves()
	ctx := t.Context()

	// A machine of that name.
	job, attempt := id(t, "j"), id(t, "a")
	stranger := strayVMI("foreign", attempt)
	stranger.Labels, stranger.OwnerReferences = map[string]string{label.Attempt: "a-other"}, nil
	made, err := d.admin.KubeVirt.VirtualMachineInstances(namespace).Create(ctx, stranger, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	w.claim(request("foreign", job, attempt, 1))
	if st := w.until(attempt, failed1); st.Reason != orkv1.Reason_REASON_CLUSTER_REFUSED || !strings.Contains(st.Message, `"a-other"`) {
		t.Fatalf("status %v", st)
	}
	w.remove(attempt)
	w.gone(attempt)
	still, err := d.admin.KubeVirt.VirtualMachineInstances(namespace).Get(ctx, made.Name, metav1.GetOptions{})
	if err != nil || still.UID != made.UID || still.DeletionTimestamp != nil {
		t.Fatalf("the stranger's machine: %v", err)
	}
	_ = d.admin.KubeVirt.VirtualMachineInstances(namespace).Delete(ctx, made.Name, metav1.DeleteOptions{})

	// A ConfigMap of that name.
	attempt = id(t, "a")
	if _, err := d.admin.Core.ConfigMaps(namespace).Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: attempt}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Server.ApplyAttempt(ctx, request("foreign", job, attempt, 4)); err == nil {
		t.Fatal("claimed on a stranger's ConfigMap")
	}
	w.claim(request("foreign", job, id(t, "a"), 4)) // and nothing was held by it

	// Another plan under the same attempt id.
	attempt = id(t, "a")
	req := request("foreign", job, attempt, 0)
	req.Spec.Gpu = nil
	w.claim(req)
	req.Spec.DiskGib = 77
	if _, err := w.Server.ApplyAttempt(ctx, req); err == nil {
		t.Fatal("another spec was taken for the same attempt")
	}
}

func TestASecondProcessWaitsAndSaysWhoHoldsTheRack(t *testing.T) {
	t.Parallel()
	d := start(t)
	first := begin(t, d, "pair").serves()
	job, attempt := id(t, "j"), id(t, "a")
	first.claim(request("pair", job, attempt, 1))
	uid := first.until(attempt, up1).Nodes[0].VmiUid
	second := begin(t, d, "pair", func(s *Setup) { s.Self.Place = "elsewhere:/state" })
	eventually(t, "the second knows of the first", func() string {
		if other, ok := second.Tenure.Other(); !ok || other.Place != "host:/state" {
			return fmt.Sprint(other)
		}
		return ""
	})
	if _, err := second.Server.ApplyAttempt(t.Context(), request("pair", id(t, "j"), id(t, "a"), 1)); err == nil || !strings.Contains(err.Error(), "host:/state") {
		t.Fatalf("the second answers %v", err)
	}
	eventually(t, "a key in two places is shown", func() string {
		if !second.health.Has(health.DuplicateKey) {
			return "it is not"
		}
		return ""
	})
	first.end()
	second.serves()
	if st := second.until(attempt, up1); st.Nodes[0].VmiUid != uid {
		t.Fatalf("another machine: %v", st)
	}
	second.remove(attempt)
	second.gone(attempt)
}

func TestRefusedCredentialsChangeNoAttemptAndHeal(t *testing.T) {
	t.Parallel()
	d := start(t)
	good, err := os.ReadFile(d.kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(file, good, 0o600); err != nil {
		t.Fatal(err)
	}
	w := begin(t, d, "login", func(s *Setup) { s.Config.Kubeconfig = file; s.Config.Relist = 2 * time.Second }).serves()
	job, attempt := id(t, "j"), id(t, "a")
	w.claim(request("login", job, attempt, 1))
	uid := w.until(attempt, up1).Nodes[0].VmiUid
	token := tokenOf(t, good)
	if err := os.WriteFile(file, []byte(strings.ReplaceAll(string(good), token, token[:len(token)-4]+"AAAA")), 0o600); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the refusal is shown", func() string {
		r, _ := w.Hub.Latest()
		if r.ClusterFault == "" || r.ClusterFaultSince == nil || !w.health.Has(health.CredentialsRefused) {
			return fmt.Sprintf("fault %q", r.ClusterFault)
		}
		return ""
	})
	time.Sleep(3 * time.Second) // more than a list's age
	if st := w.status(attempt); st.GetPhase() != up1 || st.Nodes[0].VmiUid != uid {
		t.Fatalf("status %v", st)
	}
	for _, warning := range w.health.List() {
		if strings.Contains(warning.Text, token[:20]) {
			t.Fatalf("a token in a warning: %s", warning.Text)
		}
	}
	if err := os.WriteFile(file, good, 0o600); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it heals without a restart", func() string {
		r, _ := w.Hub.Latest()
		if r.ClusterFault != "" || w.health.Has(health.CredentialsRefused) || !w.Tenure.Held() {
			return r.ClusterFault
		}
		return ""
	})
	w.remove(attempt)
	w.gone(attempt)
}

// tokenOf finds the bearer token of a kubeconfig in YAML or JSON.
func tokenOf(t *testing.T, kubeconfig []byte) string {
	t.Helper()
	for _, line := range strings.Split(string(kubeconfig), "\n") {
		if _, rest, ok := strings.Cut(line, "token:"); ok {
			return strings.Trim(strings.TrimSpace(rest), `"'`)
		}
	}
	var doc struct {
		Users []struct{ User struct{ Token string } }
	}
	if err := json.Unmarshal(kubeconfig, &doc); err != nil || len(doc.Users) == 0 || doc.Users[0].User.Token == "" {
		t.Fatal("the kubeconfig has no token")
	}
	return doc.Users[0].User.Token
}

func TestWhatHasLostItsAnchorIsSweptAfterAWhile(t *testing.T) {
	t.Parallel()
	d := start(t)
	w := begin(t, d, "orphan", func(s *Setup) { s.Config.Deadlines.Orphan = 4 * time.Second }).serves()
	ctx := t.Context()

	// The anchor goes while the worker runs: it is noticed and taken down.
	job, attempt := id(t, "j"), id(t, "a")
	w.claim(request("orphan", job, attempt, 1))
	w.until(attempt, up1)
	if err := d.admin.Core.ConfigMaps(namespace).Delete(ctx, attempt, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if st := w.until(attempt, failed1); st.Reason != orkv1.Reason_REASON_VM_REMOVED || !strings.Contains(st.Message, "removed the ConfigMap "+attempt) {
		t.Fatalf("what its owner reads: %v", st)
	}
	w.gone(attempt)
	if left := d.left(t, of(attempt)); len(left) > 0 {
		t.Fatalf("left %v", left)
	}

	// A machine of ours that never had one.
	stray := strayVMI("orphan", "a-stray")
	stray.OwnerReferences = nil
	if _, err := d.admin.KubeVirt.VirtualMachineInstances(namespace).Create(ctx, stray, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the stray is removed", func() string {
		_, err := d.admin.KubeVirt.VirtualMachineInstances(namespace).Get(ctx, stray.Name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return ""
		}
		return fmt.Sprint("still there ", err)
	})
}

func TestAnUnreadableAnchorCanStillBeDeleted(t *testing.T) {
	t.Parallel()
	d := start(t)
	w := begin(t, d, "orphan", func(s *Setup) { s.Config.Rack.ID = "orphan-two" })
	w.Entry.Put(&orkv1.RackEntry{Id: "orphan-two"})
	w.serves()
	job, attempt := id(t, "j"), id(t, "a")
	w.claim(request("orphan", job, attempt, 1))
	w.until(attempt, up1)
	w.end()
	patch := []byte(`{"data":{"record":"{\"version\":99}"}}`)
	if _, err := d.admin.Core.ConfigMaps(namespace).Patch(t.Context(), attempt, types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	w = begin(t, d, "orphan", func(s *Setup) { s.Config.Rack.ID = "orphan-two" }).serves()
	if st := w.until(attempt, failed1); !strings.Contains(st.Message, "version 99") {
		t.Fatalf("status %v", st)
	}
	w.remove(attempt)
	w.gone(attempt)
	if left := d.left(t, of(attempt)); len(left) > 0 {
		t.Fatalf("left %v", left)
	}
}

func TestTheShippedRoleIsEnoughAndNoMore(t *testing.T) {
	t.Parallel()
	d := start(t)
	w := begin(t, d, "pair", func(s *Setup) { s.Config.Rack.ID = "pair-rights" })
	missing, err := preflight.Missing(t.Context(), w.client)
	if err != nil || len(missing) > 0 {
		t.Fatalf("missing %v, %v", missing, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, err := w.client.Core.Secrets(namespace).List(ctx, metav1.ListOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("it may list secrets: %v", err)
	}
	if _, err := w.client.Core.Secrets("kube-system").Get(ctx, "x", metav1.GetOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("it may read secrets elsewhere: %v", err)
	}
	if err := w.client.Core.Pods(namespace).Delete(ctx, "x", metav1.DeleteOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("it may delete pods: %v", err)
	}
}
