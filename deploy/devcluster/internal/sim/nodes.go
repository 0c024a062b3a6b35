package sim

import (
	"context"
	"fmt"
	"hash/fnv"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kubevirtv1 "kubevirt.io/api/core/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/cosmicac/cosmicac/deploy/devcluster/internal/config"
	"github.com/cosmicac/cosmicac/deploy/devcluster/internal/fault"
)

// nodes plays kubelet's node status, the device plugin and virt-handler's heartbeat for every simulated node.
type nodes struct{ *world }

// beat is the heartbeat's period; KubeVirt calls a node dead after five minutes without one.
const beat = time.Minute

func (n *nodes) add(mgr ctrl.Manager) error {
	return ctrl.NewControllerManagedBy(mgr).Named("simulated-nodes").
		For(&corev1.Node{}, builder.WithPredicates(predicate.NewPredicateFuncs(simulated))).
		WatchesRawSource(source.Channel(n.faults.nodes, forward{})).
		WithOptions(controller.Options{MaxConcurrentReconciles: 4}).
		Complete(n)
}

func simulated(o client.Object) bool { return o.GetLabels()[Simulated] == "true" }

func nodeName(p config.Pool, i int) string { return fmt.Sprintf("%s-gpu-%02d", p.Name, i) }

// ensure makes the nodes of all pools and removes those of pools that are no more. A node that somebody deleted comes
// back only here, at a start, as a kubelet registers only then.
func (n *nodes) ensure(ctx context.Context) error {
	want := map[string]bool{}
	for _, p := range n.options.Pools {
		for i := range p.Nodes {
			name := nodeName(p, i)
			if n.faults.has(fault.NodeDeleted, name) {
				continue
			}
			want[name] = true
			node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: nodeLabels(p, name)}}
			if err := n.Create(ctx, node); err != nil && !apierrors.IsAlreadyExists(err) {
				return err
			}
		}
	}
	var all corev1.NodeList
	if err := n.live.List(ctx, &all, client.MatchingLabels{Simulated: "true"}); err != nil {
		return err
	}
	for i := range all.Items {
		node := &all.Items[i]
		if !want[node.Name] {
			n.log.Info("simulated node is of no pool any more and is removed", "node", node.Name)
			if err := n.Delete(ctx, node); client.IgnoreNotFound(err) != nil {
				return err
			}
		}
	}
	return n.settled(ctx, want)
}

