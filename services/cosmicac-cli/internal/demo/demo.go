// Package demo starts the whole platform on loopback, each daemon its own
// process, and runs the main job before the user's eyes through the public
// face only. The Kubernetes cluster is embedded and its GPUs and machines are
// simulated; everything else is what production runs. It does not talk to the
// daemons by any way that a user does not have, and is no test of its own.
package demo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/goccy/go-yaml"
	"github.com/google/renameio/v2"

	"github.com/cosmicac/cosmicac/pkg/fault"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	"github.com/cosmicac/cosmicac/services/cosmicac-cli/internal/install"
)

// Email is the demo's administrator.
const Email = "admin@localhost"

// Options say where the parts are and how much to do.
type Options struct {
	// Bin holds the binaries, UI the built web interface, Repository the
	// folder with deploy/.
	Bin, UI, Repository string
	// Directory gets everything the demo writes; empty picks one.
	Directory string
	// Port of the web interface on loopback; 0 picks a free one.
	Port int
	// Once ends after the main job.
	Once bool
	// SkipMainJob only starts the platform.
	SkipMainJob bool
	// ClusterFlags go to cosmicac-devcluster beside the demo's own.
	ClusterFlags []string
	Out          io.Writer
}

// Demo is a running platform.
type Demo struct {
	o        Options
	dir      string
	lock     *os.File
	group    group
	cluster  clusterReady
	daemons  []install.Daemon
	password string
	started  time.Time
	port     int
	mu       sync.Mutex
}

// clusterReady is the line that cosmicac-devcluster prints.
type clusterReady struct {
	Kubeconfig  string            `json:"kubeconfig"`
	URL         string            `json:"url"`
	CAFile      string            `json:"ca_file"`
	PID         int               `json:"pid"`
	Kubeconfigs map[string]string `json:"kubeconfigs"`
}

// Run starts the platform, runs the main job, and stays until ctx is done
// (or ends after the main job with Once). The error says what fell short.
func Run(ctx context.Context, o Options) error {
	d, err := Start(ctx, o)
	if err != nil {
		return err
	}
	defer d.Stop()
	if !o.SkipMainJob {
		if err := d.MainJob(ctx); err != nil {
			return err
		}
	}
	d.PrintTable()
	if err := d.writeReady(); err != nil {
		return err
	}
	if o.Once {
		return nil
	}
	fmt.Fprintln(o.Out, "\nEverything stays up until Ctrl-C.")
	<-ctx.Done()
	fmt.Fprintln(o.Out, "\nstopping")
	return nil
}

func (d *Demo) say(format string, a ...any) {
	d.mu.Lock()
	defer d.mu.Unlock()
	fmt.Fprintf(d.o.Out, "[%5.1fs] %s\n", time.Since(d.started).Seconds(), fmt.Sprintf(format, a...))
}

// Start brings every daemon up and registers the two racks. On error nothing
// is left running.
func Start(ctx context.Context, o Options) (_ *Demo, err error) {
	d := &Demo{o: o, started: time.Now()}
	if d.o.Bin, err = filepath.Abs(o.Bin); err != nil {
		return nil, err
	}
	if d.o.UI, err = filepath.Abs(o.UI); err != nil {
		return nil, err
	}
	if d.o.Repository, err = filepath.Abs(o.Repository); err != nil {
		return nil, err
	}
	d.group.say = d.say
	if err := d.takeDirectory(); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			d.Stop()
		}
	}()
	d.say("everything is written to %s", d.dir)
	if err := d.plan(); err != nil {
		return nil, err
	}
	steps := []struct {
		what string
		do   func(context.Context) error
	}{
		{"embedded Kubernetes cluster (real API server and scheduler; nodes, GPUs and machines are simulated)", d.startCluster},
		{"two mesh-bootstraps", d.startDaemons(meshv1.Role_ROLE_BOOTSTRAP)},
		{"wrk-ork", d.startDaemons(meshv1.Role_ROLE_ORK)},
		{"app-node, with a first administrator", d.startAppNode},
		{"two wrk-server-k8s-nvidia: racks us and in", d.startDaemons(meshv1.Role_ROLE_WORKER)},
		{"proxy-inference", d.startDaemons(meshv1.Role_ROLE_PROXY)},
		{"wrk-monitor", d.startDaemons(meshv1.Role_ROLE_MONITOR)},
		{"Caddy", d.startCaddy},
		{"the two racks' entries", d.registerRacks},
	}
	for _, s := range steps {
		d.say("starting %s", s.what)
		if err := s.do(ctx); err != nil {
			return nil, fmt.Errorf("start %s: %w", s.what, err)
		}
	}
	return d, nil
}

