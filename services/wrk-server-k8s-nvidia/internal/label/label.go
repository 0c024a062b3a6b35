// Package label names the labels and annotations that the worker writes on
// cluster objects and reads back, and makes values fit for them.
//
// It holds names only; it does not say what carries which: package graph does.
package label

import (
	"crypto/sha256"
	"encoding/hex"
	"regexp"
)

// Labels under cosmicac.dev. Their values are ids, never user text.
const (
	ManagedBy = "app.kubernetes.io/managed-by"
	Network   = "cosmicac.dev/network"
	Rack      = "cosmicac.dev/rack"
	Job       = "cosmicac.dev/job"
	Replica   = "cosmicac.dev/replica"
	Attempt   = "cosmicac.dev/attempt"
	Project   = "cosmicac.dev/project"
	// Node is the index of a VM within its attempt.
	Node = "cosmicac.dev/node"
	// Volume is the id of a volume, on its own objects alone.
	Volume = "cosmicac.dev/volume"
	// Probe is on everything of a probe, which goes with whoever waits for it.
	Probe = "cosmicac.dev/probe"
	// Simulated on a cluster node says that its GPUs are made up.
	Simulated = "cosmicac.dev/simulated"

	// Manager is the value of ManagedBy.
	Manager = "wrk-server-k8s-nvidia"
)

// Annotations. JobName and VolumeName are the only user text on any object.
const (
	JobName = "cosmicac.dev/job-name"
	// VolumeName is what its project calls a volume.
	VolumeName = "cosmicac.dev/volume-name"
	SpecHash   = "cosmicac.dev/spec-hash"
	Image      = "cosmicac.dev/image"
	// MadeFor is the number of the attempt for which a root disk was made.
	MadeFor = "cosmicac.dev/made-for-attempt"
	// QuarantinedUntil is when a VLAN that was given back may be given again, RFC 3339.
	QuarantinedUntil = "cosmicac.dev/quarantined-until"
)

// Labels of KubeVirt that are read.
const (
	KubeVirtApp         = "kubevirt.io"
	KubeVirtLauncher    = "virt-launcher"
	KubeVirtCreatedBy   = "kubevirt.io/created-by"
	KubeVirtSchedulable = "kubevirt.io/schedulable"
	// GPUWorkload on a node says what NVIDIA's operator prepared it for.
	GPUWorkload = "nvidia.com/gpu.workload.config"
)

var (
	value = regexp.MustCompile(`^[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$`)
	name  = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?$`)
)

// Safe gives s itself when it can be a label's value, else a digest of it.
func Safe(s string) string {
	if s == "" || value.MatchString(s) {
		return s
	}
	sum := sha256.Sum256([]byte(s))
	return "x-" + hex.EncodeToString(sum[:16])
}

// ID says whether s may stand in the names of cluster objects: a DNS label of
// at most 40 characters.
func ID(s string) bool { return name.MatchString(s) }
