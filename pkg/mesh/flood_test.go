package mesh_test

import (
	"context"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/cosmicac/cosmicac/pkg/mesh"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	"github.com/libp2p/go-libp2p/core/network"
	"github.com/libp2p/go-libp2p/core/protocol"
)

// muteCrowd opens TCP connections that say nothing, from an address: ten thousand at
// once, then more and more until stop.
func muteCrowd(t *testing.T, to *spot, from string) (stop func()) {
	t.Helper()
	const crowd = 10000
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}, Timeout: patience}
	conns, port := make(chan net.Conn, crowd), portOf(t, to)
	dial := func() {
		c, err := d.Dial("tcp", "127.0.0.1:"+port)
		if err != nil {
			return // the backlog is full: others were faster
		}
		for {
			select {
			case conns <- c:
				return
			default: // full: one goes for the new one
				_ = (<-conns).Close()
			}
		}
	}
	var dialing sync.WaitGroup
	for range 8 {
		dialing.Go(func() {
			for range crowd / 8 {
				dial()
			}
		})
	}
	dialing.Wait()
	if len(conns) < crowd/2 {
		t.Fatalf("%d connections of %d", len(conns), crowd)
	}
	ctx, cancel := context.WithCancel(context.Background())
	dialing.Go(func() {
		for ctx.Err() == nil {
			dial()
			time.Sleep(time.Millisecond)
		}
	})
	stop = func() {
		cancel()
		dialing.Wait()
		for len(conns) > 0 {
			_ = (<-conns).Close()
		}
	}
	t.Cleanup(stop)
	return stop
}

// Ten thousand connections that never speak, and ever more of them, keep nobody
// out: neither who was in, nor newcomers, whether from another address or from the
// same. Which of them go is in TestTheOldestMuteConnectionGoesFirst.
func TestTenThousandMuteConnectionsKeepNobodyOut(t *testing.T) {
	l := newLab(t)
	a := l.start(l.ork, nil)
	old := l.start(l.app, nil)
	if err := ping(within(t), old.Node, a.ID(), a.Addresses()...); err != nil {
		t.Fatal(err)
	}
	for i, from := range []string{"127.0.0.2", "127.0.0.1"} {
		newcomer := l.start(l.member("late-"+itoa(i), meshv1.Role_ROLE_PROXY), func(o *mesh.Options) { o.Listen = nil })
		stop := muteCrowd(t, a, from)
		// Many short tries: on a machine whose cores the crowd takes, one may be lost.
		var err error
		for end := time.Now().Add(6 * patience); time.Now().Before(end); {
			ctx, cancel := context.WithTimeout(context.Background(), patience/3)
			err = ping(ctx, newcomer.Node, a.ID(), a.Addresses()...)
			if cancel(); err == nil {
				break
			}
		}
		if err != nil {
			t.Errorf("a newcomer beside mute connections from %s: %v", from, err)
		}
		if err := ping(within(t), old.Node, a.ID()); err != nil {
			t.Errorf("who was in, beside mute connections from %s: %v", from, err)
		}
		stop()
	}
}

// An admitted peer gone bad opens streams and connections without end. It gets its
// share and no more, and others are served.
func TestAHostileMemberGetsItsShareAndNoMore(t *testing.T) {
	t.Parallel()
	for transport, listen := range transports {
		t.Run(transport, func(t *testing.T) {
			t.Parallel()
			l := newLab(t)
			a := l.start(l.ork, func(o *mesh.Options) { o.Listen = listen }, func(s *spot) {
				s.Handle("hold", &meshv1.Right{Members: true}, func(_ context.Context, st *mesh.Stream) { _, _ = io.Copy(io.Discard, st) })
			})
			bad := l.start(l.app, func(o *mesh.Options) { o.Listen = listen })
			good := l.start(l.member("good", meshv1.Role_ROLE_PROXY), func(o *mesh.Options) { o.Listen = listen })
			for _, n := range []*spot{bad, good} {
				if err := ping(within(t), n.Node, a.ID(), a.Addresses()...); err != nil {
					t.Fatal(err)
				}
			}
			id := l.founder.ID()
			hold := protocol.ID("/cosmicac/" + id.String() + "/hold/1")
			var streams []network.Stream
			var mu sync.Mutex
			var opening sync.WaitGroup
			for range 8 {
				opening.Go(func() {
					for range 10000 / 8 {
						// QUIC holds the opener back at its own bound: no use in waiting.
						ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
						s, err := bad.Host().NewStream(ctx, a.ID(), hold)
						cancel()
						if err != nil {
							if transport == "quic" {
								return
							}
							continue
						}
						_, _ = s.Write([]byte{1})
						mu.Lock()
						streams = append(streams, s)
						mu.Unlock()
					}
				})
			}
			opening.Wait()
			if err := ping(within(t), good.Node, a.ID()); err != nil {
				t.Errorf("another member beside it: %v", err)
			}
			held := func() (count int) {
				for _, c := range a.Host().Network().ConnsToPeer(bad.ID()) {
					count += len(c.GetStreams())
				}
				return count
			}
			if n := held(); n > 1024 { // the resource manager's bound, refusals under way included
				t.Errorf("it holds %d streams", n)
			}
			// It keeps all that were not refused open: 256, and the mesh's own few.
			eventually(t, "it holds its share", func() bool { return held() <= 300 })
			for _, s := range streams {
				_ = s.Reset()
			}
			eventually(t, "its streams are gone", func() bool { return held() < 20 })
			if err := ping(within(t), bad.Node, a.ID()); err != nil {
				t.Errorf("the bad one, once it behaves: %v", err)
			}
		})
	}
}
