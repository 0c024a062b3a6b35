package graph

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	kubevirt "kubevirt.io/api/core/v1"
	cdi "kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/claim"
)

// State of one object of the graph, as it is reported.
const (
	statePending  = "pending"
	stateCreating = "creating"
	stateWaiting  = "waiting"
	stateReady    = "ready"
	stateFailed   = "failed"
	stateDeleting = "deleting"
	stateGone     = "gone"
)

// stageLost is the stage of a root disk that somebody else deleted.
const stageLost = "lost"

// nodeUnresponsive is virt-controller's reason for a machine whose node is lost.
const nodeUnresponsive = "NodeUnresponsive"

// patience is how long a message that may be a passing one must stand before
// it counts.
const patience = 15 * time.Second

// clock is what a verdict knows of time: how long this process has seen the
// object in its present stage, and for how long without progress or with trouble.
type clock struct {
	inStage, idle, troubled time.Duration
}

// finding is a verdict on one object.
type finding struct {
	state string
	words string
	// stage names what the deadline counts from; a new one starts it anew.
	stage string
	// deadline of the stage; zero for none.
	deadline time.Duration
	// trouble is set while a message stands that fails the attempt once it has
	// stood for a while.
	trouble bool
	// timed is set when only the passing of time led to the failure.
	timed bool
	// fail is why the attempt fails, nil when it does not.
	fail *claim.Outcome
	// percent of an import, 0 to 100.
	percent uint32
	// usable: a machine may be created on it. KubeVirt gives it no pod before its
	// disk is filled, so it is made beside the import, not after it.
	usable bool
}

func failure(reason orkv1.Reason, format string, a ...any) *claim.Outcome {
	return &claim.Outcome{
		Phase: workerv1.AttemptPhase_ATTEMPT_PHASE_FAILED, Reason: reason, Message: fmt.Sprintf(format, a...),
	}
}

// Messages of CDI and of registries. Lower case.
var (
	pullTrouble = []string{
		"imagepullfailed", "errimagepull", "imagepullbackoff", "unauthorized", "manifest unknown", "authentication required",
		"requested access to the resource is denied", "name unknown", "invalid reference format", "repository does not exist",
		"no such image", "not found: manifest", "manifest not found",
	}
	imageUnusable = []string{
		"larger than the reported available storage", "failed to find vm disk image", "unable to convert",
		"checksumerror", "invalid format for qcow", "larger than available size",
	}
	noClass = []string{
		"no storage class", "no storageclass", "missing storage class", "unable to find storage class", "no default storage class",
		"storageclass.storage.k8s.io", "no accessmode defined", "accessmodes set on storageprofile", "accessmodes are not specified",
	}
	noScratch      = []string{"scratch space required and none found", "scratchspace"}
	storageRefused = []string{"errclaimnotvalid", "errincompatiblepvc", "claimmisbound", "errclaimlost", "claimlost"}
)

func contains(text string, any []string) bool {
	text = strings.ToLower(text)
	for _, s := range any {
		if strings.Contains(text, s) {
			return true
		}
	}
	return false
}

