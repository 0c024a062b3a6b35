package capacity

import (
	"fmt"
	"math"
	"strings"

	corev1 "k8s.io/api/core/v1"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/label"
)

// Claim is what one attempt was granted. It counts until its pods and its
// anchor are gone, whether or not its pods exist yet.
type Claim struct {
	AttemptID string
	Nodes     []ClaimNode
}

// ClaimNode is a claim's part on one node.
type ClaimNode struct {
	Node  string
	Model string
	GPUs  int
	Need  Need
	// Adapter is the resource of its InfiniBand adapters, Adapters their number.
	Adapter  string
	Adapters int
}

// Input is everything that Count looks at.
type Input struct {
	// Nodes are the rack's; Pods are the cluster's that are not over.
	Nodes  []*corev1.Node
	Pods   []*corev1.Pod
	Claims []Claim
	// Permitted is KubeVirt's list.
	Permitted Permitted
	// Entry is the operator's word on the rack; nil offers nothing.
	Entry *orkv1.RackEntry
	// GPUModels are more names that the operator calls GPUs.
	GPUModels []string
	// Tolerations of the rack's virtual machines.
	Tolerations []corev1.Toleration
	// Fabric are the resources of InfiniBand adapters that the operator allows, the
	// best first. Overlay is the resource of nodes that have the overlay's bridge, empty
	// where there is no overlay. HostDevices says whether KubeVirt's gate of that name is on.
	Fabric      []string
	Overlay     string
	HostDevices bool
}

// GPU counts one model on one node. No number is ever negative.
type GPU struct {
	Model, Resource string
	Total           int
	Healthy         int
	Held            int
	Offerable       int
	Message         string
	Holders         map[string]int
	// Degraded: the device plugin reports fewer than are in use.
	Degraded bool
	// Forbidden: KubeVirt does not let it into a machine.
	Forbidden        bool
	podHeld, foreign int
}

// Node is one machine of the rack.
type Node struct {
	Name        string
	Schedulable bool
	Message     string
	Simulated   bool
	// Missing: claims name it, and the rack has no such node any more.
	Missing     bool
	GPUs        map[string]*GPU // by model
	Total, Free Need
	FreePods    int64
	Adapters    map[string]*Adapters // by resource
	// Overlay: the bridge of the overlay is there.
	Overlay bool
}

// Rack is the whole count.
type Rack struct {
	Nodes map[string]*Node
	// Granted is how many GPUs all claims hold, Maximum the entry's bound or 0.
	Granted, Maximum int
	Entry            *orkv1.RackEntry
	// Simulated is true when there are nodes and every one is made up.
	Simulated bool
	// Fabrics are the adapters that join its nodes beside the overlay, the best first;
	// Unjoined says why there are none.
	Fabrics  []string
	Unjoined string
}

// Count does the sums.
func Count(in Input) *Rack {
	r := &Rack{Nodes: map[string]*Node{}, Entry: in.Entry, Simulated: len(in.Nodes) > 0}
	classes := newClassifier(in.Permitted, in.GPUModels, in.Entry.GetAllowedModels())
	for _, c := range in.Claims {
		for _, n := range c.Nodes {
			r.Granted += n.GPUs
		}
	}
	r.Maximum = int(in.Entry.GetMaximumGpus())
	use := usageOf(in.Pods, in.Claims)
	for _, node := range in.Nodes {
		n := countNode(node, use[node.Name], classes, in)
		r.Simulated = r.Simulated && n.Simulated
		r.Nodes[n.Name] = n
	}
	for name, u := range use {
		if r.Nodes[name] == nil && len(u.claims) > 0 {
			r.Nodes[name] = missingNode(name, u)
		}
	}
	for _, n := range r.Nodes {
		for _, g := range n.GPUs {
			r.offer(n, g)
		}
	}
	r.join(in)
	return r
}

// usage is what is taken on one node.
type usage struct {
	milliCPU, memory, pods int64
	// pods' GPUs by resource, then by attempt ("" for others)
	gpus map[string]map[string]int
	// claims by attempt
	claims map[string]*ClaimNode
	// cpu and memory of pods, by attempt
	byAttempt map[string]*Need
}

