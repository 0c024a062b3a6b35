package api

import (
	"context"
	"time"
)

// AvailableGPU is what one could get of one model in one location, once everybody
// who waits has been served. Nothing of it is stored.
type AvailableGPU struct {
	Model                string          `json:"model"`
	Location             string          `json:"location"`
	Total                uint32          `json:"total"`
	Held                 uint32          `json:"held"`
	Offerable            uint32          `json:"offerable" doc:"On racks and nodes that take work now"`
	LargestNodeOfferable uint32          `json:"largest_node_offerable" doc:"The most that one VM could get now, with the default CPU and memory: more needs several nodes"`
	Racks                []AvailableRack `json:"racks"`
	Waiting              uint32          `json:"waiting" doc:"Replicas that wait for this model here"`
	WaitingGPUs          uint32          `json:"waiting_gpus" doc:"The GPUs that they want"`
	LongestWaitSeconds   int64           `json:"longest_wait_seconds" doc:"How long the first of them has waited"`
	PriceCents           *uint64         `json:"price_cents_per_gpu_hour" doc:"null when nobody knows: a cost limit is refused then"`
	Currency             string          `json:"currency"`
}

// AvailableRack is one rack's part of it.
type AvailableRack struct {
	ID                   string `json:"id"`
	Offerable            uint32 `json:"offerable"`
	LargestNodeOfferable uint32 `json:"largest_node_offerable"`
	Reason               Reason `json:"reason" doc:"Why it gives nothing now; empty when it does"`
	Message              string `json:"message"`
}

type gpusInput struct {
	Location string `query:"location" maxLength:"32"`
	Model    string `query:"model" maxLength:"100"`
}

type gpusOutput struct {
	Body struct {
		GPUs []AvailableGPU `json:"gpus"`
	}
}

func (s *Server) listGPUs(ctx context.Context, in *gpusInput) (*gpusOutput, error) {
	found, err := s.Ork.Availability(ctx, in.Location, in.Model)
	if err != nil {
		return nil, err
	}
	out := &gpusOutput{}
	out.Body.GPUs = []AvailableGPU{}
	for _, g := range found {
		gpu := AvailableGPU{Model: g.GetGpuModel(), Location: g.GetLocation(), Total: g.GetTotal(), Held: g.GetHeld(), Offerable: g.GetAvailable(),
			LargestNodeOfferable: g.GetLargestVm(), Racks: []AvailableRack{}, Waiting: g.GetWaiting(), WaitingGPUs: g.GetWaitingGpus(),
			LongestWaitSeconds: int64(g.GetLongestWait().AsDuration() / time.Second)}
		if cents, currency, known := s.Catalogue.Price(g.GetGpuModel()); known {
			gpu.PriceCents, gpu.Currency = &cents, currency
		}
		for _, r := range g.GetRacks() {
			gpu.Racks = append(gpu.Racks, AvailableRack{ID: r.GetRackId(), Offerable: r.GetAvailable(), LargestNodeOfferable: r.GetLargestVm(),
				Reason: reasonName(r.GetReason()), Message: r.GetMessage()})
		}
		out.Body.GPUs = append(out.Body.GPUs, gpu)
	}
	return out, nil
}
