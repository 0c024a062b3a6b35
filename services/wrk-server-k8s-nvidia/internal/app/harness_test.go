package app

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/cosmicac/cosmicac/pkg/daemon"
	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/health"
	agentv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/cluster"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/label"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/tenure"
)

const (
	network   = "000102030405060708090a0b0c0d0e0f"
	namespace = "cosmicac"
	patience  = 2 * time.Minute
)

// pools are the nodes of the development cluster: each test has its own, with a
// model of its own where it matters.
var pools = map[string]string{
	"names": "nodes=1,gpus=8,resource=nvidia.com/GH100_H100_SXM5_80GB",
	"life":  "nodes=1,gpus=8,resource=nvidia.com/GH100_H100_SXM5_80GB", "gang": "nodes=2,gpus=8,hostdev=nvidia.com/mlnx_cx7,hostdevs=4,bridge=br-cosmicac,resource=nvidia.com/GH100_H100_SXM5_80GB",
	"kill": "nodes=1,gpus=8,resource=nvidia.com/GH100_H100_SXM5_80GB", "image": "nodes=1,gpus=2,resource=nvidia.com/GH100_H100_SXM5_80GB",
	"permit": "nodes=1,gpus=2,resource=nvidia.com/AD104GL_L4", "plugin": "nodes=1,gpus=8,resource=nvidia.com/GH100_H100_SXM5_80GB",
	"node": "nodes=1,gpus=2,resource=nvidia.com/GH100_H100_SXM5_80GB", "stuck": "nodes=1,gpus=2,resource=nvidia.com/GH100_H100_SXM5_80GB",
	"foreign": "nodes=1,gpus=4,resource=nvidia.com/GH100_H100_SXM5_80GB", "pair": "nodes=1,gpus=2,resource=nvidia.com/GH100_H100_SXM5_80GB",
	"login": "nodes=1,gpus=2,resource=nvidia.com/GH100_H100_SXM5_80GB", "orphan": "nodes=1,gpus=2,resource=nvidia.com/GH100_H100_SXM5_80GB",
	"daemon": "nodes=1,gpus=2,resource=nvidia.com/GH100_H100_SXM5_80GB", "chaos": "nodes=1,gpus=2,resource=nvidia.com/GH100_H100_SXM5_80GB",
	"disk": "nodes=1,gpus=2,resource=nvidia.com/GH100_H100_SXM5_80GB", "vanish": "nodes=1,gpus=4,resource=nvidia.com/GH100_H100_SXM5_80GB",
	"drain": "nodes=1,gpus=2,resource=nvidia.com/GH100_H100_SXM5_80GB", "reject": "nodes=1,gpus=8,resource=nvidia.com/GH100_H100_SXM5_80GB",
	"leak": "nodes=2,gpus=4,hostdev=nvidia.com/mlnx_cx7,hostdevs=2,bridge=br-cosmicac,resource=nvidia.com/GH100_H100_SXM5_80GB", "check": "nodes=1,gpus=2,resource=nvidia.com/GH100_H100_SXM5_80GB",
	"fault": "nodes=8,gpus=5,hostdev=nvidia.com/mlnx_cx7,hostdevs=2,bridge=br-cosmicac,resource=nvidia.com/GH100_H100_SXM5_80GB", "wait": "nodes=2,gpus=2,resource=nvidia.com/GH100_H100_SXM5_80GB",
	"volume": "nodes=1,gpus=4,resource=nvidia.com/GH100_H100_SXM5_80GB",
	"race":   "nodes=1,gpus=8,resource=nvidia.com/GH100_H100_SXM5_80GB", "fabric": "nodes=2,gpus=8,hostdev=nvidia.com/mlnx_cx7,hostdevs=4,bridge=br-cosmicac,resource=nvidia.com/GH100_H100_SXM5_80GB",
	"overlay": "nodes=4,gpus=3,hostdev=nvidia.com/mlnx_cx7,hostdevs=3,bridge=br-cosmicac,resource=nvidia.com/GH100_H100_SXM5_80GB",
	"probe":   "nodes=2,gpus=2,resource=nvidia.com/GH100_H100_SXM5_80GB", "halt": "nodes=1,gpus=2,resource=nvidia.com/GH100_H100_SXM5_80GB",
	"ports": "nodes=1,gpus=4,resource=nvidia.com/GH100_H100_SXM5_80GB",
}

