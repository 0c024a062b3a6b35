package app

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cosmicac/cosmicac/pkg/apikey"
	"github.com/cosmicac/cosmicac/pkg/daemon"
	"github.com/cosmicac/cosmicac/pkg/id"
	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	"github.com/cosmicac/cosmicac/pkg/trust"
	appv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/app/v1"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

// asDaemon makes this test binary be the daemon itself.
const asDaemon = "PROXY_INFERENCE_TEST_RUNS_AS_DAEMON"

func TestMain(m *testing.M) {
	if os.Getenv(asDaemon) != "" {
		daemon.Main("proxy-inference", Defaults, Base, Run)
	}
	goleak.VerifyTestMain(m)
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(60 * time.Second); !f(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}

func freePort(t *testing.T) string {
	t.Helper()
	l := must(net.Listen("tcp", "127.0.0.1:0"))
	defer l.Close()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	return port
}

// fakeApp answers what app-node answers a proxy.
type fakeApp struct {
	appv1.UnimplementedApiKeysServer
	appv1.UnimplementedUsageServer
	table *appv1.WatchApiKeysResponse
	away  atomic.Bool
	mu    sync.Mutex
	seen  map[string]*appv1.UsageRecord
}

func (a *fakeApp) WatchApiKeys(_ *appv1.WatchApiKeysRequest, s grpc.ServerStreamingServer[appv1.WatchApiKeysResponse]) error {
	if err := s.Send(a.table); err != nil {
		return err
	}
	<-s.Context().Done()
	return s.Context().Err()
}

func (a *fakeApp) RecordUsage(_ context.Context, r *appv1.RecordUsageRequest) (*appv1.RecordUsageResponse, error) {
	if a.away.Load() {
		return nil, errors.New("away")
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, u := range r.GetRecords() {
		a.seen[u.GetId()] = u
	}
	return &appv1.RecordUsageResponse{}, nil
}

func (a *fakeApp) records() (all []*appv1.UsageRecord) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, u := range a.seen {
		all = append(all, u)
	}
	return all
}

// fakeOrk tells proxies of endpoints.
type fakeOrk struct {
	orkv1.UnimplementedEndpointsServer
	mu      sync.Mutex
	table   *orkv1.WatchEndpointsResponse
	changed chan struct{}
}

func (o *fakeOrk) put(endpoints ...*orkv1.Endpoint) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.table = &orkv1.WatchEndpointsResponse{Endpoints: endpoints}
	close(o.changed)
	o.changed = make(chan struct{})
}

func (o *fakeOrk) WatchEndpoints(_ *orkv1.WatchEndpointsRequest, s grpc.ServerStreamingServer[orkv1.WatchEndpointsResponse]) error {
	for {
		o.mu.Lock()
		table, changed := o.table, o.changed
		o.mu.Unlock()
		if err := s.Send(table); err != nil {
			return err
		}
		select {
		case <-changed:
		case <-s.Context().Done():
			return s.Context().Err()
		}
	}
}

// engine is an OpenAI-shaped server; what it says is made up and says so.
type engine struct {
	running atomic.Int64
	asked   atomic.Int64
	chunks  int
	pace    time.Duration
	die     int // after so many chunks
}

func (e *engine) text(i int) string {
	return fmt.Sprintf("data: {\"id\":\"fake\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"made up %d\"}}]}\r\n\r\n", i)
}

func (e *engine) whole() string {
	var b strings.Builder
	for i := range e.chunks {
		b.WriteString(e.text(i))
	}
	return b.String() + "data: [DONE]\r\n\r\n"
}

func (e *engine) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	e.asked.Add(1)
	e.running.Add(1)
	defer e.running.Add(-1)
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	if !bytes.Contains(body, []byte(`"stream":true`)) {
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, `{"choices":[{"message":{"content":"made up"}}],"usage":{"prompt_tokens":2,"completion_tokens":1}}`)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	for i := range e.chunks {
		if e.die > 0 && i == e.die {
			panic(http.ErrAbortHandler)
		}
		io.WriteString(w, e.text(i))
		w.(http.Flusher).Flush()
		select {
		case <-time.After(e.pace):
		case <-r.Context().Done():
			return
		}
	}
	if bytes.Contains(body, []byte("include_usage")) {
		fmt.Fprintf(w, "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":2,\"completion_tokens\":%d}}\r\n\r\n", e.chunks)
	}
	io.WriteString(w, "data: [DONE]\r\n\r\n")
}

// lab is a proxy as a process of its own, among real mesh nodes.
type lab struct {
	t       *testing.T
	state   string
	socket  string
	network *trust.Network
	key     *identity.Key
	address string
	process *exec.Cmd
	ended   chan error

	ork     *fakeOrk
	orkKey  *identity.Key
	orkNode *mesh.Node
	app     *fakeApp
	full    string // an API key
	client  *http.Client
}

