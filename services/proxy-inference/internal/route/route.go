// Package route knows which replicas serve which endpoint and gives each
// request one of them.
//
// The table comes from wrk-ork as a whole and is swapped, never edited; while
// ork is away the last one stays in force. What this proxy saw of a replica
// itself (a refused connection, a silent link) only lowers its rank for a
// while, and is never stored: a replica that nobody else can replace is still
// tried.
//
// The package does not check keys, open connections or know HTTP. Load is this
// proxy's own count: other proxies' requests are not seen.
package route

import (
	"context"
	"sort"
	"sync"
	"time"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

// Endpoint is one way in, as ork recorded it. It never changes; a new table
// brings new ones.
type Endpoint struct {
	ID                   string
	JobID                string
	ProjectID            string
	Models               []string
	RequireAuthorization bool
	State                orkv1.State
	Message              string
	CreatedAt            time.Time

	replicas []Replica
}

// Replica is one engine that may serve an endpoint.
type Replica struct {
	// AttemptID names it: a restart is another replica to a proxy.
	AttemptID string
	AgentKey  string
	Addresses []string

	state    orkv1.State
	ready    bool
	draining bool
}

// Options are the bounds of a Table.
type Options struct {
	// Hold is how long a request waits for a replica that is loading.
	Hold time.Duration
	// MaximumHeld bounds how many wait at once, over all endpoints.
	MaximumHeld int
	// MaximumInFlight bounds this proxy's requests on one replica.
	MaximumInFlight int
	// Now and Random are the clock and a number in [0, n).
	Now    func() time.Time
	Random func(n int) int
}

// Table is the newest set of endpoints and what this proxy has on their
// replicas. It is safe for concurrent use.
type Table struct {
	o Options

	mu        sync.Mutex
	endpoints map[string]*Endpoint
	byModel   map[modelOf][]*Endpoint // oldest first
	since     time.Time               // of the newest table, zero for none
	changed   chan struct{}           // closed with each new table
	loads     map[string]*load        // by attempt
	held      int
}

type modelOf struct{ project, model string }

// load is what this proxy saw of a replica. Guarded by Table.mu.
type load struct {
	inFlight int
	faults   int       // connection faults in a row
	until    time.Time // ranked last until then
	silent   bool      // its link is suspect
	onSilent map[*Lease]func()
}

// New makes a table that knows no endpoint.
func New(o Options) *Table {
	return &Table{o: o, changed: make(chan struct{}), loads: map[string]*load{}}
}

// Replace puts a new table in force at once. Requests under way are not touched.
func (t *Table) Replace(r *orkv1.WatchEndpointsResponse) {
	endpoints := make(map[string]*Endpoint, len(r.GetEndpoints()))
	byModel := map[modelOf][]*Endpoint{}
	known := map[string]bool{}
	for _, p := range r.GetEndpoints() {
		e := &Endpoint{ID: p.GetId(), JobID: p.GetJobId(), ProjectID: p.GetProjectId(), Models: p.GetModelNames(),
			RequireAuthorization: p.GetRequireAuthorization(), State: p.GetJobState(), Message: p.GetMessage(),
			CreatedAt: p.GetCreatedAt().AsTime()}
		for _, r := range p.GetReplicas() {
			e.replicas = append(e.replicas, Replica{AttemptID: r.GetAttemptId(), AgentKey: r.GetAgentKey(), Addresses: r.GetAgentAddresses(),
				state: r.GetState(), ready: r.GetReady(), draining: r.GetDraining()})
			known[r.GetAttemptId()] = true
		}
		endpoints[e.ID] = e
		for _, m := range e.Models {
			byModel[modelOf{e.ProjectID, m}] = append(byModel[modelOf{e.ProjectID, m}], e)
		}
	}
	for _, es := range byModel {
		sort.Slice(es, func(i, j int) bool {
			if !es[i].CreatedAt.Equal(es[j].CreatedAt) {
				return es[i].CreatedAt.Before(es[j].CreatedAt)
			}
			return es[i].ID < es[j].ID
		})
	}

	t.mu.Lock()
	defer t.mu.Unlock()
	t.endpoints, t.byModel, t.since = endpoints, byModel, t.o.Now()
	for id, l := range t.loads {
		if !known[id] && l.inFlight == 0 {
			delete(t.loads, id)
		}
	}
	close(t.changed)
	t.changed = make(chan struct{})
}

// Status tells how many endpoints are known and since when; zero time for never.
func (t *Table) Status() (endpoints int, since time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.endpoints), t.since
}

