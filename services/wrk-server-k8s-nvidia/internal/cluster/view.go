package cluster

import (
	"context"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	kubevirt "kubevirt.io/api/core/v1"
	cdi "kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1"

	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/label"
)

// defaultRelist is how old a list may get before it is taken anew.
const defaultRelist = 5 * time.Minute

// Change tells that something about these was touched; empty fields say nothing.
type Change struct {
	// Kind of the object, as in a manifest.
	Kind string
	// Attempt, Job are ids from the object's labels.
	Attempt, Job string
	// Node is the name of a cluster node whose state may matter.
	Node string
}

// ViewOptions say what is mirrored.
type ViewOptions struct {
	// Rack and Network are the values of our labels on our own objects.
	Rack, Network string
	// NodeSelector picks the rack's nodes; empty for all.
	NodeSelector string
	// Relist is the greatest age of a list; 5 minutes when zero.
	Relist time.Duration
	Log    hclog.Logger
	// Changed is called for each touched object, in order per kind, from the
	// watching goroutines: it must not block. May be nil.
	Changed func(Change)
}

// View mirrors what decisions need: the rack's nodes, every pod that is not
// over, and our own objects. What it gives are shared objects: read only.
type View struct {
	namespace string
	nodes     *mirror[*corev1.Node]
	pods      *mirror[*corev1.Pod]
	vmis      *mirror[*kubevirt.VirtualMachineInstance]
	disks     *mirror[*cdi.DataVolume]
	claims    *mirror[*corev1.PersistentVolumeClaim]
	anchors   *mirror[*corev1.ConfigMap]
	kubevirts *mirror[*kubevirt.KubeVirt]
}

