package agent

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"strconv"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/cosmicac/cosmicac/pkg/daemon/node"
	"github.com/cosmicac/cosmicac/pkg/health"
	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/log"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	"github.com/cosmicac/cosmicac/pkg/trust"
	agentv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

// Sources of log lines.
const (
	SourceAgent   = "agent"
	SourceConsole = "console"
	SourceEngine  = "engine"
)

const (
	reportEvery = 5 * time.Second
	closeGrace  = 5 * time.Second
)

// Options make an Agent. Seed and StateDirectory are required.
type Options struct {
	// Name of the kind of agent, "wrk-agent-instance".
	Name, Version  string
	Seed           *agentv1.Seed
	StateDirectory string
	// Log lines go to Output (may be nil) and to the ring.
	Output io.Writer
	Level  hclog.Level
	// Now is the wall clock; time.Now when nil.
	Now func() time.Time
	// ReportEvery is the pause between reports without news; 5 s when zero.
	ReportEvery time.Duration
}

// Work is what a kind of agent does beside what all do.
type Work interface {
	// Register adds the agent's streams to the node, before it starts.
	Register(n *mesh.Node)
	// Run works until ctx ends. An error while ctx lives ends the agent.
	Run(ctx context.Context) error
	// Drain takes nothing new from now on, and returns when what runs has
	// finished or ctx ends. It may be called again.
	Drain(ctx context.Context)
	// StopGrace bounds that drain when the agent is stopped. The unit of the VM
	// allows 45 s in all before it kills.
	StopGrace() time.Duration
	// Describe adds the work's own part to a report and to the card. Either may be nil.
	Describe(report *agentv1.Report, card *meshv1.Card)
	// Gatherer adds metrics to the agent's own; nil for none.
	Gatherer() prometheus.Gatherer
}

// Agent is one agent. Its methods are safe for concurrent use.
type Agent struct {
	o       Options
	key     *identity.Key
	state   state
	network *trust.Network
	ring    *log.Ring
	log     hclog.Logger
	metrics *prometheus.Registry
	health  *health.Set
	revoked revocations
	ork     peer.ID
	node    *mesh.Node
	work    Work
	born    time.Time

	news        chan struct{}      // a report is due now
	drainWithin chan time.Duration // the one order to drain

	mu       sync.Mutex
	phase    agentv1.Phase
	message  string
	exitCode int32
	gpus     []*agentv1.Gpu
	useKnown bool      // whether a sample of the GPUs' work can be taken
	usedAt   time.Time // when one last showed work, or the first was taken
	sequence uint64
	draining bool
	tasks    sync.WaitGroup
}

