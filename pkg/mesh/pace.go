package mesh

import (
	"context"
	"crypto/rand"
	"io"
	"sync"
	"time"

	"github.com/libp2p/go-libp2p/core/network"
)

// Pacing of bulk over TCP. All streams of a connection share one pipe: what a
// bulk stream has put into it stands before the next call. So the bytes of bulk
// streams that are under way are capped, by a window that grows while the pipe
// answers quickly and shrinks when it does not. A marker goes through the pipe
// behind the bulk and comes back: it tells what has arrived and how long that took.
//
// Pacing is advice. It never holds a write longer than paceMost, so a lost marker
// or a peer that answers none costs speed, not the stream. QUIC needs none: it
// takes its streams in turn.
const (
	paceLeast  = 256 << 10
	paceFirst  = 512 << 10
	paceLimit  = 16 << 20 // a stream's own window in the library
	paceTarget = 2 * time.Millisecond
	paceMost   = 250 * time.Millisecond
	paceRest   = 5 * time.Second // without bulk, after which the marker's stream ends
)

// pacer paces the bulk of one connection.
type pacer struct {
	mu        sync.Mutex
	sent      int64 // bytes that bulk streams have put on the connection, ever
	confirmed int64 // of those, what has arrived
	window    int64
	fast      bool // the window doubles until the pipe first answers late
	limited   bool // somebody waited since the last marker
	least     time.Duration
	room      chan struct{} // closed when there is more room
	marking   bool
	wake      chan struct{} // of the one who marks: bulk was sent
	off       bool
}

// enter waits until n more bytes may be under way, at most paceMost.
func (p *pacer) enter(node *Node, s *session, n int64, closed <-chan struct{}) {
	var timer *time.Timer
	for {
		p.mu.Lock()
		if p.window == 0 {
			p.window, p.fast, p.wake = paceFirst, true, make(chan struct{}, 1)
		}
		if p.off || p.sent == p.confirmed || p.sent-p.confirmed+n <= p.window {
			break
		}
		p.limited = true
		if p.room == nil {
			p.room = make(chan struct{})
		}
		room := p.room
		p.mu.Unlock()
		if timer == nil {
			timer = time.NewTimer(paceMost)
			defer timer.Stop()
		}
		select {
		case <-room:
			continue
		case <-timer.C:
		case <-closed:
		case <-s.gone:
		}
		p.mu.Lock()
		break
	}
	p.sent += n
	start := !p.marking && !p.off && p.sent-p.confirmed > paceLeast/2
	if start {
		p.marking = true
	}
	wake := p.wake
	p.mu.Unlock()
	poke(wake)
	if start {
		node.spawn(func() { node.mark(p, s) })
	}
}

// mark sends markers as long as there is bulk under way.
func (n *Node) mark(p *pacer, s *session) {
	stream, err := n.negotiate(n.ctx, s, n.protocol(pingName))
	if err == nil {
		err = p.follow(n.ctx, s, stream)
		_ = stream.Reset()
	}
	p.mu.Lock()
	p.marking = false
	p.off = p.off || err != nil
	p.release()
	p.mu.Unlock()
}

// follow runs markers until bulk has rested. An error says that the peer answers
// none.
func (p *pacer) follow(ctx context.Context, s *session, stream network.Stream) error {
	var sent, back [pingBytes]byte
	_, _ = rand.Read(sent[:])
	stop := context.AfterFunc(ctx, func() { _ = stream.Reset() })
	defer stop()
	rest := time.NewTimer(paceRest)
	defer rest.Stop()
	for {
		p.mu.Lock()
		upTo, idle := p.sent, p.sent == p.confirmed
		p.mu.Unlock()
		if idle {
			rest.Reset(paceRest)
			select {
			case <-p.wake:
				continue
			case <-rest.C:
			case <-s.gone:
			case <-ctx.Done():
			}
			return nil
		}
		began := time.Now()
		if _, err := stream.Write(sent[:]); err != nil {
			return err
		}
		if _, err := io.ReadFull(stream, back[:]); err != nil {
			return err
		}
		p.confirm(upTo, time.Since(began))
	}
}

// confirm takes a marker's answer in.
func (p *pacer) confirm(upTo int64, took time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.confirmed = upTo
	if p.least == 0 || took < p.least {
		p.least = took
	} else {
		p.least += (took - p.least) / 512 // paths change
	}
	switch late := took - p.least; {
	case late > paceTarget:
		p.window, p.fast = max(p.window*3/4, paceLeast), false
	case !p.limited:
	case p.fast:
		p.window = min(p.window*2, paceLimit)
	default:
		p.window = min(p.window+64<<10, paceLimit)
	}
	p.limited = false
	p.release()
}

// release wakes those who wait; the lock is held.
func (p *pacer) release() {
	if p.room != nil {
		close(p.room)
		p.room = nil
	}
}