// Resolve finds the endpoint that serves a model for a project: among several
// the oldest that has a ready replica, else the oldest that is not over.
func (t *Table) Resolve(projectID, model string) (*Endpoint, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	var best *Endpoint
	rank := 0
	for _, e := range t.byModel[modelOf{projectID, model}] {
		r := 1
		switch {
		case e.ready():
			r = 3
		case !e.Over():
			r = 2
		}
		if r > rank {
			best, rank = e, r
		}
	}
	return best, best != nil
}

// Endpoint finds an endpoint by its id, whoever owns it.
func (t *Table) Endpoint(id string) (*Endpoint, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e, ok := t.endpoints[id]
	return e, ok
}

// OfProject lists the endpoints of a project whose jobs are not over, oldest first.
func (t *Table) OfProject(projectID string) []*Endpoint {
	t.mu.Lock()
	defer t.mu.Unlock()
	var es []*Endpoint
	for _, e := range t.endpoints {
		if e.ProjectID == projectID && !e.Over() {
			es = append(es, e)
		}
	}
	sort.Slice(es, func(i, j int) bool {
		if !es[i].CreatedAt.Equal(es[j].CreatedAt) {
			return es[i].CreatedAt.Before(es[j].CreatedAt)
		}
		return es[i].ID < es[j].ID
	})
	return es
}

// Agents lists the agents worth a link: of replicas that are ready or on their
// way, each with its newest addresses.
func (t *Table) Agents() map[string][]string {
	t.mu.Lock()
	defer t.mu.Unlock()
	agents := map[string][]string{}
	for _, e := range t.endpoints {
		for _, r := range e.replicas {
			if r.AgentKey != "" && !over(r.state) {
				agents[r.AgentKey] = r.Addresses
			}
		}
	}
	return agents
}

// Changed is closed with the next table.
func (t *Table) Changed() <-chan struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.changed
}

// Silent marks the agents whose links are suspect, and clears all others.
// Requests that wait for a first byte of a newly marked one are told.
func (t *Table) Silent(agents map[string]bool) {
	var tell []func()
	t.mu.Lock()
	for _, e := range t.endpoints {
		for _, r := range e.replicas {
			if r.AgentKey == "" {
				continue
			}
			l := t.load(r.AttemptID)
			was := l.silent
			l.silent = agents[r.AgentKey]
			if l.silent && !was {
				for _, f := range l.onSilent {
					tell = append(tell, f)
				}
			}
		}
	}
	t.mu.Unlock()
	for _, f := range tell {
		f()
	}
}

// Watch feeds the table from a stream of whole tables until the stream ends.
func (t *Table) Watch(ctx context.Context, client orkv1.EndpointsClient, received func()) error {
	stream, err := client.WatchEndpoints(ctx, &orkv1.WatchEndpointsRequest{})
	if err != nil {
		return err
	}
	for {
		r, err := stream.Recv()
		if err != nil {
			return err
		}
		t.Replace(r)
		received()
	}
}

// Over tells whether the endpoint's job has ended or is on its way to.
func (e *Endpoint) Over() bool { return over(e.State) || e.State == orkv1.State_STATE_STOPPING }

func (e *Endpoint) ready() bool {
	for _, r := range e.replicas {
		if r.ready && !r.draining {
			return true
		}
	}
	return false
}

// loading tells whether a replica is on its way to serving.
func (e *Endpoint) loading() bool {
	for _, r := range e.replicas {
		if r.state == orkv1.State_STATE_PROVISIONING || r.state == orkv1.State_STATE_STARTING {
			return true
		}
	}
	return e.State == orkv1.State_STATE_PROVISIONING || e.State == orkv1.State_STATE_STARTING
}

// lost tells whether a replica runs whose agent is away at the moment.
func (e *Endpoint) lost() bool {
	for _, r := range e.replicas {
		if r.state == orkv1.State_STATE_RUNNING && !r.ready && !r.draining {
			return true
		}
	}
	return false
}

func over(s orkv1.State) bool {
	switch s {
	case orkv1.State_STATE_STOPPED, orkv1.State_STATE_SUCCEEDED, orkv1.State_STATE_FAILED, orkv1.State_STATE_CANCELLED:
		return true
	}
	return false
}

func (t *Table) load(attemptID string) *load {
	l := t.loads[attemptID]
	if l == nil {
		l = &load{}
		t.loads[attemptID] = l
	}
	return l
}
