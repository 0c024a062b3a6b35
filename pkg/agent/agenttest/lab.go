// Package agenttest is a small network in one process for tests of agents: a
// real mesh on 127.0.0.1 with two bootstraps that keep cards, and a wrk-ork that
// knows one join token. Its wrk-ork takes tokens, renews certificates, keeps
// reports and gives orders; it plans nothing and keeps no jobs.
package agenttest

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	"github.com/cosmicac/cosmicac/pkg/mesh/cards"
	"github.com/cosmicac/cosmicac/pkg/trust"
	agentv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

// Patience is how long Eventually waits: long, the machine may be busy.
const Patience = 90 * time.Second

// Eventually polls until f is true.
func Eventually(t testing.TB, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(Patience); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if f() {
			return
		}
	}
	t.Fatalf("did not come to pass: %s", what)
}

// Clock is a wall clock that a test moves; it starts out right.
type Clock struct{ ahead atomic.Int64 }

// Now is the time by this clock.
func (c *Clock) Now() time.Time { return time.Now().Add(time.Duration(c.ahead.Load())) }

// Move puts the clock forward, or back.
func (c *Clock) Move(d time.Duration) { c.ahead.Add(int64(d)) }

// Lab is the network.
type Lab struct {
	t       testing.TB
	host    string // the IPv4 address that everybody listens on
	founder *trust.Network
	root    *identity.Key
	app     *identity.Key
	proxy   *identity.Key
	boots   []*meshv1.BootstrapAddress
	// Cards are those of the two bootstraps.
	Cards []*cards.Registry
	// Ork is the orchestrator; see its own methods.
	Ork *Ork
	// CertificateLife is that of certificates given from now on.
	CertificateLife time.Duration
	// Clock is that of every member and client.
	Clock Clock
}