// settled waits until the reconciler brought every wanted node up, so that "ready" is true of the whole cluster.
func (n *nodes) settled(ctx context.Context, want map[string]bool) error {
	for deadline := time.Now().Add(2 * time.Minute); ; {
		var all corev1.NodeList
		if err := n.live.List(ctx, &all, client.MatchingLabels{Simulated: "true"}); err != nil {
			return err
		}
		up := 0
		for _, node := range all.Items {
			if want[node.Name] && len(node.Status.Capacity) > 0 && !hasStartupTaint(&node) {
				up++
			}
		}
		if up == len(want) {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("only %d of %d nodes came up", up, len(want))
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

func (n *nodes) pool(name string) (config.Pool, bool) {
	for _, p := range n.options.Pools {
		for i := range p.Nodes {
			if nodeName(p, i) == name {
				return p, true
			}
		}
	}
	return config.Pool{}, false
}

func nodeLabels(p config.Pool, name string) map[string]string {
	return map[string]string{
		Simulated:                                     "true",
		"kubernetes.io/hostname":                      name,
		"kubernetes.io/arch":                          "amd64",
		"kubernetes.io/os":                            "linux",
		"topology.kubernetes.io/region":               p.Name,
		"topology.kubernetes.io/zone":                 p.Name + "-a",
		"node-role.kubernetes.io/worker":              "",
		kubevirtv1.NodeSchedulable:                    "true",
		"nvidia.com/gpu.present":                      "true",
		"nvidia.com/gpu.workload.config":              "vm-passthrough",
		"nvidia.com/gpu.deploy.vfio-manager":          "true",
		"feature.node.kubernetes.io/pci-10de.present": "true",
	}
}

// startup taints are put on by admission and the node controller; here nothing else lifts them. Taints that an
// operator sets stay.
var startupTaints = map[string]bool{"node.kubernetes.io/not-ready": true, "node.kubernetes.io/unreachable": true}

func hasStartupTaint(node *corev1.Node) bool {
	return slices.ContainsFunc(node.Spec.Taints, func(t corev1.Taint) bool { return startupTaints[t.Key] })
}

// Reconcile brings one node's taints, labels, heartbeat and status to what they should be now.
func (n *nodes) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	p, ok := n.pool(req.Name)
	if !ok {
		return ctrl.Result{}, nil
	}
	node := &corev1.Node{}
	err := n.Get(ctx, req.NamespacedName, node)
	if client.IgnoreNotFound(err) != nil {
		return ctrl.Result{}, err
	}
	if done, err := n.presence(ctx, node, p, req.Name, err == nil); done || err != nil {
		return ctrl.Result{}, err
	}
	dead := n.faults.dead(node.Name)
	if err := n.meta(ctx, node, p, dead); err != nil {
		return ctrl.Result{}, ignoreRace(err)
	}
	if err := n.status(ctx, node, p, dead); err != nil {
		return ctrl.Result{}, ignoreRace(err)
	}
	return ctrl.Result{RequeueAfter: beat}, nil
}

// presence deletes and registers a node as its switch says. done is true when there is nothing to bring up to date.
func (n *nodes) presence(ctx context.Context, node *corev1.Node, p config.Pool, name string, there bool) (done bool, err error) {
	away := n.faults.has(fault.NodeDeleted, name)
	n.faults.mu.Lock()
	back := n.faults.gone[name] && !away
	if away {
		n.faults.gone[name] = true
	} else {
		delete(n.faults.gone, name)
	}
	n.faults.mu.Unlock()
	switch {
	case away && there:
		n.log.Info("simulated node is deleted, as switched", "node", name)
		return true, client.IgnoreNotFound(n.Delete(ctx, node))
	case back && !there:
		n.log.Info("simulated node registers again", "node", name)
		err := n.Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: nodeLabels(p, name)}})
		if apierrors.IsAlreadyExists(err) {
			err = nil
		}
		return true, err
	}
	return !there, nil
}

