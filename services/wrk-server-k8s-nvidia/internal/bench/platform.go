package main

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/goccy/go-yaml"
	"github.com/hashicorp/go-hclog"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/cosmicac/cosmicac/pkg/daemon"
	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	"github.com/cosmicac/cosmicac/pkg/trust"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

// platform is one network on loopback: the embedded cluster, a bootstrap, the
// orchestrator and one rack's worker as processes, and this process, which plays
// app-node and reads metrics as a monitor does.
type platform struct {
	dir       string
	networkID string
	network   *trust.Network // of this process
	admin     *rest.Config   // of the cluster

	cluster, bootstrap, ork, worker *process
	orkID, workerID                 string
	node                            *mesh.Node
	jobs                            orkv1.JobsClient
	racks                           orkv1.RacksClient
	metrics                         meshv1.NodeClient // the worker's
	captured                        [][]*unstructured.Unstructured
}

// process is a child with its log.
type process struct {
	name string
	cmd  *exec.Cmd
	in   io.Closer
}

func spawn(dir, name, binary string, args ...string) (*process, io.Reader, error) {
	log, err := os.Create(filepath.Join(dir, name+".stderr"))
	if err != nil {
		return nil, nil, err
	}
	defer log.Close()
	cmd := exec.Command(binary, args...)
	cmd.Stderr = log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C is ours to pass on
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, nil, fmt.Errorf("start %s: %w", name, err)
	}
	return &process{name: name, cmd: cmd, in: in}, out, nil
}

// end asks the process to stop and waits.
func (p *process) end() error {
	if p == nil {
		return nil
	}
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return fmt.Errorf("stop %s: %w", p.name, err)
	}
	kill := time.AfterFunc(time.Minute, func() { _ = p.cmd.Process.Kill() })
	defer kill.Stop()
	defer p.in.Close()
	if err := p.cmd.Wait(); err != nil {
		return fmt.Errorf("stop %s: %w", p.name, err)
	}
	return nil
}

// peak is the most memory that the process has held, in MB.
func (p *process) peak() (float64, error) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	if err != nil {
		return 0, err
	}
	for _, line := range strings.Split(string(raw), "\n") {
		if rest, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			kb, err := strconv.ParseFloat(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 64)
			return kb / 1024, err
		}
	}
	return 0, fmt.Errorf("no peak of %s", p.name)
}

// cpu is the processor time that the process has used.
func (p *process) cpu() time.Duration {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.cmd.Process.Pid))
	if err != nil {
		return 0
	}
	f := strings.Fields(string(raw[strings.LastIndexByte(string(raw), ')')+1:]))
	if len(f) < 13 {
		return 0
	}
	user, _ := strconv.Atoi(f[11])
	system, _ := strconv.Atoi(f[12])
	return time.Duration(user+system) * 10 * time.Millisecond // USER_HZ is 100
}

func startPlatform(ctx context.Context, o options) (_ *platform, err error) {
	p := &platform{dir: o.dir}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.stop())
		}
	}()
	kubeconfig := filepath.Join(o.dir, "worker.kubeconfig")
	if err := p.startCluster(o, kubeconfig); err != nil {
		return nil, err
	}
	ports, err := freePorts(3)
	if err != nil {
		return nil, err
	}
	addresses := map[string]string{}
	for i, name := range []string{"bootstrap", "ork", "worker"} {
		addresses[name] = fmt.Sprintf("/ip4/127.0.0.1/tcp/%d", ports[i])
	}
	driver, err := p.found(addresses)
	if err != nil {
		return nil, err
	}
	for _, d := range []struct {
		into  **process
		name  string
		extra map[string]any
	}{
		// The brake on a node's starts is let off: on this machine a simulated start
		// takes minutes under load, and the last jobs would only show that.
		{&p.bootstrap, "bootstrap", nil}, {&p.ork, "ork", map[string]any{"quarantine": map[string]any{"starts_at_once": gpusANode}}},
		{&p.worker, "worker", map[string]any{"rack": map[string]any{"id": rackID}, "kubeconfig": kubeconfig, "namespace": namespace}},
	} {
		binary := map[string]string{"bootstrap": "mesh-bootstrap", "ork": "wrk-ork", "worker": "wrk-server-k8s-nvidia"}[d.name]
		if *d.into, err = p.startDaemon(d.name, filepath.Join(o.bin, "cosmicac-"+binary), addresses[d.name], d.extra); err != nil {
			return nil, err
		}
	}
	return p, p.drive(ctx, o, driver, addresses)
}