// judgeDisk gives a verdict on a root disk. A failing registry import never
// reaches phase Failed by itself, hence the deadlines.
func judgeDisk(dv *cdi.DataVolume, c clock, d Deadlines, machineWaits bool) finding {
	phase := dv.Status.Phase
	var texts []string
	var ready string
	for _, cond := range dv.Status.Conditions {
		if cond.Status == corev1.ConditionTrue && cond.Type != cdi.DataVolumeRunning {
			continue
		}
		text := strings.TrimSpace(cond.Reason + " " + cond.Message)
		if text == "" {
			continue
		}
		texts = append(texts, text)
		if cond.Type == cdi.DataVolumeRunning && cond.Message != "" {
			ready = cond.Message
		}
	}
	all := strings.Join(texts, "; ")
	f := finding{state: stateWaiting, words: joinWords(string(phase), all)}
	if p, err := strconv.ParseFloat(strings.TrimSuffix(string(dv.Status.Progress), "%"), 64); err == nil {
		f.percent = uint32(min(max(p, 0), 100))
	}
	last := ready
	if last == "" {
		last = all
	}
	if dv.DeletionTimestamp != nil {
		f.state, f.stage, f.deadline = stateDeleting, "deleting", d.Deletion
		f.words = "the former disk is being deleted"
		if c.inStage > d.Deletion {
			f.timed, f.fail = true, failure(orkv1.Reason_REASON_DEADLINE, "the former root disk %s is still being deleted", dv.Name)
		}
		return f
	}
	switch phase {
	case cdi.Succeeded:
		return finding{state: stateReady, words: string(phase), stage: "ready", percent: 100, usable: true}
	case cdi.Failed:
		f.state, f.stage = stateFailed, "failed"
		f.fail = failure(orkv1.Reason_REASON_IMAGE_UNAVAILABLE, "the disk import failed: %s", orUnknown(last))
		return f
	}
	refused := func(format string) finding {
		f.state, f.stage = stateFailed, "storage"
		f.fail = failure(orkv1.Reason_REASON_CLUSTER_REFUSED, format, all)
		return f
	}
	switch {
	case contains(all, noClass):
		return refused("the cluster has no storage class that suits the root disk, set storage_class of the rack's worker or a default class: %s")
	case contains(all, noScratch):
		return refused("the cluster has no scratch space for imports, set scratchSpaceStorageClass in the CDI object: %s")
	case contains(all, storageRefused):
		return refused("the cluster's storage refuses the root disk: %s")
	case strings.Contains(strings.ToLower(all), "oomkilled") && dv.Status.RestartCount >= 2:
		return refused("the importer ran out of memory twice, raise podResourceRequirements in the CDI object: %s")
	}
	if contains(all, imageUnusable) {
		f.state, f.stage = stateFailed, "image"
		f.fail = failure(orkv1.Reason_REASON_IMAGE_UNAVAILABLE, "%s: %s", orText(tooSmall(all), "the image is unusable"), all)
		return f
	}
	if contains(all, pullTrouble) {
		f.trouble = true
		if dv.Status.RestartCount >= 2 || c.troubled > patience {
			f.state = stateFailed
			f.fail = failure(orkv1.Reason_REASON_IMAGE_UNAVAILABLE, "the image cannot be pulled: %s", last)
		}
	}
	f.usable = true
	switch phase {
	case cdi.PhaseUnset, cdi.Pending, cdi.Unknown:
		f.stage, f.deadline = "bind", d.Bound
		if c.inStage > d.Bound && f.fail == nil {
			f.timed = true
			f.fail = failure(orkv1.Reason_REASON_DEADLINE, "the root disk has no storage after %s: %s", d.Bound, orUnknown(all))
		}
	case cdi.WaitForFirstConsumer, cdi.PendingPopulation:
		f.stage = "consumer"
		if machineWaits { // the volume binds once the machine is placed; its own deadline runs too
			f.stage, f.deadline = "bind", d.Bound+d.Scheduling
			if c.inStage > f.deadline {
				f.timed = true
				f.fail = failure(orkv1.Reason_REASON_DEADLINE, "the root disk has no storage after %s: %s", f.deadline, orUnknown(all))
			}
		}
	default:
		f.stage, f.deadline = "import", d.Import
		switch {
		case f.fail != nil:
		case dv.Status.RestartCount >= 3 && c.idle > d.ImportIdle:
			f.timed = true
			f.fail = failure(orkv1.Reason_REASON_IMAGE_UNAVAILABLE, "the disk import keeps failing (%d tries): %s", dv.Status.RestartCount, orUnknown(last))
		case c.idle > 2*d.ImportIdle:
			f.timed = true
			f.fail = failure(orkv1.Reason_REASON_DEADLINE, "the disk import makes no progress for %s at %d %%: %s", 2*d.ImportIdle, f.percent, orUnknown(last))
		case c.inStage > d.Import:
			f.timed = true
			f.fail = failure(orkv1.Reason_REASON_DEADLINE, "the disk import is at %d %% after %s: %s", f.percent, d.Import, orUnknown(last))
		}
	}
	if f.fail != nil {
		f.state, f.usable = stateFailed, false
	}
	return f
}

