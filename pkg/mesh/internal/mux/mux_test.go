package mux

import (
	"context"
	"crypto/rand"
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"github.com/libp2p/go-libp2p/core/network"
	tmux "github.com/libp2p/go-libp2p/p2p/muxer/testsuite"
	"github.com/libp2p/go-libp2p/p2p/muxer/yamux"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	// The library's suite leaves its own listeners.
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/libp2p/go-libp2p/p2p/muxer/testsuite.GoServe.func1"))
}

var ours = &Transport{KeepAlive: time.Minute, WriteTimeout: time.Minute}

// mixed is this package at one end and the library's own at the other.
type mixed struct{ server, client network.Multiplexer }

func (m mixed) NewConn(c net.Conn, isServer bool, scope network.PeerScope) (network.MuxedConn, error) {
	if isServer {
		return m.server.NewConn(c, isServer, scope)
	}
	return m.client.NewConn(c, isServer, scope)
}

func TestTheLibrarysOwnSuite(t *testing.T) {
	t.Setenv("CI", "true") // its own time-outs are ten times longer then
	for name, tr := range map[string]network.Multiplexer{
		"both ends":     ours,
		"serves theirs": mixed{ours, yamux.DefaultTransport},
		"calls theirs":  mixed{yamux.DefaultTransport, ours},
	} {
		t.Run(name, func(t *testing.T) {
			for name, run := range tmux.Subtests {
				// A thousand streams at once are more than the backlog: refused, as by theirs.
				if name != "github.com/libp2p/go-libp2p/p2p/muxer/testsuite.SubtestStress1Conn1000Stream10Msg" {
					t.Run(name, func(t *testing.T) { run(t, tr) })
				}
			}
		})
	}
}

// pair is two sessions over TCP.
func pair(t *testing.T, client, server network.Multiplexer) (a, b network.MuxedConn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	near, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	far, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	if a, err = client.NewConn(near, false, nil); err != nil {
		t.Fatal(err)
	}
	if b, err = server.NewConn(far, true, nil); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = a.Close(); _ = b.Close() })
	return a, b
}

// streams is one stream's two ends.
func streams(t *testing.T, a, b network.MuxedConn) (x, y network.MuxedStream) {
	t.Helper()
	x, err := a.OpenStream(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	if y, err = b.AcceptStream(); err != nil {
		t.Fatal(err)
	}
	return x, y
}

func TestManyMegabytesArriveWholeBothWays(t *testing.T) {
	for name, tr := range map[string]mixed{
		"ours": {ours, ours}, "to theirs": {yamux.DefaultTransport, ours}, "from theirs": {ours, yamux.DefaultTransport},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a, b := pair(t, tr.client, tr.server)
			x, y := streams(t, a, b)
			sent := make([]byte, 24<<20)
			_, _ = rand.Read(sent)
			echoed := make(chan error, 1)
			go func() {
				_, err := io.Copy(y, y)
				echoed <- errors.Join(err, y.CloseWrite())
			}()
			wrote := make(chan error, 1)
			go func() {
				_, err := x.Write(sent)
				wrote <- errors.Join(err, x.CloseWrite())
			}()
			got, err := io.ReadAll(x)
			if err := errors.Join(err, <-wrote, <-echoed); err != nil {
				t.Fatal(err)
			}
			if string(got) != string(sent) {
				t.Fatalf("%d bytes came back, not the %d that went out", len(got), len(sent))
			}
		})
	}
}

func TestReasonsOfEndsCross(t *testing.T) {
	for name, tr := range map[string]mixed{
		"ours": {ours, ours}, "to theirs": {yamux.DefaultTransport, ours}, "from theirs": {ours, yamux.DefaultTransport},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a, b := pair(t, tr.client, tr.server)
			x, y := streams(t, a, b)
			if err := y.ResetWithError(network.StreamGated); err != nil {
				t.Fatal(err)
			}
			var cut *network.StreamError
			if _, err := x.Read(make([]byte, 1)); !errors.As(err, &cut) || !cut.Remote || cut.ErrorCode != network.StreamGated {
				t.Fatalf("a stream that was gated reads %v", err)
			}
			x, _ = streams(t, a, b)
			if err := b.CloseWithError(network.ConnGated); err != nil {
				t.Fatal(err)
			}
			var end *network.ConnError
			if _, err := x.Read(make([]byte, 1)); !errors.As(err, &end) || !end.Remote || end.ErrorCode != network.ConnGated {
				t.Fatalf("a stream of a gated connection reads %v", err)
			}
			for deadline := time.Now().Add(time.Minute); !a.IsClosed() && time.Now().Before(deadline); {
				time.Sleep(time.Millisecond)
			}
			if _, err := a.OpenStream(context.Background()); !errors.As(err, &end) || !end.Remote {
				t.Fatalf("a stream opened on a gated connection: %v", err)
			}
		})
	}
}