func startLab(t *testing.T) *lab {
	t.Helper()
	dir := t.TempDir()
	l := &lab{t: t, state: filepath.Join(dir, "state"), socket: filepath.Join(dir, "s"), orkKey: must(identity.New(rand.Reader)), ended: make(chan error, 1)}
	if err := os.Mkdir(l.state, 0o700); err != nil {
		t.Fatal(err)
	}
	l.key = must(identity.LoadOrCreate(filepath.Join(l.state, daemon.KeyFile)))
	appKey := must(identity.New(rand.Reader))
	member := func(k *identity.Key, name string, role meshv1.Role) *meshv1.Member {
		return &meshv1.Member{Key: k.ID().String(), Name: name, Roles: []meshv1.Role{role}, SignsCertificates: role == meshv1.Role_ROLE_ORK}
	}
	l.network = must(trust.Create(filepath.Join(l.state, "network"), "lab", must(identity.New(rand.Reader)), nil, []*meshv1.Member{
		member(l.key, "proxy-inference", meshv1.Role_ROLE_PROXY), member(l.orkKey, "wrk-ork", meshv1.Role_ROLE_ORK), member(appKey, "app-node", meshv1.Role_ROLE_APP_NODE),
	}, nil))

	hmacKey := []byte("hmac key of the lab, 32 bytes ..")
	full, publicID, err := apikey.New(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	l.full = full
	l.app = &fakeApp{seen: map[string]*appv1.UsageRecord{}, table: &appv1.WatchApiKeysResponse{HmacKey: hmacKey,
		Keys: []*appv1.ApiKey{{PublicId: publicID, Hmac: apikey.MAC(hmacKey, full), Id: "k-1", ProjectId: "p-1", ConcurrentRequests: 5}}}}
	l.ork = &fakeOrk{changed: make(chan struct{}), table: &orkv1.WatchEndpointsResponse{}}

	l.address = "/ip4/127.0.0.1/tcp/" + freePort(t)
	config := filepath.Join(dir, "config.yaml")
	text := "state_directory: " + l.state + "\nmesh:\n  listen: [" + l.address + "]\nhttp:\n  listen: unix://" + l.socket + "\nlog: {level: debug}\n"
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	var stderr bytes.Buffer
	l.process = exec.Command(os.Args[0], "--config", config)
	l.process.Env = append(os.Environ(), asDaemon+"=1")
	l.process.Stderr = &stderr
	if err := l.process.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { l.ended <- l.process.Wait(); close(l.ended) }()
	t.Cleanup(func() {
		l.process.Process.Kill()
		<-l.ended
		if t.Failed() {
			log, _ := os.ReadFile(filepath.Join(l.state, "proxy-inference.log"))
			t.Logf("the daemon said:\n%s\n%s", stderr.String(), log[max(0, len(log)-20000):])
		}
	})
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", l.socket)
	}}
	t.Cleanup(transport.CloseIdleConnections)
	l.client = &http.Client{Transport: transport}

	l.orkNode = l.node(l.orkKey, mesh.Options{Role: meshv1.Role_ROLE_ORK}, func(n *mesh.Node) { orkv1.RegisterEndpointsServer(n, l.ork) })
	l.node(appKey, mesh.Options{Role: meshv1.Role_ROLE_APP_NODE}, func(n *mesh.Node) {
		appv1.RegisterApiKeysServer(n, l.app)
		appv1.RegisterUsageServer(n, l.app)
	})
	eventually(t, "the proxy has its tables", func() bool { a := l.do("GET", "/health", ""); return a.status == 200 })
	return l
}

// node starts a mesh node that keeps a link to the proxy, unless it is an agent.
func (l *lab) node(key *identity.Key, o mesh.Options, register func(*mesh.Node)) *mesh.Node {
	l.t.Helper()
	o.Key, o.Network, o.Listen = key, l.network, []string{"/ip4/127.0.0.1/tcp/0"}
	n := must(mesh.New(context.Background(), o))
	l.t.Cleanup(func() { l.close(n) })
	register(n)
	if err := n.Start(context.Background()); err != nil {
		l.t.Fatal(err)
	}
	if o.Role != meshv1.Role_ROLE_UNSPECIFIED {
		n.Keep(l.key.ID(), l.address)
	}
	return n
}

func (l *lab) close(n *mesh.Node) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	n.Close(ctx)
}

// replica starts an agent with an engine behind it, piping bytes as agents do.
func (l *lab) replica(e *engine) (*orkv1.EndpointReplica, *mesh.Node) {
	l.t.Helper()
	listener := must(net.Listen("tcp", "127.0.0.1:0"))
	server := &http.Server{Handler: e, IdleTimeout: 5 * time.Second}
	served := make(chan struct{})
	go func() { defer close(served); server.Serve(listener) }()
	l.t.Cleanup(func() { server.Close(); <-served })
	key := must(identity.New(rand.Reader))
	network, attempt := l.network.ID(), id.New(id.Attempt)
	certificate := must(trust.SealCertificate(l.orkKey, &meshv1.JobCertificate{NetworkId: network[:], Key: key.ID().String(), JobId: id.New(id.Job),
		ReplicaId: id.New(id.Replica), AttemptId: attempt, RackId: "lab",
		NotBefore: timestamppb.Now(), NotAfter: timestamppb.New(time.Now().Add(time.Hour))}))
	n := l.node(key, mesh.Options{Credential: mesh.Certificate(certificate)}, func(n *mesh.Node) {
		n.Handle("http", &meshv1.Right{Roles: []meshv1.Role{meshv1.Role_ROLE_PROXY}}, func(ctx context.Context, s *mesh.Stream) {
			conn, err := net.Dial("tcp", listener.Addr().String())
			if err != nil {
				s.Reset()
				return
			}
			defer conn.Close()
			stop := context.AfterFunc(ctx, func() { conn.Close() })
			defer stop()
			up := make(chan struct{})
			go func() { defer close(up); io.Copy(conn, s); conn.Close() }()
			_, err = io.Copy(s, conn)
			s.Reset()
			<-up
			_ = err
		})
	})
	return &orkv1.EndpointReplica{AttemptId: attempt, AgentKey: key.ID().String(), AgentAddresses: n.Addresses(), State: orkv1.State_STATE_RUNNING, Ready: true}, n
}

