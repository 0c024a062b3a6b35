package cli

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
)

// leak is one difference between the orchestrator's records, the workers' claims
// and what the clusters hold.
type leak struct {
	Rack    string `json:"rack"`
	Kind    string `json:"kind"`
	Name    string `json:"name"`
	Job     string `json:"job"`
	Attempt string `json:"attempt"`
	GPUs    uint32 `json:"gpus"`
	What    string `json:"what"`
}

// recorded is what the orchestrator says of jobs and attempts.
type recorded struct {
	jobs     map[string]bool
	attempts map[string]*orkv1.Attempt
	volumes  map[string]*orkv1.Volume
}

func (e *environment) leaksCommand() *cobra.Command {
	var operator string
	var pause time.Duration
	c := &cobra.Command{
		Use: "leaks", Short: "Compare records, claims and cluster objects; print what differs, or nothing",
		Long: `Compares the orchestrator's records with the claims of every rack's worker and with
all objects in their clusters that carry this network's label, and prints what
differs, or nothing. It looks twice, so that what is on its way is not called a
leak, and changes nothing. A difference, or a rack that could not be looked at,
is an error.

Secrets cannot be listed with a worker's rights; each is owned by the ConfigMap of
its attempt and goes with it.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, cancel := context.WithTimeout(cmd.Context(), 5*time.Minute+pause)
			defer cancel()
			return withOperator(ctx, operator, func(node *mesh.Node, _ string) error {
				first, err := findLeaks(ctx, node)
				if err != nil {
					return err
				}
				if len(first) > 0 {
					select {
					case <-ctx.Done():
						return ctx.Err()
					case <-time.After(pause):
					}
					second, err := findLeaks(ctx, node)
					if err != nil {
						return err
					}
					first = both(first, second)
				}
				return e.printLeaks(first)
			})
		},
	}
	c.Flags().StringVar(&operator, "operator", "", "operator folder (default: COSMICAC_OPERATOR_DIR, /etc/cosmicac/operator)")
	c.Flags().DurationVar(&pause, "pause", 20*time.Second, "time between the two looks")
	return c
}

// both keeps what was found twice.
func both(first, second []leak) []leak {
	again := make(map[leak]bool, len(second))
	for _, l := range second {
		again[l] = true
	}
	return slices.DeleteFunc(first, func(l leak) bool { return !again[l] })
}

func (e *environment) printLeaks(leaks []leak) error {
	if len(leaks) == 0 && e.output == "table" {
		return nil
	}
	if err := e.print(map[string]any{"leaks": leaks}, func(t *tableWriter) {
		t.row("RACK", "KIND", "NAME", "JOB", "ATTEMPT", "GPUS", "WHAT")
		for _, l := range leaks {
			t.row(l.Rack, l.Kind, l.Name, orDash(l.Job), orDash(l.Attempt), l.GPUs, l.What)
		}
	}); err != nil || len(leaks) == 0 {
		return err
	}
	return fault.New(fault.FailedPrecondition, "%d differences between records, claims and clusters", len(leaks))
}

// findLeaks looks once. Records are read on both sides of the look at the racks:
// what either of the two readings explains is no leak.
func findLeaks(ctx context.Context, node *mesh.Node) ([]leak, error) {
	before, err := readRecords(ctx, node)
	if err != nil {
		return nil, err
	}
	racks, err := rackEntries(ctx, node)
	if err != nil {
		return nil, err
	}
	var held []*workerv1.ListHoldingsResponse
	var leaks []leak
	for _, r := range racks {
		id := r.GetEntry().GetId()
		p, _, err := onePeer(node.Network(), r.GetEntry().GetKey())
		if err == nil {
			callCtx, cancel := context.WithTimeout(ctx, 90*time.Second)
			var answer *workerv1.ListHoldingsResponse
			answer, err = workerv1.NewRackClient(node.Client(p)).ListHoldings(callCtx, &workerv1.ListHoldingsRequest{})
			cancel()
			if err == nil {
				answer.RackId = id
				held = append(held, answer)
				continue
			}
		}
		leaks = append(leaks, leak{Rack: id, Kind: "Rack", Name: id, What: fmt.Sprintf("could not be looked at: %.300v", fault.FromGRPC(err))})
	}
	after, err := readRecords(ctx, node)
	if err != nil {
		return nil, err
	}
	return append(leaks, both(compare(before, held), compare(after, held))...), nil
}

func readRecords(ctx context.Context, node *mesh.Node) (recorded, error) {
	out := recorded{map[string]bool{}, map[string]*orkv1.Attempt{}, map[string]*orkv1.Volume{}}
	p, _, err := onePeer(node.Network(), "ork")
	if err != nil {
		return out, err
	}
	volumes, err := orkv1.NewVolumesClient(node.Client(p)).ListVolumes(ctx, &orkv1.ListVolumesRequest{})
	if err = fault.FromGRPC(err); err != nil && fault.KindOf(err) != fault.Unsupported { // an older one has none
		return out, fault.Wrap(fault.KindOf(err), err, "ask the orchestrator for its volumes")
	}
	for _, v := range volumes.GetVolumes() {
		out.volumes[v.GetId()] = v
	}
	jobs, token := orkv1.NewJobsClient(node.Client(p)), ""
	for {
		page, err := jobs.ListJobs(ctx, &orkv1.ListJobsRequest{PageSize: 500, PageToken: token})
		if err = fault.FromGRPC(err); err != nil {
			return out, fault.Wrap(fault.KindOf(err), err, "ask the orchestrator for its jobs")
		}
		for _, j := range page.GetJobs() {
			out.jobs[j.GetId()] = true
			for _, r := range j.GetReplicas() {
				for _, a := range r.GetAttempts() {
					out.attempts[a.GetId()] = a
				}
			}
		}
		if token = page.GetNextPageToken(); token == "" {
			return out, nil
		}
	}
}

// compare holds what racks hold against the records. It is a pure function; its
// answer is sorted as the racks' answers are.
func compare(rec recorded, racks []*workerv1.ListHoldingsResponse) []leak {
	var out []leak
	claimed, seen, looked, volumes := map[string]bool{}, map[string]bool{}, map[string]bool{}, map[string]bool{}
	for _, r := range racks {
		looked[r.GetRackId()] = !r.GetTruncated()
		anchors := map[string]bool{}
		for _, h := range r.GetHoldings() {
			switch h.GetKind() {
			case "ConfigMap":
				anchors[h.GetAttemptId()] = true
			case "Claim":
				claimed[h.GetAttemptId()] = true
			}
			volumes[h.GetVolumeId()] = true
		}
		for _, kind := range r.GetUnread() {
			out = append(out, leak{Rack: r.GetRackId(), Kind: "Rack", Name: r.GetRackId(), What: "could not be listed: " + kind})
		}
		if r.GetTruncated() {
			out = append(out, leak{Rack: r.GetRackId(), Kind: "Rack", Name: r.GetRackId(), What: "holds more than one answer has room for"})
		}
		for _, h := range r.GetHoldings() {
			what := explain(rec, anchors, len(r.GetUnread()) == 0 && !r.GetTruncated(), h)
			key := h.GetKind() + "/" + h.GetName() + "/" + what
			if what == "" || h.GetKind() != "Claim" && seen[key] {
				continue // racks of one cluster list the same objects
			}
			seen[key] = true
			rack := h.GetRackId()
			if rack == "" {
				rack = r.GetRackId()
			}
			out = append(out, leak{rack, h.GetKind(), h.GetName(), h.GetJobId(), h.GetAttemptId(), h.GetGpuCount(), what})
		}
	}
	for _, id := range slices.Sorted(maps.Keys(rec.attempts)) {
		a := rec.attempts[id]
		if a.GetClaimedAt() != nil && !a.GetGone() && looked[a.GetRackId()] && !claimed[id] {
			out = append(out, leak{Rack: a.GetRackId(), Kind: "Record", Name: id, Attempt: id, What: "the record says that it holds GPUs, its rack's worker has no claim of it"})
		}
	}
	for _, id := range slices.Sorted(maps.Keys(rec.volumes)) {
		v := rec.volumes[id]
		if v.GetState() == orkv1.VolumeState_VOLUME_STATE_READY && looked[v.GetRackId()] && !volumes[id] {
			out = append(out, leak{Rack: v.GetRackId(), Kind: "Record", Name: id, What: fmt.Sprintf("the record says that volume %s is ready, the cluster does not hold it", v.GetName())})
		}
	}
	return out
}

// explain says what is wrong with one holding; empty when nothing is.
func explain(rec recorded, anchors map[string]bool, complete bool, h *workerv1.Holding) string {
	id := h.GetAttemptId()
	if volume := h.GetVolumeId(); volume != "" {
		// One that the records know is no leak, whatever its state: it outlives jobs.
		if rec.volumes[volume] == nil {
			return fmt.Sprintf("no record of volume %q: what is on it is nobody's", volume)
		}
		return ""
	}
	if h.GetProbe() {
		if complete && !anchors[id] && !h.GetDeleting() {
			return "a probe left it behind"
		}
		return "" // it goes with whoever waits for it
	}
	if id == "" {
		if job := h.GetJobId(); !rec.jobs[job] {
			return fmt.Sprintf("no record of job %q", job)
		}
		return ""
	}
	a := rec.attempts[id]
	switch {
	case a == nil:
		return "no record of its attempt"
	case a.GetGone():
		return "the record says that nothing of its attempt is left"
	case complete && !anchors[id] && !h.GetDeleting():
		return "its attempt has no anchor in the cluster"
	default:
		return ""
	}
}
