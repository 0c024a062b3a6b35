package volume

import (
	"context"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/lexicon"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/rack"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/record"
)

// Racks is what the keeper needs of the fleet.
type Racks interface {
	Views() []rack.View
	Client(id string) (workerv1.RackClient, bool)
}

// Options sets up a Keeper. All are required.
type Options struct {
	Store *record.Store
	Racks Racks
	// Changed is told when a volume's state has changed, so that who waits for it is
	// looked at. It must not block.
	Changed func()
	// Every is the time between passes, CallTimeout bounds one call to a worker, Repeat
	// is how long after a worker took an order it is given again while its effect is
	// not seen, and Grace is how long a volume must be absent before it counts as lost.
	Every, CallTimeout, Repeat, Grace time.Duration
	Clock                             func() time.Time
	Log                               hclog.Logger
}

// Keeper compares and orders. Run owns everything it starts.
type Keeper struct {
	o     Options
	wake  chan struct{}
	calls sync.WaitGroup
	slots chan struct{} // bounds calls under way

	mu    sync.Mutex
	known map[string]*memory // by volume id
}

// memory is what is known of a volume beside record and report.
type memory struct {
	running     bool // a call is under way
	failures    uint
	next        time.Time // no call before
	absentSince time.Time
	removedAt   time.Time
}

// New makes a keeper.
func New(o Options) *Keeper {
	return &Keeper{o: o, wake: make(chan struct{}, 1), slots: make(chan struct{}, 16), known: make(map[string]*memory)}
}

// Poke asks for a pass soon. It does not block.
func (k *Keeper) Poke() {
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

// settleTime gathers wakes that come together into one pass.
const settleTime = 50 * time.Millisecond

// Run works until ctx ends, and waits for the calls under way.
func (k *Keeper) Run(ctx context.Context) error {
	defer k.calls.Wait()
	tick := time.NewTicker(k.o.Every)
	defer tick.Stop()
	for {
		k.pass(ctx)
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		case <-k.wake:
			settle := time.NewTimer(settleTime)
			select {
			case <-ctx.Done():
				settle.Stop()
				return nil
			case <-settle.C:
			}
		}
	}
}

func (k *Keeper) pass(ctx context.Context) {
	// The views come first: a volume that is recorded in between is not called absent
	// by a report that is older than it.
	views := make(map[string]rack.View)
	for _, v := range k.o.Racks.Views() {
		views[v.Entry.Id] = v
	}
	all, err := k.o.Store.Volumes(ctx, nil, "")
	if err != nil {
		k.failed(ctx, "read the volumes", err)
		return
	}
	recorded := make(map[string]bool, len(all))
	changed := false
	for _, v := range all {
		recorded[v.Id] = true
		changed = k.look(ctx, v, views) || changed
	}
	k.mu.Lock()
	for id, m := range k.known {
		if !recorded[id] && !m.running {
			delete(k.known, id)
		}
	}
	k.mu.Unlock()
	if changed {
		k.o.Changed()
	}
}

