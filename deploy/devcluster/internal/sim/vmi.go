package sim

import (
	"context"
	"fmt"
	"reflect"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	kubevirtv1 "kubevirt.io/api/core/v1"
	cdiv1 "kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/cosmicac/cosmicac/deploy/devcluster/internal/fault"
)

// vmis plays virt-controller (this file) and virt-handler (handler.go) for every VMI. The two are one reconciler here,
// so that one object has one writer; the phases and conditions tell which of the two would have spoken.
type vmis struct{ *world }

// byClaimName is the cache's index of VMIs by the names of the claims that their volumes use.
const byClaimName = "spec.volumes.claim"

func (v *vmis) add(mgr ctrl.Manager) error {
	err := mgr.GetFieldIndexer().IndexField(context.Background(), &kubevirtv1.VirtualMachineInstance{}, byClaimName, func(o client.Object) []string {
		var claims []string
		for _, vol := range o.(*kubevirtv1.VirtualMachineInstance).Spec.Volumes {
			if claim := claimOf(vol); claim != "" {
				claims = append(claims, claim)
			}
		}
		return claims
	})
	if err != nil {
		return err
	}
	byClaim := handler.EnqueueRequestsFromMapFunc(v.usersOf)
	return ctrl.NewControllerManagedBy(mgr).Named("simulated-kubevirt").
		For(&kubevirtv1.VirtualMachineInstance{}).
		Owns(&corev1.Pod{}).
		Watches(&cdiv1.DataVolume{}, byClaim).
		Watches(&corev1.PersistentVolumeClaim{}, byClaim).
		WatchesRawSource(source.Channel(v.faults.vmis, forward{})).
		WithOptions(controller.Options{MaxConcurrentReconciles: 32}).
		Complete(v)
}

// usersOf lists the VMIs that wait for a claim or a DataVolume of this name.
func (v *vmis) usersOf(ctx context.Context, o client.Object) []reconcile.Request {
	var users kubevirtv1.VirtualMachineInstanceList
	if err := v.List(ctx, &users, client.InNamespace(o.GetNamespace()), client.MatchingFields{byClaimName: o.GetName()}); err != nil {
		return nil
	}
	var out []reconcile.Request
	for i := range users.Items {
		out = append(out, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&users.Items[i])})
	}
	return out
}

// Reconcile does a VMI's next step and writes it with one plain update: a VMI has no status subresource.
func (v *vmis) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	vmi := &kubevirtv1.VirtualMachineInstance{}
	if err := v.Get(ctx, req.NamespacedName, vmi); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if v.replaced.shown(vmi) {
		return ctrl.Result{RequeueAfter: cacheLag}, nil
	}
	before := vmi.DeepCopy()
	pod, err := v.launcherOf(ctx, vmi)
	if err != nil {
		return ctrl.Result{}, err
	}
	wait, err := v.step(ctx, vmi, pod)
	if err != nil {
		return ctrl.Result{}, ignoreRace(err)
	}
	if !reflect.DeepEqual(before, vmi) {
		if err := v.Update(ctx, vmi); err != nil {
			if apierrors.IsConflict(err) {
				return ctrl.Result{RequeueAfter: 50 * time.Millisecond}, nil
			}
			return ctrl.Result{}, client.IgnoreNotFound(err)
		}
		if len(vmi.Finalizers) == 0 {
			v.replaced.forget(vmi.UID) // it is gone with this write
		} else {
			v.replaced.wrote(vmi, before.ResourceVersion)
		}
		if before.Status.Phase != vmi.Status.Phase {
			v.log.Info("simulated vmi", "name", vmi.Namespace+"/"+vmi.Name, "phase", vmi.Status.Phase, "node", vmi.Status.NodeName)
		}
	}
	return ctrl.Result{RequeueAfter: wait}, nil
}

// launcherOf finds the VMI's pod. Its absence is believed only of the API server itself: much follows from it.
func (v *vmis) launcherOf(ctx context.Context, vmi *kubevirtv1.VirtualMachineInstance) (*corev1.Pod, error) {
	key := types.NamespacedName{Namespace: vmi.Namespace, Name: launcherName(vmi)}
	pod := &corev1.Pod{}
	err := v.Get(ctx, key, pod)
	// A pending one has none that matters yet: making it twice is refused.
	waits := vmi.DeletionTimestamp == nil && (vmi.Status.Phase == "" || vmi.Status.Phase == kubevirtv1.Pending)
	if apierrors.IsNotFound(err) && !waits {
		err = v.live.Get(ctx, key, pod)
	}
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if pod.Labels[kubevirtv1.CreatedByLabel] != string(vmi.UID) {
		return nil, nil
	}
	return pod, nil
}

