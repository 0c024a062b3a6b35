// Package rack keeps one watching stream to the worker of every rack entry and
// holds what each worker last reported.
//
// Guarantees: the newest report of a rack replaces the one before; a rack whose
// stream ended keeps its last report and is shown as not connected, so nothing
// is ever concluded from silence here. Streams are reopened at once, then after
// about 1, 5, 15 and 30 s, and at once when the worker registers. What a worker
// says is bounded in size and cleaned before anybody sees it; it may offer less
// than the operator's entry allows and never more.
//
// It keeps no entry on disk (package record does), grants nothing and decides
// no job's state.
package rack

import (
	"context"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/libp2p/go-libp2p/core/peer"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/identity"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
)

// pauses between tries to open a stream; each is varied by a fifth.
var pauses = []time.Duration{0, time.Second, 5 * time.Second, 15 * time.Second, 30 * time.Second}

// Options sets up a Fleet.
type Options struct {
	// Dial returns the connection to a worker's key.
	Dial func(worker peer.ID) grpc.ClientConnInterface
	// Changed is told after each change: jobs whose attempts or disks look
	// different (nil when only capacity does). It must not block.
	Changed func(jobIDs []string)
	// Quarantined lists what of a rack is left out of placement, from memory; may
	// be nil.
	Quarantined func(rackID string) []*orkv1.Quarantine
	// Silence is how long a stream may be still before it is opened anew.
	Silence time.Duration
	Clock   func() time.Time
	Log     hclog.Logger
}

// Fleet is every rack of the network. It is safe for concurrent use.
type Fleet struct {
	o Options

	mu    sync.Mutex
	ctx   context.Context // of Start: the life that streams of later entries share
	racks map[string]*watch
	wg    sync.WaitGroup
}

// View is a rack as it was last seen. Its messages are shared: read only.
type View struct {
	Entry *orkv1.RackEntry
	// Connected: the stream is open and has sent a report.
	Connected bool
	// Since is when Connected last changed, zero if it never did.
	Since time.Time
	// Report is the newest, nil for none in this process's life.
	Report     *workerv1.WatchRackResponse
	ReportedAt time.Time
	// Why is the last failure of the stream.
	Why error
	// Quarantined is what of it is left out of placement.
	Quarantined []*orkv1.Quarantine

	attempts map[string]*workerv1.AttemptStatus
	disks    map[string]bool
	volumes  map[string]*workerv1.VolumeStatus
}

// Status is the worker's word on an attempt, nil when the report does not list it.
func (v View) Status(attemptID string) *workerv1.AttemptStatus { return v.attempts[attemptID] }

// Disk reports whether the report lists root disks of the job.
func (v View) Disk(jobID string) bool { return v.disks[jobID] }

// watch is the upkeep of one rack.
type watch struct {
	fleet *Fleet
	id    string
	kick  chan struct{}
	stop  context.CancelFunc // ends the goroutine
	redo  context.CancelFunc // ends the present stream, for a new entry

	view View
	key  peer.ID
}

// New makes a fleet without racks.
func New(o Options) *Fleet {
	if o.Silence == 0 {
		o.Silence = 30 * time.Second
	}
	return &Fleet{o: o, racks: make(map[string]*watch)}
}

// Start opens the streams of the entries; streams last until ctx ends. Call it
// once, before anything else.
func (f *Fleet) Start(ctx context.Context, entries []*orkv1.RackEntry) {
	f.mu.Lock()
	f.ctx = ctx
	f.mu.Unlock()
	for _, e := range entries {
		f.Put(e)
	}
}

// Wait returns when ctx, the one given to Start or an outer one, has ended and
// every stream with it.
func (f *Fleet) Wait(ctx context.Context) error {
	<-ctx.Done()
	f.wg.Wait()
	return nil
}

// Put takes a new or changed entry. The worker hears of a change on a new
// stream; until that one is open or fails, the rack counts as it did.
func (f *Fleet) Put(e *orkv1.RackEntry) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ctx == nil || f.ctx.Err() != nil {
		return
	}
	w := f.racks[e.Id]
	if w != nil {
		if proto.Equal(w.view.Entry, e) {
			return
		}
		w.view.Entry = proto.Clone(e).(*orkv1.RackEntry)
		if w.redo != nil {
			w.redo()
		}
		w.poke()
		return
	}
	key, err := identity.ParseID(e.Key)
	if err != nil {
		f.o.Log.Error("rack entry has no usable key", "rack", e.Id, "error", err)
		return
	}
	ctx, stop := context.WithCancel(f.ctx)
	w = &watch{fleet: f, id: e.Id, key: key, kick: make(chan struct{}, 1), stop: stop}
	w.view.Entry = proto.Clone(e).(*orkv1.RackEntry)
	f.racks[e.Id] = w
	f.wg.Go(func() { w.run(ctx) })
}

// Forget ends the upkeep of a rack whose entry was removed.
func (f *Fleet) Forget(id string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if w := f.racks[id]; w != nil {
		w.stop()
		delete(f.racks, id)
	}
}

// Kick opens a rack's stream now if it is not open: its worker called.
func (f *Fleet) Kick(id string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if w := f.racks[id]; w != nil && !w.view.Connected {
		w.poke()
	}
}

func (w *watch) poke() {
	select {
	case w.kick <- struct{}{}:
	default:
	}
}

// Views lists every rack, by id.
func (f *Fleet) Views() []View {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out []View
	for _, id := range slices.Sorted(maps.Keys(f.racks)) {
		out = append(out, f.view(f.racks[id]))
	}
	return out
}

