package graph

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kubevirt "kubevirt.io/api/core/v1"
	cdi "kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
)

func disk(phase cdi.DataVolumePhase, restarts int32, progress string, conditions ...string) *cdi.DataVolume {
	dv := &cdi.DataVolume{ObjectMeta: metav1.ObjectMeta{Name: "j-1-r0-n0-root"}}
	dv.Status.Phase, dv.Status.RestartCount, dv.Status.Progress = phase, restarts, cdi.DataVolumeProgress(progress)
	for i := 0; i+2 < len(conditions); i += 3 {
		dv.Status.Conditions = append(dv.Status.Conditions, cdi.DataVolumeCondition{
			Type: cdi.DataVolumeConditionType(conditions[i]), Status: corev1.ConditionFalse, Reason: conditions[i+1], Message: conditions[i+2],
		})
	}
	return dv
}

func TestVerdictsOnAnImport(t *testing.T) {
	t.Parallel()
	d := DefaultDeadlines()
	long, short := clock{inStage: 90 * time.Minute, idle: time.Minute}, clock{inStage: time.Second, idle: time.Second}
	for _, c := range []struct {
		name    string
		dv      *cdi.DataVolume
		clock   clock
		waits   bool
		reason  orkv1.Reason
		words   string
		state   string
		percent uint32
		usable  bool
	}{
		{"done", disk(cdi.Succeeded, 0, "100.0%"), long, false, 0, "", stateReady, 100, true},
		{"running", disk(cdi.ImportInProgress, 0, "37.2%"), short, false, 0, "", stateWaiting, 37, true},
		{"no progress said", disk(cdi.ImportInProgress, 0, "N/A"), short, false, 0, "", stateWaiting, 0, true},
		{"first pull error", disk(cdi.ImportInProgress, 1, "N/A", "Running", "ImagePullFailed", "manifest unknown"), short, false, 0, "", stateWaiting, 0, true},
		{"second pull error", disk(cdi.ImportScheduled, 2, "N/A", "Running", "ImagePullFailed", "manifest unknown"), short, false, orkv1.Reason_REASON_IMAGE_UNAVAILABLE, "cannot be pulled: manifest unknown", stateFailed, 0, false},
		{"a pull error that stands", disk(cdi.ImportScheduled, 0, "N/A", "Running", "ErrImagePull", "unauthorized"), clock{troubled: time.Minute}, false, orkv1.Reason_REASON_IMAGE_UNAVAILABLE, "cannot be pulled", stateFailed, 0, false},
		{"the disk is too small", disk(cdi.ImportInProgress, 1, "N/A", "Running", "Error", "Unable to process data: Virtual image size 21474836480 is larger than the reported available storage 5368709120"), short, false, orkv1.Reason_REASON_IMAGE_UNAVAILABLE, "needs a disk of 20 GiB and the root disk has room for 5 GiB", stateFailed, 0, false},
		{"an application's image", disk(cdi.ImportInProgress, 1, "N/A", "Running", "Error", "Failed to find VM disk image file in the container image"), short, false, orkv1.Reason_REASON_IMAGE_UNAVAILABLE, "unusable", stateFailed, 0, false},
		{"scratch space", disk(cdi.ImportScheduled, 0, "N/A", "Running", "ScratchSpace", "Scratch space required and none found"), short, false, orkv1.Reason_REASON_CLUSTER_REFUSED, "scratch space", stateFailed, 0, false},
		{"no storage class", disk(cdi.Pending, 0, "N/A", "Bound", "ErrClaimNotValid", "PVC spec is missing accessMode and no storageClass to choose profile"), short, false, orkv1.Reason_REASON_CLUSTER_REFUSED, "set storage_class", stateFailed, 0, false},
		{"an unknown storage class", disk(cdi.Pending, 0, "N/A", "Bound", "Pending", `storageclass.storage.k8s.io "fast" not found`), short, false, orkv1.Reason_REASON_CLUSTER_REFUSED, "no storage class that suits", stateFailed, 0, false},
		{"the importer's first end of memory", disk(cdi.ImportInProgress, 1, "N/A", "Running", "OOMKilled", ""), short, false, 0, "", stateWaiting, 0, true},
		{"its second", disk(cdi.ImportInProgress, 2, "N/A", "Running", "OOMKilled", ""), short, false, orkv1.Reason_REASON_CLUSTER_REFUSED, "podResourceRequirements", stateFailed, 0, false},
		{"a lost claim", disk(cdi.Pending, 0, "N/A", "Bound", "ErrClaimLost", "PVC lost"), short, false, orkv1.Reason_REASON_CLUSTER_REFUSED, "storage refuses", stateFailed, 0, false},
		{"a quota waits", disk(cdi.Pending, 0, "N/A", "Bound", "ErrExceededQuota", "exceeded quota: storage"), short, false, 0, "", stateWaiting, 0, true},
		{"no storage", disk(cdi.Pending, 0, "N/A", "Bound", "Pending", "PVC Pending"), clock{inStage: 6 * time.Minute}, false, orkv1.Reason_REASON_DEADLINE, "no storage after 5m0s: Pending PVC Pending", stateFailed, 0, false},
		{"many restarts with progress", disk(cdi.ImportInProgress, 5, "80%"), clock{inStage: 30 * time.Minute, idle: time.Minute}, false, 0, "", stateWaiting, 80, true},
		{"many restarts without", disk(cdi.ImportInProgress, 5, "80%", "Running", "Error", "connection reset"), clock{inStage: 30 * time.Minute, idle: 11 * time.Minute}, false, orkv1.Reason_REASON_IMAGE_UNAVAILABLE, "keeps failing (5 tries)", stateFailed, 80, false},
		{"too long", disk(cdi.ImportInProgress, 0, "12%"), long, false, orkv1.Reason_REASON_DEADLINE, "12 % after 1h0m0s", stateFailed, 12, false},
		{"failed", disk(cdi.Failed, 0, "N/A", "Running", "ChecksumError", "checksum mismatch"), short, false, orkv1.Reason_REASON_IMAGE_UNAVAILABLE, "checksum mismatch", stateFailed, 0, false},
		{"waits for its machine", disk(cdi.WaitForFirstConsumer, 0, "N/A"), long, false, 0, "", stateWaiting, 0, true},
		{"its machine waits for it", disk(cdi.WaitForFirstConsumer, 0, "N/A"), long, true, orkv1.Reason_REASON_DEADLINE, "no storage", stateFailed, 0, false},
	} {
		f := judgeDisk(c.dv, c.clock, d, c.waits)
		var reason orkv1.Reason
		words := ""
		if f.fail != nil {
			reason, words = f.fail.Reason, f.fail.Message
		}
		if reason != c.reason || !strings.Contains(words, c.words) || f.state != c.state || f.percent != c.percent || f.usable != c.usable {
			t.Errorf("%s: %v %q state %s %d %% usable %v", c.name, reason, words, f.state, f.percent, f.usable)
		}
	}
}