func (v *vmis) step(ctx context.Context, vmi *kubevirtv1.VirtualMachineInstance, pod *corev1.Pod) (time.Duration, error) {
	deleting := vmi.DeletionTimestamp != nil
	if !deleting {
		controllerutil.AddFinalizer(vmi, kubevirtv1.VirtualMachineInstanceFinalizer)
	}
	evictionCondition(vmi)
	var wait time.Duration
	var err error
	switch vmi.Status.Phase {
	case "", kubevirtv1.Pending:
		wait, err = v.pending(ctx, vmi, pod)
	case kubevirtv1.Scheduling:
		wait, err = v.scheduling(ctx, vmi, pod)
	case kubevirtv1.Scheduled, kubevirtv1.Running:
		wait, err = v.handle(ctx, vmi, pod)
	}
	if err != nil || !deleting {
		return wait, err
	}
	if pod != nil {
		if pod.DeletionTimestamp == nil {
			v.event(vmi, corev1.EventTypeNormal, "SuccessfulDelete", "Deleted virtual machine pod %s", pod.Name)
			return time.Second, v.Delete(ctx, pod, client.Preconditions{UID: &pod.UID})
		}
		return wait, nil
	}
	if chooser, err := v.chooser(ctx, vmi); err != nil || chooser != nil {
		if err == nil && chooser.DeletionTimestamp == nil {
			err = client.IgnoreNotFound(v.Delete(ctx, chooser, client.Preconditions{UID: &chooser.UID}))
		}
		return 500 * time.Millisecond, err
	}
	// The finalizer goes only when the phase is final and the pods are gone: then the GPU is free.
	if final(vmi) {
		if err := v.machines.Remove(string(vmi.UID)); err != nil {
			return 0, err
		}
		controllerutil.RemoveFinalizer(vmi, kubevirtv1.VirtualMachineInstanceFinalizer)
		controllerutil.RemoveFinalizer(vmi, kubevirtv1.DeprecatedVirtualMachineInstanceFinalizer)
		v.clock.forget(vmi.UID)
		return 0, nil
	}
	return max(wait, 200*time.Millisecond), nil
}

func final(vmi *kubevirtv1.VirtualMachineInstance) bool {
	return vmi.Status.Phase == kubevirtv1.Succeeded || vmi.Status.Phase == kubevirtv1.Failed
}

// pending is virt-controller before the pod: permission, disks and networks first, then the pod.
func (v *vmis) pending(ctx context.Context, vmi *kubevirtv1.VirtualMachineInstance, pod *corev1.Pod) (time.Duration, error) {
	if vmi.DeletionTimestamp != nil {
		setPhase(vmi, kubevirtv1.Failed)
		return 0, nil
	}
	if pod != nil {
		setPhase(vmi, kubevirtv1.Scheduling)
		return 0, nil
	}
	setPhase(vmi, kubevirtv1.Pending)
	setVMICondition(vmi, kubevirtv1.VirtualMachineInstanceReady, corev1.ConditionFalse, kubevirtv1.PodNotExistsReason, "virt-launcher pod has not yet been scheduled")
	ready, waiting, err := v.disksReady(ctx, vmi)
	if err != nil {
		return 0, err
	}
	var chooser *corev1.Pod
	if waiting || condition(vmi, kubevirtv1.VirtualMachineInstanceProvisioning) != nil { // else none was ever made
		if chooser, err = v.chooser(ctx, vmi); err != nil {
			return 0, err
		}
	}
	if chooser != nil && !waiting {
		// The node is chosen: the devices are free again until the real pod comes, as with KubeVirt.
		if chooser.DeletionTimestamp == nil {
			return time.Second, v.Delete(ctx, chooser, client.Preconditions{UID: &chooser.UID})
		}
		return time.Second, nil
	}
	if !ready && !waiting || chooser != nil {
		return 10 * time.Second, nil // events of the claims come sooner
	}
	refusal, err := v.refusal(ctx, vmi)
	if err != nil {
		return 0, err
	}
	if waiting && refusal == "" {
		setVMICondition(vmi, kubevirtv1.VirtualMachineInstanceProvisioning, corev1.ConditionTrue, "", "a temporary pod chooses the node of disks that wait for their consumer (simulated)")
		pod := launcher(vmi)
		pod.Name = chooserName(vmi)
		pod.Annotations[kubevirtv1.EphemeralProvisioningObject] = "true"
		err := v.Create(ctx, pod)
		if apierrors.IsAlreadyExists(err) {
			err = nil
		}
		return 2 * time.Second, err
	}
	if refusal == "" {
		made := launcher(vmi)
		err := v.Create(ctx, made)
		switch {
		case err == nil:
			v.event(vmi, corev1.EventTypeNormal, "SuccessfulCreate", "Created virtual machine pod %s", made.Name)
		case apierrors.IsAlreadyExists(err):
		case apierrors.IsForbidden(err) || apierrors.IsInvalid(err):
			// Quota, pod security, a bad selector: they show here, not on the VMI's creation.
			refusal = fmt.Sprintf("failed to create virtual machine pod: %v", err)
		default:
			return 0, err
		}
	}
	if refusal != "" {
		c := condition(vmi, kubevirtv1.VirtualMachineInstanceSynchronized)
		if c == nil || c.Message != refusal {
			v.event(vmi, corev1.EventTypeWarning, "FailedCreate", "%s", refusal)
		}
		setVMICondition(vmi, kubevirtv1.VirtualMachineInstanceSynchronized, corev1.ConditionFalse, "FailedCreate", refusal)
		return 5 * time.Second, nil
	}
	dropVMICondition(vmi, kubevirtv1.VirtualMachineInstanceSynchronized)
	dropVMICondition(vmi, kubevirtv1.VirtualMachineInstanceProvisioning)
	setPhase(vmi, kubevirtv1.Scheduling)
	return 0, nil
}

