package graph

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	cdi "kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1"

	agentv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/claim"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/label"
)

// Size of a probe's machine.
const (
	probeCores     = 1
	probeMemoryGiB = 2
)

// Probe is an attempt that nobody recorded: one small machine, to see whether it runs.
// Its root disk goes with it.
type Probe struct {
	// ID is its attempt's and its job's.
	ID, Node string
	// Model of its one GPU; empty for none.
	Model string
	// Image is the docker:// reference of its root disk.
	Image string
}

// StartProbe claims and records a probe as Apply does an attempt. It lives until end is
// called, which the caller must do in every case: from then on, and in every later life
// of the worker, it is taken down as soon as it is seen. End does not wait; Holds says
// when nothing is left.
func (e *Engine) StartProbe(ctx context.Context, p Probe) (refused claim.Refusal, end func(), err error) {
	e.mu.Lock()
	e.probes[p.ID] = true
	e.mu.Unlock()
	end = func() {
		e.mu.Lock()
		delete(e.probes, p.ID)
		e.mu.Unlock()
		e.queue.Add(p.ID)
	}
	spec := &orkv1.JobSpec{
		Kind: orkv1.JobKind_JOB_KIND_GPU_CONTAINER, CpuCoresPerGpu: probeCores, MemoryGibPerGpu: probeMemoryGiB, Image: &orkv1.Image{Reference: p.Image},
	}
	node := &workerv1.PlanNode{NodeName: p.Node, Seed: &agentv1.Seed{Version: 1, JobId: p.ID, AttemptId: p.ID}}
	if p.Model != "" {
		spec.Gpu, node.GpuCount = &orkv1.GpuRequest{Model: p.Model, Count: 1}, 1
	}
	refused, err = e.apply(ctx, &workerv1.ApplyAttemptRequest{
		AttemptId: p.ID, JobId: p.ID, ReplicaId: p.ID, AttemptNumber: 1, Spec: spec, Nodes: []*workerv1.PlanNode{node},
	}, true)
	return refused, end, err
}

// ProbeStatus is how far a probe is; nil when the rack has none of this id.
func (e *Engine) ProbeStatus(id string) *workerv1.AttemptStatus {
	if a := e.find(id); a != nil {
		return a.status.Load()
	}
	return nil
}

// Holds says whether an attempt has a claim, or anything in the cluster.
func (e *Engine) Holds(id string) bool { return e.find(id) != nil || e.o.Book.Holds(id) }

// ended says that a probe is nobody's: its caller has gone, or it is of an earlier life.
func (e *Engine) ended(a *attempt) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return a.rec.Probe && !e.probes[a.rec.AttemptID]
}

// removeProbeDisk removes a probe's root disk, filled or not, and says what remains.
func (e *Engine) removeProbeDisk(ctx context.Context, a *attempt) (string, error) {
	ns := e.o.Client.Namespace
	for k := range a.rec.Nodes {
		name := DiskName(a.rec.JobID, a.rec.ReplicaIndex, k)
		volumes := e.o.Client.CDI.DataVolumes(ns)
		left, err := e.removeOne(ctx, a, "DataVolume", name,
			func(ctx context.Context) (metav1.Object, error) { return volumes.Get(ctx, name, metav1.GetOptions{}) },
			func(ctx context.Context, o metav1.DeleteOptions) error { return volumes.Delete(ctx, name, o) })
		if err != nil || left != "" {
			return left, err
		}
		// Its volume goes with it, unless somebody parted them.
		pvc, ok := e.o.View.Volume(name)
		if !ok || pvc.Labels[label.Job] != a.rec.JobID {
			continue
		}
		if pvc.DeletionTimestamp == nil {
			callCtx, cancel := context.WithTimeout(ctx, callTimeout)
			err := e.o.Client.Core.PersistentVolumeClaims(ns).Delete(callCtx, name, exactly(pvc.UID))
			cancel()
			if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
				return name, fmt.Errorf("delete the volume of disk %s: %w", name, err)
			}
		}
		return "PersistentVolumeClaim " + name, nil
	}
	return "", nil
}

// probed makes a root disk its attempt's own: it goes with the anchor, whoever removes that.
func (a *attempt) probed(dv *cdi.DataVolume) *cdi.DataVolume {
	if a.rec.Probe {
		dv.Labels[label.Attempt], dv.OwnerReferences = a.rec.AttemptID, owner(a.rec, a.anchor)
	}
	return dv
}
