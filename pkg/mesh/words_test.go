package mesh

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/libp2p/go-libp2p/core/sec"
	ma "github.com/multiformats/go-multiaddr"
)

func TestWhatBootstrapsSeeTellsTheNAT(t *testing.T) {
	t.Parallel()
	own := []netip.Addr{netip.MustParseAddr("192.168.1.5"), netip.MustParseAddr("2001:db8::5")}
	// "observed local observer"
	for name, c := range map[string]struct {
		seen []string
		want string
	}{
		"nobody":                       {nil, "unknown"},
		"this host":                    {[]string{"/ip4/192.168.1.5/udp/4811/quic-v1 /ip4/0.0.0.0/udp/4811/quic-v1 a", "/ip6/2001:db8::5/tcp/99 /ip6/::/tcp/99 b"}, "none"},
		"same port, one observer":      {[]string{"/ip4/203.0.113.9/udp/4811/quic-v1 /ip4/0.0.0.0/udp/4811/quic-v1 a"}, "port_preserving"},
		"same port, two observers":     {[]string{"/ip4/203.0.113.9/udp/4811/quic-v1 /ip4/0.0.0.0/udp/4811/quic-v1 a", "/ip4/203.0.113.9/udp/4811/quic-v1 /ip4/0.0.0.0/udp/4811/quic-v1 b"}, "port_preserving"},
		"another port, the same twice": {[]string{"/ip4/203.0.113.9/udp/33000/quic-v1 /ip4/0.0.0.0/udp/4811/quic-v1 a", "/ip4/203.0.113.9/udp/33000/quic-v1 /ip4/0.0.0.0/udp/4811/quic-v1 b"}, "endpoint_independent"},
		"another port for each":        {[]string{"/ip4/203.0.113.9/udp/33000/quic-v1 /ip4/0.0.0.0/udp/4811/quic-v1 a", "/ip4/203.0.113.9/udp/33001/quic-v1 /ip4/0.0.0.0/udp/4811/quic-v1 b"}, "symmetric"},
		"another address for each":     {[]string{"/ip4/203.0.113.9/udp/4811/quic-v1 /ip4/0.0.0.0/udp/4811/quic-v1 a", "/ip4/203.0.113.10/udp/4811/quic-v1 /ip4/0.0.0.0/udp/4811/quic-v1 b"}, "symmetric"},
		"two ports for one observer":   {[]string{"/ip4/203.0.113.9/udp/33000/quic-v1 /ip4/0.0.0.0/udp/4811/quic-v1 a", "/ip4/203.0.113.9/udp/33001/quic-v1 /ip4/0.0.0.0/udp/4811/quic-v1 a"}, "unknown"},
		"TCP from ports of the day":    {[]string{"/ip4/203.0.113.9/tcp/50001 /ip4/192.168.1.5/tcp/41000 a", "/ip4/203.0.113.9/tcp/50002 /ip4/192.168.1.5/tcp/41001 b"}, "unknown"},
		"TCP with its port kept":       {[]string{"/ip4/203.0.113.9/tcp/41000 /ip4/192.168.1.5/tcp/41000 a"}, "port_preserving"},
		"one bootstrap inside":         {[]string{"/ip4/192.168.1.5/tcp/41000 /ip4/192.168.1.5/tcp/41000 a", "/ip4/203.0.113.9/udp/33000/quic-v1 /ip4/0.0.0.0/udp/4811/quic-v1 b"}, "unknown"},
	} {
		var seen []observation
		for _, line := range c.seen {
			f := strings.Fields(line)
			seen = append(seen, observation{ma.StringCast(f[0]), ma.StringCast(f[1]), peer.ID(f[2])})
		}
		if class, reason := natOf(seen, own); class != c.want || reason == "" {
			t.Errorf("%s: %s (%s), want %s", name, class, reason, c.want)
		}
	}
}

func TestDialErrorsHaveShortWordsAndAClosedListOfResults(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", 5000) + "\n" + strings.Repeat("y", 5000)
	for name, c := range map[string]struct {
		err           error
		result, words string
	}{
		"refused":           {&net.OpError{Op: "dial", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}, "refused", "refused"},
		"no route, TCP":     {&net.OpError{Op: "dial", Err: os.NewSyscallError("connect", syscall.EHOSTUNREACH)}, "no_route", "no route to it"},
		"no route, QUIC":    {errors.New("INTERNAL_ERROR (local): write udp4 0.0.0.0:1->192.0.2.1:2: sendmsg: network is unreachable"), "no_route", "no route to it"},
		"silence":           {context.DeadlineExceeded, "timeout", "no answer in time"},
		"another won":       {errors.New("concurrent dial successful"), "canceled", "concurrent dial successful"},
		"no longer needed":  {&net.OpError{Op: "dial", Err: context.Canceled}, "canceled", "dial: context canceled"},
		"another key":       {fmt.Errorf("failed: %w", sec.ErrPeerIDMismatch{Expected: "a", Actual: "b"}), "wrong_key", "another key answers there"},
		"no reservation":    {errors.New("error opening relay circuit: NO_RESERVATION (204)"), "failed", "the peer holds no reservation there"},
		"long":              {errors.New(long), "failed", "xxx"},
		"with more to show": {fault.New(fault.Unreachable, "reach a: no way worked%sb)\n  dht: none", linesBegin), "failed", "reach a: no way worked"},
	} {
		result, words := dialResult(c.err), shortError(c.err)
		if result != c.result || !strings.HasPrefix(words, c.words) || len(words) > 200 || strings.Contains(words, "\n") || strings.Contains(words, "dht") {
			t.Errorf("%s: %s, %q", name, result, words)
		}
		if !slices.Contains(dialResults, result) {
			t.Errorf("%s: %s is not of the list", name, result)
		}
	}
	if dialResult(nil) != dialResults[0] || shortError(nil) != "" {
		t.Error("success has words")
	}
}
