// Package placement decides where a replica could run. It is a pure function
// of a snapshot and a request: no clock, no randomness, no I/O, and the same
// input gives the same plan. A plan is a proposal: the rack's worker checks it
// against the cluster and grants it or says why not, so a stale snapshot costs
// a refusal and never a GPU held twice.
//
// It does not queue, retry, remember or reserve: the caller does, with Take
// and Hold on its own snapshot.
package placement

import (
	"cmp"
	"slices"
	"strings"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

const gib = 1 << 30

// Request is what one replica needs.
type Request struct {
	Location string
	// Model is matched without regard to case. Empty only when Count is zero.
	Model string
	// Count is the GPUs of the whole replica; zero for CPU only, which counts
	// as one unit of CPU and memory.
	Count           uint32
	CPUCoresPerGPU  uint32
	MemoryGiBPerGPU uint32
	// Spans: the runtime can run one replica over several nodes (vLLM).
	Spans bool
	// RackID binds the request to the rack that holds its root disk.
	RackID string
	// PreferNode wins over a better fit: the node that ran it before.
	PreferNode string
	// AvoidNodes, as "rack/node", refused it lately: chosen last.
	AvoidNodes []string
}

// Plan says which nodes of one rack give how many GPUs.
type Plan struct {
	RackID string
	// Model is the name as the rack spells it.
	Model string
	Nodes []PlanNode
}

// PlanNode is one node's part.
type PlanNode struct {
	Node string
	GPUs uint32
}

// Refusal is why there is no plan, and what would have to change.
type Refusal struct {
	Reason  orkv1.Reason
	Message string
	// Final: waiting cannot help, by what every rack of the location reports.
	Final bool
}

// New returns a plan, or a refusal when there is none.
func New(s Snapshot, q Request) (Plan, *Refusal) {
	racks, refusal := considered(s, q)
	if refusal != nil {
		return Plan{}, refusal
	}
	capable, refusal := everFits(racks, q)
	if refusal != nil {
		return Plan{}, refusal
	}
	if best := choose(capable, q, largestTotal(racks, q)); best != nil {
		return best.plan(q), nil
	}
	return Plan{}, whyNotNow(capable, q)
}

// considered are the racks of the location (or the bound one), if any knows
// the model.
func considered(s Snapshot, q Request) ([]Rack, *Refusal) {
	var racks []Rack
	for i := range s.Racks {
		if q.wants(&s.Racks[i]) {
			racks = append(racks, s.Racks[i])
		}
	}
	slices.SortFunc(racks, func(a, b Rack) int { return cmp.Compare(a.ID, b.ID) })
	if len(racks) == 0 {
		return nil, unknownLocation(s, q)
	}
	if q.Count == 0 {
		return racks, nil
	}
	for i := range racks {
		if racks[i].allows(q.Model) && racks[i].knows(q.Model) {
			return racks, nil
		}
	}
	if r := silent(racks); r != nil {
		return nil, waitsForReport(r)
	}
	return nil, unknownModel(racks, q)
}

// everFits are the racks that could hold the request when empty.
func everFits(racks []Rack, q Request) ([]Rack, *Refusal) {
	largest := largestTotal(racks, q)
	var fit, fabric []Rack
	for _, r := range racks {
		if len(q.shapes(&r, largest)) == 0 {
			continue
		}
		fit = append(fit, r)
		if r.Fabric {
			fabric = append(fabric, r)
		}
	}
	spans := q.spans(largest)
	switch {
	case len(fit) > 0 && (!spans || len(fabric) > 0):
		if spans {
			return fabric, nil
		}
		return fit, nil
	case silent(racks) != nil:
		return nil, waitsForReport(silent(racks))
	case len(fit) > 0:
		return nil, noFabric(fit, q, largest)
	case spans && !slices.ContainsFunc(racks, func(r Rack) bool { return r.Fabric }):
		return nil, noFabric(racks, q, largest)
	default:
		return nil, neverFits(racks, q, largest)
	}
}

// option is one feasible placement with what it is ranked by.
type option struct {
	rack     *Rack
	nodes    []*Node
	per      uint32
	avoided  bool
	favoured bool
	leftover uint64
	spareCPU uint64
}

func (o *option) plan(q Request) Plan {
	p := Plan{RackID: o.rack.ID, Model: q.Model}
	for _, n := range o.nodes {
		if g := n.gpu(q.Model); g != nil && q.Count > 0 {
			p.Model = g.Model
		}
		p.Nodes = append(p.Nodes, PlanNode{Node: n.Name, GPUs: o.per})
	}
	return p
}

// choose returns the best option of the racks that take work now, or nil.
func choose(racks []Rack, q Request, largest uint32) *option {
	var best *option
	for i := range racks {
		r := &racks[i]
		if !r.live() || r.room() < q.Count {
			continue
		}
		for _, k := range q.shapes(r, largest) {
			if o := fill(r, q, k); o != nil && (best == nil || o.before(best)) {
				best = o
			}
		}
	}
	return best
}

// fill puts the request on k nodes of the rack, the tightest that do.
func fill(r *Rack, q Request, k uint32) *option {
	per := q.Count / k
	var found []*option
	for i := range r.Nodes {
		n := &r.Nodes[i]
		if !n.holdsNow(q, per) {
			continue
		}
		found = append(found, &option{
			rack: r, nodes: []*Node{n}, per: per,
			avoided:  slices.Contains(q.AvoidNodes, r.ID+"/"+n.Name),
			favoured: q.PreferNode != "" && q.PreferNode == n.Name,
			leftover: n.leftover(q, per),
			spareCPU: uint64(n.FreeCPUCores - q.cores(per)),
		})
	}
	if len(found) < int(k) {
		return nil
	}
	slices.SortFunc(found, func(a, b *option) int {
		if a.before(b) {
			return -1
		}
		return 1
	})
	whole := found[0]
	for _, o := range found[1:k] {
		whole.nodes = append(whole.nodes, o.nodes[0])
		whole.avoided = whole.avoided || o.avoided
		whole.leftover += o.leftover
		whole.spareCPU += o.spareCPU
	}
	return whole
}

// leftover is what stays unused on the node: of the model, or, for a request
// without GPUs, of all GPUs, so that such work keeps off GPU nodes.
func (n *Node) leftover(q Request, per uint32) uint64 {
	if q.Count > 0 {
		return uint64(n.offerable(q.Model) - per)
	}
	var all uint64
	for i := range n.GPUs {
		all += uint64(min(n.GPUs[i].Offerable, n.GPUs[i].Total))
	}
	return all
}

// before orders options: not lately refused, where it ran before, fewest
// nodes, least left over, then by name so that the order is total.
func (o *option) before(p *option) bool {
	if o.avoided != p.avoided {
		return !o.avoided
	}
	if o.favoured != p.favoured {
		return o.favoured
	}
	return cmp.Or(
		cmp.Compare(len(o.nodes), len(p.nodes)),
		cmp.Compare(o.leftover, p.leftover),
		cmp.Compare(o.spareCPU, p.spareCPU),
		cmp.Compare(o.rack.ID, p.rack.ID),
		cmp.Compare(o.nodes[0].Name, p.nodes[0].Name),
	) < 0
}

// wants reports whether the request may go to the rack at all.
func (q Request) wants(r *Rack) bool {
	if q.RackID != "" {
		return r.ID == q.RackID
	}
	return strings.EqualFold(r.Location, q.Location)
}

func (q Request) cores(gpus uint32) uint32 { return max(gpus, 1) * q.CPUCoresPerGPU }

func (q Request) memory(gpus uint32) uint64 {
	return uint64(max(gpus, 1)) * uint64(q.MemoryGiBPerGPU) * gib
}

// spans reports whether the replica must use several nodes. What is free has
// no say: only a count above every node's total spans.
func (q Request) spans(largest uint32) bool {
	return q.Spans && largest > 0 && q.Count > largest
}

// shapes are the numbers of equal nodes of the rack that could hold the
// request when empty, fewest first.
func (q Request) shapes(r *Rack, largest uint32) []uint32 {
	if !r.allows(q.Model) || (r.MaximumGPUs > 0 && q.Count > r.MaximumGPUs) {
		return nil
	}
	if !q.spans(largest) {
		if r.holders(q, q.Count) > 0 {
			return []uint32{1}
		}
		return nil
	}
	var ks []uint32
	for k := uint32(2); k <= q.Count && int(k) <= len(r.Nodes); k++ {
		if q.Count%k == 0 && r.holders(q, q.Count/k) >= int(k) {
			ks = append(ks, k)
		}
	}
	return ks
}

// holders counts the nodes that could give that many GPUs when empty.
func (r *Rack) holders(q Request, gpus uint32) int {
	count := 0
	for i := range r.Nodes {
		if r.Nodes[i].everHolds(q, gpus) {
			count++
		}
	}
	return count
}

func (r *Rack) knows(model string) bool {
	for i := range r.Nodes {
		if r.Nodes[i].total(model) > 0 {
			return true
		}
	}
	return false
}

// largestTotal is the most GPUs of the model that any node has.
func largestTotal(racks []Rack, q Request) uint32 {
	var most uint32
	for i := range racks {
		if !q.wants(&racks[i]) || !racks[i].allows(q.Model) {
			continue
		}
		for k := range racks[i].Nodes {
			most = max(most, racks[i].Nodes[k].total(q.Model))
		}
	}
	return most
}

// silent is a rack that cannot be judged: it has not reported, or its cluster
// cannot be asked.
func silent(racks []Rack) *Rack {
	for i := range racks {
		if !racks[i].Reported || racks[i].Fault != "" {
			return &racks[i]
		}
	}
	return nil
}
