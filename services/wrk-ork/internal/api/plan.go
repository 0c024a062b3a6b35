package api

import (
	"context"
	"strconv"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/life"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/placement"
)

// dryRun answers what would become of a job now, behind everybody who waits, and
// records nothing. The job in the answer has no id.
func (s *Jobs) dryRun(ctx context.Context, checked *orkv1.JobSpec, owner *orkv1.Owner) (*orkv1.CreateJobResponse, error) {
	queue, err := s.Queue(ctx)
	if err != nil {
		return nil, err
	}
	// Ids that no record has, so that the replicas can be told apart.
	n := 0
	j, _ := life.New(checked, owner, s.Clock(), func(string) string { n++; return "dry-" + strconv.Itoa(n) })
	if j.Volumes, err = s.Store.ResolveVolumes(ctx, j); err != nil {
		return nil, err
	}
	if err := queue.Join(ctx, s.Store, j); err != nil {
		return nil, err
	}
	plan := &orkv1.JobPlan{}
	made := make(map[string]placement.Decision)
	for _, d := range queue.Decide() {
		made[d.Waiting.ID] = d
	}
	for _, r := range j.Replicas {
		a := r.Newest()
		d := made[a.ID]
		out := &orkv1.ReplicaPlan{Index: r.Index}
		if d.Refusal != nil {
			life.Waits(a, d.Refusal.Reason, d.Refusal.Message, d.Refusal.Final, s.Clock())
			out.Refusals = append(out.Refusals, &orkv1.PlanRefusal{Reason: d.Refusal.Reason, Message: d.Refusal.Message})
			for _, why := range queue.Pass.Explain(d.Waiting.Request) {
				out.Refusals = append(out.Refusals, &orkv1.PlanRefusal{RackId: why.RackID, Reason: why.Reason, Message: why.Message})
			}
		} else {
			a.RackID = d.Plan.RackID
			a.Message = "would be placed on rack " + d.Plan.RackID
			out.RackId, out.GpuModel = d.Plan.RackID, d.Plan.Model
			for _, node := range d.Plan.Nodes {
				out.Nodes = append(out.Nodes, &orkv1.PlannedNode{Name: node.Node, GpuCount: node.GPUs})
			}
		}
		a.ID, r.ID = "", ""
		plan.Replicas = append(plan.Replicas, out)
	}
	j.State, j.Reason, j.Message = life.Fold(j.Replicas)
	j.ID, j.EndpointID = "", ""
	return &orkv1.CreateJobResponse{Job: j.View(), Plan: plan}, nil
}
