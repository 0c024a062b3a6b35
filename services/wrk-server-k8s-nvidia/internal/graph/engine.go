package graph

import (
	"context"
	"errors"
	"fmt"
	"sort"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/claim"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/cluster"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/label"
)

// Times of the engine.
const (
	// callTimeout bounds one call to the cluster. It is shorter than the time
	// between losing the rack's Lease and another process holding it, so that a
	// write of ours cannot land in the other's reign.
	callTimeout = 5 * time.Second
	// pace is how soon an unsettled attempt is looked at again without an event.
	pace = time.Second
	// calm is the same for one that is up or over.
	calm = 10 * time.Second
	// workers reconcile this many attempts at a time. They mostly wait for answers
	// of the cluster; how many requests they send is bounded by its client.
	workers = 32
	// openPeriod is how long an unanswered write of an anchor may still land.
	openPeriod = 30 * time.Second
	// sweepPeriod is how often objects without an anchor are looked for.
	sweepPeriod = time.Minute
)

// Options are what an Engine works with. All are required but Changed and Stuck.
type Options struct {
	Client   *cluster.Client
	View     *cluster.View
	Book     *claim.Book
	Settings Settings
	// Active says whether this process holds the rack. While it does not,
	// nothing is written and nothing is judged.
	Active func() bool
	// Answers says whether the cluster answers. While it does not, no deadline counts.
	Answers func() bool
	Now     func() time.Time
	Log     hclog.Logger
	// Changed is called when a status may have changed. It must not block.
	Changed func()
	// Stuck is called with the attempts whose removal takes longer than it
	// should, sorted, each time that list changes.
	Stuck func(attempts []string)
}

// Engine drives the graphs of all attempts of the rack.
type Engine struct {
	o     Options
	s     *Settings
	queue workqueue.TypedRateLimitingInterface[string]

	mu       sync.Mutex
	attempts map[string]*attempt
	unwanted map[string]orkv1.Reason // deleted while their claim was open
	orphans  map[types.UID]time.Time // first seen
	stuck    map[string]bool
	probes   map[string]bool // somebody waits for them
	loaded   bool
	reach    []string // where the mesh is now
}

// attempt is what the engine remembers of one. All of it but seeds can be read
// again from the cluster.
type attempt struct {
	mu         sync.Mutex // held for a whole pass, apply or delete of this attempt
	rec        *claim.Record
	anchor     types.UID
	anchorGone bool
	robbed     bool // somebody else removed the anchor
	intent     *claim.Intent
	outcome    *claim.Outcome
	vmis       map[string]types.UID
	unsaved    bool                    // outcome or vmis are not in the anchor yet
	seeds      []map[string][]byte     // rendered, until their Secrets exist
	secrets    map[int]bool            // seen
	policy     bool                    // seen
	network    bool                    // of its own, seen
	services   map[int]*corev1.Service // as last read
	reached    []string                // the addresses that its policy lets through
	tracks     map[string]*track
	deleting   time.Time // since when it is taken down, by our clock
	// policyVersion is the resource version of its policy, as last written or read.
	policyVersion string

	status atomic.Pointer[workerv1.AttemptStatus]
}

// track is how one object has fared under our eyes.
type track struct {
	stage    string
	since    time.Time
	percent  uint32
	moved    time.Time // last progress
	troubled time.Time
	looked   time.Time // when the launcher pod was last read
	pod      string    // what it said
	state    string
	words    string
	deadline time.Duration
}

// New makes an engine. Run starts it, and must be called: it ends what New began.
func New(o Options) *Engine {
	if o.Changed == nil {
		o.Changed = func() {}
	}
	if o.Stuck == nil {
		o.Stuck = func([]string) {}
	}
	return &Engine{
		o: o, s: &o.Settings,
		queue:    workqueue.NewTypedRateLimitingQueue(workqueue.NewTypedItemExponentialFailureRateLimiter[string](200*time.Millisecond, 30*time.Second)),
		attempts: map[string]*attempt{}, unwanted: map[string]orkv1.Reason{},
		orphans: map[types.UID]time.Time{}, stuck: map[string]bool{}, probes: map[string]bool{},
	}
}

