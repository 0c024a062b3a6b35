package graph

import (
	"strconv"

	kubevirt "kubevirt.io/api/core/v1"

	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/capacity"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/claim"
)

// join gives the machines of a record over several nodes their adapters. Where the
// nodes have none in common the record says so by none, and its check refuses it.
func join(rack *capacity.Rack, rec *claim.Record) {
	if len(rec.Nodes) < 2 {
		return
	}
	names := make([]string, 0, len(rec.Nodes))
	for _, n := range rec.Nodes {
		names = append(names, n.Node)
	}
	if rec.Adapter = rack.Joins(names); rec.Adapter == "" {
		return
	}
	for k := range rec.Nodes {
		n := &rec.Nodes[k]
		n.Adapters = rack.Nodes[n.Node].Share(rec.Adapter, rec.Model, n.GPUs)
	}
}

// hostDevices are the adapters of the k-th machine, whole ones.
func hostDevices(rec *claim.Record, k int) []kubevirt.HostDevice {
	var out []kubevirt.HostDevice
	for i := range rec.Nodes[k].Adapters {
		out = append(out, kubevirt.HostDevice{Name: "ib" + strconv.Itoa(i), DeviceName: rec.Adapter})
	}
	return out
}
