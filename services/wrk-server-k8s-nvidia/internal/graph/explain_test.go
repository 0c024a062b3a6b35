package graph

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kubevirt "kubevirt.io/api/core/v1"

	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/label"
)

func failedMachine(attempt, node string, at time.Time) *kubevirt.VirtualMachineInstance {
	m := machine(kubevirt.Failed)
	m.Name, m.Labels, m.Status.NodeName = attempt+"-n0", map[string]string{label.Attempt: attempt}, node
	m.Status.PhaseTransitionTimestamps = []kubevirt.VirtualMachineInstancePhaseTransitionTimestamp{
		{Phase: kubevirt.Running, PhaseTransitionTimestamp: metav1.NewTime(at.Add(-time.Hour))},
		{Phase: kubevirt.Failed, PhaseTransitionTimestamp: metav1.NewTime(at)},
	}
	return m
}

func TestManyFailuresOfOneNodeAreTheNodes(t *testing.T) {
	t.Parallel()
	at := time.Unix(1_000_000, 0)
	mine := failedMachine("a-1", "gpu-07", at)
	near, nearer := failedMachine("a-2", "gpu-07", at.Add(-50*time.Second)), failedMachine("a-3", "gpu-07", at.Add(50*time.Second))
	elsewhere, earlier := failedMachine("a-4", "gpu-08", at), failedMachine("a-5", "gpu-07", at.Add(-2*time.Minute))
	second := failedMachine("a-2", "gpu-07", at) // of the same gang as near
	deleted := failedMachine("a-6", "gpu-07", at)
	before := metav1.NewTime(at.Add(-time.Second))
	deleted.DeletionTimestamp = &before // somebody asked for it
	for _, c := range []struct {
		name string
		all  []*kubevirt.VirtualMachineInstance
		want int
	}{
		{"alone", []*kubevirt.VirtualMachineInstance{mine}, 1},
		{"others elsewhere, earlier, or deleted", []*kubevirt.VirtualMachineInstance{mine, elsewhere, earlier, deleted}, 1},
		{"a gang is one", []*kubevirt.VirtualMachineInstance{mine, near, second}, 2},
		{"three within a minute", []*kubevirt.VirtualMachineInstance{mine, near, nearer}, 3},
	} {
		if got := failedTogether(mine, c.all); got != c.want {
			t.Errorf("%s: %d, want %d", c.name, got, c.want)
		}
	}
	if got := failedTogether(machine(kubevirt.Running), []*kubevirt.VirtualMachineInstance{near, nearer}); got != 0 {
		t.Errorf("a running machine failed with %d", got)
	}
}

func TestTheClustersWordsComeWithWhatToDo(t *testing.T) {
	t.Parallel()
	oom := &corev1.Pod{Status: corev1.PodStatus{ContainerStatuses: []corev1.ContainerStatus{
		{Name: "compute", State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{Reason: "OOMKilled"}}},
	}}}
	admission := &corev1.Pod{Status: corev1.PodStatus{Reason: "UnexpectedAdmissionError", Message: "Allocate failed due to no healthy devices present"}}
	for _, c := range []struct{ words, want string }{
		{podWords(oom), "additionalGuestMemoryOverheadRatio"},
		{podWords(admission), "node gpu-07 refused the pod its devices"},
		{"cannot limit locked memory of process 44", "pin the VM's memory"},
		{"qemu exited with code 1", ""},
	} {
		if got := remedy(c.words, "gpu-07"); !strings.Contains(got, c.want) || (got == "") != (c.want == "") {
			t.Errorf("%q: %q, want %q", c.words, got, c.want)
		}
	}
}
