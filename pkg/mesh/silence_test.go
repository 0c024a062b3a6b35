package mesh_test

import (
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

// freezer forwards TCP until it freezes: then it swallows what comes, as a black
// hole does, and closes nothing.
type freezer struct {
	listener net.Listener
	frozen   atomic.Bool
	mu       sync.Mutex
	conns    []net.Conn
}

func newFreezer(t *testing.T, to string) *freezer {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	f := &freezer{listener: l}
	var running sync.WaitGroup
	running.Add(1)
	go func() {
		defer running.Done()
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", to)
			if err != nil {
				_ = in.Close()
				continue
			}
			f.mu.Lock()
			f.conns = append(f.conns, in, out)
			f.mu.Unlock()
			running.Add(2)
			for _, pair := range [][2]net.Conn{{in, out}, {out, in}} {
				go func() {
					defer running.Done()
					_, _ = io.Copy(struct{ io.Writer }{writerFunc(func(b []byte) (int, error) {
						if f.frozen.Load() {
							return len(b), nil
						}
						return pair[1].Write(b)
					})}, pair[0])
					if !f.frozen.Load() {
						_ = pair[1].Close()
					}
				}()
			}
		}
	}()
	t.Cleanup(func() {
		_ = l.Close()
		f.mu.Lock()
		for _, c := range f.conns {
			_ = c.Close()
		}
		f.mu.Unlock()
		running.Wait()
	})
	return f
}

type writerFunc func([]byte) (int, error)

func (w writerFunc) Write(b []byte) (int, error) { return w(b) }

func TestSilentPeerIsSuspectThenClosed(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	a := l.start(l.ork, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_ORK }, func(s *spot) {
		s.service.hang, s.service.entered = make(chan struct{}), make(chan struct{}, 8)
	})
	f := newFreezer(t, "127.0.0.1:"+portOf(t, a))
	port := f.listener.Addr().(*net.TCPAddr).Port
	b := l.start(l.app, func(o *mesh.Options) { o.Role, o.DHT = meshv1.Role_ROLE_APP_NODE, mesh.DHTOff })
	defer b.Keep(a.ID(), "/ip4/127.0.0.1/tcp/"+itoa(port))()
	eventually(t, "connected", func() bool { return b.Connected(a.ID()) })
	result := make(chan error, 1)
	go func() {
		_, err := info(within(t), b.Node, a.ID())
		result <- err
	}()
	<-a.service.entered

	// An idle link that answers stays good.
	for end := time.Now().Add(3 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if p := b.Peers(); len(p) != 1 {
			t.Fatalf("%d connections while the peer answers", len(p))
		}
	}
	first := b.Peers()[0].GetConnectedAt().AsTime()
	f.frozen.Store(true)
	_ = f.listener.Close() // nor can it be dialed
	eventually(t, "suspect", func() bool { return !b.Connected(a.ID()) && len(b.Peers()) == 1 })
	wantKind(t, ping(within(t), b.Node, a.ID()), fault.Unreachable, "silent")
	wantKind(t, <-result, fault.Unreachable)
	// It may come back by its own address, which it has told.
	eventually(t, "closed", func() bool {
		for _, p := range b.Peers() {
			if p.GetConnectedAt().AsTime().Equal(first) {
				return false
			}
		}
		return true
	})
}
