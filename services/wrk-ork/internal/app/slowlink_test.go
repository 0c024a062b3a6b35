package app

import (
	"context"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/multiformats/go-multiaddr"
	manet "github.com/multiformats/go-multiaddr/net"
)

// slowLink is a way to an address on which only so many bytes a second pass in each
// direction; 0 for all.
type slowLink struct {
	address string
	rate    atomic.Int64
	open    atomic.Int32
	slowly  atomic.Int64 // bytes that passed while it was slow
}

// slowLinkTo listens until the test ends.
func slowLinkTo(t *testing.T, address string) *slowLink {
	t.Helper()
	target, err := manet.ToNetAddr(multiaddr.StringCast(address))
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &slowLink{address: fmt.Sprintf("/ip4/127.0.0.1/tcp/%d", listener.Addr().(*net.TCPAddr).Port)}
	ctx, cancel := context.WithCancel(context.Background())
	var all sync.WaitGroup
	carry := func(to, from net.Conn) {
		defer to.Close()
		defer from.Close()
		block := make([]byte, 4096)
		for {
			part := block
			if rate := s.rate.Load(); rate > 0 {
				part = block[:max(1, rate/10)]
			}
			n, err := from.Read(part)
			if n > 0 {
				if _, err := to.Write(part[:n]); err != nil {
					return
				}
			}
			if err != nil {
				return
			}
			if rate := s.rate.Load(); rate > 0 {
				s.slowly.Add(int64(n))
				select {
				case <-ctx.Done():
					return
				case <-time.After(time.Second * time.Duration(n) / time.Duration(rate)):
				}
			}
		}
	}
	all.Go(func() {
		for {
			in, err := listener.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial(target.Network(), target.String())
			if err != nil {
				_ = in.Close()
				continue
			}
			context.AfterFunc(ctx, func() { _ = in.Close(); _ = out.Close() })
			s.open.Add(1)
			var ways sync.WaitGroup
			ways.Go(func() { carry(out, in) })
			ways.Go(func() { carry(in, out) })
			all.Go(func() { ways.Wait(); s.open.Add(-1) })
		}
	})
	t.Cleanup(func() {
		cancel()
		_ = listener.Close()
		all.Wait()
	})
	return s
}
