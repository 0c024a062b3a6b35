package api

import (
	"context"

	"github.com/cosmicac/cosmicac/pkg/fault"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

// Plan is what would become of a job now, behind everybody who waits. Nothing is
// recorded for it, and nothing kept.
type Plan struct {
	Fits     bool          `json:"fits" doc:"Every replica has a plan"`
	State    State         `json:"state" doc:"What the job would be in: reserving, queued, or failed when no wait can help"`
	Reason   Reason        `json:"reason"`
	Message  string        `json:"message"`
	Replicas []ReplicaPlan `json:"replicas"`
}

// ReplicaPlan is where a replica would run, or every reason why it would not.
type ReplicaPlan struct {
	Index    uint32        `json:"index"`
	RackID   string        `json:"rack_id" doc:"Empty when there is no plan"`
	GPUModel string        `json:"gpu_model"`
	Nodes    []PlannedNode `json:"nodes"`
	Refusals []PlanRefusal `json:"refusals" doc:"First the one that the job would show, then what stands in the way on each rack of the location"`
}

// PlannedNode is one machine of a plan.
type PlannedNode struct {
	Name     string `json:"name"`
	GPUCount uint32 `json:"gpu_count"`
}

// PlanRefusal is one reason why there is no plan.
type PlanRefusal struct {
	RackID  string `json:"rack_id" doc:"Empty for what concerns no rack alone"`
	Reason  Reason `json:"reason"`
	Message string `json:"message"`
}

type planInput struct {
	Body JobRequest
}

type planOutput struct {
	Body Plan
}

func (s *Server) planJob(ctx context.Context, in *planInput) (*planOutput, error) {
	request, err := s.request(ctx, in.Body)
	if err != nil {
		return nil, err
	}
	request.DryRun = true
	answer, err := s.Ork.CreateJob(ctx, request)
	if err != nil {
		return nil, err
	}
	if answer.GetPlan() == nil {
		return nil, fault.New(fault.Unsupported, "this orchestrator is older than app-node and answers no plans; upgrade wrk-ork")
	}
	job := answer.GetJob()
	out := &planOutput{Body: Plan{Fits: true, State: stateName(job.GetState()), Reason: reasonName(job.GetReason()), Message: job.GetMessage(), Replicas: []ReplicaPlan{}}}
	for _, r := range answer.GetPlan().GetReplicas() {
		replica := ReplicaPlan{Index: r.GetIndex(), RackID: r.GetRackId(), GPUModel: r.GetGpuModel(), Nodes: []PlannedNode{}, Refusals: []PlanRefusal{}}
		for _, n := range r.GetNodes() {
			replica.Nodes = append(replica.Nodes, PlannedNode{Name: n.GetName(), GPUCount: n.GetGpuCount()})
		}
		for _, why := range r.GetRefusals() {
			replica.Refusals = append(replica.Refusals, PlanRefusal{RackID: why.GetRackId(), Reason: reasonName(why.GetReason()), Message: why.GetMessage()})
		}
		out.Body.Fits = out.Body.Fits && len(replica.Nodes) > 0
		out.Body.Replicas = append(out.Body.Replicas, replica)
	}
	return out, nil
}

var placements = map[string]orkv1.Placement{"pack": orkv1.Placement_PLACEMENT_PACK, "spread": orkv1.Placement_PLACEMENT_SPREAD}

func placementName(p orkv1.Placement) string {
	if p == orkv1.Placement_PLACEMENT_SPREAD {
		return "spread"
	}
	return "pack"
}

// mayQueue refuses a priority that would put others back, unless an administrator
// asks for it.
func mayQueue(ctx context.Context, priority int32) error {
	if priority > 0 && !caller(ctx).User.Administrator {
		return fault.New(fault.Denied, "a priority above 0 puts everybody else back: an administrator may give it").
			With(fault.Detail{Field: "priority", Rule: "is at most 0 for who is not an administrator"})
	}
	return nil
}
