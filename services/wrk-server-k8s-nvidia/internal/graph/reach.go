package graph

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
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
	found, err := policies.Create(ctx, want, strict)
	if apierrors.IsAlreadyExists(err) {
		if found, err = policies.Get(ctx, want.Name, metav1.GetOptions{}); err != nil {
			return fmt.Errorf("read NetworkPolicy %s: %w", want.Name, err)
		}
		if err := a.belongs("NetworkPolicy", found); err != nil {
			return err
		}
		if !apiequality.Semantic.DeepEqual(found.Spec, want.Spec) {
			found, err = e.rewritePolicy(ctx, found.UID, want)
		}
	}
	if err := creation("NetworkPolicy", want.Name, err); err != nil {
		return err
	}
	a.policy, a.policyVersion, a.reached = true, found.ResourceVersion, to
	return nil
}

func (e *Engine) rewritePolicy(ctx context.Context, uid types.UID, want *networkingv1.NetworkPolicy) (*networkingv1.NetworkPolicy, error) {
	patch, err := json.Marshal([]map[string]any{
		{"op": "test", "path": "/metadata/uid", "value": uid},
		{"op": "replace", "path": "/spec", "value": want.Spec},
	})
	if err != nil {
		return nil, err
	}
	is, err := e.o.Client.Networking.NetworkPolicies(e.o.Client.Namespace).Patch(ctx, want.Name, types.JSONPatchType, patch, metav1.PatchOptions{FieldManager: label.Manager})
	switch {
	case err == nil:
		e.o.Log.Info("rewrote a network policy: the mesh has moved, or somebody else changed it", "name", want.Name)
	case apierrors.IsNotFound(err) || apierrors.IsConflict(err) || apierrors.IsInvalid(err):
		return nil, fmt.Errorf("rewrite NetworkPolicy %s: it changed meanwhile: %v", want.Name, err) // no refusal: the next pass looks again
	}
	return is, err
}

// restorePolicies has policies made or rewritten again that somebody else removed
// or changed, as the cluster's list of them says: without its policy a guest is not
// isolated. Whatever changes between list and look is looked at again.
func (e *Engine) restorePolicies(found []networkingv1.NetworkPolicy) {
	versions := make(map[string]string, len(found))
	for i := range found {
		versions[found[i].Name] = found[i].ResourceVersion
	}
	e.mu.Lock()
	all := maps.Clone(e.attempts)
	e.mu.Unlock()
	for id, a := range all {
		if !a.mu.TryLock() {
			continue // it is being looked at; the next list is soon
		}
		if a.policy && a.outcome == nil && (a.intent == nil || !a.intent.Delete) && versions[id] != a.policyVersion {
			a.policy = false
			e.queue.Add(id)
		}
		a.mu.Unlock()
	}
}
