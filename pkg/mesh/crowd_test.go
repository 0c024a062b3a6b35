//go:build !race

// These tests are about numbers: with the race detector they would take an hour.

package mesh_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/cosmicac/cosmicac/pkg/mesh"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	"github.com/libp2p/go-libp2p/core/peer"
)

const crowdPatience = 5 * time.Minute

func crowdEventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	pause := 100 * time.Microsecond
	for end := time.Now().Add(crowdPatience); time.Now().Before(end); time.Sleep(pause) {
		if pause = min(2*pause, 100*time.Millisecond); ok() {
			return
		}
	}
	t.Fatalf("%s: not within %s", what, crowdPatience)
}

// Two hundred daemons form one network through one bootstrap, find each other by
// key alone, and are all back after the bootstrap was away.
func TestCrowdOfTwoHundredNodesFindsItselfAndComesBack(t *testing.T) {
	const crowd = 200
	l := newLab(t)
	quic := transports["quic"] // one descriptor a node, where TCP takes one a connection
	keys := make([]peer.ID, crowd)
	nodes := make([]*spot, crowd)
	bootKey := l.member("boot", meshv1.Role_ROLE_BOOTSTRAP)
	asBoot := func(o *mesh.Options) {
		o.Role, o.Relay, o.AllowGuests, o.Listen = meshv1.Role_ROLE_BOOTSTRAP, true, true, quic
	}
	boot := l.start(bootKey, asBoot)
	l.bootstrapAt(boot.Node)

	members := make([]func() *spot, crowd)
	for i := range crowd {
		key := l.member("n-"+itoa(i), meshv1.Role_ROLE_WORKER)
		keys[i] = key.ID()
		members[i] = func() *spot {
			return l.start(key, func(o *mesh.Options) { o.Role, o.Listen = meshv1.Role_ROLE_WORKER, quic })
		}
	}
	if _, err := boot.Network().Adopt(l.founder.RosterEnvelope(), l.founder.InfoEnvelope()); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	for i, start := range members {
		nodes[i] = start()
	}
	atBoot := func(b *spot) int {
		n := 0
		for _, k := range keys {
			if b.Connected(k) {
				n++
			}
		}
		return n
	}
	crowdEventually(t, "all are at the bootstrap", func() bool { return atBoot(boot) == crowd })
	formed := time.Since(began)
	crowdEventually(t, "all have looked for their neighbours", func() bool {
		for _, n := range nodes {
			if len(n.Peers()) < 8 {
				return false
			}
		}
		return true
	})
	t.Logf("formed in %s, all have neighbours after %s, %d connections at one of them", formed, time.Since(began), len(nodes[0].Peers()))

	// find calls by key until the call is answered: members that have looked for their
	// neighbours once do not all know each other yet, and nobody here holds cards.
	find := func(from, to int) error {
		ctx, cancel := context.WithTimeout(context.Background(), crowdPatience)
		defer cancel()
		for {
			err := ping(ctx, nodes[from].Node, keys[to])
			if err == nil || ctx.Err() != nil {
				return err
			}
			time.Sleep(time.Second)
		}
	}
	findAll := func() {
		t.Helper()
		var calling sync.WaitGroup
		for range 4 {
			calling.Go(func() {
				for range 15 {
					from, to := rand.IntN(crowd), rand.IntN(crowd)
					if from == to {
						continue
					}
					if err := find(from, to); err != nil {
						t.Errorf("%d calls %d by its key: %v", from, to, err)
					}
				}
			})
		}
		calling.Wait()
	}
	findAll()

	// The bootstrap is away for a while and comes back on another port: all of
	// them come, and not all at the same moment.
	if err := boot.Close(context.Background()); err != nil {
		t.Fatal(err)
	}
	for range 20 { // without it they still find each other
		from, to := rand.IntN(crowd), rand.IntN(crowd)
		if from != to {
			if err := find(from, to); err != nil {
				t.Errorf("without the bootstrap, %d calls %d: %v", from, to, err)
			}
		}
	}
	again := l.start(bootKey, asBoot)
	l.bootstrapAt(again.Node)
	info := l.founder.InfoEnvelope()
	if _, err := again.Network().Adopt(nil, info); err != nil {
		t.Fatal(err)
	}
	if _, err := nodes[0].Network().Adopt(nil, info); err != nil { // one knows where, the others hear it
		t.Fatal(err)
	}
	began = time.Now()
	crowdEventually(t, "all are back at the bootstrap", func() bool { return atBoot(again) == crowd })
	if back := time.Since(began); back > 10*formed && back > time.Minute {
		t.Errorf("they were back after %s; forming took %s", back, formed)
	}
	findAll()
}

// Ten thousand connections made, used and dropped leave nothing behind.
func TestCrowdOfConnectionsLeavesNothingBehind(t *testing.T) {
	for transport, rounds := range map[string]int{"tcp": 8000, "quic": 2000} {
		t.Run(transport, func(t *testing.T) {
			l := newLab(t)
			a := l.start(l.ork, func(o *mesh.Options) { o.Listen, o.DHT = transports[transport], mesh.DHTOff })
			b := l.start(l.app, func(o *mesh.Options) { o.Listen, o.DHT = nil, mesh.DHTOff })
			addresses := a.Addresses()
			round := func() {
				crowdEventually(t, "a call passes", func() bool { return ping(within(t), b.Node, a.ID(), addresses...) == nil })
				b.Disconnect(a.ID(), "the test")
				for b.Connected(a.ID()) {
					runtime.Gosched()
				}
			}
			count := func() (goroutines, descriptors, streams int) {
				crowdEventually(t, "the last connection is gone", func() bool { return len(a.Peers()) == 0 && len(b.Peers()) == 0 })
				entries, err := os.ReadDir("/proc/self/fd")
				if err != nil {
					t.Fatal(err)
				}
				return runtime.NumGoroutine(), len(entries), a.Streams() + b.Streams()
			}
			for range 50 { // what is made once is made
				round()
			}
			beforeG, beforeD, beforeS := count()
			for range rounds {
				round()
			}
			crowdEventually(t, "goroutines, descriptors and streams are as before", func() bool {
				g, d, s := count()
				return g <= beforeG+8 && d <= beforeD+4 && s <= beforeS
			})
		})
	}
}

// Calls and streams that say nothing outlive every timer below them: keep-alives,
// the silence rule, QUIC's idle time-out of 30 s.
func TestCrowdOfTimersEndsNoCall(t *testing.T) {
	t.Parallel()
	for transport, listen := range transports {
		for _, only := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s grpc only %v", transport, only), func(t *testing.T) {
				t.Parallel()
				l := newLab(t)
				hang := make(chan struct{})
				a := l.start(l.ork, func(o *mesh.Options) { o.Listen = listen }, func(s *spot) {
					s.service.hang, s.service.entered = hang, make(chan struct{}, 1)
				})
				b := l.start(l.app, func(o *mesh.Options) { o.Listen, o.GRPCOnly = listen, only })
				ctx, cancel := context.WithTimeout(context.Background(), crowdPatience)
				defer cancel()
				ended := make(chan error, 1)
				go func() {
					_, err := info(ctx, b.Node, a.ID(), a.Addresses()...)
					ended <- err
				}()
				<-a.service.entered
				select {
				case err := <-ended:
					t.Fatalf("ended early: %v", err)
				case <-time.After(45 * time.Second): // longer than any timer there is
				}
				close(hang)
				if err := <-ended; err != nil {
					t.Error(err)
				}
			})
		}
	}
}
