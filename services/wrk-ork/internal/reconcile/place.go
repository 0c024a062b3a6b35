package reconcile

import (
	"context"
	"strings"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/agents"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/life"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/placement"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/rack"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/record"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/spec"
)

// Snapshot is the capacity that workers report, less what was promised to
// attempts that the reports do not show yet.
func Snapshot(views []rack.View, promises []record.Promise) placement.Snapshot {
	var s placement.Snapshot
	of := make(map[string][]record.Promise)
	for _, p := range promises {
		of[p.RackID] = append(of[p.RackID], p)
	}
	for _, v := range views {
		r := placement.Rack{
			ID: v.Entry.Id, Location: v.Entry.Location, AllowedModels: v.Entry.AllowedModels, BoardCounts: v.Entry.BoardGpuCounts,
			MaximumGPUs: v.Entry.MaximumGpus, Cordoned: v.Entry.Cordoned, Connected: v.Connected,
		}
		at := make(map[string]int)
		if v.Report != nil {
			r.Reported, r.Fault, r.Fabric = v.Report.Synced, v.Report.ClusterFault, v.Report.Fabric
			for i, n := range v.Report.Nodes {
				r.Nodes = append(r.Nodes, nodeOf(n))
				at[n.Name] = i
			}
		}
		for _, p := range of[r.ID] {
			r.Held += p.GPUs()
			for _, pn := range p.Nodes {
				if i, ok := at[pn.NodeName]; ok {
					deduct(&r.Nodes[i], v.Report.Nodes[i], v.Status(p.ID) != nil, p, pn.GpuCount)
				}
			}
		}
		s.Racks = append(s.Racks, r)
		for _, q := range v.Quarantined {
			s.Quarantined = append(s.Quarantined, placement.Quarantine{RackID: q.RackId, Node: q.NodeName, Model: q.GpuModel, Why: q.Message})
		}
	}
	return s
}

func nodeOf(n *orkv1.RackNode) placement.Node {
	out := placement.Node{
		Name: n.Name, Schedulable: n.Schedulable, Message: n.Message,
		FreeCPUCores: n.FreeCpuCores, TotalCPUCores: n.TotalCpuCores,
		FreeMemoryBytes: n.FreeMemoryBytes, TotalMemoryBytes: n.TotalMemoryBytes,
	}
	for _, g := range n.Gpus {
		out.GPUs = append(out.GPUs, placement.GPU{Model: g.Model, Total: g.Total, Offerable: g.Offerable, Message: g.Message})
	}
	return out
}

// deduct takes a promise off a node whose report does not count it.
func deduct(n *placement.Node, report *orkv1.RackNode, listed bool, p record.Promise, gpus uint32) {
	var counted uint32
	for _, g := range report.Gpus {
		counted += g.Holders[p.ID]
	}
	for k := range n.GPUs {
		if g := &n.GPUs[k]; strings.EqualFold(g.Model, p.Model) {
			g.Offerable -= min(g.Offerable, gpus-min(counted, gpus))
		}
	}
	if !listed && counted == 0 {
		units := max(gpus, 1)
		n.FreeCPUCores -= min(n.FreeCPUCores, units*p.Spec.CpuCoresPerGpu)
		n.FreeMemoryBytes -= min(n.FreeMemoryBytes, uint64(units)*uint64(p.Spec.MemoryGibPerGpu)<<30)
	}
}

// RequestOf is what an attempt asks of placement. disk reports whether a rack
// holds root disks of the job, and whether that is known.
func RequestOf(j *job.Job, r *job.Replica, a *job.Attempt, disk func(rackID string) (has, known bool)) placement.Request {
	q := placement.Request{
		Location: j.Spec.Location, Model: j.Spec.GetGpu().GetModel(), Count: j.Spec.GetGpu().GetCount(),
		CPUCoresPerGPU: j.Spec.CpuCoresPerGpu, MemoryGiBPerGPU: j.Spec.MemoryGibPerGpu,
		Spans:      j.Inference() && j.Spec.Inference.Runtime == spec.RuntimeVLLM,
		Spread:     j.Spec.Placement == orkv1.Placement_PLACEMENT_SPREAD,
		AvoidNodes: a.RefusedNodes,
	}
	if q.Spread {
		q.Beside = besides(j, r)
	}
	if j.Inference() {
		return q // its disk holds what can be fetched again
	}
	if len(j.Volumes) > 0 {
		q.RackID, q.Holds = j.Volumes[0].RackID, "volume "+j.Volumes[0].Name
	}
	// A container goes back to the rack that holds its disk.
	for i := len(r.Attempts) - 1; i >= 0; i-- {
		old := r.Attempts[i]
		if old == a || !old.Sent || old.RackID == "" || len(j.Volumes) > 0 && old.RackID != q.RackID {
			continue
		}
		if has, known := disk(old.RackID); has || !known {
			q.RackID = old.RackID
			if len(old.Nodes) == 1 && !old.StartFailed {
				q.PreferNode = old.Nodes[0].NodeName
			}
			return q
		}
	}
	return q
}

