// Package placement decides where replicas could run. Plan answers for one
// replica, Decide for everybody who waits: pure functions of a snapshot and of
// what is asked, without clock, randomness or I/O, and the same input gives the
// same plans. A plan is a proposal: the rack's worker checks it against the
// cluster and grants it or says why not, so a stale snapshot costs a refusal and
// never a GPU held twice.
//
// It does not retry, remember or reserve beyond one pass: what is kept for those
// who waited too long follows anew from each snapshot.
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
	// Model is matched without regard to case. It counts when Count does.
	Model string
	// Count is the GPUs of the whole replica; zero for CPU only, which counts
	// as one unit of CPU and memory.
	Count           uint32
	CPUCoresPerGPU  uint32
	MemoryGiBPerGPU uint32
	// Spans: the runtime can run one replica over several nodes (vLLM).
	Spans bool
	// Spread puts it on the emptiest node, away from Beside, instead of on the
	// fullest that has room.
	Spread bool
	// RackID binds the request to the rack that holds its root disk, or what Holds says.
	RackID string
	// Holds is what of it that rack holds, in words; "root disk" when empty.
	Holds string
	// PreferNode wins over a better fit: the node that ran it before.
	PreferNode string
	// AvoidNodes, as "rack/node", refused it lately: chosen last.
	AvoidNodes []string
	// Beside, as "rack/node", runs the other replicas of the same job.
	Beside []string
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

// New returns a plan on a snapshot that stays as it is, or a refusal when there
// is none.
func New(s Snapshot, q Request) (Plan, *Refusal) { return Open(s.Clone()).Plan(q) }

// shape is what decides whether a request has a plan; the rest of it only
// orders the plans that there are.
type shape struct {
	location, model, rack, holds string
	count, cores, memory         uint32
	spans                        bool
}

// Plan returns a plan, or a refusal when there is none; refusals are shared
// between calls.
func (p *Pass) Plan(q Request) (Plan, *Refusal) {
	key := shape{q.Location, q.Model, q.RackID, q.Holds, q.Count, q.CPUCoresPerGPU, q.MemoryGiBPerGPU, q.Spans}
	if refusal := p.refused[key]; refusal != nil {
		return Plan{}, refusal
	}
	a := p.ask(q)
	capable, refusal := a.capable()
	if refusal == nil {
		if best, ok := a.choose(capable); ok {
			return a.plan(best), nil
		}
		refusal = a.whyNotNow(capable)
	}
	p.refused[key] = refusal
	return Plan{}, refusal
}

// ask is a request with what a pass knows of it.
type ask struct {
	Request
	pass *Pass
	// model is the name of the shelf.
	model string
	// racks are those of the location, or the bound one, by id.
	racks []*rackState
	// largest is the most GPUs of the model that any node has.
	largest uint32
	known   bool
	// boardless leaves the rule of NVSwitch boards out, to tell its refusal.
	boardless bool
	// where is the place in words, when it is not the location or the bound rack.
	where string
}

func (p *Pass) ask(q Request) *ask {
	a := &ask{Request: q, pass: p, known: q.Count == 0}
	if q.Count > 0 {
		a.model = strings.ToLower(q.Model)
	}
	if q.RackID == "" {
		a.racks = p.byLocation[strings.ToLower(q.Location)]
	} else if r := p.byID[q.RackID]; r != nil {
		a.racks = []*rackState{r}
	}
	for _, r := range a.racks {
		if s := r.shelves[a.model]; s != nil && !s.barred {
			a.largest = max(a.largest, s.largest)
		}
	}
	a.known = a.known || a.largest > 0
	return a
}

// spans reports whether the replica must use several nodes. What is free has
// no say: only a count above every node's total spans.
func (a *ask) spans() bool { return a.Spans && a.largest > 0 && a.Count > a.largest }

// capable are the racks that could hold the request when empty.
func (a *ask) capable() ([]*rackState, *Refusal) {
	switch {
	case len(a.racks) == 0:
		return nil, a.unknownLocation()
	case !a.known && a.silent() != nil:
		return nil, waitsForReport(a.silent())
	case !a.known:
		return nil, a.unknownModel()
	}
	all, joined := true, 0
	for _, r := range a.racks {
		if len(a.shapes(r)) == 0 {
			all = false
		} else if r.Fabric {
			joined++
		}
	}
	if all && !a.spans() {
		return a.racks, nil
	}
	var fit []*rackState
	for _, r := range a.racks {
		if len(a.shapes(r)) > 0 && (r.Fabric || !a.spans() || joined == 0) {
			fit = append(fit, r)
		}
	}
	switch {
	case len(fit) > 0 && (!a.spans() || joined > 0):
		return fit, nil
	case a.silent() != nil:
		return nil, waitsForReport(a.silent())
	case len(fit) > 0:
		return nil, a.noFabric(fit)
	case a.spans() && !slices.ContainsFunc(a.racks, func(r *rackState) bool { return r.Fabric }):
		return nil, a.noFabric(a.racks)
	}
	return nil, a.neverFits()
}

