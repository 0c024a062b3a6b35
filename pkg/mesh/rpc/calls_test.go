package rpc_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/mesh/rpc"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	"go.uber.org/goleak"
	"google.golang.org/grpc/metadata"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const patience = time.Minute // generous: the machine may be busy

// sleeper answers Ping with its payload, GetInfo never, and GetMetrics with much.
type sleeper struct {
	meshv1.UnimplementedNodeServer
	sleeping, most atomic.Int32
	calls          atomic.Int32
}

func (s *sleeper) Ping(_ context.Context, r *meshv1.PingRequest) (*meshv1.PingResponse, error) {
	s.calls.Add(1)
	if string(r.GetPayload()) == "panic" {
		panic("as told")
	}
	return &meshv1.PingResponse{Payload: r.GetPayload()}, nil
}

func (s *sleeper) GetInfo(ctx context.Context, _ *meshv1.GetInfoRequest) (*meshv1.GetInfoResponse, error) {
	for n := s.sleeping.Add(1); ; {
		most := s.most.Load()
		if n <= most || s.most.CompareAndSwap(most, n) {
			break
		}
	}
	defer s.sleeping.Add(-1)
	<-ctx.Done()
	return nil, ctx.Err()
}

func (s *sleeper) GetMetrics(context.Context, *meshv1.GetMetricsRequest) (*meshv1.GetMetricsResponse, error) {
	return &meshv1.GetMetricsResponse{Exposition: make([]byte, 1<<20)}, nil
}

func (s *sleeper) CheckNetwork(ctx context.Context, _ *meshv1.CheckNetworkRequest) (*meshv1.CheckNetworkResponse, error) {
	s.sleeping.Add(1)
	defer s.sleeping.Add(-1)
	<-ctx.Done()
	return nil, ctx.Err()
}

// place is a server on a loopback port and the connections made to it.
type place struct {
	t        *testing.T
	server   *rpc.Server
	service  *sleeper
	listener net.Listener
	mu       sync.Mutex
	conns    []net.Conn
	dials    atomic.Int32
	serving  sync.WaitGroup
	before   atomic.Pointer[func()] // runs once, before the next call is let in
}

// serve answers streams of calls, or gRPC on connections that say so first.
func serve(t *testing.T) *place {
	t.Helper()
	p := &place{t: t, service: &sleeper{}}
	allow := func(ctx context.Context, _ net.Addr, _ string) (context.Context, error) {
		if f := p.before.Swap(nil); f != nil {
			(*f)()
		}
		return ctx, nil
	}
	p.server = rpc.NewServer(rpc.ServerOptions{Authorize: allow})
	meshv1.RegisterNodeServer(p.server, p.service)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p.listener = l
	p.serving.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			p.mu.Lock()
			p.conns = append(p.conns, c)
			p.mu.Unlock()
			p.serving.Go(func() {
				var kind [1]byte
				if _, err := io.ReadFull(c, kind[:]); err != nil {
					_ = c.Close()
				} else if kind[0] == 'g' {
					_ = p.server.Serve(c)
				} else {
					p.server.ServeCalls(c)
				}
			})
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		p.cut()
		p.server.Close()
		p.serving.Wait()
	})
	return p
}

// cut breaks every connection, as a server's death does.
func (p *place) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.conns {
		_ = c.Close()
	}
}

func (p *place) open(kind byte) rpc.Open {
	return func(ctx context.Context) (net.Conn, error) {
		p.dials.Add(1)
		c, err := (&net.Dialer{}).DialContext(ctx, "tcp", p.listener.Addr().String())
		if err != nil {
			return nil, fault.Wrap(fault.Unreachable, err, "dial")
		}
		_, err = c.Write([]byte{kind})
		return c, err
	}
}

// client takes the channels named: "calls" has both, "grpc" that alone.
func (p *place) client(channel string) *rpc.Client {
	calls := p.open('c')
	if channel == "grpc" {
		calls = nil
	}
	c := rpc.NewClient("the-peer", p.open('g'), calls)
	p.t.Cleanup(c.Close)
	return c
}

