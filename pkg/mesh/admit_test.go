package mesh_test

import (
	"context"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	"github.com/libp2p/go-libp2p/core/peer"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
)

func TestTwoMembersCallEachOtherByKeyThroughABootstrap(t *testing.T) {
	t.Parallel()
	for name, listen := range transports {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t)
			worker, monitor := l.member("worker", meshv1.Role_ROLE_WORKER), l.member("monitor", meshv1.Role_ROLE_MONITOR)
			l.bootstrap()
			a := l.start(worker, func(o *mesh.Options) { o.Role, o.Listen, o.Name = meshv1.Role_ROLE_WORKER, listen, "worker" })
			b := l.start(monitor, func(o *mesh.Options) { o.Role, o.Listen = meshv1.Role_ROLE_MONITOR, listen })
			for _, pair := range [][2]*spot{{a, b}, {b, a}} {
				from, to := pair[0], pair[1]
				var got *meshv1.GetInfoResponse
				eventually(t, "call by key", func() (ok bool) {
					var err error
					got, err = info(within(t), from.Node, to.ID())
					return err == nil
				})
				if got.GetKey() != from.ID().String() {
					t.Errorf("caller is %s, want %s", got.GetKey(), from.ID())
				}
			}
			eventually(t, "found by role, with its card", func() bool {
				list, err := b.FindRole(within(t), meshv1.Role_ROLE_WORKER)
				return err == nil && len(list) == 1 && list[0].GetKey() == a.ID().String() && list[0].GetSequence() > 0 && len(list[0].GetAddresses()) > 0
			})
		})
	}
}

func TestStrangerIsDeniedInWordsAndReachesNothing(t *testing.T) {
	t.Parallel()
	for name, listen := range transports {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t)
			served := make(chan struct{}, 1)
			a := l.start(l.ork, func(o *mesh.Options) { o.Role, o.Listen = meshv1.Role_ROLE_ORK, listen }, func(s *spot) {
				s.Handle("http", &meshv1.Right{Members: true}, func(context.Context, *mesh.Stream) { served <- struct{}{} })
			})
			stranger := l.start(newKey(t), func(o *mesh.Options) { o.DHT, o.Listen = mesh.DHTOff, nil })
			wantKind(t, ping(within(t), stranger.Node, a.ID(), a.Addresses()...), fault.Denied, "refused this node", "is not in the roster")
			_, err := stranger.OpenStream(within(t), a.ID(), "http", a.Addresses()...)
			wantKind(t, err, fault.Denied)
			for what, s := range map[string]*spot{"refused peer": a, "refused by peer": stranger} {
				other := stranger.ID()
				if s == stranger {
					other = a.ID()
				}
				eventually(t, "the log says "+what, func() bool { return s.log.has(what, other.String(), "is not in the roster") })
			}
			select {
			case <-served:
				t.Error("a stranger's stream was served")
			default:
			}
			eventually(t, "the stranger's connections are closed", func() bool { return len(a.Peers()) == 0 })

			// An address where nobody listens is told apart.
			wantKind(t, ping(within(t), stranger.Node, newKey(t).ID(), "/ip4/127.0.0.1/tcp/1"), fault.Unreachable)
		})
	}
}

func TestAnotherNetworkIsDenied(t *testing.T) {
	t.Parallel()
	one, other := newLab(t), newLab(t)
	a := one.start(one.ork, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_ORK })
	b := other.start(other.ork, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_ORK })
	wantKind(t, ping(within(t), b.Node, a.ID(), a.Addresses()...), fault.Denied, "is not of network "+other.founder.ID().String())
}

func TestRemovedMemberIsCutMidStream(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	key := l.member("monitor", meshv1.Role_ROLE_MONITOR)
	a := l.start(l.ork, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_ORK })
	b := l.start(key, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_MONITOR })
	stream, err := meshv1.NewNodeClient(b.Client(a.ID(), a.Addresses()...)).StreamLogs(within(t), &meshv1.StreamLogsRequest{Follow: true})
	if err == nil {
		_, err = stream.Recv()
	}
	if err != nil {
		t.Fatal(err)
	}
	l.remove(key.ID())
	if _, err := a.Network().Adopt(l.founder.RosterEnvelope(), nil); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	if _, err = stream.Recv(); err == nil {
		t.Fatal("the stream of a removed member went on")
	}
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("cut after %s", took)
	}
	wantKind(t, err, fault.Unreachable)
	wantKind(t, ping(within(t), b.Node, a.ID()), fault.Denied, "is not in the roster")
	if !a.log.has("cut off peer", key.ID().String()) {
		t.Error("the log does not say who was cut")
	}
}

