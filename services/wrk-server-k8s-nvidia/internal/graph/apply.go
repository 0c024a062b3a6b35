package graph

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	utilnet "k8s.io/apimachinery/pkg/util/net"

	"github.com/cosmicac/cosmicac/pkg/fault"
	agentv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/capacity"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/claim"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/cluster"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/label"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/seed"
)

// maximumNodes bounds a plan.
const maximumNodes = 64

// Apply claims an attempt's GPUs and records it, or says why not. When it
// answers that they are claimed, anchor and seeds are in the cluster and the
// rest follows. An error leaves open whether they are: ask again. The same
// attempt asked again with the same spec gives the same answer.
func (e *Engine) Apply(ctx context.Context, req *workerv1.ApplyAttemptRequest) (claim.Refusal, error) {
	return e.apply(ctx, req, false)
}

func (e *Engine) apply(ctx context.Context, req *workerv1.ApplyAttemptRequest, probe bool) (claim.Refusal, error) {
	if err := e.writable(); err != nil {
		return claim.Refusal{}, err
	}
	rec, err := e.record(req)
	if err != nil {
		return claim.Refusal{}, err
	}
	rec.Probe = probe
	if a := e.find(rec.AttemptID); a != nil {
		return e.applyAgain(ctx, a, req, rec)
	}
	if rec.Image == "" {
		return claim.Refusal{
			Reason: orkv1.Reason_REASON_IMAGE_UNAVAILABLE, Message: "no image is configured on this rack for runtime " + req.GetSpec().GetInference().GetRuntime(),
		}, nil
	}
	seeds, err := e.seeds(req, rec)
	if err != nil {
		return claim.Refusal{}, err
	}
	if refused := e.volumesTaken(rec); !refused.OK() {
		return refused, nil
	}
	refused, err := e.o.Book.Grant(ctx, rec, func(ctx context.Context) error { return e.writeAnchor(ctx, rec, seeds) })
	var no *notGranted
	if errors.As(err, &no) {
		return no.refusal, nil
	}
	if err != nil {
		var f *fault.Error
		if errors.As(err, &f) {
			return claim.Refusal{}, f
		}
		return claim.Refusal{}, fault.Wrap(fault.Unavailable, err, "record the claim of %s in the cluster", rec.AttemptID)
	}
	if !refused.OK() {
		return refused, nil
	}
	e.o.Log.Info("granted", "attempt", rec.AttemptID, "job", rec.JobID, "model", rec.Model, "nodes", len(rec.Nodes))
	a := e.find(rec.AttemptID)
	if a == nil {
		return claim.Refusal{}, fault.New(fault.Unavailable, "attempt %s was removed while it was granted", rec.AttemptID)
	}
	return claim.Refusal{}, e.writeSeeds(ctx, a)
}

// applyAgain answers for an attempt that is known.
func (e *Engine) applyAgain(ctx context.Context, a *attempt, req *workerv1.ApplyAttemptRequest, rec *claim.Record) (claim.Refusal, error) {
	a.mu.Lock()
	switch {
	case a.rec.SpecHash != rec.SpecHash:
		a.mu.Unlock()
		return claim.Refusal{}, fault.New(fault.Conflict, "attempt %s is here with another plan or spec", rec.AttemptID)
	case a.intent != nil && a.intent.Delete:
		a.mu.Unlock()
		return claim.Refusal{Reason: orkv1.Reason_REASON_CLAIM_REFUSED, Message: "the attempt is being removed"}, nil
	}
	missing := false
	for k := range a.rec.Nodes {
		missing = missing || !a.secrets[k] && len(a.vmis) == 0 && (k >= len(a.seeds) || a.seeds[k] == nil)
	}
	if missing {
		seeds, err := e.seeds(req, a.rec)
		if err != nil {
			a.mu.Unlock()
			return claim.Refusal{}, err
		}
		a.seeds = seeds
	}
	a.mu.Unlock()
	return claim.Refusal{}, e.writeSeeds(ctx, a)
}

// writeSeeds makes the Secrets before the grant is answered, since a seed that
// is in memory only does not survive us. What the cluster refuses for good is
// left to the next pass, which fails the attempt with the cluster's words.
func (e *Engine) writeSeeds(ctx context.Context, a *attempt) error {
	defer e.queue.Add(a.rec.AttemptID)
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.vmis) > 0 || a.outcome != nil {
		return nil
	}
	for k := range a.rec.Nodes {
		err := e.ensureSecret(ctx, a, k)
		var refused *refusal
		if err != nil && !errors.As(err, &refused) {
			return fault.Wrap(fault.Unavailable, err, "write the seed of %s", a.rec.AttemptID)
		}
	}
	return nil
}

