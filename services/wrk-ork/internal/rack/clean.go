package rack

import (
	"strings"

	"github.com/cosmicac/cosmicac/pkg/fault"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
)

// Bounds of one report; a message is at most 4 MiB on the wire anyway.
const (
	mostNodes    = 4096
	mostAttempts = 20000
	mostModels   = 64
	mostGraph    = 128
	mostText     = 1024
)

// clean bounds a report and takes out what cannot be: text that could move a
// cursor, numbers that contradict each other. A report over the bounds is refused.
func clean(r *workerv1.WatchRackResponse) error {
	if len(r.Nodes) > mostNodes || len(r.Attempts) > mostAttempts || len(r.DiskJobIds) > mostAttempts {
		return fault.New(fault.TooLarge, "the report of rack %s lists %d nodes, %d attempts and %d disks; at most %d, %d and %d are taken",
			r.RackId, len(r.Nodes), len(r.Attempts), len(r.DiskJobIds), mostNodes, mostAttempts, mostAttempts)
	}
	if len(r.Volumes) > mostVolumes {
		return fault.New(fault.TooLarge, "the report of rack %s lists %d volumes; at most %d are taken", r.RackId, len(r.Volumes), mostVolumes)
	}
	r.Volumes = cleanVolumes(r.Volumes)
	r.ClusterFault, r.Version = text(r.ClusterFault), text(r.Version)
	for _, n := range r.Nodes {
		n.Name, n.Message = text(n.Name), text(n.Message)
		if len(n.Gpus) > mostModels {
			n.Gpus = n.Gpus[:mostModels]
		}
		for _, g := range n.Gpus {
			g.Model, g.Message = text(g.Model), text(g.Message)
			g.Total = min(g.Total, 1<<16)
			g.Healthy = min(g.Healthy, g.Total)
			g.Held = min(g.Held, 1<<16)
			g.Offerable = min(g.Offerable, g.Total-min(g.Total, g.Held))
		}
	}
	for _, a := range r.Attempts {
		a.Message = text(a.Message)
		if len(a.Nodes) > mostNodes {
			a.Nodes = nil
		}
		for _, n := range a.Nodes {
			n.NodeName, n.VmiName, n.VmiUid = text(n.NodeName), text(n.VmiName), text(n.VmiUid)
			if len(n.Graph) > mostGraph {
				n.Graph = n.Graph[:mostGraph]
			}
			n.Ports = cleanPorts(n.Ports)
			for _, g := range n.Graph {
				g.Kind, g.Name, g.State, g.Message = text(g.Kind), text(g.Name), text(g.State), text(g.Message)
			}
		}
		if _, known := orkv1.Reason_name[int32(a.Reason)]; !known {
			a.Reason = orkv1.Reason_REASON_UNSPECIFIED
		}
	}
	return nil
}

// text keeps a worker's words short and on one line.
func text(s string) string {
	if len(s) > mostText {
		s = strings.ToValidUTF8(s[:mostText], "") + "..."
	}
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || (r >= 0x80 && r < 0xa0) || (r >= 0x202a && r <= 0x202e) || (r >= 0x2066 && r <= 0x2069) {
			return ' '
		}
		return r
	}, s)
}