// takeDirectory picks the demo's folder and empties it. A folder that another
// demo holds, or that is not a demo's, is never touched.
func (d *Demo) takeDirectory() error {
	candidates := []string{d.o.Directory}
	if d.o.Directory == "" {
		candidates = nil
		for i := 1; i <= 20; i++ {
			candidates = append(candidates, filepath.Join("build", fmt.Sprintf("demo-%d", i)))
		}
	}
	for _, c := range candidates {
		dir, err := filepath.Abs(c)
		if err != nil {
			return err
		}
		marker := filepath.Join(dir, ".cosmicac-demo")
		if entries, err := os.ReadDir(dir); err == nil && len(entries) > 0 {
			if _, err := os.Stat(marker); err != nil {
				return fault.New(fault.Conflict, "%s holds files that are not a demo's; name another folder with --dir", dir)
			}
		}
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return fault.Wrap(fault.Invalid, err, "make demo folder %s", dir)
		}
		f, err := os.OpenFile(marker, os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			return fault.Wrap(fault.Invalid, err, "open %s", marker)
		}
		if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
			f.Close()
			if d.o.Directory != "" {
				return fault.New(fault.Conflict, "another demo runs in %s; name another folder with --dir", dir)
			}
			continue
		}
		d.dir, d.lock = dir, f
		d.endMachines()
		entries, err := os.ReadDir(dir)
		if err != nil {
			return err
		}
		for _, e := range entries {
			if e.Name() == ".cosmicac-demo" {
				continue
			}
			if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
				return fault.Wrap(fault.Invalid, err, "empty demo folder %s", dir)
			}
		}
		return nil
	}
	return fault.New(fault.Exhausted, "twenty demos run already; name a folder with --dir")
}

func (d *Demo) files(x install.Daemon) install.Files {
	base := filepath.Join(d.dir, x.Name)
	return install.Files{
		Config: filepath.Join(base, "config.yaml"), State: filepath.Join(base, "state"),
		Log: filepath.Join(base, x.Name+".log"), Status: filepath.Join(base, "status.json"),
	}
}

// WorkerNamespace is where the worker's objects live.
const WorkerNamespace = "cosmicac"

