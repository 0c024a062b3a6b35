// Package app is the agent of a GPU Container Job put together: the SSH server on
// the mesh's "ssh" stream, the check of the GPUs and the start script.
//
// It does not decide who may come in: the mesh checked the grant, passes its rights
// to the SSH server, and cuts the connection when the grant is revoked.
package app

import (
	"context"
	"crypto/rand"
	"fmt"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/cosmicac/cosmicac/pkg/agent"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	"github.com/cosmicac/cosmicac/pkg/ssh"
	agentv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	"github.com/cosmicac/cosmicac/services/wrk-agent-instance/internal/gateway"
	"github.com/cosmicac/cosmicac/services/wrk-agent-instance/internal/script"
)

// StreamName is the mesh stream that carries SSH.
const StreamName = "ssh"

const (
	// gpuPatience is how long missing GPUs are waited for: an image may install
	// or load its driver at the first boot.
	gpuPatience = 5 * time.Minute
	gpuRetry    = 5 * time.Second
	// useEvery is how often the GPUs' work is sampled. A sample sees the last second
	// or less; a job that works in shorter bursts than every few minutes may be
	// taken for idle, and sets a longer idle stop.
	useEvery = 15 * time.Second
	gpuAgain = time.Minute
)

// Instance is the work of this kind of agent.
type Instance struct {
	agent   *agent.Agent
	shell   *ssh.Server
	gateway *gateway.Gateway
	user    string

	mu    sync.Mutex
	moved chan struct{} // closed and replaced when the number of sessions changes
}

// New makes the work: the host key, which outlives restarts with the disk, and
// the SSH server, which serves from the moment the mesh listens. What starts here
// ends with Run.
func New(a *agent.Agent) (agent.Work, error) {
	i := &Instance{agent: a, moved: make(chan struct{})}
	key, err := ssh.HostKey(a.Path("ssh_host_key"), rand.Reader)
	if err != nil {
		return nil, err
	}
	i.user = a.Seed().GetDefaultUser()
	if account, err := ssh.FindAccount("/etc", i.user); err == nil {
		i.user = account.Name // without root it is another than asked for
	}
	i.shell, err = ssh.NewServer(ssh.ServerOptions{
		HostKey: key, User: a.Seed().GetDefaultUser(), Environment: a.Seed().GetEnvironment(), Changed: i.changed, Log: a.Log().Named("ssh"),
	})
	if err != nil {
		return nil, err
	}
	i.gateway = gateway.New(gateway.Options{File: a.Path("gateway.json"), JobID: a.Seed().GetJobId(), Random: rand.Reader, Void: a.Void, Log: a.Log().Named("gateway")})
	a.OnRevoke(i.gateway.Expel)
	a.Metrics().MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "cosmicac_agent_shell_sessions", Help: "SSH sessions with a running process.",
	}, func() float64 { return float64(i.shell.Sessions()) }))
	return i, nil
}

func (i *Instance) changed() {
	i.mu.Lock()
	close(i.moved)
	i.moved = make(chan struct{})
	i.mu.Unlock()
	i.agent.Changed()
}

// Register answers SSH for clients with a grant, and for nobody else, and app-node
// on the gateway.
func (i *Instance) Register(n *mesh.Node) {
	agentv1.RegisterGatewaysServer(n, &gateways{gateway: i.gateway})
	n.Handle(StreamName, &meshv1.Right{Clients: true}, i.serve)
}

func (i *Instance) serve(ctx context.Context, s *mesh.Stream) {
	caller := s.Caller()
	access := ssh.Access{Client: caller.ID.String()}
	if caller.Grant == nil {
		return
	}
	if job := caller.Grant.GetJobId(); job != i.agent.Seed().GetJobId() {
		i.agent.Log().Warn("ssh refused, the grant is for another job", "client", caller.ID, "job", job)
		return
	}
	access.Rights, access.User = caller.Grant.GetRights(), caller.Grant.GetUserId()
	if err := i.shell.Serve(ctx, s, access); err != nil {
		i.agent.Log().Info("ssh connection refused", "client", caller.ID, "error", err)
	}
}