// devcluster is the one cluster of this test process: a real API server.
type devcluster struct {
	dir, kubeconfig string // the worker's account
	admin           *cluster.Client
	stop            func()
}

var (
	startOnce sync.Once
	running   *devcluster
	startErr  error
)

func TestMain(m *testing.M) {
	quietKubernetes(hclog.NewNullLogger())
	if os.Getenv(helperEnv) != "" {
		os.Exit(helper())
	}
	if os.Getenv(asDaemon) != "" {
		daemon.Main("wrk-server-k8s-nvidia", Defaults, func(c *Config) *daemon.Base { return &c.Base }, Run)
		return
	}
	code := m.Run()
	if running != nil {
		running.stop()
	}
	if code == 0 {
		if err := goleak.Find(
			goleak.IgnoreTopFunction("k8s.io/klog/v2.(*flushDaemon).run.func1"),
			goleak.IgnoreTopFunction("github.com/libp2p/go-libp2p/p2p/transport/quicreuse.init"),
		); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

// binary finds cosmicac-devcluster.
func binary() (string, error) {
	if b := os.Getenv("COSMICAC_DEVCLUSTER_BIN"); b != "" {
		return b, nil
	}
	root, err := repository()
	if err != nil {
		return "", err
	}
	b := filepath.Join(root, "build", "bin", "cosmicac-devcluster")
	_, err = os.Stat(b)
	return b, err
}

func repository() (string, error) {
	dir, err := os.Getwd()
	for ; err == nil && dir != "/"; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.work")); err == nil {
			return dir, nil
		}
	}
	return "", fmt.Errorf("no go.work above: %w", os.ErrNotExist)
}

// agentScript plays both agents: it leaves a mark beside its seed and on each volume, and powers
// its machine off where the seed's script says so.
const agentScript = `#!/bin/sh
seed=$2
attempt=$(sed -n 's/.*"attempt_id":"\([^"]*\)".*/\1/p' "$seed")
echo "$0" > "$(dirname "$seed")/ran-$attempt"
for v in "$(dirname "$seed")"/../../volumes/*/; do
	[ -d "$v" ] && echo "$attempt" >>"$v/log"
done
if grep -q '"start_script":"poweroff"' "$seed" && tr '\0' ' ' </proc/1/cmdline | grep -q vm-init; then
	kill -38 1
fi
while :; do sleep 1000; done
`

// start brings the cluster up, once.
func start(t *testing.T) *devcluster {
	t.Helper()
	bin, err := binary()
	if err != nil {
		if os.Getenv("COSMICAC_REQUIRE_CLUSTER") != "" {
			t.Fatalf("cosmicac-devcluster is required and not there: %v", err)
		}
		t.Skipf("needs a real API server: build cosmicac-devcluster or name it in COSMICAC_DEVCLUSTER_BIN (%v)", err)
	}
	startOnce.Do(func() { running, startErr = up(bin) })
	if startErr != nil {
		t.Fatalf("start cosmicac-devcluster: %v", startErr)
	}
	return running
}

