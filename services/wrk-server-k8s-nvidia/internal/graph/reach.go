package graph

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"

	networkingv1 "k8s.io/api/networking/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/label"
)

// SetReach says at which multiaddresses the orchestrator and the bootstraps are
// now. The policies of what runs are rewritten when an address is new: a guest that
// may not reach a moved bootstrap would lose the mesh. It does not block.
func (e *Engine) SetReach(multiaddrs []string) {
	now := reach(multiaddrs, nil)
	slices.Sort(now)
	now = slices.Compact(now)
	e.mu.Lock()
	defer e.mu.Unlock()
	if slices.Equal(now, e.reach) {
		return
	}
	e.reach = now
	for id := range e.attempts {
		e.queue.Add(id)
	}
}

// reachOf is what an attempt's guests may reach whatever else is denied: where the
// mesh is now, and where it was when their seed was written, which they try first.
func (e *Engine) reachOf(a *attempt) []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	all := slices.Concat(a.rec.Reach, e.reach)
	slices.Sort(all)
	return slices.Compact(all)
}

// ensurePolicy makes the attempt's policy and brings its way out up to date.
func (e *Engine) ensurePolicy(ctx context.Context, a *attempt) error {
	to := e.reachOf(a)
	if a.policy && slices.Equal(to, a.reached) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	var pods []string
	for _, n := range e.o.View.Nodes() {
		pods = append(pods, n.Spec.PodCIDRs...)
	}
	rec := *a.rec
	rec.Reach = to
	policies := e.o.Client.Networking.NetworkPolicies(e.o.Client.Namespace)
	want := e.s.Policy(&rec, a.anchor, summary(pods))
	_, err := policies.Create(ctx, want, strict)
	if apierrors.IsAlreadyExists(err) {
		var found *networkingv1.NetworkPolicy
		if found, err = policies.Get(ctx, want.Name, metav1.GetOptions{}); err != nil {
			return fmt.Errorf("read NetworkPolicy %s: %w", want.Name, err)
		}
		if err := a.belongs("NetworkPolicy", found); err != nil {
			return err
		}
		if !apiequality.Semantic.DeepEqual(found.Spec.Egress, want.Spec.Egress) {
			err = e.rewritePolicy(ctx, found.UID, want)
		} else {
			err = nil
		}
	}
	if err := creation("NetworkPolicy", want.Name, err); err != nil {
		return err
	}
	a.policy, a.reached = true, to
	return nil
}

func (e *Engine) rewritePolicy(ctx context.Context, uid types.UID, want *networkingv1.NetworkPolicy) error {
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"uid": uid}, "spec": map[string]any{"egress": want.Spec.Egress}})
	if err != nil {
		return err
	}
	_, err = e.o.Client.Networking.NetworkPolicies(e.o.Client.Namespace).Patch(ctx, want.Name, types.MergePatchType, patch, metav1.PatchOptions{FieldManager: label.Manager})
	switch {
	case err == nil:
		e.o.Log.Info("rewrote a network policy: the mesh has moved", "name", want.Name)
	case apierrors.IsNotFound(err) || apierrors.IsConflict(err):
		return fmt.Errorf("rewrite NetworkPolicy %s: it changed meanwhile: %v", want.Name, err) // no refusal: the next pass looks again
	}
	return err
}