func (p *platform) startCluster(o options, kubeconfig string) error {
	dir := filepath.Join(o.dir, "cluster")
	c, out, err := spawn(o.dir, "cluster", filepath.Join(o.bin, "cosmicac-devcluster"), "up", "--dir", dir, "--play-vms", "--stop-on-stdin-close",
		"--manifests", filepath.Join(o.repository, "deploy", "kubernetes"), "--kubeconfig-for", namespace+"/cosmicac-worker="+kubeconfig,
		"--pool", fmt.Sprintf("name=scale,nodes=%d,gpus=%d,resource=%s", o.nodes, gpusANode, resource),
		"--import-time", "100ms", "--boot-time", "100ms", "--log-level", "warn")
	if err != nil {
		return err
	}
	p.cluster = c
	var ready struct {
		Kubeconfig string `json:"kubeconfig"`
	}
	line, err := bufio.NewReader(out).ReadBytes('\n')
	if err == nil {
		err = json.Unmarshal(line, &ready)
	}
	if err != nil {
		return fmt.Errorf("start the embedded cluster: %w", err)
	}
	p.admin, err = clientcmd.BuildConfigFromFlags("", ready.Kubeconfig)
	return err
}

// found makes the network: keys, roster, a folder for each daemon.
func (p *platform) found(addresses map[string]string) (*identity.Key, error) {
	var members []*meshv1.Member
	keys := map[string]*identity.Key{}
	for name, roles := range map[string][]meshv1.Role{
		"bootstrap": {meshv1.Role_ROLE_BOOTSTRAP}, "ork": {meshv1.Role_ROLE_ORK}, "worker": {meshv1.Role_ROLE_WORKER},
		"driver": {meshv1.Role_ROLE_APP_NODE, meshv1.Role_ROLE_MONITOR},
	} {
		state := filepath.Join(p.dir, name)
		if err := os.MkdirAll(state, 0o700); err != nil {
			return nil, err
		}
		key, err := identity.LoadOrCreate(filepath.Join(state, daemon.KeyFile))
		if err != nil {
			return nil, err
		}
		keys[name] = key
		members = append(members, &meshv1.Member{Key: key.ID().String(), Name: name, Roles: roles, SignsCertificates: name == "ork", SignsGrants: name == "driver"})
	}
	p.orkID, p.workerID = keys["ork"].ID().String(), keys["worker"].ID().String()
	root, err := identity.New(rand.Reader)
	if err != nil {
		return nil, err
	}
	folder := filepath.Join(p.dir, "driver", "network")
	p.network, err = trust.Create(folder, "bench", root, nil, members, []*meshv1.BootstrapAddress{
		{Key: keys["bootstrap"].ID().String(), Addresses: []string{addresses["bootstrap"]}},
	})
	if err != nil {
		return nil, err
	}
	p.networkID = p.network.ID().String()
	for _, name := range []string{"bootstrap", "ork", "worker"} {
		if err := os.CopyFS(filepath.Join(p.dir, name, "network"), os.DirFS(folder)); err != nil {
			return nil, err
		}
		if err := closed(filepath.Join(p.dir, name, "network")); err != nil {
			return nil, err
		}
	}
	return keys["driver"], nil
}

// closed gives a copied folder the modes that daemons demand.
func closed(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := os.Chmod(filepath.Join(dir, e.Name()), 0o600); err != nil {
			return err
		}
	}
	return os.Chmod(dir, 0o700)
}