func up(bin string) (*devcluster, error) {
	root, err := repository()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "cosmicac-worker-test-")
	if err != nil {
		return nil, err
	}
	agents := filepath.Join(dir, "agents")
	if err := os.Mkdir(agents, 0o755); err != nil {
		return nil, err
	}
	for _, name := range []string{"cosmicac-wrk-agent-instance", "cosmicac-wrk-agent-inference"} {
		if err := os.WriteFile(filepath.Join(agents, name), []byte(agentScript), 0o755); err != nil {
			return nil, err
		}
	}
	d := &devcluster{dir: dir, kubeconfig: filepath.Join(dir, "worker.kubeconfig")}
	args := []string{"up", "--dir", filepath.Join(dir, "cluster"), "--manifests", filepath.Join(root, "deploy", "kubernetes"), "--agent-dir", agents,
		"--kubeconfig-for", namespace + "/cosmicac-worker=" + d.kubeconfig, "--stop-on-stdin-close", "--log-level", "warn"}
	for name, rest := range pools {
		args = append(args, "--pool", "name="+name+","+rest)
	}
	cmd := exec.Command(bin, args...)
	log, err := os.Create(filepath.Join(dir, "cluster.log"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd.Stderr = log
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	d.stop = func() {
		in.Close()
		done := make(chan struct{})
		go func() { defer close(done); _ = cmd.Wait() }()
		select {
		case <-done:
		case <-time.After(time.Minute):
			_ = cmd.Process.Kill()
			<-done
		}
		os.RemoveAll(dir)
	}
	var ready struct {
		Kubeconfig string `json:"kubeconfig"`
	}
	line, err := bufio.NewReader(out).ReadBytes('\n')
	if err == nil {
		err = json.Unmarshal(line, &ready)
	}
	if err != nil {
		words, _ := os.ReadFile(log.Name())
		d.stop()
		return nil, fmt.Errorf("%w: %s %s", err, line, words)
	}
	go func() { _, _ = io.Copy(io.Discard, out) }()
	conn, err := cluster.NewConnection(cluster.ConnectionOptions{Kubeconfig: ready.Kubeconfig})
	if err != nil {
		return nil, err
	}
	d.admin, err = cluster.NewClient(conn, namespace, "test")
	return d, err
}

// worker is a rack's worker in this process, without a mesh.
type worker struct {
	*Worker
	t      *testing.T
	d      *devcluster
	rack   string
	health *health.Set
	cancel context.CancelFunc
	done   chan struct{}
	errs   chan error
}

func config(d *devcluster, rack string) Config {
	c := Defaults()
	c.Rack.ID, c.Kubeconfig, c.NodeSelector = rack, d.kubeconfig, "topology.kubernetes.io/region="+rack
	return c
}

// setup is a worker's with a place of its own.
func setup(c Config, place string) Setup {
	return Setup{
		Config: c, Network: network, Version: "test", Health: health.NewSet(nil), Metrics: prometheus.NewRegistry(), Now: time.Now,
		Self: tenure.Holder{Key: "key-of-" + c.Rack.ID, Place: place, Instance: fmt.Sprint(time.Now().UnixNano())}, Log: hclog.NewNullLogger(),
	}
}

// begin starts a worker for the pool of this name.
func begin(t *testing.T, d *devcluster, rack string, change ...func(*Setup)) *worker {
	t.Helper()
	s := setup(config(d, rack), "host:/state")
	if os.Getenv("COSMICAC_TEST_LOG") != "" {
		s.Log = hclog.New(&hclog.LoggerOptions{Name: rack, Level: hclog.Debug})
	}
	for _, c := range change {
		c(&s)
	}
	built, err := Build(s)
	if err != nil {
		t.Fatal(err)
	}
	w := &worker{Worker: built, t: t, d: d, rack: rack, health: s.Health, done: make(chan struct{}), errs: make(chan error, len(built.Tasks))}
	ctx, cancel := context.WithCancel(context.Background())
	w.cancel = cancel
	var wg sync.WaitGroup
	for _, task := range built.Tasks {
		wg.Go(func() {
			if err := task.Run(ctx); err != nil {
				w.errs <- fmt.Errorf("%s: %w", task.Name, err)
			}
		})
	}
	go func() { wg.Wait(); close(w.done) }()
	t.Cleanup(w.end)
	built.Entry.Put(&orkv1.RackEntry{Id: rack, Location: "us"})
	return w
}

// end stops the worker and waits for it.
func (w *worker) end() {
	w.cancel()
	<-w.done
}

func (w *worker) serves() *worker {
	w.t.Helper()
	eventually(w.t, "the worker serves", func() string {
		r, _ := w.Hub.Latest()
		switch {
		case !w.Tenure.Held():
			return "holds no Lease"
		case r == nil || !r.Synced:
			return "has not listed everything"
		}
		return ""
	})
	return w
}

// eventually waits until f says nothing.
func eventually(t *testing.T, what string, f func() string) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for {
		words := f()
		if words == "" {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("waited for: %s; %s", what, words)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// id makes a fresh id for the object of a test.
func id(t *testing.T, prefix string) string {
	name := strings.ToLower(strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' {
			return r
		}
		return -1
	}, t.Name()))
	if len(name) > 20 {
		name = name[len(name)-20:]
	}
	return fmt.Sprintf("%s-%s%d", prefix, name, time.Now().UnixNano()%100_000)
}