func TestWhoIsCutOffReadsWhy(t *testing.T) {
	t.Parallel()
	for transport, listen := range transports {
		t.Run(transport, func(t *testing.T) {
			t.Parallel()
			l := newLab(t)
			key := l.member("monitor", meshv1.Role_ROLE_MONITOR)
			a := l.start(l.ork, func(o *mesh.Options) { o.Role, o.Listen = meshv1.Role_ROLE_ORK, listen },
				func(s *spot) {
					s.Handle("hold", &meshv1.Right{Members: true}, func(ctx context.Context, st *mesh.Stream) {
						_, _ = st.Write([]byte("here"))
						<-ctx.Done()
					})
				})
			b := l.start(key, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_MONITOR })
			s, err := b.OpenStream(within(t), a.ID(), "hold", a.Addresses()...)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(s, make([]byte, 4)); err != nil {
				t.Fatal(err)
			}
			l.remove(key.ID())
			if _, err := a.Network().Adopt(l.founder.RosterEnvelope(), nil); err != nil {
				t.Fatal(err)
			}
			_, err = s.Read(make([]byte, 1))
			wantKind(t, err, fault.Denied, "cut this key off")
		})
	}
}

func TestNewRosterSpreadsToConnectedPeers(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	key := l.member("monitor", meshv1.Role_ROLE_MONITOR)
	a := l.start(l.ork, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_ORK })
	b := l.start(key, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_MONITOR })
	if err := ping(within(t), b.Node, a.ID(), a.Addresses()...); err != nil {
		t.Fatal(err)
	}
	late := l.member("late", meshv1.Role_ROLE_PROXY)
	if _, err := a.Network().Adopt(l.founder.RosterEnvelope(), nil); err != nil {
		t.Fatal(err)
	}
	eventually(t, "pushed to a peer", func() bool { _, ok := b.Network().Member(late.ID()); return ok })

	// A member that a node has not heard of brings the roster that lists it.
	fresh := l.member("fresh", meshv1.Role_ROLE_PROXY)
	c := l.start(fresh, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_PROXY })
	if err := ping(within(t), c.Node, b.ID(), b.Addresses()...); err != nil {
		t.Fatalf("a new member with the newer roster: %v", err)
	}
	eventually(t, "passed on", func() bool { _, ok := a.Network().Member(fresh.ID()); return ok })
}

func TestAgentReachesOrkAndNoOtherRole(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	app := l.start(l.app, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_APP_NODE })
	ork := l.start(l.ork, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_ORK })
	key, certificate := l.agent("j-0000000000001")
	agent := l.start(key, func(o *mesh.Options) {
		o.Network, o.Credential, o.DHT, o.Listen = l.bare(), mesh.Certificate(certificate), mesh.DHTOff, nil
	})
	if err := ping(within(t), agent.Node, ork.ID(), ork.Addresses()...); err != nil {
		t.Fatal(err)
	}
	_, err := info(within(t), agent.Node, ork.ID())
	wantKind(t, err, fault.Denied, "agent")
	wantKind(t, ping(within(t), agent.Node, app.ID(), app.Addresses()...), fault.Denied, "takes no agents")

	// Another key cannot use the certificate.
	thief := l.start(newKey(t), func(o *mesh.Options) {
		o.Network, o.Credential, o.DHT, o.Listen = l.bare(), mesh.Certificate(certificate), mesh.DHTOff, nil
	})
	wantKind(t, ping(within(t), thief.Node, ork.ID(), ork.Addresses()...), fault.Denied, "certificate")
}

func TestExpiredAndRevokedCertificatesAreCut(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	revoked := make(chan struct{})
	ork := l.start(l.ork, func(o *mesh.Options) {
		o.Role = meshv1.Role_ROLE_ORK
		o.Vet = func(c mesh.Caller) error {
			select {
			case <-revoked:
				if c.Certificate.GetJobId() == "j-0000000000002" {
					return fault.New(fault.Denied, "attempt is over")
				}
			default:
			}
			return nil
		}
	})
	join := func(job string, until time.Time) *spot {
		key, certificate := l.agentUntil(job, until)
		a := l.start(key, func(o *mesh.Options) {
			o.Network, o.Credential, o.DHT, o.Listen = l.bare(), mesh.Certificate(certificate), mesh.DHTOff, nil
		})
		if err := ping(within(t), a.Node, ork.ID(), ork.Addresses()...); err != nil {
			t.Fatal(err)
		}
		return a
	}
	stays := join("j-0000000000001", time.Now().Add(time.Hour))
	ends := join("j-0000000000003", time.Now().Add(2*time.Second-15*time.Minute)) // with the allowed skew
	cut := join("j-0000000000002", time.Now().Add(time.Hour))
	close(revoked)
	ork.Revet()
	for _, a := range []*spot{cut, ends} {
		eventually(t, "cut", func() bool { return !ork.Connected(a.ID()) })
		// The first call after the cut may still find the broken connection.
		eventually(t, "refused in words", func() bool { return fault.Is(ping(within(t), a.Node, ork.ID()), fault.Denied) })
	}
	if !ork.Connected(stays.ID()) {
		t.Error("a good agent was cut too")
	}
}