// view is called under f.mu.
func (f *Fleet) view(w *watch) View {
	v := w.view
	if f.o.Quarantined != nil {
		v.Quarantined = f.o.Quarantined(w.id)
	}
	return v
}

// View is one rack; ok is false when it has no entry.
func (f *Fleet) View(id string) (v View, ok bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	w := f.racks[id]
	if w == nil {
		return View{}, false
	}
	return f.view(w), true
}

// Client returns the way to call a rack's worker; ok is false while its stream
// is not open, since a worker that cannot be watched is given no orders.
func (f *Fleet) Client(id string) (c workerv1.RackClient, ok bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	w := f.racks[id]
	if w == nil || !w.view.Connected {
		return nil, false
	}
	return workerv1.NewRackClient(f.o.Dial(w.key)), true
}

// run keeps the stream open until ctx ends.
func (w *watch) run(ctx context.Context) {
	try := 0
	for ctx.Err() == nil {
		opened := w.fleet.o.Clock()
		redone, got, err := w.stream(ctx)
		if ctx.Err() != nil {
			break
		}
		if redone {
			try = 0
			continue
		}
		w.lost(err)
		if got && w.fleet.o.Clock().Sub(opened) > 30*time.Second {
			try = 0
		}
		pause := pauses[min(try, len(pauses)-1)]
		try++
		pause += time.Duration(rand.Int64N(int64(pause)/5 + int64(20*time.Millisecond)))
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
		case <-w.kick:
			try = 0
		case <-timer.C:
		}
		timer.Stop()
	}
	w.lost(fault.New(fault.Unreachable, "rack %s is no longer watched", w.id))
}

// stream watches until the stream ends. redone says that it was ended for a
// changed entry, got that at least one report came.
func (w *watch) stream(ctx context.Context) (redone, got bool, err error) {
	streamCtx, cancel := context.WithCancel(ctx)
	defer cancel()
	f := w.fleet
	f.mu.Lock()
	entry := proto.Clone(w.view.Entry).(*orkv1.RackEntry)
	changed := false
	w.redo = func() { changed = true; cancel() } // called under f.mu
	f.mu.Unlock()
	defer func() {
		f.mu.Lock()
		w.redo = nil
		redone = changed
		f.mu.Unlock()
	}()

	// Silence is timed here, on this side's monotonic clock.
	silence := time.AfterFunc(f.o.Silence, cancel)
	defer silence.Stop()
	s, err := workerv1.NewRackClient(f.o.Dial(w.key)).WatchRack(streamCtx, &workerv1.WatchRackRequest{Entry: entry})
	if err != nil {
		return false, false, err
	}
	for {
		r, err := s.Recv()
		if err != nil {
			if streamCtx.Err() != nil && ctx.Err() == nil {
				err = fault.Wrap(fault.Timeout, err, "the worker of rack %s was silent for %s", w.id, f.o.Silence)
			}
			return false, got, err
		}
		silence.Reset(f.o.Silence)
		if r.RackId != w.id {
			return false, got, fault.New(fault.Conflict, "the worker with the key of rack %s answers as rack %.64q; correct its configuration", w.id, r.RackId)
		}
		if err := clean(r); err != nil {
			return false, got, err
		}
		got = true
		w.report(r)
	}
}

// lost marks the rack as not connected.
func (w *watch) lost(err error) {
	f := w.fleet
	f.mu.Lock()
	was := w.view.Connected
	first := w.view.Why == nil
	w.view.Connected, w.view.Why = false, err
	if was {
		w.view.Since = f.o.Clock()
	}
	jobs := jobsOf(w.view.Report)
	f.mu.Unlock()
	if was || first {
		f.o.Log.Info("rack is not connected", "rack", w.id, "error", err)
	}
	if was {
		f.o.Changed(jobs)
	}
}

// report takes a cleaned report in.
func (w *watch) report(r *workerv1.WatchRackResponse) {
	f := w.fleet
	f.mu.Lock()
	was := w.view
	w.view.Report, w.view.ReportedAt = r, f.o.Clock()
	w.view.Connected, w.view.Why = true, nil
	if !was.Connected {
		w.view.Since = w.view.ReportedAt
	}
	w.view.index()
	is := w.view
	f.mu.Unlock()
	if !was.Connected {
		f.o.Log.Info("rack is connected", "rack", w.id, "version", r.Version, "simulated", r.Simulated)
	}
	f.o.Changed(differing(was, is))
}

// differing lists the jobs that two views show differently.
func differing(was, is View) []string {
	if !was.Connected || was.Report == nil || was.Report.Synced != is.Report.Synced || was.Report.ClusterFault != is.Report.ClusterFault {
		all := jobsOf(is.Report)
		return append(all, jobsOf(was.Report)...)
	}
	jobs := make(map[string]struct{})
	for id, a := range is.attempts {
		if !proto.Equal(a, was.attempts[id]) {
			jobs[a.JobId] = struct{}{}
		}
	}
	for id, a := range was.attempts {
		if is.attempts[id] == nil {
			jobs[a.JobId] = struct{}{}
		}
	}
	for id := range is.disks {
		if !was.disks[id] {
			jobs[id] = struct{}{}
		}
	}
	for id := range was.disks {
		if !is.disks[id] {
			jobs[id] = struct{}{}
		}
	}
	return slices.Sorted(maps.Keys(jobs))
}

func jobsOf(r *workerv1.WatchRackResponse) []string {
	jobs := make(map[string]struct{})
	for _, a := range r.GetAttempts() {
		jobs[a.JobId] = struct{}{}
	}
	for _, id := range r.GetDiskJobIds() {
		jobs[id] = struct{}{}
	}
	return slices.Sorted(maps.Keys(jobs))
}