// request asks for one machine with so many GPUs on a node of the rack.
func request(rack, job, attempt string, gpus uint32, nodes ...string) *workerv1.ApplyAttemptRequest {
	if len(nodes) == 0 {
		nodes = []string{rack + "-gpu-00"}
	}
	req := &workerv1.ApplyAttemptRequest{
		AttemptId: attempt, JobId: job, ReplicaId: "r-" + strings.TrimPrefix(job, "j-"), AttemptNumber: 1, ProjectId: "p-1",
		Spec: &orkv1.JobSpec{
			Kind: orkv1.JobKind_JOB_KIND_GPU_CONTAINER, Name: "campaña \"1\"", Location: "us",
			Gpu: &orkv1.GpuRequest{Model: "GH100_H100_SXM5_80GB", Count: gpus}, CpuCoresPerGpu: 4, MemoryGibPerGpu: 16, DiskGib: 20,
			Image: &orkv1.Image{Name: "Ubuntu", Reference: "docker://images.example/ubuntu:22.04", DefaultUser: "ubuntu"},
		},
	}
	for _, n := range nodes {
		req.Nodes = append(req.Nodes, &workerv1.PlanNode{NodeName: n, GpuCount: gpus, Seed: &agentv1.Seed{
			Version: 1, JobId: job, AttemptId: attempt, JoinToken: "once", OrkAddresses: []string{"/ip4/192.0.2.7/tcp/4811"},
		}})
	}
	return req
}

// insist calls again while the worker cannot write, as ork does.
func (w *worker) insist(what string, call func(context.Context) error) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	eventually(w.t, what, func() string {
		err := call(ctx)
		if fault.KindOf(err) == fault.Unavailable {
			return err.Error()
		}
		if err != nil {
			w.t.Fatalf("%s: %v", what, err)
		}
		return ""
	})
}

func (w *worker) apply(req *workerv1.ApplyAttemptRequest) *workerv1.ApplyAttemptResponse {
	w.t.Helper()
	var res *workerv1.ApplyAttemptResponse
	w.insist("apply "+req.AttemptId, func(ctx context.Context) (err error) {
		res, err = w.Server.ApplyAttempt(ctx, req)
		return err
	})
	return res
}

func (w *worker) claim(req *workerv1.ApplyAttemptRequest) {
	w.t.Helper()
	if res := w.apply(req); !res.Claimed {
		w.t.Fatalf("%s is not claimed: %v %s", req.AttemptId, res.Reason, res.Message)
	}
}

func (w *worker) remove(attempt string) {
	w.t.Helper()
	w.insist("delete "+attempt, func(ctx context.Context) error {
		_, err := w.Server.DeleteAttempt(ctx, &workerv1.DeleteAttemptRequest{AttemptId: attempt, Reason: orkv1.Reason_REASON_STOP_REQUESTED})
		return err
	})
}

// status is the newest report's word on an attempt, nil when it lists none.
func (w *worker) status(attempt string) *workerv1.AttemptStatus {
	r, _ := w.Hub.Latest()
	for _, a := range r.GetAttempts() {
		if a.AttemptId == attempt {
			return a
		}
	}
	return nil
}

func (w *worker) until(attempt string, phase workerv1.AttemptPhase) *workerv1.AttemptStatus {
	w.t.Helper()
	var st *workerv1.AttemptStatus
	eventually(w.t, attempt+" is "+phase.String(), func() string {
		if st = w.status(attempt); st.GetPhase() == phase {
			return ""
		}
		return fmt.Sprint(st)
	})
	return st
}

func (w *worker) gone(attempt string) {
	w.t.Helper()
	eventually(w.t, attempt+" is in no report", func() string {
		if st := w.status(attempt); st != nil {
			return st.String()
		}
		return ""
	})
}

// gpu is the newest count of the first node's first model.
func (w *worker) gpu(node string) *orkv1.GpuCapacity {
	r, _ := w.Hub.Latest()
	for _, n := range r.GetNodes() {
		if n.Name == node && len(n.Gpus) > 0 {
			return n.Gpus[0]
		}
	}
	return &orkv1.GpuCapacity{}
}