var single = []uint32{1}

// shapes are the numbers of equal nodes of the rack that could hold the
// request when empty, fewest first.
func (a *ask) shapes(r *rackState) []uint32 {
	s := r.shelves[a.model]
	if s == nil || s.barred || (r.MaximumGPUs > 0 && a.Count > r.MaximumGPUs) {
		return nil
	}
	if !a.spans() {
		if a.holders(r, s, a.Count, 1) {
			return single
		}
		return nil
	}
	var ks []uint32
	for k := uint32(2); k <= a.Count && int(k) <= len(r.nodes); k++ {
		if a.Count%k == 0 && a.holders(r, s, a.Count/k, int(k)) {
			ks = append(ks, k)
		}
	}
	return ks
}

// holders reports whether so many nodes could give that many GPUs each when empty.
func (a *ask) holders(r *rackState, s *shelf, gpus uint32, nodes int) bool {
	for t, n := range s.kinds {
		if a.everHolds(r, s, t, gpus) {
			if nodes -= n; nodes <= 0 {
				return true
			}
		}
	}
	return false
}

// everHolds judges by totals alone: would it fit on the empty node?
func (a *ask) everHolds(r *rackState, s *shelf, t totals, gpus uint32) bool {
	return t.gpus >= gpus && t.cores >= a.cores(gpus) && t.memory >= a.memory(gpus)/gib && a.boardGives(r, s, t.gpus, gpus)
}

// boardGives is the rule of NVSwitch boards.
func (a *ask) boardGives(r *rackState, s *shelf, total, gpus uint32) bool {
	return !s.board || a.boardless || gpus <= 1 || gpus == total || slices.Contains(r.BoardCounts, gpus)
}

func (q Request) cores(gpus uint32) uint32 { return max(gpus, 1) * q.CPUCoresPerGPU }

func (q Request) memory(gpus uint32) uint64 {
	return uint64(max(gpus, 1)) * uint64(q.MemoryGiBPerGPU) * gib
}

// option is one feasible placement with what it is ranked by.
type option struct {
	rack  *rackState
	node  int
	more  []int // the other nodes of a gang
	per   uint32
	level uint32 // what stays unused
	cores uint32 // the same of CPU

	avoided  bool
	favoured bool
	// shared and sharedRack count the job's own replicas beside it.
	shared, sharedRack int
}

func (a *ask) plan(o option) Plan {
	p := Plan{RackID: o.rack.ID, Model: a.Model, Nodes: make([]PlanNode, 0, 1+len(o.more))}
	if a.Count > 0 {
		p.Model = o.rack.shelves[a.model].model
	}
	p.Nodes = append(p.Nodes, PlanNode{o.rack.nodes[o.node].Name, o.per})
	for _, i := range o.more {
		p.Nodes = append(p.Nodes, PlanNode{o.rack.nodes[i].Name, o.per})
	}
	return p
}

// choose returns the best option of the racks that take work now.
func (a *ask) choose(racks []*rackState) (best option, ok bool) {
	for _, r := range racks {
		if !r.live() || r.room() < a.Count {
			continue
		}
		for _, k := range a.shapes(r) {
			o, found := a.fill(r, int(k))
			if found && (!ok || a.compare(&o, &best) < 0) {
				best, ok = o, true
			}
			if found && !o.avoided && o.shared == 0 {
				break // more nodes are no better
			}
		}
	}
	return best, ok
}

