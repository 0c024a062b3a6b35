package api_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"

	"github.com/cosmicac/cosmicac/pkg/id"
	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/trust"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	"github.com/cosmicac/cosmicac/services/app-node/internal/account"
	"github.com/cosmicac/cosmicac/services/app-node/internal/api"
	"github.com/cosmicac/cosmicac/services/app-node/internal/apikeys"
	"github.com/cosmicac/cosmicac/services/app-node/internal/catalogue"
	"github.com/cosmicac/cosmicac/services/app-node/internal/fleet"
	"github.com/cosmicac/cosmicac/services/app-node/internal/grants"
	"github.com/cosmicac/cosmicac/services/app-node/internal/orchestrator"
	"github.com/cosmicac/cosmicac/services/app-node/internal/peers"
	"github.com/cosmicac/cosmicac/services/app-node/internal/quotas"
	"github.com/cosmicac/cosmicac/services/app-node/internal/store"
)

// prices is the shipped catalogue with a price for one model.
func prices() catalogue.Config {
	c := catalogue.Defaults()
	c.Prices = map[string]uint64{"gh100_h100_sxm5_80gb": 249}
	return c
}

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	adminEmail    = "root@example.org"
	adminPassword = "correct horse battery"
	userPassword  = "another fine password"
)

// clock is moved by tests.
type clock struct {
	mu  sync.Mutex
	now time.Time
}

func (c *clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *clock) move(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

// lines is a log that a test can search.
type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// lab is one app-node with a fake orchestrator behind real gRPC.
type lab struct {
	t           *testing.T
	url         string
	ork         *fakeOrk
	clock       *clock
	log         *lines
	store       *store.Store
	server      *api.Server
	accounts    *account.Accounts
	keys        *apikeys.Keys
	revocations *grants.Revocations
	network     *trust.Network
	registry    *prometheus.Registry
	peers       *grpc.ClientConn
	key         *identity.Key
	away        *toggle
	dir         string
	admin       string
}

type toggle struct {
	mu sync.Mutex
	on bool
}

func (t *toggle) set(on bool) { t.mu.Lock(); t.on = on; t.mu.Unlock() }
func (t *toggle) get() bool   { t.mu.Lock(); defer t.mu.Unlock(); return t.on }

// noMesh stands for the own node: every daemon but the fake ork is silent.
type noMesh struct{ id peer.ID }

func (n noMesh) ID() peer.ID { return n.id }
func (n noMesh) Peers() []*meshv1.Peer {
	return []*meshv1.Peer{{Key: "k", Name: "wrk-ork", Address: "/ip4/10.0.0.1/tcp/1"}}
}
func (n noMesh) Client(peer.ID, ...string) grpc.ClientConnInterface {
	conn, err := grpc.NewClient("passthrough:///nowhere", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) { return nil, io.ErrClosedPipe }))
	if err != nil {
		panic(err)
	}
	return closing{conn}
}

// closing closes the connection after its only call.
type closing struct{ *grpc.ClientConn }

func (c closing) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	defer c.ClientConn.Close()
	return c.ClientConn.Invoke(ctx, method, args, reply, opts...)
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func serveGRPC(t *testing.T, register func(grpc.ServiceRegistrar)) *grpc.ClientConn {
	t.Helper()
	listener := bufconn.Listen(1 << 20)
	server := grpc.NewServer()
	register(server)
	var group sync.WaitGroup
	group.Go(func() { _ = server.Serve(listener) })
	conn := must(grpc.NewClient("passthrough:///ork", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) })))
	t.Cleanup(func() {
		_ = conn.Close()
		server.Stop()
		group.Wait()
	})
	return conn
}

