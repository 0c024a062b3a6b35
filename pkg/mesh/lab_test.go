package mesh_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	"github.com/cosmicac/cosmicac/pkg/mesh/cards"
	"github.com/cosmicac/cosmicac/pkg/trust"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	"github.com/hashicorp/go-hclog"
	"github.com/libp2p/go-libp2p/core/peer"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/types/known/timestamppb"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m)
}

const patience = 30 * time.Second // generous: the machine may be busy

// transports are what a node listens on in tests, by name.
var transports = map[string][]string{
	"tcp":  {"/ip4/127.0.0.1/tcp/0"},
	"quic": {"/ip4/127.0.0.1/udp/0/quic-v1"},
}

// lab is one network in one process.
type lab struct {
	t       *testing.T
	mu      sync.Mutex
	root    *identity.Key
	founder *trust.Network
	ork     *identity.Key // signs certificates
	app     *identity.Key // signs grants
}

func newKey(t *testing.T) *identity.Key {
	t.Helper()
	k, err := identity.New(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func newLab(t *testing.T) *lab {
	t.Helper()
	l := &lab{t: t, root: newKey(t), ork: newKey(t), app: newKey(t)}
	stamp := timestamppb.Now()
	var err error
	l.founder, err = trust.Create("", "lab", l.root, nil, []*meshv1.Member{
		{Key: l.ork.ID().String(), Name: "ork", Roles: []meshv1.Role{meshv1.Role_ROLE_ORK}, AdmittedAt: stamp, SignsCertificates: true},
		{Key: l.app.ID().String(), Name: "app", Roles: []meshv1.Role{meshv1.Role_ROLE_APP_NODE}, AdmittedAt: stamp, SignsGrants: true},
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// edit signs the next roster and adopts it at the founder.
func (l *lab) edit(change func(*meshv1.Roster)) {
	l.t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	env, err := l.founder.NextRoster(l.root, time.Now(), change)
	if err == nil {
		_, err = l.founder.Adopt(env, nil)
	}
	if err != nil {
		l.t.Fatal(err)
	}
}

// member adds a new key with a role to the roster.
func (l *lab) member(name string, role meshv1.Role) *identity.Key {
	l.t.Helper()
	k := newKey(l.t)
	l.edit(func(r *meshv1.Roster) {
		r.Members = append(r.Members, &meshv1.Member{Key: k.ID().String(), Name: name, Roles: []meshv1.Role{role}, AdmittedAt: timestamppb.Now()})
	})
	return k
}

func (l *lab) remove(p peer.ID) {
	l.t.Helper()
	l.edit(func(r *meshv1.Roster) {
		for i, m := range r.Members {
			if m.Key == p.String() {
				r.Members = append(r.Members[:i], r.Members[i+1:]...)
				return
			}
		}
	})
}

// bootstrapAt tells the network where its bootstraps are.
func (l *lab) bootstrapAt(nodes ...*mesh.Node) {
	l.t.Helper()
	env, err := l.founder.NextInfo(l.root, time.Now(), func(i *meshv1.NetworkInfo) {
		i.Bootstraps = nil
		for _, n := range nodes {
			i.Bootstraps = append(i.Bootstraps, &meshv1.BootstrapAddress{Key: n.ID().String(), Addresses: n.Addresses()})
		}
	})
	if err == nil {
		_, err = l.founder.Adopt(nil, env)
	}
	if err != nil {
		l.t.Fatal(err)
	}
}

// memory is a daemon's copy of the network as it stands.
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

// bare knows the root keys only, as an agent does at first.
func (l *lab) bare() *trust.Network {
	l.t.Helper()
	id := l.founder.ID()
	n, err := trust.NewMemory(id[:], l.founder.RootKeys())
	if err != nil {
		l.t.Fatal(err)
	}
	return n
}

// node answers mesh.v1.Node as far as tests need it.
type nodeService struct {
	meshv1.UnimplementedNodeServer
	network *trust.Network
	hang    chan struct{} // GetInfo waits for it when set
	entered chan struct{}
	ahead   time.Duration // of its clock
}

func (s *nodeService) Ping(_ context.Context, r *meshv1.PingRequest) (*meshv1.PingResponse, error) {
	return &meshv1.PingResponse{Payload: r.GetPayload()}, nil
}

func (s *nodeService) GetInfo(ctx context.Context, _ *meshv1.GetInfoRequest) (*meshv1.GetInfoResponse, error) {
	if s.hang != nil {
		s.entered <- struct{}{}
		select {
		case <-s.hang:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	c, _ := mesh.CallerFrom(ctx)
	return &meshv1.GetInfoResponse{Key: c.ID.String(), Name: c.Name(), Now: timestamppb.New(time.Now().Add(s.ahead))}, nil
}

func (s *nodeService) GetMetrics(context.Context, *meshv1.GetMetricsRequest) (*meshv1.GetMetricsResponse, error) {
	return &meshv1.GetMetricsResponse{}, nil
}

func (s *nodeService) StreamLogs(_ *meshv1.StreamLogsRequest, stream meshv1.Node_StreamLogsServer) error {
	if err := stream.Send(&meshv1.StreamLogsResponse{}); err != nil {
		return err
	}
	<-stream.Context().Done()
	return stream.Context().Err()
}

func (s *nodeService) PutNetwork(_ context.Context, r *meshv1.PutNetworkRequest) (*meshv1.PutNetworkResponse, error) {
	if _, err := s.network.Adopt(r.GetRosterEnvelope(), r.GetNetworkInfoEnvelope()); err != nil {
		return nil, err
	}
	return &meshv1.PutNetworkResponse{RosterVersion: s.network.Roster().GetVersion(), NetworkInfoSequence: s.network.Info().GetSequence()}, nil
}

// spot is one node of a test and what it said.
type spot struct {
	*mesh.Node
	service *nodeService
	log     *logbook
}

type logbook struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logbook) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *logbook) has(words ...string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, line := range strings.Split(l.b.String(), "\n") {
		all := true
		for _, w := range words {
			all = all && strings.Contains(line, w)
		}
		if all {
			return true
		}
	}
	return false
}

func (l *logbook) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// start runs a node with the key and options; it ends with the test.
func (l *lab) start(key *identity.Key, set func(*mesh.Options), before ...func(*spot)) *spot {
	l.t.Helper()
	s := &spot{log: &logbook{}}
	o := mesh.Options{Key: key, Listen: transports["tcp"], DHT: mesh.DHTServer,
		Log: hclog.New(&hclog.LoggerOptions{Output: s.log, Level: hclog.Debug})}
	if set != nil {
		set(&o)
	}
	if o.Network == nil {
		o.Network = l.memory()
	}
	n, err := mesh.New(context.Background(), o)
	if err != nil {
		l.t.Fatal(err)
	}
	s.Node, s.service = n, &nodeService{network: o.Network}
	meshv1.RegisterNodeServer(n, s.service)
	for _, f := range before {
		f(s)
	}
	l.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		_ = n.Close(ctx)
		if l.t.Failed() && testing.Verbose() {
			l.t.Logf("log of %s:\n%s", n.ID(), s.log)
		}
	})
	if err := n.Start(context.Background()); err != nil {
		l.t.Fatal(err)
	}
	return s
}

// bootstrap runs a mesh-bootstrap as far as the mesh goes, and tells the network.
func (l *lab) bootstrap() *spot {
	l.t.Helper()
	key := l.member("boot", meshv1.Role_ROLE_BOOTSTRAP)
	network := l.memory()
	b := l.start(key, func(o *mesh.Options) {
		o.Network, o.Role, o.Relay, o.AllowGuests = network, meshv1.Role_ROLE_BOOTSTRAP, true, true
		o.Listen = []string{transports["tcp"][0], transports["quic"][0]}
	}, func(s *spot) { meshv1.RegisterCardsServer(s.Node, cards.New(network, nil)) })
	l.bootstrapAt(b.Node)
	if _, err := network.Adopt(nil, l.founder.InfoEnvelope()); err != nil {
		l.t.Fatal(err)
	}
	return b
}

// agent makes a key with a certificate for a job.
func (l *lab) agent(job string) (*identity.Key, []byte) {
	l.t.Helper()
	return l.agentUntil(job, time.Now().Add(time.Hour))
}

func (l *lab) agentUntil(job string, until time.Time) (*identity.Key, []byte) {
	l.t.Helper()
	k := newKey(l.t)
	id := l.founder.ID()
	env, err := trust.SealCertificate(l.ork, &meshv1.JobCertificate{
		NetworkId: id[:], Key: k.ID().String(), JobId: job, ReplicaId: "r-0000000000001", AttemptId: "a-0000000000001", RackId: "rk-0000000000001",
		NotBefore: timestamppb.New(until.Add(-2 * time.Hour)), NotAfter: timestamppb.New(until), Epoch: 1,
	})
	if err != nil {
		l.t.Fatal(err)
	}
	return k, env
}

func (l *lab) grant(client, agent peer.ID, job string, addresses ...string) []byte {
	l.t.Helper()
	id := l.founder.ID()
	env, err := trust.SealGrant(l.app, &meshv1.Grant{
		NetworkId: id[:], ClientKey: client.String(), AgentKey: agent.String(), JobId: job, Rights: []string{"shell"},
		NotBefore: timestamppb.Now(), NotAfter: timestamppb.New(time.Now().Add(time.Hour)), Epoch: 1, UserId: "u-0000000000001", AgentAddresses: addresses,
	})
	if err != nil {
		l.t.Fatal(err)
	}
	return env
}

// eventually polls until the condition holds.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if ok() {
			return
		}
	}
	t.Fatalf("%s: not within %s", what, patience)
}