// chooser finds the temporary pod of a VMI.
func (v *vmis) chooser(ctx context.Context, vmi *kubevirtv1.VirtualMachineInstance) (*corev1.Pod, error) {
	pod := &corev1.Pod{}
	err := v.live.Get(ctx, types.NamespacedName{Namespace: vmi.Namespace, Name: chooserName(vmi)}, pod)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	return pod, err
}

// disksReady holds the pod back until every disk has its content; waiting says that one waits for a pod to want it.
func (v *vmis) disksReady(ctx context.Context, vmi *kubevirtv1.VirtualMachineInstance) (ready, waiting bool, err error) {
	wants := false
	ready = true
	for _, vol := range vmi.Spec.Volumes {
		name := claimOf(vol)
		if name == "" {
			continue
		}
		key := types.NamespacedName{Namespace: vmi.Namespace, Name: name}
		err := v.Get(ctx, key, &corev1.PersistentVolumeClaim{})
		if client.IgnoreNotFound(err) != nil {
			return false, false, err
		}
		if err != nil {
			ready = false
		}
		if vol.DataVolume == nil {
			if err != nil && v.clock.left(vmi.UID, "claim "+name, 10*time.Second) == 10*time.Second {
				v.event(vmi, corev1.EventTypeWarning, "FailedPvcNotFound", "PVC %s/%s does not exist, waiting for it to appear", vmi.Namespace, name)
			}
			continue
		}
		wants = true
		dv := &cdiv1.DataVolume{}
		if err := v.Get(ctx, key, dv); client.IgnoreNotFound(err) != nil {
			return false, false, err
		}
		waiting = waiting || dv.Status.Phase == cdiv1.WaitForFirstConsumer
		if dv.Status.Phase != cdiv1.Succeeded {
			ready = false
		}
	}
	if wants {
		if ready {
			setVMICondition(vmi, kubevirtv1.VirtualMachineInstanceDataVolumesReady, corev1.ConditionTrue, kubevirtv1.VirtualMachineInstanceReasonAllDVsReady, "All of the VMI's DVs are bound and ready")
		} else {
			setVMICondition(vmi, kubevirtv1.VirtualMachineInstanceDataVolumesReady, corev1.ConditionFalse, kubevirtv1.VirtualMachineInstanceReasonNotAllDVsReady, "Not all of the VMI's DVs are ready")
		}
	}
	return ready, waiting, nil
}

// refusal says, in KubeVirt's words, why no pod can be rendered.
func (v *vmis) refusal(ctx context.Context, vmi *kubevirtv1.VirtualMachineInstance) (string, error) {
	kv := &kubevirtv1.KubeVirt{}
	if err := v.Get(ctx, types.NamespacedName{Namespace: "kubevirt", Name: "kubevirt"}, kv); err != nil {
		return "", err
	}
	why := notPermitted(vmi, kv)
	for name := range devicesOf(vmi) {
		if v.faults.has(fault.NotPermitted, name) {
			why = fmt.Sprintf("GPU %s is not permitted in permittedHostDevices configuration", name)
		}
	}
	if why != "" {
		return "failed to render launch manifest: " + why, nil
	}
	for _, nad := range networksOf(vmi) {
		ns, name, _ := strings.Cut(nad, "/")
		o := &unstructured.Unstructured{}
		o.SetGroupVersionKind(schema.GroupVersionKind{Group: "k8s.cni.cncf.io", Version: "v1", Kind: "NetworkAttachmentDefinition"})
		err := v.live.Get(ctx, types.NamespacedName{Namespace: ns, Name: name}, o)
		if apierrors.IsNotFound(err) {
			return fmt.Sprintf("failed to render launch manifest: failed to locate network attachment definition %s", nad), nil
		}
		if err != nil {
			return "", err
		}
	}
	return "", nil
}