func onBoth(t *testing.T, f func(t *testing.T, p *place, c *rpc.Client)) {
	t.Parallel()
	for _, channel := range []string{"calls", "grpc"} {
		t.Run(channel, func(t *testing.T) {
			t.Parallel()
			p := serve(t)
			f(t, p, p.client(channel))
		})
	}
}

func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if ok() {
			return
		}
	}
	t.Fatalf("%s: not within %s", what, patience)
}

func TestThousandCallsInFlightEndOnceWhenTheServerDies(t *testing.T) {
	onBoth(t, func(t *testing.T, p *place, c *rpc.Client) {
		const callers = 1000
		stub := meshv1.NewNodeClient(c)
		ctx := within(t)
		ends := make(chan error, 2*callers)
		for range callers {
			go func() {
				_, err := stub.GetInfo(ctx, &meshv1.GetInfoRequest{})
				ends <- err
			}()
		}
		eventually(t, "the server is full", func() bool { return p.service.sleeping.Load() >= 256 })
		_ = p.listener.Close() // nobody comes back
		p.cut()
		for range callers {
			select {
			case err := <-ends:
				if kind := fault.KindOf(err); kind != fault.Unreachable {
					t.Fatalf("a call ended as %q: %v", kind, err)
				}
			case <-time.After(patience):
				t.Fatal("a call hangs")
			}
		}
		if most := p.service.most.Load(); most > 512 { // gRPC's bound; the stream of calls has half
			t.Errorf("%d calls ran at a time", most)
		}
	})
}

func TestAMethodsTurnsAreBoundedForEachCaller(t *testing.T) {
	onBoth(t, func(t *testing.T, p *place, c *rpc.Client) {
		most := rpc.RightOf(meshv1.Node_CheckNetwork_FullMethodName).GetAtATime()
		if most == 0 {
			t.Fatal("the method this test is about has no bound")
		}
		stub := meshv1.NewNodeClient(c)
		ctx, cancel := context.WithCancel(within(t))
		var sleeping sync.WaitGroup
		for range most {
			sleeping.Go(func() { _, _ = stub.CheckNetwork(ctx, &meshv1.CheckNetworkRequest{}) })
		}
		eventually(t, "as many run as may", func() bool { return p.service.sleeping.Load() == int32(most) })
		_, err := stub.CheckNetwork(within(t), &meshv1.CheckNetworkRequest{})
		if fault.KindOf(err) != fault.Exhausted {
			t.Errorf("one more ended with %v", err)
		}
		if _, err := stub.Ping(within(t), &meshv1.PingRequest{}); err != nil {
			t.Errorf("another method: %v", err)
		}
		cancel()
		sleeping.Wait()
		eventually(t, "its turn comes", func() bool {
			ctx, cancel := context.WithTimeout(within(t), 20*time.Millisecond)
			defer cancel()
			_, err := stub.CheckNetwork(ctx, &meshv1.CheckNetworkRequest{})
			return fault.Is(err, fault.Timeout)
		})
	})
}

func TestCallsGoOnAfterTheConnectionBroke(t *testing.T) {
	onBoth(t, func(t *testing.T, p *place, c *rpc.Client) {
		stub := meshv1.NewNodeClient(c)
		for range 5 {
			eventually(t, "calls pass again", func() bool {
				_, err := stub.Ping(within(t), &meshv1.PingRequest{})
				if err != nil && !fault.Is(err, fault.Unreachable) {
					t.Fatal(err)
				}
				return err == nil
			})
			p.cut()
		}
	})
}

