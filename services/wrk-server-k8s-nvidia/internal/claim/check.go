package claim

import (
	"fmt"
	"strings"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/capacity"
)

// Refusal says why a plan does not hold. Its zero value says that it does.
type Refusal struct {
	Reason  orkv1.Reason
	Message string
}

// OK says that the plan holds.
func (r Refusal) OK() bool { return r.Reason == orkv1.Reason_REASON_UNSPECIFIED }

func refuse(reason orkv1.Reason, format string, a ...any) Refusal {
	return Refusal{Reason: reason, Message: fmt.Sprintf(format, a...)}
}

// Check holds a record's plan against a count. What can never be comes before
// what cannot be now, so that the reason names what would have to change. It is
// a pure function.
func Check(rack *capacity.Rack, rec *Record) Refusal {
	if rack.Entry == nil {
		return refuse(orkv1.Reason_REASON_CLAIM_REFUSED, "the worker does not know the rack's entry yet")
	}
	if len(rec.Nodes) == 0 {
		return refuse(orkv1.Reason_REASON_CLAIM_REFUSED, "the plan names no node")
	}
	type sum struct {
		node *capacity.Node
		gpus int
		ib   int // adapters
		need capacity.Need
		pods int64
	}
	sums, order, total := map[string]*sum{}, []string{}, 0
	for _, n := range rec.Nodes {
		s := sums[n.Node]
		if s == nil {
			node := rack.Nodes[n.Node]
			if node == nil || node.Missing {
				return refuse(orkv1.Reason_REASON_CLAIM_REFUSED, "node %s is not in this rack", n.Node)
			}
			s = &sum{node: node}
			sums[n.Node] = s
			order = append(order, n.Node)
		}
		need := n.Shape().Need()
		s.gpus += n.GPUs
		s.ib += n.Adapters
		s.need.MilliCPU += need.MilliCPU
		s.need.MemoryBytes += need.MemoryBytes
		s.pods++
		total += n.GPUs
	}
	for _, name := range order {
		s := sums[name]
		if s.gpus > 0 {
			g := s.node.Find(rec.Model)
			switch {
			case !capacity.Allowed(rack.Entry, rec.Model):
				return refuse(orkv1.Reason_REASON_UNKNOWN_MODEL, "the rack's entry does not offer %s", rec.Model)
			case g == nil:
				return refuse(orkv1.Reason_REASON_UNKNOWN_MODEL, "node %s has no %s", name, rec.Model)
			case g.Forbidden:
				return refuse(orkv1.Reason_REASON_CLUSTER_REFUSED, "KubeVirt does not permit %s, see permittedHostDevices", g.Resource)
			case s.gpus > g.Total:
				return refuse(orkv1.Reason_REASON_NEVER_FITS, "node %s has %d %s in all, %d are wanted", name, g.Total, rec.Model, s.gpus)
			}
		}
		if s.need.MilliCPU > s.node.Total.MilliCPU {
			return refuse(orkv1.Reason_REASON_NEVER_FITS, "node %s has %s cores in all, %s are wanted", name,
				cores(s.node.Total.MilliCPU), cores(s.need.MilliCPU))
		}
		if s.need.MemoryBytes > s.node.Total.MemoryBytes {
			return refuse(orkv1.Reason_REASON_NEVER_FITS, "node %s has %s memory in all, %s are wanted (guest and overhead)", name,
				gib(s.node.Total.MemoryBytes), gib(s.need.MemoryBytes))
		}
	}
	if refused := unjoined(rack, rec); !refused.OK() {
		return refused
	}
	if rack.Maximum > 0 && total > rack.Maximum {
		return refuse(orkv1.Reason_REASON_NEVER_FITS, "the rack's entry allows %d GPUs in all, %d are wanted", rack.Maximum, total)
	}
	if rack.Entry.Cordoned {
		return refuse(orkv1.Reason_REASON_CORDONED, "the rack is cordoned")
	}
	for _, name := range order {
		s := sums[name]
		if !s.node.Schedulable {
			return refuse(orkv1.Reason_REASON_CORDONED, "node %s takes no new work: %s", name, s.node.Message)
		}
		if s.gpus > 0 {
			if g := s.node.Find(rec.Model); s.gpus > g.Offerable {
				message := fmt.Sprintf("node %s offers %d of %d %s, %d are wanted", name, g.Offerable, g.Total, rec.Model, s.gpus)
				if g.Message != "" {
					message += ": " + g.Message
				}
				return Refusal{Reason: orkv1.Reason_REASON_BUSY, Message: message}
			}
		}
		if a := s.node.Adapters[rec.Adapter]; s.ib > 0 && (a == nil || s.ib > a.Free()) {
			return refuse(orkv1.Reason_REASON_BUSY, "node %s has %d %s free, %d are wanted", name, free(a), rec.Adapter, s.ib)
		}
		if s.need.MilliCPU > s.node.Free.MilliCPU {
			return refuse(orkv1.Reason_REASON_BUSY, "node %s has %s cores free, %s are wanted", name, cores(s.node.Free.MilliCPU), cores(s.need.MilliCPU))
		}
		if s.need.MemoryBytes > s.node.Free.MemoryBytes {
			return refuse(orkv1.Reason_REASON_BUSY, "node %s has %s memory free, %s are wanted (guest and overhead)", name,
				gib(s.node.Free.MemoryBytes), gib(s.need.MemoryBytes))
		}
		if s.pods > s.node.FreePods {
			return refuse(orkv1.Reason_REASON_BUSY, "node %s has no room for another pod", name)
		}
	}
	if rack.Maximum > 0 && rack.Granted+total > rack.Maximum {
		return refuse(orkv1.Reason_REASON_BUSY, "the rack's entry allows %d GPUs, %d are granted, %d are wanted", rack.Maximum, rack.Granted, total)
	}
	return Refusal{}
}

func cores(milli int64) string { return fmt.Sprintf("%.4g", float64(milli)/1000) }

func gib(bytes int64) string { return fmt.Sprintf("%.4g GiB", float64(bytes)/float64(capacity.GiB)) }

// unjoined says why a replica cannot span these nodes.
func unjoined(rack *capacity.Rack, rec *Record) Refusal {
	if len(rec.Nodes) < 2 || rec.Adapter != "" {
		return Refusal{}
	}
	if rack.Unjoined != "" {
		return refuse(orkv1.Reason_REASON_NO_FABRIC, "a replica over %d nodes needs InfiniBand adapters and the overlay on each: %s", len(rec.Nodes), rack.Unjoined)
	}
	// Other nodes of the rack would do.
	return refuse(orkv1.Reason_REASON_CLAIM_REFUSED, "nodes %s have not both the overlay and one of %s in common",
		strings.Join(rec.nodeNames(), ", "), strings.Join(rack.Fabrics, ", "))
}

func free(a *capacity.Adapters) int {
	if a == nil {
		return 0
	}
	return a.Free()
}