// Words in KubeVirt's FailedCreate that pass by themselves.
var passing = []string{
	"exceeded quota", "timeout", "timed out", "connection refused", "etcdserver", "too many requests", "try again",
	"failed calling webhook", "object has been modified", "service unavailable",
}

// refusalRemedy is what to do about KubeVirt's words of a pod that it does not make.
func refusalRemedy(words string) string {
	switch {
	case strings.Contains(words, "not permitted in permittedHostDevices"):
		return "add the device to permittedHostDevices of the KubeVirt object, by the name that the nodes advertise"
	case strings.Contains(words, "violates PodSecurity"), strings.Contains(words, "needs a privileged namespace"):
		return "the namespace must allow the baseline level of pod security"
	default:
		return ""
	}
}

// judgeVMI gives a verdict on a virtual machine that is not in a final phase.
// diskReady is false while its disk is still being made; pod is what holds its
// launcher pod up on its node, empty when that is not known.
func judgeVMI(vmi *kubevirt.VirtualMachineInstance, c clock, d Deadlines, gpus int, diskReady bool, pod string) finding {
	f := finding{state: stateWaiting, stage: "phase " + string(vmi.Status.Phase)}
	synchronized := condition(vmi, kubevirt.VirtualMachineInstanceSynchronized)
	scheduled := condition(vmi, kubevirt.VirtualMachineInstanceConditionType(corev1.PodScheduled))
	var said string
	if synchronized != nil && synchronized.Status == corev1.ConditionFalse {
		said = joinWords(synchronized.Reason, synchronized.Message)
	}
	if scheduled != nil && scheduled.Status == corev1.ConditionFalse {
		said = joinWords(said, joinWords(scheduled.Reason, scheduled.Message))
	}
	f.words = joinWords(string(vmi.Status.Phase), said)
	if soft := condition(vmi, "SoftwareEmulation"); soft != nil && soft.Status == corev1.ConditionTrue {
		f.fail = failure(orkv1.Reason_REASON_CLUSTER_REFUSED, "node %s emulates the processor in software, it has no KVM", vmi.Status.NodeName)
		f.state = stateFailed
		return f
	}
	switch vmi.Status.Phase {
	case kubevirt.VmPhaseUnset, kubevirt.Pending:
		if synchronized != nil && synchronized.Status == corev1.ConditionFalse && synchronized.Reason == "FailedCreate" {
			if !contains(synchronized.Message, passing) {
				f.state = stateFailed
				f.fail = failure(orkv1.Reason_REASON_CLUSTER_REFUSED, "the cluster refuses the virtual machine: %s", joinWords(synchronized.Message, refusalRemedy(synchronized.Message)))
				return f
			}
		}
		if !diskReady {
			f.stage = "disk"
			break
		}
		f.stage, f.deadline = "pending", d.Pending
		if c.inStage > d.Pending {
			f.timed = true
			f.fail = failure(orkv1.Reason_REASON_DEADLINE, "the virtual machine has no pod after %s: %s", d.Pending, orUnknown(said))
		}
	case kubevirt.Scheduling:
		f.deadline = d.Scheduling
		f.words = joinWords(f.words, pod)
		if f.trouble = contains(pod, deviceTrouble); f.trouble && (c.troubled > patience || c.inStage > d.Scheduling) {
			f.fail = failure(orkv1.Reason_REASON_VM_FAILED, "%s: %s", remedy(pod, place(vmi)), pod)
			break
		}
		if c.inStage > d.Scheduling && pod != "" && said == "" {
			f.timed = true
			f.fail = failure(orkv1.Reason_REASON_DEADLINE, "the virtual machine's pod is not up after %s: %s", d.Scheduling, pod)
		} else if c.inStage > d.Scheduling {
			f.timed = true
			f.fail = failure(orkv1.Reason_REASON_DEADLINE, "the virtual machine is not placed after %s: %s", d.Scheduling, orUnknown(said))
		}
	case kubevirt.Scheduled:
		f.deadline = d.scheduled(gpus)
		if f.trouble = contains(said, deviceTrouble); f.trouble && (c.troubled > patience || c.inStage > f.deadline) {
			f.fail = failure(orkv1.Reason_REASON_VM_FAILED, "%s: %s", remedy(said, vmi.Status.NodeName), said)
			break
		}
		if c.inStage > f.deadline {
			f.timed = true
			f.fail = failure(orkv1.Reason_REASON_DEADLINE, "the virtual machine does not start on node %s after %s: %s", vmi.Status.NodeName, f.deadline, orUnknown(said))
		}
	case kubevirt.Running:
		f.state = stateReady
	}
	if f.fail != nil {
		f.state = stateFailed
	}
	return f
}

