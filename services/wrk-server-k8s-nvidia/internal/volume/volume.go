// Package volume makes, lists and removes volumes: disks that outlive attempts and
// jobs. Each is one blank DataVolume named by the volume's id; CDI makes the claim
// under it, and what the cluster says of both is the volume's status.
//
// A create is a get-or-create by id; an object of that name that is not ours is an
// error, never adopted. A delete is bound to a uid and refused while an attempt of the
// rack uses the volume. It keeps nothing in memory: the cluster is the record, so a
// restart loses nothing.
//
// It does not decide who may use a volume, nor when it goes: the orchestrator does.
// It does not look into a volume: the guest's agent gives an empty one its file system.
package volume

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/hashicorp/go-hclog"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	cdi "kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1"

	"github.com/cosmicac/cosmicac/pkg/fault"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/cluster"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/label"
)

// callTimeout bounds one call to the cluster.
const callTimeout = 5 * time.Second

// maximumGiB bounds a volume.
const maximumGiB = 65536

// Options are what a Keeper works with. All are required.
type Options struct {
	Client *cluster.Client
	View   *cluster.View
	// Rack and Network go into labels.
	Rack, Network string
	// StorageClass is the rack's own, empty for the cluster's default; VolumeMode is how
	// its volumes are made, empty for the class's own choice.
	StorageClass, VolumeMode string
	// Writable says why nothing may be written now.
	Writable func() error
	// Users names the attempts that use a volume.
	Users func(id string) []string
	Log   hclog.Logger
}

// Keeper is a rack's volumes. It is safe for concurrent use.
type Keeper struct{ o Options }

// New makes a keeper.
func New(o Options) *Keeper { return &Keeper{o: o} }