func TestJoiningAgentMayRedeemOnlyAndThenBecomesAnAgent(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	ork := l.start(l.ork, func(o *mesh.Options) {
		o.Role = meshv1.Role_ROLE_ORK
		o.VerifyJoin = func(_ context.Context, _ peer.ID, token string) error {
			if token != "good" {
				return fault.New(fault.Denied, "the join token is not known")
			}
			return nil
		}
	})
	key, certificate := l.agent("j-0000000000001")
	agent := l.start(key, func(o *mesh.Options) {
		o.Network, o.Credential, o.DHT, o.Listen = l.bare(), mesh.JoinToken("good", ork.ID()), mesh.DHTOff, nil
	})
	wantKind(t, ping(within(t), agent.Node, ork.ID(), ork.Addresses()...), fault.Denied, "joining agent")
	agent.SetCredential(mesh.Certificate(certificate))
	eventually(t, "admitted anew as an agent", func() bool { return ping(within(t), agent.Node, ork.ID()) == nil })

	bad := l.start(newKey(t), func(o *mesh.Options) {
		o.Network, o.Credential, o.DHT, o.Listen = l.bare(), mesh.JoinToken("bad", ork.ID()), mesh.DHTOff, nil
	})
	wantKind(t, ping(within(t), bad.Node, ork.ID(), ork.Addresses()...), fault.Denied, "join token is not known")
}

func TestJoiningAgentShowsItsTokenToNobodyWhoIsNotOrk(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	seen := make(chan string, 16)
	steal := func(o *mesh.Options) {
		o.VerifyJoin = func(_ context.Context, _ peer.ID, token string) error {
			seen <- token
			return nil
		}
	}
	ork := l.start(l.ork, func(o *mesh.Options) {
		o.Role, o.VerifyJoin = meshv1.Role_ROLE_ORK, func(context.Context, peer.ID, string) error { return nil }
	})
	member := l.start(l.member("proxy", meshv1.Role_ROLE_PROXY), func(o *mesh.Options) {
		o.Role = meshv1.Role_ROLE_PROXY
		steal(o)
	})
	key, certificate := l.agent("j-0000000000001")
	agent := l.start(key, func(o *mesh.Options) {
		o.Network, o.Credential, o.DHT = l.bare(), mesh.JoinToken("secret", ork.ID()), mesh.DHTOff
	})
	// Whoever dials it, ork too, is turned away and may come again.
	for _, from := range []*spot{member, ork} {
		wantKind(t, ping(within(t), from.Node, agent.ID(), agent.Addresses()...), fault.Unreachable, "has not joined yet")
	}
	// Where it dials somebody else, it says nothing of itself.
	wantKind(t, ping(within(t), agent.Node, member.ID(), member.Addresses()...), fault.Unreachable, "has not joined yet")
	// Ork, dialed by it, takes the token: the call gets as far as its right.
	wantKind(t, ping(within(t), agent.Node, ork.ID(), ork.Addresses()...), fault.Denied, "joining agent")

	// Its certificate ended later: ork is shown the token, the others are not.
	agent.SetCredential(mesh.Certificate(certificate))
	eventually(t, "the member reaches it", func() bool { return ping(within(t), member.Node, agent.ID()) == nil })
	agent.SetCredential(mesh.EndedCertificate(certificate, "secret", ork.ID()))
	eventually(t, "ork sees it as joining and answers its calls", func() bool {
		err := ping(within(t), agent.Node, ork.ID())
		return fault.Is(err, fault.Denied) && strings.Contains(err.Error(), "joining agent")
	})
	if err := ping(within(t), member.Node, agent.ID()); err != nil {
		t.Errorf("the member no longer reaches it: %v", err)
	}
	select {
	case token := <-seen:
		t.Errorf("a member was shown the join token (%d bytes)", len(token))
	default:
	}
}

func TestRevocationDuringAdmissionIsNotMissed(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	key, certificate := l.agent("j-0000000000001")
	asked := 0 // by one admission at a time
	ork := l.start(l.ork, func(o *mesh.Options) {
		o.Role = meshv1.Role_ROLE_ORK
		o.Vet = func(c mesh.Caller) error {
			if c.Certificate == nil {
				return nil
			}
			// The revocation comes just after the peer was found good and before
			// its admission is recorded, when a Recheck finds nobody to cut.
			if asked++; asked > 1 {
				return fault.New(fault.Denied, "attempt is over")
			}
			return nil
		}
	})
	agent := l.start(key, func(o *mesh.Options) {
		o.Network, o.Credential, o.DHT, o.Listen = l.bare(), mesh.Certificate(certificate), mesh.DHTOff, nil
	})
	wantKind(t, ping(within(t), agent.Node, ork.ID(), ork.Addresses()...), fault.Denied, "attempt is over")
}

