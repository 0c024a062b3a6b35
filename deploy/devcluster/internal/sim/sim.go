// Package sim plays what a GPU cluster has beside its control plane: device plugin, kubelet, KubeVirt's controllers,
// CDI and a volume provisioner. It stands on the real API server and the real scheduler: it never chooses a node, never
// counts a GPU, and never sees to ownership.
//
// Every part is level-triggered: it looks at the objects and the machines as they are and does the next step. Nothing
// is kept in memory that a restart would miss, save for how long a simulated wait has lasted.
package sim

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/ptr"
	kubevirtv1 "kubevirt.io/api/core/v1"
	cdiv1 "kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrlconfig "sigs.k8s.io/controller-runtime/pkg/config"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/cosmicac/cosmicac/deploy/devcluster/internal/config"
	"github.com/cosmicac/cosmicac/deploy/devcluster/internal/guest"
)

// Simulated marks every node of the simulator.
const Simulated = "cosmicac.dev/simulated"

// Simulator is the running set of simulated parts.
type Simulator struct {
	cancel context.CancelFunc
	wg     sync.WaitGroup
	died   chan error
}

// world is what the parts share.
type world struct {
	client.Client               // reads come from the cache, which may lag behind own writes
	live          client.Reader // reads from the API server, for decisions that a stale cache would spoil
	events        events.EventRecorder
	machines      *guest.Runtime
	options       config.Options
	faults        *faults
	clock         *clock
	replaced      *replaced
	log           hclog.Logger
}

func newScheme() (*runtime.Scheme, error) {
	s := runtime.NewScheme()
	return s, errors.Join(corev1.AddToScheme(s), admissionv1.AddToScheme(s), storagev1.AddToScheme(s), policyv1.AddToScheme(s), kubevirtv1.AddToScheme(s), cdiv1.AddToScheme(s))
}

// Start makes the nodes, starts the parts and returns when every node is ready for pods.
func Start(ctx context.Context, cfg *rest.Config, machines *guest.Runtime, o config.Options, log hclog.Logger) (*Simulator, error) {
	scheme, err := newScheme()
	if err != nil {
		return nil, fmt.Errorf("start the simulator: %w", err)
	}
	cfg = rest.CopyConfig(cfg)
	if cfg.QPS = -1; o.QPS > 0 {
		cfg.QPS, cfg.Burst = float32(o.QPS), 2*o.QPS
	}
	mgr, err := ctrl.NewManager(cfg, ctrl.Options{
		Scheme: scheme, Metrics: metricsserver.Options{BindAddress: "0"}, HealthProbeBindAddress: "0",
		Client: client.Options{Cache: &client.CacheOptions{DisableFor: []client.Object{
			&corev1.Secret{}, &corev1.ConfigMap{}, &kubevirtv1.KubeVirt{}, &cdiv1.CDIConfig{},
		}}},
		Cache:                   cache.Options{DefaultTransform: cache.TransformStripManagedFields()},
		Controller:              ctrlconfig.Controller{SkipNameValidation: ptr.To(true)},
		GracefulShutdownTimeout: ptr.To(time.Second),
	})
	if err != nil {
		return nil, fmt.Errorf("start the simulator: %w", err)
	}
	w := &world{
		Client: mgr.GetClient(), live: mgr.GetAPIReader(), events: mgr.GetEventRecorder("cosmicac-devcluster-simulated"),
		machines: machines, options: o, clock: newClock(), replaced: &replaced{}, log: log,
	}
	w.faults = newFaults(w)
	for _, add := range []func(ctrl.Manager) error{
		(&nodes{w}).add, (&kubelet{w}).add, (&vmis{world: w}).add, (&volumes{w}).add, (&claims{w}).add, (&disks{w}).add,
	} {
		if err := add(mgr); err != nil {
			return nil, fmt.Errorf("start the simulator: %w", err)
		}
	}
	evictions, err := newEvictions(w)
	if err != nil {
		return nil, fmt.Errorf("start the simulator: %w", err)
	}
	if err := errors.Join(mgr.Add(w.faults), mgr.Add(evictions)); err != nil {
		return nil, fmt.Errorf("start the simulator: %w", err)
	}

	run, cancel := context.WithCancel(context.WithoutCancel(ctx))
	s := &Simulator{cancel: cancel, died: make(chan error, 1)}
	s.wg.Go(func() {
		if err := mgr.Start(run); err != nil && run.Err() == nil {
			s.died <- fmt.Errorf("simulator: %w", err)
		}
	})
	if !mgr.GetCache().WaitForCacheSync(ctx) {
		s.Stop()
		return nil, errors.New("start the simulator: caches do not fill")
	}
	w.faults.read(ctx) // a node that is switched away must not be waited for
	if err := (&nodes{w}).ensure(ctx); err != nil {
		s.Stop()
		return nil, fmt.Errorf("make the simulated nodes: %w", err)
	}
	s.wg.Go(func() { (&vmis{world: w}).sweep(run) })
	return s, nil
}

// Died yields an error when the simulator ended by itself.
func (s *Simulator) Died() <-chan error { return s.died }

// Stop ends the parts; objects stay as they are.
func (s *Simulator) Stop() {
	s.cancel()
	s.wg.Wait()
}

// clock remembers when a simulated wait was first seen. After a restart a wait begins anew, which only makes it longer.
type clock struct {
	mu    sync.Mutex
	since map[types.UID]map[string]time.Time
}

func newClock() *clock { return &clock{since: map[types.UID]map[string]time.Time{}} }

// left says how much of a wait of length d remains for a thing and a step; the first question starts it.
func (c *clock) left(uid types.UID, step string, d time.Duration) time.Duration {
	return max(0, d-c.passed(uid, step))
}

func (c *clock) passed(uid types.UID, step string) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	steps := c.since[uid]
	if steps == nil {
		steps = map[string]time.Time{}
		c.since[uid] = steps
	}
	began, ok := steps[step]
	if !ok {
		began = time.Now()
		steps[step] = began
	}
	return time.Since(began)
}

func (c *clock) restart(uid types.UID, step string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.since[uid], step)
}

func (c *clock) forget(uid types.UID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.since, uid)
}

// replaced remembers, of each object that was written, the version that this wrote over. While the cache still shows that
// one there is nothing to decide: a second write would only be refused as a conflict.
type replaced struct{ versions sync.Map } // by uid

// shown says whether the cache has not yet seen the last write.
func (r *replaced) shown(o client.Object) bool {
	version, ok := r.versions.Load(o.GetUID())
	return ok && version == o.GetResourceVersion()
}

// wrote takes an object as a write left it, and the version before. A write that changed nothing leaves no event to wait for.
func (r *replaced) wrote(o client.Object, before string) {
	if o.GetResourceVersion() != before {
		r.versions.Store(o.GetUID(), before)
	}
}

func (r *replaced) forget(uid types.UID) { r.versions.Delete(uid) }

// cacheLag is when an object is looked at again whose last write the cache has not seen; its event mostly comes sooner.
const cacheLag = 100 * time.Millisecond

func now() metav1.Time { return metav1.Now() }