func TestDeadlinesEndWhatWaits(t *testing.T) {
	t.Parallel()
	a, b := pair(t, ours, ours)
	x, _ := streams(t, a, b)
	if err := x.SetReadDeadline(time.Now().Add(10 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if _, err := x.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("a read past its deadline: %v", err)
	}
	// One that is set while somebody waits counts too.
	if err := x.SetReadDeadline(time.Time{}); err != nil {
		t.Fatal(err)
	}
	read := make(chan error, 1)
	go func() {
		_, err := x.Read(make([]byte, 1))
		read <- err
	}()
	time.Sleep(5 * time.Millisecond)
	if err := x.SetReadDeadline(time.Now()); err != nil {
		t.Fatal(err)
	}
	if err := <-read; !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("a waiting read whose deadline was set: %v", err)
	}
	// Nobody reads at the other end: the window fills.
	if err := x.SetWriteDeadline(time.Now().Add(2 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if n, err := x.Write(make([]byte, 1<<20)); !errors.Is(err, os.ErrDeadlineExceeded) || n != firstWindow {
		t.Fatalf("a write past the window wrote %d: %v", n, err)
	}
}

func TestAReaderThatStopsHoldsUpNobodyElse(t *testing.T) {
	t.Parallel()
	a, b := pair(t, ours, ours)
	stuck, _ := streams(t, a, b)
	writing := make(chan error, 1)
	go func() {
		_, err := stuck.Write(make([]byte, 1<<20))
		writing <- err
	}()
	x, y := streams(t, a, b)
	go func() { _, _ = io.Copy(y, y) }()
	for range 100 {
		if _, err := x.Write([]byte("12345678")); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(x, make([]byte, 8)); err != nil {
			t.Fatal(err)
		}
	}
	_ = stuck.Reset()
	var cut *network.StreamError
	if err := <-writing; !errors.As(err, &cut) || cut.Remote {
		t.Fatalf("a write whose stream was reset: %v", err)
	}
}

func TestASilentPeerEndsTheConnection(t *testing.T) {
	t.Parallel()
	near, far := net.Pipe()
	defer far.Close()
	go func() { _, _ = io.Copy(io.Discard, far) }()
	c, err := (&Transport{KeepAlive: 10 * time.Millisecond, WriteTimeout: 20 * time.Millisecond}).NewConn(near, false, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.AcceptStream(); !errors.Is(err, network.ErrReset) {
		t.Fatalf("a connection without a sign of life: %v", err)
	}
	// A peer that answers keeps it.
	a, b := pair(t, &Transport{KeepAlive: 5 * time.Millisecond, WriteTimeout: 10 * time.Second}, ours)
	time.Sleep(50 * time.Millisecond)
	x, y := streams(t, a, b)
	if _, err := x.Write([]byte("still here")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(y, make([]byte, 10)); err != nil {
		t.Fatal(err)
	}
}

func TestWhatIsOpenedPastTheBacklogIsRefused(t *testing.T) {
	t.Parallel()
	near, far := net.Pipe()
	b, err := ours.NewConn(far, true, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	defer near.Close()
	go func() {
		for id := uint32(1); id <= 2*backlog+1; id += 2 {
			h := newHeader(kindWindow, flagOpen, id, 0)
			if _, err := near.Write(h[:]); err != nil {
				return
			}
		}
	}()
	var h header
	if _, err := io.ReadFull(near, h[:]); err != nil {
		t.Fatal(err)
	}
	if h.stream() != 2*backlog+1 || h.flags() != flagReset || h.length() != uint32(network.StreamResourceLimitExceeded) {
		t.Fatalf("the stream past the backlog was answered % x", h)
	}
}

// FuzzFrames feeds a session what a hostile peer could send.
func FuzzFrames(f *testing.F) {
	frames := func(list ...header) (b []byte) {
		for _, h := range list {
			b = append(b, h[:]...)
		}
		return b
	}
	f.Add(frames(newHeader(kindWindow, flagOpen, 1, 0), newHeader(kindWindow, flagEnd, 1, 0)))
	f.Add(append(frames(newHeader(kindData, flagOpen, 1, 5)), "hello"...))
	f.Add(frames(newHeader(kindData, flagOpen, 1, 1<<31)))
	f.Add(frames(newHeader(kindWindow, flagOpen, 1, 1<<32-1), newHeader(kindWindow, 0, 1, 1<<32-1)))
	f.Add(frames(newHeader(kindPing, flagOpen, 0, 7), newHeader(kindPing, flagOpened, 0, 7), newHeader(kindGoAway, 0, 0, 0x1007)))
	f.Add(frames(newHeader(kindWindow, flagOpen, 1, 0), newHeader(kindWindow, flagOpen, 1, 0)))
	f.Add(frames(newHeader(kindWindow, flagOpen|flagReset|flagEnd|flagOpened, 3, 9), newHeader(9, 0, 0, 0)))
	f.Fuzz(func(t *testing.T, sent []byte) {
		near, far := net.Pipe()
		c, err := ours.NewConn(far, true, nil)
		if err != nil {
			t.Fatal(err)
		}
		go func() { _, _ = io.Copy(io.Discard, near) }()
		go func() {
			_, _ = near.Write(sent)
			_ = near.Close()
		}()
		for {
			st, err := c.AcceptStream()
			if err != nil {
				break
			}
			_, _ = io.Copy(io.Discard, st)
			_ = st.Close()
		}
		_ = c.Close()
	})
}
