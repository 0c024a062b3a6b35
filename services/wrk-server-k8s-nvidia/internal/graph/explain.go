package graph

import (
	"context"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kubevirt "kubevirt.io/api/core/v1"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/capacity"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/claim"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/label"
)

// When several machines of one node fail so close together, by the cluster's own
// clock, the node is at fault and none of them.
const (
	eventWindow = time.Minute
	eventSize   = 3
	// eventPatience is how long the first of them is not judged yet, where
	// enough others run beside it.
	eventPatience = 5 * time.Second
)

// explainEnd gives the end of a machine its cause, in words that say what to do.
// It answers false while the cause is not known yet.
func (p *pass) explainEnd(ctx context.Context, vmi *kubevirt.VirtualMachineInstance, o *claim.Outcome, since time.Duration) (bool, error) {
	end := func(reason orkv1.Reason, format string, a ...any) {
		o.GuestSucceeded, o.Reason, o.Message = false, reason, fmt.Sprintf(format, a...)
	}
	if _, ok := p.e.o.View.Node(vmi.Status.NodeName); !ok && vmi.Status.NodeName != "" {
		end(orkv1.Reason_REASON_NODE_LOST, "node %s was removed from the cluster while %s was on it", vmi.Status.NodeName, vmi.Name)
		return true, nil
	}
	if vmi.DeletionTimestamp != nil {
		end(orkv1.Reason_REASON_VM_REMOVED, "%s was deleted by somebody else", vmi.Name)
		return true, nil
	}
	callCtx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	pods, err := p.e.o.Client.Core.Pods(p.e.o.Client.Namespace).List(callCtx, metav1.ListOptions{LabelSelector: label.KubeVirtCreatedBy + "=" + string(vmi.UID), Limit: 10})
	if err != nil {
		return false, fmt.Errorf("list the pods of %s: %w", vmi.Name, err)
	}
	// A guest that ended or failed by itself leaves its pod standing.
	removed := true
	for i := range pods.Items {
		removed = removed && pods.Items[i].DeletionTimestamp != nil
	}
	switch {
	case o.GuestSucceeded && removed:
		end(orkv1.Reason_REASON_VM_REMOVED, "the pod of %s was deleted by somebody else, by a drain of its node for example", vmi.Name)
		return true, nil
	case o.GuestSucceeded || o.Reason == orkv1.Reason_REASON_NODE_LOST:
		return true, nil
	}
	if n := failedTogether(vmi, p.e.o.View.VMIs()); n >= eventSize {
		end(orkv1.Reason_REASON_NODE_LOST, "%d VMs of node %s failed within a minute: that is the node's doing (drivers rebound, an upgrade, a power loss), not the job's; %s",
			n, vmi.Status.NodeName, o.Message)
		return true, nil
	} else if since < eventPatience && neighbours(vmi, p.e.o.View.VMIs()) >= eventSize {
		return false, nil
	}
	if removed {
		end(orkv1.Reason_REASON_VM_REMOVED, "the pod of %s was deleted by somebody else, by force; %s", vmi.Name, o.Message)
		return true, nil
	}
	words := o.Message
	for i := range pods.Items {
		words = joinWords(words, podWords(&pods.Items[i]))
	}
	o.Message = joinWords(words, remedy(words, place(vmi)))
	return true, nil
}

// podWords are what a failed launcher pod says of its end.
func podWords(pod *corev1.Pod) string {
	words := joinWords(pod.Status.Reason, pod.Status.Message)
	for _, c := range pod.Status.ContainerStatuses {
		if t := c.State.Terminated; t != nil && t.Reason != "" && t.Reason != "Completed" && t.Reason != "Error" {
			words = joinWords(words, fmt.Sprintf("container %s: %s", c.Name, joinWords(t.Reason, t.Message)))
		}
	}
	return words
}

// Pauses of startWords.
const (
	startSlow  = 5 * time.Second
	startAgain = 10 * time.Second
)

