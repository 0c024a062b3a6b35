package mesh

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/trust"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	"github.com/libp2p/go-libp2p/core/network"
	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/libp2p/go-libp2p/core/peerstore"
	ma "github.com/multiformats/go-multiaddr"
)

const (
	// dialLimit bounds one search and dial of a peer, all ways tried.
	dialLimit = 20 * time.Second
	// stageHead is how long one way of finding a peer runs alone before the next
	// starts beside it.
	stageHead = 1500 * time.Millisecond
	// dhtHead is the same of the DHT, whose answer comes in a few round trips or, where
	// those asked are busy or gone, late: a find does not wait for that while the
	// bootstraps hold cards.
	dhtHead = 200 * time.Millisecond
	// suspectGrace is how long a new call waits for a silent peer to speak again.
	suspectGrace = 500 * time.Millisecond
	// learnedTTL keeps addresses that a caller gave.
	learnedTTL = time.Hour
	// addressesPerPeer bounds what is kept and dialed of one peer.
	addressesPerPeer = 32

	backoffFirst, backoffMost = 50 * time.Millisecond, 500 * time.Millisecond
)

// dials makes callers of one peer share one dial, and spaces failing ones.
type dials struct {
	mu       sync.Mutex
	running  map[peer.ID]*dialing
	failed   map[peer.ID]*failure
	searches map[peer.ID][]*search // that run
	past     map[peer.ID]*search   // the last one of each peer, bounded
	thin     map[peer.ID]thinLink  // bounded too
}

type dialing struct {
	search  *search
	shows   shown // when it began
	done    chan struct{}
	session *session
	err     error
}

type failure struct {
	count int
	until time.Time
}

func newDials() *dials {
	return &dials{running: make(map[peer.ID]*dialing), failed: make(map[peer.ID]*failure),
		searches: make(map[peer.ID][]*search), past: make(map[peer.ID]*search), thin: make(map[peer.ID]thinLink)}
}

// connect returns a session that is admitted both ways, dialing if there is none.
func (n *Node) connect(ctx context.Context, p peer.ID) (*session, error) {
	for {
		shows := n.shows()
		s, began, err := n.connectOnce(ctx, p)
		// A dial that others began may have been refused for what this node showed then.
		if !final(err) || began == shows || ctx.Err() != nil {
			return s, err
		}
	}
}

// connectOnce is connect by one dial; began is what this node showed when that began.
func (n *Node) connectOnce(ctx context.Context, p peer.ID) (s *session, began shown, err error) {
	if p == n.id {
		return nil, n.shows(), fault.New(fault.Invalid, "connect to %s: it is this node itself", p)
	}
	if s := n.sessions.best(p); s != nil {
		s, err := n.unsuspected(ctx, s)
		return s, n.shows(), err
	}
	shows := n.shows()
	n.dials.mu.Lock()
	d := n.dials.running[p]
	if d == nil {
		done, ok := n.work()
		if !ok {
			n.dials.mu.Unlock()
			return nil, shows, fault.New(fault.Unreachable, "connect to %s: this node is closing", p)
		}
		d = &dialing{search: newSearch(n, p), shows: shows, done: make(chan struct{})}
		n.dials.running[p] = d
		var pause time.Duration
		if f := n.dials.failed[p]; f != nil {
			pause = time.Until(f.until)
		}
		go func() {
			defer done()
			n.runDial(p, d, pause)
		}()
	}
	n.dials.mu.Unlock()
	select {
	case <-d.done:
		return d.session, d.shows, d.err
	case <-ctx.Done():
		if ctx.Err() == context.DeadlineExceeded {
			// Nothing was sent, so this is more than a missing answer.
			return nil, d.shows, fault.New(fault.Unreachable, "reach %s%s: no connection when the deadline came%s", p, n.named(p), d.search.lines())
		}
		return nil, d.shows, ctxFault(ctx, "connect to", p)
	}
}

// unsuspected gives a peer that fell silent a moment to speak: no new calls go to
// a suspect.
func (n *Node) unsuspected(ctx context.Context, s *session) (*session, error) {
	deadline := time.Now().Add(suspectGrace)
	for s.suspect.Load() && !closed(s.gone) {
		if time.Now().After(deadline) {
			silent := time.Duration(n.monotonic() - s.heard.Load()).Round(100 * time.Millisecond)
			return nil, fault.New(fault.Unreachable, "call %s: it has been silent for %s", s.peer, silent)
		}
		if !sleep(ctx, 20*time.Millisecond) {
			return nil, ctxFault(ctx, "call", s.peer)
		}
	}
	return s, nil
}

