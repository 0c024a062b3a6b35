package agent_test

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cosmicac/cosmicac/pkg/agent"
	"github.com/cosmicac/cosmicac/pkg/agent/agenttest"
	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	agentv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var eventually = agenttest.Eventually

// work counts what it is told.
type work struct {
	mu      sync.Mutex
	drained int
}

func (w *work) Register(*mesh.Node) {}
func (w *work) Run(ctx context.Context) error {
	<-ctx.Done()
	return nil
}
func (w *work) Drain(context.Context) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.drained++
}
func (w *work) StopGrace() time.Duration { return time.Second }
func (w *work) Describe(r *agentv1.Report, c *meshv1.Card) {
	if r != nil {
		r.ShellSessions = 3
	}
	if c != nil {
		c.SshHostKey, c.DefaultUser = "ssh-ed25519 AAAA", "ubuntu"
	}
}
func (w *work) Gatherer() prometheus.Gatherer { return nil }

func (w *work) drains() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.drained
}

// run starts an agent; stop ends it and returns what Run returned.
func run(t *testing.T, lab *agenttest.Lab, dir string) (a *agent.Agent, w *work, stop func()) {
	t.Helper()
	return runAt(t, lab, dir, &lab.Clock)
}

// runAt is run with a clock of the agent's own.
func runAt(t *testing.T, lab *agenttest.Lab, dir string, clock *agenttest.Clock) (a *agent.Agent, w *work, stop func()) {
	t.Helper()
	a, err := agent.New(agent.Options{
		Name: "wrk-agent-test", Version: "test", Seed: lab.Seed(), StateDirectory: dir, ReportEvery: 50 * time.Millisecond, Now: clock.Now,
	})
	if err != nil {
		t.Fatal(err)
	}
	w = &work{}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- a.Run(ctx, w) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("run: %v", err)
		}
	})
	t.Cleanup(stop)
	return a, w, stop
}

func TestTokenIsRedeemedOnceAndTheCertificateOutlivesARestart(t *testing.T) {
	t.Parallel()
	lab, dir := agenttest.New(t), t.TempDir()
	a, _, stop := run(t, lab, dir)
	eventually(t, "the agent attends", func() bool { return lab.Ork.Report() != nil })
	first := a.ID()
	eventually(t, "its card is with wrk-ork", func() bool { return lab.Ork.Card() != nil })
	if c := lab.Ork.Card(); c.GetKey() != first.String() || c.GetJobId() != agenttest.JobID || c.GetSshHostKey() == "" || len(c.GetAddresses()) == 0 {
		t.Fatalf("card %v", c)
	}
	for _, registry := range lab.Cards {
		eventually(t, "its card is with both bootstraps", func() bool { _, _, ok := registry.Get(first.String()); return ok })
	}
	stop()
	for _, registry := range lab.Cards {
		eventually(t, "the card is taken back at the stop", func() bool { _, _, ok := registry.Get(first.String()); return !ok })
	}
	a, _, stop = run(t, lab, dir)
	eventually(t, "the agent attends again", func() bool { _, _, n := lab.Ork.Seen(); return n >= 2 })
	if a.ID() != first {
		t.Fatalf("key %s became %s", first, a.ID())
	}
	stop()
	if redeemed, _, _ := lab.Ork.Seen(); redeemed != 1 {
		t.Fatalf("the token was redeemed %d times", redeemed)
	}
}

func TestCertificateOfAnEarlierAttemptIsNotUsed(t *testing.T) {
	t.Parallel()
	lab, dir := agenttest.New(t), t.TempDir()
	_, _, stop := run(t, lab, dir)
	eventually(t, "the agent attends", func() bool { return lab.Ork.Report() != nil })
	stop()
	// The same disk in a later attempt.
	seed := lab.Seed()
	seed.AttemptId = "a-0000000000002"
	a, err := agent.New(agent.Options{Name: "wrk-agent-test", Seed: seed, StateDirectory: dir})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- a.Run(ctx, &work{}) }()
	eventually(t, "it redeems its own token", func() bool { n, _, _ := lab.Ork.Seen(); return n >= 2 })
	cancel()
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
}

