package placement

import (
	"cmp"
	"slices"
	"strings"
)

// Pass is one planning pass: a snapshot, which it owns from Open on, and what
// was taken and kept of it since. Plan reads; Take, Release and Hold change.
// It is not safe for concurrent use. The same calls give the same answers.
type Pass struct {
	racks      []*rackState // by id
	byID       map[string]*rackState
	byLocation map[string][]*rackState
	// refused remembers why a request had no plan. Within a pass capacity only
	// goes, but for Release, so that what was refused is refused again.
	refused map[shape]*Refusal
}

// rackState is a rack indexed for look-ups.
type rackState struct {
	*Rack
	nodes  []nodeState // by name
	byName map[string]int
	// shelves are by model in lower case; "" holds every node, for work
	// without GPUs.
	shelves map[string]*shelf
	// kept is how much of the entry's maximum is kept for those who wait, for
	// keptFor.
	kept    uint32
	keptFor string
}

type nodeState struct {
	*Node
	slots []slot
}

// slot is a node's place on a shelf.
type slot struct {
	*shelf
	// level is what the node offers of the shelf's model.
	level uint32
	gpu   *GPU // nil on the shelf without a model
	// quarantine is why the node is left out here, nil when it is not.
	quarantine *Quarantine
}

// shelf holds the nodes of a rack for one model.
type shelf struct {
	model   string // as the rack spells it
	barred  bool   // the entry does not allow it
	board   bool
	largest uint32 // the most that any node has
	// kinds is how many nodes have the same totals.
	kinds map[totals]int
	// open are the nodes that take work now, by level, free cores and name.
	open []entry
}

// entry is a node on a shelf. Level and cores are copies to compare by.
type entry struct {
	level, cores uint32
	node         int
}

// totals are what an empty node has.
type totals struct {
	gpus, cores uint32
	memory      uint64 // whole GiB
}

// Open makes a pass over a snapshot, which nobody else may use any more.
func Open(s Snapshot) *Pass {
	p := &Pass{
		byID: make(map[string]*rackState, len(s.Racks)), byLocation: make(map[string][]*rackState),
		refused: make(map[shape]*Refusal),
	}
	for i := range s.Racks {
		r := &s.Racks[i]
		if p.byID[r.ID] != nil {
			continue
		}
		state := newRackState(r, s.Quarantined)
		p.byID[r.ID] = state
		p.racks = append(p.racks, state)
	}
	slices.SortFunc(p.racks, func(a, b *rackState) int { return cmp.Compare(a.ID, b.ID) })
	for _, r := range p.racks {
		location := strings.ToLower(r.Location)
		p.byLocation[location] = append(p.byLocation[location], r)
	}
	return p
}

func newRackState(r *Rack, quarantined []Quarantine) *rackState {
	state := &rackState{Rack: r, byName: make(map[string]int, len(r.Nodes)), shelves: make(map[string]*shelf)}
	slices.SortStableFunc(r.Nodes, func(a, b Node) int { return cmp.Compare(a.Name, b.Name) })
	for i := range r.Nodes {
		if _, twice := state.byName[r.Nodes[i].Name]; !twice {
			// A worker that offers more than there is would be offered it again
			// after each Take.
			for k := range r.Nodes[i].GPUs {
				g := &r.Nodes[i].GPUs[k]
				g.Offerable = min(g.Offerable, g.Total)
			}
			state.byName[r.Nodes[i].Name] = len(state.nodes)
			state.nodes = append(state.nodes, nodeState{Node: &r.Nodes[i]})
		}
	}
	var mine []*Quarantine
	for i := range quarantined {
		if quarantined[i].RackID == r.ID {
			mine = append(mine, &quarantined[i])
		}
	}
	for i := range state.nodes {
		n := &state.nodes[i]
		n.slots = make([]slot, 0, 1+len(n.GPUs))
		state.enter(n, "", nil, mine)
		for k := range n.GPUs {
			if g := &n.GPUs[k]; n.gpu(g.Model) == g && g.Model != "" {
				state.enter(n, g.Model, g, mine)
			}
		}
		state.put(i)
	}
	for _, s := range state.shelves {
		slices.SortFunc(s.open, entry.compare)
	}
	return state
}

// enter gives a node its slot on a model's shelf.
func (r *rackState) enter(n *nodeState, model string, g *GPU, quarantined []*Quarantine) {
	key := strings.ToLower(model)
	s := r.shelves[key]
	if s == nil {
		s = &shelf{model: model, barred: model != "" && !r.allows(model), board: Board(model), kinds: make(map[totals]int)}
		r.shelves[key] = s
	}
	in := slot{shelf: s, gpu: g}
	empty := n.totals(&in)
	s.kinds[empty]++
	s.largest = max(s.largest, empty.gpus)
	for _, q := range quarantined {
		if (q.Node == "" || q.Node == n.Name) && (q.Model == "" || (g != nil && strings.EqualFold(q.Model, model))) {
			in.quarantine = q
			break
		}
	}
	n.slots = append(n.slots, in)
}

func (a entry) compare(b entry) int {
	return cmp.Or(cmp.Compare(a.level, b.level), cmp.Compare(a.cores, b.cores), cmp.Compare(a.node, b.node))
}

// from is the first place on the shelf with at least that level and, on that
// level, at least those cores.
func (s *shelf) from(level, cores uint32) int {
	i, _ := slices.BinarySearchFunc(s.open, entry{level, cores, -1}, entry.compare)
	return i
}