// fill puts the request on k nodes of the rack, the best that there are.
func (a *ask) fill(r *rackState, k int) (option, bool) {
	s := r.shelves[a.model]
	per := a.Count / uint32(k)
	memory := a.memory(per)
	apart, sharedRack := a.apart(r)
	var one [1]option
	found := one[:0]
	fits := func(i int) bool {
		n := &r.nodes[i]
		return n.FreeMemoryBytes >= memory && (!s.board || a.boardGives(r, s, n.slot(s).gpu.Total, per))
	}
	add := func(e entry) *option {
		found = append(found, option{rack: r, node: e.node, per: per, level: e.level - per, cores: e.cores - a.cores(per), sharedRack: sharedRack})
		return &found[len(found)-1]
	}
	a.walk(s, per, func(e entry) bool {
		if fits(e.node) && !slices.ContainsFunc(apart, func(o option) bool { return o.node == e.node }) {
			add(e)
		}
		return len(found) < k
	})
	for _, o := range apart {
		n := &r.nodes[o.node]
		in := n.slot(s)
		if in == nil || !n.takes(in) || in.level < per || n.FreeCPUCores < a.cores(per) || !fits(o.node) {
			continue
		}
		made := add(entry{in.level, n.FreeCPUCores, o.node})
		made.avoided, made.favoured, made.shared = o.avoided, o.favoured, o.shared
	}
	if len(found) < k {
		return option{}, false
	}
	if len(apart) > 0 {
		slices.SortFunc(found, func(x, y option) int { return a.compare(&x, &y) })
	}
	whole := found[0]
	for _, o := range found[1:k] {
		whole.more = append(whole.more, o.node)
		whole.avoided = whole.avoided || o.avoided
		whole.shared += o.shared
		whole.level += o.level
		whole.cores += o.cores
	}
	return whole, true
}

// walk visits the open nodes of a shelf that have the GPUs and the cores, in the
// order in which the request wants them, until visit says false.
func (a *ask) walk(s *shelf, per uint32, visit func(entry) bool) {
	cores := a.cores(per)
	low, high := s.from(per, 0), len(s.open)
	for low < high {
		var from, to int
		if a.emptiest() {
			level := s.open[high-1].level
			from, to, high = s.from(level, cores), high, s.from(level, 0)
		} else {
			level := s.open[low].level
			from, to = s.from(level, cores), s.from(level+1, 0)
			low = to
		}
		for i := from; i < to; i++ {
			e := s.open[i]
			if a.Spread {
				e = s.open[to-1-(i-from)]
			}
			if !visit(e) {
				return
			}
		}
	}
}

// emptiest: nodes with more left over go first. Work without GPUs keeps off
// nodes with GPUs, spread or not.
func (a *ask) emptiest() bool { return a.Spread && a.Count > 0 }

// apart are the nodes of a rack that are ranked by more than what is free there;
// shared counts the job's own replicas in the rack.
func (a *ask) apart(r *rackState) (nodes []option, shared int) {
	mark := func(name string, f func(*option)) {
		i, ok := r.byName[name]
		if !ok {
			return
		}
		at := slices.IndexFunc(nodes, func(o option) bool { return o.node == i })
		if at < 0 {
			at, nodes = len(nodes), append(nodes, option{node: i})
		}
		f(&nodes[at])
	}
	here := func(name string) (node string, ok bool) {
		rack, node, ok := strings.Cut(name, "/")
		return node, ok && rack == r.ID
	}
	if a.PreferNode != "" {
		mark(a.PreferNode, func(o *option) { o.favoured = true })
	}
	for _, name := range a.AvoidNodes {
		if node, ok := here(name); ok {
			mark(node, func(o *option) { o.avoided = true })
		}
	}
	if !a.Spread {
		return nodes, 0
	}
	for _, name := range a.Beside {
		if node, ok := here(name); ok {
			shared++
			mark(node, func(o *option) { o.shared++ })
		}
	}
	return nodes, shared
}

// compare orders options: not lately refused, where it ran before, away from its
// own replicas, fewest nodes, least (or most) left over, then by name so that the
// order is total.
func (a *ask) compare(x, y *option) int {
	level, cores := cmp.Compare(x.level, y.level), cmp.Compare(x.cores, y.cores)
	node := cmp.Compare(x.node, y.node)
	if a.emptiest() {
		level = -level
	}
	if a.Spread {
		cores, node = -cores, -node
	}
	return cmp.Or(
		rank(x.avoided)-rank(y.avoided),
		rank(y.favoured)-rank(x.favoured),
		x.shared-y.shared,
		x.sharedRack-y.sharedRack,
		len(x.more)-len(y.more),
		level, cores,
		cmp.Compare(x.rack.ID, y.rack.ID),
		node,
	)
}

func rank(b bool) int {
	if b {
		return 1
	}
	return 0
}

// silent is a rack that cannot be judged: it has not reported, or its cluster
// cannot be asked.
func (a *ask) silent() *rackState {
	for _, r := range a.racks {
		if !r.Reported || r.Fault != "" {
			return r
		}
	}
	return nil
}
