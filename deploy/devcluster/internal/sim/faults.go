package sim

import (
	"context"
	"maps"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	kubevirtv1 "kubevirt.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// The fault switches: keys of the ConfigMap kube-system/cosmicac-devcluster-faults, read live. A value is a list of
// node names split by spaces or commas, or * for all nodes. An absent key is no fault.
const (
	faultMap = "cosmicac-devcluster-faults"

	faultAllocatableZero = "allocatable-zero"  // the device plugin offers no GPUs; running VMs go on
	faultNotReady        = "node-not-ready"    // node and virt-handler say nothing any more; pods are neither started nor ended
	faultRejectPods      = "reject-pods"       // new pods fail with UnexpectedAdmissionError
	faultStuckTerminate  = "stuck-terminating" // deleted pods stay, though their VM went down
)

type faults struct {
	w     *world
	nodes chan event.GenericEvent // every simulated node, when a switch changed
	pods  chan event.GenericEvent
	vmis  chan event.GenericEvent

	mu  sync.Mutex
	set map[string]string
}

func newFaults(w *world) *faults {
	return &faults{
		w: w, nodes: make(chan event.GenericEvent, 4096), pods: make(chan event.GenericEvent, 4096),
		vmis: make(chan event.GenericEvent, 4096), set: map[string]string{},
	}
}

// has says whether a fault is switched on for a node.
func (f *faults) has(fault, node string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, n := range strings.FieldsFunc(f.set[fault], func(r rune) bool { return r == ',' || r == ' ' || r == '\n' }) {
		if n == "*" || n == node {
			return true
		}
	}
	return false
}

// Start reads the switches until ctx ends.
func (f *faults) Start(ctx context.Context) error {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		f.read(ctx)
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

func (f *faults) read(ctx context.Context) {
	cm := &corev1.ConfigMap{}
	err := f.w.live.Get(ctx, types.NamespacedName{Namespace: metav1.NamespaceSystem, Name: faultMap}, cm)
	if client.IgnoreNotFound(err) != nil {
		return // keep the last known switches
	}
	f.mu.Lock()
	same := maps.Equal(f.set, cm.Data) || len(f.set) == 0 && len(cm.Data) == 0
	f.set = cm.Data
	f.mu.Unlock()
	if same {
		return
	}
	f.w.log.Warn("simulated faults changed", "faults", cm.Data)
	var nodes corev1.NodeList
	if f.w.List(ctx, &nodes) == nil {
		for i := range nodes.Items {
			send(f.nodes, &nodes.Items[i])
		}
	}
	var pods corev1.PodList
	if f.w.List(ctx, &pods) == nil {
		for i := range pods.Items {
			send(f.pods, &pods.Items[i])
		}
	}
	var vmis kubevirtv1.VirtualMachineInstanceList
	if f.w.List(ctx, &vmis) == nil {
		for i := range vmis.Items {
			send(f.vmis, &vmis.Items[i])
		}
	}
}

// send never blocks: objects come round again by themselves.
func send(c chan event.GenericEvent, o client.Object) {
	select {
	case c <- event.GenericEvent{Object: o}:
	default:
	}
}

// forward puts the object of a generic event into the queue.
type forward struct{ handler.Funcs }

func (forward) Generic(_ context.Context, e event.GenericEvent, q workqueue.TypedRateLimitingInterface[reconcile.Request]) {
	q.Add(reconcile.Request{NamespacedName: client.ObjectKeyFromObject(e.Object)})
}
