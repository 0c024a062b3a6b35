package capacity

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
)

// Adapters count one kind of InfiniBand adapter on one node. They go whole into the
// machines of replicas over several nodes, as GPUs do. No number is ever negative.
type Adapters struct {
	// Total are those of the node; Healthy of them the device plugin hands out;
	// Held are in use or claimed.
	Total, Healthy, Held int
}

// Free is how many can be given now.
func (a *Adapters) Free() int { return max(0, a.Healthy-a.Held) }

// countAdapters counts the allowed kinds that the node has or that are claimed on it.
func (n *Node) countAdapters(node *corev1.Node, u *usage, allowed []string) {
	for _, resource := range allowed {
		capacity, allocatable := node.Status.Capacity[corev1.ResourceName(resource)], node.Status.Allocatable[corev1.ResourceName(resource)]
		a := &Adapters{Total: int(max(0, capacity.Value())), Healthy: int(max(0, allocatable.Value()))}
		holders := map[string]int{}
		for attempt, c := range u.claims {
			if c.Adapter == resource {
				holders[attempt] = c.Adapters
			}
		}
		for attempt, count := range u.gpus[resource] {
			holders[attempt] = max(holders[attempt], count)
		}
		for _, count := range holders {
			a.Held += count
		}
		if a.Total = max(a.Total, a.Healthy, a.Held); a.Total == 0 {
			continue
		}
		if n.Adapters == nil {
			n.Adapters = map[string]*Adapters{}
		}
		n.Adapters[resource] = a
	}
}

// Share is how many adapters of a kind a machine with so many GPUs of a model gets:
// as large a part of the node's as of its GPUs, and at least one where it has any.
func (n *Node) Share(adapter, model string, gpus int) int {
	a := n.Adapters[adapter]
	if a == nil {
		return 0
	}
	g := n.Find(model)
	if g == nil || g.Total == 0 {
		return 1
	}
	return max(1, min(a.Total, a.Total*gpus/g.Total))
}

// join finds the kinds of adapters that join nodes of the rack, and says why none does.
// What a node has counts, whatever is free or closed: a fabric does not go away when a
// node is cordoned.
func (r *Rack) join(in Input) {
	switch {
	case len(in.Fabric) == 0:
		r.Unjoined = "the rack's worker names no InfiniBand adapters (fabric.devices)"
		return
	case in.Overlay == "":
		r.Unjoined = "the rack's worker names no overlay (overlay.driver): machines on the pod network do not reach each other"
		return
	case !in.Permitted.Known:
		r.Unjoined = "KubeVirt has not said yet what it permits"
		return
	case !in.HostDevices:
		r.Unjoined = "KubeVirt's feature gate HostDevices is off: machines get no InfiniBand adapters"
		return
	}
	for _, resource := range in.Fabric {
		if !in.Permitted.permits(resource) {
			r.Unjoined = fmt.Sprintf("KubeVirt does not permit %s, see permittedHostDevices", resource)
			continue
		}
		nodes := 0
		for _, n := range r.Nodes {
			if n.joins(resource) {
				nodes++
			}
		}
		if nodes < 2 {
			r.Unjoined = fmt.Sprintf("%d of %d nodes have both %s and %s: two are needed", nodes, len(r.Nodes), resource, in.Overlay)
			continue
		}
		r.Fabrics = append(r.Fabrics, resource)
	}
	if len(r.Fabrics) > 0 {
		r.Unjoined = ""
	}
}

// joins says whether a node has these adapters and the overlay's bridge.
func (n *Node) joins(resource string) bool {
	return n.Adapters[resource] != nil && n.Overlay && !n.Missing
}

// Joins is the first kind of adapter that all of these nodes have; empty when there
// is none.
func (r *Rack) Joins(nodes []string) string {
next:
	for _, resource := range r.Fabrics {
		for _, name := range nodes {
			if n := r.Nodes[name]; n == nil || !n.joins(resource) {
				continue next
			}
		}
		return resource
	}
	return ""
}

// permits says whether a device may be passed into a machine.
func (p Permitted) permits(resource string) bool {
	if p.Any {
		return true
	}
	for _, d := range p.Devices {
		if d.Resource == resource {
			return true
		}
	}
	return false
}
