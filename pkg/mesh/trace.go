package mesh

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	kbucket "github.com/libp2p/go-libp2p-kbucket"
	"github.com/libp2p/go-libp2p/core/network"
	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/libp2p/go-libp2p/core/routing"
	"github.com/libp2p/go-libp2p/p2p/net/swarm"
	ma "github.com/multiformats/go-multiaddr"
	"google.golang.org/protobuf/types/known/timestamppb"
)

const (
	// searchesKept bounds how many peers' last searches are remembered.
	searchesKept = 256
	// dialsPerSearch bounds the addresses that one search writes down.
	dialsPerSearch = 128
	// Bounds of an error's text: addresses of a way, and runes of its line.
	addressesPerLine, lineMost = 4, 320
)

// What became of a way or an address.
const (
	resultWon       = "won"
	resultConnected = "connected"
	resultFailed    = "failed"
	resultDenied    = "denied"
	resultNothing   = "nothing"
	resultGivenUp   = "given up"
	resultNotNeeded = "not needed"
	resultNotDialed = "not dialed"
)

// search is the record of one search for a peer. The dials themselves write it:
// what it shows is what was done. It is safe for concurrent use; once ended it
// does not change.
type search struct {
	n      *Node
	peer   peer.ID
	direct bool // relays are left out, and a relayed connection counts for nothing

	mu    sync.Mutex
	began time.Time
	took  time.Duration
	ended bool
	ways  []*wayRecord
	dials []*dialRecord
	won   ma.Multiaddr // the address that the winning connection goes over; nil when none won
	err   error
}

// wayRecord is what one way did. Its search's lock guards it.
type wayRecord struct {
	search *search
	name   string
	began  time.Time // zero: not begun
	took   time.Duration
	ended  bool
	won    bool
	err    error
	listed []ma.Multiaddr
	notes  []string
}

// dialRecord is one dial of one address.
type dialRecord struct {
	address ma.Multiaddr
	began   time.Time
	took    time.Duration
	ended   bool
	err     error
}

func newSearch(n *Node, p peer.ID) *search { return &search{n: n, peer: p, began: time.Now()} }

// start makes the search be told of dials.
func (s *search) start() {
	s.mu.Lock()
	s.began = time.Now()
	s.mu.Unlock()
	d := s.n.dials
	d.mu.Lock()
	defer d.mu.Unlock()
	d.searches[s.peer] = append(d.searches[s.peer], s)
}

// end closes the record and remembers it as the peer's last.
func (s *search) end(won *session, err error) {
	s.mu.Lock()
	s.took, s.ended, s.err = time.Since(s.began), true, err
	if won != nil {
		s.won = won.conn.RemoteMultiaddr()
	}
	for _, w := range s.ways {
		s.n.metrics.way(w.name, w.result())
	}
	s.mu.Unlock()
	d := s.n.dials
	d.mu.Lock()
	defer d.mu.Unlock()
	d.searches[s.peer] = slices.DeleteFunc(d.searches[s.peer], func(o *search) bool { return o == s })
	if len(d.searches[s.peer]) == 0 {
		delete(d.searches, s.peer)
	}
	if _, ok := d.past[s.peer]; !ok && len(d.past) >= searchesKept {
		clear(d.past)
	}
	d.past[s.peer] = s
}

func (s *search) way(name string) *wayRecord {
	w := &wayRecord{search: s, name: name}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ways = append(s.ways, w)
	return w
}

func (w *wayRecord) begin() {
	w.search.mu.Lock()
	defer w.search.mu.Unlock()
	w.began = time.Now()
}

// lists says which addresses the way has.
func (w *wayRecord) lists(addrs []ma.Multiaddr) {
	w.search.mu.Lock()
	defer w.search.mu.Unlock()
	w.listed = slices.Clone(addrs[:min(len(addrs), addressesPerPeer)])
}

// note adds a reason that no address has.
func (w *wayRecord) note(format string, a ...any) {
	w.search.mu.Lock()
	defer w.search.mu.Unlock()
	w.notes = append(w.notes, fmt.Sprintf(format, a...))
}

func (w *wayRecord) end(won *session, err error) {
	w.search.mu.Lock()
	defer w.search.mu.Unlock()
	w.took, w.ended, w.won, w.err = time.Since(w.began), true, won != nil, err
	// Addresses that the library did not even dial have their reason here alone.
	var all *swarm.DialError
	if !errors.As(err, &all) {
		return
	}
	for _, one := range all.DialErrors {
		if d := w.dial(one.Address); d == nil {
			w.search.add(&dialRecord{address: one.Address, ended: true, err: one.Cause})
		} else if errors.Is(d.err, errCircuit) {
			d.err = one.Cause // which says more
		}
	}
}