// plan picks ports, makes keys, roster and configs of a fresh network.
func (d *Demo) plan() error {
	ports, release, err := freePorts(12)
	if err != nil {
		return err
	}
	defer release()
	next := func() int { p := ports[0]; ports = ports[1:]; return p }
	if d.port = d.o.Port; d.port == 0 {
		d.port = next()
	} else if l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", d.port)); err != nil {
		return fault.Wrap(fault.Conflict, err, "--port %d is taken; name another, or none for a free one", d.port)
	} else {
		l.Close()
	}
	http := func(name string) yaml.MapSlice {
		return yaml.MapSlice{{Key: "http", Value: yaml.MapSlice{{Key: "listen", Value: "unix://" + d.socket(name)}}}}
	}
	worker := func(rack string) install.Daemon {
		return install.Daemon{Name: "worker-" + rack, Service: "wrk-server-k8s-nvidia", Role: meshv1.Role_ROLE_WORKER, MeshPort: next(), Extra: yaml.MapSlice{
			{Key: "rack", Value: yaml.MapSlice{{Key: "id", Value: rack}}},
			{Key: "kubeconfig", Value: filepath.Join(d.dir, "cluster", "worker.kubeconfig")},
			{Key: "namespace", Value: WorkerNamespace},
			{Key: "node_selector", Value: "topology.kubernetes.io/region=" + rack},
		}}
	}
	d.daemons = []install.Daemon{
		{Name: "bootstrap-1", Service: "mesh-bootstrap", Role: meshv1.Role_ROLE_BOOTSTRAP, MeshPort: next()},
		{Name: "bootstrap-2", Service: "mesh-bootstrap", Role: meshv1.Role_ROLE_BOOTSTRAP, MeshPort: next()},
		{Name: "wrk-ork", Service: "wrk-ork", Role: meshv1.Role_ROLE_ORK, MeshPort: next()},
		{Name: "app-node", Service: "app-node", Role: meshv1.Role_ROLE_APP_NODE, MeshPort: next(), Extra: http("app-node")},
		worker("us"), worker("in"),
		{Name: "proxy-inference", Service: "proxy-inference", Role: meshv1.Role_ROLE_PROXY, MeshPort: next(), Extra: http("proxy-inference")},
		{Name: "wrk-monitor", Service: "wrk-monitor", Role: meshv1.Role_ROLE_MONITOR, MeshPort: next(), Extra: http("wrk-monitor")},
	}
	result, err := install.Make(install.Plan{
		NetworkName: "demo", Daemons: d.daemons, Layout: d.files, OperatorDirectory: filepath.Join(d.dir, "operator"),
		Listen: "127.0.0.1", LogLevel: "info", LogForm: "text", Now: time.Now(),
	})
	if err != nil {
		return err
	}
	d.say("made network %s with %d keys", result.NetworkID, len(result.Keys))
	return nil
}

// socket is the unix socket of a daemon's HTTP face. It lives in a short
// folder, since the kernel allows 107 bytes.
func (d *Demo) socket(name string) string {
	path := filepath.Join(d.dir, "sock", name)
	if len(path) > 100 {
		sum := fmt.Sprintf("%x", fnv(d.dir))
		path = filepath.Join(os.TempDir(), "cosmicac-"+sum, name)
	}
	_ = os.MkdirAll(filepath.Dir(path), 0o700)
	return path
}

func fnv(s string) uint64 {
	h := uint64(14695981039346656037)
	for i := 0; i < len(s); i++ {
		h = (h ^ uint64(s[i])) * 1099511628211
	}
	return h
}

// freePorts finds n loopback ports free for TCP and UDP alike and holds them
// until release, so that one call never gives the same port twice.
func freePorts(n int) (ports []int, release func(), err error) {
	var held []io.Closer
	release = func() {
		for _, c := range held {
			c.Close()
		}
	}
	for tries := 0; len(ports) < n && tries < 50*n; tries++ {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			release()
			return nil, nil, fault.Wrap(fault.Exhausted, err, "find a free port")
		}
		port := l.Addr().(*net.TCPAddr).Port
		u, err := net.ListenPacket("udp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			l.Close()
			continue
		}
		held = append(held, l, u)
		ports = append(ports, port)
	}
	if len(ports) < n {
		release()
		return nil, nil, fault.New(fault.Exhausted, "fewer than %d ports are free on loopback", n)
	}
	return ports, release, nil
}

func (d *Demo) start(name string, grace time.Duration, command func() *exec.Cmd) {
	d.group.start(&process{name: name, command: command}, grace)
}

// openLog opens what a child writes to its standard error. Daemons keep a log
// file of their own; this catches what comes before it, and panics.
func (d *Demo) openLog(name string) *os.File {
	path := filepath.Join(d.dir, name, "stderr.log")
	_ = os.MkdirAll(filepath.Dir(path), 0o755)
	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil
	}
	return f
}

