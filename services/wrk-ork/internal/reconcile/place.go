package reconcile

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"

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
	for _, v := range views {
		r := placement.Rack{
			ID: v.Entry.Id, Location: v.Entry.Location, AllowedModels: v.Entry.AllowedModels,
			MaximumGPUs: v.Entry.MaximumGpus, Cordoned: v.Entry.Cordoned, Connected: v.Connected,
		}
		if v.Report != nil {
			r.Reported, r.Fault = v.Report.Synced, v.Report.ClusterFault
			for _, n := range v.Report.Nodes {
				r.Nodes = append(r.Nodes, nodeOf(n))
			}
		}
		for _, p := range promises {
			if p.RackID == r.ID {
				r.Held += p.GPUs()
				deduct(&r, v.Report, p)
			}
		}
		s.Racks = append(s.Racks, r)
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

// deduct takes a promise off the nodes whose report does not count it.
func deduct(r *placement.Rack, report *workerv1.WatchRackResponse, p record.Promise) {
	if report == nil {
		return
	}
	listed := slices.ContainsFunc(report.Attempts, func(a *workerv1.AttemptStatus) bool { return a.AttemptId == p.ID })
	for _, pn := range p.Nodes {
		for i := range r.Nodes {
			n := &r.Nodes[i]
			if n.Name != pn.NodeName {
				continue
			}
			var counted uint32
			for _, g := range report.Nodes[i].Gpus {
				counted += g.Holders[p.ID]
			}
			for k := range n.GPUs {
				if g := &n.GPUs[k]; strings.EqualFold(g.Model, p.Model) {
					g.Offerable -= min(g.Offerable, pn.GpuCount-min(counted, pn.GpuCount))
				}
			}
			if !listed && counted == 0 {
				units := max(pn.GpuCount, 1)
				n.FreeCPUCores -= min(n.FreeCPUCores, units*p.Spec.CpuCoresPerGpu)
				n.FreeMemoryBytes -= min(n.FreeMemoryBytes, uint64(units)*uint64(p.Spec.MemoryGibPerGpu)<<30)
			}
		}
	}
}

// RequestOf is what an attempt asks of placement. disk reports whether a rack
// holds root disks of the job, and whether that is known.
func RequestOf(j *job.Job, r *job.Replica, a *job.Attempt, disk func(rackID string) (has, known bool)) placement.Request {
	q := placement.Request{
		Location: j.Spec.Location, Model: j.Spec.GetGpu().GetModel(), Count: j.Spec.GetGpu().GetCount(),
		CPUCoresPerGPU: j.Spec.CpuCoresPerGpu, MemoryGiBPerGPU: j.Spec.MemoryGibPerGpu,
		Spans:      j.Inference() && j.Spec.Inference.Runtime == spec.RuntimeVLLM,
		AvoidNodes: a.RefusedNodes,
	}
	if j.Inference() {
		return q // its disk holds what can be fetched again
	}
	// A container goes back to the rack that holds its disk.
	for i := len(r.Attempts) - 1; i >= 0; i-- {
		old := r.Attempts[i]
		if old == a || !old.Sent || old.RackID == "" {
			continue
		}
		if has, known := disk(old.RackID); has || !known {
			q.RackID = old.RackID
			if len(old.Nodes) == 1 {
				q.PreferNode = old.Nodes[0].NodeName
			}
			return q
		}
	}
	return q
}

// turn is a queued attempt whose turn it is.
type turn struct {
	job     *job.Job
	replica *job.Replica
	attempt *job.Attempt
}

// place plans every eligible queued attempt, oldest first, on one snapshot.
// Smaller work may pass a job that waits for a node to empty, until that job
// has waited ReserveAfter; then a node is kept for it.
func (l *Loop) place(ctx context.Context, live []*job.Job, views []rack.View) {
	now := l.o.Clock()
	var turns []turn
	for _, j := range live {
		if j.Intent != job.IntentRun {
			continue
		}
		for _, r := range j.Replicas {
			if a := r.Newest(); life.Eligible(r, a, now) {
				turns = append(turns, turn{j, r, a})
			}
		}
	}
	if len(turns) == 0 {
		return
	}
	slices.SortStableFunc(turns, func(a, b turn) int {
		return cmp.Or(a.attempt.CreatedAt.Compare(b.attempt.CreatedAt), cmp.Compare(a.attempt.ID, b.attempt.ID))
	})
	snapshot := Snapshot(views, record.PromisesOf(live))
	kept := make(map[string]bool)
	for _, t := range turns {
		q := RequestOf(t.job, t.replica, t.attempt, diskOf(views, t.job.ID))
		plan, refusal := placement.New(snapshot, q)
		if refusal == nil {
			if l.take(ctx, t, plan) {
				snapshot.Take(plan, q)
			}
			continue
		}
		l.wait(ctx, t, refusal)
		line := strings.ToLower(q.Location + "/" + q.Model)
		if refusal.Reason == orkv1.Reason_REASON_BUSY && !kept[line] && now.Sub(t.attempt.CreatedAt) > l.o.ReserveAfter {
			kept[line] = true
			snapshot.Hold(q, t.job.ID)
		}
	}
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

// take records a plan. It is false when the attempt or the rack changed in
// between, which the next pass sees.
func (l *Loop) take(ctx context.Context, t turn, p placement.Plan) bool {
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
		return false
	}
	if err != nil {
		l.failed(ctx, "place", err)
		return false
	}
	l.o.Counters.Placement("placed")
	return true
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