// startWords are what holds a launcher pod up on its node. They are only in the
// pod, so it is read once its start takes longer than it should, and again after a
// pause.
func (p *pass) startWords(ctx context.Context, key string, vmi *kubevirt.VirtualMachineInstance) (string, error) {
	t := p.a.tracks[key]
	if vmi.Status.Phase != kubevirt.Scheduling || t == nil || p.now.Sub(t.since) < startSlow {
		return "", nil
	}
	if p.now.Sub(t.looked) < startAgain {
		return t.pod, nil
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	pods, err := p.e.o.Client.Core.Pods(p.e.o.Client.Namespace).List(ctx, metav1.ListOptions{LabelSelector: label.KubeVirtCreatedBy + "=" + string(vmi.UID), Limit: 10})
	if err != nil {
		return t.pod, fmt.Errorf("list the pods of %s: %w", vmi.Name, err)
	}
	t.looked, t.pod = p.now, ""
	for i := range pods.Items {
		pod := &pods.Items[i]
		for _, c := range append(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses...) {
			if w := c.State.Waiting; w != nil && w.Reason != "PodInitializing" {
				t.pod = joinWords(t.pod, joinWords(w.Reason, w.Message))
			}
		}
	}
	return t.pod, nil
}

func failedAt(vmi *kubevirt.VirtualMachineInstance) (time.Time, bool) {
	if vmi.Status.Phase != kubevirt.Failed {
		return time.Time{}, false
	}
	for _, t := range vmi.Status.PhaseTransitionTimestamps {
		if t.Phase == kubevirt.Failed {
			at := t.PhaseTransitionTimestamp.Time
			return at, vmi.DeletionTimestamp == nil || at.Before(vmi.DeletionTimestamp.Time)
		}
	}
	return time.Time{}, false
}

// failedTogether counts attempts with a machine on the same node that failed
// about when this one did, itself among them.
func failedTogether(vmi *kubevirt.VirtualMachineInstance, all []*kubevirt.VirtualMachineInstance) int {
	at, ok := failedAt(vmi)
	if !ok || vmi.Status.NodeName == "" {
		return 0
	}
	attempts := map[string]bool{vmi.Labels[label.Attempt]: true}
	for _, other := range all {
		if other.Status.NodeName != vmi.Status.NodeName {
			continue
		}
		if when, ok := failedAt(other); ok && when.Sub(at).Abs() <= eventWindow {
			attempts[other.Labels[label.Attempt]] = true
		}
	}
	return len(attempts)
}

// neighbours counts the attempts with a machine on the same node, this one among them.
func neighbours(vmi *kubevirt.VirtualMachineInstance, all []*kubevirt.VirtualMachineInstance) int {
	attempts := map[string]bool{vmi.Labels[label.Attempt]: true}
	for _, other := range all {
		if other.Status.NodeName == vmi.Status.NodeName && other.DeletionTimestamp == nil {
			attempts[other.Labels[label.Attempt]] = true
		}
	}
	return len(attempts)
}

// deviceTrouble are words of a node that cannot hand a device to a machine. Lower case.
var deviceTrouble = []string{
	"/dev/vfio", "is not viable", "vfio: no such", "failed to open /dev/vfio", "error getting device from group",
	"vfio_container_dma_map", "cannot limit locked memory",
}

// remedies are the known causes behind the cluster's words, the first that fits.
var remedies = []struct {
	words []string
	text  string
}{
	{[]string{"unexpectedadmissionerror"}, "node %s refused the pod its devices, as right after a start or with a stale device plugin: try again, and restart its device plugin if it stays"},
	{[]string{"topologyaffinityerror"}, "the topology manager of node %s finds no GPUs, cores and memory on one side: a smaller shape, or another policy on the node"},
	{[]string{"is not viable"}, "on node %s other devices of the GPU's IOMMU group are not bound to vfio-pci: bind them, then restart the device plugin"},
	{[]string{"cannot limit locked memory", "vfio_container_dma_map"}, "node %s could not pin the VM's memory: see KubeVirt's release notes on memlock, and request equal to limit"},
	{[]string{"/dev/vfio", "vfio"}, "node %s could not hand over the GPU: look at its vfio bindings, and restart its device plugin"},
	{[]string{"oomkilled"}, "the VM's own processes on node %s had too little memory: raise additionalGuestMemoryOverheadRatio in the KubeVirt object"},
	{[]string{"evicted"}, "node %s evicted the pod for want of memory or disk"},
}

// remedy is what to do about the cluster's words; empty when that is not known.
func remedy(words, node string) string {
	if node == "" {
		node = "(not known)"
	}
	for _, r := range remedies {
		if contains(words, r.words) {
			return fmt.Sprintf(r.text, node)
		}
	}
	return ""
}

var imageSizes = regexp.MustCompile(`(?i)virtual (?:image )?size (\d+) is larger than (?:the )?(?:reported )?available (?:storage|size) (\d+)`)

// tooSmall turns CDI's two numbers of bytes into words; empty when there are none.
func tooSmall(text string) string {
	m := imageSizes.FindStringSubmatch(text)
	if m == nil {
		return ""
	}
	gib := func(s string) string {
		n, err := strconv.ParseFloat(s, 64)
		if err != nil {
			return s + " bytes"
		}
		return strings.TrimSuffix(strconv.FormatFloat(n/float64(capacity.GiB), 'f', 1, 64), ".0") + " GiB"
	}
	return fmt.Sprintf("the image needs a disk of %s and the root disk has room for %s: ask for a larger disk", gib(m[1]), gib(m[2]))
}
