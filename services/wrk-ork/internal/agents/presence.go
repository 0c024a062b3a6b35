package agents

import (
	"slices"
	"sync"
	"time"

	agentv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/life"
)

// presence is what is heard of agents now. It is memory only: after a restart
// agents attend again within seconds, and until then silence is counted from
// the start.
type presence struct {
	mu  sync.Mutex
	all map[string]*attempt // by attempt id
}

// attempt is what is heard of the agents of one attempt.
type attempt struct {
	nodes map[uint32]*voice
	// drain is the order that stands, zero for none.
	drain time.Time
	// wake is closed and replaced when an order changes.
	wake chan struct{}
}

// voice is one agent.
type voice struct {
	attending int
	since     time.Time
	heardAt   time.Time
	report    *agentv1.Report
	// shellAt and gpuUsedAt are when it was last used, as far as it says.
	shellAt, gpuUsedAt time.Time
	card               *meshv1.Card
}

func (p *presence) get(id string) *attempt {
	if p.all == nil {
		p.all = make(map[string]*attempt)
	}
	a := p.all[id]
	if a == nil {
		a = &attempt{nodes: make(map[uint32]*voice), wake: make(chan struct{})}
		p.all[id] = a
	}
	return a
}

func (a *attempt) node(index uint32) *voice {
	v := a.nodes[index]
	if v == nil {
		v = &voice{}
		a.nodes[index] = v
	}
	return v
}

func (p *presence) enter(id string, node uint32, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	v := p.get(id).node(node)
	if v.attending == 0 {
		v.since = now
	}
	v.attending++
	v.heardAt = now
}

func (p *presence) leave(id string, node uint32, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	v := p.get(id).node(node)
	v.attending--
	v.heardAt = now
}

// hear takes a report or a card; nil leaves what was there.
func (p *presence) hear(id string, node uint32, r *agentv1.Report, c *meshv1.Card, now time.Time) (changed bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	v := p.get(id).node(node)
	v.heardAt = now
	if r != nil {
		if r.ShellSessions > 0 || v.report.GetShellSessions() > 0 {
			v.shellAt = now
		}
		// An agent counts from its start; the small differences of each report's
		// way are no use.
		if used := now.Add(-time.Duration(r.GpuIdleSeconds) * time.Second); r.GpuUseKnown && used.Sub(v.gpuUsedAt) > jitter {
			v.gpuUsedAt = used
		}
		changed = (v.report.GetShellSessions() == 0) != (r.ShellSessions == 0) ||
			v.report == nil || v.report.Phase != r.Phase || v.report.Message != r.Message ||
			(v.report.RequestsRunning+v.report.RequestsWaiting == 0) != (r.RequestsRunning+r.RequestsWaiting == 0)
		v.report = r
	}
	if c != nil {
		changed = changed || v.card == nil || !slices.Equal(v.card.Addresses, c.Addresses) || v.card.SshHostKey != c.SshHostKey
		v.card = c
	}
	return changed
}

// order sets the drain order of an attempt, once.
func (p *presence) order(id string, deadline time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	a := p.get(id)
	if a.drain.IsZero() {
		a.drain = deadline
		close(a.wake)
		a.wake = make(chan struct{})
	}
}

func (p *presence) standing(id string) (drain time.Time, wake <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	a := p.get(id)
	return a.drain, a.wake
}

// forget drops an attempt that is over, unless an agent still attends.
func (p *presence) forget(id string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if a := p.all[id]; a != nil {
		for _, v := range a.nodes {
			if v.attending > 0 {
				return
			}
		}
		delete(p.all, id)
	}
}

// sight is what life judges by, and the newest card that came with a report.
func (p *presence) sight(a *job.Attempt) (life.Agent, *meshv1.Card) {
	p.mu.Lock()
	defer p.mu.Unlock()
	heard := p.all[a.ID]
	if heard == nil {
		return life.Agent{}, nil
	}
	out := life.Agent{NodesReady: true}
	for i := range a.Nodes {
		v := heard.nodes[uint32(i)]
		if v.ready() {
			continue
		}
		out.NodesReady = false
	}
	v := heard.nodes[0]
	if v == nil {
		return out, nil
	}
	out.Attending, out.Since, out.HeardAt, out.Report = v.attending > 0, v.since, v.heardAt, heard.report(a)
	for i := range a.Nodes {
		if n := heard.nodes[uint32(i)]; n != nil {
			out.ShellAt, out.GPUUsedAt = latest(out.ShellAt, n.shellAt), latest(out.GPUUsedAt, n.gpuUsedAt)
		}
	}
	return out, v.card
}

// jitter is by how much two reports of one moment of use may differ.
const jitter = 3 * time.Second

func latest(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

func (v *voice) ready() bool {
	return v != nil && v.report != nil && v.report.Phase == agentv1.Phase_PHASE_READY
}