// New loads or makes the agent's identity and reads what earlier starts have
// kept. It opens no connection. A state directory that holds another network's
// or another attempt's papers is used on: the key stays, the papers are replaced.
func New(o Options) (*Agent, error) {
	if err := CheckSeed(o.Seed); err != nil {
		return nil, err
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.ReportEvery <= 0 {
		o.ReportEvery = reportEvery
	}
	if o.Level == hclog.NoLevel {
		o.Level = hclog.Info
	}
	a := &Agent{o: o, state: state(o.StateDirectory), ring: log.NewRing(0), metrics: prometheus.NewRegistry(), born: o.Now(), news: make(chan struct{}, 1),
		drainWithin: make(chan time.Duration, 1)}
	a.log = hclog.New(&hclog.LoggerOptions{
		Name: o.Name, Level: o.Level, Output: &output{agent: a, next: o.Output},
		TimeFn: func() time.Time { return o.Now().UTC() }, TimeFormat: "2006-01-02T15:04:05.000Z",
	})
	a.health = health.NewSet(o.Now)
	a.phase, a.message = agentv1.Phase_PHASE_STARTING, "the agent starts"
	var err error
	if a.ork, err = identity.ParseID(o.Seed.GetOrkKey()); err != nil {
		return nil, err
	}
	if a.key, err = identity.LoadOrCreate(a.state.path("identity.key")); err != nil {
		return nil, err
	}
	if a.network, err = trust.NewMemory(o.Seed.GetNetworkId(), o.Seed.GetRootKeys()); err != nil {
		return nil, err
	}
	if roster, info := a.state.read(rosterFile), a.state.read(infoFile); len(roster) > 0 || len(info) > 0 {
		if _, err := a.network.AdoptEach(roster, info); err != nil {
			a.log.Warn("a kept record is not used", "reason", err)
		}
	}
	a.loadRevocations()
	return a, nil
}

// Seed is what the VM was born with; it must not be changed.
func (a *Agent) Seed() *agentv1.Seed { return a.o.Seed }

// ID is the agent's key.
func (a *Agent) ID() peer.ID { return a.key.ID() }

// Log is the agent's logger.
func (a *Agent) Log() hclog.Logger { return a.log }

// Now is the agent's wall clock.
func (a *Agent) Now() time.Time { return a.o.Now() }

// Path is a file of the state directory.
func (a *Agent) Path(name string) string { return a.state.path(name) }

// Metrics is where the work registers its own.
func (a *Agent) Metrics() *prometheus.Registry { return a.metrics }

// Line adds one line of a source to the log that wrk-monitor reads.
func (a *Agent) Line(source string, text []byte) { a.ring.Add(source, a.o.Now(), text) }

// Set changes the phase and the line that explains it, and reports it at once.
func (a *Agent) Set(phase agentv1.Phase, message string) {
	message = cutLine(message, 500)
	a.mu.Lock()
	same := a.phase == phase && a.message == message
	a.phase, a.message = phase, message
	a.mu.Unlock()
	if !same {
		a.log.Info("phase", "phase", phaseName(phase), "message", message)
		a.Changed()
	}
}

// SetGPUs and SetExitCode change the report.
func (a *Agent) SetGPUs(gpus []*agentv1.Gpu) {
	a.mu.Lock()
	a.gpus = gpus
	a.mu.Unlock()
	a.Changed()
}

// SetGPUUse notes a sample of the GPUs' work: whether it could be taken, and whether
// any of them was at work. Reports say for how long none was.
func (a *Agent) SetGPUUse(known, working bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.useKnown = known; working || a.usedAt.IsZero() {
		a.usedAt = a.o.Now()
	}
}

// SetExitCode says how the start script or the engine ended.
func (a *Agent) SetExitCode(code int) {
	a.mu.Lock()
	a.exitCode = int32(code)
	a.mu.Unlock()
	a.Changed()
}

// Changed makes a report go out now.
func (a *Agent) Changed() {
	select {
	case a.news <- struct{}{}:
	default:
	}
}

// Report makes the newest report.
func (a *Agent) Report() *agentv1.Report {
	a.mu.Lock()
	r := &agentv1.Report{
		Phase: a.phase, Message: a.message, Time: timestamp(a.o.Now()), Gpus: a.gpus, ExitCode: a.exitCode,
		Simulated: a.o.Seed.GetSimulated(),
	}
	if a.useKnown {
		r.GpuUseKnown, r.GpuIdleSeconds = true, uint32(max(a.o.Now().Sub(a.usedAt), 0)/time.Second)
	}
	if a.draining && r.Phase != agentv1.Phase_PHASE_FAILED {
		r.Phase = agentv1.Phase_PHASE_DRAINING
	}
	// Microseconds of the clock, so that it grows across restarts as well.
	a.sequence = max(a.sequence+1, uint64(a.o.Now().UnixMicro()))
	r.Sequence = a.sequence
	work := a.work
	a.mu.Unlock()
	if work != nil {
		work.Describe(r, nil)
	}
	return r
}

// Draining tells whether the agent was told to finish.
func (a *Agent) Draining() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.draining
}