func (n *nodes) meta(ctx context.Context, node *corev1.Node, p config.Pool, dead bool) error {
	before := node.DeepCopy()
	if node.Labels == nil {
		node.Labels = map[string]string{}
	}
	schedulable := node.Labels[kubevirtv1.NodeSchedulable]
	maps.Copy(node.Labels, nodeLabels(p, node.Name))
	if schedulable != "" {
		node.Labels[kubevirtv1.NodeSchedulable] = schedulable // may be set to false by an operator or a test
	}
	node.Spec.Taints = slices.DeleteFunc(node.Spec.Taints, func(t corev1.Taint) bool { return startupTaints[t.Key] })
	if dead {
		node.Spec.Taints = append(node.Spec.Taints,
			corev1.Taint{Key: "node.kubernetes.io/unreachable", Effect: corev1.TaintEffectNoSchedule})
	} else if last, err := time.Parse(time.RFC3339, node.Annotations[kubevirtv1.VirtHandlerHeartbeat]); err != nil || time.Since(last) >= beat/2 {
		if node.Annotations == nil {
			node.Annotations = map[string]string{}
		}
		node.Annotations[kubevirtv1.VirtHandlerHeartbeat] = time.Now().UTC().Format(time.RFC3339)
	}
	if reflect.DeepEqual(before.ObjectMeta, node.ObjectMeta) && reflect.DeepEqual(before.Spec, node.Spec) {
		return nil
	}
	return n.Patch(ctx, node, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
}

func (n *nodes) status(ctx context.Context, node *corev1.Node, p config.Pool, dead bool) error {
	before := node.DeepCopy()
	count := func(i int) resource.Quantity { return *resource.NewQuantity(int64(i), resource.DecimalSI) }
	capacity := corev1.ResourceList{
		corev1.ResourceCPU: count(p.CPUs), corev1.ResourceMemory: p.Memory, corev1.ResourcePods: count(250),
		corev1.ResourceEphemeralStorage: resource.MustParse("1800Gi"),
		// What KubeVirt's own device plugin gives to every node.
		"devices.kubevirt.io/kvm": count(1000), "devices.kubevirt.io/tun": count(1000), "devices.kubevirt.io/vhost-net": count(1000),
	}
	devices := map[string]int{p.Resource: p.GPUs}
	if p.HostDevice != "" {
		devices[p.HostDevice] = p.HostDevices
	}
	if p.Bridge != "" {
		capacity[corev1.ResourceName("ovs-cni.network.kubevirt.io/"+p.Bridge)] = count(1000) // as ovs-cni's marker does
	}
	if n.faults.has(fault.ResourceRenamed, node.Name) {
		delete(devices, p.Resource)
		devices[strings.ToLower(p.Resource)] = p.GPUs
	}
	allocatable := capacity.DeepCopy()
	for name, i := range devices {
		capacity[corev1.ResourceName(name)], allocatable[corev1.ResourceName(name)] = count(i), count(i)
		if n.faults.has(fault.AllocatableZero, node.Name) {
			allocatable[corev1.ResourceName(name)] = count(0)
		}
	}
	node.Status.Capacity, node.Status.Allocatable = capacity, allocatable
	node.Status.NodeInfo = corev1.NodeSystemInfo{
		MachineID: node.Name, SystemUUID: node.Name, BootID: node.Name, KernelVersion: "6.8.0-simulated", OSImage: "simulated",
		ContainerRuntimeVersion: "simulated://0", KubeletVersion: "v1.33.0-simulated", KubeProxyVersion: "", OperatingSystem: "linux", Architecture: "amd64",
	}
	node.Status.Addresses = []corev1.NodeAddress{
		{Type: corev1.NodeInternalIP, Address: address("172.20", node.Name)}, {Type: corev1.NodeHostName, Address: node.Name},
	}
	ready, reason, message := corev1.ConditionTrue, "KubeletReady", "simulated kubelet is posting ready status"
	if dead {
		ready, reason, message = corev1.ConditionUnknown, "NodeStatusUnknown", "Kubelet stopped posting node status. (simulated)"
	}
	setNodeCondition(node, corev1.NodeReady, ready, reason, message)
	for _, t := range []corev1.NodeConditionType{corev1.NodeMemoryPressure, corev1.NodeDiskPressure, corev1.NodePIDPressure} {
		setNodeCondition(node, t, corev1.ConditionFalse, "Simulated", "simulated")
	}
	if reflect.DeepEqual(before.Status, node.Status) {
		return nil
	}
	return n.Status().Update(ctx, node)
}

func setNodeCondition(node *corev1.Node, t corev1.NodeConditionType, s corev1.ConditionStatus, reason, message string) {
	for i := range node.Status.Conditions {
		c := &node.Status.Conditions[i]
		if c.Type != t {
			continue
		}
		if c.Status != s {
			c.LastTransitionTime = now()
		}
		// A real kubelet reports each ten seconds; the simulated one with every beat.
		if c.Status != s || time.Since(c.LastHeartbeatTime.Time) > beat/2 {
			c.LastHeartbeatTime = now()
		}
		c.Status, c.Reason, c.Message = s, reason, message
		return
	}
	node.Status.Conditions = append(node.Status.Conditions, corev1.NodeCondition{
		Type: t, Status: s, Reason: reason, Message: message, LastHeartbeatTime: now(), LastTransitionTime: now(),
	})
}

// address derives an IPv4 address from a name. Nothing answers there: the network is simulated.
func address(prefix, name string) string {
	h := fnv.New32a()
	h.Write([]byte(name))
	s := h.Sum32()
	return fmt.Sprintf("%s.%d.%d", prefix, s>>8&0xff, 1+s%254)
}

// ignoreRace drops the errors that only say the cache was behind: the object's next event brings another try.
func ignoreRace(err error) error {
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return nil
	}
	return err
}
