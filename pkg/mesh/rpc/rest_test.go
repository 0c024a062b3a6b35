package rpc_test

import (
	"context"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/mesh/rpc"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

// closing tells when the client closed its end.
type closing struct {
	net.Conn
	open *atomic.Int32
	once sync.Once
}

func (c *closing) Close() error {
	c.once.Do(func() { c.open.Add(-1) })
	return c.Conn.Close()
}

func counted(open rpc.Open, n *atomic.Int32) rpc.Open {
	return func(ctx context.Context) (net.Conn, error) {
		conn, err := open(ctx)
		if err != nil {
			return nil, err
		}
		n.Add(1)
		return &closing{Conn: conn, open: n}, nil
	}
}

func TestAnIdleLinkIsGivenBackAndTheNextCallMakesAnother(t *testing.T) {
	t.Parallel()
	for _, channel := range []string{"calls", "grpc"} {
		t.Run(channel, func(t *testing.T) {
			t.Parallel()
			p := serve(t)
			var open atomic.Int32
			calls := counted(p.open('c'), &open)
			if channel == "grpc" {
				calls = nil
			}
			c := rpc.NewClient("the-peer", counted(p.open('g'), &open), calls)
			t.Cleanup(c.Close)
			stub := meshv1.NewNodeClient(c)
			ping := func() error {
				_, err := stub.Ping(within(t), &meshv1.PingRequest{Payload: []byte("x")})
				return err
			}
			if err := ping(); err != nil {
				t.Fatal(err)
			}
			c.Rest() // a call ran since the beginning
			if err := ping(); err != nil || p.dials.Load() != 1 {
				t.Fatalf("after %d dials: %v", p.dials.Load(), err)
			}

			// A call that waits for its answer is not idle, however long.
			ctx, cancel := context.WithCancel(context.Background())
			ended := make(chan error, 1)
			go func() {
				_, err := stub.GetInfo(ctx, &meshv1.GetInfoRequest{})
				ended <- err
			}()
			eventually(t, "the call runs", func() bool { return p.service.sleeping.Load() == 1 })
			for range 3 {
				c.Rest()
			}
			if open.Load() != 1 {
				t.Error("a link with a call that runs was given back")
			}
			cancel()
			if err := <-ended; fault.KindOf(err) != fault.Canceled {
				t.Errorf("the call that ran ended with %v", err)
			}

			eventually(t, "given back", func() bool { c.Rest(); return open.Load() == 0 })
			if err := ping(); err != nil || p.dials.Load() != 2 {
				t.Fatalf("after %d dials: %v", p.dials.Load(), err)
			}
		})
	}
}

func TestNoCallFailsBecauseItsLinkGoesToRest(t *testing.T) {
	onBoth(t, func(t *testing.T, p *place, c *rpc.Client) {
		stub := meshv1.NewNodeClient(c)
		errs := make(chan error, 4)
		for range 4 {
			go func() {
				for i := range 100 {
					// Each call with its own time: nearly each makes a new link.
					if _, err := stub.Ping(within(t), &meshv1.PingRequest{Payload: []byte("x")}); err != nil {
						errs <- fmt.Errorf("call %d: %w", i, err)
						return
					}
				}
				errs <- nil
			}()
		}
		for left := 4; left > 0; {
			c.Rest()
			select {
			case err := <-errs:
				if left--; err != nil {
					t.Error(err)
				}
			default:
			}
		}
	})
}

// slowReader takes in nothing while it is shut.
type slowReader struct {
	net.Conn
	open chan struct{}
}

func (c *slowReader) Read(b []byte) (int, error) {
	<-c.open
	return c.Conn.Read(b)
}

// Answers that found no room before their callers gave up cost no turn for good.
func TestCallsGivenUpBesideASlowReaderGiveTheirTurnsBack(t *testing.T) {
	t.Parallel()
	p := serve(t)
	shut := make(chan struct{})
	c := rpc.NewClient("the-peer", p.open('g'), func(ctx context.Context) (net.Conn, error) {
		conn, err := p.open('c')(ctx)
		return &slowReader{conn, shut}, err
	})
	t.Cleanup(c.Close)
	stub := meshv1.NewNodeClient(c)
	var calling sync.WaitGroup
	for range 200 { // of a mebibyte each, far more than waits anywhere
		calling.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), 500*time.Millisecond)
			defer cancel()
			if _, err := stub.GetMetrics(ctx, &meshv1.GetMetricsRequest{}); fault.KindOf(err) != fault.Timeout {
				t.Errorf("a call whose answer was not read ended with %v", err)
			}
		})
	}
	calling.Wait()
	close(shut)

	ctx, cancel := context.WithCancel(within(t))
	for range 256 {
		calling.Go(func() { _, _ = stub.GetInfo(ctx, &meshv1.GetInfoRequest{}) })
	}
	eventually(t, "every turn can be taken again", func() bool { return p.service.sleeping.Load() == 256 })
	cancel()
	calling.Wait()
	if p.dials.Load() != 1 {
		t.Errorf("%d links were made", p.dials.Load())
	}
}
