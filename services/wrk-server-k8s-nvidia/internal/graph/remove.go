package graph

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"sort"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	cdi "kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1"

	"github.com/cosmicac/cosmicac/pkg/fault"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/claim"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/cluster"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/label"
)

// Delete writes down that an attempt shall go and returns; passes take it down.
// Deleting what is absent is no error.
func (e *Engine) Delete(ctx context.Context, id string, reason orkv1.Reason) error {
	if err := e.writable(); err != nil {
		return err
	}
	a := e.find(id)
	if a == nil {
		if !label.ID(id) {
			return nil // nothing of that name was ever made
		}
		cm, err := e.liveAnchor(ctx, id)
		switch {
		case err != nil:
			return fault.Wrap(fault.Unavailable, err, "look for attempt %s", id)
		case cm == nil:
			if e.o.Book.Holds(id) { // its anchor may still land
				e.mu.Lock()
				e.unwanted[id] = reason
				e.mu.Unlock()
			}
			return nil
		case cm.Labels[label.Rack] != e.s.Rack || cm.Labels[label.Network] != e.s.Network:
			return nil // another rack's
		}
		if a = e.adopt(cm, nil); a == nil {
			return nil
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.intent == nil || !a.intent.Delete {
		intent := &claim.Intent{Delete: true, Reason: reason, At: e.o.Now().UTC()}
		patch, err := claim.Patch(a.anchor, intent, nil, nil)
		if err == nil {
			err = e.patchAnchor(ctx, a, patch)
		}
		if err != nil {
			return fault.Wrap(fault.Unavailable, err, "record the removal of %s", id)
		}
		a.intent = intent
		e.o.Log.Info("taking down", "attempt", id, "reason", reason)
		e.publishDeleting(a, "")
	}
	e.queue.Add(id)
	return nil
}

// settle finds out what became of anchors whose writing was not answered.
func (e *Engine) settle(ctx context.Context) {
	for _, id := range e.o.Book.Open(openPeriod) {
		if e.find(id) != nil {
			continue
		}
		cm, err := e.liveAnchor(ctx, id)
		switch {
		case err != nil:
			e.o.Log.Warn("cannot tell whether an anchor was written, its claim stays", "attempt", id, "error", cluster.Words(err))
		case cm == nil:
			e.o.Log.Info("an anchor was not written, its claim ends", "attempt", id)
			e.forget(id)
		default:
			e.adopt(cm, nil)
		}
	}
}

var diskName = regexp.MustCompile(`^([a-z0-9-]{1,40})-r\d+-n\d+-root$`)

// DiskJobs lists the jobs that have a root disk here. A probe is no job.
func (e *Engine) DiskJobs() []string {
	jobs := map[string]bool{}
	for _, dv := range e.o.View.DataVolumes() {
		if dv.Labels[label.Probe] != "" {
			continue
		}
		jobs[dv.Labels[label.Job]] = true
	}
	for _, pvc := range e.o.View.Volumes() {
		// A volume whose DataVolume has gone still holds the tenant's data.
		if m := diskName.FindStringSubmatch(pvc.Name); m != nil && pvc.Labels[label.Probe] == "" && pvc.Labels[label.Rack] == e.s.Rack && pvc.Labels[label.Network] == e.s.Network {
			jobs[m[1]] = true
		}
	}
	delete(jobs, "")
	out := make([]string, 0, len(jobs))
	for j := range jobs {
		out = append(out, j)
	}
	sort.Strings(out)
	return out
}

// DeleteDisks removes the root disks of a job that has no attempt here. It
// returns once the cluster was told; DiskJobs says when they are gone.
func (e *Engine) DeleteDisks(ctx context.Context, job string) error {
	if err := e.writable(); err != nil {
		return err
	}
	if !label.ID(job) {
		return fault.New(fault.Invalid, "job id is not a DNS label of at most 40 characters")
	}
	e.mu.Lock()
	for id, a := range e.attempts {
		if a.rec.JobID == job {
			e.mu.Unlock()
			return fault.New(fault.FailedPrecondition, "job %s still has attempt %s here", job, id)
		}
	}
	e.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, 4*callTimeout)
	defer cancel()
	volumes := e.o.Client.CDI.DataVolumes(e.o.Client.Namespace)
	selector := fmt.Sprintf("%s=%s,%s=%s,%s=%s", label.Job, job, label.Network, e.s.Network, label.Rack, e.s.Rack)
	found, err := volumes.List(ctx, metav1.ListOptions{LabelSelector: selector})
	if err != nil {
		return fault.Wrap(fault.Unavailable, err, "list the disks of job %s", job)
	}
	for i := range found.Items {
		dv := &found.Items[i]
		if dv.DeletionTimestamp != nil {
			continue
		}
		if err := volumes.Delete(ctx, dv.Name, exactly(dv.UID)); err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
			return fault.Wrap(fault.Unavailable, err, "delete disk %s", dv.Name)
		}
		e.o.Log.Info("deleting a root disk", "job", job, "name", dv.Name)
	}
	return e.deleteBareVolumes(ctx, job, found.Items)
}

