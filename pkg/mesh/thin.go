package mesh

import (
	"context"
	"errors"
	"net"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"
)

// A link of a kilobyte a second carries a handshake and an introduction, each in
// seconds, but not those of TCP and QUIC beside each other, and not in the time that
// ends a dial of a peer which hangs. That a link is thin shows when a peer answered
// and time ran out all the same: the next dial of it is patient and has the link to
// itself. The one after that is like any other, for whom patience did not help.

const (
	// patientLimit is what a handshake, and then an introduction, may take there.
	patientLimit = 3 * admitLimit
	// thinFor is how long that is believed. It must outlast a pause of keep.
	thinFor = time.Minute
)

// thinLink is one peer's; by is the transport over which it answered.
type thinLink struct {
	by    string
	until time.Time
}

// setThin has the next dial of p be patient.
func (d *dials) setThin(p peer.ID, by string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.thin) >= searchesKept {
		clear(d.thin)
	}
	d.thin[p] = thinLink{by, time.Now().Add(thinFor)}
}

// clearThin ends patience: it did not help, or is no longer needed.
func (d *dials) clearThin(p peer.ID) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.thin, p)
}

// thinBy is the transport over which p answered too slowly, or "".
func (d *dials) thinBy(p peer.ID) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	if t, ok := d.thin[p]; ok && time.Now().Before(t.until) {
		return t.by
	}
	return ""
}

// admitTime is what the introduction of a session may take. Who is not known from
// the roster has no more than admitLimit here.
func (n *Node) admitTime(s *session) time.Duration {
	if !s.inbound {
		if n.dials.thinBy(s.peer) != "" {
			return patientLimit
		}
	} else if _, ok := n.network.Known(s.peer); ok {
		return patientLimit
	}
	return admitLimit
}

// patient is ctx without its deadline, which is for peers that do not answer.
func (n *Node) patient(ctx context.Context) (context.Context, context.CancelFunc) {
	late, cancel := context.WithTimeout(context.WithoutCancel(ctx), patientLimit)
	stopCtx := context.AfterFunc(ctx, func() {
		if ctx.Err() == context.Canceled {
			cancel()
		}
	})
	stopNode := context.AfterFunc(n.ctx, cancel)
	return late, func() { stopCtx(); stopNode(); cancel() }
}

// answeredLate tells whether a TCP dial ended in its handshake, and by time.
func answeredLate(err error) bool {
	var op *net.OpError
	return err != nil && dialResult(err) == "timeout" && !(errors.As(err, &op) && op.Op == "dial")
}
