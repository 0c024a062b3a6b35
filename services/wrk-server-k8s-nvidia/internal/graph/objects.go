package graph

import (
	"context"
	"errors"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	kubevirt "kubevirt.io/api/core/v1"
	cdi "kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/claim"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/cluster"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/label"
)

// strict makes the API server refuse fields that its version of a kind lacks.
var strict = metav1.CreateOptions{FieldValidation: metav1.FieldValidationStrict, FieldManager: label.Manager}

// refusal is an error that no retry will cure.
type refusal struct{ outcome *claim.Outcome }

func (r *refusal) Error() string { return r.outcome.Message }

// errWaiting says that something must come from outside first.
var errWaiting = errors.New("waiting")

// creation sorts the error of a create of ours.
func creation(kind, name string, err error) error {
	if err == nil {
		return nil
	}
	if cluster.Refused(err) {
		return &refusal{failure(orkv1.Reason_REASON_CLUSTER_REFUSED, "the cluster refuses %s %s: %s", kind, name, cluster.Words(err))}
	}
	return fmt.Errorf("create %s %s: %w", kind, name, err)
}

// belongs checks that an object found under our name is this attempt's own.
func (a *attempt) belongs(kind string, o metav1.Object) error {
	owned := false
	for _, r := range o.GetOwnerReferences() {
		owned = owned || r.UID == a.anchor
	}
	if owned && o.GetLabels()[label.Attempt] == a.rec.AttemptID {
		return nil
	}
	return &refusal{failure(orkv1.Reason_REASON_CLUSTER_REFUSED, "%s %s exists and belongs to attempt %q, not to %s",
		kind, o.GetName(), o.GetLabels()[label.Attempt], a.rec.AttemptID)}
}

// checkAnchor notices that the anchor has gone without us. What hangs on it is
// then taken down: the garbage collector has begun to. It answers true when it
// has noticed just now.
func (e *Engine) checkAnchor(ctx context.Context, a *attempt) (bool, error) {
	if a.anchorGone {
		return false, nil
	}
	if cm, ok := e.o.View.Anchor(a.rec.AttemptID); ok && cm.UID == a.anchor && cm.DeletionTimestamp == nil {
		return false, nil
	}
	cm, err := e.liveAnchor(ctx, a.rec.AttemptID)
	switch {
	case err != nil:
		return false, err
	case cm == nil || cm.UID != a.anchor:
		a.anchorGone = true
	case cm.DeletionTimestamp == nil:
		return false, nil
	}
	if a.intent != nil && a.intent.Delete {
		return false, nil
	}
	e.o.Log.Warn("the anchor was removed by somebody else, taking the attempt down", "attempt", a.rec.AttemptID)
	a.intent = &claim.Intent{Delete: true, Reason: orkv1.Reason_REASON_VM_REMOVED, At: e.o.Now()}
	a.robbed = true
	return true, nil
}