// deleteBareVolumes removes the volumes of root disks whose DataVolume was taken
// from over them: nothing else would ever remove them, nor the job.
func (e *Engine) deleteBareVolumes(ctx context.Context, job string, disks []cdi.DataVolume) error {
	claims := e.o.Client.Core.PersistentVolumeClaims(e.o.Client.Namespace)
	for _, pvc := range e.o.View.Volumes() {
		m := diskName.FindStringSubmatch(pvc.Name)
		if m == nil || m[1] != job || pvc.DeletionTimestamp != nil || pvc.Labels[label.Rack] != e.s.Rack || pvc.Labels[label.Network] != e.s.Network ||
			slices.ContainsFunc(disks, func(dv cdi.DataVolume) bool { return dv.Name == pvc.Name }) {
			continue
		}
		if err := claims.Delete(ctx, pvc.Name, exactly(pvc.UID)); err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
			return fault.Wrap(fault.Unavailable, err, "delete the volume of disk %s", pvc.Name)
		}
		e.o.Log.Info("deleting the volume of a root disk without a DataVolume", "job", job, "name", pvc.Name)
	}
	return nil
}

// sweep looks for machines, policies, Services and networks of ours without an anchor. They are
// reported first, and removed only after a grace and when the anchor is
// confirmed absent. Secrets cannot be listed: they follow their owner.
func (e *Engine) sweep(ctx context.Context) {
	now := e.o.Now()
	seen := map[types.UID]bool{}
	consider := func(kind, name, attempt string, uid types.UID, deleting bool, remove func(context.Context) error) {
		if attempt == "" || deleting || e.find(attempt) != nil {
			return
		}
		seen[uid] = true
		e.mu.Lock()
		first, known := e.orphans[uid]
		if !known {
			e.orphans[uid] = now
		}
		e.mu.Unlock()
		if !known {
			e.o.Log.Warn("found an object of ours without its anchor; it will be removed if that stays so",
				"kind", kind, "name", name, "attempt", attempt, "after", e.s.Deadlines.Orphan)
			return
		}
		if now.Sub(first) < e.s.Deadlines.Orphan {
			return
		}
		if cm, err := e.liveAnchor(ctx, attempt); err != nil || cm != nil {
			return
		}
		callCtx, cancel := context.WithTimeout(ctx, callTimeout)
		defer cancel()
		if err := remove(callCtx); err != nil && !apierrors.IsNotFound(err) {
			e.o.Log.Warn("cannot remove an object without anchor", "kind", kind, "name", name, "error", cluster.Words(err))
			return
		}
		e.o.Log.Warn("removed an object without anchor", "kind", kind, "name", name, "attempt", attempt)
	}
	ns := e.o.Client.Namespace
	for _, vmi := range e.o.View.VMIs() {
		consider("VirtualMachineInstance", vmi.Name, vmi.Labels[label.Attempt], vmi.UID, vmi.DeletionTimestamp != nil, func(ctx context.Context) error {
			return e.o.Client.KubeVirt.VirtualMachineInstances(ns).Delete(ctx, vmi.Name, exactly(vmi.UID))
		})
	}
	callCtx, cancel := context.WithTimeout(ctx, callTimeout)
	policies, err := e.o.Client.Networking.NetworkPolicies(ns).List(callCtx, metav1.ListOptions{
		LabelSelector: label.Rack + "=" + e.s.Rack + "," + label.Network + "=" + e.s.Network + "," + label.Attempt,
	})
	cancel()
	if err == nil {
		e.restorePolicies(policies.Items)
		for i := range policies.Items {
			p := &policies.Items[i]
			consider("NetworkPolicy", p.Name, p.Labels[label.Attempt], p.UID, p.DeletionTimestamp != nil, func(ctx context.Context) error {
				return e.o.Client.Networking.NetworkPolicies(ns).Delete(ctx, p.Name, exactly(p.UID))
			})
		}
	}
	e.sweepServices(ctx, consider)
	e.sweepNetworks(ctx, consider)
	e.mu.Lock()
	for uid := range e.orphans {
		if !seen[uid] {
			delete(e.orphans, uid)
		}
	}
	e.mu.Unlock()
}