// writeAnchor makes the anchor and enters the attempt. The book has its claim, and
// runs one write of an attempt at a time.
func (e *Engine) writeAnchor(ctx context.Context, rec *claim.Record, seeds []map[string][]byte) error {
	if !e.o.Active() {
		return errors.Join(e.writable(), claim.ErrNotWritten)
	}
	if err := e.allocate(ctx, rec); err != nil {
		return errors.Join(err, claim.ErrNotWritten)
	}
	want, err := e.s.Anchor(rec)
	if err != nil {
		return errors.Join(err, claim.ErrNotWritten)
	}
	callCtx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	cm, err := e.o.Client.Core.ConfigMaps(e.o.Client.Namespace).Create(callCtx, want, strict)
	switch {
	case err == nil:
	case apierrors.IsAlreadyExists(err):
		if cm, err = e.liveAnchor(ctx, rec.AttemptID); err != nil {
			return err
		}
		if cm == nil || cm.Annotations[label.SpecHash] != rec.SpecHash || cm.Labels[label.Rack] != e.s.Rack || cm.Labels[label.Network] != e.s.Network {
			return errors.Join(fault.New(fault.Conflict, "ConfigMap %s exists in the cluster and is not of this attempt", rec.AttemptID), claim.ErrNotWritten)
		}
	case cluster.Refused(err):
		return errors.Join(fault.New(fault.FailedPrecondition, "the cluster refuses the anchor of %s: %s", rec.AttemptID, cluster.Words(err)), claim.ErrNotWritten)
	case apierrors.IsUnauthorized(err) || apierrors.IsTooManyRequests(err) || utilnet.IsConnectionRefused(err) || neverSent(err):
		return errors.Join(err, claim.ErrNotWritten)
	default:
		return err
	}
	e.adopt(cm, seeds)
	return nil
}

// neverSent says that a request did not leave this host.
func neverSent(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "dial"
}

// writable says why nothing may be written now.
func (e *Engine) writable() error {
	switch {
	case !e.o.Active():
		return fault.New(fault.Unavailable, "this process does not hold the rack's Lease")
	case !e.o.View.Synced() || !e.Loaded():
		return fault.New(fault.Unavailable, "the worker has not listed the cluster yet")
	default:
		return nil
	}
}

// record turns a request into what its anchor will say.
func (e *Engine) record(req *workerv1.ApplyAttemptRequest) (*claim.Record, error) {
	spec := req.GetSpec()
	var bad []fault.Detail
	for _, f := range []struct{ field, value string }{
		{"attempt_id", req.AttemptId}, {"job_id", req.JobId}, {"replica_id", req.ReplicaId},
	} {
		if !label.ID(f.value) {
			bad = append(bad, fault.Detail{Field: f.field, Rule: "must be a DNS label of at most 40 characters"})
		}
	}
	if spec == nil {
		bad = append(bad, fault.Detail{Field: "spec", Rule: "is required"})
	}
	if len(req.Nodes) == 0 || len(req.Nodes) > maximumNodes {
		bad = append(bad, fault.Detail{Field: "nodes", Rule: fmt.Sprintf("must be 1 to %d", maximumNodes)})
	}
	if req.ReplicaIndex > 9999 {
		bad = append(bad, fault.Detail{Field: "replica_index", Rule: "must be below 10000"})
	}
	for k, n := range req.Nodes {
		if n.GetNodeName() == "" || n.GetGpuCount() > 64 || n.GetSeed() == nil {
			bad = append(bad, fault.Detail{Field: fmt.Sprintf("nodes[%d]", k), Rule: "needs a node's name, a seed and at most 64 GPUs"})
		}
	}
	ports, wrong := recordPorts(spec.GetPorts())
	bad = append(bad, wrong...)
	attached, wrong := recordVolumes(req.Volumes, len(req.Nodes))
	bad = append(bad, wrong...)
	if len(bad) > 0 {
		return nil, fault.New(fault.Invalid, "the attempt cannot be recorded").With(bad...)
	}
	hash, err := claim.SpecHash(req)
	if err != nil {
		return nil, fault.Wrap(fault.Internal, err, "digest the spec")
	}
	rec := &claim.Record{
		Version: 1, AttemptID: req.AttemptId, JobID: req.JobId, ReplicaID: req.ReplicaId, ProjectID: req.ProjectId,
		ReplicaIndex: req.ReplicaIndex, AttemptNumber: req.AttemptNumber, JobName: spec.GetName(), SpecHash: hash,
		Image: e.image(spec), Ports: ports, Volumes: attached, ClaimedAt: e.o.Now().UTC(),
	}
	disk := spec.GetDiskGib()
	if disk == 0 {
		disk = e.s.DefaultDiskGiB
	}
	rec.DiskBytes = int64(disk) * capacity.GiB
	rack := e.o.Book.Rack()
	rec.Model = capacity.Model(spec.GetGpu().GetModel())
	for _, n := range req.Nodes {
		if node := rack.Nodes[n.NodeName]; node != nil {
			if g := node.Find(rec.Model); g != nil {
				rec.Model = g.Model
			}
		}
		shape := capacity.ShapeOf(n.GpuCount, spec.GetCpuCoresPerGpu(), spec.GetMemoryGibPerGpu())
		rec.Nodes = append(rec.Nodes, claim.RecordNode{Node: n.NodeName, GPUs: shape.GPUs, CPUCores: shape.CPUCores, MemoryBytes: shape.MemoryBytes})
		rec.Reach = append(rec.Reach, reach(n.Seed.GetOrkAddresses(), n.Seed.GetBootstraps())...)
	}
	e.s.join(rack, rec)
	slices.Sort(rec.Reach)
	rec.Reach = slices.Compact(rec.Reach)
	return rec, nil
}