// Run reads the anchors once the view has listed everything, then works until
// ctx ends and every pass that was begun has returned.
func (e *Engine) Run(ctx context.Context) error {
	defer e.queue.ShutDown()
	for !e.o.View.Synced() {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(50 * time.Millisecond):
		}
	}
	for _, cm := range e.o.View.Anchors() {
		e.adopt(cm, nil)
	}
	e.mu.Lock()
	e.loaded = true
	count := len(e.attempts)
	e.mu.Unlock()
	e.o.Log.Info("read the anchors of the rack", "attempts", count)
	e.o.Changed()

	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for e.next(ctx) {
			}
		})
	}
	tick := time.NewTicker(pace)
	defer tick.Stop()
	swept := e.o.Now()
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-tick.C:
			if !e.o.Active() || !e.o.Answers() {
				continue
			}
			e.settle(ctx)
			if now := e.o.Now(); now.Sub(swept) >= min(sweepPeriod, max(e.s.Deadlines.Orphan/4, pace)) {
				swept = now
				e.sweep(ctx)
			}
		}
	}
	e.queue.ShutDown()
	wg.Wait()
	return nil
}

// Loaded is true once the anchors were read: only then does the absence of an
// attempt mean anything.
func (e *Engine) Loaded() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.loaded
}

// Touch tells the engine of a change in the view. It does not block for long.
func (e *Engine) Touch(c cluster.Change) {
	var ids []string
	e.mu.Lock()
	switch {
	case c.Attempt != "":
		ids = append(ids, c.Attempt)
	case c.Job != "":
		for id, a := range e.attempts {
			if a.rec.JobID == c.Job {
				ids = append(ids, id)
			}
		}
	case c.Node != "":
		for id, a := range e.attempts {
			for _, n := range a.rec.Nodes {
				if n.Node == c.Node {
					ids = append(ids, id)
					break
				}
			}
		}
	}
	e.mu.Unlock()
	for _, id := range ids {
		e.queue.Add(id)
	}
	e.o.Changed()
}

// Statuses are the attempts that the cluster holds something of, by id; probes, which
// nobody recorded, are not among them.
func (e *Engine) Statuses() []*workerv1.AttemptStatus {
	e.mu.Lock()
	all := make([]*attempt, 0, len(e.attempts))
	for _, a := range e.attempts {
		if !a.rec.Probe {
			all = append(all, a)
		}
	}
	e.mu.Unlock()
	out := make([]*workerv1.AttemptStatus, 0, len(all))
	for _, a := range all {
		out = append(out, a.status.Load())
	}
	sort.Slice(out, func(i, j int) bool { return out[i].AttemptId < out[j].AttemptId })
	return out
}

// adopt enters an attempt that has an anchor and gives it back. Seeds may be nil.
// It must not be called with an attempt's lock held.
func (e *Engine) adopt(cm *corev1.ConfigMap, seeds []map[string][]byte) *attempt {
	read, err := claim.ReadAnchor(cm)
	if errors.Is(err, claim.ErrForeign) {
		return nil
	}
	if err != nil {
		// What exists must be seen and deletable, whatever it says.
		read = &claim.Anchor{
			UID:    cm.UID,
			Record: &claim.Record{AttemptID: cm.Name, JobID: cm.Labels[label.Job], ReplicaID: cm.Labels[label.Replica], Probe: cm.Labels[label.Probe] != ""},
			Outcome: &claim.Outcome{
				Phase: workerv1.AttemptPhase_ATTEMPT_PHASE_FAILED, Reason: orkv1.Reason_REASON_CLUSTER_REFUSED, Message: cluster.Words(err), At: e.o.Now(),
			},
		}
		e.o.Log.Error("an anchor cannot be read, its attempt can only be deleted", "attempt", cm.Name, "error", err)
	}
	id := read.Record.AttemptID
	e.mu.Lock()
	a := e.attempts[id]
	if a == nil {
		a = &attempt{
			rec: read.Record, anchor: read.UID, intent: read.Intent, outcome: read.Outcome, vmis: read.VMIs, seeds: seeds,
			secrets: map[int]bool{}, tracks: map[string]*track{},
		}
		if a.vmis == nil {
			a.vmis = map[string]types.UID{}
		}
		if reason, ok := e.unwanted[id]; ok && a.intent == nil {
			a.intent = &claim.Intent{Delete: true, Reason: reason, At: e.o.Now()}
		}
		delete(e.unwanted, id)
		a.status.Store(e.firstStatus(a))
		e.attempts[id] = a
	}
	e.mu.Unlock()
	if seeds != nil {
		// The anchor's own event may have entered the attempt before its maker did.
		a.mu.Lock()
		if a.seeds == nil {
			a.seeds = seeds
		}
		a.mu.Unlock()
	}
	e.o.Book.Restore(a.rec.Claim())
	e.queue.Add(id)
	e.o.Changed()
	return a
}