func TestAHandlerThatPanicsEndsItsCallAlone(t *testing.T) {
	onBoth(t, func(t *testing.T, _ *place, c *rpc.Client) {
		stub := meshv1.NewNodeClient(c)
		_, err := stub.Ping(within(t), &meshv1.PingRequest{Payload: []byte("panic")})
		if fault.KindOf(err) != fault.Internal || strings.Contains(err.Error(), "as told") {
			t.Errorf("the call ended with %v", err)
		}
		if _, err := stub.Ping(within(t), &meshv1.PingRequest{}); err != nil {
			t.Errorf("the next call: %v", err)
		}
	})
}

func TestAnOlderPeerIsCalledByGRPC(t *testing.T) {
	t.Parallel()
	p := serve(t)
	asked := 0
	c := rpc.NewClient("the-peer", p.open('g'), func(context.Context) (net.Conn, error) {
		asked++
		return nil, fault.New(fault.Unsupported, "open calls: it serves no such stream")
	})
	t.Cleanup(c.Close)
	for range 10 {
		if _, err := meshv1.NewNodeClient(c).Ping(within(t), &meshv1.PingRequest{}); err != nil {
			t.Fatal(err)
		}
	}
	if asked != 1 {
		t.Errorf("asked %d times, once a minute is enough", asked)
	}
}

func TestMuchMetadataIsRefusedNotCut(t *testing.T) {
	onBoth(t, func(t *testing.T, _ *place, c *rpc.Client) {
		ctx := metadata.AppendToOutgoingContext(within(t), "x-much", strings.Repeat("m", 64<<10))
		if _, err := meshv1.NewNodeClient(c).Ping(ctx, &meshv1.PingRequest{}); err == nil {
			t.Error("64 KiB of metadata passed")
		}
	})
}

func TestCancelsLeaveNothingBehind(t *testing.T) {
	t.Parallel()
	p := serve(t)
	stub := meshv1.NewNodeClient(p.client("calls"))
	var callers sync.WaitGroup
	for range 16 {
		callers.Go(func() {
			for i := range 200 {
				ctx, cancel := context.WithTimeout(within(t), time.Duration(i%7)*100*time.Microsecond)
				_, err := stub.GetInfo(ctx, &meshv1.GetInfoRequest{})
				cancel()
				if kind := fault.KindOf(err); kind != fault.Timeout && kind != fault.Unreachable {
					t.Errorf("a call that ran out of time ended as %q: %v", kind, err)
				}
			}
		})
	}
	callers.Wait()
	eventually(t, "every handler has ended", func() bool { return p.service.sleeping.Load() == 0 })
	if _, err := stub.Ping(within(t), &meshv1.PingRequest{}); err != nil {
		t.Fatal(err)
	}
	if n := p.dials.Load(); n != 1 {
		t.Errorf("%d connections, want one", n)
	}
}

// raw is a peer that speaks the wire form by hand.
func (p *place) raw() net.Conn {
	p.t.Helper()
	c, err := p.open('c')(context.Background())
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() { _ = c.Close() })
	return c
}

func rawFrame(kind byte, id uint64, rest ...byte) []byte {
	b := binary.AppendUvarint([]byte{0, 0, 0, 0, kind}, id)
	b = append(b, rest...)
	binary.BigEndian.PutUint32(b, uint32(len(b)-4))
	return b
}

func rawRequest(id uint64, method string) []byte {
	rest := append([]byte{0}, byte(len(method)))
	rest = append(rest, method...)
	return rawFrame(1, id, append(rest, 0)...)
}