func (d *Demo) startCluster(ctx context.Context) error {
	ready := filepath.Join(d.dir, "cluster", "ready.json")
	if err := os.MkdirAll(filepath.Dir(ready), 0o755); err != nil {
		return err
	}
	d.start("cluster", 20*time.Second, func() *exec.Cmd {
		cmd := exec.Command(filepath.Join(d.o.Bin, "cosmicac-devcluster"), "up", "--dir", filepath.Join(d.dir, "cluster", "data"),
			"--manifests", filepath.Join(d.o.Repository, "deploy", "kubernetes"), "--agent-dir", d.o.Bin,
			"--kubeconfig-for", WorkerNamespace+"/cosmicac-worker="+filepath.Join(d.dir, "cluster", "worker.kubeconfig"))
		cmd.Args = append(cmd.Args, d.o.ClusterFlags...)
		if f, err := os.OpenFile(ready, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600); err == nil {
			cmd.Stdout = f
		}
		cmd.Stderr = d.openLog("cluster")
		return cmd
	})
	return d.waitFor(ctx, "the cluster", 5*time.Minute, "cluster", func() bool {
		raw, err := os.ReadFile(ready)
		return err == nil && strings.HasSuffix(string(raw), "\n") && json.Unmarshal(raw, &d.cluster) == nil
	})
}

// waitFor polls until ok; on time-out the error ends with the child's last words.
func (d *Demo) waitFor(ctx context.Context, what string, limit time.Duration, child string, ok func() bool) error {
	deadline := time.Now().Add(limit)
	for !ok() {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if time.Now().After(deadline) {
			return fault.New(fault.Timeout, "%s was not ready after %s; last lines of %s:\n%s", what, limit, child, tail(filepath.Join(d.dir, child, "stderr.log"), 2000))
		}
		select {
		case <-ctx.Done():
		case <-time.After(50 * time.Millisecond):
		}
	}
	return nil
}

// startDaemons starts all daemons of a role and waits for them to be ready.
func (d *Demo) startDaemons(role meshv1.Role) func(context.Context) error {
	return func(ctx context.Context) error {
		for _, x := range d.daemons {
			if x.Role != role {
				continue
			}
			f := d.files(x)
			d.start(x.Name, 15*time.Second, func() *exec.Cmd {
				cmd := exec.Command(filepath.Join(d.o.Bin, x.Binary()), "--config", f.Config)
				cmd.Env = outside()
				cmd.Stderr = d.openLog(x.Name)
				return cmd
			})
		}
		for _, x := range d.daemons {
			if x.Role != role {
				continue
			}
			if err := d.waitFor(ctx, x.Name, 2*time.Minute, x.Name, func() bool { return d.status(x).Ready }); err != nil {
				return err
			}
		}
		return nil
	}
}

// daemonStatus is the part of a daemon's status file that the demo shows.
type daemonStatus struct {
	Name      string   `json:"name"`
	Key       string   `json:"key"`
	PID       int      `json:"pid"`
	Ready     bool     `json:"ready"`
	Addresses []string `json:"addresses"`
}

func (d *Demo) status(x install.Daemon) daemonStatus {
	var s daemonStatus
	if raw, err := os.ReadFile(d.files(x).Status); err == nil {
		_ = json.Unmarshal(raw, &s)
	}
	// A status file left by a killed process is not the new one's word.
	if p := d.child(x.Name); p == nil || p.PID() != s.PID {
		s.Ready = false
	}
	return s
}

func (d *Demo) child(name string) *process {
	for _, m := range d.group.parts {
		if m.process.name == name {
			return m.process
		}
	}
	return nil
}

func (d *Demo) startAppNode(ctx context.Context) error {
	var err error
	if d.password, err = install.Password(); err != nil {
		return err
	}
	for _, x := range d.daemons {
		if x.Role != meshv1.Role_ROLE_APP_NODE {
			continue
		}
		cmd := exec.CommandContext(ctx, filepath.Join(d.o.Bin, x.Binary()), "create-administrator", "--config", d.files(x).Config, "--email", Email)
		cmd.Stdin = strings.NewReader(d.password + "\n")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("create the administrator: %w: %s", err, out)
		}
	}
	return d.startDaemons(meshv1.Role_ROLE_APP_NODE)(ctx)
}

