package graph

import (
	"context"
	"errors"
	"fmt"
	"sort"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	cdi "kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1"

	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/cluster"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/label"
)

// takeDown removes one attempt backwards: machines, their pods, then what they
// used, the anchor last. Each step waits until the cluster, asked live, has
// nothing left of the one before.
func (e *Engine) takeDown(ctx context.Context, a *attempt) (time.Duration, error) {
	now := e.o.Now()
	if a.deleting.IsZero() {
		a.deleting = now
	}
	left, err := e.removeMachines(ctx, a, now)
	if err == nil && left == "" {
		left, err = e.podsLeft(ctx, a)
	}
	switch {
	case err != nil || left != "":
	case a.rec.Probe:
		left, err = e.removeProbeDisk(ctx, a)
	default:
		err = e.removeUnfinishedDisks(ctx, a, now)
	}
	if err == nil && left == "" {
		left, err = e.removeRest(ctx, a, now)
	}
	if err == nil && left == "" {
		e.o.Log.Info("nothing is left of an attempt", "attempt", a.rec.AttemptID, "after", now.Sub(a.deleting).Round(time.Second))
		e.forget(a.rec.AttemptID)
		return 0, nil
	}
	words := left
	if err != nil {
		words = joinWords(left, cluster.Words(err))
	}
	late := now.Sub(a.deleting) > e.s.Deadlines.Deletion
	e.alarm(a.rec.AttemptID, late)
	if late {
		words = fmt.Sprintf("removal takes longer than %s: %s", e.s.Deadlines.Deletion, words)
	}
	e.publishDeleting(a, words)
	if err != nil {
		return pace, err
	}
	return min(pace/4+now.Sub(a.deleting)/20, 5*time.Second), nil
}

// machineNames are all names under which this attempt may have machines.
func (e *Engine) machineNames(a *attempt) []string {
	names := map[string]bool{}
	for k := range a.rec.Nodes {
		names[VMIName(a.rec.AttemptID, k)] = true
	}
	for name := range a.vmis {
		names[name] = true
	}
	for _, vmi := range e.o.View.VMIs() {
		if vmi.Labels[label.Attempt] == a.rec.AttemptID {
			names[vmi.Name] = true
		}
	}
	out := make([]string, 0, len(names))
	for name := range names {
		out = append(out, name)
	}
	sort.Strings(out)
	return out
}

// removeMachines asks for the deletion of each machine and says which remain.
func (e *Engine) removeMachines(ctx context.Context, a *attempt, now time.Time) (string, error) {
	machines := e.o.Client.KubeVirt.VirtualMachineInstances(e.o.Client.Namespace)
	var left []string
	for k, name := range e.machineNames(a) {
		vmi, seen := e.o.View.VMI(name)
		var err error
		if !seen {
			if vmi, err = e.liveMachine(ctx, a, name); err != nil {
				var refused *refusal
				if errors.As(err, &refused) {
					continue // somebody else's: not ours to remove
				}
				return name, err
			}
		} else if a.belongs("VirtualMachineInstance", vmi) != nil {
			continue
		}
		if vmi == nil {
			a.see(now, keyVMI(k), finding{state: stateGone, stage: "gone"})
			continue
		}
		a.vmis[name] = vmi.UID
		if vmi.DeletionTimestamp == nil {
			callCtx, cancel := context.WithTimeout(ctx, callTimeout)
			err = machines.Delete(callCtx, name, exactly(vmi.UID))
			cancel()
			if apierrors.IsNotFound(err) { // the view is behind
				if live, err := e.liveMachine(ctx, a, name); err == nil && live == nil {
					a.see(now, keyVMI(k), finding{state: stateGone, stage: "gone"})
					continue
				}
			} else if err != nil && !apierrors.IsConflict(err) {
				return name, fmt.Errorf("delete VirtualMachineInstance %s: %w", name, err)
			}
		}
		words := string(vmi.Status.Phase)
		if len(vmi.Finalizers) > 0 {
			words = joinWords(words, "finalizers "+strings.Join(vmi.Finalizers, ", "))
		}
		a.see(now, keyVMI(k), finding{state: stateDeleting, stage: "deleting", words: words, deadline: e.s.Deadlines.Deletion})
		left = append(left, "virtual machine "+name+" ("+words+")")
	}
	return strings.Join(left, ", "), nil
}