func TestMalformedFramesEndTheStreamAndNothingElse(t *testing.T) {
	t.Parallel()
	p := serve(t)
	good := meshv1.NewNodeClient(p.client("calls"))
	sleep := rawRequest(1, meshv1.Node_GetInfo_FullMethodName)
	for name, bytes := range map[string][]byte{
		"a length of nothing":     {0, 0, 0, 0},
		"a length of 4 GiB":       {255, 255, 255, 255, 1},
		"an unknown kind":         rawFrame(9, 1),
		"an answer":               rawFrame(2, 1, 0),
		"id 0":                    rawFrame(3, 0),
		"a cancel with a body":    rawFrame(3, 1, 1),
		"a method without an end": rawFrame(1, 1, 0, 200),
		"pairs without an end":    rawFrame(1, 1, 0, 1, 'x', 5),
		"65,536 pairs":            rawFrame(1, 1, 0, 1, 'x', 0x80, 0x80, 4),
		"an id twice":             append(append([]byte{}, sleep...), sleep...),
	} {
		c := p.raw()
		if _, err := c.Write(bytes); err != nil {
			t.Fatal(err)
		}
		_ = c.SetReadDeadline(time.Now().Add(patience))
		if _, err := io.Copy(io.Discard, c); err != nil && !errors.Is(err, net.ErrClosed) && !strings.Contains(err.Error(), "reset") {
			t.Errorf("%s: the stream stays: %v", name, err)
		}
	}
	eventually(t, "every handler has ended", func() bool { return p.service.sleeping.Load() == 0 })
	if _, err := good.Ping(within(t), &meshv1.PingRequest{}); err != nil {
		t.Fatal(err)
	}
}

func TestWhoSendsMoreCallsThanAllowedIsRefused(t *testing.T) {
	t.Parallel()
	p := serve(t)
	c := p.raw()
	for id := range uint64(256 + 44) {
		if _, err := c.Write(rawRequest(id+1, meshv1.Node_GetInfo_FullMethodName)); err != nil {
			t.Fatal(err)
		}
	}
	_ = c.SetReadDeadline(time.Now().Add(patience))
	for refused := range 44 {
		var head [4]byte
		if _, err := io.ReadFull(c, head[:]); err != nil {
			t.Fatalf("after %d refusals: %v", refused, err)
		}
		body := make([]byte, binary.BigEndian.Uint32(head[:]))
		if _, err := io.ReadFull(c, body); err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(body), "at a time") {
			t.Fatalf("a refusal of %q", body)
		}
	}
	if most := p.service.most.Load(); most > 256 {
		t.Errorf("%d ran at a time", most)
	}
	// With all its calls hanging it is still noticed that the peer is gone.
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "every handler has ended", func() bool { return p.service.sleeping.Load() == 0 })
}

func TestTheOnlyCallOfAPeerThatIsGoneEnds(t *testing.T) {
	t.Parallel()
	p := serve(t)
	c := p.raw()
	if _, err := c.Write(rawRequest(1, meshv1.Node_GetInfo_FullMethodName)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "its handler runs", func() bool { return p.service.sleeping.Load() == 1 })
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "its handler has ended", func() bool { return p.service.sleeping.Load() == 0 })
}

// A peer that asks for gigabytes and reads nothing holds a few answers, not all.
// TestAPeerThatReadsNothingHoldsLittleMemory runs beside no other: it measures what
// the whole process holds.
func TestAPeerThatReadsNothingHoldsLittleMemory(t *testing.T) {
	p := serve(t)
	good := meshv1.NewNodeClient(p.client("calls"))
	c := p.raw()
	// The server stops reading once the peer's answers stand in its way, so this
	// write blocks: it ends with the test.
	var writing sync.WaitGroup
	writing.Go(func() {
		for id := range uint64(20000) {
			if _, err := c.Write(rawRequest(id+1, meshv1.Node_GetMetrics_FullMethodName)); err != nil {
				return
			}
		}
	})
	defer writing.Wait()
	defer c.Close()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for i := range 200 {
		if _, err := good.Ping(within(t), &meshv1.PingRequest{Payload: []byte(fmt.Sprint(i))}); err != nil {
			t.Fatalf("beside it, call %d: %v", i, err)
		}
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	// At the worst 256 answers of 1 MiB were made before the first was held back.
	if grown := int64(after.HeapInuse) - int64(before.HeapInuse); grown > 320<<20 {
		t.Errorf("the heap grew by %d MiB", grown>>20)
	}
}
