package daemon

import (
	"context"
	"crypto/rand"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/cosmicac/cosmicac/pkg/daemon/node"
	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/health"
	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/log"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	"github.com/cosmicac/cosmicac/pkg/mesh/cards"
	"github.com/cosmicac/cosmicac/pkg/trust"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

// around is a daemon "x" with its mesh node, and the network that it stands in.
type around struct {
	t    *testing.T
	site *site
	env  *Env
	node *mesh.Node
	skip atomic.Int64 // nanoseconds that the daemon's clock is ahead

	boot, worker *identity.Key
	ahead        atomic.Int64 // of the bootstrap's clock
}

var bothTransports = []string{"/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.1/udp/0/quic-v1"}

// newAround prepares the daemon without its main loop; its checks are called by
// the test. It started long ago, so nothing is excused as settling.
func newAround(t *testing.T) *around {
	t.Helper()
	a := &around{t: t, site: newSite(t)}
	b := Base{StateDirectory: a.site.dir}
	b.fill("x")
	e, lock, err := prepare(process{service: "x", stderr: io.Discard}, b, time.Now().Add(-time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	e.clock = func() time.Time { return time.Now().Add(time.Duration(a.skip.Load())) }
	a.env, a.boot, a.worker = e, newIdentity(t), newIdentity(t)
	a.roster(func(r *meshv1.Roster) {
		r.Members = append(r.Members,
			&meshv1.Member{Key: a.boot.ID().String(), Name: "boot", Roles: []meshv1.Role{meshv1.Role_ROLE_BOOTSTRAP}},
			&meshv1.Member{Key: a.worker.ID().String(), Name: "worker", Roles: []meshv1.Role{meshv1.Role_ROLE_WORKER}})
	})
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		if err := e.unwind(ctx); err != nil {
			t.Error(err)
		}
		_ = lock.Unlock()
		_ = e.log.Close()
	})
	return a
}

func newIdentity(t *testing.T) *identity.Key {
	t.Helper()
	k, err := identity.New(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func (a *around) roster(edit func(*meshv1.Roster)) []byte {
	a.t.Helper()
	envelope, err := a.env.Network.NextRoster(a.site.root, time.Now(), edit)
	if err == nil {
		_, err = a.env.Network.Adopt(envelope, nil)
	}
	if err != nil {
		a.t.Fatal(err)
	}
	return envelope
}

// bootstrapAt says where the bootstrap is.
func (a *around) bootstrapAt(addresses ...string) {
	a.t.Helper()
	envelope, err := a.env.Network.NextInfo(a.site.root, time.Now(), func(i *meshv1.NetworkInfo) {
		i.Bootstraps = []*meshv1.BootstrapAddress{{Key: a.boot.ID().String(), Addresses: addresses}}
	})
	if err == nil {
		_, err = a.env.Network.Adopt(nil, envelope)
	}
	if err != nil {
		a.t.Fatal(err)
	}
}

// memory is another node's copy of the network as it stands.
func (a *around) memory() *trust.Network {
	a.t.Helper()
	id := a.env.Network.ID()
	n, err := trust.NewMemory(id[:], a.env.Network.RootKeys())
	if err == nil {
		err = n.AdoptGenesis(a.env.Network.Genesis())
	}
	if err == nil {
		_, err = n.Adopt(a.env.Network.RosterEnvelope(), a.env.Network.InfoEnvelope())
	}
	if err != nil {
		a.t.Fatal(err)
	}
	return n
}

// start starts the daemon's own node.
func (a *around) start(listen ...string) {
	a.t.Helper()
	a.env.base.Mesh.Listen = listen
	n, err := a.env.Mesh(context.Background(), func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_ORK })
	if err == nil {
		err = a.env.StartMesh(context.Background())
	}
	if err != nil {
		a.t.Fatal(err)
	}
	a.node = n
}

// other runs another node of the network; the bootstrap answers mesh.v1.Node.
func (a *around) other(key *identity.Key, set func(*mesh.Options)) *mesh.Node {
	a.t.Helper()
	o := mesh.Options{Key: key, Network: a.memory(), Listen: bothTransports, DHT: mesh.DHTServer, Log: hclog.NewNullLogger()}
	if key == a.boot {
		o.Role, o.Relay = meshv1.Role_ROLE_BOOTSTRAP, true
	} else {
		o.Role = meshv1.Role_ROLE_WORKER
	}
	if set != nil {
		set(&o)
	}
	n, err := mesh.New(context.Background(), o)
	if err != nil {
		a.t.Fatal(err)
	}
	a.t.Cleanup(func() { _ = n.Close(context.Background()) })
	if key == a.boot {
		meshv1.RegisterCardsServer(n, cards.New(o.Network, nil))
		meshv1.RegisterNodeServer(n, &node.Service{Key: key, Network: o.Network, Mesh: n, Name: "boot", Ring: log.NewRing(0), Health: health.NewSet(nil),
			Metrics: prometheus.NewRegistry(), Ready: func() bool { return true },
			Clock: func() time.Time { return time.Now().Add(time.Duration(a.ahead.Load())) }})
	}
	if err := n.Start(context.Background()); err != nil {
		a.t.Fatal(err)
	}
	return n
}

// warns looks and tells whether a warning of the code holds.
func (a *around) warns(code health.Code) bool {
	a.env.watch()
	return a.env.Health.Has(code)
}

func (a *around) text(code health.Code) string {
	for _, w := range a.env.Health.List() {
		if w.GetCode() == string(code) {
			return w.GetText() + " " + w.GetRemedy()
		}
	}
	return ""
}

func TestAMissingBootstrapIsWarnedOfUntilItIsBack(t *testing.T) {
	t.Parallel()
	a := newAround(t)
	b := a.other(a.boot, nil)
	a.bootstrapAt(b.Addresses()...)
	a.start(bothTransports...)
	eventually(t, "no warning", func() bool { return !a.warns(health.NoBootstrapReachable) })
	listen := []string{strings.Split(b.Addresses()[0], "/p2p/")[0]}
	if err := b.Close(context.Background()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a warning", func() bool { return a.warns(health.NoBootstrapReachable) })
	a.other(a.boot, func(o *mesh.Options) { o.Listen = listen })
	eventually(t, "it goes", func() bool { return !a.warns(health.NoBootstrapReachable) })
}

func TestBlockedUDPAndWrongClocksAreWarnedOfUntilTheyAreRight(t *testing.T) {
	t.Parallel()
	a := newAround(t)
	b := a.other(a.boot, nil)
	silent, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	_, port, _ := net.SplitHostPort(silent.LocalAddr().String())
	var tcp string
	for _, address := range b.Addresses() {
		if strings.Contains(address, "/tcp/") {
			tcp = address
		}
	}
	a.bootstrapAt(tcp, "/ip4/127.0.0.1/udp/"+port+"/quic-v1")
	a.ahead.Store(int64(6 * time.Minute))
	a.start(bothTransports...)
	a.env.checkNetwork(context.Background())
	if !a.env.Health.Has(health.UDPBlocked) || !strings.Contains(a.text(health.UDPBlocked), "mesh netcheck --from x") {
		t.Errorf("blocked UDP is not warned of: %v", a.env.Health.List())
	}
	if text := a.text(health.ClockSkew); !strings.Contains(text, "boot") || !strings.Contains(text, "6m0s") {
		t.Errorf("a wrong clock is not warned of: %q", text)
	}
	a.ahead.Store(0)
	a.bootstrapAt(b.Addresses()...)
	a.env.checkNetwork(context.Background())
	if a.env.Health.Has(health.UDPBlocked) || a.env.Health.Has(health.ClockSkew) {
		t.Errorf("it stays: %v", a.env.Health.List())
	}
}

func TestAPeerThatIsOnlyRelayedIsWarnedOfUntilADirectWayStands(t *testing.T) {
	t.Parallel()
	a := newAround(t)
	b := a.other(a.boot, nil)
	a.bootstrapAt(b.Addresses()...)
	a.start() // listens on nothing, so the worker cannot dial it
	hidden := a.other(a.worker, func(o *mesh.Options) { o.Listen, o.Private = nil, true })
	defer a.node.Keep(a.worker.ID())()
	relayed := func() (is, direct bool) {
		for _, k := range a.node.Kept() {
			if k.ID == a.worker.ID() && k.Path != nil {
				return k.Path.GetRelayed(), !k.Path.GetRelayed()
			}
		}
		return false, false
	}
	eventually(t, "relayed", func() bool { is, _ := relayed(); return is })
	if a.warns(health.RelayedOnly) {
		t.Error("a connection of this moment is warned of")
	}
	a.skip.Store(int64(time.Minute))
	if !a.warns(health.RelayedOnly) || !strings.Contains(a.text(health.RelayedOnly), "mesh trace worker") {
		t.Errorf("it is not warned of: %v", a.env.Health.List())
	}
	if err := hidden.Close(context.Background()); err != nil {
		t.Fatal(err)
	}
	a.other(a.worker, nil)
	eventually(t, "direct", func() bool { _, direct := relayed(); return direct })
	if a.warns(health.RelayedOnly) {
		t.Errorf("it stays: %v", a.env.Health.List())
	}
}

func TestRefusedPeersAreWarnedOfForAWhile(t *testing.T) {
	t.Parallel()
	a := newAround(t)
	a.start(bothTransports...)
	if a.warns(health.PeersRefused) {
		t.Error("it is warned of before")
	}
	stranger := newIdentity(t)
	s := a.other(stranger, func(o *mesh.Options) { o.DHT = mesh.DHTOff })
	_, err := meshv1.NewNodeClient(s.Client(a.node.ID(), a.node.Addresses()...)).Ping(context.Background(), &meshv1.PingRequest{})
	if !fault.Is(err, fault.Denied) {
		t.Fatalf("a stranger: %v", err)
	}
	eventually(t, "a warning", func() bool { return a.warns(health.PeersRefused) })
	if text := a.text(health.PeersRefused); !strings.Contains(text, stranger.ID().String()) || !strings.Contains(text, "network admit") {
		t.Errorf("%q", text)
	}
	a.skip.Store(int64(mesh.RefusalPause + time.Minute))
	if a.warns(health.PeersRefused) {
		t.Errorf("it stays: %v", a.env.Health.List())
	}
}

func TestAPeerThatRefusesThisNodeIsWarnedOfUntilItAdmitsIt(t *testing.T) {
	t.Parallel()
	a := newAround(t)
	network := a.memory()
	a.start(bothTransports...)
	// The worker holds a newer roster, without this daemon.
	without, err := network.NextRoster(a.site.root, time.Now(), func(r *meshv1.Roster) {
		r.Members = r.Members[1:]
		for _, m := range r.Members {
			if m.GetKey() == a.env.Key.ID().String() {
				t.Fatal("the daemon is not the first member")
			}
		}
	})
	if err == nil {
		_, err = network.Adopt(without, nil)
	}
	if err != nil {
		t.Fatal(err)
	}
	w := a.other(a.worker, func(o *mesh.Options) { o.Network = network })
	release := a.node.Keep(w.ID(), w.Addresses()...)
	defer release()
	eventually(t, "a warning", func() bool { return a.warns(health.RefusedByPeer) })
	if text := a.text(health.RefusedByPeer); !strings.Contains(text, "worker refuses this node") {
		t.Errorf("%q", text)
	}
	if _, err := a.env.Network.Adopt(without, nil); err != nil { // it may have come from the worker
		t.Fatal(err)
	}
	a.roster(func(r *meshv1.Roster) {
		r.Members = append(r.Members, &meshv1.Member{Key: a.env.Key.ID().String(), Name: "x", Roles: []meshv1.Role{meshv1.Role_ROLE_ORK}})
	})
	eventually(t, "it goes", func() bool { return !a.warns(health.RefusedByPeer) && a.node.Connected(w.ID()) })
}