func newLab(t *testing.T, set ...func(*api.Options)) *lab {
	t.Helper()
	ctx := t.Context()
	l := &lab{t: t, ork: newFakeOrk(), clock: &clock{now: time.Now().UTC().Truncate(time.Millisecond)}, log: &lines{}, away: &toggle{},
		registry: prometheus.NewRegistry(), dir: t.TempDir()}
	conn := serveGRPC(t, l.ork.register)
	l.store = must(store.Open(ctx, filepath.Join(l.dir, "app-node.db")))
	t.Cleanup(func() { _ = l.store.Close() })
	rows := must(catalogue.Build(catalogue.Defaults()))
	if err := l.store.ReplaceCatalogue(ctx, rows); err != nil {
		t.Fatal(err)
	}
	root, second := must(identity.New(rand.Reader)), must(identity.New(rand.Reader))
	l.key = must(identity.New(rand.Reader))
	other := must(identity.New(rand.Reader))
	l.network = must(trust.Create(filepath.Join(l.dir, "network"), "lab", root, second, []*meshv1.Member{
		{Key: l.key.ID().String(), Roles: []meshv1.Role{meshv1.Role_ROLE_APP_NODE}, Name: "app-node", SignsGrants: true},
		{Key: other.ID().String(), Roles: []meshv1.Role{meshv1.Role_ROLE_MONITOR}, Name: "wrk-monitor"},
	}, nil))

	log := hclog.New(&hclog.LoggerOptions{Output: l.log, Level: hclog.Trace})
	ids := id.NewSource(l.clock.Now, rand.Reader)
	hmacKey := must(apikeys.LoadHMACKey(filepath.Join(l.dir, "api-keys.hmac")))
	l.keys = apikeys.New(apikeys.Options{Store: l.store, HMACKey: hmacKey, IDs: ids, Random: rand.Reader, Now: l.clock.Now})
	l.accounts = account.New(account.Options{Store: l.store, Hasher: must(account.NewHasher(rand.Reader, 2)), IDs: ids, Random: rand.Reader,
		Now: l.clock.Now, Idle: 24 * time.Hour, Longest: 30 * 24 * time.Hour, OnChange: func() { l.keys.Changed(); l.revocations.Changed() }})
	connect := func() (grpc.ClientConnInterface, error) {
		if l.away.get() {
			return nil, io.ErrUnexpectedEOF
		}
		return conn, nil
	}
	watch := orchestrator.NewWatch(connect, log.Named("ork"), nil)
	running, stop := context.WithCancel(ctx)
	var group sync.WaitGroup
	group.Go(func() { _ = watch.Run(running) })
	ork := orchestrator.NewClient(connect, 2*time.Second, nil)
	l.revocations = grants.NewRevocations(l.store, ork.PutGrantFloors, log.Named("revocations"))
	group.Go(func() { _ = l.revocations.Run(running) })
	teller := quotas.NewTeller(l.store, ork.PutQuotas, log.Named("quotas"))
	group.Go(func() { _ = teller.Run(running) })
	members := func() []*meshv1.Member { return l.network.Roster().GetMembers() }
	options := api.Options{
		Store: l.store, Accounts: l.accounts, Keys: l.keys, Catalogue: catalogue.New(l.store, prices()),
		Ork: ork, Watch: watch, Quotas: teller,
		Grants: &grants.Signer{Key: l.key, Network: l.network, Now: l.clock.Now, Validity: 12 * time.Hour},
		Fleet: fleet.New(fleet.Options{Node: noMesh{l.key.ID()}, Members: members, Now: l.clock.Now, Timeout: time.Second,
			Own: func() []*meshv1.Warning { return []*meshv1.Warning{{Code: "roster_expires", Severity: "warning"}} }}),
		Network: l.network, Log: log, Metrics: l.registry, Now: l.clock.Now, Version: "test", KeepAlive: 50 * time.Millisecond,
	}
	for _, f := range set {
		f(&options)
	}
	l.server = api.New(options)
	listener := must(net.Listen("tcp", "127.0.0.1:0"))
	group.Go(func() {
		if err := l.server.Serve(running, listener); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() {
		stop()
		group.Wait()
		http.DefaultClient.CloseIdleConnections()
	})
	l.url = "http://" + listener.Addr().String()
	service := &peers.Service{Keys: l.keys, Accounts: l.accounts, Now: l.clock.Now, Refresh: time.Minute}
	l.peers = serveGRPC(t, service.Register)

	if _, err := l.accounts.EnsureAdministrator(ctx, adminEmail, adminPassword, false); err != nil {
		t.Fatal(err)
	}
	l.admin = l.login(adminEmail, adminPassword)
	return l
}

// reply is what came back.
type reply struct {
	status int
	header http.Header
	body   []byte
}

func (r reply) into(t *testing.T, v any) {
	t.Helper()
	if err := json.Unmarshal(r.body, v); err != nil {
		t.Fatalf("%d %s: %v", r.status, r.body, err)
	}
}

type problem struct {
	Status int
	Detail string
	Kind   string
	Errors []struct{ Location, Message string }
}

func (p problem) names(location string) bool {
	for _, e := range p.Errors {
		if e.Location == location {
			return true
		}
	}
	return false
}

func (l *lab) request(method, path, token string, body any, headers ...string) *http.Request {
	var reader io.Reader
	switch b := body.(type) {
	case nil:
	case string:
		reader = strings.NewReader(b)
	default:
		reader = bytes.NewReader(must(json.Marshal(b)))
	}
	r := must(http.NewRequestWithContext(l.t.Context(), method, l.url+path, reader))
	if body != nil {
		r.Header.Set("Content-Type", "application/json")
	}
	if token != "" {
		r.Header.Set("Authorization", "Bearer "+token)
	}
	for i := 0; i+1 < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	return r
}

func (l *lab) do(method, path, token string, body any, headers ...string) reply {
	l.t.Helper()
	response, err := http.DefaultClient.Do(l.request(method, path, token, body, headers...))
	if err != nil {
		l.t.Fatal(err)
	}
	defer response.Body.Close()
	return reply{response.StatusCode, response.Header, must(io.ReadAll(response.Body))}
}

// ok fails the test unless the status is the one wanted, and decodes into v.
func (l *lab) ok(status int, v any, method, path, token string, body any, headers ...string) reply {
	l.t.Helper()
	r := l.do(method, path, token, body, headers...)
	if r.status != status {
		l.t.Fatalf("%s %s: got %d, want %d: %s", method, path, r.status, status, r.body)
	}
	if v != nil {
		r.into(l.t, v)
	}
	return r
}

// refused fails the test unless the answer is a problem of this kind.
func (l *lab) refused(kind string, method, path, token string, body any, headers ...string) problem {
	l.t.Helper()
	r := l.do(method, path, token, body, headers...)
	if got := r.header.Get("Content-Type"); got != "application/problem+json" {
		l.t.Fatalf("%s %s: content type %q, status %d: %s", method, path, got, r.status, r.body)
	}
	var p problem
	r.into(l.t, &p)
	if p.Kind != kind || p.Status != r.status || p.Detail == "" {
		l.t.Fatalf("%s %s: got %d %s, want kind %s", method, path, r.status, r.body, kind)
	}
	return p
}

func (l *lab) login(email, password string) string {
	l.t.Helper()
	var out struct{ Token string }
	l.ok(200, &out, "POST", "/api/v1/login", "", map[string]string{"email": email, "password": password})
	return out.Token
}

// user makes a user and signs them in.
func (l *lab) user(email string) (userID, token string) {
	l.t.Helper()
	var out struct{ ID string }
	l.ok(201, &out, "POST", "/api/v1/users", l.admin, map[string]any{"email": email, "password": userPassword})
	return out.ID, l.login(email, userPassword)
}

func container(name string) map[string]any {
	return map[string]any{"kind": "gpu_container", "name": name, "tags": []string{"t"}, "location": "us", "disk_gib": 50,
		"gpu": map[string]any{"model": "GH100_H100_SXM5_80GB", "count": 1}, "image": "Ubuntu22.04/CUDA12.8.1"}
}

func (l *lab) job(token string, body map[string]any) string {
	l.t.Helper()
	var out struct{ ID string }
	l.ok(201, &out, "POST", "/api/v1/jobs", token, body)
	return out.ID
}
