package sim

import (
	"context"
	"fmt"
	"maps"
	"reflect"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	cdiv1 "kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/cosmicac/cosmicac/deploy/devcluster/internal/bootstrap"
	"github.com/cosmicac/cosmicac/deploy/devcluster/internal/fault"
)

// volumes plays CDI: a DataVolume gets a claim of its own name, waits for it to be bound, and pretends to import. No
// byte is fetched. An image whose name holds "does-not-exist" is retried for ever and never Failed, as CDI does it.
type volumes struct{ *world }

const (
	missingImage = "does-not-exist"
	// importRetry is the pause between two tries of a failing import, short beside a real back-off.
	importRetry = 2 * time.Second
)

func (v *volumes) add(mgr ctrl.Manager) error {
	return ctrl.NewControllerManagedBy(mgr).Named("simulated-cdi").
		For(&cdiv1.DataVolume{}).
		Owns(&corev1.PersistentVolumeClaim{}).
		WithOptions(controller.Options{MaxConcurrentReconciles: 16}).
		Complete(v)
}

// Reconcile does a DataVolume's next step and writes its status if that changed.
func (v *volumes) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	dv := &cdiv1.DataVolume{}
	if err := v.Get(ctx, req.NamespacedName, dv); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if dv.DeletionTimestamp != nil {
		v.clock.forget(dv.UID)
		v.replaced.forget(dv.UID)
		return ctrl.Result{}, nil
	}
	if v.replaced.shown(dv) {
		return ctrl.Result{RequeueAfter: cacheLag}, nil
	}
	before, version := dv.Status.DeepCopy(), dv.ResourceVersion
	wait, err := v.step(ctx, dv)
	if err != nil {
		return ctrl.Result{}, err
	}
	if !reflect.DeepEqual(before, &dv.Status) {
		if err := v.Status().Update(ctx, dv); err != nil {
			return ctrl.Result{}, ignoreRace(err)
		}
		v.replaced.wrote(dv, version)
		if before.Phase != dv.Status.Phase {
			v.log.Debug("simulated data volume", "name", dv.Namespace+"/"+dv.Name, "phase", dv.Status.Phase)
		}
	}
	return ctrl.Result{RequeueAfter: wait}, nil
}

func (v *volumes) step(ctx context.Context, dv *cdiv1.DataVolume) (time.Duration, error) {
	st := &dv.Status
	if st.Progress == "" {
		st.Progress = "N/A"
	}
	pvc := &corev1.PersistentVolumeClaim{}
	err := v.Get(ctx, client.ObjectKeyFromObject(dv), pvc)
	if apierrors.IsNotFound(err) {
		if st.Phase == cdiv1.Succeeded {
			// The claim was taken away: CDI calls that a lost claim.
			st.Phase = cdiv1.Failed
			setDataVolumeCondition(st, cdiv1.DataVolumeBound, corev1.ConditionFalse, "ErrClaimLost", "PVC "+dv.Name+" lost")
			setDataVolumeCondition(st, cdiv1.DataVolumeReady, corev1.ConditionFalse, "ErrClaimLost", "")
			return 0, nil
		}
		if st.Phase == cdiv1.Failed {
			return 0, nil
		}
		return v.claim(ctx, dv)
	}
	if err != nil {
		return 0, err
	}
	if !metav1.IsControlledBy(pvc, dv) {
		st.Phase = cdiv1.Pending
		setDataVolumeCondition(st, cdiv1.DataVolumeBound, corev1.ConditionFalse, "ErrClaimNotValid",
			fmt.Sprintf("PVC %s already exists and is not owned by the data volume", pvc.Name))
		return 5 * time.Second, nil
	}
	st.ClaimName = pvc.Name
	if pvc.Status.Phase != corev1.ClaimBound {
		waits, err := v.waitsForConsumer(ctx, pvc)
		if err != nil {
			return 0, err
		}
		if st.Phase = cdiv1.Pending; waits {
			st.Phase = cdiv1.WaitForFirstConsumer
		}
		setDataVolumeCondition(st, cdiv1.DataVolumeBound, corev1.ConditionFalse, "Pending", "PVC "+pvc.Name+" Pending")
		setDataVolumeCondition(st, cdiv1.DataVolumeReady, corev1.ConditionFalse, "", "")
		setDataVolumeCondition(st, cdiv1.DataVolumeRunning, corev1.ConditionFalse, "", "")
		return 0, nil // the claim's event brings the next step
	}
	setDataVolumeCondition(st, cdiv1.DataVolumeBound, corev1.ConditionTrue, "Bound", "PVC "+pvc.Name+" Bound")
	switch {
	case st.Phase == cdiv1.Succeeded || st.Phase == cdiv1.Failed:
		return 0, nil
	}
	if reason, words := v.importFault(dv); reason != "" {
		return v.failing(dv, reason, words+" (simulated)"), nil
	}
	return v.importing(dv), nil
}