// look decides about one volume and gives the order that is due. It says whether its
// state has changed.
func (k *Keeper) look(ctx context.Context, v *orkv1.Volume, views map[string]rack.View) bool {
	s := sight{now: k.o.Clock(), grace: k.o.Grace}
	s.view, s.known = views[v.RackId]
	k.mu.Lock()
	m := k.known[v.Id]
	if m == nil {
		m = &memory{}
		k.known[v.Id] = m
	}
	switch {
	case !s.complete() || s.view.Volume(v.Id) != nil:
		m.absentSince = time.Time{}
	case m.absentSince.IsZero():
		m.absentSince = s.now
	}
	s.absentSince, s.removedAt = m.absentSince, m.removedAt
	k.mu.Unlock()

	state, message, due := decide(v, s)
	changed := false
	if state != v.State || message != v.Message {
		did, err := k.o.Store.SetVolume(ctx, v.Id, v.State, state, message)
		if err != nil {
			k.failed(ctx, "record volume "+v.Id, err)
			return false
		}
		if changed = did && state != v.State; changed {
			k.o.Log.Info("volume changed", "volume", v.Id, "name", v.Name, "rack", v.RackId, "state", lexicon.Name(state), "message", message)
		}
	}
	switch due {
	case apply:
		k.call(ctx, v, m, func(ctx context.Context, c workerv1.RackClient) error { return k.apply(ctx, c, v) })
	case remove:
		k.call(ctx, v, m, func(ctx context.Context, c workerv1.RackClient) error {
			if _, err := c.DeleteVolume(ctx, &workerv1.DeleteVolumeRequest{VolumeId: v.Id}); err != nil {
				return err
			}
			k.mu.Lock()
			defer k.mu.Unlock()
			m.removedAt = k.o.Clock()
			return nil
		})
	case forget:
		if err := k.o.Store.RemoveVolume(ctx, v.Id); err != nil {
			k.failed(ctx, "remove volume "+v.Id, err)
			return changed
		}
		k.o.Log.Info("volume removed", "volume", v.Id, "name", v.Name, "rack", v.RackId)
	}
	return changed
}

// apply has the worker make a volume, and writes down its refusal.
func (k *Keeper) apply(ctx context.Context, c workerv1.RackClient, v *orkv1.Volume) error {
	answer, err := c.ApplyVolume(ctx, &workerv1.ApplyVolumeRequest{
		VolumeId: v.Id, Name: v.Name, ProjectId: v.Owner.GetProjectId(), SizeGib: v.SizeGib, StorageClass: v.StorageClass, Shared: v.Shared,
	})
	if err != nil {
		// Whether it was made is not known: asked again. The user reads why it takes long.
		_, note := k.o.Store.SetVolume(ctx, v.Id, creating, creating, rack.Text("the rack's worker did not make it yet: "+fault.FromGRPC(err).Error()))
		if note != nil {
			k.failed(ctx, "record volume "+v.Id, note)
		}
		return err
	}
	if answer.Refusal == "" {
		return nil
	}
	did, err := k.o.Store.SetVolume(ctx, v.Id, creating, failed, rack.Text(answer.Refusal))
	if did {
		k.o.Log.Info("volume refused", "volume", v.Id, "name", v.Name, "rack", v.RackId, "message", answer.Refusal)
		k.o.Changed()
	}
	return err
}

// call runs one call to a volume's worker beside the passes, unless one is under way
// or was made a moment ago.
func (k *Keeper) call(ctx context.Context, v *orkv1.Volume, m *memory, f func(context.Context, workerv1.RackClient) error) {
	client, ok := k.o.Racks.Client(v.RackId)
	if !ok {
		return // given when the rack is back
	}
	k.mu.Lock()
	if m.running || k.o.Clock().Before(m.next) {
		k.mu.Unlock()
		return
	}
	select {
	case k.slots <- struct{}{}:
	default:
		k.mu.Unlock()
		return // given at the next pass
	}
	m.running = true
	k.mu.Unlock()
	k.calls.Go(func() {
		callCtx, cancel := context.WithTimeout(ctx, k.o.CallTimeout)
		err := f(callCtx, client)
		cancel()
		<-k.slots
		k.mu.Lock()
		m.running = false
		if err != nil {
			m.next = k.o.Clock().Add(min(time.Second<<min(m.failures, 5), 30*time.Second))
			m.failures++
		} else {
			m.failures, m.next = 0, k.o.Clock().Add(k.o.Repeat)
		}
		k.mu.Unlock()
		if err != nil {
			k.failed(ctx, "call the worker of rack "+v.RackId+" about volume "+v.Id, err)
		}
		k.Poke()
	})
}

// failed notes a failure that changes nothing.
func (k *Keeper) failed(ctx context.Context, doing string, err error) {
	if ctx.Err() == nil {
		k.o.Log.Warn("nothing was decided, tried again", "doing", doing, "error", err)
	}
}
