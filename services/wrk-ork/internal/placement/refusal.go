package placement

import (
	"fmt"
	"slices"
	"strings"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

// RackRefusal is what stands in the way on one rack.
type RackRefusal struct {
	RackID string
	Refusal
}

// Explain says of each rack of the location why it gives no plan now; racks that
// would give one are left out.
func (p *Pass) Explain(q Request) []RackRefusal {
	var out []RackRefusal
	whole := p.ask(q)
	for _, r := range whole.racks {
		a := *whole
		a.racks, a.where = []*rackState{r}, "on rack "+r.ID
		s := r.shelves[a.model]
		a.known = q.Count == 0 || (s != nil && !s.barred && s.largest > 0)
		capable, refusal := a.capable()
		if refusal == nil {
			if _, ok := a.choose(capable); ok {
				continue
			}
			refusal = a.whyNotNow(capable)
		}
		out = append(out, RackRefusal{r.ID, *refusal})
	}
	return out
}

func (a *ask) unknownLocation() *Refusal {
	if a.RackID != "" {
		return &Refusal{
			Reason: orkv1.Reason_REASON_RACK_FORGOTTEN, Final: true,
			Message: fmt.Sprintf("its %s is on rack %s, which was removed from the network; put the rack back, or delete this job and create another", a.holds(), a.RackID),
		}
	}
	var known []string
	for _, r := range a.pass.racks {
		if !slices.Contains(known, r.Location) {
			known = append(known, r.Location)
		}
	}
	slices.Sort(known)
	have := "there is no rack at all; an operator has to register one"
	if len(known) > 0 {
		have = "racks are in: " + strings.Join(known, ", ")
	}
	return &Refusal{
		Reason: orkv1.Reason_REASON_UNKNOWN_LOCATION, Final: true,
		Message: fmt.Sprintf("no rack is in location %q; %s", a.Location, have),
	}
}

func (a *ask) unknownModel() *Refusal {
	var offered, barred []string
	for _, r := range a.racks {
		for key, s := range r.shelves {
			switch {
			case key == "" || s.largest == 0:
			case s.barred:
				if key == a.model {
					barred = append(barred, r.ID)
				}
			case !slices.Contains(offered, s.model):
				offered = append(offered, s.model)
			}
		}
	}
	slices.Sort(offered)
	have := "it offers no GPU"
	if len(offered) > 0 {
		have = "it offers: " + strings.Join(offered, ", ")
	}
	text := fmt.Sprintf("no GPU of model %s is offered %s; %s", a.Model, a.place(), have)
	if len(barred) > 0 {
		text += fmt.Sprintf("; rack %s has it, and its entry does not allow it", strings.Join(barred, ", "))
	}
	return &Refusal{Reason: orkv1.Reason_REASON_UNKNOWN_MODEL, Message: text, Final: true}
}

func waitsForReport(r *rackState) *Refusal {
	text := fmt.Sprintf("waits for the first report of rack %s; nothing is judged before", r.ID)
	if r.Fault != "" {
		text = fmt.Sprintf("the cluster of rack %s cannot be asked: %s", r.ID, r.Fault)
	}
	return &Refusal{Reason: orkv1.Reason_REASON_RACK_UNREACHABLE, Message: text}
}

func (a *ask) noFabric(racks []*rackState) *Refusal {
	return &Refusal{
		Reason: orkv1.Reason_REASON_NO_FABRIC, Final: true,
		Message: fmt.Sprintf("%s is more than any node %s holds (%d), so it would span nodes, and no rack there (%s) has InfiniBand and the overlay that this needs; ask for %d or fewer",
			a.gpus(a.Count), a.place(), a.largest, rackIDs(racks), a.largest),
	}
}

// neverFits names the first limit that no node satisfies.
func (a *ask) neverFits() *Refusal {
	refuse := func(format string, args ...any) *Refusal {
		return &Refusal{Reason: orkv1.Reason_REASON_NEVER_FITS, Message: fmt.Sprintf(format, args...), Final: true}
	}
	free := *a
	free.boardless = true
	for _, r := range a.racks {
		if len(free.shapes(r)) > 0 {
			return a.fabricCount()
		}
	}
	var largest, cores uint32
	var memory uint64
	bounded := ""
	for _, r := range a.racks {
		s := r.shelves[a.model]
		if s == nil || s.barred {
			continue
		}
		largest = max(largest, s.largest)
		for t := range s.kinds {
			if t.gpus >= a.Count {
				cores, memory = max(cores, t.cores), max(memory, t.memory)
				if r.MaximumGPUs > 0 && a.Count > r.MaximumGPUs {
					bounded = r.ID
				}
			}
		}
	}
	if a.spans() {
		return refuse("%s does not divide into equal parts over the nodes of one rack %s; the largest node has %d", a.gpus(a.Count), a.place(), largest)
	}
	if a.Count > largest {
		return refuse("%s on one node: no node %s has more than %d; ask for %d or fewer, or add a larger node", a.gpus(a.Count), a.place(), largest, largest)
	}
	switch {
	case a.cores(a.Count) > cores:
		return refuse("%d CPU cores (%d a GPU) on one node: no node %s that has the GPUs has more than %d; lower cpu_cores_per_gpu",
			a.cores(a.Count), a.CPUCoresPerGPU, a.place(), cores)
	case a.memory(a.Count)/gib > memory:
		return refuse("%d GiB of memory (%d a GPU) on one node: no node %s that has the GPUs has more than %d; lower memory_gib_per_gpu",
			a.memory(a.Count)/gib, a.MemoryGiBPerGPU, a.place(), memory)
	case bounded != "":
		return refuse("%s is more than the maximum in the entry of rack %s; ask for fewer, or have an operator raise it", a.gpus(a.Count), bounded)
	}
	return refuse("no node %s has %s together with %d CPU cores and %d GiB of memory", a.place(), a.gpus(a.Count), a.cores(a.Count), a.memory(a.Count)/gib)
}

// fabricCount names the counts that boards do give.
func (a *ask) fabricCount() *Refusal {
	counts := []uint32{1}
	for _, r := range a.racks {
		s := r.shelves[a.model]
		if s == nil || s.barred {
			continue
		}
		for t := range s.kinds {
			if t.gpus > 0 {
				counts = append(counts, t.gpus)
			}
		}
		counts = append(counts, r.BoardCounts...)
	}
	slices.Sort(counts)
	return &Refusal{
		Reason: orkv1.Reason_REASON_FABRIC_COUNT, Final: true,
		Message: fmt.Sprintf("%s: its NVSwitch boards %s give one machine %s; ask for one of these, or have an operator state the partitions in the rack's entry",
			a.gpus(a.Count), a.place(), strings.Trim(strings.Join(strings.Fields(fmt.Sprint(slices.Compact(counts))), ", "), "[]")),
	}
}

// whyNotNow explains racks that could hold the request, but not now. A rack
// that takes work and is full makes it busy; else an unreachable one; else
// every one is cordoned.
func (a *ask) whyNotNow(racks []*rackState) *Refusal {
	var live, away, closed []*rackState
	for _, r := range racks {
		switch {
		case r.live():
			live = append(live, r)
		case r.Cordoned:
			closed = append(closed, r)
		default:
			away = append(away, r)
		}
	}
	if len(live) > 0 {
		return a.busy(live)
	}
	if len(away) > 0 {
		if away[0].Fault != "" || !away[0].Reported {
			return waitsForReport(away[0])
		}
		return &Refusal{
			Reason:  orkv1.Reason_REASON_RACK_UNREACHABLE,
			Message: fmt.Sprintf("the worker of rack %s cannot be reached; placed when it is back", rackIDs(away)),
		}
	}
	return &Refusal{
		Reason:  orkv1.Reason_REASON_CORDONED,
		Message: fmt.Sprintf("rack %s is cordoned; placed when an operator uncordons it", rackIDs(closed)),
	}
}

// count is what nodes that could hold the request have now.
type count struct {
	total, offerable, most uint32
	mostNode               string
	open                   bool
	// One example of each thing that stands in the way.
	cordoned, quarantined, kept, short, why, full string
}

func (a *ask) count(racks []*rackState) count {
	var c count
	for _, r := range racks {
		per := a.Count
		if ks := a.shapes(r); len(ks) > 0 {
			per /= ks[0]
		}
		s := r.shelves[a.model]
		switch {
		case r.room() >= a.Count:
		case r.kept > 0 && r.MaximumGPUs-min(r.MaximumGPUs, r.Held) >= a.Count:
			c.full = fmt.Sprintf("the rest of what the entry of rack %s allows at once is kept for %s, which has waited longest", r.ID, r.keptFor)
		default:
			c.full = fmt.Sprintf("the entry of rack %s allows %d at once and %d are held; waits for one to end", r.ID, r.MaximumGPUs, r.Held)
		}
		for i := range r.nodes {
			n := &r.nodes[i]
			in := n.slot(s)
			if in == nil {
				continue
			}
			if in.gpu != nil {
				c.total += in.gpu.Total
			}
			could := a.everHolds(r, s, n.totals(in), per)
			switch {
			case could && !n.Schedulable:
				c.cordoned = strings.TrimSuffix(n.Name+": "+n.Message, ": ")
				continue
			case could && in.quarantine != nil && (c.quarantined != "" && in.quarantine.Why == ""):
				continue
			case could && in.quarantine != nil:
				c.quarantined = strings.TrimSuffix(n.Name+": "+in.quarantine.Why, ": ")
				continue
			}
			if n.Schedulable && in.quarantine == nil {
				c.offerable += in.level
			}
			if !could {
				continue
			}
			c.open = true
			if in.gpu != nil && in.gpu.Message != "" && c.why == "" {
				c.why = n.Name + ": " + in.gpu.Message
			}
			switch {
			case n.KeptFor != "":
				c.kept = fmt.Sprintf("node %s is kept for %s, which has waited longest", n.Name, n.KeptFor)
			case in.level >= per:
				c.short = fmt.Sprintf("node %s has %d of %d CPU cores and %d of %d GiB of memory free",
					n.Name, n.FreeCPUCores, a.cores(per), n.FreeMemoryBytes/gib, a.memory(per)/gib)
			}
			if c.mostNode == "" || in.level > c.most {
				c.most, c.mostNode = in.level, n.Name
			}
		}
	}
	if c.quarantined+c.cordoned != "" && a.spans() && !slices.ContainsFunc(racks, a.roomForGang) {
		c.open = false
	}
	return c
}

// roomForGang reports whether a rack would have the nodes for a gang at once if
// nothing ran there: what is closed on purpose does not come free.
func (a *ask) roomForGang(r *rackState) bool {
	s := r.shelves[a.model]
	return slices.ContainsFunc(a.shapes(r), func(nodes uint32) bool {
		open := uint32(0)
		for i := range r.nodes {
			n := &r.nodes[i]
			if in := n.slot(s); in != nil && n.Schedulable && in.quarantine == nil && a.everHolds(r, s, n.totals(in), a.Count/nodes) {
				open++
			}
		}
		return open >= nodes
	})
}

func (a *ask) busy(racks []*rackState) *Refusal {
	refuse := func(reason orkv1.Reason, format string, args ...any) *Refusal {
		return &Refusal{Reason: reason, Message: fmt.Sprintf(format, args...)}
	}
	c := a.count(racks)
	wanted, every := a.gpus(a.Count), "every node"
	if a.spans() {
		every = "one of the equal nodes"
	}
	switch {
	case !c.open && c.quarantined != "":
		return refuse(orkv1.Reason_REASON_QUARANTINED, "%s %s that could hold it is quarantined or closed (%s); placed when an operator lifts it", every, a.place(), c.quarantined)
	case !c.open:
		return refuse(orkv1.Reason_REASON_CORDONED, "%s %s that could hold it is closed to new work (%s); placed when it opens", every, a.place(), c.cordoned)
	case c.full != "" && len(racks) == 1:
		return refuse(orkv1.Reason_REASON_BUSY, "%s wanted; %s", wanted, c.full)
	case c.kept != "" && c.short == "":
		return refuse(orkv1.Reason_REASON_BUSY, "%s wanted; %s", wanted, c.kept)
	case a.spans():
		return refuse(orkv1.Reason_REASON_BUSY, "%s wanted on equal nodes of one rack at once; %d of %d %s are free; waits for nodes to empty", wanted, c.offerable, c.total, a.place())
	case c.short != "" && c.full == "":
		return refuse(orkv1.Reason_REASON_BUSY, "GPUs are free, and CPU or memory is not: %s; waits for it, or lower the CPU and memory asked for", c.short)
	case c.full != "" && c.most >= a.Count:
		return refuse(orkv1.Reason_REASON_BUSY, "%s wanted; %s", wanted, c.full)
	case c.offerable >= a.Count:
		return refuse(orkv1.Reason_REASON_BUSY, "%s on one node wanted; %d are free %s, and the most on one node is %d (%s); waits for a node to empty",
			wanted, c.offerable, a.place(), c.most, c.mostNode)
	}
	text := fmt.Sprintf("%s wanted; %d of %d %s are free; waits for others to end", wanted, c.offerable, c.total, a.place())
	if c.why != "" {
		text += " (" + c.why + ")"
	}
	return &Refusal{Reason: orkv1.Reason_REASON_BUSY, Message: text}
}

func (q Request) gpus(n uint32) string {
	switch n {
	case 0:
		return fmt.Sprintf("%d CPU cores and %d GiB of memory", q.cores(0), q.memory(0)/gib)
	case 1:
		return "1 GPU of " + q.Model
	}
	return fmt.Sprintf("%d GPUs of %s", n, q.Model)
}

// place says where, as in "no node in us".
func (a *ask) place() string {
	switch {
	case a.where != "":
		return a.where
	case a.RackID != "":
		return "on rack " + a.RackID + " (which holds its " + a.holds() + ")"
	}
	return "in " + a.Location
}

func (a *ask) holds() string {
	if a.Holds == "" {
		return "root disk"
	}
	return a.Holds
}

func rackIDs(racks []*rackState) string {
	var ids []string
	for _, r := range racks {
		ids = append(ids, r.ID)
	}
	return strings.Join(ids, ", ")
}
