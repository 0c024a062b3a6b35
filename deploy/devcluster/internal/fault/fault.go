// Package fault holds the table of fault switches of the development cluster and the one place where they are kept: the
// ConfigMap kube-system/cosmicac-devcluster-faults, a key for each switch that is on. Tests write it with any client,
// people with `cosmicac-devcluster fault`; simulator and API proxy look at it each second. The package breaks nothing
// itself.
package fault

import (
	"fmt"
	"slices"
	"strings"
)

// Where the switches are kept.
const (
	Namespace = "kube-system"
	ConfigMap = "cosmicac-devcluster-faults"
	// ProxyPort is the file in the state folder with the API proxy's port. It is there while the cluster runs with one.
	ProxyPort = "proxy-port"
)

// Kind says what the value of a switch lists.
type Kind string

// The kinds of targets. A value lists targets split by spaces or commas; * is all of them. Rules of the API are
// explained in package apiproxy.
const (
	Nodes     Kind = "node names"
	Disks     Kind = "parts of data volume names"
	Resources Kind = "resource names"
	Cluster   Kind = "just *"
	API       Kind = "API rules"
)

// Switch is one fault that can be switched on.
type Switch struct {
	Name string
	Kind Kind
	Says string // what happens, in one line
}

// The names that code asks for.
const (
	AllocatableZero  = "allocatable-zero"
	ResourceRenamed  = "resource-renamed"
	NotPermitted     = "not-permitted"
	OOMKilled        = "oom-killed"
	RejectPods       = "reject-pods"
	NodeNotReady     = "node-not-ready"
	NodeLost         = "node-lost"
	NodeDeleted      = "node-deleted"
	NodeDrained      = "node-drained"
	StuckTerminating = "stuck-terminating"
	VFIOBusy         = "vfio-busy"
	VFIOMissing      = "vfio-missing"
	StuckScheduling  = "stuck-scheduling"
	StuckScheduled   = "stuck-scheduled"
	ImportRefused    = "import-refused"
	ImportTooSmall   = "import-too-small"
	ImportNoScratch  = "import-no-scratch"
	ImportStalled    = "import-stalled"
	StoragePending   = "storage-pending"
	CloneFallback    = "clone-fallback"
	VolumeAstray     = "volume-astray"
	WebhookDown      = "webhook-down"
	APISlow          = "api-slow"
	APIDropReply     = "api-drop-reply"
	APIAnswer        = "api-answer"
	APICut           = "api-cut"
	APICutWatch      = "api-cut-watch"
)

// Switches is the whole table.
var Switches = []Switch{
	{AllocatableZero, Nodes, "the device plugin offers nothing; running VMs go on"},
	{ResourceRenamed, Nodes, "the device plugin offers its GPUs under another spelling than KubeVirt permits"},
	{NotPermitted, Resources, "KubeVirt refuses the device, whatever its list says"},
	{OOMKilled, Nodes, "a VM's launcher is OOMKilled while it boots"},
	{RejectPods, Nodes, "new pods fail with UnexpectedAdmissionError"},
	{NodeNotReady, Nodes, "kubelet and virt-handler fall silent; deleted pods stay"},
	{NodeLost, Nodes, "as node-not-ready, and the taint eviction leaves the node's pods Terminating"},
	{NodeDeleted, Nodes, "the Node object is deleted; it registers anew when the switch goes"},
	{NodeDrained, Nodes, "an administrator drains the node: it is cordoned, its pods are evicted again and again; taken back with the switch"},
	{StuckTerminating, Nodes, "pods stay although their VM is down"},
	{VFIOBusy, Nodes, "a VM with a GPU does not start: its VFIO group is busy (SyncFailed)"},
	{VFIOMissing, Nodes, "a launcher with a GPU does not start: /dev/vfio/NN is missing (CreateContainerError)"},
	{StuckScheduling, Nodes, "new pods stay in ContainerCreating: no network for the sandbox"},
	{StuckScheduled, Nodes, "virt-handler does not take new VMs: they stay Scheduled"},
	{ImportRefused, Disks, "the registry refuses the image; CDI tries for ever"},
	{ImportTooSmall, Disks, "the image is larger than the disk; CDI tries for ever"},
	{ImportNoScratch, Disks, "no scratch space for the import; CDI waits for ever"},
	{ImportStalled, Disks, "an import or clone stands still at 37 percent"},
	{StoragePending, Disks, "no volume is provisioned: the claim stays Pending"},
	{CloneFallback, Disks, "a clone falls back to a host-assisted copy, ten times slower, and says so on the claim"},
	{VolumeAstray, Nodes, "a volume that waited for its consumer on this node is made on another one"},
	{WebhookDown, Cluster, "KubeVirt's admission webhook does not answer: VMIs cannot be created"},
	{APISlow, API, "requests wait for delay= before they are passed on"},
	{APIDropReply, API, "requests are carried out, and the connection breaks instead of the reply"},
	{APIAnswer, API, "requests are answered with code= (401, 409, 410, 429, 500, ...) and not carried out"},
	{APICut, API, "the connection breaks before the request is passed on"},
	{APICutWatch, API, "watches end after delay=, at once without it"},
}

// Find returns a switch of the table.
func Find(name string) (Switch, bool) {
	i := slices.IndexFunc(Switches, func(s Switch) bool { return s.Name == name })
	if i < 0 {
		return Switch{}, false
	}
	return Switches[i], true
}

// Matches says whether the value of a switch lists a target.
func (s Switch) Matches(value, target string) bool {
	for _, v := range strings.FieldsFunc(value, func(r rune) bool { return r == ',' || r == ' ' || r == '\n' }) {
		if v == "*" || v == target || s.Kind == Disks && strings.Contains(target, v) {
			return true
		}
	}
	return false
}

// Check refuses a value that would do nothing.
func (s Switch) Check(value string) error {
	switch {
	case s.Kind == API:
		_, err := ParseRules(value)
		return err
	case strings.Trim(value, " ,\n") == "":
		return fmt.Errorf("%s wants %s, or * for all", s.Name, s.Kind)
	case s.Kind == Cluster && value != "*":
		return fmt.Errorf("%s concerns the whole cluster: its only value is *", s.Name)
	}
	return nil
}