func key(t testing.TB) *identity.Key {
	t.Helper()
	k, err := identity.New(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// New starts the bootstraps and wrk-ork on 127.0.0.1; all end with the test.
func New(t testing.TB) *Lab {
	t.Helper()
	return NewAt(t, "127.0.0.1")
}

// NewAt is New on another IPv4 address of this host.
func NewAt(t testing.TB, host string) *Lab {
	t.Helper()
	l := &Lab{t: t, host: host, root: key(t), app: key(t), proxy: key(t), CertificateLife: 24 * time.Hour}
	orkKey := key(t)
	bootKeys := []*identity.Key{key(t), key(t)}
	now := timestamppb.Now()
	member := func(k *identity.Key, name string, role meshv1.Role) *meshv1.Member {
		return &meshv1.Member{Key: k.ID().String(), Name: name, Roles: []meshv1.Role{role}, AdmittedAt: now}
	}
	ork, app := member(orkKey, "ork", meshv1.Role_ROLE_ORK), member(l.app, "app", meshv1.Role_ROLE_APP_NODE)
	ork.SignsCertificates, app.SignsGrants = true, true
	var err error
	l.founder, err = trust.Create("", "lab", l.root, nil, []*meshv1.Member{
		ork, app, member(l.proxy, "proxy", meshv1.Role_ROLE_PROXY),
		member(bootKeys[0], "boot-1", meshv1.Role_ROLE_BOOTSTRAP), member(bootKeys[1], "boot-2", meshv1.Role_ROLE_BOOTSTRAP),
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, k := range bootKeys {
		registry := cards.New(l.founder, time.Now)
		n := l.Start(k, func(o *mesh.Options) { o.Role, o.Relay, o.DHT = meshv1.Role_ROLE_BOOTSTRAP, true, mesh.DHTServer },
			func(n *mesh.Node) { meshv1.RegisterCardsServer(n, registry) })
		l.boots = append(l.boots, &meshv1.BootstrapAddress{Key: n.ID().String(), Addresses: n.Addresses()})
		l.Cards = append(l.Cards, registry)
	}
	info, err := l.founder.NextInfo(l.root, time.Now(), func(i *meshv1.NetworkInfo) { i.Bootstraps = l.boots })
	if err == nil {
		_, err = l.founder.Adopt(nil, info)
	}
	if err != nil {
		t.Fatal(err)
	}
	l.Ork = &Ork{lab: l, key: orkKey, attempt: AttemptID, token: newToken(), listen: "/ip4/" + host + "/tcp/0"}
	l.Ork.Up()
	return l
}

func newToken() string {
	b := make([]byte, 16)
	_, _ = rand.Read(b)
	return hex.EncodeToString(b)
}

// network is a member's copy of the network as it stands.
func (l *Lab) network() *trust.Network {
	l.t.Helper()
	id := l.founder.ID()
	n, err := trust.NewMemory(id[:], l.founder.RootKeys())
	if err == nil {
		_, err = n.Adopt(l.founder.RosterEnvelope(), l.founder.InfoEnvelope())
	}
	if err != nil {
		l.t.Fatal(err)
	}
	return n
}

// Start starts a node of a member; it ends with the test.
func (l *Lab) Start(k *identity.Key, set func(*mesh.Options), before func(*mesh.Node)) *mesh.Node {
	l.t.Helper()
	n := l.start(k, set, before)
	l.t.Cleanup(func() { l.stop(n) })
	return n
}

func (l *Lab) start(k *identity.Key, set func(*mesh.Options), before func(*mesh.Node)) *mesh.Node {
	l.t.Helper()
	o := mesh.Options{Key: k, Network: l.network(), Listen: []string{"/ip4/" + l.host + "/tcp/0"}, DHT: mesh.DHTOff, Clock: l.Clock.Now}
	if set != nil {
		set(&o)
	}
	n, err := mesh.New(context.Background(), o)
	if err != nil {
		l.t.Fatal(err)
	}
	if before != nil {
		before(n)
	}
	if err := n.Start(context.Background()); err != nil {
		l.stop(n)
		l.t.Fatal(err)
	}
	return n
}

func (l *Lab) stop(n *mesh.Node) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	_ = n.Close(ctx)
}

// Proxy starts a node with the proxy's role.
func (l *Lab) Proxy() *mesh.Node {
	return l.Start(l.proxy, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_PROXY }, nil)
}

// AppNode starts the app-node of the roster.
func (l *Lab) AppNode() *mesh.Node {
	return l.Start(l.app, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_APP_NODE }, nil)
}

// Client starts a node that holds a grant for the agent, as app-node signs them
// for the user UserID. It lasts 12 h.
func (l *Lab) Client(agent peer.ID, epoch uint64, rights ...string) *mesh.Node {
	l.t.Helper()
	return l.ClientOf(UserID, agent, epoch, rights...)
}

// ClientOf is Client for another user.
func (l *Lab) ClientOf(user string, agent peer.ID, epoch uint64, rights ...string) *mesh.Node {
	l.t.Helper()
	k := key(l.t)
	id := l.founder.ID()
	now := l.Clock.Now()
	envelope, err := trust.SealGrant(l.app, &meshv1.Grant{
		NetworkId: id[:], ClientKey: k.ID().String(), AgentKey: agent.String(), JobId: JobID, Rights: rights, UserId: user,
		NotBefore: timestamppb.New(now), NotAfter: timestamppb.New(now.Add(12 * time.Hour)), Epoch: epoch,
	})
	if err != nil {
		l.t.Fatal(err)
	}
	return l.Start(k, func(o *mesh.Options) { o.Credential = mesh.Grant(envelope) }, nil)
}

// Sibling starts a node of the same job, in an attempt of the same replica with
// this certificate epoch.
func (l *Lab) Sibling(epoch uint64) *mesh.Node {
	l.t.Helper()
	k := key(l.t)
	envelope, err := l.Ork.certify(k.ID(), "a-0000000000009", epoch)
	if err != nil {
		l.t.Fatal(err)
	}
	return l.Start(k, func(o *mesh.Options) { o.Credential = mesh.Certificate(envelope) }, nil)
}

// Ids of the one attempt that the lab knows.
const (
	JobID     = "j-0000000000001"
	ReplicaID = "r-0000000000001"
	AttemptID = "a-0000000000001"
	RackID    = "rk-test"
	UserID    = "u-test"
)

// Seed is that of the lab's one running attempt, simulated and on the lab's address.
func (l *Lab) Seed() *agentv1.Seed {
	id := l.founder.ID()
	attempt, token := l.Ork.current()
	return &agentv1.Seed{
		Version: 1, NetworkId: id[:], RootKeys: l.founder.RootKeys(), Bootstraps: l.boots, OrkKey: l.Ork.key.ID().String(),
		OrkAddresses: l.Ork.Addresses(), JobId: JobID, ReplicaId: ReplicaID, AttemptId: attempt, RackId: RackID, JoinToken: token,
		GpuCount: 1, GpuModel: "GH100_H100_SXM5_80GB", Simulated: true, MeshListen: l.host,
	}
}

// Ork is the lab's wrk-ork. Its certificates have epoch 2.
type Ork struct {
	orkv1.UnimplementedAgentsServer
	lab    *Lab
	key    *identity.Key
	listen string

	mu       sync.Mutex
	node     *mesh.Node
	attempt  string
	token    string
	holder   string // the key that redeemed the token
	redeemed int
	renewed  int
	attended int
	report   *agentv1.Report
	card     *meshv1.Card
	standing []chan *orkv1.AttendResponse
	over     bool // the attempt is
}

// Up starts it, on the port that it had before.
func (o *Ork) Up() {
	l := o.lab
	l.t.Helper()
	n := l.start(o.key, func(m *mesh.Options) {
		m.Role, m.Listen = meshv1.Role_ROLE_ORK, []string{o.listen}
		m.VerifyJoin = func(_ context.Context, p peer.ID, token string) error {
			if _, good := o.current(); token != good {
				return fault.New(fault.Denied, "unknown join token")
			}
			return nil
		}
		m.Vet = func(c mesh.Caller) error {
			o.mu.Lock()
			defer o.mu.Unlock()
			if c.Certificate != nil && o.over {
				return fault.New(fault.FailedPrecondition, "attempt %s is over; its certificate is void", c.Certificate.GetAttemptId())
			}
			return nil
		}
	}, func(n *mesh.Node) { orkv1.RegisterAgentsServer(n, o) })
	o.mu.Lock()
	defer o.mu.Unlock()
	o.node = n
	o.listen = n.Addresses()[0]
	o.listen = o.listen[:len(o.listen)-len("/p2p/"+n.ID().String())]
	l.t.Cleanup(func() { l.stop(n) })
}

// Down stops it; its memory stays.
func (o *Ork) Down() { o.lab.stop(o.node) }

// Addresses are where it listens.
func (o *Ork) Addresses() []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.node.Addresses()
}