// NewView makes a view; Run fills it.
func NewView(c *Client, o ViewOptions) *View {
	if o.Relist == 0 {
		o.Relist = defaultRelist
	}
	if o.Log == nil {
		o.Log = hclog.NewNullLogger()
	}
	tell := o.Changed
	if tell == nil {
		tell = func(Change) {}
	}
	ours := label.Rack + "=" + o.Rack + "," + label.Network + "=" + o.Network
	ns := c.Namespace
	v := &View{namespace: ns}
	v.nodes = newMirror(source[*corev1.Node]{
		kind: "Node", labels: o.NodeSelector, strip: stripNode,
		list: func(ctx context.Context, lo metav1.ListOptions) (page[*corev1.Node], error) {
			l, err := c.Core.Nodes().List(ctx, lo)
			if err != nil {
				return page[*corev1.Node]{}, err
			}
			return pageOf(l.ListMeta, l.Items), nil
		},
		watch: func(ctx context.Context, lo metav1.ListOptions) (watch.Interface, error) {
			return c.Core.Nodes().Watch(ctx, lo)
		},
	}, o.Relist, o.Log, func(n *corev1.Node) { tell(Change{Kind: "Node", Node: n.Name}) })
	v.pods = newMirror(source[*corev1.Pod]{
		kind: "Pod", fields: "status.phase!=Succeeded,status.phase!=Failed", strip: stripPod,
		list: func(ctx context.Context, lo metav1.ListOptions) (page[*corev1.Pod], error) {
			l, err := c.Core.Pods(metav1.NamespaceAll).List(ctx, lo)
			if err != nil {
				return page[*corev1.Pod]{}, err
			}
			return pageOf(l.ListMeta, l.Items), nil
		},
		watch: func(ctx context.Context, lo metav1.ListOptions) (watch.Interface, error) {
			return c.Core.Pods(metav1.NamespaceAll).Watch(ctx, lo)
		},
	}, o.Relist, o.Log, func(p *corev1.Pod) { tell(changeOf("Pod", p)) })
	v.vmis = newMirror(source[*kubevirt.VirtualMachineInstance]{
		kind: "VirtualMachineInstance", labels: ours, strip: stripVMI,
		list: func(ctx context.Context, lo metav1.ListOptions) (page[*kubevirt.VirtualMachineInstance], error) {
			l, err := c.KubeVirt.VirtualMachineInstances(ns).List(ctx, lo)
			if err != nil {
				return page[*kubevirt.VirtualMachineInstance]{}, err
			}
			return pageOf(l.ListMeta, l.Items), nil
		},
		watch: func(ctx context.Context, lo metav1.ListOptions) (watch.Interface, error) {
			return c.KubeVirt.VirtualMachineInstances(ns).Watch(ctx, lo)
		},
	}, o.Relist, o.Log, func(x *kubevirt.VirtualMachineInstance) { tell(changeOf("VirtualMachineInstance", x)) })
	v.disks = newMirror(source[*cdi.DataVolume]{
		kind: "DataVolume", labels: ours, strip: stripped[*cdi.DataVolume],
		list: func(ctx context.Context, lo metav1.ListOptions) (page[*cdi.DataVolume], error) {
			l, err := c.CDI.DataVolumes(ns).List(ctx, lo)
			if err != nil {
				return page[*cdi.DataVolume]{}, err
			}
			return pageOf(l.ListMeta, l.Items), nil
		},
		watch: func(ctx context.Context, lo metav1.ListOptions) (watch.Interface, error) {
			return c.CDI.DataVolumes(ns).Watch(ctx, lo)
		},
	}, o.Relist, o.Log, func(x *cdi.DataVolume) { tell(changeOf("DataVolume", x)) })
	v.claims = newMirror(source[*corev1.PersistentVolumeClaim]{
		kind: "PersistentVolumeClaim", strip: stripped[*corev1.PersistentVolumeClaim],
		list: func(ctx context.Context, lo metav1.ListOptions) (page[*corev1.PersistentVolumeClaim], error) {
			l, err := c.Core.PersistentVolumeClaims(ns).List(ctx, lo)
			if err != nil {
				return page[*corev1.PersistentVolumeClaim]{}, err
			}
			return pageOf(l.ListMeta, l.Items), nil
		},
		watch: func(ctx context.Context, lo metav1.ListOptions) (watch.Interface, error) {
			return c.Core.PersistentVolumeClaims(ns).Watch(ctx, lo)
		},
	}, o.Relist, o.Log, func(x *corev1.PersistentVolumeClaim) { tell(changeOf("PersistentVolumeClaim", x)) })
	v.anchors = newMirror(source[*corev1.ConfigMap]{
		kind: "ConfigMap", labels: ours + "," + label.ManagedBy + "=" + label.Manager, strip: stripped[*corev1.ConfigMap],
		list: func(ctx context.Context, lo metav1.ListOptions) (page[*corev1.ConfigMap], error) {
			l, err := c.Core.ConfigMaps(ns).List(ctx, lo)
			if err != nil {
				return page[*corev1.ConfigMap]{}, err
			}
			return pageOf(l.ListMeta, l.Items), nil
		},
		watch: func(ctx context.Context, lo metav1.ListOptions) (watch.Interface, error) {
			return c.Core.ConfigMaps(ns).Watch(ctx, lo)
		},
	}, o.Relist, o.Log, func(x *corev1.ConfigMap) { tell(changeOf("ConfigMap", x)) })
	v.kubevirts = newMirror(source[*kubevirt.KubeVirt]{
		kind: "KubeVirt", strip: stripped[*kubevirt.KubeVirt],
		list: func(ctx context.Context, lo metav1.ListOptions) (page[*kubevirt.KubeVirt], error) {
			l, err := c.KubeVirt.KubeVirts(metav1.NamespaceAll).List(ctx, lo)
			if err != nil {
				return page[*kubevirt.KubeVirt]{}, err
			}
			return pageOf(l.ListMeta, l.Items), nil
		},
		watch: func(ctx context.Context, lo metav1.ListOptions) (watch.Interface, error) {
			return c.KubeVirt.KubeVirts(metav1.NamespaceAll).Watch(ctx, lo)
		},
	}, o.Relist, o.Log, func(*kubevirt.KubeVirt) { tell(Change{Kind: "KubeVirt"}) })
	return v
}

// Run lists and watches until ctx ends.
func (v *View) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	for _, run := range []func(context.Context){
		v.nodes.run, v.pods.run, v.vmis.run, v.disks.run, v.claims.run, v.anchors.run, v.kubevirts.run,
	} {
		wg.Go(func() { run(ctx) })
	}
	wg.Wait()
	return nil
}

// Hurry has whatever waits between two tries tried at once: the cluster answers again.
func (v *View) Hurry() {
	for _, kick := range []func(){
		v.nodes.kick, v.pods.kick, v.vmis.kick, v.disks.kick, v.claims.kick, v.anchors.kick, v.kubevirts.kick,
	} {
		kick()
	}
}

// Synced is true once everything was listed once.
func (v *View) Synced() bool {
	return v.nodes.hasSynced() && v.pods.hasSynced() && v.vmis.hasSynced() && v.disks.hasSynced() &&
		v.claims.hasSynced() && v.anchors.hasSynced() && v.kubevirts.hasSynced()
}

// Nodes are the rack's nodes, in no order.
func (v *View) Nodes() []*corev1.Node { return v.nodes.all() }

// Node finds one of the rack's nodes.
func (v *View) Node(name string) (*corev1.Node, bool) { return v.nodes.get("", name) }