func (n *Node) runDial(p peer.ID, d *dialing, pause time.Duration) {
	ctx, cancel := context.WithTimeout(n.ctx, dialLimit)
	defer cancel()
	if pause <= 0 || sleep(ctx, pause) {
		patient := n.dials.thinBy(p) != ""
		if patient {
			var more context.CancelFunc
			ctx, more = context.WithTimeout(n.ctx, dialLimit+patientLimit)
			defer more()
		}
		d.session, d.err = n.find(ctx, d.search)
		if patient || d.err == nil {
			n.dials.clearThin(p)
		}
	} else {
		d.err = fault.New(fault.Unreachable, "connect to %s: this node is closing", p)
	}
	n.dials.mu.Lock()
	delete(n.dials.running, p)
	if d.err == nil {
		delete(n.dials.failed, p)
	} else {
		f := n.dials.failed[p]
		if f == nil {
			if len(n.dials.failed) > 4096 {
				clear(n.dials.failed)
			}
			f = &failure{}
			n.dials.failed[p] = f
		}
		wait := min(backoffFirst<<min(f.count, 4), backoffMost)
		f.count++
		f.until = time.Now().Add(wait/2 + rand.N(wait))
	}
	n.dials.mu.Unlock()
	close(d.done)
}

// find tries the ways to a peer in turn: the address book (given, known), the last
// good on disk, the DHT, cards, relays. A way that takes long gets company; the
// first connection that is admitted wins. A refusal ends the search. What it does
// is written into the search as it goes.
func (n *Node) find(ctx context.Context, s *search) (won *session, err error) {
	s.start()
	defer func() { s.end(won, err) }() // last: the ways have ended by then
	ctx, cancel := context.WithCancel(ctx)
	ways := n.ways(s)
	results := make(chan found, len(ways))
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()

	next, pending := 0, 0
	for {
		if pending == 0 && next == len(ways) {
			return nil, fault.New(fault.Unreachable, "reach %s%s: no way worked%s", s.peer, n.named(s.peer), s.lines())
		}
		var timer <-chan time.Time
		var t *time.Timer
		if next < len(ways) {
			w := ways[next]
			next++
			pending++
			running.Add(1)
			go func() {
				defer running.Done()
				w.record.begin()
				r := found{}
				r.session, r.err = w.try(ctx, w.record)
				w.record.end(r.session, r.err)
				results <- r
			}()
			t = time.NewTimer(w.alone)
			timer = t.C
		}
		select {
		case r := <-results:
			pending--
			switch {
			case r.err == nil:
				stop(t)
				return r.session, nil
			case final(r.err):
				stop(t)
				return nil, r.err
			}
		case <-timer:
		case <-ctx.Done():
			stop(t)
			if n.ctx.Err() != nil {
				return nil, fault.New(fault.Unreachable, "reach %s: this node is closing", s.peer)
			}
			return nil, fault.New(fault.Unreachable, "reach %s%s: no way worked in %s%s", s.peer, n.named(s.peer), dialLimit, s.lines())
		}
		stop(t)
	}
}

// found is what one way of finding a peer came to.
type found struct {
	session *session
	err     error
}

// final tells whether another way to the peer would meet the same refusal.
func final(err error) bool {
	return fault.Is(err, fault.Denied) || fault.Is(err, fault.Unauthenticated) || fault.Is(err, fault.FailedPrecondition)
}

func stop(t *time.Timer) {
	if t != nil {
		t.Stop()
	}
}

// errNothing says that a way had nothing to try.
var errNothing = errors.New("nothing to try")

// way is one way of finding a peer.
type way struct {
	record *wayRecord
	// alone is how long it runs before the next one starts beside it.
	alone time.Duration
	try   func(ctx context.Context, w *wayRecord) (*session, error)
}

func (n *Node) ways(s *search) []way {
	p := s.peer
	n.recallListed(p)
	book := n.host.Peerstore().Addrs(p)
	ways := []way{{s.way("address book"), stageHead, func(ctx context.Context, w *wayRecord) (*session, error) {
		if len(book) == 0 && len(n.sessions.to(p)) == 0 {
			return nil, errNothing
		}
		w.lists(book)
		return n.dial(ctx, p)
	}}}
	if last := n.book.recall(p); last != nil && !ma.Contains(book, last) {
		ways[0].alone = 0 // both are as good
		ways = append(ways, way{s.way("disk"), stageHead, func(ctx context.Context, w *wayRecord) (*session, error) {
			return n.dialAt(ctx, w, []ma.Multiaddr{last})
		}})
	}
	if n.kad != nil {
		ways = append(ways, way{s.way("dht"), dhtHead, func(ctx context.Context, w *wayRecord) (*session, error) {
			within, cancel := context.WithTimeout(ctx, 8*time.Second)
			defer cancel()
			info, err := n.kad.FindPeer(within, p)
			if err != nil {
				return nil, err
			}
			return n.dialAt(within, w, info.Addrs)
		}})
	}
	if n.asksForCard(p) {
		ways = append(ways, way{s.way("cards"), stageHead, n.dialByCard})
	}
	if !n.isBootstrap(p) && !s.direct {
		ways = append(ways, way{s.way("relays"), stageHead, n.dialByRelay})
	}
	return ways
}

// asksForCard tells whether bootstraps are asked where p is: by members for anybody, by
// agents for wrk-ork, which may have moved since their seed was written.
func (n *Node) asksForCard(p peer.ID) bool {
	if n.isBootstrap(p) {
		return false
	}
	kind := n.credential().kind
	return kind == showsRoster || kind == showsCertificate && n.network.HasRole(p, meshv1.Role_ROLE_ORK)
}

