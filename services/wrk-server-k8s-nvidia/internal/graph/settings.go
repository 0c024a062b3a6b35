package graph

import (
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/overlay"
)

// Settings are the rack's own ways of making objects.
type Settings struct {
	// Rack and Network go into labels.
	Rack, Network string
	// AgentImage is the containerDisk image with the agents.
	AgentImage string
	// ImagePullSecret is the docker registry secret of AgentImage; may be empty.
	ImagePullSecret string
	// RuntimeImages gives the docker:// reference of an inference runtime.
	RuntimeImages map[string]string
	// StorageClass of root disks; empty for the cluster's default.
	StorageClass string
	// VolumeMode is "Filesystem", "Block" or empty for the class's own choice.
	VolumeMode string
	// RegistrySecret and RegistryCA name what CDI needs to pull; may be empty.
	RegistrySecret, RegistryCA string
	// PullMethod is CDI's: "pod", "node" or empty.
	PullMethod string
	// DefaultDiskGiB is a root disk's size when the spec names none.
	DefaultDiskGiB uint32
	Tolerations    []corev1.Toleration
	// DeniedCIDRs are cluster networks that guests may not reach.
	DeniedCIDRs []string
	// SerialLog lets KubeVirt keep the guest's serial console as a pod log.
	SerialLog bool
	// PortService is the kind of Service that opens declared ports: NodePort or
	// LoadBalancer.
	PortService corev1.ServiceType
	// PortAddress is where users are told to find them; empty for what the cluster says.
	PortAddress string
	// Overlay joins the machines of attempts over several nodes.
	Overlay   overlay.Driver
	Deadlines Deadlines
}

// Deadlines bound how long a step may take. Each counts from when this process
// first saw the step, by this host's clock; a restart of the worker begins anew.
type Deadlines struct {
	// Seed: the Secret can be made (ork must send the seed again after a crash).
	Seed time.Duration
	// Bound: the disk's claim is bound.
	Bound time.Duration
	// ImportIdle: the import makes progress. Import: it ends.
	ImportIdle, Import time.Duration
	// Pending: the launcher pod is made, once its disk is there.
	Pending time.Duration
	// Scheduling: the launcher pod runs on its node.
	Scheduling time.Duration
	// Scheduled: the machine starts; ScheduledLarge with 8 GPUs and more.
	Scheduled, ScheduledLarge time.Duration
	// Deletion: after this an alarm is raised; deletion goes on.
	Deletion time.Duration
	// Eviction: after this an attempt whose node is drained fails as drained.
	// Zero leaves it to the operator.
	Eviction time.Duration
	// Orphan: how long an object without an anchor is left alone.
	Orphan time.Duration
}

// DefaultDeadlines suit real hardware.
func DefaultDeadlines() Deadlines {
	return Deadlines{
		Seed: 2 * time.Minute, Bound: 5 * time.Minute, ImportIdle: 10 * time.Minute, Import: time.Hour,
		Pending: 2 * time.Minute, Scheduling: 5 * time.Minute, Scheduled: 6 * time.Minute, ScheduledLarge: 15 * time.Minute,
		Deletion: 10 * time.Minute, Eviction: 5 * time.Minute, Orphan: 10 * time.Minute,
	}
}

func (d Deadlines) scheduled(gpus int) time.Duration {
	if gpus >= 8 {
		return d.ScheduledLarge
	}
	return d.Scheduled
}
