package daemon

import (
	"bytes"
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/types/descriptorpb"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/health"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

// TestADaemonExplainsItself asks a whole daemon over its own mesh node.
func TestADaemonExplainsItself(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	code := s.run(func(ctx context.Context, env *Env, _ testConfig) error {
		node, err := env.Mesh(ctx, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_ORK })
		if err != nil {
			return err
		}
		if err := env.StartMesh(ctx); err != nil {
			return err
		}
		env.Health.Raise(health.Simulated, "this test")
		env.Ready()
		c := meshv1.NewNodeClient(node.Client(node.ID()))
		ask(t, ctx, env, s, c)
		return fault.New(fault.Unavailable, "that is all")
	})
	if code != 1 || !strings.Contains(s.stderr.String(), "that is all") {
		t.Errorf("exit %d: %s", code, s.stderr.String())
	}
}

func ask(t *testing.T, ctx context.Context, env *Env, s *site, c meshv1.NodeClient) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	payload := bytes.Repeat([]byte("x"), 64<<10)
	if r, err := c.Ping(ctx, &meshv1.PingRequest{Payload: payload}); err != nil || !bytes.Equal(r.GetPayload(), payload) {
		t.Errorf("ping: %v", err)
	}
	if _, err := c.Ping(ctx, &meshv1.PingRequest{Payload: append(payload, 'x')}); !fault.Is(err, fault.TooLarge) {
		t.Errorf("large ping: %v", err)
	}
	id, err := c.GetInstanceId(ctx, &meshv1.GetInstanceIdRequest{})
	if err != nil || id.GetInstanceId() != env.Instance() {
		t.Errorf("instance: %v, %v", id, err)
	}
	info, err := c.GetInfo(ctx, &meshv1.GetInfoRequest{})
	if err != nil || info.GetKey() != env.Key.ID().String() || !info.GetReady() || info.GetResidentBytes() < 1<<20 || len(info.GetAddresses()) == 0 ||
		info.GetRosterVersion() != 1 || len(info.GetRoles()) != 2 || len(info.GetWarnings()) == 0 {
		t.Errorf("info: %v, %v", info, err)
	}
	metrics, err := c.GetMetrics(ctx, &meshv1.GetMetricsRequest{})
	for _, want := range []string{"cosmicac_build_info{", "go_goroutines", "process_resident_memory_bytes", "cosmicac_ready 1", "cosmicac_mesh_kept_peers{path=\"away\"} 0"} {
		if err != nil || !strings.Contains(string(metrics.GetExposition()), want) {
			t.Errorf("metrics lack %s: %v", want, err)
		}
	}
	if _, err := c.ListPeers(ctx, &meshv1.ListPeersRequest{}); err != nil {
		t.Errorf("peers: %v", err)
	}

	served, err := c.ListServices(ctx, &meshv1.ListServicesRequest{})
	var set descriptorpb.FileDescriptorSet
	if err != nil || !slices.Contains(served.GetServices(), "cosmicac.mesh.v1.Node") || proto.Unmarshal(served.GetFileDescriptorSet(), &set) != nil {
		t.Fatalf("services: %v, %v", served.GetServices(), err)
	}
	files, err := protodesc.NewFiles(&set)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := files.FindDescriptorByName("cosmicac.mesh.v1.Node.RunSpeedTest"); err != nil {
		t.Errorf("the descriptors lack a method: %v", err)
	}
	if checked, err := c.CheckNetwork(ctx, &meshv1.CheckNetworkRequest{}); err != nil || len(checked.GetListenAddresses()) == 0 {
		t.Errorf("check: %v, %v", checked, err)
	}
	stranger := newIdentity(t).ID().String()
	if r, err := c.TracePeer(ctx, &meshv1.TracePeerRequest{Key: stranger}); err != nil || r.GetTrace().GetFaultKind() != string(fault.Unreachable) {
		t.Errorf("trace: %v, %v", r, err)
	}
	if _, err := c.PingPeer(ctx, &meshv1.PingPeerRequest{Key: stranger}); !fault.Is(err, fault.Unreachable) {
		t.Errorf("ping of nobody: %v", err)
	}
	for _, key := range []string{"", "nonsense", env.Key.ID().String()} {
		_, traced := c.TracePeer(ctx, &meshv1.TracePeerRequest{Key: key})
		_, pinged := c.PingPeer(ctx, &meshv1.PingPeerRequest{Key: key})
		_, tested := c.RunSpeedTest(ctx, &meshv1.RunSpeedTestRequest{Key: key})
		for _, err := range []error{traced, pinged, tested} {
			if d := fault.DetailsOf(err); !fault.Is(err, fault.Invalid) || len(d) != 1 || d[0].Field != "key" {
				t.Errorf("key %q: %v", key, err)
			}
		}
	}
	if _, err := c.PingPeer(ctx, &meshv1.PingPeerRequest{Key: stranger, Count: 1000}); !fault.Is(err, fault.Invalid) {
		t.Errorf("a thousand pings: %v", err)
	}
	if _, err := c.RunSpeedTest(ctx, &meshv1.RunSpeedTestRequest{Key: stranger, Seconds: 3600}); !fault.Is(err, fault.Invalid) {
		t.Errorf("an hour of speed test: %v", err)
	}

	logs, err := c.StreamLogs(ctx, &meshv1.StreamLogsRequest{Tail: 1, Follow: true})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := logs.Recv(); err != nil {
		t.Errorf("logs: %v", err)
	}
	env.Log.Info("spoken after")
	for found := false; !found; {
		r, err := logs.Recv()
		if err != nil {
			t.Fatalf("follow: %v", err)
		}
		for _, l := range r.GetLines() {
			found = found || strings.Contains(string(l.GetText()), "spoken after") && !l.GetGap()
		}
	}
	once, err := c.StreamLogs(ctx, &meshv1.StreamLogsRequest{After: "elsewhere-0000000000000001"})
	if err != nil {
		t.Fatal(err)
	}
	if r, err := once.Recv(); err != nil || !r.GetLines()[0].GetGap() {
		t.Errorf("a position of another start: %v, %v", r, err)
	}

	next, err := env.Network.NextRoster(s.root, time.Now(), nil)
	if err != nil {
		t.Fatal(err)
	}
	put, err := c.PutNetwork(ctx, &meshv1.PutNetworkRequest{RosterEnvelope: next})
	if err != nil || put.GetRosterVersion() != 2 {
		t.Errorf("put: %v, %v", put, err)
	}
	if _, err := c.PutNetwork(ctx, &meshv1.PutNetworkRequest{RosterEnvelope: next[:40]}); !fault.Is(err, fault.Invalid) {
		t.Errorf("put rubbish: %v", err)
	}
	got, err := c.GetNetwork(ctx, &meshv1.GetNetworkRequest{})
	if err != nil || !bytes.Equal(got.GetRosterEnvelope(), next) || len(got.GetGenesisEnvelope()) == 0 {
		t.Errorf("get: %v", err)
	}
}