// put appends a node to the shelves that it is open on; the caller sorts.
func (r *rackState) put(i int) {
	n := &r.nodes[i]
	for k := range n.slots {
		s := &n.slots[k]
		s.level = n.offerable(strings.ToLower(modelOf(s.gpu)))
		if n.takes(s) {
			s.open = append(s.open, entry{s.level, n.FreeCPUCores, i})
		}
	}
}

func modelOf(g *GPU) string {
	if g == nil {
		return ""
	}
	return g.Model
}

func (n *nodeState) takes(s *slot) bool {
	return n.Schedulable && n.KeptFor == "" && s.quarantine == nil && !s.barred
}

// change alters a node and moves it to its new place on every shelf.
func (r *rackState) change(i int, alter func(*Node)) {
	n := &r.nodes[i]
	for k := range n.slots {
		if s := &n.slots[k]; n.takes(s) {
			if at, found := slices.BinarySearchFunc(s.open, entry{s.level, n.FreeCPUCores, i}, entry.compare); found {
				s.open = slices.Delete(s.open, at, at+1)
			}
		}
	}
	alter(n.Node)
	for k := range n.slots {
		s := &n.slots[k]
		if s.gpu == nil {
			s.level = n.offerable("")
		} else {
			s.level = s.gpu.Offerable
		}
		if n.takes(s) {
			e := entry{s.level, n.FreeCPUCores, i}
			at, _ := slices.BinarySearchFunc(s.open, e, entry.compare)
			s.open = slices.Insert(s.open, at, e)
		}
	}
}

// Take deducts a plan, so that the next one sees what is left. It never goes
// below zero: what a stale report says less of is zero.
func (p *Pass) Take(plan Plan, q Request) {
	p.apply(plan, q, func(n *Node, g *GPU, gpus uint32) {
		if g != nil {
			g.Offerable -= min(g.Offerable, gpus)
		}
		n.FreeCPUCores -= min(n.FreeCPUCores, q.cores(gpus))
		n.FreeMemoryBytes -= min(n.FreeMemoryBytes, q.memory(gpus))
	}, func(held, gpus uint32) uint32 { return held + gpus })
}

// Release gives back what Take deducted, for simulations of what comes later.
func (p *Pass) Release(plan Plan, q Request) {
	p.apply(plan, q, func(n *Node, g *GPU, gpus uint32) {
		if g != nil {
			g.Offerable = min(g.Offerable+gpus, g.Total)
		}
		n.FreeCPUCores += q.cores(gpus)
		n.FreeMemoryBytes += q.memory(gpus)
	}, func(held, gpus uint32) uint32 { return held - min(held, gpus) })
	clear(p.refused)
}

func (p *Pass) apply(plan Plan, q Request, node func(*Node, *GPU, uint32), held func(held, gpus uint32) uint32) {
	r := p.byID[plan.RackID]
	if r == nil {
		return
	}
	for _, pn := range plan.Nodes {
		r.Held = held(r.Held, pn.GPUs)
		if i, ok := r.byName[pn.Node]; ok {
			r.change(i, func(n *Node) {
				var g *GPU
				if q.Count > 0 {
					g = n.gpu(plan.Model)
				}
				node(n, g, pn.GPUs)
			})
		}
	}
}

// Hold keeps capacity for a request that has waited too long: the nodes that
// could hold it by their totals and are nearest to it now, and as much of the
// rack's maximum as it needs. Later requests find them kept for waiter. Nodes
// only grow nearer while they are kept, so that repeating it in each pass ends
// in a plan once what runs there has ended. It returns the nodes' names, none
// when no rack could take it.
func (p *Pass) Hold(q Request, waiter string) []string {
	type candidate struct {
		node  int
		level uint32
	}
	a := p.ask(q)
	var best []candidate
	var on *rackState
	for _, r := range a.racks {
		if !r.live() {
			continue
		}
		for _, k := range a.shapes(r) {
			per := q.Count / k
			var found []candidate
			for i := range r.nodes {
				n := &r.nodes[i]
				s := n.slot(r.shelves[a.model])
				if s != nil && n.takes(s) && a.everHolds(r, s.shelf, n.totals(s), per) {
					found = append(found, candidate{i, s.level})
				}
			}
			if len(found) < int(k) {
				continue
			}
			slices.SortStableFunc(found, func(a, b candidate) int { return cmp.Compare(b.level, a.level) })
			found = found[:k]
			if best == nil || found[k-1].level > best[len(best)-1].level {
				best, on = found, r
			}
			break
		}
	}
	if on == nil {
		return nil
	}
	on.kept, on.keptFor = on.kept+q.Count, waiter
	var names []string
	for _, c := range best {
		on.change(c.node, func(n *Node) { n.KeptFor = waiter })
		names = append(names, on.nodes[c.node].Name)
	}
	// What was refused for another reason may now be refused for this one.
	clear(p.refused)
	return names
}

func (n *nodeState) slot(s *shelf) *slot {
	for i := range n.slots {
		if n.slots[i].shelf == s {
			return &n.slots[i]
		}
	}
	return nil
}

func (n *nodeState) totals(s *slot) totals {
	t := totals{cores: max(n.TotalCPUCores, n.FreeCPUCores), memory: max(n.TotalMemoryBytes, n.FreeMemoryBytes) / gib}
	if s.gpu != nil {
		t.gpus = s.gpu.Total
	}
	return t
}

// room is how many GPUs the entry's maximum leaves.
func (r *rackState) room() uint32 {
	if r.MaximumGPUs == 0 {
		return ^uint32(0)
	}
	held := r.Held + r.kept
	return r.MaximumGPUs - min(r.MaximumGPUs, held)
}
