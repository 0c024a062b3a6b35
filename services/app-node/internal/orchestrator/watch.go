package orchestrator

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/cosmicac/cosmicac/pkg/fault"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

// Watch holds one standing watch of every job and one of every endpoint, however
// many people look on. A watch that breaks is opened again, after 0.1 to 5 s; the
// full list at its start is the truth, so a change missed in between is not lost,
// only merged with later ones.
type Watch struct {
	connect Connector
	log     hclog.Logger
	tell    func(err error)

	mu sync.Mutex
	// jobs is nil until the first list is complete.
	jobs map[string]*orkv1.Job
	// generation counts lists that were begun.
	generation    uint64
	connected     bool
	endpoints     map[string]string
	subscriptions map[string]map[*Subscription]struct{}
}

// NewWatch makes a watch; Run keeps it going. tell hears of the watch of jobs: an
// error when it broke, nil when it is back; nil for nobody.
func NewWatch(connect Connector, log hclog.Logger, tell func(err error)) *Watch {
	if tell == nil {
		tell = func(error) {}
	}
	return &Watch{connect: connect, log: log, tell: tell, endpoints: map[string]string{}, subscriptions: map[string]map[*Subscription]struct{}{}}
}

// Run watches until ctx ends. It returns nil then.
func (w *Watch) Run(ctx context.Context) error {
	var both sync.WaitGroup
	both.Go(func() { w.keep(ctx, "jobs", w.watchJobs) })
	both.Go(func() { w.keep(ctx, "endpoints", w.watchEndpoints) })
	both.Wait()
	return nil
}

// keep runs one watch again and again. It waits longer after each failure that
// brought nothing.
func (w *Watch) keep(ctx context.Context, what string, watch func(context.Context) (progress bool, err error)) {
	wait := 100 * time.Millisecond
	told := false
	for {
		progress, err := watch(ctx)
		if ctx.Err() != nil {
			return
		}
		err = fault.FromGRPC(err)
		if what == "jobs" {
			w.tell(err)
		}
		if progress {
			wait, told = 100*time.Millisecond, false
		}
		if !told {
			w.log.Warn("the orchestrator's watch broke, trying again until it is back", "of", what, "error", err)
			told = true
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait/2 + rand.N(wait/2+1)):
		}
		wait = min(2*wait, 5*time.Second)
	}
}

func (w *Watch) watchJobs(ctx context.Context) (progress bool, err error) {
	conn, err := w.connect()
	if err != nil {
		return false, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	w.mu.Lock()
	w.generation++
	generation := w.generation
	w.mu.Unlock()
	stream, err := orkv1.NewJobsClient(conn).WatchJobs(ctx, &orkv1.WatchJobsRequest{})
	if err != nil {
		return false, err
	}
	defer w.setConnected(false)
	listed := map[string]*orkv1.Job{}
	synced := false
	for {
		m, err := stream.Recv()
		if err != nil {
			return progress, err
		}
		progress = true
		switch change := m.GetChange().(type) {
		case *orkv1.WatchJobsResponse_Job:
			if !synced {
				listed[change.Job.GetId()] = change.Job
			}
			w.changed(change.Job, synced)
		case *orkv1.WatchJobsResponse_DeletedJobId:
			delete(listed, change.DeletedJobId)
			w.deleted(change.DeletedJobId)
		case *orkv1.WatchJobsResponse_Synced:
			if !synced {
				synced = true
				w.replace(listed, generation)
				listed = nil
				w.tell(nil)
			}
		}
	}
}

func (w *Watch) watchEndpoints(ctx context.Context) (progress bool, err error) {
	conn, err := w.connect()
	if err != nil {
		return false, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := orkv1.NewEndpointsClient(conn).WatchEndpoints(ctx, &orkv1.WatchEndpointsRequest{})
	if err != nil {
		return false, err
	}
	for {
		m, err := stream.Recv()
		if err != nil {
			return progress, err
		}
		progress = true
		table := make(map[string]string, len(m.GetEndpoints()))
		for _, e := range m.GetEndpoints() {
			table[e.GetJobId()] = e.GetId()
		}
		w.mu.Lock()
		for job, endpoint := range table {
			if w.endpoints[job] != endpoint {
				for s := range w.subscriptions[job] {
					s.wake()
				}
			}
		}
		w.endpoints = table
		w.mu.Unlock()
	}
}

func (w *Watch) setConnected(is bool) {
	w.mu.Lock()
	w.connected = is
	w.mu.Unlock()
}

// changed takes a job of the list (not synced) or a change after it. What a list
// says is the truth, also where its revision is lower than what was seen before.
func (w *Watch) changed(job *orkv1.Job, synced bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if synced {
		w.jobs[job.GetId()] = job
	}
	for s := range w.subscriptions[job.GetId()] {
		if synced && job.GetRevision() < s.latest.GetRevision() {
			continue
		}
		s.latest = job
		s.wake()
	}
}

func (w *Watch) deleted(id string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.jobs, id)
	for s := range w.subscriptions[id] {
		s.gone = true
		s.wake()
	}
}

// replace makes a complete list the table. A job that somebody looks on at and
// that a list begun after they came does not hold is gone.
func (w *Watch) replace(listed map[string]*orkv1.Job, generation uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.jobs, w.connected = listed, true
	for id, subscriptions := range w.subscriptions {
		if listed[id] != nil {
			continue
		}
		for s := range subscriptions {
			if s.generation < generation {
				s.gone = true
				s.wake()
			}
		}
	}
}

// EndpointID is the endpoint of a job, or empty while none is known.
func (w *Watch) EndpointID(jobID string) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.endpoints[jobID]
}

// Connected tells whether the table of jobs is complete and being kept up.
func (w *Watch) Connected() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.connected
}

// Holds tells whether the watch is up and knows the job.
func (w *Watch) Holds(jobID string) (known, up bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.jobs[jobID] != nil, w.connected
}

// Subscription follows one job. Changes are merged: the newest is always there to
// be taken, in the order of revisions, and a slow reader blocks nobody.
type Subscription struct {
	watch      *Watch
	jobID      string
	generation uint64
	signal     chan struct{}

	// Under watch.mu.
	latest *orkv1.Job
	gone   bool
}

// Subscribe begins to follow a job that exists. The caller calls Close.
func (w *Watch) Subscribe(jobID string) *Subscription {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := &Subscription{watch: w, jobID: jobID, generation: w.generation, signal: make(chan struct{}, 1), latest: w.jobs[jobID]}
	if w.subscriptions[jobID] == nil {
		w.subscriptions[jobID] = map[*Subscription]struct{}{}
	}
	w.subscriptions[jobID][s] = struct{}{}
	return s
}

// Close ends the subscription.
func (s *Subscription) Close() {
	s.watch.mu.Lock()
	defer s.watch.mu.Unlock()
	delete(s.watch.subscriptions[s.jobID], s)
	if len(s.watch.subscriptions[s.jobID]) == 0 {
		delete(s.watch.subscriptions, s.jobID)
	}
}

// Signal gets a value after one or more changes.
func (s *Subscription) Signal() <-chan struct{} { return s.signal }

// Latest is the newest that is known, nil for nothing yet, and whether the job is gone.
func (s *Subscription) Latest() (job *orkv1.Job, gone bool) {
	s.watch.mu.Lock()
	defer s.watch.mu.Unlock()
	return s.latest, s.gone
}

func (s *Subscription) wake() {
	select {
	case s.signal <- struct{}{}:
	default:
	}
}