// waitsForConsumer says whether a claim is bound only once a pod wants it.
func (v *volumes) waitsForConsumer(ctx context.Context, pvc *corev1.PersistentVolumeClaim) (bool, error) {
	class := &storagev1.StorageClass{}
	err := v.Get(ctx, types.NamespacedName{Name: ptr.Deref(pvc.Spec.StorageClassName, "")}, class)
	return err == nil && waitsForNode(class, pvc), client.IgnoreNotFound(err)
}

// phasesOf are the two middle phases of a source.
func phasesOf(dv *cdiv1.DataVolume) (scheduled, running cdiv1.DataVolumePhase) {
	if clone(dv) {
		return cdiv1.CloneScheduled, cdiv1.CloneInProgress
	}
	return cdiv1.ImportScheduled, cdiv1.ImportInProgress
}

func clone(dv *cdiv1.DataVolume) bool {
	s := dv.Spec.Source
	return dv.Spec.SourceRef != nil || s != nil && (s.PVC != nil || s.Snapshot != nil)
}

func (v *volumes) importing(dv *cdiv1.DataVolume) time.Duration {
	st := &dv.Status
	scheduled, running := phasesOf(dv)
	total := v.options.ImportTime
	if dv.Spec.Source != nil && dv.Spec.Source.Blank != nil {
		total = 0
	}
	if st.Phase != scheduled && st.Phase != running {
		st.Phase = scheduled
		v.clock.restart(dv.UID, "import")
		v.clock.passed(dv.UID, "import")
		setDataVolumeCondition(st, cdiv1.DataVolumeRunning, corev1.ConditionFalse, "ContainerCreating", "")
		setDataVolumeCondition(st, cdiv1.DataVolumeReady, corev1.ConditionFalse, "TransferRunning", "")
		v.event(dv, corev1.EventTypeNormal, string(scheduled), "simulated import into %s scheduled", dv.Name)
		return max(total/10, time.Millisecond)
	}
	if clone(dv) && v.faults.has(fault.CloneFallback, dv.Name) {
		total *= 10
	}
	if v.faults.has(fault.ImportStalled, dv.Name) {
		st.Phase, st.Progress = running, "37.0%"
		setDataVolumeCondition(st, cdiv1.DataVolumeRunning, corev1.ConditionTrue, "Pod is running", "")
		return 2 * time.Second
	}
	passed := v.clock.passed(dv.UID, "import")
	if passed < total {
		st.Phase = running
		st.Progress = cdiv1.DataVolumeProgress(fmt.Sprintf("%.1f%%", 100*passed.Seconds()/total.Seconds()))
		setDataVolumeCondition(st, cdiv1.DataVolumeRunning, corev1.ConditionTrue, "Pod is running", "")
		return min(max(total/8, 100*time.Millisecond), 2*time.Second, total-passed+time.Millisecond)
	}
	st.Phase, st.Progress = cdiv1.Succeeded, "100.0%"
	setDataVolumeCondition(st, cdiv1.DataVolumeRunning, corev1.ConditionFalse, "Completed", "Import Complete")
	setDataVolumeCondition(st, cdiv1.DataVolumeReady, corev1.ConditionTrue, "", "")
	v.event(dv, corev1.EventTypeNormal, "ImportSucceeded", "simulated import into %s succeeded", dv.Name)
	v.clock.forget(dv.UID)
	return 0
}

// importFault says why an import fails over and over, in CDI's reason and words.
func (v *volumes) importFault(dv *cdiv1.DataVolume) (reason, words string) {
	size := dataVolumeSize(dv)
	switch {
	case strings.Contains(image(dv), missingImage):
		return "ImagePullFailed", fmt.Sprintf("Unable to process data: failed to pull image %s: manifest unknown", image(dv))
	case v.faults.has(fault.ImportRefused, dv.Name):
		return "ImagePullFailed", fmt.Sprintf("Unable to process data: failed to pull image %s: unauthorized: authentication required", image(dv))
	case v.faults.has(fault.ImportTooSmall, dv.Name):
		return "Error", fmt.Sprintf("Unable to process data: Virtual image size %d is larger than the reported available storage %d. A larger PVC is required.", 4*size, size)
	case v.faults.has(fault.ImportNoScratch, dv.Name):
		return "Scratch space required and none found", "Scratch space required and none found"
	}
	return "", ""
}

func dataVolumeSize(dv *cdiv1.DataVolume) int64 {
	var requests corev1.ResourceList
	switch {
	case dv.Spec.Storage != nil:
		requests = dv.Spec.Storage.Resources.Requests
	case dv.Spec.PVC != nil:
		requests = dv.Spec.PVC.Resources.Requests
	}
	size := requests[corev1.ResourceStorage]
	return size.Value()
}