// image is the docker:// reference of the root disk.
func (e *Engine) image(spec *orkv1.JobSpec) string {
	ref := spec.GetImage().GetReference()
	if spec.GetKind() == orkv1.JobKind_JOB_KIND_MANAGED_INFERENCE {
		if own := e.s.RuntimeImages[spec.GetInference().GetRuntime()]; own != "" {
			ref = own
		}
	}
	if ref == "" || strings.Contains(ref, "://") {
		return ref
	}
	return "docker://" + ref
}

// reach takes the plain addresses out of multiaddresses.
func reach(ork []string, bootstraps []*meshv1.BootstrapAddress) []string {
	addresses := slices.Clone(ork)
	for _, b := range bootstraps {
		addresses = append(addresses, b.GetAddresses()...)
	}
	var out []string
	for _, a := range addresses {
		parts := strings.Split(a, "/")
		if len(parts) >= 3 && (parts[1] == "ip4" || parts[1] == "ip6") && net.ParseIP(parts[2]) != nil {
			out = append(out, parts[2])
		}
	}
	return out
}

// seeds renders each machine's cloud-init.
func (e *Engine) seeds(req *workerv1.ApplyAttemptRequest, rec *claim.Record) ([]map[string][]byte, error) {
	agent := seed.AgentInstance
	if req.Spec.GetKind() == orkv1.JobKind_JOB_KIND_MANAGED_INFERENCE {
		agent = seed.AgentInference
	}
	out := make([]map[string][]byte, 0, len(req.Nodes))
	for k, n := range req.Nodes {
		s := proto.CloneOf(n.Seed)
		e.completeSeed(s, rec, k)
		data, err := seed.Render(s, agent, s.Hostname)
		if err != nil {
			return nil, fault.Wrap(fault.TooLarge, err, "seed of node %d", k)
		}
		if rec.Overlay != nil {
			data[seed.KeyNetworkData] = e.s.Overlay.Render(rec.Overlay, rec.AttemptID, k).NetworkData
		}
		out = append(out, data)
	}
	return out, nil
}

// completeSeed fills in what the rack knows better than the orchestrator.
func (e *Engine) completeSeed(s *agentv1.Seed, rec *claim.Record, k int) {
	n := rec.Nodes[k]
	s.RackId, s.NodeIndex, s.GpuCount, s.GpuModel = e.s.Rack, uint32(k), uint32(n.GPUs), rec.Model
	if s.Hostname == "" {
		s.Hostname = VMIName(rec.AttemptID, k)
	}
	if node, ok := e.o.View.Node(n.Node); ok && node.Labels[label.Simulated] == "true" {
		s.Simulated = true
	}
}