func machine(phase kubevirt.VirtualMachineInstancePhase, conditions ...string) *kubevirt.VirtualMachineInstance {
	vmi := &kubevirt.VirtualMachineInstance{ObjectMeta: metav1.ObjectMeta{Name: "a-1-n0"}}
	vmi.Status.Phase, vmi.Status.NodeName = phase, "gpu-07"
	for i := 0; i+2 < len(conditions); i += 3 {
		vmi.Status.Conditions = append(vmi.Status.Conditions, kubevirt.VirtualMachineInstanceCondition{
			Type: kubevirt.VirtualMachineInstanceConditionType(conditions[i]), Status: corev1.ConditionFalse, Reason: conditions[i+1], Message: conditions[i+2],
		})
	}
	return vmi
}

func TestVerdictsOnAMachine(t *testing.T) {
	t.Parallel()
	d := DefaultDeadlines()
	after := func(m time.Duration) clock { return clock{inStage: m * time.Minute} }
	for _, c := range []struct {
		name      string
		vmi       *kubevirt.VirtualMachineInstance
		clock     clock
		gpus      int
		diskReady bool
		reason    orkv1.Reason
		words     string
		state     string
	}{
		{"running", machine(kubevirt.Running), after(600), 1, true, 0, "", stateReady},
		{"not permitted", machine(kubevirt.Pending, "Synchronized", "FailedCreate", "failed to render launch manifest: GPU nvidia.com/X is not permitted in permittedHostDevices configuration"), after(0), 1, true, orkv1.Reason_REASON_CLUSTER_REFUSED, "not permitted", stateFailed},
		{"pod security", machine(kubevirt.Pending, "Synchronized", "FailedCreate", `failed to create virtual machine pod: violates PodSecurity "restricted"`), after(0), 1, true, orkv1.Reason_REASON_CLUSTER_REFUSED, "PodSecurity", stateFailed},
		{"quota waits", machine(kubevirt.Pending, "Synchronized", "FailedCreate", "exceeded quota: gpus"), after(1), 1, true, 0, "", stateWaiting},
		{"quota waits no longer", machine(kubevirt.Pending, "Synchronized", "FailedCreate", "exceeded quota: gpus"), after(3), 1, true, orkv1.Reason_REASON_DEADLINE, "exceeded quota", stateFailed},
		{"waits for its disk", machine(kubevirt.Pending), after(50), 1, false, 0, "", stateWaiting},
		{"no pod", machine(""), after(3), 1, true, orkv1.Reason_REASON_DEADLINE, "no pod after", stateFailed},
		{"not placed yet", machine(kubevirt.Scheduling, "PodScheduled", "Unschedulable", "0/4 nodes are available: 4 Insufficient nvidia.com/X"), after(4), 1, true, 0, "", stateWaiting},
		{"not placed", machine(kubevirt.Scheduling, "PodScheduled", "Unschedulable", "0/4 nodes are available: 4 Insufficient nvidia.com/X"), after(6), 1, true, orkv1.Reason_REASON_DEADLINE, "4 Insufficient nvidia.com/X", stateFailed},
		{"stuck", machine(kubevirt.Scheduled), after(7), 1, true, orkv1.Reason_REASON_DEADLINE, "does not start on node gpu-07", stateFailed},
		{"a GPU not rebound, at first", machine(kubevirt.Scheduled, "Synchronized", "Synchronizing with the Domain failed.", "lstat /dev/vfio/41: no such file or directory"), after(0), 1, true, 0, "", stateWaiting},
		{"a GPU not rebound", machine(kubevirt.Scheduled, "Synchronized", "Synchronizing with the Domain failed.", "lstat /dev/vfio/41: no such file or directory"), clock{inStage: time.Minute, troubled: 20 * time.Second}, 1, true, orkv1.Reason_REASON_VM_FAILED, "node gpu-07 could not hand over the GPU", stateFailed},
		{"a GPU with siblings", machine(kubevirt.Scheduled, "Synchronized", "Synchronizing with the Domain failed.", "vfio 0000:41:00.0: group 41 is not viable"), clock{inStage: time.Minute, troubled: 20 * time.Second}, 1, true, orkv1.Reason_REASON_VM_FAILED, "IOMMU group are not bound", stateFailed},
		{"eight GPUs take longer", machine(kubevirt.Scheduled), after(7), 8, true, 0, "", stateWaiting},
	} {
		f := judgeVMI(c.vmi, c.clock, d, c.gpus, c.diskReady, "")
		var reason orkv1.Reason
		words := ""
		if f.fail != nil {
			reason, words = f.fail.Reason, f.fail.Message
		}
		if reason != c.reason || !strings.Contains(words, c.words) || f.state != c.state {
			t.Errorf("%s: %v %q state %s", c.name, reason, words, f.state)
		}
	}
	for _, c := range []struct {
		vmi       *kubevirt.VirtualMachineInstance
		reason    orkv1.Reason
		succeeded bool
	}{
		{machine(kubevirt.Succeeded), orkv1.Reason_REASON_GUEST_SHUTDOWN, true},
		{machine(kubevirt.Failed), orkv1.Reason_REASON_VM_FAILED, false},
		{func() *kubevirt.VirtualMachineInstance {
			m := machine(kubevirt.Failed)
			m.Status.Reason = nodeUnresponsive
			return m
		}(), orkv1.Reason_REASON_NODE_LOST, false},
	} {
		o := ended(c.vmi)
		if o == nil || o.Phase != workerv1.AttemptPhase_ATTEMPT_PHASE_ENDED || o.Reason != c.reason || o.GuestSucceeded != c.succeeded {
			t.Errorf("%s %s: %+v", c.vmi.Status.Phase, c.vmi.Status.Reason, o)
		}
	}
	if ended(machine(kubevirt.Running)) != nil {
		t.Error("a running machine has ended")
	}
	soft := machine(kubevirt.Running)
	soft.Status.Conditions = []kubevirt.VirtualMachineInstanceCondition{{Type: "SoftwareEmulation", Status: corev1.ConditionTrue}}
	if f := judgeVMI(soft, clock{}, d, 1, true, ""); f.fail == nil || f.fail.Reason != orkv1.Reason_REASON_CLUSTER_REFUSED {
		t.Errorf("software emulation: %+v", f)
	}
}