func TestClientWithGrantReachesItsAgentsShellAlone(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	ssh := &meshv1.Right{Clients: true}
	startAgent := func() *spot {
		key, certificate := l.agent("j-0000000000001")
		return l.start(key, func(o *mesh.Options) { o.Credential, o.DHT = mesh.Certificate(certificate), mesh.DHTOff },
			func(s *spot) {
				s.Handle("ssh", ssh, func(_ context.Context, st *mesh.Stream) {
					if st.Caller().Grant.GetJobId() == "j-0000000000001" {
						_, _ = io.Copy(st, st)
					}
				})
				s.Handle("http", &meshv1.Right{Roles: []meshv1.Role{meshv1.Role_ROLE_PROXY}}, func(_ context.Context, st *mesh.Stream) { _, _ = io.Copy(st, st) })
			})
	}
	mine, other := startAgent(), startAgent()
	ork := l.start(l.ork, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_ORK })
	client := newKey(t)
	cli := l.start(client, func(o *mesh.Options) {
		o.Network, o.DHT, o.Listen = l.bare(), mesh.DHTOff, nil
		o.Credential = mesh.Grant(l.grant(client.ID(), mine.ID(), "j-0000000000001", mine.Addresses()...))
	})
	shell, err := cli.OpenStream(within(t), mine.ID(), "ssh")
	if err != nil {
		t.Fatal(err)
	}
	defer shell.Close()
	if _, err := shell.Write([]byte("ls\n")); err != nil {
		t.Fatal(err)
	}
	back := make([]byte, 3)
	if _, err := io.ReadFull(shell, back); err != nil || string(back) != "ls\n" {
		t.Fatalf("%q, %v", back, err)
	}
	body, err := cli.OpenStream(within(t), mine.ID(), "http")
	if err == nil {
		_, err = body.Read(back)
		_ = body.Close()
	}
	wantKind(t, err, fault.Denied)
	if err := ping(within(t), cli.Node, mine.ID()); err != nil {
		t.Errorf("ping its agent: %v", err)
	}
	_, err = info(within(t), cli.Node, mine.ID())
	wantKind(t, err, fault.Denied)
	_, err = cli.OpenStream(within(t), other.ID(), "ssh", other.Addresses()...)
	wantKind(t, err, fault.Denied)
	wantKind(t, ping(within(t), cli.Node, ork.ID(), ork.Addresses()...), fault.Denied, "takes no grants")
}

func TestMethodWithoutARightIsDeniedToAll(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	a := l.start(l.ork, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_ORK }, func(s *spot) {
		healthv1.RegisterHealthServer(s.Node, health.NewServer())
	})
	b := l.start(l.app, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_APP_NODE })
	for _, from := range []*spot{a, b} { // to itself as well
		client := healthv1.NewHealthClient(from.Client(a.ID(), a.Addresses()...))
		_, err := client.Check(within(t), &healthv1.HealthCheckRequest{})
		wantKind(t, err, fault.Denied, "names no right")
		stream, err := client.Watch(within(t), &healthv1.HealthCheckRequest{})
		if err == nil {
			_, err = stream.Recv()
		}
		wantKind(t, err, fault.Denied, "names no right")
	}
	if err := ping(within(t), a.Node, a.ID()); err != nil {
		t.Errorf("a node calls itself: %v", err)
	}
	_, err := meshv1.NewNodeClient(b.Client(a.ID())).GetMetrics(within(t), &meshv1.GetMetricsRequest{})
	wantKind(t, err, fault.Denied, "member")
}

func TestGuestMayAskABootstrapToJoinAndNothingElse(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	b := l.bootstrap()
	guest := l.start(newKey(t), func(o *mesh.Options) {
		o.Network, o.Credential, o.DHT, o.Listen = l.bare(), mesh.Guest(), mesh.DHTOff, nil
	})
	wantKind(t, ping(within(t), guest.Node, b.ID(), b.Addresses()...), fault.Denied, "guest")
	_, err := meshv1.NewJoiningClient(guest.Client(b.ID())).RequestJoin(within(t), &meshv1.RequestJoinRequest{Name: "new"})
	wantKind(t, err, fault.Unsupported) // allowed; this bootstrap has no such service
	ork := l.start(l.ork, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_ORK })
	wantKind(t, ping(within(t), guest.Node, ork.ID(), ork.Addresses()...), fault.Denied, "takes no guests")
}