// failing swings between the two import phases and counts restarts.
func (v *volumes) failing(dv *cdiv1.DataVolume, reason, message string) time.Duration {
	st := &dv.Status
	if left := v.clock.left(dv.UID, "retry", importRetry); left > 0 && st.RestartCount > 0 {
		return left
	}
	v.clock.restart(dv.UID, "retry")
	v.clock.passed(dv.UID, "retry")
	st.RestartCount++
	if st.Phase == cdiv1.ImportInProgress {
		st.Phase = cdiv1.ImportScheduled
	} else {
		st.Phase = cdiv1.ImportInProgress
	}
	setDataVolumeCondition(st, cdiv1.DataVolumeRunning, corev1.ConditionFalse, reason, message)
	setDataVolumeCondition(st, cdiv1.DataVolumeReady, corev1.ConditionFalse, "TransferRunning", "")
	v.event(dv, corev1.EventTypeWarning, "ImportFailed", "%s", message)
	return importRetry
}

func image(dv *cdiv1.DataVolume) string {
	s := dv.Spec.Source
	switch {
	case s == nil:
	case s.Registry != nil:
		return ptr.Deref(s.Registry.URL, "")
	case s.HTTP != nil:
		return s.HTTP.URL
	case s.S3 != nil:
		return s.S3.URL
	}
	return ""
}

// claim makes the DataVolume's claim, owned by it.
func (v *volumes) claim(ctx context.Context, dv *cdiv1.DataVolume) (time.Duration, error) {
	dv.Status.Phase = cdiv1.Pending
	pvc := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{
		Name: dv.Name, Namespace: dv.Namespace,
		Labels:      map[string]string{"app": "containerized-data-importer", "app.kubernetes.io/component": "storage"},
		Annotations: map[string]string{"cdi.kubevirt.io/storage.contentType": "kubevirt", "cdi.kubevirt.io/storage.usePopulator": "false"},
	}}
	maps.Copy(pvc.Labels, dv.Labels)
	if _, ok := dv.Annotations[bindImmediate]; ok {
		pvc.Annotations[bindImmediate] = ""
	}
	if clone(dv) && v.faults.has(fault.CloneFallback, dv.Name) {
		pvc.Annotations["cdi.kubevirt.io/cloneFallbackReason"] = "The volume modes of source and target are incompatible (simulated)"
	}
	switch {
	case dv.Spec.PVC != nil:
		dv.Spec.PVC.DeepCopyInto(&pvc.Spec)
	case dv.Spec.Storage != nil:
		s := dv.Spec.Storage
		pvc.Spec = corev1.PersistentVolumeClaimSpec{
			AccessModes: s.AccessModes, Selector: s.Selector, VolumeMode: s.VolumeMode, StorageClassName: s.StorageClassName,
			Resources: corev1.VolumeResourceRequirements{Requests: s.Resources.Requests, Limits: s.Resources.Limits},
		}
		// What the storage profile of the simulated class says.
		if len(pvc.Spec.AccessModes) == 0 {
			pvc.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}
		}
		if pvc.Spec.VolumeMode == nil {
			pvc.Spec.VolumeMode = ptr.To(corev1.PersistentVolumeBlock)
		}
	default:
		setDataVolumeCondition(&dv.Status, cdiv1.DataVolumeBound, corev1.ConditionFalse, "ErrClaimNotValid", "neither spec.pvc nor spec.storage is set")
		return 0, nil
	}
	if pvc.Spec.StorageClassName == nil {
		pvc.Spec.StorageClassName = ptr.To(bootstrap.StorageClass)
	}
	if err := controllerutil.SetControllerReference(dv, pvc, v.Scheme()); err != nil {
		return 0, err
	}
	err := v.Create(ctx, pvc)
	switch {
	case err == nil || apierrors.IsAlreadyExists(err):
		dv.Status.ClaimName = pvc.Name
		return 0, nil
	case apierrors.IsForbidden(err) && strings.Contains(err.Error(), "exceeded quota"):
		setDataVolumeCondition(&dv.Status, cdiv1.DataVolumeBound, corev1.ConditionFalse, "ErrExceededQuota", err.Error())
		v.event(dv, corev1.EventTypeWarning, "ErrExceededQuota", "%v", err)
		return 5 * time.Second, nil
	case apierrors.IsInvalid(err):
		setDataVolumeCondition(&dv.Status, cdiv1.DataVolumeBound, corev1.ConditionFalse, "ErrClaimNotValid", err.Error())
		return 0, nil
	}
	return 0, err
}

func setDataVolumeCondition(st *cdiv1.DataVolumeStatus, t cdiv1.DataVolumeConditionType, s corev1.ConditionStatus, reason, message string) {
	for i := range st.Conditions {
		c := &st.Conditions[i]
		if c.Type != t {
			continue
		}
		if c.Status == s && c.Reason == reason && c.Message == message {
			return
		}
		if c.Status != s {
			c.LastTransitionTime = now()
		}
		c.Status, c.Reason, c.Message, c.LastHeartbeatTime = s, reason, message, now()
		return
	}
	st.Conditions = append(st.Conditions, cdiv1.DataVolumeCondition{
		Type: t, Status: s, Reason: reason, Message: message, LastTransitionTime: now(), LastHeartbeatTime: now(),
	})
}