// Run mounts the volumes, checks the GPUs, becomes ready and runs the start script
// beside.
func (i *Instance) Run(ctx context.Context) error {
	defer i.gateway.Close()
	i.mountVolumes(ctx)
	var tasks sync.WaitGroup
	defer tasks.Wait()
	tasks.Go(func() { i.startScript(ctx) })
	tasks.Go(func() { i.sampleUse(ctx) })
	i.installKeys()
	i.watchGPUs(ctx)
	return nil
}

// watchGPUs is ready when the GPUs are there, and says so when one is lost later.
func (i *Instance) watchGPUs(ctx context.Context) {
	began := i.agent.Now()
	for {
		found, err := agent.ListGPUs(ctx, i.agent.Seed())
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			i.agent.SetGPUs(found)
			err = agent.CheckGPUs(i.agent.Seed(), found)
		}
		wait := gpuAgain
		switch {
		case err == nil:
			i.agent.Set(agentv1.Phase_PHASE_READY, "")
		case i.agent.Now().Sub(began) < gpuPatience:
			i.agent.Set(agentv1.Phase_PHASE_STARTING, "waits for the GPUs: "+err.Error())
			wait = gpuRetry
		default:
			i.agent.Set(agentv1.Phase_PHASE_FAILED, err.Error())
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return
		}
	}
}

// sampleUse keeps the report's word on how long no GPU has worked.
func (i *Instance) sampleUse(ctx context.Context) {
	tick := time.NewTicker(useEvery)
	defer tick.Stop()
	for {
		working, known := agent.SampleGPUUse(ctx, i.agent.Seed())
		if ctx.Err() != nil {
			return
		}
		i.agent.SetGPUUse(known, working)
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

func (i *Instance) startScript(ctx context.Context) {
	seed, log := i.agent.Seed(), i.agent.Log()
	if seed.GetStartScript() == "" {
		return
	}
	account, err := ssh.FindAccount("/etc", seed.GetDefaultUser())
	if err != nil {
		log.Error("the start script was not run", "error", err)
		i.agent.Line(agent.SourceConsole, []byte("cosmicac: the start script was not run: "+err.Error()))
		i.agent.SetExitCode(126)
		return
	}
	lines := i.agent.Lines(agent.SourceConsole)
	defer lines.Flush()
	s := script.Script{
		Attempt: seed.GetAttemptId(), Text: seed.GetStartScript(), Directory: i.agent.Path(""), Account: account,
		Environment: seed.GetEnvironment(), Output: lines,
	}
	outcome, err := s.Run(ctx)
	lines.Flush()
	switch {
	case ctx.Err() != nil:
	case err != nil:
		log.Error("the start script was not run", "error", err)
		i.agent.Line(agent.SourceConsole, []byte("cosmicac: the start script was not run: "+err.Error()))
		i.agent.SetExitCode(126)
	case !outcome.Ended:
		log.Warn("the start script was cut short by a restart and is not run again")
		i.agent.Line(agent.SourceConsole, []byte("cosmicac: the start script was cut short by a restart of the agent or the VM; it runs once in an attempt"))
	default:
		i.agent.SetExitCode(outcome.ExitCode)
		if outcome.Ran {
			log.Info("the start script ended", "exit_code", outcome.ExitCode)
			i.agent.Line(agent.SourceConsole, fmt.Appendf(nil, "cosmicac: the start script ended with exit code %d", outcome.ExitCode))
		}
	}
}

// Drain opens no new shells and waits for those that run.
func (i *Instance) Drain(ctx context.Context) {
	i.shell.Drain()
	for {
		i.mu.Lock()
		moved := i.moved
		i.mu.Unlock()
		if i.shell.Sessions() == 0 {
			return
		}
		select {
		case <-moved:
		case <-ctx.Done():
			return
		}
	}
}

// StopGrace is short: a person's shell has no end of its own.
func (i *Instance) StopGrace() time.Duration { return 3 * time.Second }

// Describe adds the sessions to a report, and how to log in to the card.
func (i *Instance) Describe(r *agentv1.Report, c *meshv1.Card) {
	if r != nil {
		r.ShellSessions = uint32(i.shell.Sessions())
	}
	if c != nil {
		c.SshHostKey, c.DefaultUser = i.shell.HostKey(), i.user
	}
}

// Gatherer adds nothing to the agent's own.
func (i *Instance) Gatherer() prometheus.Gatherer { return nil }
