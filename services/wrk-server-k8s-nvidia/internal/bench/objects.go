package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/dynamic/dynamicinformer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/label"
)

// kinds are what a worker may make for a job, in the order in which an owner
// comes before what it owns.
var kinds = []schema.GroupVersionResource{
	{Version: "v1", Resource: "configmaps"},
	{Version: "v1", Resource: "secrets"},
	{Group: "networking.k8s.io", Version: "v1", Resource: "networkpolicies"},
	{Version: "v1", Resource: "services"},
	{Group: "cdi.kubevirt.io", Version: "v1beta1", Resource: "datavolumes"},
	{Group: "kubevirt.io", Version: "v1", Resource: "virtualmachineinstances"},
}

// followers are what the cluster makes of them; they count only when all is to
// be gone.
var followers = []schema.GroupVersionResource{{Version: "v1", Resource: "pods"}, {Version: "v1", Resource: "persistentvolumeclaims"}}

// objects watches everything of the network's, as the cluster tells it.
type objects struct {
	client   dynamic.Interface
	selector string
	cancel   context.CancelFunc

	mu       sync.Mutex
	there    map[string]bool // kind/name
	made     map[string]int  // by kind, since reset
	lastMade time.Time
	lastGone time.Time
	running  map[string]bool // machines
	lastRun  time.Time
	hear     func(*unstructured.Unstructured) // of each machine; called in order
}

func watchObjects(ctx context.Context, admin *rest.Config, network string) (*objects, error) {
	config := rest.CopyConfig(admin)
	config.QPS = -1
	client, err := dynamic.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	w := &objects{client: client, selector: label.Network + "=" + network, cancel: cancel, there: map[string]bool{}}
	w.reset(nil)
	factory := dynamicinformer.NewFilteredDynamicSharedInformerFactory(client, 0, namespace, func(o *metav1.ListOptions) { o.LabelSelector = w.selector })
	for _, kind := range slices.Concat(kinds, followers) {
		_, err := factory.ForResource(kind).Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
			AddFunc:    func(o any) { w.seen(kind, o, false) },
			UpdateFunc: func(_, o any) { w.seen(kind, o, false) },
			DeleteFunc: func(o any) { w.seen(kind, o, true) },
		})
		if err != nil {
			cancel()
			return nil, err
		}
	}
	factory.Start(ctx.Done())
	for kind, ok := range factory.WaitForCacheSync(ctx.Done()) {
		if !ok {
			cancel()
			return nil, fmt.Errorf("watch %s: the first list did not come", kind.Resource)
		}
	}
	return w, nil
}

func (w *objects) stop() { w.cancel() }

// reset starts the counts anew; hear is told of machines from now on.
func (w *objects) reset(hear func(*unstructured.Unstructured)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.made, w.running, w.hear = map[string]int{}, map[string]bool{}, hear
	w.lastMade, w.lastGone, w.lastRun = time.Time{}, time.Time{}, time.Time{}
}

func (w *objects) seen(kind schema.GroupVersionResource, o any, gone bool) {
	if d, ok := o.(cache.DeletedFinalStateUnknown); ok {
		o = d.Obj
	}
	is, ok := o.(*unstructured.Unstructured)
	if !ok {
		return
	}
	id, now := kind.Resource+"/"+is.GetName(), time.Now()
	w.mu.Lock()
	switch {
	case gone:
		delete(w.there, id)
		delete(w.running, id)
		w.lastGone = now
	case !w.there[id]:
		w.there[id] = true
		if slices.Contains(kinds, kind) {
			w.made[kind.Resource]++
			w.lastMade = now
		}
	}
	hear := w.hear
	machine := kind.Resource == "virtualmachineinstances"
	if phase, _, _ := unstructured.NestedString(is.Object, "status", "phase"); machine && !gone && phase == "Running" && !w.running[id] {
		w.running[id] = true
		w.lastRun = now
	}
	w.mu.Unlock()
	if machine && hear != nil {
		if gone {
			is = is.DeepCopy()
			is.SetDeletionTimestamp(&metav1.Time{Time: now})
		}
		hear(is)
	}
}

// count is how many objects there are, how many were made and run, and when
// the last of them came.
func (w *objects) count() (there, made, running int, words string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, n := range w.made {
		made += n
	}
	var parts []string
	for _, kind := range slices.Sorted(maps.Keys(w.made)) {
		parts = append(parts, fmt.Sprintf("%d %s", w.made[kind], kind))
	}
	return len(w.there), made, len(w.running), strings.Join(parts, ", ")
}

func (w *objects) times() (made, run, gone time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.lastMade, w.lastRun, w.lastGone
}

// capture reads everything that was made, a slice for each job, with its owner
// first, cut down to what a client would send.
func (w *objects) capture(ctx context.Context) ([][]*unstructured.Unstructured, error) {
	byJob := map[string][]*unstructured.Unstructured{}
	for _, kind := range kinds {
		list, err := w.client.Resource(kind).Namespace(namespace).List(ctx, metav1.ListOptions{LabelSelector: w.selector})
		if err != nil {
			return nil, fmt.Errorf("list %s: %w", kind.Resource, err)
		}
		for i := range list.Items {
			o := &list.Items[i]
			clean := map[string]any{"name": o.GetName(), "namespace": namespace}
			for _, field := range []string{"labels", "annotations", "ownerReferences"} {
				if v, ok, _ := unstructured.NestedFieldNoCopy(o.Object, "metadata", field); ok {
					clean[field] = v
				}
			}
			o.Object["metadata"] = clean
			unstructured.RemoveNestedField(o.Object, "metadata", "labels", "kubevirt.io/nodeName")
			delete(o.Object, "status")
			job := o.GetLabels()[label.Job]
			byJob[job] = append(byJob[job], o)
		}
	}
	var out [][]*unstructured.Unstructured
	for _, job := range slices.Sorted(maps.Keys(byJob)) {
		out = append(out, byJob[job])
	}
	return out, nil
}