// podsLeft names pods of the attempt that exist in any phase: a GPU is free
// when its launcher pod is gone, not when the machine says Failed.
// While the view shows one the cluster is not asked.
func (e *Engine) podsLeft(ctx context.Context, a *attempt) (string, error) {
	for _, pod := range e.o.View.Pods() {
		if pod.Namespace == e.o.Client.Namespace && pod.Labels[label.Attempt] == a.rec.AttemptID {
			return "pod " + pod.Name + " on " + pod.Spec.NodeName, nil
		}
	}
	selectors := []string{label.Attempt + "=" + a.rec.AttemptID}
	if len(a.vmis) > 0 {
		uids := make([]string, 0, len(a.vmis))
		for _, uid := range a.vmis {
			uids = append(uids, string(uid))
		}
		sort.Strings(uids)
		selectors = append(selectors, label.KubeVirtCreatedBy+" in ("+strings.Join(uids, ",")+")")
	}
	for _, selector := range selectors {
		callCtx, cancel := context.WithTimeout(ctx, callTimeout)
		pods, err := e.o.Client.Core.Pods(e.o.Client.Namespace).List(callCtx, metav1.ListOptions{LabelSelector: selector, Limit: 10})
		cancel()
		if err != nil {
			return "", fmt.Errorf("list pods of %s: %w", a.rec.AttemptID, err)
		}
		var names []string
		for i := range pods.Items {
			names = append(names, pods.Items[i].Name+" on "+pods.Items[i].Spec.NodeName)
		}
		if len(names) > 0 {
			return "pod " + strings.Join(names, ", "), nil
		}
	}
	return "", nil
}

// removeUnfinishedDisks drops root disks that were never filled, so that the
// next attempt does not inherit a broken import. It does not wait for them: a
// disk is the job's and holds no GPU.
func (e *Engine) removeUnfinishedDisks(ctx context.Context, a *attempt, now time.Time) error {
	volumes := e.o.Client.CDI.DataVolumes(e.o.Client.Namespace)
	for k := range a.rec.Nodes {
		name := DiskName(a.rec.JobID, a.rec.ReplicaIndex, k)
		dv, ok := e.o.View.DataVolume(name)
		if !ok || dv.Labels[label.Job] != a.rec.JobID || !unfinished(dv) || e.shared(a, name) {
			continue
		}
		callCtx, cancel := context.WithTimeout(ctx, callTimeout)
		live, err := volumes.Get(callCtx, name, metav1.GetOptions{})
		if err == nil && live.UID == dv.UID && unfinished(live) {
			err = volumes.Delete(callCtx, name, exactly(live.UID))
		}
		cancel()
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
			return fmt.Errorf("delete DataVolume %s: %w", name, err)
		}
		a.see(now, keyDisk(k), finding{state: stateDeleting, stage: "deleting", words: "its import was not finished"})
	}
	return nil
}

// unfinished says that a disk was never filled, so that nothing is lost with
// it. A disk whose storage was lost is not one of these: it may be found again.
func unfinished(dv *cdi.DataVolume) bool {
	if dv.DeletionTimestamp != nil {
		return false
	}
	switch dv.Status.Phase {
	case cdi.PhaseUnset, cdi.Pending, cdi.PVCBound, cdi.WaitForFirstConsumer, cdi.PendingPopulation, cdi.ImportScheduled, cdi.ImportInProgress:
		return true
	case cdi.Failed:
		for _, c := range dv.Status.Conditions {
			if contains(c.Reason+" "+c.Message, storageRefused) {
				return false
			}
		}
		return true
	default:
		return false
	}
}