func (n *Node) named(p peer.ID) string {
	if m, ok := n.network.Known(p); ok {
		return fmt.Sprintf(" (%s)", m.GetName())
	}
	return ""
}

// nameOf is p's name in the roster, else its key.
func (n *Node) nameOf(p peer.ID) string {
	if m, ok := n.network.Known(p); ok {
		return m.GetName()
	}
	return p.String()
}

// dialAt adds addresses and dials.
func (n *Node) dialAt(ctx context.Context, w *wayRecord, addrs []ma.Multiaddr) (*session, error) {
	if len(addrs) == 0 {
		return nil, errNothing
	}
	addrs = addrs[:min(len(addrs), addressesPerPeer)]
	w.lists(addrs)
	n.host.Peerstore().AddAddrs(w.search.peer, addrs, peerstore.TempAddrTTL)
	return n.dial(ctx, w.search.peer)
}

// dial connects by the addresses in the address book and waits for admission.
func (n *Node) dial(ctx context.Context, p peer.ID) (*session, error) {
	// Pauses between tries are this package's; the library's would shun a
	// restarted peer for minutes.
	n.swarm().Backoff().Clear(p)
	for {
		conn, err := n.host.Network().DialPeer(network.WithAllowLimitedConn(ctx, "mesh"), p)
		if err != nil {
			return nil, err
		}
		s := n.sessions.dialed(conn)
		if s == nil {
			return nil, fault.New(fault.Unreachable, "the connection to %s ended at once", p)
		}
		if err = s.wait(ctx); err == nil {
			return s, nil
		}
		// The library gives a connection that stands before it makes one, and that may be
		// one that is refused, or was a moment ago, for what this node showed then.
		if !s.outdated(n.shows()) {
			return nil, err
		}
		_ = conn.Close()
	}
}

// dialByRelay dials through the relays at the bootstraps.
func (n *Node) dialByRelay(ctx context.Context, w *wayRecord) (*session, error) {
	var addrs []ma.Multiaddr
	for _, b := range n.bootstraps() {
		if b.ID == n.id {
			continue
		}
		if _, err := n.connect(ctx, b.ID); err != nil {
			w.note("relay %s: %s", n.nameOf(b.ID), shortError(err))
			continue
		}
		a, err := ma.NewMultiaddr("/p2p/" + b.ID.String() + "/p2p-circuit")
		if err == nil {
			addrs = append(addrs, a)
		}
	}
	return n.dialAt(ctx, w, addrs)
}

// learn puts given addresses into the address book.
func (n *Node) learn(p peer.ID, addrs []string) {
	if len(addrs) == 0 || p == n.id {
		return
	}
	var list []ma.Multiaddr
	for _, text := range addrs[:min(len(addrs), addressesPerPeer)] {
		a, err := ma.NewMultiaddr(text)
		if err != nil {
			n.log.Debug("a given address is no multiaddress", "key", p, "address", text)
			continue
		}
		at, id := peer.SplitAddr(a)
		if at == nil || (id != "" && id != p) {
			continue
		}
		list = append(list, at)
	}
	n.host.Peerstore().AddAddrs(p, list, learnedTTL)
}

// recall puts what the bootstrap list, the own grant and the disk know of p into
// the address book.
func (n *Node) recall(p peer.ID) {
	n.recallListed(p)
	if a := n.book.recall(p); a != nil {
		n.host.Peerstore().AddAddr(p, a, learnedTTL)
	}
}

// recallListed leaves the disk out.
func (n *Node) recallListed(p peer.ID) {
	for _, b := range n.bootstraps() {
		if b.ID == p {
			n.host.Peerstore().AddAddrs(p, b.Addrs, learnedTTL)
		}
	}
	if own := n.credential(); own.kind == showsGrant {
		if g, err := trust.OpenGrant(own.grant); err == nil && g.GetAgentKey() == p.String() {
			n.learn(p, g.GetAgentAddresses())
		}
	}
}

// bootstraps are the network's, or the options' while none are known.
func (n *Node) bootstraps() []peer.AddrInfo {
	list := n.network.Info().GetBootstraps()
	if len(list) == 0 {
		list = n.o.Bootstraps
	}
	var infos []peer.AddrInfo
	for _, b := range list {
		id, err := peer.Decode(b.GetKey())
		if err != nil {
			continue
		}
		info := peer.AddrInfo{ID: id}
		for _, text := range b.GetAddresses() {
			if a, err := ma.NewMultiaddr(text); err == nil {
				if at, _ := peer.SplitAddr(a); at != nil {
					info.Addrs = append(info.Addrs, at)
				}
			}
		}
		infos = append(infos, info)
	}
	return infos
}

func (n *Node) isBootstrap(p peer.ID) bool {
	for _, b := range n.bootstraps() {
		if b.ID == p {
			return true
		}
	}
	return false
}
