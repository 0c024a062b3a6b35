package mesh_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

func TestRestartedPeerOnANewPortIsFoundAgain(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	key := l.member("monitor", meshv1.Role_ROLE_MONITOR)
	l.bootstrap()
	ork := l.start(l.ork, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_ORK })
	b := l.start(key, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_MONITOR })
	eventually(t, "found", func() bool { return ping(within(t), b.Node, ork.ID()) == nil })
	before := portOf(t, ork)
	if err := ork.Close(within(t)); err != nil {
		t.Fatal(err)
	}
	// Somebody else has its port now.
	if taken, err := net.Listen("tcp", "127.0.0.1:"+before); err == nil {
		defer taken.Close()
	}
	again := l.start(l.ork, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_ORK })
	if portOf(t, again) == before {
		t.Fatalf("it is on port %s again: this test does not tell", before)
	}
	eventually(t, "found on its new port", func() bool { return ping(within(t), b.Node, again.ID()) == nil })
}

func TestForgottenBootstrapsAreReplacedByTheDisk(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	dir := t.TempDir()
	a := l.start(l.ork, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_ORK })
	b := l.start(l.app, func(o *mesh.Options) { o.Role, o.StateDirectory = meshv1.Role_ROLE_APP_NODE, dir })
	if err := ping(within(t), b.Node, a.ID(), a.Addresses()...); err != nil {
		t.Fatal(err)
	}
	if err := b.Close(within(t)); err != nil {
		t.Fatal(err)
	}
	again := l.start(l.app, func(o *mesh.Options) { o.Role, o.StateDirectory = meshv1.Role_ROLE_APP_NODE, dir })
	if err := ping(within(t), again.Node, a.ID()); err != nil {
		t.Errorf("called by the last good address: %v", err)
	}
}

func TestFortyAgentsFromOneAddress(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	b := l.bootstrap()
	ork := l.start(l.ork, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_ORK })
	var starting sync.WaitGroup
	failures := make(chan error, 40)
	for range 40 {
		key, certificate := l.agent("j-0000000000001")
		agent := l.start(key, func(o *mesh.Options) {
			o.Network, o.Credential, o.DHT, o.Listen = l.bare(), mesh.Certificate(certificate), mesh.DHTOff, nil
			o.Bootstraps = []*meshv1.BootstrapAddress{{Key: b.ID().String(), Addresses: b.Addresses()}}
		})
		starting.Add(1)
		go func() {
			defer starting.Done()
			agent.Keep(ork.ID(), ork.Addresses()...)
			if err := ping(within(t), agent.Node, ork.ID()); err != nil {
				failures <- err
			}
		}()
	}
	starting.Wait()
	close(failures)
	for err := range failures {
		t.Error(err)
	}
	count := 0
	defer func() {
		if t.Failed() {
			t.Logf("%d agents at the bootstrap", count)
		}
	}()
	eventually(t, "all at the bootstrap too", func() bool {
		agents := make(map[string]bool) // by key: two transports may both have won
		for _, p := range b.Peers() {
			if p.GetClass() == meshv1.Class_CLASS_AGENT {
				agents[p.GetKey()] = true
			}
		}
		count = len(agents)
		return count == 40
	})
}

func TestStreamsAndCallsCountBackToBase(t *testing.T) {
	t.Parallel()
	for name, listen := range transports {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t)
			var open atomic.Int64
			a := l.start(l.ork, func(o *mesh.Options) { o.Role, o.Listen = meshv1.Role_ROLE_ORK, listen }, func(s *spot) {
				s.Handle("http", &meshv1.Right{Members: true}, func(_ context.Context, st *mesh.Stream) {
					open.Add(1)
					defer open.Add(-1)
					_, _ = io.Copy(st, st)
				})
			})
			b := l.start(l.app, func(o *mesh.Options) { o.Role, o.Listen = meshv1.Role_ROLE_APP_NODE, listen })
			if err := ping(within(t), b.Node, a.ID(), a.Addresses()...); err != nil {
				t.Fatal(err)
			}
			time.Sleep(300 * time.Millisecond) // identify and the DHT settle
			base := a.Streams()
			var calling sync.WaitGroup
			for w := range 10 {
				calling.Add(1)
				go func() {
					defer calling.Done()
					for i := range 50 {
						ctx, cancel := context.WithCancel(context.Background())
						if (w+i)%3 == 0 {
							time.AfterFunc(100*time.Microsecond, cancel)
						}
						if i%10 == 0 {
							if c, err := b.OpenStream(ctx, a.ID(), "http"); err == nil {
								_, _ = c.Write([]byte("x"))
								_ = c.Close()
							}
						} else {
							_ = ping(ctx, b.Node, a.ID())
						}
						cancel()
					}
				}()
			}
			calling.Wait()
			eventually(t, "streams end", func() bool { return open.Load() == 0 && a.Streams() <= base+4 }) // the standing ping and the DHT come and go
			if err := ping(within(t), b.Node, a.ID()); err != nil {
				t.Fatal(err)
			}
		})
	}
}

func TestCallInFlightEndsOnceWhenThePeerDies(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	a := l.start(l.ork, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_ORK }, func(s *spot) {
		s.service.hang, s.service.entered = make(chan struct{}), make(chan struct{}, 8)
	})
	b := l.start(l.app, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_APP_NODE })
	results := make(chan error, 8)
	for range 4 {
		go func() {
			_, err := info(within(t), b.Node, a.ID(), a.Addresses()...)
			results <- err
		}()
	}
	for range 4 {
		<-a.service.entered
	}
	go func() { _ = a.Close(context.Background()) }()
	for range 4 {
		wantKind(t, <-results, fault.Unreachable)
	}
	if len(a.service.entered) > 0 {
		t.Error("a call was made twice")
	}
	wantKind(t, ping(within(t), b.Node, a.ID()), fault.Unreachable)
}

