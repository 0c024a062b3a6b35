package placement

import (
	"slices"
	"strings"
)

// Snapshot is the capacity that one planning pass works on.
type Snapshot struct {
	Racks []Rack
	// Quarantined is left out of every plan.
	Quarantined []Quarantine
}

// Quarantine leaves capacity out of placement because work failed to start
// there. A GPU's UUID is evidence and never part of it: the cluster cannot be
// asked for one card.
type Quarantine struct {
	RackID string
	// Node is one machine; empty for every machine of the rack.
	Node string
	// Model is one GPU model; empty for all, and for work without GPUs.
	Model string
	// Why is the evidence in words, shown to those who are refused for it.
	Why string
}

// Rack is a rack's entry joined with its worker's newest report.
type Rack struct {
	ID       string
	Location string
	// AllowedModels bounds what the worker offers; empty allows all.
	AllowedModels []string
	// MaximumGPUs bounds what jobs may hold here at once; zero for no bound.
	MaximumGPUs uint32
	// BoardCounts are the GPUs that a VM may take of an NVSwitch board, as the
	// rack's partitions are known; empty for one or all.
	BoardCounts []uint32
	// Held is how many GPUs jobs hold or were promised here.
	Held     uint32
	Cordoned bool
	// Reported: the worker has sent a complete report since this process started.
	Reported bool
	// Connected: it can be asked now.
	Connected bool
	// Fault is why its cluster cannot be asked, in the cluster's words.
	Fault string
	// Fabric: InfiniBand and the overlay join its nodes.
	Fabric bool
	// Nodes have names that differ; of two alike the first counts.
	Nodes []Node
}

// Node is one machine.
type Node struct {
	Name        string
	Schedulable bool
	// Message says why it is not schedulable.
	Message          string
	FreeCPUCores     uint32
	TotalCPUCores    uint32
	FreeMemoryBytes  uint64
	TotalMemoryBytes uint64
	GPUs             []GPU
	// KeptFor names the job that waits for this node to empty; nothing else
	// is placed on it.
	KeptFor string
}

// GPU counts GPUs of one model.
type GPU struct {
	Model     string
	Total     uint32
	Offerable uint32
	// Message says why less is offerable than is free.
	Message string
}

// Clone copies the snapshot so that a trial can change the copy.
func (s Snapshot) Clone() Snapshot {
	c := Snapshot{Racks: slices.Clone(s.Racks), Quarantined: s.Quarantined}
	for i := range c.Racks {
		c.Racks[i].Nodes = slices.Clone(c.Racks[i].Nodes)
		for k := range c.Racks[i].Nodes {
			c.Racks[i].Nodes[k].GPUs = slices.Clone(c.Racks[i].Nodes[k].GPUs)
		}
	}
	return c
}

// live reports whether new work may be put on the rack now.
func (r *Rack) live() bool { return r.Reported && r.Connected && r.Fault == "" && !r.Cordoned }

func (r *Rack) allows(model string) bool {
	return len(r.AllowedModels) == 0 ||
		slices.ContainsFunc(r.AllowedModels, func(m string) bool { return strings.EqualFold(m, model) })
}

func (n *Node) gpu(model string) *GPU {
	for i := range n.GPUs {
		if strings.EqualFold(n.GPUs[i].Model, model) {
			return &n.GPUs[i]
		}
	}
	return nil
}

// offerable is never more than the total, whatever a worker says. For no model
// it is the sum over all.
func (n *Node) offerable(model string) uint32 {
	if model == "" {
		var all uint32
		for i := range n.GPUs {
			all += min(n.GPUs[i].Offerable, n.GPUs[i].Total)
		}
		return all
	}
	if g := n.gpu(model); g != nil {
		return min(g.Offerable, g.Total)
	}
	return 0
}

// Board reports whether GPUs of a model sit on an NVSwitch board (HGX, SXM). A
// VM gets one of its GPUs, or all of them with the switches: any other number
// needs the board's partitions, or CUDA does not start in the guest.
func Board(model string) bool {
	model = strings.ToUpper(model)
	if strings.Contains(model, "PCIE") || strings.Contains(model, "NVL") {
		return false
	}
	return strings.Contains(model, "SXM") || strings.Contains(model, "HGX") ||
		// Names of pci.ids that have no form factor because there is but one.
		strings.Contains(model, "_B200") || strings.Contains(model, "_B300")
}
