package nettest

import (
	"testing"
	"time"

	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

// A link is made over a kilobyte a second, where the handshake alone takes seconds,
// and carries calls.
func TestLinkIsMadeOverAKilobyteASecond(t *testing.T) {
	t.Parallel()
	for name, protocols := range map[string][]string{"tcp": {"tcp"}, "quic": {"quic"}, "both": {"tcp", "quic"}} {
		t.Run(name, func(t *testing.T) {
			l := newLab(t)
			l.protocols = protocols
			key := l.member("monitor", meshv1.Role_ROLE_MONITOR)
			ork := l.orchestrator(l.host("ork", "5.5.5.2/24"))
			monitor := l.daemon(l.host("monitor", "5.5.5.3/24"), key, meshv1.Role_ROLE_MONITOR)
			monitor.given = map[string][]string{ork.id: l.orkAt} // no bootstrap: nothing else crosses the link
			monitor.host.slow()
			began := time.Now()
			monitor.keep(ork)
			l.eventually("linked", func() bool { return monitor.linked(ork, good) })
			monitor.reaches(ork)
			t.Logf("the first call was answered after %s", time.Since(began).Round(100*time.Millisecond))
		})
	}
}
