package rpc_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

// The goroutine that reads a lone call may run it too. When it blocks there, the calls
// after it, and the caller's change of mind, are read all the same.
func TestALoneCallThatBlocksHoldsUpNothing(t *testing.T) {
	t.Parallel()
	p := serve(t)
	stub := meshv1.NewNodeClient(p.client("calls"))
	if _, err := stub.Ping(within(t), &meshv1.PingRequest{}); err != nil { // the link stands
		t.Fatal(err)
	}
	for range 3 {
		ctx, cancel := context.WithCancel(within(t))
		var blocked sync.WaitGroup
		blocked.Go(func() {
			if _, err := stub.GetInfo(ctx, &meshv1.GetInfoRequest{}); fault.KindOf(err) != fault.Canceled {
				t.Errorf("a call given up ended with %v", err)
			}
		})
		eventually(t, "it runs", func() bool { return p.service.sleeping.Load() == 1 })
		for range 20 {
			if _, err := stub.Ping(within(t), &meshv1.PingRequest{Payload: []byte("x")}); err != nil {
				t.Fatal(err)
			}
		}
		cancel()
		blocked.Wait()
		eventually(t, "its handler ended", func() bool { return p.service.sleeping.Load() == 0 })
	}
	if n := p.dials.Load(); n != 1 {
		t.Errorf("%d links were made", n)
	}
}

// Quick calls, one by one and many at a time, are each answered with their own words
// while some of them are held up on the reader's goroutine.
func TestCallsOfAllPacesAreAnsweredEach(t *testing.T) {
	t.Parallel()
	p := serve(t)
	stub := meshv1.NewNodeClient(p.client("calls"))
	var calling sync.WaitGroup
	for _, callers := range []int{1, 2, 32} {
		for c := range callers {
			calling.Go(func() {
				for i := range 200 {
					ctx, cancel := context.WithTimeout(within(t), 20*time.Millisecond)
					if c%8 == 7 && i%20 == 0 {
						_, _ = stub.GetInfo(ctx, &meshv1.GetInfoRequest{}) // blocks for that long
					}
					cancel()
					want := []byte{byte(c), byte(i)}
					got, err := stub.Ping(within(t), &meshv1.PingRequest{Payload: want})
					if err != nil || string(got.GetPayload()) != string(want) {
						t.Errorf("caller %d, call %d: %x, %v", c, i, got.GetPayload(), err)
						return
					}
				}
			})
		}
		calling.Wait()
	}
}

// A call that is held up before its request is decoded keeps the request, whatever is
// read meanwhile.
func TestAHeldUpCallKeepsItsRequest(t *testing.T) {
	t.Parallel()
	p := serve(t)
	stub := meshv1.NewNodeClient(p.client("calls"))
	for range 5 {
		for range 200 { // quick: the reader runs it
			if _, err := stub.Ping(within(t), &meshv1.PingRequest{Payload: []byte("quick")}); err != nil {
				t.Fatal(err)
			}
		}
		entered, release := make(chan struct{}), make(chan struct{})
		hold := func() { close(entered); <-release }
		p.before.Store(&hold)
		var held sync.WaitGroup
		held.Go(func() {
			got, err := stub.Ping(within(t), &meshv1.PingRequest{Payload: []byte("held up")})
			if string(got.GetPayload()) != "held up" {
				t.Errorf("a call of %q was answered with %q, %v", "held up", got.GetPayload(), err)
			}
		})
		<-entered
		for range 20 {
			if _, err := stub.Ping(within(t), &meshv1.PingRequest{Payload: []byte("another")}); err != nil {
				t.Fatal(err)
			}
		}
		close(release)
		held.Wait()
	}
}
