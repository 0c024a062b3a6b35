package nettest

import (
	"fmt"
	"testing"
	"time"

	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

// Two daemons, a bootstrap and an agent on one bridge: no default route, no DNS,
// no internet.
func TestLANWithoutInternet(t *testing.T) {
	l := newLab(t)
	l.meet("192.168.7.1/24", "192.168.7.2/24", "192.168.7.3/24", "192.168.7.4/24")
}

func TestIPv6Only(t *testing.T) {
	l := newLab(t)
	l.meet("2a01:4f8::1/64", "2a01:4f8::2/64", "2a01:4f8::3/64", "2a01:4f8::4/64")
}

// meet starts a bootstrap, ork, a monitor and an agent, and has them find and call
// each other.
func (l *lab) meet(boot, ork, monitor, agent string) {
	l.t.Helper()
	key := l.member("monitor", meshv1.Role_ROLE_MONITOR)
	l.bootstrap(l.host("boot", boot))
	o := l.orchestrator(l.host("ork", ork))
	m := l.daemon(l.host("monitor", monitor), key, meshv1.Role_ROLE_MONITOR)
	a := l.agent(l.host("agent", agent))
	m.reaches(o) // by its key
	l.eventually("ork is found by its role", func() bool {
		var keys []string
		m.ask("Find", &Ask{Node: m.id, Bytes: int(meshv1.Role_ROLE_ORK), Limit: patience}, &keys)
		return len(keys) == 1 && keys[0] == o.id
	})
	a.reaches(o)
	m.reaches(a)
}

// Two sites with a router each that translates addresses and keeps ports, and one
// public bootstrap: the relay carries what cannot go directly yet, then the routers
// are passed and the relay is left.
func TestSitesMeetDirectlyAfterTheRelay(t *testing.T) {
	t.Parallel()
	for _, protocol := range []string{"tcp", "quic"} {
		t.Run(protocol, func(t *testing.T) {
			l := newLab(t)
			l.protocols = []string{protocol}
			key := l.member("proxy", meshv1.Role_ROLE_PROXY)
			boot := l.bootstrap(l.host("boot", "5.5.5.1/24"))
			east := l.site("east", "5.5.5.101/24", "10.0.1", keepsPorts)
			west := l.site("west", "5.5.5.102/24", "10.0.2", keepsPorts)
			agent := l.agent(east.inside("agent"))
			proxy := l.daemon(west.inside("proxy"), key, meshv1.Role_ROLE_PROXY, private)
			// The first thing ever said between them is this stream: the routers are
			// passed only after the relay has brought the two together.
			first := proxy.holdsSoon(agent)
			if proxy.linked(agent, direct) {
				t.Log("the routers were passed before the first stream stood, so this run shows nothing of a stream on the relay")
			}
			l.eventually("the routers are passed", func() bool { return proxy.linked(agent, direct) && agent.linked(proxy, direct) })
			first.flows() // still by the relay
			second := proxy.hold(agent)
			second.flows()
			l.check(proxy.ping(agent))
			l.check(agent.ping(proxy))
			first.drop()
			l.eventually("the relay is left", func() bool { return !proxy.linked(agent, relayed) })

			boot.host.kill()
			second.flows()
			l.check(proxy.ping(agent))
			l.check(proxy.send(agent, 1<<20))
		})
	}
}

// Routers that give each destination another port cannot be passed: the relay
// carries everything, however much.
func TestSymmetricSitesStayOnTheRelay(t *testing.T) {
	l := newLab(t)
	key := l.member("proxy", meshv1.Role_ROLE_PROXY)
	l.bootstrap(l.host("boot", "5.5.5.1/24"))
	agent := l.agent(l.site("east", "5.5.5.101/24", "10.0.1", symmetric).inside("agent"))
	proxy := l.daemon(l.site("west", "5.5.5.102/24", "10.0.2", symmetric).inside("proxy"), key, meshv1.Role_ROLE_PROXY, private)
	proxy.reaches(agent)
	shell := proxy.hold(agent)
	l.check(proxy.send(agent, 100<<20))
	shell.flows()
	l.check(proxy.ping(agent))
	if proxy.linked(agent, direct) {
		t.Error("the sites met directly, so nothing was shown of the relay")
	}
}

func TestFortyAgentsBehindOneAddress(t *testing.T) {
	l := newLab(t)
	boot := l.bootstrap(l.host("boot", "5.5.5.1/24"))
	ork := l.orchestrator(l.host("ork", "5.5.5.2/24"))
	rack := l.site("rack", "5.5.5.101/24", "10.0.1", keepsPorts).inside("rack0")
	var agents []*node
	for i := range 40 {
		agents = append(agents, l.agent(rack, func(s *Spec) {
			s.Listen = []string{fmt.Sprintf("/ip4/0.0.0.0/tcp/%d", 5000+i), fmt.Sprintf("/ip4/0.0.0.0/udp/%d/quic-v1", 5000+i)}
		}))
		agents[i].keep(ork)
	}
	all := func(at *node) {
		t.Helper()
		l.eventually("every agent is at "+at.host.name, func() bool {
			there := at.peers()
			for _, a := range agents {
				if !there[a.id] {
					return false
				}
			}
			return true
		})
	}
	all(boot)
	all(ork)
	for _, at := range []*node{boot, ork} {
		at.host.kill()
		began := time.Now()
		at.again()
		all(at)
		t.Logf("all were back at %s after %s", at.host.name, time.Since(began).Round(100*time.Millisecond))
	}
	for _, a := range agents {
		a.reaches(ork)
	}
}
