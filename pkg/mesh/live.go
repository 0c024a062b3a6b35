package mesh

import (
	"context"
	"crypto/rand"
	"io"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/libp2p/go-libp2p/core/network"
)

// patience says when silence means what. Any byte of the peer is life.
type patience struct{ ping, suspect, close time.Duration }

var (
	// daemons ask after a second, so that an idle healthy peer is never suspect.
	daemonPatience = patience{time.Second, 2 * time.Second, 10 * time.Second}
	// agents are many, so they ask at half the pace.
	agentPatience = patience{2 * time.Second, 4 * time.Second, 10 * time.Second}
)

const (
	watchTick = 250 * time.Millisecond
	pingBytes = 8
	// cutLimit is how long the reason of a cut may take to leave.
	cutLimit = 2 * time.Second
)

// watch looks at every connection four times a second: it asks the silent for a
// sign of life, closes the dead and those who never introduced themselves, and
// looks again at certificates and grants each second.
func (n *Node) watch() {
	last := n.monotonic()
	for tick := 1; sleep(n.ctx, watchTick); tick++ {
		now := n.monotonic()
		// This process itself was held up: nobody's silence of that time counts.
		stalled := now-last > int64(4*watchTick)
		last = now
		for _, s := range n.sessions.all() {
			if stalled {
				s.heard.Store(now)
			}
			n.look(s, now)
			n.upgrade(s)
			if tick%4 == 0 && n.overdue(s) {
				n.recheck(s)
			}
		}
		if tick%12 == 0 { // idle for 3 to 6 s
			n.restClients()
		}
		if tick%40 == 0 {
			n.sessions.forgetPast(20 * time.Second)
			n.dropFormer()
			n.dropDoubles()
		}
		if tick%8 == 0 {
			if err := n.network.Tick(); err != nil {
				n.refusals.line(n.log, "the network's records could not be saved", "reason", err)
			}
		}
		if tick%120 == 0 {
			n.book.save()
			n.forgetClients()
		}
	}
}

// dropDoubles closes second connections that this node dialed and nobody uses:
// overtaken ones, and those of TCP and QUIC that connected at the same moment.
func (n *Node) dropDoubles() {
	for _, s := range n.sessions.all() {
		if s.inbound || !s.ready() || time.Since(s.opened) < 10*time.Second || s.inUse() {
			continue
		}
		best := n.sessions.best(s.peer)
		// Of two alike, dialed by one side each, both sides would close their own.
		if best != nil && best != s && !best.suspect.Load() && (best.outranks(s) || !best.inbound && !s.outranks(best)) {
			n.log.Debug("closing a second connection", "key", s.peer, "address", s.conn.RemoteMultiaddr().String())
			_ = s.conn.Close()
		}
	}
}

func (n *Node) look(s *session, now int64) {
	if !closed(s.settled) {
		if limit := n.admitTime(s); time.Since(s.opened) > limit+time.Second {
			n.refused(s, fault.New(fault.Timeout, "no introduction in %s", limit))
			s.fail(fault.New(fault.Unreachable, "%s did not finish its introduction", s.peer))
			n.hangUp(s)
		}
		return
	}
	p := daemonPatience
	if n.credential().kind != showsRoster {
		p = agentPatience
	}
	if s.watched.Load() == 0 && s.heard.Load() > s.doubted.Load() {
		s.suspect.Store(false)
		n.restPings(s)
		return
	}
	silent := time.Duration(now - s.heard.Load())
	if silent >= p.ping && s.life.look(4*watchTick) {
		s.heard.Store(now)
		silent = 0
	}
	if silent < p.suspect {
		if s.suspect.CompareAndSwap(true, false) {
			n.log.Debug("peer speaks again", "key", s.peer)
		}
	} else if s.suspect.CompareAndSwap(false, true) {
		n.log.Debug("peer is silent", "key", s.peer, "silent", silent)
	}
	switch {
	case silent >= p.close:
		n.log.Warn("closing a silent connection", "key", s.peer, "silent", silent.Round(100*time.Millisecond), "address", s.conn.RemoteMultiaddr().String())
		s.fail(fault.New(fault.Unreachable, "%s was silent for %s", s.peer, p.close))
		n.spawn(func() { _ = s.conn.Close() }) // may wait for the dead peer
	case silent >= p.ping && s.pinging.CompareAndSwap(false, true):
		n.spawn(func() {
			defer s.pinging.Store(false)
			n.ping(s, p.close)
		})
	}
}

// watchSession has silence of s noticed until release, from now on: what nobody watched
// may have been silent for long.
func (n *Node) watchSession(s *session) (release func()) {
	if s.watched.Add(1) == 1 {
		s.heard.Store(n.monotonic())
	}
	return func() { s.watched.Add(-1) }
}

// doubt looks for a sign of life on the older connections of a peer that has made a
// new one: it has often lost them.
func (n *Node) doubt(younger *session) {
	for _, s := range n.sessions.to(younger.peer) {
		if s != younger && s.opened.Before(younger.opened) && s.watched.Load() == 0 {
			now := n.monotonic()
			s.heard.Store(now)
			s.doubted.Store(now)
		}
	}
}

// hangUp ends the connection of a refused peer and tells it so. It returns at once:
// who takes in nothing holds that up, and is not told then.
func (n *Node) hangUp(s *session) {
	n.spawn(func() {
		hang := time.AfterFunc(cutLimit, s.life.shut)
		defer hang.Stop()
		_ = s.conn.CloseWithError(network.ConnGated)
	})
}

// pinger is the standing stream of pings of one session.
type pinger struct{ stream network.Stream }

// ping asks s for a sign of life and waits for it, at most limit. It runs once at
// a time for each session.
func (n *Node) ping(s *session, limit time.Duration) {
	ctx, cancel := context.WithTimeout(n.ctx, limit)
	defer cancel()
	if s.pings == nil {
		stream, err := n.negotiate(ctx, s, n.protocol(pingName))
		if err != nil {
			return // whatever the peer answered has counted as life
		}
		s.pings = &pinger{stream}
	}
	stream := s.pings.stream
	stop := context.AfterFunc(ctx, func() { _ = stream.Reset() })
	defer stop()
	var sent, back [pingBytes]byte
	_, _ = rand.Read(sent[:])
	began := time.Now()
	_, err := stream.Write(sent[:])
	if err == nil {
		_, err = io.ReadFull(stream, back[:])
	}
	if err != nil || sent != back {
		_ = stream.Reset()
		s.pings = nil
		return
	}
	s.rtt.Store(int64(time.Since(began)))
	s.heard.Store(n.monotonic())
}

// restPings closes the stream of pings of a session that nobody watches now.
func (n *Node) restPings(s *session) {
	if !s.pinging.CompareAndSwap(false, true) {
		return
	}
	defer s.pinging.Store(false)
	if s.pings != nil {
		_ = s.pings.stream.Reset()
		s.pings = nil
	}
}

// servePing answers pings until the other side ends them.
func (n *Node) servePing(stream network.Stream) {
	s, _, done, ok := n.accept(stream)
	if !ok {
		return
	}
	defer done()
	defer stream.Close()
	stop := context.AfterFunc(n.ctx, func() { _ = stream.Reset() })
	defer stop()
	var b [pingBytes]byte
	for {
		if _, err := io.ReadFull(stream, b[:]); err != nil {
			return
		}
		s.heard.Store(n.monotonic())
		if _, err := stream.Write(b[:]); err != nil {
			return
		}
	}
}