// Run joins the mesh and does the work until ctx ends or something fails for
// good. Then it drains, takes its card back and returns; all goroutines have
// ended. The start order: services stand before the node listens, the node
// listens before the link to wrk-ork is kept, and the work runs beside all that,
// since a shell or an engine does not need wrk-ork.
func (a *Agent) Run(ctx context.Context, work Work) error {
	a.mu.Lock()
	a.work = work
	a.mu.Unlock()
	seed := a.o.Seed
	credential, held := a.credential()
	n, err := mesh.New(ctx, mesh.Options{
		Key: a.key, Network: a.network, Credential: credential, Listen: listenOn(seed), Bootstraps: seed.GetBootstraps(),
		Name: meshName(seed.GetAttemptId()), Version: a.o.Version, Features: seed.GetFeatures(), StateDirectory: a.o.StateDirectory,
		// A VM's address is mostly its host's secret; a simulated one is a process on this host.
		Private: !seed.GetSimulated(), DHT: mesh.DHTOff, Vet: a.revoked.check, Card: a.completeCard, Log: a.log.Named("mesh"), Clock: a.o.Now,
	})
	if err != nil {
		return err
	}
	a.node = n
	gatherers := prometheus.Gatherers{a.metrics}
	if g := work.Gatherer(); g != nil {
		gatherers = append(gatherers, g)
	}
	meshv1.RegisterNodeServer(n, &node.Service{
		Key: a.key, Network: a.network, Mesh: n, Name: seed.GetAttemptId(), Version: a.o.Version, Features: seed.GetFeatures(),
		StartedAt: a.born, Ring: a.ring, Health: a.health, Metrics: gatherers, Clock: a.o.Now,
		Ready: func() bool { return a.Report().GetPhase() == agentv1.Phase_PHASE_READY },
	})
	agentv1.RegisterAgentServer(n, &orders{agent: a})
	work.Register(n)
	if err := n.Start(ctx); err != nil {
		_ = n.Close(ctx)
		return err
	}
	// The mesh lives longer than ctx: what runs finishes on it.
	living, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	release := n.Keep(a.ork, seed.GetOrkAddresses()...)
	failed := make(chan error, 1)
	a.tasks.Go(func() { a.keepNetwork(living) })
	a.tasks.Go(func() { a.enroll(living, held) })
	a.tasks.Go(func() { a.drainOnOrder(living) })
	a.tasks.Go(func() {
		if err := work.Run(living); err != nil && living.Err() == nil {
			failed <- err
		}
	})
	a.log.Info("agent started", "key", a.key.ID(), "job", seed.GetJobId(), "attempt", seed.GetAttemptId(), "simulated", seed.GetSimulated(),
		"addresses", n.Addresses())

	select {
	case err = <-failed:
		a.Set(agentv1.Phase_PHASE_FAILED, err.Error())
	case <-ctx.Done():
		grace, cancel := context.WithTimeout(living, work.StopGrace())
		a.mu.Lock()
		a.draining = true
		a.mu.Unlock()
		a.log.Info("stopping, what runs is finished first", "within", work.StopGrace())
		a.Changed()
		work.Drain(grace)
		cancel()
	}
	stop()
	a.tasks.Wait()
	release()
	farewell, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeGrace)
	defer cancel()
	return errors.Join(err, n.Close(farewell))
}

func (a *Agent) completeCard(c *meshv1.Card) {
	seed := a.o.Seed
	c.JobId, c.ReplicaId, c.AttemptId = seed.GetJobId(), seed.GetReplicaId(), seed.GetAttemptId()
	c.Name = "" // names are of the roster
	a.work.Describe(nil, c)
}

// keepNetwork keeps newer rosters and NetworkInfo for the next start, when
// wrk-ork and the bootstraps may have moved.
func (a *Agent) keepNetwork(ctx context.Context) {
	changes, cancel := a.network.Subscribe()
	defer cancel()
	written := map[string][]byte{infoFile: a.state.read(infoFile), rosterFile: a.state.read(rosterFile)}
	for {
		for file, now := range map[string][]byte{infoFile: a.network.InfoEnvelope(), rosterFile: a.network.RosterEnvelope()} {
			if len(now) == 0 || bytes.Equal(now, written[file]) {
				continue
			}
			if err := a.state.write(file, now); err != nil {
				a.log.Error("a newer record could not be kept", "file", file, "error", err)
				continue
			}
			written[file] = now
		}
		select {
		case <-changes:
		case <-ctx.Done():
			return
		}
	}
}

// agents is wrk-ork's side.
func (a *Agent) agents() orkv1.AgentsClient { return orkv1.NewAgentsClient(a.node.Client(a.ork)) }

// listenOn is the seed's address in every form that the mesh speaks.
func listenOn(seed *agentv1.Seed) []string {
	port := strconv.Itoa(int(seed.GetMeshPort()))
	address := func(ip net.IP) []string {
		kind := "/ip6/"
		if ip.To4() != nil {
			kind = "/ip4/"
		}
		return []string{kind + ip.String() + "/tcp/" + port, kind + ip.String() + "/udp/" + port + "/quic-v1"}
	}
	if ip := net.ParseIP(seed.GetMeshListen()); ip != nil {
		return address(ip)
	}
	list := address(net.IPv4zero)
	if l, err := net.Listen("tcp6", "[::]:0"); err == nil { // some kernels have no IPv6
		l.Close()
		list = append(list, address(net.IPv6unspecified)...)
	}
	return list
}

// meshName fits what the mesh allows for a name.
func meshName(attempt string) string { return attempt[:min(len(attempt), 63)] }

// output is where the agent's own lines go.
type output struct {
	agent *Agent
	mu    sync.Mutex
	next  io.Writer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.next != nil {
		_, _ = o.next.Write(p)
	}
	for line := range bytes.SplitSeq(bytes.TrimRight(p, "\n"), []byte{'\n'}) {
		o.agent.Line(SourceAgent, line)
	}
	return len(p), nil
}