// liveAnchor reads an attempt's anchor from the cluster; nil when there is none.
func (e *Engine) liveAnchor(ctx context.Context, id string) (*corev1.ConfigMap, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	cm, err := e.o.Client.Core.ConfigMaps(e.o.Client.Namespace).Get(ctx, id, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("read anchor %s: %w", id, err)
	}
	return cm, nil
}

func (e *Engine) find(id string) *attempt {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.attempts[id]
}

// forget drops an attempt that the cluster holds nothing of, and its claim.
func (e *Engine) forget(id string) {
	e.mu.Lock()
	delete(e.attempts, id)
	delete(e.unwanted, id)
	e.mu.Unlock()
	e.o.Book.Release(id)
	e.alarm(id, false)
	e.o.Changed()
}

// alarm keeps the list of attempts whose removal is stuck.
func (e *Engine) alarm(id string, on bool) {
	e.mu.Lock()
	if e.stuck[id] == on {
		e.mu.Unlock()
		return
	}
	if on {
		e.stuck[id] = true
	} else {
		delete(e.stuck, id)
	}
	list := make([]string, 0, len(e.stuck))
	for id := range e.stuck {
		list = append(list, id)
	}
	e.mu.Unlock()
	sort.Strings(list)
	e.o.Stuck(list)
}

// next does one pass; false once the queue is shut down.
func (e *Engine) next(ctx context.Context) bool {
	id, down := e.queue.Get()
	if down {
		return false
	}
	defer e.queue.Done(id)
	if ctx.Err() != nil {
		return true
	}
	after, err := e.reconcile(ctx, id)
	switch {
	case err != nil && ctx.Err() == nil:
		e.o.Log.Debug("a step failed, it will be tried again", "attempt", id, "error", cluster.Words(err))
		e.queue.AddRateLimited(id)
	case after > 0:
		e.queue.Forget(id)
		e.queue.AddAfter(id, after)
	default:
		e.queue.Forget(id)
	}
	return true
}

// reconcile looks at one attempt and does what is to be done next. It says when
// to look again; zero when there is nothing left to look at.
func (e *Engine) reconcile(ctx context.Context, id string) (time.Duration, error) {
	a := e.find(id)
	if a == nil {
		if _, ok := e.o.View.Anchor(id); !ok || !e.o.Active() {
			return 0, nil
		}
		// The view may still show what has just been removed: ask.
		cm, err := e.liveAnchor(ctx, id)
		if err != nil || cm == nil || cm.DeletionTimestamp != nil {
			return 0, err
		}
		if a = e.adopt(cm, nil); a == nil {
			return 0, nil
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if e.find(id) != a {
		return 0, nil
	}
	if !e.o.Active() || !e.o.Answers() {
		return pace, nil
	}
	if noticed, err := e.checkAnchor(ctx, a); err != nil {
		return pace, err
	} else if noticed {
		// Said before anything is done about it, so that why it ends is known
		// before its end is.
		e.publishDeleting(a, "")
		return pace, nil
	}
	if e.ended(a) && (a.intent == nil || !a.intent.Delete) {
		a.intent = &claim.Intent{Delete: true, Reason: orkv1.Reason_REASON_STOP_REQUESTED, At: e.o.Now()}
		e.o.Log.Info("taking down a probe", "attempt", id)
		e.publishDeleting(a, "")
	}
	if a.intent != nil && a.intent.Delete {
		return e.takeDown(ctx, a)
	}
	return e.build(ctx, a)
}