// dial is the dial of an address that the way made or shares: the first that had
// not ended when the way began, else the last before, which the library does not
// repeat while any dial of the peer runs.
func (w *wayRecord) dial(a ma.Multiaddr) (earlier *dialRecord) {
	for _, d := range w.search.dials {
		if !d.address.Equal(a) {
			continue
		}
		if !d.ended || !d.began.Add(d.took).Before(w.began) {
			return d
		}
		earlier = d
	}
	return earlier
}

func (s *search) add(d *dialRecord) {
	if len(s.dials) < dialsPerSearch {
		s.dials = append(s.dials, d)
	}
}

// result is what became of the way; its search's lock is held.
func (w *wayRecord) result() string {
	canceled := isCanceled(w.err) || fault.Is(w.err, fault.Canceled)
	switch {
	case w.began.IsZero():
		return resultNotNeeded
	case w.won:
		return resultWon
	case !w.ended || (canceled && w.search.won != nil):
		return resultGivenUp
	case errors.Is(w.err, errNothing) && len(w.notes) == 0:
		return resultNothing
	case fault.Is(w.err, fault.Denied):
		return resultDenied
	}
	return resultFailed
}

// reason says why the way did not win; empty when its addresses say it.
func (w *wayRecord) reason() string {
	notes := w.notes
	var all *swarm.DialError
	switch err := w.err; {
	case err == nil, errors.Is(err, errNothing), w.result() == resultGivenUp:
	case errors.As(err, &all) && len(all.DialErrors) > 0:
	case errors.Is(err, routing.ErrNotFound):
		notes = append(slices.Clone(notes), "nobody there knows it")
	case errors.Is(err, kbucket.ErrLookupFailure):
		notes = append(slices.Clone(notes), "no member of the dht is connected")
	case fault.Is(err, fault.NotFound):
		notes = append(slices.Clone(notes), "no bootstrap holds its card")
	default:
		notes = append(slices.Clone(notes), shortError(err))
	}
	return strings.Join(notes, ", ")
}

// describe is the record as it stands.
func (s *search) describe() *meshv1.PeerTrace {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := &meshv1.PeerTrace{Key: s.peer.String(), SearchedAt: timestamppb.New(s.began), TookMicroseconds: micro(s.took)}
	if !s.ended {
		t.TookMicroseconds = micro(time.Since(s.began))
	}
	if m, ok := s.n.network.Known(s.peer); ok {
		t.Name = m.GetName()
	}
	claimed := make(map[*dialRecord]bool)
	for _, w := range s.ways {
		tw := &meshv1.TraceWay{Name: w.name, Result: w.result(), Reason: w.reason(), TookMicroseconds: micro(w.took)}
		if !w.began.IsZero() {
			tw.BeganMicroseconds = micro(w.began.Sub(s.began))
			if !w.ended {
				tw.TookMicroseconds = micro(time.Since(w.began))
			}
		}
		for _, a := range w.listed {
			d := w.dial(a)
			claimed[d] = true
			tw.Addresses = append(tw.Addresses, s.describeDial(a, d))
		}
		t.Ways = append(t.Ways, tw)
	}
	// What was dialed under no listed name came out of a /dns name, or of another
	// part of this process that dialed the same peer meanwhile.
	for _, d := range s.dials {
		if claimed[d] || len(t.Ways) == 0 {
			continue
		}
		w := t.Ways[0]
		for i, o := range s.ways {
			if !o.began.IsZero() && !o.began.After(d.began) {
				w = t.Ways[i]
			}
		}
		w.Addresses = append(w.Addresses, s.describeDial(d.address, d))
	}
	if s.err != nil {
		t.FaultKind, t.Message = string(fault.KindOf(s.err)), withoutLines(s.err)
	}
	return t
}

func (s *search) describeDial(a ma.Multiaddr, d *dialRecord) *meshv1.TraceAddress {
	t := &meshv1.TraceAddress{Address: a.String(), Transport: transportOf(a)}
	if d == nil || d.began.IsZero() {
		t.Result = resultNotDialed
		if d != nil {
			t.Reason = shortError(d.err)
		}
		return t
	}
	t.BeganMicroseconds, t.TookMicroseconds = micro(d.began.Sub(s.began)), micro(d.took)
	switch {
	case d.ended && d.err == nil && s.carries(a):
		t.Result = resultWon
	case d.ended && d.err == nil:
		t.Result = resultConnected
	case !d.ended, s.won != nil && (isCanceled(d.err) || errors.Is(d.err, errCircuit)):
		t.Result = resultGivenUp
	default:
		t.Result, t.Reason = resultFailed, shortError(d.err)
		if dialResult(d.err) == "timeout" {
			t.Reason = fmt.Sprintf("no answer in %s", d.took.Round(100*time.Millisecond))
		}
	}
	return t
}

