package app

import (
	"context"
	"crypto/rand"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/goccy/go-yaml"
	"google.golang.org/grpc"

	"github.com/cosmicac/cosmicac/pkg/daemon"
	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	"github.com/cosmicac/cosmicac/pkg/trust"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
)

// fakeOrk takes registrations.
type fakeOrk struct {
	orkv1.UnimplementedRacksServer
	entry *orkv1.RackEntry
	count atomic.Int32
}

func (f *fakeOrk) RegisterRack(ctx context.Context, req *orkv1.RegisterRackRequest) (*orkv1.RegisterRackResponse, error) {
	caller, _ := mesh.CallerFrom(ctx)
	if req.RackId != f.entry.Id || caller.ID.String() != f.entry.Key {
		return nil, fault.New(fault.NotFound, "no such rack")
	}
	f.count.Add(1)
	return &orkv1.RegisterRackResponse{Entry: f.entry}, nil
}

func key(t *testing.T) *identity.Key {
	t.Helper()
	k, err := identity.New(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// TestTheDaemonServesTheOrchestratorAlone runs the worker as a process, killed
// once, with an orchestrator on a real mesh node and a real API server.
func TestTheDaemonServesTheOrchestratorAlone(t *testing.T) {
	t.Parallel()
	d := start(t)
	state := filepath.Join(t.TempDir(), "state")
	if err := os.Mkdir(state, 0o700); err != nil {
		t.Fatal(err)
	}
	own, err := identity.LoadOrCreate(filepath.Join(state, daemon.KeyFile))
	if err != nil {
		t.Fatal(err)
	}
	orkKey, appKey := key(t), key(t)
	member := func(k *identity.Key, name string, role meshv1.Role) *meshv1.Member {
		return &meshv1.Member{Key: k.ID().String(), Name: name, Roles: []meshv1.Role{role}}
	}
	network, err := trust.Create(filepath.Join(state, "network"), "lab", key(t), nil, []*meshv1.Member{
		member(own, "worker-us", meshv1.Role_ROLE_WORKER), member(orkKey, "wrk-ork", meshv1.Role_ROLE_ORK), member(appKey, "app-node", meshv1.Role_ROLE_APP_NODE),
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	probe, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := fmt.Sprintf("/ip4/127.0.0.1/tcp/%d", probe.Addr().(*net.TCPAddr).Port)
	probe.Close()
	text, err := yaml.Marshal(map[string]any{
		"state_directory": state, "mesh": map[string]any{"listen": []string{address}}, "log": map[string]any{"level": "debug"},
		"rack": map[string]any{"id": "daemon"}, "kubeconfig": d.kubeconfig, "node_selector": "topology.kubernetes.io/region=daemon",
	})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(state, "config.yaml")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	launch := func() *exec.Cmd {
		cmd := exec.Command(os.Args[0], "--config", file)
		cmd.Env = append(os.Environ(), asDaemon+"=1")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		return cmd
	}
	process := launch()
	defer func() {
		_ = process.Process.Kill()
		_ = process.Wait()
		if t.Failed() {
			log, _ := os.ReadFile(filepath.Join(state, "wrk-server-k8s-nvidia.log"))
			t.Logf("the daemon said:\n%s", log)
		}
	}()

	node := func(k *identity.Key, role meshv1.Role, register func(*mesh.Node)) grpc.ClientConnInterface {
		n, err := mesh.New(t.Context(), mesh.Options{Key: k, Network: network, Role: role, Listen: []string{"/ip4/127.0.0.1/tcp/0"}})
		if err != nil {
			t.Fatal(err)
		}
		register(n)
		if err := n.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			defer cancel()
			_ = n.Close(ctx)
		})
		n.Keep(own.ID(), address)
		return n.Client(own.ID(), address)
	}
	ork := &fakeOrk{entry: &orkv1.RackEntry{Id: "daemon", Location: "us", Key: own.ID().String()}}
	rack := workerv1.NewRackClient(node(orkKey, meshv1.Role_ROLE_ORK, func(n *mesh.Node) { orkv1.RegisterRacksServer(n, ork) }))
	other := workerv1.NewRackClient(node(appKey, meshv1.Role_ROLE_APP_NODE, func(*mesh.Node) {}))

	eventually(t, "the rack registers", func() string {
		if ork.count.Load() == 0 {
			return "not yet"
		}
		return ""
	})
	// report waits for a report that f is content with.
	report := func(f func(*workerv1.WatchRackResponse) bool) *workerv1.WatchRackResponse {
		t.Helper()
		var last *workerv1.WatchRackResponse
		eventually(t, "a report that suits", func() string {
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			stream, err := rack.WatchRack(ctx, &workerv1.WatchRackRequest{Entry: ork.entry})
			if err != nil {
				return err.Error()
			}
			for {
				if last, err = stream.Recv(); err != nil {
					return err.Error()
				}
				if f(last) {
					return ""
				}
			}
		})
		return last
	}
	report(func(r *workerv1.WatchRackResponse) bool {
		return r.Synced && len(r.Nodes) == 1 && r.Nodes[0].Gpus[0].Offerable == 2
	})
	job, attempt := id(t, "j"), id(t, "a")
	req := request("daemon", job, attempt, 2)
	if _, err := other.ApplyAttempt(t.Context(), req); fault.KindOf(fault.FromGRPC(err)) != fault.Denied {
		t.Fatalf("app-node may claim: %v", err)
	}
	if stream, err := rack.WatchRack(t.Context(), &workerv1.WatchRackRequest{Entry: &orkv1.RackEntry{Id: "another"}}); err == nil {
		if _, err = stream.Recv(); fault.KindOf(fault.FromGRPC(err)) != fault.Invalid {
			t.Fatalf("another rack's entry: %v", err)
		}
	}
	res, err := rack.ApplyAttempt(t.Context(), req)
	if err != nil || !res.Claimed {
		t.Fatalf("%v, %v", res, err)
	}
	isUp := func(r *workerv1.WatchRackResponse) bool {
		return len(r.Attempts) == 1 && r.Attempts[0].Phase == up1 && r.Nodes[0].Gpus[0].Held == 2
	}
	uid := report(isUp).Attempts[0].Nodes[0].VmiUid

	_ = process.Process.Kill()
	_ = process.Wait()
	process = launch()
	if after := report(isUp).Attempts[0].Nodes[0].VmiUid; after != uid {
		t.Fatalf("machine %s before, %s after", uid, after)
	}
	if _, err := rack.DeleteAttempt(t.Context(), &workerv1.DeleteAttemptRequest{AttemptId: attempt}); err != nil {
		t.Fatal(err)
	}
	report(func(r *workerv1.WatchRackResponse) bool {
		return r.Synced && len(r.Attempts) == 0 && r.Nodes[0].Gpus[0].Held == 0
	})
	raw, err := os.ReadFile(filepath.Join(state, "wrk-server-k8s-nvidia.log"))
	if err == nil && strings.Contains(string(raw), "once") && strings.Contains(string(raw), "join_token") {
		t.Error("a join token in the log")
	}
	_ = process.Process.Signal(os.Interrupt)
	if err := process.Wait(); err != nil {
		t.Errorf("an orderly stop: %v", err)
	}
}