// scheduling is virt-controller while the real scheduler looks for a node and the pod starts there.
func (v *vmis) scheduling(ctx context.Context, vmi *kubevirtv1.VirtualMachineInstance, pod *corev1.Pod) (time.Duration, error) {
	if pod == nil || pod.Status.Phase == corev1.PodFailed || pod.Status.Phase == corev1.PodSucceeded {
		setPhase(vmi, kubevirtv1.Failed)
		setVMICondition(vmi, kubevirtv1.VirtualMachineInstanceReady, corev1.ConditionFalse, kubevirtv1.PodNotExistsReason, "virt-launcher pod is gone or has failed")
		if pod != nil {
			vmi.Status.Reason = pod.Status.Reason
		}
		return 0, nil
	}
	dropVMICondition(vmi, podScheduled)
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse {
			setVMICondition(vmi, podScheduled, c.Status, c.Reason, c.Message)
		}
	}
	if pod.DeletionTimestamp != nil || vmi.DeletionTimestamp != nil || pod.Status.Phase != corev1.PodRunning || !podReady(pod) {
		return 0, nil
	}
	vmi.Status.NodeName = pod.Spec.NodeName
	vmi.Status.ActivePods = map[types.UID]string{pod.UID: pod.Spec.NodeName}
	vmi.Status.QOSClass = &pod.Status.QOSClass
	vmi.Status.LauncherContainerImageVersion = "simulated/virt-launcher:v1.7.0"
	vmi.Status.RuntimeUser = 107
	if vmi.Labels == nil {
		vmi.Labels = map[string]string{}
	}
	vmi.Labels[kubevirtv1.NodeNameLabel] = pod.Spec.NodeName
	labelled := pod.DeepCopy()
	labelled.Labels[kubevirtv1.NodeNameLabel] = pod.Spec.NodeName
	if err := v.Patch(ctx, labelled, client.MergeFrom(pod)); err != nil {
		return 0, err
	}
	setVMICondition(vmi, kubevirtv1.VirtualMachineInstanceReady, corev1.ConditionFalse, kubevirtv1.GuestNotRunningReason, "Guest VM is not reported as running")
	setPhase(vmi, kubevirtv1.Scheduled)
	v.event(vmi, corev1.EventTypeNormal, "SuccessfulHandOver", "Created virtual machine pod %s on %s", pod.Name, pod.Spec.NodeName)
	return time.Millisecond, nil
}

// podScheduled is the pod's condition that KubeVirt copies onto the VMI.
const podScheduled = kubevirtv1.VirtualMachineInstanceConditionType(corev1.PodScheduled)

func setPhase(vmi *kubevirtv1.VirtualMachineInstance, p kubevirtv1.VirtualMachineInstancePhase) {
	if vmi.Status.Phase == p {
		return
	}
	vmi.Status.Phase = p
	vmi.Status.PhaseTransitionTimestamps = append(vmi.Status.PhaseTransitionTimestamps,
		kubevirtv1.VirtualMachineInstancePhaseTransitionTimestamp{Phase: p, PhaseTransitionTimestamp: now()})
}

func condition(vmi *kubevirtv1.VirtualMachineInstance, t kubevirtv1.VirtualMachineInstanceConditionType) *kubevirtv1.VirtualMachineInstanceCondition {
	for i := range vmi.Status.Conditions {
		if vmi.Status.Conditions[i].Type == t {
			return &vmi.Status.Conditions[i]
		}
	}
	return nil
}

func setVMICondition(vmi *kubevirtv1.VirtualMachineInstance, t kubevirtv1.VirtualMachineInstanceConditionType, s corev1.ConditionStatus, reason, message string) {
	c := condition(vmi, t)
	if c == nil {
		vmi.Status.Conditions = append(vmi.Status.Conditions, kubevirtv1.VirtualMachineInstanceCondition{
			Type: t, Status: s, Reason: reason, Message: message, LastTransitionTime: now(),
		})
		return
	}
	if c.Status != s {
		c.LastTransitionTime = now()
	}
	c.Status, c.Reason, c.Message = s, reason, message
}

func dropVMICondition(vmi *kubevirtv1.VirtualMachineInstance, t kubevirtv1.VirtualMachineInstanceConditionType) {
	for i := range vmi.Status.Conditions {
		if vmi.Status.Conditions[i].Type == t {
			vmi.Status.Conditions = append(vmi.Status.Conditions[:i], vmi.Status.Conditions[i+1:]...)
			return
		}
	}
}
