package sim

import (
	"context"
	"maps"
	"sync"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/ptr"
	kubevirtv1 "kubevirt.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/cosmicac/cosmicac/deploy/devcluster/internal/fault"
)

// faults are the switches of package fault as last read.
type faults struct {
	w     *world
	tell  func(map[string]string) // hears every reading; may be nil
	nodes chan event.GenericEvent // every simulated node, when a switch changed
	pods  chan event.GenericEvent
	vmis  chan event.GenericEvent

	mu  sync.Mutex
	set map[string]string
	// gone are the nodes that node-deleted took away and that come back when it ends.
	gone map[string]bool
}

func newFaults(w *world) *faults {
	return &faults{
		w: w, nodes: make(chan event.GenericEvent, 4096), pods: make(chan event.GenericEvent, 4096),
		vmis: make(chan event.GenericEvent, 4096), set: map[string]string{}, gone: map[string]bool{}, tell: w.options.Switched,
	}
}

// has says whether a fault is switched on for a node, a disk or a resource.
func (f *faults) has(name, target string) bool {
	s, ok := fault.Find(name)
	f.mu.Lock()
	defer f.mu.Unlock()
	return ok && s.Matches(f.set[name], target)
}

// on says whether a fault is switched on for anything.
func (f *faults) on(name string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.set[name] != ""
}

// dead says whether kubelet and virt-handler of a node are silent.
func (f *faults) dead(node string) bool {
	return f.has(fault.NodeNotReady, node) || f.has(fault.NodeLost, node)
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
	err := f.w.live.Get(ctx, types.NamespacedName{Namespace: fault.Namespace, Name: fault.ConfigMap}, cm)
	if client.IgnoreNotFound(err) != nil {
		return // keep the last known switches
	}
	f.mu.Lock()
	same := maps.Equal(f.set, cm.Data) || len(f.set) == 0 && len(cm.Data) == 0
	f.set = cm.Data
	f.mu.Unlock()
	if f.tell != nil {
		f.tell(cm.Data)
	}
	if err := f.webhook(ctx); err != nil {
		f.w.log.Warn("simulated webhook is not switched", "error", err)
	}
	if same {
		return
	}
	f.w.log.Warn("simulated faults changed", "faults", cm.Data)
	for name := range cm.Data {
		if _, ok := fault.Find(name); !ok {
			f.w.log.Warn("there is no such fault switch; it does nothing", "switch", name)
		}
	}
	for _, p := range f.w.options.Pools {
		for i := range p.Nodes {
			send(f.nodes, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName(p, i)}}) // also those that are deleted
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

// webhook makes KubeVirt's admission unreachable while its switch is on: the API server then refuses VMIs in its own
// words.
func (f *faults) webhook(ctx context.Context) error {
	hook := &admissionv1.ValidatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: "simulated-virt-api-down", Labels: map[string]string{Simulated: "true"}}}
	err := f.w.live.Get(ctx, client.ObjectKeyFromObject(hook), hook)
	if client.IgnoreNotFound(err) != nil {
		return err
	}
	there, wanted := err == nil, f.has(fault.WebhookDown, "*")
	switch {
	case there && !wanted:
		return client.IgnoreNotFound(f.w.Delete(ctx, hook))
	case !there && wanted:
		hook.Webhooks = []admissionv1.ValidatingWebhook{{
			Name: "virtualmachineinstances-create-validator.kubevirt.io", AdmissionReviewVersions: []string{"v1"},
			ClientConfig: admissionv1.WebhookClientConfig{URL: ptr.To("https://127.0.0.1:1/virtualmachineinstances-validate-create")},
			SideEffects:  ptr.To(admissionv1.SideEffectClassNone), FailurePolicy: ptr.To(admissionv1.Fail), TimeoutSeconds: ptr.To(int32(2)),
			Rules: []admissionv1.RuleWithOperations{{
				Operations: []admissionv1.OperationType{admissionv1.Create},
				Rule:       admissionv1.Rule{APIGroups: []string{"kubevirt.io"}, APIVersions: []string{"v1"}, Resources: []string{"virtualmachineinstances"}},
			}},
		}}
		return f.w.Create(ctx, hook)
	}
	return nil
}
