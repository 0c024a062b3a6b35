package app

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/goccy/go-yaml"
	"github.com/hashicorp/go-hclog"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cosmicac/cosmicac/pkg/daemon"
	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/health"
	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	"github.com/cosmicac/cosmicac/pkg/trust"
	agentv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/notice"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/record"
)

// asDaemon makes the test binary be the daemon, for tests that kill it.
const asDaemon = "ORK_TEST_AS_DAEMON"

func TestMain(m *testing.M) {
	if os.Getenv(asDaemon) != "" {
		daemon.Main("wrk-ork", Defaults, func(c *Config) *daemon.Base { return &c.Base }, Run)
	}
	goleak.VerifyTestMain(m)
}

// patience is generous: the machine may be busy.
const patience = 60 * time.Second

// lab is one network in one process: an orchestrator, a worker, app-node.
type lab struct {
	t       *testing.T
	ctx     context.Context
	dir     string
	founder *trust.Network
	orkKey  *identity.Key
	config  Config
	address string

	health *health.Set   // of the orchestrator in this process
	passes atomic.Uint64 // of its loop

	// ahead is how far the orchestrator's clock is ahead, in nanoseconds.
	ahead atomic.Int64

	// process runs the orchestrator as a process of its own; stop then kills it.
	process bool
	stop    func()
	app     *mesh.Node
	jobs    orkv1.JobsClient
	racks   orkv1.RacksClient
	worker  *fakeWorker
	rack    *mesh.Node    // the worker's node
	key     *identity.Key // the worker's
	bootKey *identity.Key // a bootstrap's; no test needs one to run
	app2Key *identity.Key // of a second app-node; see otherApp
}