// carries tells whether the connection that won goes over the address.
func (s *search) carries(a ma.Multiaddr) bool {
	if s.won == nil {
		return false
	}
	if isRelayed(a) {
		return isRelayed(s.won) && relayOf(a) == relayOf(s.won)
	}
	return a.Equal(s.won)
}

// lines are the reasons for an error's text: one line a way, bounded, and where to
// see more.
func (s *search) lines() string {
	t := s.describe()
	var b strings.Builder
	b.WriteString(linesBegin + s.hint() + ")")
	empty := true
	for _, w := range t.Ways {
		var parts []string
		for i, a := range w.Addresses {
			if i == addressesPerLine {
				parts = append(parts, fmt.Sprintf("%d more", len(w.Addresses)-i))
				break
			}
			parts = append(parts, fmt.Sprintf("%s (%s)", s.shortAddress(a.Address), cmp.Or(a.Reason, a.Result)))
		}
		if w.Reason != "" {
			parts = append(parts, w.Reason)
		}
		if len(parts) > 0 {
			empty = false
			b.WriteString("\n  " + cutLine(w.Name+": "+strings.Join(parts, ", "), lineMost))
		}
	}
	if empty {
		b.WriteString("\n  no address is known")
	}
	return b.String()
}

// linesBegin stands before the lines, so that they can be left out where the whole
// search is shown beside.
const linesBegin = " (all of it: "

func withoutLines(err error) string {
	text, _, _ := strings.Cut(err.Error(), linesBegin)
	return clean(text)
}

// hint is the command that shows the whole search.
func (s *search) hint() string {
	hint := "cosmicac mesh trace " + s.n.nameOf(s.peer)
	if m, ok := s.n.network.Known(s.n.id); ok && s.n.o.Role != meshv1.Role_ROLE_OPERATOR {
		hint += " --from " + m.GetName()
	}
	return hint
}

// shortAddress writes a multiaddress for people: "tcp 10.0.0.1:4811".
func (s *search) shortAddress(text string) string {
	a, err := ma.NewMultiaddr(text)
	if err != nil {
		return text
	}
	if isRelayed(a) {
		return "relay " + s.n.nameOf(relayOf(a))
	}
	return transportOf(a) + " " + hostPort(a)
}

// Trace finds p as every call does and tells what was tried. A connection that
// stands is taken as it is, except that a relayed one makes it look for a direct
// one. It takes as long as the search, at most 20 s; when ctx ends before, it tells
// how far the search came, which goes on.
func (n *Node) Trace(ctx context.Context, p peer.ID) *meshv1.PeerTrace {
	standing := n.sessions.best(p)
	if standing != nil && standing.relayed {
		s := newSearch(n, p)
		s.direct = true
		within, cancel := context.WithTimeout(network.WithForceDirectDial(ctx, "trace"), dialLimit)
		_, _ = n.find(within, s) // the trace says what came of it
		cancel()
	}
	_, err := n.connect(ctx, p)
	n.dials.mu.Lock()
	record := n.dials.past[p]
	if running := n.dials.running[p]; running != nil {
		record = running.search
	}
	n.dials.mu.Unlock()
	t := &meshv1.PeerTrace{Key: p.String()}
	if record != nil {
		t = record.describe()
	} else if m, ok := n.network.Known(p); ok {
		t.Name = m.GetName()
	}
	t.Reused = standing != nil && !standing.relayed
	t.FaultKind, t.Message = "", ""
	if err != nil {
		t.FaultKind, t.Message = string(fault.KindOf(err)), withoutLines(err)
		return t
	}
	t.Path = n.Path(ctx, p)
	return t
}

// Path is the connection that calls to p take, with a fresh round trip; nil when
// there is none.
func (n *Node) Path(ctx context.Context, p peer.ID) *meshv1.Peer {
	s := n.sessions.best(p)
	if s == nil {
		return nil
	}
	if s.pinging.CompareAndSwap(false, true) {
		limit := daemonPatience.close
		if deadline, ok := ctx.Deadline(); ok {
			limit = min(limit, time.Until(deadline))
		}
		n.ping(s, limit)
		s.pinging.Store(false)
	}
	return s.describe()
}

func micro(d time.Duration) int64 { return d.Microseconds() }