func (p *platform) startDaemon(name, binary, address string, extra map[string]any) (*process, error) {
	state := filepath.Join(p.dir, name)
	settings := map[string]any{"name": name, "state_directory": state, "mesh": map[string]any{"listen": []string{address}}, "log": map[string]any{"level": "info"}}
	for k, v := range extra {
		settings[k] = v
	}
	text, err := yaml.Marshal(settings)
	if err != nil {
		return nil, err
	}
	file := filepath.Join(state, "config.yaml")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		return nil, err
	}
	d, _, err := spawn(p.dir, name, binary, "--config", file)
	return d, err
}

// drive joins the mesh as app-node and waits until the whole rack is offered.
func (p *platform) drive(ctx context.Context, o options, key *identity.Key, addresses map[string]string) error {
	var err error
	p.node, err = mesh.New(ctx, mesh.Options{
		Key: key, Network: p.network, Role: meshv1.Role_ROLE_APP_NODE, Listen: []string{"/ip4/127.0.0.1/tcp/0"}, Log: hclog.NewNullLogger(), DHT: mesh.DHTServer,
	})
	if err != nil {
		return err
	}
	if err := p.node.Start(ctx); err != nil {
		return err
	}
	ork, err := identity.ParseID(p.orkID)
	if err != nil {
		return err
	}
	worker, err := identity.ParseID(p.workerID)
	if err != nil {
		return err
	}
	conn := p.node.Client(ork, addresses["ork"])
	p.jobs, p.racks = orkv1.NewJobsClient(conn), orkv1.NewRacksClient(conn)
	p.metrics = meshv1.NewNodeClient(p.node.Client(worker, addresses["worker"]))
	entry := &orkv1.RackEntry{Id: rackID, Location: "us", Key: p.workerID, BoardGpuCounts: []uint32{1, 2, 3, 4, 5, 6, 7, 8}}
	quota := &orkv1.ProjectQuota{ProjectId: project, Revision: 1, Unlimited: true}
	err = await(ctx, o.patience, "the orchestrator takes the rack's entry", func() (string, error) {
		if _, err := p.racks.PutRack(ctx, &orkv1.PutRackRequest{Entry: entry}); err != nil {
			return err.Error(), nil
		}
		if _, err := orkv1.NewQuotasClient(conn).PutQuotas(ctx, &orkv1.PutQuotasRequest{Quotas: []*orkv1.ProjectQuota{quota}}); err != nil {
			return err.Error(), nil
		}
		return "", nil
	})
	if err != nil {
		return err
	}
	return await(ctx, o.patience, "the rack offers every node", func() (string, error) {
		r, err := p.racks.ListRacks(ctx, &orkv1.ListRacksRequest{})
		if err != nil {
			return err.Error(), nil
		}
		for _, rack := range r.Racks {
			if rack.Connected && len(rack.Nodes) == o.nodes {
				return "", nil
			}
		}
		return fmt.Sprint(len(r.Racks), " racks, not connected or without all nodes"), nil
	})
}

// stopDaemons ends everything but the cluster.
func (p *platform) stopDaemons() error {
	var errs []error
	if p.node != nil {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		errs = append(errs, p.node.Close(ctx))
		cancel()
		p.node = nil
	}
	for _, d := range []**process{&p.worker, &p.ork, &p.bootstrap} {
		errs = append(errs, (*d).end())
		*d = nil
	}
	return errors.Join(errs...)
}

func (p *platform) stop() error {
	err := p.stopDaemons()
	err = errors.Join(err, p.cluster.end())
	p.cluster = nil
	return err
}

// freePorts finds loopback ports. They are free again when it returns; on a
// machine that is measured on, nobody takes them in between.
func freePorts(n int) ([]int, error) {
	var ports []int
	for range n {
		l, err := net.Listen("tcp4", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		defer l.Close()
		ports = append(ports, l.Addr().(*net.TCPAddr).Port)
	}
	return ports, nil
}
