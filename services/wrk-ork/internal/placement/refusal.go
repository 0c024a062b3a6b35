package placement

import (
	"fmt"
	"slices"
	"strings"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

func unknownLocation(s Snapshot, q Request) *Refusal {
	if q.RackID != "" {
		return &Refusal{
			Reason: orkv1.Reason_REASON_RACK_FORGOTTEN, Final: true,
			Message: fmt.Sprintf("its root disk is on rack %s, which was removed from the network; put the rack back, or delete this job and create another", q.RackID),
		}
	}
	var known []string
	for i := range s.Racks {
		if !slices.Contains(known, s.Racks[i].Location) {
			known = append(known, s.Racks[i].Location)
		}
	}
	slices.Sort(known)
	have := "there is no rack at all; an operator has to register one"
	if len(known) > 0 {
		have = "racks are in: " + strings.Join(known, ", ")
	}
	return &Refusal{
		Reason: orkv1.Reason_REASON_UNKNOWN_LOCATION, Final: true,
		Message: fmt.Sprintf("no rack is in location %q; %s", q.Location, have),
	}
}

func unknownModel(racks []Rack, q Request) *Refusal {
	var offered, barred []string
	for i := range racks {
		r := &racks[i]
		for k := range r.Nodes {
			for _, g := range r.Nodes[k].GPUs {
				if g.Total == 0 {
					continue
				}
				if !r.allows(g.Model) {
					if strings.EqualFold(g.Model, q.Model) && !slices.Contains(barred, r.ID) {
						barred = append(barred, r.ID)
					}
					continue
				}
				if !slices.Contains(offered, g.Model) {
					offered = append(offered, g.Model)
				}
			}
		}
	}
	slices.Sort(offered)
	have := "it offers no GPU"
	if len(offered) > 0 {
		have = "it offers: " + strings.Join(offered, ", ")
	}
	text := fmt.Sprintf("no rack in %s offers GPU model %s; %s", q.place(), q.Model, have)
	if len(barred) > 0 {
		text += fmt.Sprintf("; rack %s has it, and its entry does not allow it", strings.Join(barred, ", "))
	}
	return &Refusal{Reason: orkv1.Reason_REASON_UNKNOWN_MODEL, Message: text, Final: true}
}

func waitsForReport(r *Rack) *Refusal {
	text := fmt.Sprintf("waits for the first report of rack %s; nothing is judged before", r.ID)
	if r.Fault != "" {
		text = fmt.Sprintf("the cluster of rack %s cannot be asked: %s", r.ID, r.Fault)
	}
	return &Refusal{Reason: orkv1.Reason_REASON_RACK_UNREACHABLE, Message: text}
}

func noFabric(racks []Rack, q Request, largest uint32) *Refusal {
	return &Refusal{
		Reason: orkv1.Reason_REASON_NO_FABRIC, Final: true,
		Message: fmt.Sprintf("%s is more than any node in %s holds (%d), so it would span nodes, and no rack there (%s) has InfiniBand and the overlay that this needs; ask for %d or fewer",
			q.gpus(q.Count), q.place(), largest, rackIDs(racks), largest),
	}
}

// neverFits names the first limit that no node satisfies.
func neverFits(racks []Rack, q Request, largest uint32) *Refusal {
	refuse := func(format string, a ...any) *Refusal {
		return &Refusal{Reason: orkv1.Reason_REASON_NEVER_FITS, Message: fmt.Sprintf(format, a...), Final: true}
	}
	if q.spans(largest) {
		return refuse("%s does not divide into equal parts over the nodes of one rack in %s; the largest node has %d",
			q.gpus(q.Count), q.place(), largest)
	}
	if q.Count > largest {
		return refuse("%s on one node: no node in %s has more than %d; ask for %d or fewer, or add a larger node",
			q.gpus(q.Count), q.place(), largest, largest)
	}
	var cores uint32
	var memory uint64
	bounded := ""
	for i := range racks {
		r := &racks[i]
		if !r.allows(q.Model) {
			continue
		}
		for k := range r.Nodes {
			n := &r.Nodes[k]
			if n.total(q.Model) < q.Count {
				continue
			}
			cores = max(cores, n.TotalCPUCores, n.FreeCPUCores)
			memory = max(memory, n.TotalMemoryBytes, n.FreeMemoryBytes)
			if r.MaximumGPUs > 0 && q.Count > r.MaximumGPUs {
				bounded = r.ID
			}
		}
	}
	switch {
	case q.cores(q.Count) > cores:
		return refuse("%d CPU cores (%d a GPU) on one node: no node in %s that has the GPUs has more than %d; lower cpu_cores_per_gpu",
			q.cores(q.Count), q.CPUCoresPerGPU, q.place(), cores)
	case q.memory(q.Count) > memory:
		return refuse("%d GiB of memory (%d a GPU) on one node: no node in %s that has the GPUs has more than %d; lower memory_gib_per_gpu",
			q.memory(q.Count)/gib, q.MemoryGiBPerGPU, q.place(), memory/gib)
	case bounded != "":
		return refuse("%s is more than the maximum in the entry of rack %s; ask for fewer, or have an operator raise it",
			q.gpus(q.Count), bounded)
	}
	return refuse("no node in %s has %s together with %d CPU cores and %d GiB of memory",
		q.place(), q.gpus(q.Count), q.cores(q.Count), q.memory(q.Count)/gib)
}

// whyNotNow explains racks that could hold the request, but not now. A rack
// that takes work and is full makes it busy; else an unreachable one; else
// every one is cordoned.
func whyNotNow(racks []Rack, q Request) *Refusal {
	var live, away, closed []Rack
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
		return busy(live, q)
	}
	if len(away) > 0 {
		if away[0].Fault != "" || !away[0].Reported {
			return waitsForReport(&away[0])
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

func busy(racks []Rack, q Request) *Refusal {
	refuse := func(reason orkv1.Reason, format string, a ...any) *Refusal {
		return &Refusal{Reason: reason, Message: fmt.Sprintf(format, a...)}
	}
	var total, offerable, most uint32
	var mostNode, cordoned, kept, short, why string
	open, full := false, ""
	for i := range racks {
		r := &racks[i]
		if r.room() < q.Count {
			full = r.ID
		}
		for k := range r.Nodes {
			n := &r.Nodes[k]
			if !q.spans(largestTotal(racks, q)) && !n.everHolds(q, q.Count) {
				offerable += n.offerable(q.Model)
				total += n.total(q.Model)
				continue
			}
			total += n.total(q.Model)
			if !n.Schedulable {
				cordoned = strings.TrimSuffix(n.Name+": "+n.Message, ": ")
				continue
			}
			open = true
			free := n.offerable(q.Model)
			offerable += free
			if g := n.gpu(q.Model); g != nil && g.Message != "" && why == "" {
				why = n.Name + ": " + g.Message
			}
			switch {
			case n.KeptFor != "":
				kept = fmt.Sprintf("node %s is kept for %s, which has waited longest", n.Name, n.KeptFor)
			case free >= q.Count:
				short = fmt.Sprintf("node %s has %d of %d CPU cores and %d of %d GiB of memory free",
					n.Name, n.FreeCPUCores, q.cores(q.Count), n.FreeMemoryBytes/gib, q.memory(q.Count)/gib)
			}
			if mostNode == "" || free > most {
				most, mostNode = free, n.Name
			}
		}
	}
	switch {
	case !open:
		return refuse(orkv1.Reason_REASON_CORDONED, "every node in %s that could hold it is closed to new work (%s); placed when it opens",
			q.place(), cordoned)
	case full != "" && len(racks) == 1:
		return refuse(orkv1.Reason_REASON_BUSY, "%s wanted; the entry of rack %s allows %d at once and %d are held; waits for one to end",
			q.gpus(q.Count), full, racks[0].MaximumGPUs, racks[0].Held)
	case kept != "" && short == "":
		return refuse(orkv1.Reason_REASON_BUSY, "%s wanted; %s", q.gpus(q.Count), kept)
	case short != "":
		return refuse(orkv1.Reason_REASON_BUSY, "GPUs are free, and CPU or memory is not: %s; waits for it, or lower the CPU and memory asked for", short)
	case offerable >= q.Count:
		return refuse(orkv1.Reason_REASON_BUSY, "%s on one node wanted; %d are free in %s, and the most on one node is %d (%s); waits for a node to empty",
			q.gpus(q.Count), offerable, q.place(), most, mostNode)
	}
	text := fmt.Sprintf("%s wanted; %d of %d in %s are free; waits for others to end", q.gpus(q.Count), offerable, total, q.place())
	if why != "" {
		text += " (" + why + ")"
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

func (q Request) place() string {
	if q.RackID != "" {
		return "rack " + q.RackID + " (which holds its root disk)"
	}
	return q.Location
}

func rackIDs(racks []Rack) string {
	var ids []string
	for i := range racks {
		ids = append(ids, racks[i].ID)
	}
	return strings.Join(ids, ", ")
}
