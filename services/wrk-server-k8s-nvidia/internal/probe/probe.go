// Package probe starts small machines in a rack's cluster, one after another, and says
// in rows what became of them.
//
// It claims nothing itself and knows no object of the cluster: package graph does, and
// takes down what nobody waits for any more.
package probe

import (
	"context"
	"crypto/rand"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/cosmicac/cosmicac/pkg/fault"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/capacity"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/graph"
)

// Verdicts, short.
const (
	good    = workerv1.CheckVerdict_CHECK_VERDICT_OK
	warning = workerv1.CheckVerdict_CHECK_VERDICT_WARNING
	gate    = workerv1.CheckVerdict_CHECK_VERDICT_GATE
	unknown = workerv1.CheckVerdict_CHECK_VERDICT_UNKNOWN
)

const (
	// pace is how often a probe is looked at.
	pace = 200 * time.Millisecond
	// imageMost bounds the name of an image, in bytes.
	imageMost = 512
)

// Options of a Prober. All are required.
type Options struct {
	Engine *graph.Engine
	// Rack counts what is free now.
	Rack func() *capacity.Rack
	// Image is what root disks are made of when nobody says otherwise.
	Image string
	// Namespace is named in remedies.
	Namespace string
	// Removal is how long a probe may take to go before that is said.
	Removal time.Duration
	Now     func() time.Time
	Log     hclog.Logger
}

// Prober runs probes. Safe for concurrent use.
type Prober struct {
	o    Options
	busy sync.Mutex
}

// New makes a Prober; it starts nothing.
func New(o Options) *Prober { return &Prober{o: o} }

// run is one run of probes.
type run struct {
	*Prober
	image string
	found func(*workerv1.CheckFinding) error
	tried int
	left  []string
}

// Run starts a machine without a GPU, then one with one GPU of each model, waits for
// each to run or to fail, and has it removed before the next begins. What fails is a
// row, not an error; how long a step may take is bounded by the rack's deadlines. It
// returns once nothing is left, or with ctx's end or an error of found: then what there
// is goes without being waited for. While another runs it is refused as a conflict.
func (p *Prober) Run(ctx context.Context, image string, found func(*workerv1.CheckFinding) error) error {
	if image == "" {
		image = p.o.Image
	}
	switch {
	case image == "":
		return fault.New(fault.FailedPrecondition, "no image is configured for the runtime command: name one").With(fault.Detail{Field: "image", Rule: "is required on this rack"})
	case len(image) > imageMost || strings.ContainsAny(image, " \t\r\n"):
		return fault.New(fault.Invalid, "the image of a probe has no such name").With(fault.Detail{Field: "image", Rule: fmt.Sprintf("is a reference like docker://registry/name:tag of at most %d bytes", imageMost)})
	}
	if err := p.o.Engine.Writable(); err != nil {
		return err
	}
	if !p.busy.TryLock() {
		return fault.New(fault.Conflict, "a probe of this rack is running already")
	}
	defer p.busy.Unlock()
	r := &run{Prober: p, image: image, found: found}
	p.o.Log.Info("probing the cluster", "image", image)
	return r.all(ctx)
}

func (r *run) all(ctx context.Context) error {
	rack := r.o.Rack()
	if rack.Simulated {
		if err := r.row("probe", warning, "probe a rack with real nodes", "the nodes are simulated: no image is pulled, no machine is virtual and no GPU is real; the rows say only that worker and cluster understand each other"); err != nil {
			return err
		}
	}
	disk, err := r.withoutGPU(ctx, rack)
	if err != nil {
		return err
	}
	models := map[string]bool{}
	for _, n := range rack.Nodes {
		for model := range n.GPUs {
			models[model] = true
		}
	}
	names := make([]string, 0, len(models))
	for model := range models {
		names = append(names, model)
	}
	slices.Sort(names)
	for _, model := range names {
		if err := r.withGPU(ctx, model, disk); err != nil {
			return err
		}
	}
	if len(r.left) > 0 {
		return r.row("probe removal", warning, "it goes on by itself; cosmicac doctor and the rack's worker's log say when it does not", "still being removed after %s: %s", r.o.Removal, strings.Join(r.left, "; "))
	}
	return r.row("probe removal", good, "", "nothing is left of %d probes", r.tried)
}

// withoutGPU says whether an image becomes a root disk and a machine runs on it.
func (r *run) withoutGPU(ctx context.Context, rack *capacity.Rack) (disk bool, err error) {
	var nodes []string
	for name, n := range rack.Nodes {
		if n.Schedulable && !n.Missing {
			nodes = append(nodes, name)
		}
	}
	slices.Sort(nodes)
	got, err := r.try(ctx, "", nodes)
	if err != nil {
		return false, err
	}
	const onDisk, onMachine = "probe disk", "probe machine"
	switch {
	case !got.began:
		if err := r.row(onDisk, unknown, "run it again when a node has room", "not tried: %s", got.words); err != nil {
			return false, err
		}
		return true, r.row(onMachine, unknown, "run it again when a node has room", "not tried: %s", got.words)
	case !got.disk:
		if err := r.row(onDisk, gate, r.remedy(got.reason), "%s does not become a root disk: %s", r.image, got.words); err != nil {
			return false, err
		}
		return false, r.row(onMachine, unknown, "mend the row "+onDisk+" first", "not tried: there is no disk to run on")
	}
	if err := r.row(onDisk, good, "", "%s became a root disk", r.image); err != nil {
		return false, err
	}
	if !got.ran {
		return true, r.row(onMachine, gate, r.remedy(got.reason), "a VM without a GPU does not run on node %s: %s", got.node, got.words)
	}
	return true, r.row(onMachine, good, "", "a VM without a GPU ran on node %s after %s", got.node, got.after)
}