func usageOf(pods []*corev1.Pod, claims []Claim) map[string]*usage {
	all := map[string]*usage{}
	at := func(node string) *usage {
		u := all[node]
		if u == nil {
			u = &usage{gpus: map[string]map[string]int{}, claims: map[string]*ClaimNode{}, byAttempt: map[string]*Need{}}
			all[node] = u
		}
		return u
	}
	for _, p := range pods {
		if p.Spec.NodeName == "" || p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed {
			continue // not on a node: ours count by their claim, others not at all
		}
		u := at(p.Spec.NodeName)
		u.pods++
		attempt := p.Labels[label.Attempt]
		request := requestOf(p)
		need := Need{}
		for name, amount := range request {
			switch name {
			case corev1.ResourceCPU:
				need.MilliCPU = amount
			case corev1.ResourceMemory:
				need.MemoryBytes = amount
			default:
				if amount <= 0 {
					continue
				}
				by := u.gpus[string(name)]
				if by == nil {
					by = map[string]int{}
					u.gpus[string(name)] = by
				}
				by[attempt] += int(amount)
			}
		}
		if attempt == "" {
			u.milliCPU += need.MilliCPU
			u.memory += need.MemoryBytes
			continue
		}
		sum := u.byAttempt[attempt]
		if sum == nil {
			sum = &Need{}
			u.byAttempt[attempt] = sum
		}
		sum.MilliCPU += need.MilliCPU
		sum.MemoryBytes += need.MemoryBytes
	}
	for _, c := range claims {
		for i := range c.Nodes {
			n := &c.Nodes[i]
			u := at(n.Node)
			if was := u.claims[c.AttemptID]; was != nil {
				both := *was
				both.GPUs += n.GPUs
				both.Adapters += n.Adapters
				both.Need.MilliCPU += n.Need.MilliCPU
				both.Need.MemoryBytes += n.Need.MemoryBytes
				u.claims[c.AttemptID] = &both
				continue
			}
			u.claims[c.AttemptID] = n
		}
	}
	for _, u := range all {
		for attempt, c := range u.claims {
			have := u.byAttempt[attempt]
			if have == nil {
				have = &Need{}
				u.byAttempt[attempt] = have
				u.pods++ // its pod is still to come
			}
			have.MilliCPU = max(have.MilliCPU, c.Need.MilliCPU)
			have.MemoryBytes = max(have.MemoryBytes, c.Need.MemoryBytes)
		}
		for _, n := range u.byAttempt {
			u.milliCPU += n.MilliCPU
			u.memory += n.MemoryBytes
		}
	}
	return all
}

func countNode(node *corev1.Node, u *usage, classes classifier, in Input) *Node {
	if u == nil {
		u = &usage{}
	}
	n := &Node{Name: node.Name, GPUs: map[string]*GPU{}, Simulated: node.Labels[label.Simulated] == "true"}
	var notes []string
	notes, n.Schedulable = schedulable(node, in.Tolerations)
	n.Total = Need{MilliCPU: node.Status.Allocatable.Cpu().MilliValue(), MemoryBytes: node.Status.Allocatable.Memory().Value()}
	n.Free = Need{MilliCPU: max(0, n.Total.MilliCPU-u.milliCPU), MemoryBytes: max(0, n.Total.MemoryBytes-u.memory)}
	n.FreePods = math.MaxInt64 // a node that names no bound has none
	if q, ok := node.Status.Allocatable[corev1.ResourcePods]; ok {
		n.FreePods = max(0, q.Value()-u.pods)
	}
	n.countAdapters(node, u, in.Fabric)
	bridges := node.Status.Capacity[corev1.ResourceName(in.Overlay)]
	n.Overlay = in.Overlay != "" && bridges.Value() > 0
	workload := node.Labels[label.GPUWorkload]
	if workload == "container" || workload == "vm-vgpu" {
		notes = append(notes, fmt.Sprintf("its GPUs are prepared for %q, not for passthrough", workload))
	} else {
		notes = append(notes, n.countGPUs(node, u, classes)...)
	}
	n.Message = strings.Join(notes, "; ")
	return n
}

// missingNode counts what is held on a node that is not there. That the API lost
// the node says nothing of its machines: they may run on, and their GPUs with them.
func missingNode(name string, u *usage) *Node {
	n := &Node{Name: name, Missing: true, GPUs: map[string]*GPU{}}
	held := 0
	for attempt, c := range u.claims {
		held += c.GPUs
		if c.GPUs == 0 {
			continue
		}
		g := n.GPUs[c.Model]
		if g == nil {
			g = &GPU{Model: c.Model, Resource: Resource(c.Model), Holders: map[string]int{}}
			n.GPUs[c.Model] = g
		}
		g.Holders[attempt] = max(c.GPUs, u.gpus[g.Resource][attempt])
		g.Held += g.Holders[attempt]
		g.Total = g.Held
	}
	n.Message = fmt.Sprintf("the node is missing from the cluster; %d attempts hold %d GPUs there until the cluster has nothing left of them", len(u.claims), held)
	return n
}

