package api

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/placement"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/rack"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/reconcile"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/spec"
)

// GetAvailability implements orkv1.RacksServer. Nothing of it is stored: it is
// what placement would say now.
func (s *Racks) GetAvailability(ctx context.Context, req *orkv1.GetAvailabilityRequest) (*orkv1.GetAvailabilityResponse, error) {
	queue, err := s.Queue(ctx)
	if err != nil {
		return nil, err
	}
	type place struct{ location, model string }
	found := make(map[place]*orkv1.GpuAvailability)
	at := func(location, model string) *orkv1.GpuAvailability {
		key := place{strings.ToLower(location), strings.ToLower(model)}
		if (req.Location != "" && !strings.EqualFold(req.Location, location)) || (req.GpuModel != "" && !strings.EqualFold(req.GpuModel, model)) {
			return nil
		}
		if found[key] == nil {
			found[key] = &orkv1.GpuAvailability{Location: location, GpuModel: model}
		}
		return found[key]
	}
	for _, v := range queue.Views {
		for _, n := range v.Report.GetNodes() {
			for _, g := range n.Gpus {
				if sum := at(v.Entry.Location, g.Model); sum != nil {
					sum.Total += g.Total
					sum.Held += g.Held
				}
			}
		}
	}
	for _, d := range queue.Decide() {
		q := d.Waiting.Request
		if d.Refusal == nil || q.Count == 0 {
			continue
		}
		if sum := at(q.Location, q.Model); sum != nil {
			sum.Waiting++
			sum.WaitingGpus += q.Count
			sum.LongestWait = durationpb.New(max(sum.LongestWait.AsDuration(), d.Waiting.Waited.Truncate(time.Second)))
		}
	}
	resp := &orkv1.GetAvailabilityResponse{Gpus: slices.Collect(maps.Values(found))}
	slices.SortFunc(resp.Gpus, func(a, b *orkv1.GpuAvailability) int {
		return cmp.Or(cmp.Compare(a.Location, b.Location), cmp.Compare(a.GpuModel, b.GpuModel))
	})
	for _, sum := range resp.Gpus {
		s.largest(queue, sum)
	}
	return resp, nil
}

// largest asks placement what each rack could still give of a model.
func (s *Racks) largest(queue *reconcile.Queue, sum *orkv1.GpuAvailability) {
	q := placement.Request{
		Location: sum.Location, Model: sum.GpuModel, Count: 1,
		CPUCoresPerGPU: spec.DefaultCPUCoresPerGPU, MemoryGiBPerGPU: spec.DefaultMemoryGiBPerGPU,
	}
	refused := make(map[string]placement.RackRefusal)
	for _, why := range queue.Pass.Explain(q) {
		refused[why.RackID] = why
	}
	for _, r := range queue.Pass.Offers(q) {
		out := &orkv1.RackAvailability{RackId: r.RackID, Available: r.Available, LargestVm: r.Largest}
		if why, ok := refused[r.RackID]; ok {
			out.Reason, out.Message = why.Reason, why.Message
		} else {
			out.Message = withheld(queue.Views, r.RackID, sum.GpuModel)
		}
		sum.Available += r.Available
		sum.LargestVm = max(sum.LargestVm, r.Largest)
		sum.Racks = append(sum.Racks, out)
	}
}

// withheld says which GPUs of a model a rack has, and neither offers nor holds; ""
// when there are none.
func withheld(views []rack.View, rackID, model string) string {
	nodes, gpus, why := 0, uint32(0), ""
	for _, v := range views {
		if v.Entry.Id != rackID {
			continue
		}
		for _, n := range v.Report.GetNodes() {
			for _, g := range n.Gpus {
				lack := g.Total - min(g.Total, g.Held+g.Offerable)
				if lack == 0 || !strings.EqualFold(g.Model, model) {
					continue
				}
				nodes++
				gpus += lack
				if why == "" {
					why = "node " + n.Name
					if words := cmp.Or(g.Message, n.Message); words != "" {
						why += ": " + words
					}
				}
			}
		}
	}
	if nodes == 0 {
		return ""
	}
	if nodes > 1 {
		why = fmt.Sprintf("%d nodes, the first is %s", nodes, why)
	}
	return fmt.Sprintf("%d more are not offered: %s", gpus, why)
}