// besides are the nodes of a job's other replicas.
func besides(j *job.Job, r *job.Replica) []string {
	var nodes []string
	for _, other := range j.Replicas {
		if a := other.Newest(); other != r && a.RackID != "" && !a.Gone {
			for _, n := range a.Nodes {
				nodes = append(nodes, a.RackID+"/"+n.NodeName)
			}
		}
	}
	return nodes
}

// place plans every eligible queued attempt on one snapshot, as the queue's
// policy says, and records what was decided.
func (l *Loop) place(ctx context.Context, live []*job.Job, views []rack.View) {
	if !anyWaits(live, l.o.Clock()) {
		return // as in most passes: no snapshot of every node is taken for nobody
	}
	quotas, err := l.o.Store.Quotas(ctx)
	if err != nil {
		l.failed(ctx, "read quotas", err)
		return // nobody is told a reason that is not theirs
	}
	q := l.queue(live, views, quotas)
	if err := q.holdBack(ctx, l.o.Store); err != nil {
		l.failed(ctx, "read volumes", err)
		return
	}
	if len(q.turns) == 0 {
		return
	}
	for _, d := range q.Decide() {
		t := q.turns[d.Waiting.ID]
		if d.Refusal != nil {
			l.wait(ctx, t, d.Refusal)
		} else {
			l.take(ctx, t, d.Plan)
		}
	}
}

// anyWaits reports whether any attempt may be placed.
func anyWaits(live []*job.Job, now time.Time) bool {
	for _, j := range live {
		if j.Intent != job.IntentRun {
			continue
		}
		for _, r := range j.Replicas {
			if life.Eligible(r, r.Newest(), now) {
				return true
			}
		}
	}
	return false
}

func diskOf(views []rack.View, jobID string) func(string) (has, known bool) {
	return func(rackID string) (has, known bool) {
		for _, v := range views {
			if v.Entry.Id == rackID {
				return v.Disk(jobID), v.Report != nil && v.Report.Synced
			}
		}
		return false, false
	}
}

// take records a plan. When the attempt, the rack or the quota changed in between
// it does not, and the next pass sees why.
func (l *Loop) take(ctx context.Context, t turn, p placement.Plan) {
	next := t.attempt.Plan + 1
	var nodes []*orkv1.AttemptNode
	for _, n := range p.Nodes {
		nodes = append(nodes, &orkv1.AttemptNode{NodeName: n.Node, GpuCount: n.GPUs})
	}
	changed := fault.New(fault.Conflict, "the attempt changed in between")
	_, err := l.o.Store.Place(ctx, t.job.ID, p.RackID, l.tokens(t.job.ID, t.attempt, next, len(nodes), agents.Hash),
		func(j *job.Job) (*job.Job, []job.Event, error) {
			was := j.Clone()
			r, a := j.Attempt(t.attempt.ID)
			if a == nil || j.Intent != job.IntentRun || a.Plan+1 != next || !life.Eligible(r, a, l.o.Clock()) {
				return nil, nil, changed
			}
			life.Placed(a, p.RackID, p.Model, nodes)
			return j, life.Settle(j, was, l.sight(j, l.o.Racks.Views())), nil
		})
	if fault.KindOf(err) == fault.Conflict {
		l.Poke(t.job.ID)
		return
	}
	if err != nil {
		l.failed(ctx, "place", err)
		return
	}
	l.o.Counters.Placement("placed")
}

// messageRest is how long a reason's words stand before they are refreshed.
const messageRest = 5 * time.Second

// wait records why there is no plan, if that is news.
func (l *Loop) wait(ctx context.Context, t turn, refusal *placement.Refusal) {
	trial := t.attempt.Clone()
	life.Waits(trial, refusal.Reason, refusal.Message, refusal.Final, time.Time{})
	if trial.State == t.attempt.State && trial.Reason == t.attempt.Reason && trial.Message == t.attempt.Message && trial.Judged == t.attempt.Judged {
		return
	}
	// Numbers in the message move with every GPU that comes and goes; a long
	// queue must not be rewritten each time.
	if trial.State == t.attempt.State && trial.Reason == t.attempt.Reason && trial.Judged == t.attempt.Judged &&
		l.o.Clock().Sub(t.job.UpdatedAt) < messageRest {
		return
	}
	ended := false
	_, err := l.o.Store.Update(ctx, t.job.ID, func(j *job.Job) (*job.Job, []job.Event, error) {
		was := j.Clone()
		_, a := j.Attempt(t.attempt.ID)
		if a == nil || j.Intent != job.IntentRun || a.State != orkv1.State_STATE_QUEUED {
			return j, nil, nil
		}
		life.Waits(a, refusal.Reason, refusal.Message, refusal.Final, l.o.Clock())
		ended = job.Ended(a.State)
		return j, life.Settle(j, was, l.sight(j, l.o.Racks.Views())), nil
	})
	if err != nil {
		l.failed(ctx, "place", err)
		return
	}
	l.o.Counters.Placement(job.ReasonName(refusal.Reason))
	if ended {
		l.o.Counters.Outcome("failed", job.ReasonName(refusal.Reason))
	}
}