func newKey(t *testing.T) *identity.Key {
	t.Helper()
	k, err := identity.New(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// newLab starts everything, with one rack "rk-test" in location us.
func newLab(t *testing.T, nodes ...*orkv1.RackNode) *lab {
	t.Helper()
	return startLab(t, false, nodes)
}

// newFabricLab has a rack that is joined from its first report on: a gang that
// is asked for before that is refused for good.
func newFabricLab(t *testing.T, nodes ...*orkv1.RackNode) *lab {
	t.Helper()
	return startLab(t, false, nodes, func(w *fakeWorker) { w.fabric = true })
}

var portsKept atomic.Uint32

// keptPort is free and stays so: it is below those that the kernel gives to
// connections, which are many here.
func keptPort(t *testing.T) int {
	t.Helper()
	for range 1000 {
		port := 20000 + (os.Getpid()*97+int(portsKept.Add(1)))%12000
		if probe, err := net.Listen("tcp4", fmt.Sprintf("127.0.0.1:%d", port)); err == nil {
			_ = probe.Close()
			return port
		}
	}
	t.Fatal("no port of 20000 to 31999 is free")
	return 0
}

// startLab sets the rack's worker up with before, ahead of its first report.
func startLab(t *testing.T, process bool, nodes []*orkv1.RackNode, before ...func(*fakeWorker)) *lab {
	t.Helper()
	l := &lab{t: t, ctx: t.Context(), dir: filepath.Join(t.TempDir(), "state"), orkKey: newKey(t), key: newKey(t), process: process}
	if err := os.Mkdir(l.dir, 0o700); err != nil {
		t.Fatal(err)
	}
	folder := ""
	if process {
		folder = filepath.Join(l.dir, "network")
		if err := os.Mkdir(folder, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := identity.Save(filepath.Join(l.dir, daemon.KeyFile), l.orkKey); err != nil {
			t.Fatal(err)
		}
	}
	root, appKey := newKey(t), newKey(t)
	l.bootKey, l.app2Key = newKey(t), newKey(t)
	member := func(k *identity.Key, name string, role meshv1.Role) *meshv1.Member {
		return &meshv1.Member{Key: k.ID().String(), Name: name, Roles: []meshv1.Role{role}, AdmittedAt: timestamppb.Now()}
	}
	ork := member(l.orkKey, "ork", meshv1.Role_ROLE_ORK)
	ork.SignsCertificates = true
	var err error
	l.founder, err = trust.Create(folder, "lab", root, nil, []*meshv1.Member{
		ork, member(appKey, "app", meshv1.Role_ROLE_APP_NODE), member(l.key, "worker", meshv1.Role_ROLE_WORKER),
		member(l.bootKey, "boot", meshv1.Role_ROLE_BOOTSTRAP), member(l.app2Key, "app2", meshv1.Role_ROLE_APP_NODE),
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	l.config = Defaults()
	l.config.Deadlines.AbsenceGrace = 300 * time.Millisecond
	l.config.Deadlines.RackSilence = 500 * time.Millisecond
	l.config.Deadlines.AgentSilence = time.Second
	l.config.Deadlines.Drain = 500 * time.Millisecond
	l.config.Retries.RefusalFirst = 50 * time.Millisecond
	l.config.Retries.RestartFirst = 50 * time.Millisecond
	l.config.Workers.Repeat = 500 * time.Millisecond

	// The port stays over restarts of the orchestrator.
	l.address = fmt.Sprintf("/ip4/127.0.0.1/tcp/%d", keptPort(t))

	if process {
		l.config.StateDirectory, l.config.Mesh.Listen = l.dir, []string{l.address}
		text, err := yaml.Marshal(l.config)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(l.dir, "config.yaml"), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	l.startOrk()
	t.Cleanup(func() { l.stop() })
	l.app = l.node(appKey, meshv1.Role_ROLE_APP_NODE, nil)
	conn := l.app.Client(l.orkKey.ID(), l.address)
	l.jobs, l.racks = orkv1.NewJobsClient(conn), orkv1.NewRacksClient(conn)
	l.worker = newFakeWorker(t, "rk-test", nodes...)
	for _, set := range before {
		set(l.worker)
	}
	l.eventually("the rack's entry is put", func() bool {
		_, err := l.racks.PutRack(l.ctx, &orkv1.PutRackRequest{Entry: &orkv1.RackEntry{Id: "rk-test", Location: "us", Key: l.key.Hex(), BoardGpuCounts: []uint32{1, 2, 3, 4, 5, 6, 7, 8}}})
		return err == nil
	})
	l.quota("p-1", &orkv1.ProjectQuota{Revision: 1, Unlimited: true})
	l.quota("p-2", &orkv1.ProjectQuota{Revision: 1, Unlimited: true})
	l.startWorker()
	l.connected(true)
	return l
}

func (l *lab) memory() *trust.Network {
	l.t.Helper()
	n := l.bare()
	if err := n.AdoptGenesis(l.founder.Genesis()); err != nil {
		l.t.Fatal(err)
	}
	if _, err := n.Adopt(l.founder.RosterEnvelope(), l.founder.InfoEnvelope()); err != nil {
		l.t.Fatal(err)
	}
	return n
}

func (l *lab) bare() *trust.Network {
	l.t.Helper()
	id := l.founder.ID()
	n, err := trust.NewMemory(id[:], l.founder.RootKeys())
	if err != nil {
		l.t.Fatal(err)
	}
	return n
}

// node starts a member of the network; it ends with the test.
func (l *lab) node(key *identity.Key, role meshv1.Role, before func(*mesh.Node)) *mesh.Node {
	l.t.Helper()
	n, err := mesh.New(context.Background(), mesh.Options{
		Key: key, Network: l.memory(), Role: role, Listen: []string{"/ip4/127.0.0.1/tcp/0"}, Log: hclog.NewNullLogger(),
	})
	if err != nil {
		l.t.Fatal(err)
	}
	if before != nil {
		before(n)
	}
	if err := n.Start(context.Background()); err != nil {
		l.t.Fatal(err)
	}
	l.t.Cleanup(func() { closeNode(n) })
	return n
}

func closeNode(n *mesh.Node) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	_ = n.Close(ctx)
}

func (l *lab) now() time.Time { return time.Now().Add(time.Duration(l.ahead.Load())) }

// startOrk starts the orchestrator on its folder, like a new process.
func (l *lab) startOrk() {
	l.t.Helper()
	if l.process {
		l.startProcess()
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	log := hclog.New(&hclog.LoggerOptions{Level: hclog.Debug, Output: testWriter{l.t}})
	if !testing.Verbose() {
		log = hclog.NewNullLogger()
	}
	hub := &notice.Hub{}
	store, err := record.Open(ctx, filepath.Join(l.dir, "ork.db"), hub, l.now)
	if err != nil {
		l.t.Fatal(err)
	}
	network := l.memory()
	l.health = health.NewSet(l.now)
	ork, err := Build(ctx, Setup{
		Config: l.config, Store: store, Hub: hub, Key: l.orkKey, Network: network,
		Health: l.health, Metrics: prometheus.NewRegistry(), Clock: l.now, Log: log,
		Alive: func() { l.passes.Add(1) },
		NewMesh: func(add func(*mesh.Options)) (*mesh.Node, error) {
			o := mesh.Options{Key: l.orkKey, Network: network, Listen: []string{l.address}, Log: hclog.NewNullLogger(), Clock: l.now}
			add(&o)
			return mesh.New(ctx, o)
		},
	})
	if err != nil {
		l.t.Fatal(err)
	}
	var tasks sync.WaitGroup
	for _, task := range ork.Tasks {
		tasks.Go(func() {
			if err := task.Run(ctx); err != nil {
				l.t.Errorf("%s: %v", task.Name, err)
			}
		})
	}
	if err := ork.Node.Start(ctx); err != nil {
		l.t.Fatal(err)
	}
	var once sync.Once
	l.stop = func() {
		once.Do(func() {
			closeNode(ork.Node)
			cancel()
			tasks.Wait()
			if err := store.Close(); err != nil {
				l.t.Errorf("close the record: %v", err)
			}
		})
	}
}

// startProcess runs the daemon itself; stop kills it without a word.
func (l *lab) startProcess() {
	l.t.Helper()
	var out bytes.Buffer
	cmd := exec.Command(os.Args[0], "--config", filepath.Join(l.dir, "config.yaml"))
	cmd.Env = append(os.Environ(), asDaemon+"=1")
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		l.t.Fatal(err)
	}
	l.stop = sync.OnceFunc(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if l.t.Failed() {
			l.t.Logf("the daemon said:\n%s", out.String())
		}
	})
}

// startWorker connects the rack's worker; cutWorker takes it off the network.
func (l *lab) startWorker() {
	l.t.Helper()
	l.rack = l.node(l.key, meshv1.Role_ROLE_WORKER, func(n *mesh.Node) { workerv1.RegisterRackServer(n, l.worker) })
	l.rack.Keep(l.orkKey.ID(), l.address)
	l.eventually("the worker registers", func() bool {
		_, err := orkv1.NewRacksClient(l.rack.Client(l.orkKey.ID(), l.address)).RegisterRack(l.ctx, &orkv1.RegisterRackRequest{RackId: "rk-test"})
		return err == nil
	})
}

func (l *lab) cutWorker() { closeNode(l.rack) }

func (l *lab) connected(want bool) {
	l.t.Helper()
	l.eventually(fmt.Sprintf("rack connected=%v", want), func() bool {
		r, err := l.racks.ListRacks(l.ctx, &orkv1.ListRacksRequest{})
		return err == nil && len(r.Racks) == 1 && r.Racks[0].Connected == want
	})
}

// eventually polls until the condition holds.
func (l *lab) eventually(what string, holds func() bool) {
	l.t.Helper()
	deadline := time.Now().Add(patience)
	for !holds() {
		if time.Now().After(deadline) {
			l.t.Fatalf("not within %s: %s", patience, what)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func containerSpec(name string, gpus uint32) *orkv1.JobSpec {
	return &orkv1.JobSpec{
		Kind: orkv1.JobKind_JOB_KIND_GPU_CONTAINER, Name: name, Location: "us", DiskGib: 10,
		Gpu:   &orkv1.GpuRequest{Model: model, Count: gpus},
		Image: &orkv1.Image{Reference: "docker://example/ubuntu:22.04", DefaultUser: "ubuntu"},
	}
}

func inferenceSpec(name string, replicas uint32) *orkv1.JobSpec {
	return &orkv1.JobSpec{
		Kind: orkv1.JobKind_JOB_KIND_MANAGED_INFERENCE, Name: name, Location: "us", Gpu: &orkv1.GpuRequest{Model: model, Count: 1},
		Inference: &orkv1.InferenceSpec{Model: "Qwen/Qwen3-32B", Runtime: "vllm", Replicas: replicas},
	}
}

// quota tells the orchestrator a project's quota.
func (l *lab) quota(project string, q *orkv1.ProjectQuota) {
	l.t.Helper()
	q.ProjectId = project
	l.eventually("the quota is told", func() bool {
		_, err := orkv1.NewQuotasClient(l.app.Client(l.orkKey.ID(), l.address)).PutQuotas(l.ctx, &orkv1.PutQuotasRequest{Quotas: []*orkv1.ProjectQuota{q}})
		return err == nil
	})
}

func (l *lab) create(s *orkv1.JobSpec) *orkv1.Job {
	l.t.Helper()
	r, err := l.jobs.CreateJob(l.ctx, &orkv1.CreateJobRequest{Spec: s, Owner: &orkv1.Owner{ProjectId: "p-1", UserId: "u-1"}})
	if err != nil {
		l.t.Fatal(err)
	}
	return r.Job
}

func (l *lab) get(id string) *orkv1.Job {
	l.t.Helper()
	var j *orkv1.Job
	l.eventually("the job can be read", func() bool {
		r, err := l.jobs.GetJob(l.ctx, &orkv1.GetJobRequest{Id: id})
		if err != nil && fault.KindOf(err) == fault.NotFound {
			l.t.Fatal(err)
		}
		j = r.GetJob()
		return err == nil
	})
	return j
}

// await waits for a state and returns the job in it.
func (l *lab) await(id string, want orkv1.State) *orkv1.Job {
	l.t.Helper()
	return l.awaitThat(id, job.StateName(want), func(j *orkv1.Job) bool { return j.State == want })
}

func (l *lab) awaitThat(id, what string, holds func(*orkv1.Job) bool) *orkv1.Job {
	l.t.Helper()
	var j *orkv1.Job
	deadline := time.Now().Add(patience)
	for {
		j = l.get(id)
		if holds(j) {
			return j
		}
		if time.Now().After(deadline) {
			l.t.Fatalf("job is not %s within %s: %v", what, patience, j)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func newest(j *orkv1.Job) *orkv1.Attempt {
	a := j.Replicas[0].Attempts
	return a[len(a)-1]
}

// agent is a VM's agent: a real node that redeems its token and attends.
type agent struct {
	key         *identity.Key
	node        *mesh.Node
	client      orkv1.AgentsClient
	certificate []byte
	stop        func()
	drain       chan *orkv1.AttendResponse

	mu  sync.Mutex
	was agentv1.Revocations // all that it was told
	end error               // how the last stream ended
}

// told is the lowest epoch that a user's grants may have, as this agent was told.
func (a *agent) told(user string) (epoch uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, f := range a.was.Grants {
		if f.UserId == user || f.UserId == "" {
			epoch = max(epoch, f.MinimumEpoch)
		}
	}
	return epoch
}

func (a *agent) certificateFloor(replica string) uint64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.was.Certificates[replica]
}

func (a *agent) ended() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.end
}

func seedOf(l *lab, attemptID string) *agentv1.Seed {
	l.t.Helper()
	l.eventually("the plan reaches the worker", func() bool { return l.worker.plan(attemptID) != nil })
	return l.worker.plan(attemptID).Nodes[0].Seed
}

// redeem shows the token with a key and returns the agent, or the refusal.
func (l *lab) redeem(seed *agentv1.Seed, key *identity.Key) (*agent, error) {
	l.t.Helper()
	n, err := mesh.New(context.Background(), mesh.Options{
		Key: key, Network: l.bare(), Credential: mesh.JoinToken(seed.JoinToken, l.orkKey.ID()), Log: hclog.NewNullLogger(),
		Listen: []string{"/ip4/127.0.0.1/tcp/0"},
		Card: func(c *meshv1.Card) {
			c.JobId, c.ReplicaId, c.AttemptId = seed.JobId, seed.ReplicaId, seed.AttemptId
		},
	})
	if err != nil {
		l.t.Fatal(err)
	}
	if err := n.Start(context.Background()); err != nil {
		l.t.Fatal(err)
	}
	l.t.Cleanup(func() { closeNode(n) })
	ork, err := identity.ParseID(seed.OrkKey)
	if err != nil {
		l.t.Fatal(err)
	}
	var conn grpc.ClientConnInterface = n.Client(ork, seed.OrkAddresses...)
	a := &agent{key: key, node: n, client: orkv1.NewAgentsClient(conn), drain: make(chan *orkv1.AttendResponse, 4)}
	ctx, cancel := context.WithTimeout(l.ctx, 20*time.Second)
	defer cancel()
	resp, err := a.client.RedeemToken(ctx, &orkv1.RedeemTokenRequest{JoinToken: seed.JoinToken})
	if err != nil {
		return nil, err
	}
	a.certificate = resp.CertificateEnvelope
	n.SetCredential(mesh.Certificate(resp.CertificateEnvelope))
	return a, nil
}

// attend keeps a stream open and reports a phase until stop.
func (l *lab) attend(a *agent, phase agentv1.Phase) {
	l.says(a, &agentv1.Report{Phase: phase, Message: "as told", Simulated: true})
}

// says is attend with any report.
func (l *lab) says(a *agent, report *agentv1.Report) {
	ctx, cancel := context.WithCancel(context.Background())
	var done sync.WaitGroup
	a.stop = sync.OnceFunc(func() { cancel(); done.Wait() })
	l.t.Cleanup(a.stop)
	done.Go(func() {
		for n := uint64(1); ctx.Err() == nil; n++ {
			s, err := a.client.Attend(ctx)
			if err == nil {
				said := proto.Clone(report).(*agentv1.Report)
				said.Sequence = n
				err = s.Send(&orkv1.AttendRequest{Report: said})
			}
			for err == nil {
				var r *orkv1.AttendResponse
				if r, err = s.Recv(); err == nil && r.Drain {
					select {
					case a.drain <- r:
					default:
					}
				}
				a.mu.Lock()
				proto.Merge(&a.was, r.GetRevocations())
				a.mu.Unlock()
			}
			a.mu.Lock()
			a.end = err
			a.mu.Unlock()
			select {
			case <-ctx.Done():
			case <-time.After(100 * time.Millisecond):
			}
		}
	})
}

// boot plays the agent of a job's newest attempt, ready as soon as the orchestrator has
// heard of its machine; until then an agent is told to try again.
func (l *lab) boot(attemptID string) *agent {
	l.t.Helper()
	var a *agent
	l.eventually("the agent is let in", func() (done bool) {
		var err error
		a, err = l.redeem(seedOf(l, attemptID), newKey(l.t))
		return err == nil
	})
	l.attend(a, agentv1.Phase_PHASE_READY)
	return a
}

type testWriter struct{ t *testing.T }

func (w testWriter) Write(b []byte) (int, error) {
	w.t.Logf("%s", b)
	return len(b), nil
}