var nameForm = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,18}[a-z0-9])?$`)

// Apply makes a volume, or says in words why the cluster does not take it. An error
// leaves open whether it was made: ask again.
func (k *Keeper) Apply(ctx context.Context, req *workerv1.ApplyVolumeRequest) (refusal string, err error) {
	if err := k.o.Writable(); err != nil {
		return "", err
	}
	var bad []fault.Detail
	if !label.ID(req.GetVolumeId()) {
		bad = append(bad, fault.Detail{Field: "volume_id", Rule: "must be a DNS label of at most 40 characters"})
	}
	if !nameForm.MatchString(req.GetName()) {
		bad = append(bad, fault.Detail{Field: "name", Rule: "must be 1 to 20 of a-z, 0-9 and hyphens"})
	}
	if req.GetSizeGib() < 1 || req.GetSizeGib() > maximumGiB {
		bad = append(bad, fault.Detail{Field: "size_gib", Rule: fmt.Sprintf("must be 1 to %d", maximumGiB)})
	}
	if len(bad) > 0 {
		return "", fault.New(fault.Invalid, "the volume cannot be made").With(bad...)
	}
	ctx, cancel := context.WithTimeout(ctx, 3*callTimeout)
	defer cancel()
	volumes := k.o.Client.CDI.DataVolumes(k.o.Client.Namespace)
	if have, err := volumes.Get(ctx, req.VolumeId, metav1.GetOptions{}); err == nil {
		return k.foreign(have), nil
	} else if !apierrors.IsNotFound(err) {
		return "", fault.Wrap(fault.Unavailable, err, "look for volume %s", req.VolumeId)
	}
	if refusal, err := k.unfit(ctx, req); refusal != "" || err != nil {
		return refusal, err
	}
	strict := metav1.CreateOptions{FieldValidation: metav1.FieldValidationStrict, FieldManager: label.Manager}
	made, err := volumes.Create(ctx, k.render(req), strict)
	switch {
	case err == nil:
		k.o.Log.Info("created a volume", "volume", req.VolumeId, "name", req.Name, "size_gib", req.SizeGib, "class", req.StorageClass, "uid", made.UID)
		return "", nil
	case apierrors.IsAlreadyExists(err):
		return "", fault.Wrap(fault.Unavailable, err, "volume %s was made meanwhile", req.VolumeId)
	case cluster.Refused(err):
		return "the cluster refuses it: " + cluster.Words(err), nil
	}
	return "", fault.Wrap(fault.Unavailable, err, "create volume %s: %s", req.VolumeId, cluster.Words(err))
}

// foreign says why an object of a volume's name is not that volume; empty when it is.
func (k *Keeper) foreign(dv *cdi.DataVolume) string {
	if dv.Labels[label.Network] == k.o.Network && dv.Labels[label.Rack] == k.o.Rack && dv.Labels[label.Volume] == dv.Name {
		return ""
	}
	return fmt.Sprintf("DataVolume %s exists in the cluster and is not this rack's", dv.Name)
}

// unfit says why the cluster's storage cannot give the volume.
func (k *Keeper) unfit(ctx context.Context, req *workerv1.ApplyVolumeRequest) (string, error) {
	classes, err := k.o.Client.Storage.StorageClasses().List(ctx, metav1.ListOptions{Limit: 500})
	if err != nil {
		return "", fault.Wrap(fault.Unavailable, err, "list storage classes: %s", cluster.Words(err))
	}
	var names []string
	for i := range classes.Items {
		names = append(names, classes.Items[i].Name)
	}
	slices.Sort(names)
	have := "the cluster has none"
	if len(names) > 0 {
		have = "there are " + strings.Join(names[:min(len(names), 20)], ", ")
	}
	class := k.class(req)
	switch {
	case class == "":
		if class = defaultClass(classes.Items); class == "" {
			return "no storage class is named, and the cluster has no default; " + have, nil
		}
	case !slices.Contains(names, class):
		return fmt.Sprintf("there is no storage class %q; %s", class, have), nil
	}
	if !req.Shared {
		return "", nil
	}
	profiles, err := k.o.Client.CDI.StorageProfiles().List(ctx, metav1.ListOptions{Limit: 500})
	if err != nil {
		return "", fault.Wrap(fault.Unavailable, err, "list storage profiles: %s", cluster.Words(err))
	}
	for i := range profiles.Items {
		if p := &profiles.Items[i]; p.Name == class {
			return shareable(p), nil
		}
	}
	return fmt.Sprintf("whether storage class %s can be shared is not known: CDI has no StorageProfile of it", class), nil
}

// shareable says why a class cannot give a shared volume; empty when it can.
func shareable(p *cdi.StorageProfile) string {
	var modes []string
	for _, set := range p.Status.ClaimPropertySets {
		for _, mode := range set.AccessModes {
			if mode == corev1.ReadWriteMany {
				return ""
			}
			if !slices.Contains(modes, string(mode)) {
				modes = append(modes, string(mode))
			}
		}
	}
	if len(modes) == 0 {
		return fmt.Sprintf("whether storage class %s can be shared is not known: its StorageProfile names no access modes; an operator sets spec.claimPropertySets there", p.Name)
	}
	return fmt.Sprintf("storage class %s cannot be shared: it offers %s and not ReadWriteMany; leave shared out, or name another class", p.Name, strings.Join(modes, ", "))
}

// defaultClass is the class of claims that name none: the one for virtual machines first.
func defaultClass(all []storagev1.StorageClass) string {
	for _, annotation := range []string{"storageclass.kubevirt.io/is-default-virt-class", "storageclass.kubernetes.io/is-default-class"} {
		for i := range all {
			if all[i].Annotations[annotation] == "true" {
				return all[i].Name
			}
		}
	}
	return ""
}

func (k *Keeper) class(req *workerv1.ApplyVolumeRequest) string {
	if req.StorageClass != "" {
		return req.StorageClass
	}
	return k.o.StorageClass
}

// render is the volume's DataVolume. It has no owner: nothing takes it along.
func (k *Keeper) render(req *workerv1.ApplyVolumeRequest) *cdi.DataVolume {
	labels := map[string]string{
		label.ManagedBy: label.Manager, label.Network: k.o.Network, label.Rack: k.o.Rack, label.Volume: req.VolumeId,
	}
	if req.ProjectId != "" {
		labels[label.Project] = label.Safe(req.ProjectId)
	}
	storage := &cdi.StorageSpec{
		AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
		Resources: corev1.VolumeResourceRequirements{
			Requests: corev1.ResourceList{corev1.ResourceStorage: *resource.NewQuantity(int64(req.SizeGib)<<30, resource.BinarySI)},
		},
	}
	if class := k.class(req); class != "" {
		storage.StorageClassName = &class
	}
	switch {
	case req.Shared:
		// How a class shares is in its profile.
		storage.AccessModes[0] = corev1.ReadWriteMany
	case k.o.VolumeMode != "" && (req.StorageClass == "" || req.StorageClass == k.o.StorageClass):
		mode := corev1.PersistentVolumeMode(k.o.VolumeMode)
		storage.VolumeMode = &mode
	}
	return &cdi.DataVolume{
		ObjectMeta: metav1.ObjectMeta{Name: req.VolumeId, Labels: labels, Annotations: map[string]string{label.VolumeName: req.Name}},
		Spec:       cdi.DataVolumeSpec{Source: &cdi.DataVolumeSource{Blank: &cdi.DataVolumeBlankImage{}}, Storage: storage},
	}
}

// Delete removes a volume with what is on it. It returns once the cluster was told;
// Statuses says when it is gone. Deleting what is absent is no error.
func (k *Keeper) Delete(ctx context.Context, id string) error {
	if err := k.o.Writable(); err != nil {
		return err
	}
	if !label.ID(id) {
		return nil // nothing of that name was ever made
	}
	if users := k.o.Users(id); len(users) > 0 {
		return fault.New(fault.FailedPrecondition, "volume %s is not deleted: attempt %s uses it", id, strings.Join(users, ", "))
	}
	ctx, cancel := context.WithTimeout(ctx, 2*callTimeout)
	defer cancel()
	volumes := k.o.Client.CDI.DataVolumes(k.o.Client.Namespace)
	dv, err := volumes.Get(ctx, id, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return k.deleteBare(ctx, id)
	case err != nil:
		return fault.Wrap(fault.Unavailable, err, "look for volume %s: %s", id, cluster.Words(err))
	}
	if why := k.foreign(dv); why != "" {
		return fault.New(fault.FailedPrecondition, "volume %s is not deleted: %s", id, why)
	}
	if dv.DeletionTimestamp != nil {
		return nil
	}
	background := metav1.DeletePropagationBackground
	err = volumes.Delete(ctx, id, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &dv.UID}, PropagationPolicy: &background})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fault.Wrap(fault.Unavailable, err, "delete volume %s: %s", id, cluster.Words(err))
	}
	k.o.Log.Info("deleting a volume with what is on it", "volume", id, "uid", dv.UID)
	return nil
}

// deleteBare removes what is left of a volume whose DataVolume was taken from over its
// claim: nothing else would ever remove it.
func (k *Keeper) deleteBare(ctx context.Context, id string) error {
	pvc, ok := k.o.View.Volume(id)
	if !ok || pvc.DeletionTimestamp != nil || !k.claims(pvc) {
		return nil
	}
	uid := pvc.UID
	err := k.o.Client.Core.PersistentVolumeClaims(k.o.Client.Namespace).Delete(ctx, id, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &uid}})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fault.Wrap(fault.Unavailable, err, "delete the claim of volume %s: %s", id, cluster.Words(err))
	}
	k.o.Log.Info("deleting the claim of a volume without a DataVolume", "volume", id, "uid", uid)
	return nil
}

// claims reports whether a claim is a volume's of this rack.
func (k *Keeper) claims(pvc *corev1.PersistentVolumeClaim) bool {
	id := pvc.Labels[label.Volume]
	return id != "" && id == pvc.Name && pvc.Labels[label.Rack] == k.o.Rack && pvc.Labels[label.Network] == k.o.Network
}

// Statuses are the volumes that the cluster holds something of, by id.
func (k *Keeper) Statuses() []*workerv1.VolumeStatus {
	found := map[string]*workerv1.VolumeStatus{}
	for _, dv := range k.o.View.DataVolumes() {
		if id := dv.Labels[label.Volume]; id != "" && id == dv.Name {
			found[id] = judge(dv)
		}
	}
	for _, pvc := range k.o.View.Volumes() {
		if !k.claims(pvc) {
			continue
		}
		id := pvc.Name
		s := found[id]
		if s == nil {
			// What is on it is there until its claim is gone, too.
			s = &workerv1.VolumeStatus{VolumeId: id, Message: "its DataVolume was removed, its PersistentVolumeClaim is still there"}
			found[id] = s
		}
		if pvc.Spec.StorageClassName != nil {
			s.StorageClass = *pvc.Spec.StorageClassName
		}
		if pvc.DeletionTimestamp != nil {
			s.Deleting = true
		}
	}
	out := make([]*workerv1.VolumeStatus, 0, len(found))
	for _, s := range found {
		out = append(out, s)
	}
	slices.SortFunc(out, func(a, b *workerv1.VolumeStatus) int { return strings.Compare(a.VolumeId, b.VolumeId) })
	return out
}

// hopeless are reasons of CDI that no waiting cures.
var hopeless = []string{"ErrClaimNotValid", "ErrIncompatiblePVC", "ErrClaimLost", "ClaimMisbound"}

// judge is a volume as its DataVolume shows it. CDI may show a missing class or an
// exceeded quota for long and then go on, so that these stay words.
func judge(dv *cdi.DataVolume) *workerv1.VolumeStatus {
	s := &workerv1.VolumeStatus{VolumeId: dv.Name, Deleting: dv.DeletionTimestamp != nil}
	if c := dv.Spec.Storage; c != nil && c.StorageClassName != nil {
		s.StorageClass = *c.StorageClassName
	}
	var words []string
	for _, c := range dv.Status.Conditions {
		if c.Status == corev1.ConditionTrue {
			continue
		}
		if text := strings.TrimSpace(c.Reason + " " + c.Message); text != "" {
			words = append(words, text)
		}
		s.Failed = s.Failed || slices.Contains(hopeless, c.Reason)
	}
	switch dv.Status.Phase {
	case cdi.Succeeded:
		s.Usable = !s.Failed
	case cdi.WaitForFirstConsumer, cdi.PendingPopulation:
		s.Usable, s.Message = true, "its storage is made where its first VM runs"
	case cdi.Failed:
		s.Failed = true
	}
	if !s.Usable || s.Failed {
		s.Message = cluster.Wordsf("%s", strings.TrimSpace(strings.Join(append([]string{string(dv.Status.Phase)}, words...), "; ")))
	}
	return s
}
