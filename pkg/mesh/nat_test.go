package mesh

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/libp2p/go-libp2p/core/peer"
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
