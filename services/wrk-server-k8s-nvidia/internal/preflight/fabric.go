package preflight

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	kubevirt "kubevirt.io/api/core/v1"

	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/capacity"
)

// HostDevices says whether KubeVirt passes devices other than GPUs into machines. The
// gate is off by itself in every version up to 1.9.
func HostDevices(k *kubevirt.KubeVirt) bool {
	if k == nil || k.Spec.Configuration.DeveloperConfiguration == nil {
		return false
	}
	dev := k.Spec.Configuration.DeveloperConfiguration
	return slices.Contains(dev.FeatureGates, "HostDevices") && !slices.Contains(dev.DisabledFeatureGates, "HostDevices")
}

// overlay says whether the network that joins machines of several nodes stands.
func (c *check) overlay(nodes []*corev1.Node) {
	const row = "overlay"
	if c.Overlay == nil || c.Overlay.Plan() == nil {
		c.add(row, good, "set overlay.driver of the rack's worker if replicas are to span nodes", "the overlay is off")
		return
	}
	words, remedy, ok := c.Overlay.Preflight(c.ctx, nodes)
	verdict := warning
	if ok {
		verdict = good
	}
	c.add(row, verdict, remedy, "%s", words)
}

// fabric says whether replicas can span the rack's nodes.
func (c *check) fabric(rack *capacity.Rack) {
	const row = "fabric"
	switch {
	case len(c.Fabric) == 0:
		c.add(row, good, "name the InfiniBand adapters in fabric.devices if replicas are to span nodes", "no adapters are named: every replica stays within one node")
		return
	case len(rack.Fabrics) == 0:
		c.add(row, warning, "see the adapters' device plugin, permittedHostDevices, the gate HostDevices and the row overlay", "no replica can span nodes: %s", rack.Unjoined)
		return
	}
	var words []string
	for _, resource := range rack.Fabrics {
		nodes, total, free := 0, 0, 0
		for _, n := range rack.Nodes {
			if a := n.Adapters[resource]; a != nil {
				nodes, total, free = nodes+1, total+a.Total, free+a.Free()
			}
		}
		words = append(words, fmt.Sprintf("%s joins %d nodes, %d of %d free", resource, nodes, free, total))
	}
	c.add(row, good, "", "%s", strings.Join(words, "; "))
}
