package mesh_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/cosmicac/cosmicac/pkg/mesh"
	"github.com/cosmicac/cosmicac/pkg/mesh/cards"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

// second runs one more bootstrap and tells the network of both.
func (l *lab) second(first *spot) *spot {
	l.t.Helper()
	key := l.member("boot-2", meshv1.Role_ROLE_BOOTSTRAP)
	network := l.memory()
	b := l.start(key, func(o *mesh.Options) {
		o.Network, o.Role, o.Relay = network, meshv1.Role_ROLE_BOOTSTRAP, true
		o.Listen = []string{transports["tcp"][0], transports["quic"][0]}
	}, func(s *spot) { meshv1.RegisterCardsServer(s.Node, cards.New(network, nil)) })
	l.bootstrapAt(first.Node, b.Node)
	return b
}

func TestACheckSeesWhichBootstrapsAnswerAndWhere(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	up := l.bootstrap()
	down := l.second(up)
	if err := down.Close(within(t)); err != nil {
		t.Fatal(err)
	}
	worker := l.member("worker", meshv1.Role_ROLE_WORKER)
	w := l.start(worker, func(o *mesh.Options) {
		o.Role, o.Listen = meshv1.Role_ROLE_WORKER, []string{transports["tcp"][0], transports["quic"][0]}
	})
	c := w.CheckNetwork(within(t))
	if len(c.GetListenAddresses()) != 2 || len(c.GetAnnouncedAddresses()) != 2 || len(c.GetBootstraps()) != 2 || c.GetTookMicroseconds() <= 0 {
		t.Fatalf("%v", c)
	}
	for _, b := range c.GetBootstraps() {
		if want := b.GetKey() == up.ID().String(); b.GetAnswers() != want || (b.GetReason() == "") != want || len(b.GetAddresses()) != 2 {
			t.Errorf("%v", b)
		}
		for _, a := range b.GetAddresses() {
			answers := b.GetKey() == up.ID().String()
			if a.GetAnswers() != answers || (a.GetReason() == "") != answers || (a.GetRoundTripMicroseconds() > 0 && a.GetConnectMicroseconds() > 0) != answers {
				t.Errorf("%v", a)
			}
			if a.GetTransport() == "tcp" && !answers && a.GetReason() != "refused" {
				t.Errorf("%v", a)
			}
		}
	}
	// Loopback is this host itself.
	if c.GetUdp() != "works" || c.GetNat() != "none" || len(c.GetObservedAddresses()) != 2 {
		t.Errorf("udp %s, nat %s, seen at %v", c.GetUdp(), c.GetNat(), c.GetObservedAddresses())
	}
	if up.Streams() > 1000 || len(up.Peers()) > 3 {
		t.Errorf("connections of the check stay: %v", up.Peers())
	}
}

func TestACheckSeesThatUDPIsBlockedAndClocksAreOff(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	key := l.member("boot", meshv1.Role_ROLE_BOOTSTRAP)
	network := l.memory()
	b := l.start(key, func(o *mesh.Options) {
		o.Network, o.Role = network, meshv1.Role_ROLE_BOOTSTRAP
		o.Listen, o.Announce = transports["tcp"], nil
	}, func(s *spot) { s.service.ahead = 7 * time.Minute })
	silent := silentPort(t)
	env, err := l.founder.NextInfo(l.root, time.Now(), func(i *meshv1.NetworkInfo) {
		i.Bootstraps = []*meshv1.BootstrapAddress{{Key: b.ID().String(), Addresses: append(b.Addresses(), silent)}}
	})
	if err == nil {
		_, err = l.founder.Adopt(nil, env)
	}
	if err != nil {
		t.Fatal(err)
	}
	ork := l.start(l.ork, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_ORK })
	c := ork.CheckNetwork(within(t))
	if c.GetUdp() != "blocked" {
		t.Errorf("%v", c)
	}
	off := time.Duration(c.GetBootstraps()[0].GetClockAheadMicroseconds()) * time.Microsecond
	if !c.GetBootstraps()[0].GetAnswers() || off < 6*time.Minute || off > 8*time.Minute {
		t.Errorf("the clock is %s ahead: %v", off, c.GetBootstraps())
	}
}

func TestACheckWithoutAnyBootstrapEndsAndSaysSo(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	ork := l.start(l.ork, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_ORK })
	c := ork.CheckNetwork(within(t))
	if c.GetUdp() != "unknown" || c.GetNat() != "unknown" || c.GetNatReason() == "" || len(c.GetListenAddresses()) != 1 {
		t.Errorf("%v", c)
	}
}

func TestBootstrapsDialMembersBackAndNothingElseFollows(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	b := l.bootstrap()
	worker := l.member("worker", meshv1.Role_ROLE_WORKER)
	w := l.start(worker, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_WORKER })
	var results []*meshv1.DialBack
	eventually(t, "dialed back", func() bool {
		results = w.CheckNetwork(within(t)).GetDialBacks()
		return len(results) == 1 && results[0].GetResult() == "reachable"
	})
	if results[0].GetAddress()+"/p2p/"+w.ID().String() != w.Addresses()[0] || results[0].GetCheckedAt() == nil {
		t.Errorf("%v", results)
	}
	// An address that nobody reaches is said to be so, and stays announced.
	closed := closedPort(t)
	monitor := l.start(l.member("monitor", meshv1.Role_ROLE_MONITOR), func(o *mesh.Options) { o.Role, o.Announce = meshv1.Role_ROLE_MONITOR, []string{closed} })
	eventually(t, "found unreachable", func() bool {
		results = monitor.CheckNetwork(within(t)).GetDialBacks()
		return len(results) == 1 && results[0].GetResult() == "unreachable"
	})
	if list := monitor.Addresses(); len(list) != 1 || !strings.HasPrefix(list[0], closed) {
		t.Errorf("it announces %v", list)
	}
	if b.log.has("refused peer") {
		t.Errorf("the bootstrap refused somebody:\n%s", b.log)
	}
}

func TestAnAgentCannotMakeABootstrapDial(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	b := l.bootstrap()
	key, certificate := l.agent("j-0000000000001")
	agent := l.start(key, func(o *mesh.Options) {
		o.Network, o.Credential, o.DHT = l.bare(), mesh.Certificate(certificate), mesh.DHTOff
		o.Bootstraps = []*meshv1.BootstrapAddress{{Key: b.ID().String(), Addresses: b.Addresses()}}
	})
	eventually(t, "connected", func() bool { return agent.Connected(b.ID()) })
	s, err := agent.Host().NewStream(within(t), b.ID(), "/libp2p/autonat/2/dial-request")
	if err == nil {
		_, _ = s.Write([]byte("x"))
		_ = s.SetReadDeadline(time.Now().Add(patience))
		_, err = s.Read(make([]byte, 1))
	}
	if err == nil || strings.Contains(err.Error(), "deadline") {
		t.Errorf("the stream was taken: %v", err)
	}
	if list := agent.CheckNetwork(context.Background()).GetDialBacks(); len(list) != 0 {
		t.Errorf("it asked: %v", list)
	}
}
