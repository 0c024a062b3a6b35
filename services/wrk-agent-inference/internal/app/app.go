// Package app is the agent of a Managed Inference Job put together: the engine's
// supervisor, and the front that passes the mesh's "http" streams to the engine.
//
// It does not route, does not meter and does not check keys: proxies do.
package app

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/cosmicac/cosmicac/pkg/agent"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	agentv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	"github.com/cosmicac/cosmicac/services/wrk-agent-inference/internal/front"
	"github.com/cosmicac/cosmicac/services/wrk-agent-inference/internal/supervise"
)

// StreamName is the mesh stream that carries HTTP/1.1.
const StreamName = "http"

const (
	// drainGrace and engineGrace together stay below the 45 s of the VM's unit.
	drainGrace  = 20 * time.Second
	engineGrace = 15 * time.Second
	gpuPatience = 5 * time.Minute
	gpuRetry    = 5 * time.Second
	gatherTime  = 5 * time.Second
)

// Inference is the work of this kind of agent.
type Inference struct {
	agent  *agent.Agent
	engine *supervise.Supervisor
	front  *front.Front
	socket string
}

// New makes the work. The engine starts with Run.
func New(a *agent.Agent) (agent.Work, error) {
	return newInference(a, supervise.Timing{Grace: engineGrace})
}

func newInference(a *agent.Agent, timing supervise.Timing) (*Inference, error) {
	i := &Inference{agent: a, socket: a.Path("engine.sock")}
	lines := a.Lines(agent.SourceEngine)
	i.engine = supervise.New(supervise.Options{
		Prepare: func() (supervise.Launch, error) { return prepare(a.Seed(), i.socket) },
		// The key tells this VM's engine from others where VMs are processes of one host.
		Mark:   a.Seed().GetAttemptId() + "." + a.ID().String(),
		Output: lines, LastLine: lines.Last, Traffic: func() (int, time.Time) { return i.front.Traffic() },
		Changed: i.changed, Timing: timing, Log: a.Log().Named("engine"), Now: a.Now,
	})
	i.front = front.New(i.engine.Dial, a.Now)
	a.Metrics().MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "cosmicac_agent_http_streams", Help: "Open streams from proxies, idle ones included.",
	}, func() float64 { return float64(i.front.Streams()) }))
	a.Metrics().MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: "cosmicac_agent_engine_ends_total", Help: "How often the engine ended.",
	}, func() float64 { return float64(i.engine.Status().Ended) }))
	return i, nil
}

// Register answers HTTP for proxies.
func (i *Inference) Register(n *mesh.Node) {
	n.Handle(StreamName, &meshv1.Right{Roles: []meshv1.Role{meshv1.Role_ROLE_PROXY}}, func(ctx context.Context, s *mesh.Stream) {
		if err := i.front.Serve(ctx, s); err != nil {
			// A reset before the first byte tells the proxy to try another replica.
			_ = s.Reset()
			i.agent.Log().Debug("stream refused", "proxy", s.Caller().ID, "error", err)
		}
	})
}

// Run waits for the GPUs and keeps the engine until ctx ends. What can never work
// is said in the report and ends nothing: the report is how anyone learns of it.
func (i *Inference) Run(ctx context.Context) error {
	if err := checkRuntime(i.agent.Seed()); err != nil {
		i.agent.Set(agentv1.Phase_PHASE_FAILED, err.Error())
		<-ctx.Done()
		return nil
	}
	if len(i.socket) > 100 { // a socket's path has 107 bytes at most
		dir, err := os.MkdirTemp("", "cosmicac-engine-")
		if err != nil {
			return fmt.Errorf("make a folder for the engine's socket: %w", err)
		}
		defer os.RemoveAll(dir)
		i.socket = filepath.Join(dir, "engine.sock")
	}
	if !i.awaitGPUs(ctx) {
		return nil
	}
	return i.engine.Run(ctx)
}

// awaitGPUs is false when ctx ended first. Missing GPUs are waited for: an image
// may install or load its driver at the first boot. The embedded engine needs none.
func (i *Inference) awaitGPUs(ctx context.Context) bool {
	seed := i.agent.Seed()
	began := i.agent.Now()
	for {
		found, err := agent.ListGPUs(ctx, seed)
		if err == nil {
			i.agent.SetGPUs(found)
			err = agent.CheckGPUs(seed, found)
		}
		if err == nil || seed.GetEngine().GetRuntime() == RuntimeEmbedded {
			return ctx.Err() == nil
		}
		if i.agent.Now().Sub(began) < gpuPatience {
			i.agent.Set(agentv1.Phase_PHASE_STARTING, "waits for the GPUs: "+err.Error())
		} else {
			i.agent.Set(agentv1.Phase_PHASE_FAILED, err.Error())
		}
		timer := time.NewTimer(gpuRetry)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return false
		}
	}
}

func (i *Inference) changed() {
	s := i.engine.Status()
	if s.Ended > 0 {
		i.agent.SetExitCode(s.ExitCode)
	}
	switch s.State {
	case supervise.Ready:
		i.agent.Set(agentv1.Phase_PHASE_READY, "")
	case supervise.Failed:
		i.agent.Set(agentv1.Phase_PHASE_FAILED, s.Message)
	default: // not ready, and hopes to be
		i.agent.Set(agentv1.Phase_PHASE_STARTING, s.Message)
	}
}

// Drain takes no new streams and waits until the engine has answered what it was asked.
func (i *Inference) Drain(ctx context.Context) {
	i.front.Drain()
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for {
		busy, _ := i.front.Traffic()
		if s := i.engine.Status(); busy == 0 && s.Running == 0 && s.Waiting == 0 {
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// StopGrace lets answers that are under way finish.
func (i *Inference) StopGrace() time.Duration { return drainGrace }

// Describe adds the engine's load to a report, and whether its failure is for good.
func (i *Inference) Describe(r *agentv1.Report, _ *meshv1.Card) {
	if r != nil {
		s := i.engine.Status()
		r.RequestsRunning, r.RequestsWaiting, r.Final = s.Running, s.Waiting, s.Final
	}
}

// Gatherer adds the engine's own metrics, as far as they are vLLM's.
func (i *Inference) Gatherer() prometheus.Gatherer {
	return prometheus.GathererFunc(func() ([]*dto.MetricFamily, error) {
		ctx, cancel := context.WithTimeout(context.Background(), gatherTime)
		defer cancel()
		return i.engine.Families(ctx), nil
	})
}