// tunnel puts a forwarder before an agent, which can swallow all bytes.
func (l *lab) tunnel(r *orkv1.EndpointReplica) (swallow *atomic.Bool) {
	l.t.Helper()
	var target, suffix string
	for _, a := range r.GetAgentAddresses() {
		if rest, ok := strings.CutPrefix(a, "/ip4/127.0.0.1/tcp/"); ok {
			port, id, _ := strings.Cut(rest, "/")
			target, suffix = "127.0.0.1:"+port, "/"+id
		}
	}
	listener := must(net.Listen("tcp", "127.0.0.1:0"))
	_, port, _ := net.SplitHostPort(listener.Addr().String())
	r.AgentAddresses = []string{"/ip4/127.0.0.1/tcp/" + port + suffix}
	swallow = &atomic.Bool{}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	l.t.Cleanup(func() { cancel(); listener.Close(); running.Wait() })
	pass := func(to, from net.Conn) {
		defer running.Done()
		b := make([]byte, 32<<10)
		for {
			n, err := from.Read(b)
			if err != nil {
				to.Close()
				return
			}
			if !swallow.Load() {
				to.Write(b[:n])
			}
		}
	}
	running.Add(1)
	go func() {
		defer running.Done()
		for {
			near, err := listener.Accept()
			if err != nil {
				return
			}
			far, err := net.Dial("tcp", target)
			if err != nil {
				near.Close()
				continue
			}
			context.AfterFunc(ctx, func() { near.Close(); far.Close() })
			running.Add(2)
			go pass(far, near)
			go pass(near, far)
		}
	}()
	return swallow
}

func endpointOf(replicas ...*orkv1.EndpointReplica) *orkv1.Endpoint {
	return &orkv1.Endpoint{Id: "ep-1", JobId: "j-1", ProjectId: "p-1", ModelNames: []string{"m"}, RequireAuthorization: true, JobState: orkv1.State_STATE_RUNNING, Replicas: replicas}
}

type answer struct {
	status int
	body   string
	header http.Header
	err    error
}

func (l *lab) do(method, path, body string) answer {
	return ask(l.client, "http://proxy"+path, l.full, method, strings.NewReader(body), int64(len(body)))
}

// ask gives up after two minutes, so that an answer without an end is told from a
// test that hangs.
func ask(client *http.Client, url, key, method string, body io.Reader, size int64) answer {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	r := must(http.NewRequestWithContext(ctx, method, url, body))
	r.ContentLength = size
	r.Header.Set("Authorization", "Bearer "+key)
	resp, err := client.Do(r)
	if err != nil {
		return answer{err: err}
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return answer{resp.StatusCode, string(b), resp.Header, err}
}

const (
	chat       = "/v1/chat/completions"
	plainBody  = `{"model":"m","messages":[]}`
	streamBody = `{"model":"m","stream":true,"messages":[]}`
)

// status reads the daemon's status file.
func (l *lab) status() string {
	b, _ := os.ReadFile(filepath.Join(l.state, "status.json"))
	return string(b)
}

// stop ends the daemon in order.
func (l *lab) stop() {
	l.t.Helper()
	l.process.Process.Signal(syscall.SIGTERM)
	select {
	case err := <-l.ended:
		if err != nil {
			l.t.Errorf("the daemon ended with %v", err)
		}
	case <-time.After(30 * time.Second):
		l.t.Error("the daemon does not stop")
	}
}

// noSecret fails when a file holds the API key or the HMAC key.
func (l *lab) noSecret(paths ...string) {
	l.t.Helper()
	for _, p := range paths {
		b, err := os.ReadFile(p)
		if err != nil {
			continue
		}
		for _, secret := range [][]byte{[]byte(l.full[17:49]), l.app.table.GetHmacKey()} {
			if bytes.Contains(b, secret) {
				l.t.Errorf("%s holds a secret", p)
			}
		}
	}
}

func decode(t *testing.T, text string) (code string) {
	t.Helper()
	var e struct{ Error struct{ Code string } }
	if err := json.Unmarshal([]byte(text), &e); err != nil {
		t.Errorf("not OpenAI's shape: %s", text)
	}
	return e.Error.Code
}