// place is the node that a machine must be on: its own word, else our demand.
func place(vmi *kubevirt.VirtualMachineInstance) string {
	if a := vmi.Spec.Affinity; vmi.Status.NodeName == "" && a != nil && a.NodeAffinity != nil && a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution != nil {
		for _, t := range a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms {
			for _, m := range t.MatchFields {
				if len(m.Values) == 1 {
					return m.Values[0]
				}
			}
		}
	}
	return vmi.Status.NodeName
}

// ended gives the outcome of a machine in a final phase, nil otherwise. How it
// died is the cluster's word; whether that was a success needs to know that
// nobody asked for it, which is so where this is called.
func ended(vmi *kubevirt.VirtualMachineInstance) *claim.Outcome {
	o := &claim.Outcome{Phase: workerv1.AttemptPhase_ATTEMPT_PHASE_ENDED}
	switch vmi.Status.Phase {
	case kubevirt.Succeeded:
		o.Reason, o.GuestSucceeded = orkv1.Reason_REASON_GUEST_SHUTDOWN, true
		o.Message = fmt.Sprintf("%s shut down by itself", vmi.Name)
	case kubevirt.Failed:
		o.Reason = orkv1.Reason_REASON_VM_FAILED
		o.Message = joinWords(fmt.Sprintf("%s failed", vmi.Name), joinWords(vmi.Status.Reason, lastWords(vmi)))
		if vmi.Status.Reason == nodeUnresponsive {
			o.Reason = orkv1.Reason_REASON_NODE_LOST
			o.Message = fmt.Sprintf("node %s stopped answering and no pod of %s is left", vmi.Status.NodeName, vmi.Name)
		}
	default:
		return nil
	}
	return o
}

func lastWords(vmi *kubevirt.VirtualMachineInstance) string {
	for _, t := range []kubevirt.VirtualMachineInstanceConditionType{kubevirt.VirtualMachineInstanceSynchronized, kubevirt.VirtualMachineInstanceReady} {
		if c := condition(vmi, t); c != nil && c.Status == corev1.ConditionFalse && c.Message != "" {
			return joinWords(c.Reason, c.Message)
		}
	}
	return ""
}

// draining says that somebody asked to move the machine off its node.
func draining(vmi *kubevirt.VirtualMachineInstance) bool {
	c := condition(vmi, kubevirt.VirtualMachineInstanceEvictionRequested)
	return vmi.Status.EvacuationNodeName != "" || c != nil && c.Status == corev1.ConditionTrue
}

func condition(vmi *kubevirt.VirtualMachineInstance, t kubevirt.VirtualMachineInstanceConditionType) *kubevirt.VirtualMachineInstanceCondition {
	for i := range vmi.Status.Conditions {
		if vmi.Status.Conditions[i].Type == t {
			return &vmi.Status.Conditions[i]
		}
	}
	return nil
}

func joinWords(a, b string) string {
	switch {
	case a == "":
		return b
	case b == "":
		return a
	default:
		return a + ": " + b
	}
}

func orUnknown(s string) string { return orText(s, "the cluster gives no reason") }

func orText(s, other string) string {
	if s == "" {
		return other
	}
	return s
}
