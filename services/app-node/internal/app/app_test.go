package app

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/goccy/go-yaml"
	"go.uber.org/goleak"
	"google.golang.org/grpc"

	"github.com/cosmicac/cosmicac/pkg/daemon"
	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	"github.com/cosmicac/cosmicac/pkg/trust"
	appv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/app/v1"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

// asDaemon makes this test binary be the daemon itself.
const asDaemon = "APP_NODE_TEST_RUNS_AS_DAEMON"

func TestMain(m *testing.M) {
	if os.Getenv(asDaemon) != "" {
		daemon.Main("app-node", Defaults, Base, Run)
	}
	goleak.VerifyTestMain(m)
}

func TestTheExampleConfigurationIsTheDefaults(t *testing.T) {
	t.Parallel()
	data, err := os.ReadFile("../../app-node.example.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var example Config
	if err := yaml.UnmarshalWithOptions(data, &example, yaml.DisallowUnknownField()); err != nil {
		t.Fatal(err)
	}
	if faults := example.Validate(); len(faults) > 0 {
		t.Fatal(faults)
	}
	defaults := Defaults()
	example.Base = defaults.Base
	defaults.Catalogue.Models[0].Arguments = []string{}
	a, b := must(json.Marshal(example)), must(json.Marshal(defaults))
	if !bytes.Equal(a, b) {
		t.Errorf("the example differs from the defaults:\n%s\n%s", a, b)
	}
}

func TestAWrongConfigurationNamesItsKeys(t *testing.T) {
	t.Parallel()
	cfg := Defaults()
	cfg.HTTP.Listen, cfg.Sessions.Idle, cfg.Grants.Validity = "", 0, time.Hour*1000
	cfg.Catalogue.Images[0].Reference = "ubuntu"
	var fields []string
	for _, f := range cfg.Validate() {
		fields = append(fields, f.Field)
	}
	for _, want := range []string{"http.listen", "sessions.idle", "grants.validity", "catalogue"} {
		if !slices.Contains(fields, want) {
			t.Errorf("%s is not named in %v", want, fields)
		}
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// create runs the sub-command with a state directory.
func create(t *testing.T, state, stdin string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	config := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(config, []byte("state_directory: "+state+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	var out, errs bytes.Buffer
	code = CreateAdministrator(append([]string{"--config", config}, args...), nil, strings.NewReader(stdin), &out, &errs)
	return code, out.String(), errs.String()
}

func TestTheFirstAdministratorIsMadeOnceAndResetByForce(t *testing.T) {
	t.Parallel()
	state := filepath.Join(t.TempDir(), "state")
	const password = "correct horse battery"
	if code, _, errs := create(t, state, "short\n", "--email", "a@example.org"); code != 1 || !strings.Contains(errs, "10 characters") {
		t.Errorf("a short password: %d %s", code, errs)
	}
	if code, _, errs := create(t, state, "", "--email", "a@example.org"); code != 1 || !strings.Contains(errs, "--generate") {
		t.Errorf("no password: %d %s", code, errs)
	}
	if code, _, _ := create(t, state, password+"\n"); code != 2 {
		t.Errorf("no email: %d", code)
	}
	if code, _, errs := create(t, state, password+"\n", "--email", "nobody"); code != 1 || !strings.Contains(errs, "email") {
		t.Errorf("a bad email: %d %s", code, errs)
	}
	code, out, errs := create(t, state, password+"\n", "--email", "a@example.org")
	if code != 0 || !strings.Contains(out, "u-") || strings.Contains(out+errs, password) {
		t.Fatalf("%d %s %s", code, out, errs)
	}
	if code, _, errs := create(t, state, password+"\n", "--email", "b@example.org"); code != 1 || !strings.Contains(errs, "--force-reset") {
		t.Errorf("a second one: %d %s", code, errs)
	}
	code, out, _ = create(t, state, "", "--email", "a@example.org", "--force-reset", "--generate")
	if code != 0 || !strings.Contains(out, "shown once") {
		t.Errorf("reset: %d %s", code, out)
	}
}

// fakeOrk answers the little of the orchestrator that this test asks.
type fakeOrk struct {
	orkv1.UnimplementedJobsServer
	orkv1.UnimplementedEndpointsServer
}

func (fakeOrk) ListJobs(ctx context.Context, _ *orkv1.ListJobsRequest) (*orkv1.ListJobsResponse, error) {
	if caller, ok := mesh.CallerFrom(ctx); !ok || !caller.Has(meshv1.Role_ROLE_APP_NODE) {
		return nil, fault.ToGRPC(fault.New(fault.Denied, "not app-node"))
	}
	return &orkv1.ListJobsResponse{Jobs: []*orkv1.Job{{Id: "j-0000000000000", Spec: &orkv1.JobSpec{Name: "over the mesh"}}}}, nil
}

func (fakeOrk) WatchJobs(_ *orkv1.WatchJobsRequest, stream grpc.ServerStreamingServer[orkv1.WatchJobsResponse]) error {
	if err := stream.Send(&orkv1.WatchJobsResponse{Change: &orkv1.WatchJobsResponse_Synced{Synced: true}}); err != nil {
		return err
	}
	<-stream.Context().Done()
	return stream.Context().Err()
}

func (fakeOrk) WatchEndpoints(_ *orkv1.WatchEndpointsRequest, stream grpc.ServerStreamingServer[orkv1.WatchEndpointsResponse]) error {
	<-stream.Context().Done()
	return stream.Context().Err()
}

// eventually polls until f returns true.
func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	deadline := time.Now().Add(60 * time.Second)
	for !f() {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// TestTheDaemonServesPeopleAndPeers runs app-node as a process of its own, with an
// orchestrator, a proxy and a monitor on real mesh nodes.
func TestTheDaemonServesPeopleAndPeers(t *testing.T) {
	t.Parallel()
	const email, password = "root@example.org", "correct horse battery"
	dir := t.TempDir()
	state := filepath.Join(dir, "state")
	if err := os.Mkdir(state, 0o700); err != nil {
		t.Fatal(err)
	}
	key := must(identity.LoadOrCreate(filepath.Join(state, daemon.KeyFile)))
	ork, proxy, monitor := must(identity.New(rand.Reader)), must(identity.New(rand.Reader)), must(identity.New(rand.Reader))
	member := func(k *identity.Key, name string, role meshv1.Role) *meshv1.Member {
		return &meshv1.Member{Key: k.ID().String(), Name: name, Roles: []meshv1.Role{role}, SignsGrants: role == meshv1.Role_ROLE_APP_NODE}
	}
	network := must(trust.Create(filepath.Join(state, "network"), "lab", must(identity.New(rand.Reader)), nil, []*meshv1.Member{
		member(key, "app-node", meshv1.Role_ROLE_APP_NODE), member(ork, "wrk-ork", meshv1.Role_ROLE_ORK),
		member(proxy, "proxy-inference", meshv1.Role_ROLE_PROXY), member(monitor, "wrk-monitor", meshv1.Role_ROLE_MONITOR),
	}, nil))

	// The administrator is made while the daemon is stopped.
	if code, _, errs := create(t, state, password+"\n", "--email", email); code != 0 {
		t.Fatal(errs)
	}
	port := freePort(t)
	address := "/ip4/127.0.0.1/tcp/" + port
	socket := filepath.Join(dir, "s")
	config := filepath.Join(dir, "config.yaml")
	text := "state_directory: " + state + "\nmesh:\n  listen: [" + address + "]\nhttp:\n  listen: unix://" + socket + "\nlog: {level: debug}\n"
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	var stderr bytes.Buffer
	process := exec.Command(os.Args[0], "--config", config)
	process.Env = append(os.Environ(), asDaemon+"=1")
	process.Stderr = &stderr
	if err := process.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- process.Wait() }()
	t.Cleanup(func() { _ = process.Process.Kill() })
	defer func() {
		if t.Failed() {
			log, _ := os.ReadFile(filepath.Join(state, "app-node.log"))
			t.Logf("the daemon said:\n%s\n%s", stderr.String(), log)
		}
	}()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		}}}
	do := func(method, path, token, body string) (int, []byte) {
		r := must(http.NewRequestWithContext(t.Context(), method, "http://app-node/api/v1"+path, strings.NewReader(body)))
		r.Header.Set("Authorization", "Bearer "+token)
		response, err := client.Do(r)
		if err != nil {
			return 0, []byte(err.Error())
		}
		defer response.Body.Close()
		return response.StatusCode, must(io.ReadAll(response.Body))
	}
	var in struct{ Token string }
	eventually(t, "signing in", func() bool {
		status, body := do("POST", "/login", "", `{"email": "`+email+`", "password": "`+password+`"}`)
		return status == 200 && json.Unmarshal(body, &in) == nil
	})

	// Nobody answers for the orchestrator yet: that is said, not waited for.
	if status, body := do("GET", "/jobs", in.Token, ""); status != 503 || !bytes.Contains(body, []byte("orchestrator")) {
		t.Errorf("without wrk-ork: %d %s", status, body)
	}
	start := func(k *identity.Key, role meshv1.Role, register func(*mesh.Node)) *mesh.Node {
		n := must(mesh.New(t.Context(), mesh.Options{Key: k, Network: network, Role: role, Listen: []string{"/ip4/127.0.0.1/tcp/0"}}))
		register(n)
		if err := n.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			defer cancel()
			_ = n.Close(ctx)
		})
		n.Keep(key.ID(), address)
		return n
	}
	start(ork, meshv1.Role_ROLE_ORK, func(n *mesh.Node) {
		orkv1.RegisterJobsServer(n, fakeOrk{})
		orkv1.RegisterEndpointsServer(n, fakeOrk{})
	})
	eventually(t, "jobs over the mesh", func() bool {
		status, body := do("GET", "/jobs", in.Token, "")
		return status == 200 && bytes.Contains(body, []byte("over the mesh"))
	})

	// A proxy gets keys and counts usage; a monitor may ask about tokens only.
	proxyNode := start(proxy, meshv1.Role_ROLE_PROXY, func(*mesh.Node) {})
	monitorNode := start(monitor, meshv1.Role_ROLE_MONITOR, func(*mesh.Node) {})
	if status, body := do("POST", "/api-keys", in.Token, `{"name": "k"}`); status != 201 {
		t.Fatalf("make a key: %d %s", status, body)
	}
	stream := must(appv1.NewApiKeysClient(proxyNode.Client(key.ID(), address)).WatchApiKeys(t.Context(), &appv1.WatchApiKeysRequest{}))
	if table, err := stream.Recv(); err != nil || len(table.GetKeys()) != 1 || len(table.GetHmacKey()) != 32 {
		t.Errorf("the proxy's table: %v", err)
	}
	if denied, err := appv1.NewApiKeysClient(monitorNode.Client(key.ID(), address)).WatchApiKeys(t.Context(), &appv1.WatchApiKeysRequest{}); err == nil {
		if _, err = denied.Recv(); !fault.Is(err, fault.Denied) {
			t.Errorf("a monitor asks for keys: %v", err)
		}
	}
	who, err := appv1.NewIdentityClient(monitorNode.Client(key.ID(), address)).IntrospectToken(t.Context(), &appv1.IntrospectTokenRequest{Token: in.Token})
	if err != nil || who.GetEmail() != email || !who.GetAdministrator() {
		t.Errorf("introspection: %v, %v", who, err)
	}
	var picture struct {
		Nodes []struct{ Key, State string }
		Links []struct {
			From, To, Path string
			SeenBy         string `json:"seen_by"`
		}
	}
	status, body := do("GET", "/mesh", in.Token, "")
	if status != 200 || json.Unmarshal(body, &picture) != nil || len(picture.Nodes) < 3 {
		t.Fatalf("mesh: %d %s", status, body)
	}
	drawn := false
	for _, l := range picture.Links { // the proxy of this test does not say whom it knows
		drawn = drawn || l.From == proxy.ID().String() && l.To == key.ID().String() && l.Path == "direct" && l.SeenBy == "to"
	}
	for _, n := range picture.Nodes {
		if (n.State == "answers") != (n.Key == key.ID().String()) {
			t.Errorf("mesh: %+v", n)
		}
	}
	if !drawn {
		t.Errorf("mesh: the link of the proxy is not drawn: %s", body)
	}

	// The running daemon is not bootstrapped behind its back.
	if code, _, errs := create(t, state, password+"\n", "--email", email, "--force-reset"); code != 1 || !strings.Contains(errs, "stop") {
		t.Errorf("bootstrap beside the daemon: %d %s", code, errs)
	}
	if err := process.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-ended:
		if err != nil {
			t.Errorf("the daemon ended with %v", err)
		}
	case <-time.After(30 * time.Second):
		t.Error("the daemon does not stop")
	}
	log := must(os.ReadFile(filepath.Join(state, "app-node.log")))
	if bytes.Contains(log, []byte(in.Token)) || bytes.Contains(log, []byte(password)) {
		t.Error("the log holds a secret")
	}
}

func freePort(t *testing.T) string {
	t.Helper()
	l := must(net.Listen("tcp", "127.0.0.1:0"))
	defer l.Close()
	_, port, err := net.SplitHostPort(l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	return port
}
