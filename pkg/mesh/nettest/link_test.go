package nettest

import (
	"testing"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

// trio starts a bootstrap, ork and a monitor that keeps a link to ork.
func (l *lab) trio() (boot, ork, monitor *node) {
	l.t.Helper()
	key := l.member("monitor", meshv1.Role_ROLE_MONITOR)
	boot = l.bootstrap(l.host("boot", "5.5.5.1/24"))
	ork = l.orchestrator(l.host("ork", "5.5.5.2/24"))
	monitor = l.daemon(l.host("monitor", "5.5.5.3/24"), key, meshv1.Role_ROLE_MONITOR)
	monitor.keep(ork)
	monitor.reaches(ork)
	return boot, ork, monitor
}

// A firewall swallows UDP: links that ran over it are found dead and come back over
// TCP, and a newcomer is not held up.
func TestBlockedUDPFallsBackToTCP(t *testing.T) {
	l := newLab(t)
	key := l.member("monitor", meshv1.Role_ROLE_MONITOR)
	boot := l.bootstrap(l.host("boot", "5.5.5.1/24"))
	orkHost, monitorHost := l.host("ork", "5.5.5.2/24"), l.host("monitor", "5.5.5.3/24")
	orkHost.refuse("tcp")
	ork := l.orchestrator(orkHost)
	monitor := l.daemon(monitorHost, key, meshv1.Role_ROLE_MONITOR)
	monitor.reaches(ork)
	if !monitor.linked(ork, overQUIC) {
		t.Fatal("TCP is blocked and yet QUIC is not taken")
	}
	orkHost.refuse("udp")
	l.eventually("the link is found silent", func() bool { return !monitor.linked(ork, good) })
	orkHost.accept("tcp")
	began := time.Now()
	monitor.reaches(ork)
	l.eventually("the link is over TCP", func() bool { return monitor.linked(ork, overTCP) })
	t.Logf("calls were back after %s", time.Since(began).Round(100*time.Millisecond))

	newcomer := l.daemon(l.host("new", "5.5.5.4/24"), l.member("proxy", meshv1.Role_ROLE_PROXY), meshv1.Role_ROLE_PROXY)
	boot.tell()
	began = time.Now()
	newcomer.reaches(ork)
	t.Logf("a newcomer's first call took %s", time.Since(began).Round(100*time.Millisecond))
}

// A network parts and comes together again: what crosses it fails in words, is
// closed, and is good again without anybody's doing.
func TestPartitionHealsByItself(t *testing.T) {
	t.Parallel()
	for _, protocol := range []string{"tcp", "quic"} {
		t.Run(protocol, func(t *testing.T) {
			l := newLab(t)
			l.protocols = []string{protocol}
			_, ork, monitor := l.trio()
			agent := l.agent(l.host("agent", "5.5.5.4/24"))
			agent.keep(ork)
			agent.reaches(ork)
			monitor.reaches(agent)
			stream := monitor.hold(ork)
			stream.flows()

			parted := time.Now()
			ork.host.cut()
			silence := func(what string, least time.Duration, ok func() bool) {
				t.Helper()
				l.eventually(what, ok)
				if took := time.Since(parted); took < least {
					t.Errorf("%s after %s, too early", what, took)
				} else {
					t.Logf("%s after %s", what, took.Round(100*time.Millisecond))
				}
			}
			// The last sign of life was up to a ping's second before the cut.
			silence("suspect", time.Second, func() bool { return monitor.linked(ork, suspect) })
			if kind := fault.KindOf(monitor.ping(ork)); kind != fault.Unreachable {
				t.Errorf("a call to a silent peer ends with kind %q", kind)
			}
			silence("closed", 8*time.Second, func() bool { return len(monitor.links(ork)) == 0 && len(agent.links(ork)) == 0 })
			if err := stream.breaks(); !fault.Is(err, fault.Unreachable) {
				t.Errorf("the stream across the partition ended with %v", err)
			}
			monitor.reaches(agent) // this side goes on

			ork.host.heal()
			began := time.Now()
			monitor.reaches(ork)
			agent.reaches(ork)
			t.Logf("calls were back %s after the healing", time.Since(began).Round(100*time.Millisecond))
			monitor.hold(ork).flows()
			l.eventually("ork drops its end of the old link", func() bool {
				return !ork.linked(monitor, func(k Link) bool { return k.Since.Before(parted) })
			})
		})
	}
}

// A daemon hangs while its kernel goes on taking in what others send: it is found
// silent all the same, and good again when it goes on.
func TestHungDaemonIsSilent(t *testing.T) {
	t.Parallel()
	for _, protocol := range []string{"tcp", "quic"} {
		t.Run(protocol, func(t *testing.T) {
			l := newLab(t)
			l.protocols = []string{protocol}
			_, ork, monitor := l.trio()
			stream := monitor.drip(ork)
			stream.flows()
			ork.host.stop()
			l.eventually("suspect", func() bool { return monitor.linked(ork, suspect) })
			l.eventually("closed", func() bool { return len(monitor.links(ork)) == 0 })
			if err := stream.breaks(); !fault.Is(err, fault.Unreachable) {
				t.Errorf("the stream to it ended with %v", err)
			}
			ork.host.resume()
			monitor.reaches(ork)
		})
	}
}

// A member is removed while it takes in nothing of what is being sent to it.
func TestRemovedMemberThatHangsIsCut(t *testing.T) {
	l := newLab(t)
	l.protocols = []string{"tcp"}
	_, ork, monitor := l.trio()
	ork.drip(monitor).flows()
	sent := make(chan error, 1)
	go func() { sent <- ork.send(monitor, 100<<20) }()
	time.Sleep(200 * time.Millisecond)
	monitor.host.stop()
	l.remove(monitor)
	began := time.Now()
	ork.tell()
	l.eventually("cut", func() bool { return len(ork.links(monitor)) == 0 })
	t.Logf("cut after %s", time.Since(began).Round(100*time.Millisecond))
	if err := <-sent; fault.KindOf(err) != fault.Unreachable && fault.KindOf(err) != fault.Denied {
		t.Errorf("what was being sent ended with %v", err)
	}
}

// The only bootstrap dies; another one takes its place on another host, and one
// daemon is told.
func TestBootstrapIsReplacedElsewhere(t *testing.T) {
	l := newLab(t)
	boot, ork, monitor := l.trio()
	agent := l.agent(l.site("rack", "5.5.5.101/24", "10.0.1", keepsPorts).inside("agent"))
	agent.keep(ork)
	agent.reaches(ork)
	monitor.reaches(agent)

	boot.host.kill()
	l.bootstraps = map[string][]string{}
	second := l.bootstrap(l.host("second", "5.5.5.9/24"))
	ork.tell()
	for _, n := range []*node{ork, monitor, agent} {
		n.knows()
		l.eventually(n.host.name+" is at the new bootstrap", func() bool { return n.linked(second, good) })
	}
	newcomer := l.daemon(l.host("new", "5.5.5.4/24"), l.member("proxy", meshv1.Role_ROLE_PROXY), meshv1.Role_ROLE_PROXY)
	newcomer.reaches(ork)
	newcomer.reaches(agent)
}

func TestPeerRestartedOnAnotherPortIsFound(t *testing.T) {
	l := newLab(t)
	_, ork, monitor := l.trio()
	agent := l.agent(l.host("agent", "5.5.5.4/24"))
	agent.keep(ork)
	agent.reaches(ork)
	ork.host.kill()
	ork.spec.Listen = []string{"/ip4/0.0.0.0/tcp/4999", "/ip4/0.0.0.0/udp/4999/quic-v1"}
	began := time.Now()
	ork.again()
	monitor.reaches(ork)
	t.Logf("found after %s", time.Since(began).Round(100*time.Millisecond))
	ork.reaches(agent)
	agent.reaches(ork)
}

// A link that carries a kilobyte a second is alive, however long an answer takes.
func TestSlowLinkIsNotDead(t *testing.T) {
	t.Parallel()
	for _, protocol := range []string{"tcp", "quic"} {
		t.Run(protocol, func(t *testing.T) {
			l := newLab(t)
			l.protocols = []string{protocol}
			key := l.member("monitor", meshv1.Role_ROLE_MONITOR)
			ork := l.orchestrator(l.host("ork", "5.5.5.2/24"))
			monitor := l.daemon(l.host("monitor", "5.5.5.3/24"), key, meshv1.Role_ROLE_MONITOR)
			monitor.given = map[string][]string{ork.id: l.orkAt} // no bootstrap: nothing else crosses the link
			monitor.keep(ork)
			monitor.reaches(ork)
			ork.keep(monitor)
			l.eventually("settled", func() bool { return len(monitor.links(ork)) == 1 })
			before := monitor.links(ork)[0]
			monitor.host.slow()

			passes := func() {
				t.Helper()
				l.eventually("a small call passes", func() bool { return monitor.call(ork, 1<<10, patience/3) == nil })
			}
			passes()
			// A frame of this size takes longer than silence is borne.
			if err := monitor.call(ork, 12<<10, 8*time.Second); !fault.Is(err, fault.Timeout) && !fault.Is(err, fault.Unreachable) {
				t.Errorf("a call that is too big for the link ends with %v", err)
			}
			l.member("proxy", meshv1.Role_ROLE_PROXY)
			ork.tell()
			monitor.knows()
			passes()
			if now := monitor.links(ork); len(now) == 0 || !now[0].Since.Equal(before.Since) {
				t.Errorf("the slow link was declared dead: %v then, %v now", before, now)
			}
		})
	}
}

// A killed daemon comes back while only QUIC gets through to it. Once TCP works
// again the link returns to it, and what runs goes on.
func TestLinkReturnsFromQUICToTCP(t *testing.T) {
	l := newLab(t)
	_, ork, monitor := l.trio()
	l.eventually("over TCP", func() bool { return monitor.linked(ork, overTCP) })
	ork.host.kill()
	ork.host.refuse("tcp")
	ork.again()
	ork.given = map[string][]string{monitor.id: l.listen(monitor.host, monitor.host.address.String())}
	ork.keep(monitor) // both sides dial
	l.eventually("over QUIC", func() bool { return monitor.linked(ork, overQUIC) })
	stream := monitor.hold(ork)
	stream.flows()

	ork.host.accept("tcp")
	l.eventually("over TCP again", func() bool { return monitor.linked(ork, overTCP) })
	stream.flows()
	l.check(monitor.ping(ork))
	stream.drop()
	l.eventually("QUIC is left", func() bool { return !monitor.linked(ork, overQUIC) })
	l.check(monitor.ping(ork))
}