func (d *Demo) startCaddy(ctx context.Context) error {
	d.start("caddy", 10*time.Second, func() *exec.Cmd {
		cmd := exec.Command(filepath.Join(d.o.Bin, "caddy"), "run", "--config", filepath.Join(d.o.Repository, "deploy", "caddy", "Caddyfile"), "--adapter", "caddyfile")
		home := filepath.Join(d.dir, "caddy")
		cmd.Env = append(outside(), "HOME="+home, "XDG_DATA_HOME="+home, "XDG_CONFIG_HOME="+home,
			"COSMICAC_SITE="+fmt.Sprintf("http://:%d", d.port), "COSMICAC_BIND=127.0.0.1", "COSMICAC_UI_ROOT="+d.o.UI,
			"COSMICAC_APP_NODE=unix/"+d.socket("app-node"), "COSMICAC_PROXY=unix/"+d.socket("proxy-inference"), "COSMICAC_MONITOR=unix/"+d.socket("wrk-monitor"))
		cmd.Stderr = d.openLog("caddy")
		return cmd
	})
	return d.waitFor(ctx, "Caddy", time.Minute, "caddy", func() bool {
		c, err := net.DialTimeout("tcp", fmt.Sprintf("127.0.0.1:%d", d.port), time.Second)
		if err != nil {
			return false
		}
		c.Close()
		return true
	})
}

// URL of the web interface.
func (d *Demo) URL() string { return fmt.Sprintf("http://localhost:%d", d.port) }

// Stop ends every daemon, the cluster and the machines it booted.
func (d *Demo) Stop() {
	d.group.stop()
	if d.dir != "" {
		d.endMachines()
	}
	if d.lock != nil {
		d.lock.Close()
	}
}

// PrintTable shows what runs, with memory, and how to get in.
func (d *Demo) PrintTable() {
	w := tabwriter.NewWriter(d.o.Out, 2, 8, 2, ' ', 0)
	fmt.Fprintln(w, "\nNAME\tPID\tMEMORY\tRESTARTS\tKEY\tLOG")
	for _, m := range d.group.parts {
		p := m.process
		key, log := "-", filepath.Join(d.dir, p.name, "stderr.log")
		for _, x := range d.daemons {
			if x.Name == p.name {
				key, log = d.status(x).Key, d.files(x).Log
			}
		}
		pid := p.PID()
		p.mu.Lock()
		restarts := p.restarts
		p.mu.Unlock()
		fmt.Fprintf(w, "%s\t%d\t%.0f MB\t%d\t%s\t%s\n", p.name, pid, float64(residentBytes(pid))/1e6, restarts, key, log)
	}
	w.Flush()
	fmt.Fprintf(d.o.Out, "\nWeb interface  %s\nLogin          %s  %s\n", d.URL(), Email, d.password)
	fmt.Fprintf(d.o.Out, "CLI            COSMICAC_CONFIG_DIR=%s %s jobs list\n", filepath.Join(d.dir, "user"), filepath.Join(d.o.Bin, "cosmicac"))
	fmt.Fprintf(d.o.Out, "kubectl        kubectl --kubeconfig %s get vmi -A\n", d.cluster.Kubeconfig)
}

// writeReady leaves the way in for programs, readable by this user alone.
func (d *Demo) writeReady() error {
	raw, err := json.Marshal(map[string]string{"url": d.URL(), "email": Email, "password": d.password, "kubeconfig": d.cluster.Kubeconfig})
	if err != nil {
		return err
	}
	return renameio.WriteFile(filepath.Join(d.dir, "ready.json"), append(raw, '\n'), 0o600)
}

var errShort = errors.New("the main job fell short")