func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// info calls GetInfo, which answers with the caller as seen there.
func info(ctx context.Context, from *mesh.Node, to peer.ID, addrs ...string) (*meshv1.GetInfoResponse, error) {
	return meshv1.NewNodeClient(from.Client(to, addrs...)).GetInfo(ctx, &meshv1.GetInfoRequest{})
}

func ping(ctx context.Context, from *mesh.Node, to peer.ID, addrs ...string) error {
	answer, err := meshv1.NewNodeClient(from.Client(to, addrs...)).Ping(ctx, &meshv1.PingRequest{Payload: []byte("hello")})
	if err == nil && string(answer.GetPayload()) != "hello" {
		return fmt.Errorf("answer %q", answer.GetPayload())
	}
	return err
}

func wantKind(t *testing.T, err error, kind fault.Kind, words ...string) {
	t.Helper()
	if fault.KindOf(err) != kind {
		t.Fatalf("got kind %q (%v), want %q", fault.KindOf(err), err, kind)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("error %q does not say %q", err, w)
		}
	}
}

// portOf is the TCP port of a node that listens on one.
func portOf(t *testing.T, s *spot) string {
	t.Helper()
	for _, a := range s.Addresses() {
		parts := strings.Split(a, "/")
		if len(parts) > 4 && parts[3] == "tcp" {
			return parts[4]
		}
	}
	t.Fatalf("no tcp address in %v", s.Addresses())
	return ""
}

func itoa(i int) string { return fmt.Sprint(i) }
