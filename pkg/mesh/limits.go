package mesh

import (
	"net/netip"
	"time"

	"github.com/libp2p/go-libp2p/core/network"
	rcmgr "github.com/libp2p/go-libp2p/p2p/host/resource-manager"
	"github.com/libp2p/go-libp2p/x/rate"
)

// peersPerAddress is how many connections may come from one address: agents of
// a whole rack stand behind one.
const peersPerAddress = 8192

// newResources makes the resource manager: room for thousands of peers, little
// for each. The library's own defaults stop at eight connections an address and
// 64 streams a protocol, so every scope is stated here.
//
// Memory figures are budgets, not allocations: each open stream reserves 256 KiB of
// its peer's share, and is refused when the share is used up (the library's own
// muxer, which an older peer uses, ends the whole connection then), so a share
// stands well above streams x 256 KiB.
func newResources() (network.ResourceManager, error) {
	streams := func(count int, memory int64) rcmgr.ResourceLimits {
		n := rcmgr.LimitVal(count)
		return rcmgr.ResourceLimits{Streams: n, StreamsInbound: n, StreamsOutbound: n, Memory: rcmgr.LimitVal64(memory)}
	}
	conns := func(l rcmgr.ResourceLimits, count, fds int) rcmgr.ResourceLimits {
		n := rcmgr.LimitVal(count)
		l.Conns, l.ConnsInbound, l.ConnsOutbound, l.FD = n, n, n, rcmgr.LimitVal(fds)
		return l
	}
	limits := rcmgr.PartialLimitConfig{
		System:              conns(streams(131072, 64<<30), 16384, 16384),
		Transient:           conns(streams(8192, 4<<30), 8192, 8192), // gate.go keeps the mute ones below
		PeerDefault:         conns(streams(1024, 512<<20), 8, 8),
		ProtocolDefault:     streams(65536, 32<<30),
		ProtocolPeerDefault: streams(512, 256<<20),
		ServiceDefault:      streams(65536, 32<<30),
		ServicePeerDefault:  streams(512, 256<<20),
		Conn:                conns(rcmgr.ResourceLimits{Memory: 32 << 20}, 1, 1),
		Stream:              streams(1, 16<<20),
	}
	subnet4 := []rcmgr.ConnLimitPerSubnet{{PrefixLength: 32, ConnCount: peersPerAddress}}
	subnet6 := []rcmgr.ConnLimitPerSubnet{{PrefixLength: 56, ConnCount: peersPerAddress}}
	loop4 := []rcmgr.NetworkPrefixLimit{{Network: netip.MustParsePrefix("127.0.0.0/8"), ConnCount: 16384}}
	loop6 := []rcmgr.NetworkPrefixLimit{{Network: netip.MustParsePrefix("::1/128"), ConnCount: 16384}}
	// The library allows one connection in five seconds and address after the
	// first sixteen; after an ork's restart a rack's agents come all at once.
	storm := rate.Limit{RPS: 256, Burst: peersPerAddress}
	rates := &rate.Limiter{
		NetworkPrefixLimits: []rate.PrefixLimit{
			{Prefix: netip.MustParsePrefix("127.0.0.0/8")}, // no limit
			{Prefix: netip.MustParsePrefix("::1/128")},
		},
		SubnetRateLimiter: rate.SubnetLimiter{
			IPv4SubnetLimits: []rate.SubnetLimit{{PrefixLength: 32, Limit: storm}},
			IPv6SubnetLimits: []rate.SubnetLimit{{PrefixLength: 56, Limit: storm}},
			GracePeriod:      time.Minute,
		},
	}
	return rcmgr.NewResourceManager(
		rcmgr.NewFixedLimiter(limits.Build(rcmgr.DefaultLimits.AutoScale())),
		rcmgr.WithMetricsDisabled(),
		rcmgr.WithConnRateLimiters(rates),
		rcmgr.WithLimitPerSubnet(subnet4, subnet6),
		rcmgr.WithNetworkPrefixLimit(loop4, loop6),
	)
}