func TestAgentAttendsAgainAfterWrkOrkRestarts(t *testing.T) {
	t.Parallel()
	lab := agenttest.New(t)
	a, _, _ := run(t, lab, t.TempDir())
	eventually(t, "the agent attends", func() bool { return lab.Ork.Report() != nil })
	_, _, before := lab.Ork.Seen()
	lab.Ork.Down()
	a.Set(agentv1.Phase_PHASE_READY, "became ready while wrk-ork was away")
	lab.Ork.Up()
	eventually(t, "the agent attends again", func() bool { _, _, n := lab.Ork.Seen(); return n > before })
	eventually(t, "its newest report arrives", func() bool { return lab.Ork.Report().GetPhase() == agentv1.Phase_PHASE_READY })
	if redeemed, _, _ := lab.Ork.Seen(); redeemed != 1 {
		t.Fatalf("the token was redeemed %d times", redeemed)
	}
}

func TestReportSaysWhatIsSimulated(t *testing.T) {
	t.Parallel()
	lab := agenttest.New(t)
	a, _, _ := run(t, lab, t.TempDir())
	gpus, err := agent.ListGPUs(context.Background(), lab.Seed())
	if err != nil {
		t.Fatal(err)
	}
	a.SetGPUs(gpus)
	a.Set(agentv1.Phase_PHASE_READY, "")
	eventually(t, "the report is ready", func() bool { return lab.Ork.Report().GetPhase() == agentv1.Phase_PHASE_READY })
	r := lab.Ork.Report()
	if !r.GetSimulated() || len(r.GetGpus()) != 1 || !strings.HasPrefix(r.GetGpus()[0].GetUuid(), agent.SimulatedMark) ||
		!strings.Contains(r.GetGpus()[0].GetModel(), "simulated") || r.GetShellSessions() != 3 {
		t.Fatalf("report %v", r)
	}
}

func TestOrdersOfWrkOrkAreObeyed(t *testing.T) {
	t.Parallel()
	lab := agenttest.New(t)
	a, w, _ := run(t, lab, t.TempDir())
	eventually(t, "the agent attends", func() bool { return lab.Ork.Report() != nil })
	lab.Ork.Order(&orkv1.AttendResponse{Drain: true, DrainDeadline: timestamppb.New(time.Now().Add(time.Hour))})
	eventually(t, "the work drains", func() bool { return w.drains() == 1 })
	eventually(t, "the report says so", func() bool { return lab.Ork.Report().GetPhase() == agentv1.Phase_PHASE_DRAINING })
	report, err := agentv1.NewAgentClient(lab.Ork.Node().Client(a.ID())).GetReport(context.Background(), &agentv1.GetReportRequest{})
	if err != nil || report.GetReport().GetPhase() != agentv1.Phase_PHASE_DRAINING {
		t.Fatalf("asked for the report: %v, %v", report, err)
	}
}

func TestSeedNamesItsWrongFieldsAndNoSecret(t *testing.T) {
	t.Parallel()
	lab := agenttest.New(t)
	path := filepath.Join(t.TempDir(), "seed.json")
	write := func(change func(*agentv1.Seed)) error {
		seed := proto.CloneOf(lab.Seed())
		seed.JoinToken = "very-secret-token"
		change(seed)
		raw, err := protojson.Marshal(seed)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, raw, 0o644); err != nil {
			t.Fatal(err)
		}
		_, err = agent.LoadSeed(path)
		return err
	}
	if err := write(func(*agentv1.Seed) {}); err != nil {
		t.Fatal(err)
	}
	if err := write(func(s *agentv1.Seed) { s.Version = 2 }); fault.KindOf(err) != fault.Invalid || !strings.Contains(err.Error(), "version is 2") {
		t.Fatal(err)
	}
	err := write(func(s *agentv1.Seed) { s.OrkKey, s.AttemptId, s.MeshPort = "nonsense", "", 70000 })
	for _, field := range []string{"ork_key", "attempt_id", "mesh_port"} {
		if err == nil || !strings.Contains(err.Error(), field) {
			t.Fatalf("%s is not named in: %v", field, err)
		}
	}
	raw, _ := os.ReadFile(path)
	var broken map[string]any
	_ = json.Unmarshal(raw, &broken)
	broken["gpuCount"] = "very-secret-token"
	raw, _ = json.Marshal(broken)
	if err := os.WriteFile(path, raw, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := agent.LoadSeed(path); err == nil || strings.Contains(err.Error(), "very-secret-token") {
		t.Fatalf("a seed that is no seed: %v", err)
	}
}