// withGPU says whether a machine runs with one GPU of a model. A GPU that anybody holds
// is left alone: the claim is the worker's usual one.
func (r *run) withGPU(ctx context.Context, model string, disk bool) error {
	row := "probe " + model
	if !disk {
		return r.row(row, unknown, "mend the row probe disk first", "not tried: there is no disk to run on")
	}
	var nodes, why []string
	total, held := 0, 0
	rack := r.o.Rack()
	for name, n := range rack.Nodes {
		g := n.GPUs[model]
		if g == nil {
			continue
		}
		total, held = total+g.Total, held+g.Held
		if g.Offerable > 0 {
			nodes = append(nodes, name)
		} else if g.Message != "" {
			why = append(why, name+": "+g.Message)
		}
	}
	slices.Sort(nodes)
	slices.Sort(why)
	const again = "run it again when one is free"
	if len(nodes) == 0 {
		words := fmt.Sprintf("not tried: none is offered; %d in all, %d held", total, held)
		if len(why) > 0 {
			words += "; " + strings.Join(why, "; ")
		}
		return r.row(row, unknown, again, "%s", words)
	}
	got, err := r.try(ctx, model, nodes)
	switch {
	case err != nil:
		return err
	case !got.began:
		return r.row(row, unknown, again, "not tried: %s", got.words)
	case !got.ran:
		return r.row(row, gate, r.remedy(got.reason), "a VM with one GPU does not run on node %s: %s", got.node, got.words)
	}
	return r.row(row, good, "", "a VM with one GPU ran on node %s after %s", got.node, got.after)
}

// outcome is what became of one probe.
type outcome struct {
	node string
	// began: a node took it. disk: its root disk was filled. ran: its machine ran.
	began, disk, ran bool
	after            time.Duration
	reason           orkv1.Reason
	words            string
}

// try starts a probe on the first of the nodes that takes it, watches it, and has it
// removed.
func (r *run) try(ctx context.Context, model string, nodes []string) (outcome, error) {
	out := outcome{words: "no node takes new work"}
	for _, node := range nodes {
		id := "probe-" + strings.ToLower(rand.Text()[:12])
		begun := r.o.Now()
		refused, end, err := r.o.Engine.StartProbe(ctx, graph.Probe{ID: id, Node: node, Model: model, Image: r.image})
		if err != nil {
			end()
			return out, err
		}
		if !refused.OK() {
			end()
			out.words = refused.Message
			continue
		}
		r.tried++
		out = outcome{node: node, began: true}
		err = r.watch(ctx, id, &out)
		out.after = r.o.Now().Sub(begun).Round(100 * time.Millisecond)
		end()
		if err != nil {
			return out, err
		}
		return out, r.gone(ctx, id)
	}
	return out, nil
}

// watch waits until the probe's machine runs or cannot.
func (r *run) watch(ctx context.Context, id string, out *outcome) error {
	for {
		st := r.o.Engine.ProbeStatus(id)
		if st == nil {
			out.reason, out.words = orkv1.Reason_REASON_VM_REMOVED, "somebody else removed it"
			return nil
		}
		for _, n := range st.GetNodes() {
			for _, g := range n.GetGraph() {
				out.disk = out.disk || g.GetKind() == "DataVolume" && g.GetState() == "ready"
			}
		}
		switch st.GetPhase() {
		case workerv1.AttemptPhase_ATTEMPT_PHASE_UP:
			out.disk, out.ran = true, true
			return nil
		case workerv1.AttemptPhase_ATTEMPT_PHASE_FAILED, workerv1.AttemptPhase_ATTEMPT_PHASE_ENDED, workerv1.AttemptPhase_ATTEMPT_PHASE_DELETING:
			out.reason, out.words = st.GetReason(), st.GetMessage()
			return nil
		}
		if err := r.wait(ctx); err != nil {
			return err
		}
	}
}

// gone waits until the cluster holds nothing of the probe, for as long as that should take.
func (r *run) gone(ctx context.Context, id string) error {
	begun := r.o.Now()
	for r.o.Engine.Holds(id) {
		if r.o.Now().Sub(begun) > r.o.Removal {
			r.left = append(r.left, id+" "+r.o.Engine.ProbeStatus(id).GetMessage())
			return nil
		}
		if err := r.wait(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (r *run) wait(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(pace):
		return r.o.Engine.Writable()
	}
}

func (r *run) row(name string, v workerv1.CheckVerdict, remedy, format string, a ...any) error {
	return r.found(&workerv1.CheckFinding{Row: name, Verdict: v, Message: fmt.Sprintf(format, a...), Remedy: remedy})
}

// remedy says where to look for the cause of a failure.
func (r *run) remedy(reason orkv1.Reason) string {
	switch reason {
	case orkv1.Reason_REASON_IMAGE_UNAVAILABLE:
		return "see that CDI reaches the registry with registry.* of the rack's worker and that the image is there, or name another with --probe-image"
	case orkv1.Reason_REASON_CLUSTER_REFUSED:
		return "do what the cluster's words ask for, and look at the other rows"
	case orkv1.Reason_REASON_VM_FAILED:
		return "look at the node's virt-handler and device plugin, and at kubectl -n " + r.o.Namespace + " get events"
	case orkv1.Reason_REASON_DEADLINE:
		return "look at kubectl -n " + r.o.Namespace + " get events; raise deadlines of the rack's worker if the cluster is only slow"
	default:
		return "look at kubectl -n " + r.o.Namespace + " get events, then run it again"
	}
}