// shared says whether another attempt of the same job uses the disk.
func (e *Engine) shared(a *attempt, disk string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, other := range e.attempts {
		if other == a || other.rec.JobID != a.rec.JobID {
			continue
		}
		for k := range other.rec.Nodes {
			if DiskName(other.rec.JobID, other.rec.ReplicaIndex, k) == disk {
				return true
			}
		}
	}
	return false
}

// removeRest removes what the machines used and then the anchor, and says what
// remains.
func (e *Engine) removeRest(ctx context.Context, a *attempt, now time.Time) (string, error) {
	ns := e.o.Client.Namespace
	secrets := e.o.Client.Core.Secrets(ns)
	for _, machine := range e.machineNames(a) {
		name := machine + "-seed"
		left, err := e.removeOne(ctx, a, "Secret", name,
			func(ctx context.Context) (metav1.Object, error) { return secrets.Get(ctx, name, metav1.GetOptions{}) },
			func(ctx context.Context, o metav1.DeleteOptions) error { return secrets.Delete(ctx, name, o) })
		if err != nil || left != "" {
			return left, err
		}
	}
	for k := range a.rec.Nodes {
		a.see(now, keySecret(k), finding{state: stateGone, stage: "gone"})
	}
	if left, err := e.removeServices(ctx, a, now); err != nil || left != "" {
		return left, err
	}
	if left, err := e.removeNetwork(ctx, a, now); err != nil || left != "" {
		return left, err
	}
	name := a.rec.AttemptID
	policies := e.o.Client.Networking.NetworkPolicies(ns)
	left, err := e.removeOne(ctx, a, "NetworkPolicy", name,
		func(ctx context.Context) (metav1.Object, error) { return policies.Get(ctx, name, metav1.GetOptions{}) },
		func(ctx context.Context, o metav1.DeleteOptions) error { return policies.Delete(ctx, name, o) })
	if err != nil || left != "" {
		return left, err
	}
	a.see(now, keyPolicy, finding{state: stateGone, stage: "gone"})
	anchors := e.o.Client.Core.ConfigMaps(ns)
	return e.removeOne(ctx, a, "ConfigMap", name,
		func(ctx context.Context) (metav1.Object, error) {
			cm, err := anchors.Get(ctx, name, metav1.GetOptions{})
			if err == nil && cm.UID != a.anchor {
				return nil, apierrors.NewNotFound(cdi.Resource("configmaps"), name) // another of this name
			}
			return cm, err
		},
		func(ctx context.Context, o metav1.DeleteOptions) error { return anchors.Delete(ctx, name, o) })
}

// removeOne deletes one object bound to its uid and answers with its name until
// a live read finds it absent. An object that is not this attempt's is left
// alone and does not count.
func (e *Engine) removeOne(ctx context.Context, a *attempt, kind, name string,
	get func(context.Context) (metav1.Object, error), remove func(context.Context, metav1.DeleteOptions) error,
) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	for try := 0; ; try++ {
		found, err := get(ctx)
		switch {
		case apierrors.IsNotFound(err):
			return "", nil
		case err != nil:
			return name, fmt.Errorf("read %s %s: %w", kind, name, err)
		}
		if kind != "ConfigMap" && a.belongs(kind, found) != nil {
			return "", nil
		}
		if found.GetDeletionTimestamp() != nil || try > 0 {
			return kind + " " + name, nil
		}
		if err := remove(ctx, exactly(found.GetUID())); err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
			return name, fmt.Errorf("delete %s %s: %w", kind, name, err)
		}
	}
}

// exactly binds a delete to one object, not to a name.
func exactly(uid types.UID) metav1.DeleteOptions {
	background := metav1.DeletePropagationBackground
	return metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &uid}, PropagationPolicy: &background}
}