// countGPUs fills n.GPUs and gives notes for the node.
func (n *Node) countGPUs(node *corev1.Node, u *usage, classes classifier) (notes []string) {
	add := func(resource string) *GPU {
		model := Model(resource)
		g := n.GPUs[model]
		if g == nil {
			g = &GPU{Model: model, Resource: resource, Holders: map[string]int{}}
			n.GPUs[model] = g
		}
		return g
	}
	names := map[string]bool{}
	for name := range node.Status.Capacity {
		names[string(name)] = true
	}
	for name := range node.Status.Allocatable {
		names[string(name)] = true
	}
	for name := range u.gpus {
		names[name] = true
	}
	for _, name := range sorted(names) {
		switch classes.of(name) {
		case whole, forbidden:
			g := add(name)
			g.Forbidden = classes.of(name) == forbidden
			if near := classes.nearMiss(name); g.Forbidden && near != "" {
				notes = append(notes, fmt.Sprintf("the node advertises %s but KubeVirt permits %s", name, near))
			}
			capacity, allocatable := node.Status.Capacity[corev1.ResourceName(name)], node.Status.Allocatable[corev1.ResourceName(name)]
			g.Total, g.Healthy = int(max(0, capacity.Value())), int(max(0, allocatable.Value()))
		case unclassified:
			if q := node.Status.Capacity[corev1.ResourceName(name)]; q.Value() > 0 {
				notes = append(notes, fmt.Sprintf("%s is not known to be a GPU and is not offered", name))
			}
		}
	}
	// A claim counts even where the node has stopped to name its resource.
	for attempt, c := range u.claims {
		if c.GPUs == 0 {
			continue
		}
		g := n.GPUs[c.Model]
		if g == nil {
			g = add(Resource(c.Model))
		}
		g.Holders[attempt] = c.GPUs
	}
	for _, g := range n.GPUs {
		for attempt, count := range u.gpus[g.Resource] {
			g.podHeld += count
			if attempt == "" {
				g.foreign += count
				continue
			}
			g.Holders[attempt] = max(g.Holders[attempt], count)
		}
		g.Held = g.foreign
		for _, count := range g.Holders {
			g.Held += count
		}
		// The plugin may report nothing while cards are in use: they have not gone.
		g.Total = max(g.Total, g.Healthy, g.Held)
	}
	return notes
}

// offer decides how many of one model a node offers, and says why not more.
func (r *Rack) offer(n *Node, g *GPU) {
	var why []string
	g.Degraded = g.Healthy < g.podHeld
	offerable := max(0, g.Healthy-g.Held)
	stop := func(format string, a ...any) { offerable = 0; why = append(why, fmt.Sprintf(format, a...)) }
	switch {
	case n.Missing:
		stop("the node is missing from the cluster")
	case g.Degraded:
		stop("the device plugin is not reporting: %d healthy while %d are in use", g.Healthy, g.podHeld)
	case g.Healthy < g.Total:
		why = append(why, fmt.Sprintf("%d of %d are not healthy", g.Total-g.Healthy, g.Total))
	}
	if g.Forbidden {
		stop("KubeVirt does not permit %s", g.Resource)
	}
	if !n.Schedulable && !n.Missing {
		stop("the node is not schedulable")
	}
	switch {
	case r.Entry == nil:
		stop("the rack's entry is not known yet")
	default:
		if !Allowed(r.Entry, g.Model) {
			stop("the rack's entry does not offer this model")
		}
		if r.Entry.Cordoned {
			stop("the rack is cordoned")
		}
	}
	if r.Maximum > 0 {
		if left := max(0, r.Maximum-r.Granted); left < offerable {
			offerable = left
			why = append(why, fmt.Sprintf("the rack's entry allows %d GPUs, %d are granted", r.Maximum, r.Granted))
		}
	}
	g.Offerable, g.Message = offerable, strings.Join(why, "; ")
}

// Allowed says whether the entry offers a model.
func Allowed(entry *orkv1.RackEntry, model string) bool {
	if len(entry.GetAllowedModels()) == 0 {
		return true
	}
	for _, m := range entry.GetAllowedModels() {
		if strings.EqualFold(Model(m), model) {
			return true
		}
	}
	return false
}

// Resource is the resource name of a model.
func Resource(model string) string {
	if strings.Contains(model, "/") {
		return model
	}
	return prefix + model
}

// Find gives a node's count of a model, without regard to case.
func (n *Node) Find(model string) *GPU {
	if g := n.GPUs[Model(model)]; g != nil {
		return g
	}
	for name, g := range n.GPUs {
		if strings.EqualFold(name, Model(model)) {
			return g
		}
	}
	return nil
}

// Report is the count in the form that ork reads, sorted by name.
func (r *Rack) Report() []*orkv1.RackNode {
	out := make([]*orkv1.RackNode, 0, len(r.Nodes))
	for _, name := range sorted(r.Nodes) {
		n := r.Nodes[name]
		rn := &orkv1.RackNode{
			Name: n.Name, Schedulable: n.Schedulable, Message: n.Message,
			FreeCpuCores: uint32(n.Free.MilliCPU / 1000), FreeMemoryBytes: uint64(n.Free.MemoryBytes),
			TotalCpuCores: uint32(n.Total.MilliCPU / 1000), TotalMemoryBytes: uint64(n.Total.MemoryBytes),
		}
		for _, model := range sorted(n.GPUs) {
			g := n.GPUs[model]
			gc := &orkv1.GpuCapacity{
				Model: g.Model, Total: uint32(g.Total), Healthy: uint32(g.Healthy), Held: uint32(g.Held),
				Offerable: uint32(g.Offerable), Message: g.Message,
			}
			if len(g.Holders) > 0 {
				gc.Holders = map[string]uint32{}
				for attempt, count := range g.Holders {
					gc.Holders[attempt] = uint32(count)
				}
			}
			rn.Gpus = append(rn.Gpus, gc)
		}
		out = append(out, rn)
	}
	return out
}