// Seen is what the agent has asked for so far.
func (o *Ork) Seen() (redeemed, renewed, attended int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.redeemed, o.renewed, o.attended
}

// Report is the newest, or nil.
func (o *Ork) Report() *agentv1.Report {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.report
}

// Card is the newest that came with a report, or nil.
func (o *Ork) Card() *meshv1.Card {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.card
}

// Order sends an order on every standing stream.
func (o *Ork) Order(order *orkv1.AttendResponse) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, s := range o.standing {
		s <- order
	}
}

// End says that the attempt is over, as after a stop.
func (o *Ork) End() {
	o.mu.Lock()
	o.over = true
	o.mu.Unlock()
	o.Node().Revet()
}

// Again begins another attempt of the job, with a token of its own.
func (o *Ork) Again(attempt string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.attempt, o.token, o.holder = attempt, newToken(), ""
}

func (o *Ork) current() (attempt, token string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.attempt, o.token
}

// Node is the running node.
func (o *Ork) Node() *mesh.Node {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.node
}

func (o *Ork) certify(agent peer.ID, attempt string, epoch uint64) ([]byte, error) {
	id := o.lab.founder.ID()
	now := o.lab.Clock.Now()
	return trust.SealCertificate(o.key, &meshv1.JobCertificate{
		NetworkId: id[:], Key: agent.String(), JobId: JobID, ReplicaId: ReplicaID, AttemptId: attempt, RackId: RackID,
		NotBefore: timestamppb.New(now), NotAfter: timestamppb.New(now.Add(o.lab.CertificateLife)), Epoch: epoch,
	})
}

// RedeemToken gives the certificate to the first key that asks.
func (o *Ork) RedeemToken(ctx context.Context, r *orkv1.RedeemTokenRequest) (*orkv1.RedeemTokenResponse, error) {
	c, _ := mesh.CallerFrom(ctx)
	o.mu.Lock()
	defer o.mu.Unlock()
	o.redeemed++
	if r.GetJoinToken() != o.token || o.holder != "" && o.holder != c.ID.String() {
		return nil, fault.ToGRPC(fault.New(fault.Denied, "the join token is not good"))
	}
	o.holder = c.ID.String()
	envelope, err := o.certify(c.ID, o.attempt, 2)
	return &orkv1.RedeemTokenResponse{CertificateEnvelope: envelope}, err
}

// RenewCertificate gives a fresh one.
func (o *Ork) RenewCertificate(ctx context.Context, _ *orkv1.RenewCertificateRequest) (*orkv1.RenewCertificateResponse, error) {
	c, _ := mesh.CallerFrom(ctx)
	o.mu.Lock()
	defer o.mu.Unlock()
	o.renewed++
	envelope, err := o.certify(c.ID, o.attempt, 2)
	return &orkv1.RenewCertificateResponse{CertificateEnvelope: envelope}, err
}

// Attend keeps reports and sends orders.
func (o *Ork) Attend(stream orkv1.Agents_AttendServer) error {
	orders := make(chan *orkv1.AttendResponse, 16)
	o.mu.Lock()
	o.attended++
	o.standing = append(o.standing, orders)
	o.mu.Unlock()
	defer func() {
		o.mu.Lock()
		o.standing = slices.DeleteFunc(o.standing, func(c chan *orkv1.AttendResponse) bool { return c == orders })
		o.mu.Unlock()
	}()
	if err := stream.Send(&orkv1.AttendResponse{MinimumEpoch: 1}); err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() {
		for {
			r, err := stream.Recv()
			if err != nil {
				ended <- err
				return
			}
			o.take(r)
		}
	}()
	for {
		select {
		case err := <-ended:
			return err
		case order := <-orders:
			if err := stream.Send(order); err != nil {
				return err
			}
		}
	}
}

func (o *Ork) take(r *orkv1.AttendRequest) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.report = r.GetReport()
	if len(r.GetCardEnvelope()) > 0 {
		if card, err := o.lab.founder.CheckCard(r.GetCardEnvelope(), time.Now()); err == nil {
			o.card = card
		}
	}
}