// ensureSecret makes the k-th seed. It answers errWaiting when the seed is not
// in memory and not in the cluster: ork must send it again.
func (e *Engine) ensureSecret(ctx context.Context, a *attempt, k int) error {
	if a.secrets[k] {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	name := SecretName(a.rec.AttemptID, k)
	secrets := e.o.Client.Core.Secrets(e.o.Client.Namespace)
	if k < len(a.seeds) && a.seeds[k] != nil {
		_, err := secrets.Create(ctx, e.s.Secret(a.rec, a.anchor, k, a.seeds[k]), strict)
		if err == nil {
			a.secrets[k] = true
			a.seeds[k] = nil
			return nil
		}
		if !apierrors.IsAlreadyExists(err) {
			return creation("Secret", name, err)
		}
	}
	found, err := secrets.Get(ctx, name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return errWaiting
	case err != nil:
		return fmt.Errorf("read Secret %s: %w", name, err)
	}
	if err := a.belongs("Secret", found); err != nil {
		return err
	}
	a.secrets[k] = true
	if k < len(a.seeds) {
		a.seeds[k] = nil
	}
	return nil
}

// disk gives the k-th root disk, made if need be.
func (e *Engine) disk(ctx context.Context, a *attempt, k int, create bool) (*cdi.DataVolume, error) {
	name := DiskName(a.rec.JobID, a.rec.ReplicaIndex, k)
	check := func(dv *cdi.DataVolume) error {
		if dv.Labels[label.Job] == a.rec.JobID && dv.Labels[label.Network] == e.s.Network {
			return nil
		}
		return &refusal{failure(orkv1.Reason_REASON_CLUSTER_REFUSED, "DataVolume %s exists and belongs to job %q", name, dv.Labels[label.Job])}
	}
	if dv, ok := e.o.View.DataVolume(name); ok {
		return dv, check(dv)
	}
	if !create {
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	volumes := e.o.Client.CDI.DataVolumes(e.o.Client.Namespace)
	dv, err := volumes.Create(ctx, a.probed(e.s.Disk(a.rec, k)), strict)
	if !apierrors.IsAlreadyExists(err) {
		return dv, creation("DataVolume", name, err)
	}
	if dv, err = volumes.Get(ctx, name, metav1.GetOptions{}); err != nil {
		return nil, fmt.Errorf("read DataVolume %s: %w", name, err)
	}
	if err := check(dv); err != nil {
		return nil, err
	}
	if dv.Labels[label.Rack] == e.s.Rack {
		return dv, nil
	}
	// Another rack of this cluster made it for an earlier attempt: it is ours now.
	patch := fmt.Sprintf(`{"metadata":{"uid":%q,"labels":{%q:%q}}}`, dv.UID, label.Rack, e.s.Rack)
	if dv, err = volumes.Patch(ctx, name, types.MergePatchType, []byte(patch), metav1.PatchOptions{FieldManager: label.Manager}); err != nil {
		return nil, fmt.Errorf("take over DataVolume %s: %w", name, err)
	}
	return dv, nil
}

// machine gives the k-th virtual machine as the view has it; when it was seen
// before and the view lacks it, as the cluster has it. Nil when there is none.
func (e *Engine) machine(ctx context.Context, a *attempt, k int) (*kubevirt.VirtualMachineInstance, error) {
	name := VMIName(a.rec.AttemptID, k)
	if vmi, ok := e.o.View.VMI(name); ok {
		return vmi, a.belongs("VirtualMachineInstance", vmi)
	}
	if _, seen := a.vmis[name]; !seen {
		return nil, nil
	}
	return e.liveMachine(ctx, a, name)
}

func (e *Engine) liveMachine(ctx context.Context, a *attempt, name string) (*kubevirt.VirtualMachineInstance, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	vmi, err := e.o.Client.KubeVirt.VirtualMachineInstances(e.o.Client.Namespace).Get(ctx, name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("read VirtualMachineInstance %s: %w", name, err)
	}
	return vmi, a.belongs("VirtualMachineInstance", vmi)
}

func (e *Engine) createMachine(ctx context.Context, a *attempt, k int) (*kubevirt.VirtualMachineInstance, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	name := VMIName(a.rec.AttemptID, k)
	machines := e.o.Client.KubeVirt.VirtualMachineInstances(e.o.Client.Namespace)
	vmi, err := machines.Create(ctx, e.s.VMI(a.rec, a.anchor, k), strict)
	if apierrors.IsAlreadyExists(err) {
		if vmi, err = machines.Get(ctx, name, metav1.GetOptions{}); err != nil {
			return nil, fmt.Errorf("read VirtualMachineInstance %s: %w", name, err)
		}
		return vmi, a.belongs("VirtualMachineInstance", vmi)
	}
	if err == nil {
		e.o.Log.Info("created a virtual machine", "attempt", a.rec.AttemptID, "name", name, "uid", vmi.UID, "node", a.rec.Nodes[k].Node, "gpus", a.rec.Nodes[k].GPUs)
	}
	return vmi, creation("VirtualMachineInstance", name, err)
}

// save writes outcome and uids into the anchor.
func (e *Engine) save(ctx context.Context, a *attempt) error {
	if !a.unsaved || a.anchorGone {
		return nil
	}
	patch, err := claim.Patch(a.anchor, nil, a.outcome, a.vmis)
	if err != nil {
		return err
	}
	if err := e.patchAnchor(ctx, a, patch); err != nil {
		return err
	}
	a.unsaved = false
	return nil
}

func (e *Engine) patchAnchor(ctx context.Context, a *attempt, patch []byte) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	_, err := e.o.Client.Core.ConfigMaps(e.o.Client.Namespace).Patch(ctx, a.rec.AttemptID, types.MergePatchType, patch,
		metav1.PatchOptions{FieldManager: label.Manager})
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		// Not there, or another of its name: checkAnchor confirms and decides.
		return nil
	}
	if err != nil {
		return fmt.Errorf("write anchor %s: %w", a.rec.AttemptID, err)
	}
	return nil
}

// summary leaves pod networks out of a policy where there are too many to list:
// the operator's cluster-wide setting says the same in one line.
func summary(cidrs []string) []string {
	if len(cidrs) > 64 {
		return nil
	}
	return cidrs
}
