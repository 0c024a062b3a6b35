package sim

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"

	"github.com/cosmicac/cosmicac/deploy/devcluster/internal/bootstrap"
	"github.com/cosmicac/cosmicac/deploy/devcluster/internal/fault"
)

// claims plays an external volume provisioner: a claim of a class of ours gets a volume, which the real binder binds.
// The volume holds nothing; what a machine writes lies in a folder that is named by the claim's uid.
type claims struct{ *world }

func (c *claims) add(mgr ctrl.Manager) error {
	return ctrl.NewControllerManagedBy(mgr).Named("simulated-provisioner").
		For(&corev1.PersistentVolumeClaim{}).
		WithOptions(controller.Options{MaxConcurrentReconciles: 16}).
		Complete(c)
}

func volumeName(claim types.UID) string { return "pvc-" + string(claim) }

// Reconcile makes the volume of an unbound claim.
func (c *claims) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	pvc := &corev1.PersistentVolumeClaim{}
	if err := c.Get(ctx, req.NamespacedName, pvc); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if pvc.DeletionTimestamp != nil || pvc.Spec.VolumeName != "" || pvc.Spec.StorageClassName == nil || *pvc.Spec.StorageClassName == "" {
		return ctrl.Result{}, nil
	}
	class := &storagev1.StorageClass{}
	if err := c.Get(ctx, types.NamespacedName{Name: *pvc.Spec.StorageClassName}, class); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if class.Provisioner != bootstrap.Provisioner {
		return ctrl.Result{}, nil
	}
	node := pvc.Annotations[selectedNode]
	if waitsForNode(class, pvc) && node == "" {
		return ctrl.Result{}, nil // the scheduler names a node when a pod wants the claim
	}
	if c.faults.has(fault.StoragePending, pvc.Name) {
		c.event(pvc, corev1.EventTypeWarning, "ProvisioningFailed", "failed to provision volume with StorageClass %q: no space left in the pool (simulated)", class.Name)
		return ctrl.Result{RequeueAfter: 2 * time.Second}, nil
	}
	policy := corev1.PersistentVolumeReclaimDelete
	if class.ReclaimPolicy != nil {
		policy = *class.ReclaimPolicy
	}
	pv := &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{
			Name:   volumeName(pvc.UID),
			Labels: map[string]string{Simulated: "true"},
			// Tells the binder that releasing the volume is the provisioner's business.
			Annotations: map[string]string{"pv.kubernetes.io/provisioned-by": bootstrap.Provisioner},
		},
		Spec: corev1.PersistentVolumeSpec{
			Capacity:    corev1.ResourceList{corev1.ResourceStorage: pvc.Spec.Resources.Requests[corev1.ResourceStorage]},
			AccessModes: pvc.Spec.AccessModes, VolumeMode: pvc.Spec.VolumeMode,
			PersistentVolumeReclaimPolicy: policy, StorageClassName: class.Name,
			ClaimRef: &corev1.ObjectReference{
				APIVersion: "v1", Kind: "PersistentVolumeClaim", Namespace: pvc.Namespace, Name: pvc.Name, UID: pvc.UID,
			},
			PersistentVolumeSource: corev1.PersistentVolumeSource{
				CSI: &corev1.CSIPersistentVolumeSource{Driver: bootstrap.Provisioner, VolumeHandle: string(pvc.UID)},
			},
		},
	}
	if node != "" {
		// Node-local storage: the volume is where its first consumer was, and nowhere else.
		pv.Spec.NodeAffinity = &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
			MatchExpressions: []corev1.NodeSelectorRequirement{{
				Key: corev1.LabelHostname, Operator: corev1.NodeSelectorOpIn, Values: []string{c.place(node)},
			}},
		}}}}
	}
	if err := c.Create(ctx, pv); err != nil && !apierrors.IsAlreadyExists(err) {
		return ctrl.Result{}, err
	}
	return ctrl.Result{}, nil
}

const (
	selectedNode  = "volume.kubernetes.io/selected-node"
	bindImmediate = "cdi.kubevirt.io/storage.bind.immediate.requested"
)

// waitsForNode says whether a claim of a class must wait until a pod wants it.
func waitsForNode(class *storagev1.StorageClass, pvc *corev1.PersistentVolumeClaim) bool {
	if _, ok := pvc.Annotations[bindImmediate]; ok {
		return false
	}
	return class.VolumeBindingMode != nil && *class.VolumeBindingMode == storagev1.VolumeBindingWaitForFirstConsumer
}

// place is the node on which a volume is made: the chosen one, or with the fault another one of its pool.
func (c *claims) place(node string) string {
	if !c.faults.has(fault.VolumeAstray, node) {
		return node
	}
	for _, p := range c.options.Pools {
		for i := range p.Nodes {
			if nodeName(p, i) == node {
				return nodeName(p, (i+1)%p.Nodes)
			}
		}
	}
	return node
}

// disks deletes volumes that the binder released, and with them what machines wrote.
type disks struct{ *world }

func (d *disks) add(mgr ctrl.Manager) error {
	return ctrl.NewControllerManagedBy(mgr).Named("simulated-disks").
		For(&corev1.PersistentVolume{}).
		WithOptions(controller.Options{MaxConcurrentReconciles: 2}).
		Complete(d)
}

// Reconcile ends a released volume.
func (d *disks) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	pv := &corev1.PersistentVolume{}
	if err := d.Get(ctx, req.NamespacedName, pv); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	ours := pv.Annotations["pv.kubernetes.io/provisioned-by"] == bootstrap.Provisioner && pv.Spec.CSI != nil
	if !ours || pv.Status.Phase != corev1.VolumeReleased || pv.Spec.PersistentVolumeReclaimPolicy != corev1.PersistentVolumeReclaimDelete {
		return ctrl.Result{}, nil
	}
	if err := d.machines.RemoveDisk(pv.Spec.CSI.VolumeHandle); err != nil {
		return ctrl.Result{}, err
	}
	if pv.DeletionTimestamp == nil {
		return ctrl.Result{}, ignoreRace(d.Delete(ctx, pv))
	}
	return ctrl.Result{}, nil
}