func TestCancelAndDeadlineReachTheCaller(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	a := l.start(l.ork, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_ORK }, func(s *spot) {
		s.service.hang, s.service.entered = make(chan struct{}), make(chan struct{}, 8)
	})
	b := l.start(l.app, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_APP_NODE })
	if err := ping(within(t), b.Node, a.ID(), a.Addresses()...); err != nil { // connected
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
	defer cancel()
	_, err := info(ctx, b.Node, a.ID())
	wantKind(t, err, fault.Timeout)
	ctx, cancel = context.WithCancel(context.Background())
	time.AfterFunc(100*time.Millisecond, cancel)
	_, err = info(ctx, b.Node, a.ID())
	wantKind(t, err, fault.Canceled)
}

func TestKeptPeerIsDialedAgainWhenItReturns(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	a := l.start(l.ork, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_ORK })
	b := l.start(l.app, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_APP_NODE })
	release := b.Keep(a.ID(), a.Addresses()...)
	defer release()
	eventually(t, "kept", func() bool { return b.Connected(a.ID()) })
	port := portOf(t, a)
	if err := a.Close(within(t)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "noticed", func() bool { return !b.Connected(a.ID()) })
	l.start(l.ork, func(o *mesh.Options) {
		o.Role, o.Listen = meshv1.Role_ROLE_ORK, []string{"/ip4/127.0.0.1/tcp/" + port}
	})
	eventually(t, "dialed again", func() bool { return b.Connected(a.ID()) })
}

func TestBulkArrivesWholeAndHalfCloses(t *testing.T) {
	t.Parallel()
	for name, listen := range transports {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t)
			a := l.start(l.ork, func(o *mesh.Options) { o.Role, o.Listen = meshv1.Role_ROLE_ORK, listen }, func(s *spot) {
				s.Handle("http", &meshv1.Right{Members: true}, func(_ context.Context, st *mesh.Stream) {
					n, _ := io.Copy(io.Discard, st)
					_, _ = fmt.Fprintf(st, "%d", n)
				})
			})
			b := l.start(l.app, func(o *mesh.Options) { o.Role, o.Listen = meshv1.Role_ROLE_APP_NODE, listen })
			c, err := b.OpenStream(within(t), a.ID(), "http", a.Addresses()...)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			if _, err := c.Write(make([]byte, 5<<20)); err != nil {
				t.Fatal(err)
			}
			if err := c.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(c)
			if err != nil || string(got) != fmt.Sprint(5<<20) {
				t.Errorf("%q, %v", got, err)
			}
		})
	}
}

func TestPrivateAgentIsReachedThroughTheRelay(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	b := l.bootstrap()
	proxy := l.member("proxy", meshv1.Role_ROLE_PROXY)
	key, certificate := l.agent("j-0000000000001")
	agent := l.start(key, func(o *mesh.Options) {
		o.Network, o.Credential, o.DHT, o.Listen, o.Private = l.bare(), mesh.Certificate(certificate), mesh.DHTOff, nil, true
		o.Bootstraps = []*meshv1.BootstrapAddress{{Key: b.ID().String(), Addresses: b.Addresses()}}
	}, func(s *spot) {
		s.Handle("ssh", &meshv1.Right{Clients: true}, func(_ context.Context, st *mesh.Stream) { _, _ = io.Copy(st, st) })
	})
	p := l.start(proxy, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_PROXY })
	eventually(t, "called through the relay", func() bool { return ping(within(t), p.Node, agent.ID()) == nil })

	client := newKey(t)
	cli := l.start(client, func(o *mesh.Options) {
		o.Network, o.DHT, o.Listen = l.bare(), mesh.DHTOff, nil
		o.Credential = mesh.Grant(l.grant(client.ID(), agent.ID(), "j-0000000000001"))
		o.Bootstraps = []*meshv1.BootstrapAddress{{Key: b.ID().String(), Addresses: b.Addresses()}}
	})
	c, err := cli.OpenStream(within(t), agent.ID(), "ssh")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	back := make([]byte, 2)
	if _, err := c.Write([]byte("hi")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, back); err != nil {
		t.Fatal(err)
	}
	relayed := false
	for _, peer := range cli.Peers() {
		relayed = relayed || (peer.GetKey() == agent.ID().String() && peer.GetRelayed())
	}
	if !relayed {
		t.Error("the connection is not relayed")
	}
	// The library's own relay would cut it after two minutes or 128 KiB.
	for _, conn := range cli.Host().Network().ConnsToPeer(agent.ID()) {
		if conn.Stat().Limited {
			t.Error("the relay limits what it carries")
		}
	}

	// The relay carries a client to no other agent.
	other := l.start(newKey(t), func(o *mesh.Options) {
		o.Network, o.DHT, o.Listen = l.bare(), mesh.DHTOff, nil
		o.Bootstraps = []*meshv1.BootstrapAddress{{Key: b.ID().String(), Addresses: b.Addresses()}}
	})
	if _, err := other.OpenStream(within(t), agent.ID(), "ssh"); err == nil {
		t.Error("a stranger went through the relay")
	}
}
