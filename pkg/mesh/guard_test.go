package mesh_test

import (
	"sync/atomic"
	"testing"

	"github.com/cosmicac/cosmicac/pkg/mesh"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	"github.com/libp2p/go-libp2p/core/host"
	"github.com/libp2p/go-libp2p/core/network"
	"github.com/libp2p/go-libp2p/p2p/protocol/identify"
)

// Who has not been admitted is not asked who it is, and nothing of it is kept; who
// has been is.
func TestOnlyAnAdmittedPeerIsAskedWhoItIs(t *testing.T) {
	t.Parallel()
	for transport, listen := range transports {
		t.Run(transport, func(t *testing.T) {
			t.Parallel()
			l := newLab(t)
			ork := l.start(l.ork, func(o *mesh.Options) { o.Role, o.Listen = meshv1.Role_ROLE_ORK, listen })
			app := l.start(l.app, func(o *mesh.Options) { o.Listen = nil })
			if err := ping(within(t), app.Node, ork.ID(), ork.Addresses()...); err != nil {
				t.Fatal(err)
			}
			eventually(t, "a member is asked", func() bool {
				known, err := ork.Host().Peerstore().GetProtocols(app.ID())
				return err == nil && len(known) > 0
			})

			var asked atomic.Int32
			stranger := rude(t, ork, func(h host.Host) {
				h.SetStreamHandler(identify.ID, func(s network.Stream) { asked.Add(1); _ = s.Reset() })
			})
			eventually(t, "a stranger that says nothing is cut off", func() bool {
				return stranger.Network().Connectedness(ork.ID()) != network.Connected
			})
			eventually(t, "it had the time of a stranger", func() bool {
				return ork.log.has("refused peer", stranger.ID().String(), "no introduction in 5s")
			})
			if n := asked.Load(); n > 0 {
				t.Errorf("a stranger was asked %d times", n)
			}
		})
	}
}
