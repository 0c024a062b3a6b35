package placement

import (
	"slices"
	"strings"
)

// Snapshot is the capacity that one planning pass works on. The caller owns
// it; Plan only reads it, Take and Hold change it.
type Snapshot struct {
	Racks []Rack
}

// Rack is a rack's entry joined with its worker's newest report.
type Rack struct {
	ID       string
	Location string
	// AllowedModels bounds what the worker offers; empty allows all.
	AllowedModels []string
	// MaximumGPUs bounds what jobs may hold here at once; zero for no bound.
	MaximumGPUs uint32
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
	Nodes  []Node
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
	c := Snapshot{Racks: slices.Clone(s.Racks)}
	for i := range c.Racks {
		c.Racks[i].Nodes = slices.Clone(c.Racks[i].Nodes)
		for k := range c.Racks[i].Nodes {
			c.Racks[i].Nodes[k].GPUs = slices.Clone(c.Racks[i].Nodes[k].GPUs)
		}
	}
	return c
}

// Take deducts a plan, so that the next plan of the same pass sees what is
// left. It never goes below zero: what a stale report says less of is zero.
func (s *Snapshot) Take(p Plan, q Request) {
	for i := range s.Racks {
		r := &s.Racks[i]
		if r.ID != p.RackID {
			continue
		}
		for _, pn := range p.Nodes {
			r.Held += pn.GPUs
			for k := range r.Nodes {
				n := &r.Nodes[k]
				if n.Name != pn.Node {
					continue
				}
				if g := n.gpu(p.Model); g != nil {
					g.Offerable -= min(g.Offerable, pn.GPUs)
				}
				n.FreeCPUCores -= min(n.FreeCPUCores, q.cores(pn.GPUs))
				n.FreeMemoryBytes -= min(n.FreeMemoryBytes, q.memory(pn.GPUs))
			}
		}
	}
}

// Hold keeps nodes free for a request that has waited too long: those that
// could hold it by their totals and are nearest to it now. Later requests of
// the same pass find them kept for waiter. It returns the nodes' names.
func (s *Snapshot) Hold(q Request, waiter string) []string {
	type candidate struct {
		rack, node int
		offerable  uint32
	}
	var best []candidate
	for ri := range s.Racks {
		r := &s.Racks[ri]
		if !q.wants(r) || !r.live() || !r.allows(q.Model) {
			continue
		}
		for _, k := range q.shapes(r, largestTotal(s.Racks, q)) {
			per := q.Count / k
			var found []candidate
			for ni := range r.Nodes {
				n := &r.Nodes[ni]
				if n.Schedulable && n.KeptFor == "" && n.everHolds(q, per) {
					found = append(found, candidate{ri, ni, n.offerable(q.Model)})
				}
			}
			if len(found) < int(k) {
				continue
			}
			slices.SortStableFunc(found, func(a, b candidate) int { return int(b.offerable) - int(a.offerable) })
			found = found[:k]
			if best == nil || found[k-1].offerable > best[len(best)-1].offerable {
				best = found
			}
			break
		}
	}
	var names []string
	for _, c := range best {
		n := &s.Racks[c.rack].Nodes[c.node]
		n.KeptFor = waiter
		names = append(names, n.Name)
	}
	return names
}

// live reports whether new work may be put on the rack now.
func (r *Rack) live() bool { return r.Reported && r.Connected && r.Fault == "" && !r.Cordoned }

func (r *Rack) allows(model string) bool {
	if len(r.AllowedModels) == 0 || model == "" {
		return true
	}
	return slices.ContainsFunc(r.AllowedModels, func(m string) bool { return strings.EqualFold(m, model) })
}

// room is how many GPUs the entry's maximum leaves.
func (r *Rack) room() uint32 {
	if r.MaximumGPUs == 0 {
		return ^uint32(0)
	}
	return r.MaximumGPUs - min(r.MaximumGPUs, r.Held)
}

func (n *Node) gpu(model string) *GPU {
	for i := range n.GPUs {
		if strings.EqualFold(n.GPUs[i].Model, model) {
			return &n.GPUs[i]
		}
	}
	return nil
}

func (n *Node) total(model string) uint32 {
	if g := n.gpu(model); g != nil {
		return g.Total
	}
	return 0
}

// offerable is never more than the total, whatever a worker says.
func (n *Node) offerable(model string) uint32 {
	if g := n.gpu(model); g != nil {
		return min(g.Offerable, g.Total)
	}
	return 0
}

// everHolds judges by totals alone: would it fit on the empty node?
func (n *Node) everHolds(q Request, gpus uint32) bool {
	return n.total(q.Model) >= gpus &&
		max(n.TotalCPUCores, n.FreeCPUCores) >= q.cores(gpus) &&
		max(n.TotalMemoryBytes, n.FreeMemoryBytes) >= q.memory(gpus)
}

// holdsNow judges by what is free.
func (n *Node) holdsNow(q Request, gpus uint32) bool {
	return n.Schedulable && n.KeptFor == "" && n.everHolds(q, gpus) &&
		n.offerable(q.Model) >= gpus &&
		n.FreeCPUCores >= q.cores(gpus) && n.FreeMemoryBytes >= q.memory(gpus)
}