// left names what the cluster holds with this label, seen with full rights.
func (d *devcluster) left(t *testing.T, selector string) []string {
	t.Helper()
	ctx, o := t.Context(), metav1.ListOptions{LabelSelector: selector}
	var out []string
	add := func(kind string, names []string, err error) {
		if err != nil {
			t.Fatalf("list %s: %v", kind, err)
		}
		for _, n := range names {
			out = append(out, kind+" "+n)
		}
	}
	vmis, err := d.admin.KubeVirt.VirtualMachineInstances(namespace).List(ctx, o)
	add("VMI", names(vmis.Items), err)
	pods, err := d.admin.Core.Pods(namespace).List(ctx, o)
	add("Pod", names(pods.Items), err)
	secrets, err := d.admin.Core.Secrets(namespace).List(ctx, o)
	add("Secret", names(secrets.Items), err)
	maps, err := d.admin.Core.ConfigMaps(namespace).List(ctx, o)
	add("ConfigMap", names(maps.Items), err)
	policies, err := d.admin.Networking.NetworkPolicies(namespace).List(ctx, o)
	add("NetworkPolicy", names(policies.Items), err)
	services, err := d.admin.Core.Services(namespace).List(ctx, o)
	add("Service", names(services.Items), err)
	networks, err := d.admin.Networks.NetworkAttachmentDefinitions(namespace).List(ctx, o)
	add("Network", names(networks.Items), err)
	disks, err := d.admin.CDI.DataVolumes(namespace).List(ctx, o)
	add("DataVolume", names(disks.Items), err)
	claims, err := d.admin.Core.PersistentVolumeClaims(namespace).List(ctx, o)
	add("PVC", names(claims.Items), err)
	return out
}

func names[T any, P interface {
	*T
	metav1.Object
}](items []T) []string {
	var out []string
	for i := range items {
		out = append(out, P(&items[i]).GetName())
	}
	return out
}

func of(attempt string) string { return label.Attempt + "=" + attempt }

// ran says whether an agent of this attempt was started in a machine.
func (d *devcluster) ran(attempt string) bool {
	found := false
	_ = filepath.WalkDir(filepath.Join(d.dir, "cluster"), func(path string, _ os.DirEntry, err error) error {
		if err == nil && filepath.Base(path) == "ran-"+attempt {
			found = true
			return filepath.SkipAll
		}
		return nil
	})
	return found
}

// breaks switches a simulated fault on for a node, or off with "".
func (d *devcluster) breaks(t *testing.T, name, node string) {
	t.Helper()
	maps := d.admin.Core.ConfigMaps(metav1.NamespaceSystem)
	patch := fmt.Sprintf(`{"data":{%q:%q}}`, name, node)
	if node == "" {
		patch = fmt.Sprintf(`{"data":{%q:null}}`, name)
	}
	eventually(t, "the fault is switched", func() string {
		_, err := maps.Patch(context.Background(), "cosmicac-devcluster-faults", types.MergePatchType, []byte(patch), metav1.PatchOptions{})
		if apierrors.IsNotFound(err) {
			_, err = maps.Create(context.Background(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "cosmicac-devcluster-faults"}}, metav1.CreateOptions{})
			if err == nil || apierrors.IsAlreadyExists(err) {
				return "made the switches"
			}
		}
		if err != nil {
			return err.Error()
		}
		return ""
	})
}

// kill ends a simulated machine's process without a goodbye.
func (d *devcluster) kill(t *testing.T, uid string) {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(d.dir, "cluster", "vms", uid, "process.json"))
	if err != nil {
		t.Fatal(err)
	}
	var of struct{ PID int }
	if err := json.Unmarshal(raw, &of); err != nil || of.PID < 2 {
		t.Fatalf("machine %s: %s, %v", uid, raw, err)
	}
	if err := syscall.Kill(of.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
}

func deleteDisks(w *worker, job string) func(context.Context) error {
	return func(ctx context.Context) error {
		_, err := w.Server.DeleteJobDisks(ctx, &workerv1.DeleteJobDisksRequest{JobId: job})
		return err
	}
}