// Pods are the cluster's pods that are neither Succeeded nor Failed, cut down
// to what capacity needs.
func (v *View) Pods() []*corev1.Pod { return v.pods.all() }

// VMIs are the rack's virtual machines.
func (v *View) VMIs() []*kubevirt.VirtualMachineInstance { return v.vmis.all() }

// VMI finds one of the rack's virtual machines.
func (v *View) VMI(name string) (*kubevirt.VirtualMachineInstance, bool) {
	return v.vmis.get(v.namespace, name)
}

// DataVolumes are the rack's root disks.
func (v *View) DataVolumes() []*cdi.DataVolume { return v.disks.all() }

// DataVolume finds one of the rack's root disks.
func (v *View) DataVolume(name string) (*cdi.DataVolume, bool) { return v.disks.get(v.namespace, name) }

// Volumes are the claims for storage in the namespace, whoever's they are.
func (v *View) Volumes() []*corev1.PersistentVolumeClaim { return v.claims.all() }

// Volume finds one claim for storage.
func (v *View) Volume(name string) (*corev1.PersistentVolumeClaim, bool) {
	return v.claims.get(v.namespace, name)
}

// Anchors are the anchors of the rack's attempts.
func (v *View) Anchors() []*corev1.ConfigMap { return v.anchors.all() }

// Anchor finds the anchor of an attempt.
func (v *View) Anchor(attempt string) (*corev1.ConfigMap, bool) {
	return v.anchors.get(v.namespace, attempt)
}

// KubeVirt is the installation's own object; false when there is none.
func (v *View) KubeVirt() (*kubevirt.KubeVirt, bool) {
	for _, k := range v.kubevirts.all() {
		return k, true
	}
	return nil, false
}

func changeOf(kind string, o metav1.Object) Change {
	l := o.GetLabels()
	return Change{Kind: kind, Attempt: l[label.Attempt], Job: l[label.Job]}
}

func pageOf[T any, P interface {
	*T
	metav1.Object
}](meta metav1.ListMeta, items []T) page[P] {
	p := page[P]{resourceVersion: meta.ResourceVersion, more: meta.Continue, items: make([]P, 0, len(items))}
	for i := range items {
		p.items = append(p.items, P(&items[i]))
	}
	return p
}

// stripped drops what takes space and is never read.
func stripped[T metav1.Object](o T) T {
	o.SetManagedFields(nil)
	return o
}

func stripVMI(x *kubevirt.VirtualMachineInstance) *kubevirt.VirtualMachineInstance {
	x.ManagedFields = nil
	x.Status.VolumeStatus, x.Status.GuestOSInfo = nil, kubevirt.VirtualMachineInstanceGuestOSInfo{}
	return x
}

func stripNode(n *corev1.Node) *corev1.Node {
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{
			Name: n.Name, UID: n.UID, ResourceVersion: n.ResourceVersion, Labels: n.Labels, DeletionTimestamp: n.DeletionTimestamp,
		},
		Spec: corev1.NodeSpec{Unschedulable: n.Spec.Unschedulable, Taints: n.Spec.Taints, PodCIDRs: n.Spec.PodCIDRs},
		Status: corev1.NodeStatus{
			Capacity: n.Status.Capacity, Allocatable: n.Status.Allocatable, Conditions: n.Status.Conditions, Addresses: n.Status.Addresses,
		},
	}
}

func stripPod(p *corev1.Pod) *corev1.Pod {
	out := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: p.Namespace, Name: p.Name, UID: p.UID, ResourceVersion: p.ResourceVersion, DeletionTimestamp: p.DeletionTimestamp,
		},
		Spec:   corev1.PodSpec{NodeName: p.Spec.NodeName, Overhead: p.Spec.Overhead},
		Status: corev1.PodStatus{Phase: p.Status.Phase},
	}
	for _, k := range []string{label.KubeVirtApp, label.KubeVirtCreatedBy, label.Attempt, label.Rack, label.Job} {
		if s, ok := p.Labels[k]; ok {
			if out.Labels == nil {
				out.Labels = map[string]string{}
			}
			out.Labels[k] = s
		}
	}
	for _, c := range p.Spec.Containers {
		out.Spec.Containers = append(out.Spec.Containers, corev1.Container{Name: c.Name, Resources: corev1.ResourceRequirements{Requests: c.Resources.Requests}})
	}
	for _, c := range p.Spec.InitContainers {
		out.Spec.InitContainers = append(out.Spec.InitContainers, corev1.Container{
			Name: c.Name, RestartPolicy: c.RestartPolicy, Resources: corev1.ResourceRequirements{Requests: c.Resources.Requests},
		})
	}
	return out
}
