package rpc_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

// A peer takes 256 calls at a time of one caller; more wait at the caller's.
func TestCallsThatWaitForAPlaceGetOneEach(t *testing.T) {
	t.Parallel()
	p := serve(t)
	stub := meshv1.NewNodeClient(p.client("calls"))
	var sleeping, waiting sync.WaitGroup
	fill := func(n int) (cancel context.CancelFunc) {
		ctx, cancel := context.WithCancel(within(t))
		for range n {
			sleeping.Go(func() { _, _ = stub.GetInfo(ctx, &meshv1.GetInfoRequest{}) })
		}
		return cancel
	}
	one, rest := fill(1), fill(255)
	eventually(t, "every place is taken", func() bool { return p.service.sleeping.Load() == 256 })

	for range 50 {
		waiting.Go(func() { // gives up while it waits
			ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
			defer cancel()
			if _, err := stub.GetInfo(ctx, &meshv1.GetInfoRequest{}); fault.KindOf(err) != fault.Timeout {
				t.Errorf("a call that got no place ended with %v", err)
			}
		})
	}
	waiting.Wait()
	if n := p.service.most.Load(); n != 256 {
		t.Errorf("%d calls ran at a time", n)
	}
	for range 50 {
		waiting.Go(func() {
			if _, err := stub.Ping(within(t), &meshv1.PingRequest{}); err != nil {
				t.Errorf("a call that waited: %v", err)
			}
		})
	}
	one() // all wait for this place, one after the other
	waiting.Wait()
	if n := p.service.sleeping.Load(); n != 255 {
		t.Errorf("%d others run, want 255", n)
	}
	rest()
	sleeping.Wait()

	all := fill(256)
	eventually(t, "every place can be taken again", func() bool { return p.service.sleeping.Load() == 256 })
	all()
	sleeping.Wait()
	if n := p.dials.Load(); n != 1 {
		t.Errorf("%d links were made", n)
	}
}

// When an answer comes as its caller gives up, it is that call's answer or nobody's:
// the caller has its reply for itself from then on.
func TestAnAnswerIsNotWrittenAfterItsCallEnded(t *testing.T) {
	t.Parallel()
	p := serve(t)
	client := p.client("calls")
	if err := client.Invoke(within(t), meshv1.Node_Ping_FullMethodName, &meshv1.PingRequest{}, &meshv1.PingResponse{}); err != nil {
		t.Fatal(err) // the link stands
	}
	var calling sync.WaitGroup
	for c := range 16 {
		calling.Go(func() {
			for i := range 300 {
				ctx, cancel := context.WithCancel(context.Background())
				stop := time.AfterFunc(time.Duration(i%30)*20*time.Microsecond, cancel)
				want := string([]byte{byte(c), byte(i)})
				var reply meshv1.PingResponse
				err := client.Invoke(ctx, meshv1.Node_Ping_FullMethodName, &meshv1.PingRequest{Payload: []byte(want)}, &reply)
				switch got := string(reply.GetPayload()); {
				case err == nil && got != want:
					t.Errorf("an answer of %x to %x", got, want)
				case err != nil && (fault.KindOf(err) != fault.Canceled || got != ""):
					t.Errorf("a call given up ended with %v and %x", err, got)
				}
				reply.Payload = nil // the race detector tells who else writes
				stop.Stop()
				cancel()
			}
		})
	}
	calling.Wait()
	if n := p.dials.Load(); n != 1 {
		t.Errorf("%d links were made", n)
	}
}
