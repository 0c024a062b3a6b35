package mesh

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	"github.com/libp2p/go-libp2p/core/network"
	"github.com/libp2p/go-libp2p/core/peer"
	ma "github.com/multiformats/go-multiaddr"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// session is one connection and what the admit dialogue made of it. A peer may
// have several; each is admitted by itself.
type session struct {
	conn    network.Conn
	peer    peer.ID
	inbound bool
	relayed bool
	address string // of the peer, as text: made once, shown with every call
	opened  time.Time
	gone    chan struct{} // closed with the connection
	ended   time.Time     // guarded by sessions.mu

	aside   *aside       // of QUIC
	guard   *guarded     // of what was accepted; nil through a relay
	life    *pulse       // watch alone asks it
	heard   atomic.Int64 // monotonic nanoseconds since the node's start
	doubted atomic.Int64 // when a sign of life was last asked for, on the same clock
	suspect atomic.Bool
	watched atomic.Int32 // times somebody wants silence noticed
	calls   atomic.Int32 // RPC links and the like, for pacing bulk
	pinging atomic.Bool
	asking  atomic.Int32 // introductions of this node that run
	rtt     atomic.Int64 // nanoseconds of the last ping
	streams atomic.Int32 // open streams of the mesh, both ways
	pace    pacer        // of this side's bulk

	upgrades upgrades
	told     atomic.Bool // a telling of newer records runs

	mu         sync.Mutex
	who        *Caller // the peer, once this node admitted it
	credential *meshv1.Credential
	shown      shown         // what this node showed in the last dialogue
	welcome    bool          // the peer admitted this node
	err        error         // the refusal or the end
	known      chan struct{} // closed when who or err is set
	settled    chan struct{} // closed when who and welcome, or err, are set
	roster     uint64        // the newest versions the peer is known to hold
	info       uint64
	pings      *pinger
}

func newSession(c network.Conn, life *pulse, now int64) *session {
	s := &session{
		conn: c, life: life, peer: c.RemotePeer(), inbound: c.Stat().Direction == network.DirInbound,
		relayed: isRelayed(c.RemoteMultiaddr()), address: c.RemoteMultiaddr().String(), opened: time.Now(),
		gone: make(chan struct{}), known: make(chan struct{}), settled: make(chan struct{}),
	}
	s.heard.Store(now)
	c.As(&s.aside)
	if c.As(&s.guard) {
		s.known = s.guard.known
	}
	return s
}

// oneDial is how far connections that the same dial made may be apart.
const oneDial = 2 * time.Second

// rank orders the kinds of connection: relayed, QUIC, TCP, which costs less and
// dies loudly.
func (s *session) rank() int {
	switch {
	case s.relayed:
		return 0
	case s.transport() == "quic":
		return 1
	}
	return 2
}

func isRelayed(a ma.Multiaddr) bool {
	_, err := a.ValueForProtocol(ma.P_CIRCUIT)
	return err == nil
}

func closed(c chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// closeOnce closes c if it is open; the session's lock is held.
func closeOnce(c chan struct{}) {
	if !closed(c) {
		close(c)
	}
}

// caller returns the admitted peer.
func (s *session) caller() (Caller, bool) {
	if c := s.callerNow(); c != nil {
		return *c, true
	}
	return Caller{}, false
}

// callerNow is the admitted peer, nil if there is none. Nobody may change it: calls that run share it.
func (s *session) callerNow() *Caller {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return nil
	}
	return s.who
}

// admit records that this node admitted the peer.
func (s *session) admit(c Caller, shown *meshv1.Credential) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c.Address = s.address
	s.who, s.credential = &c, shown
	if s.guard != nil {
		s.guard.admitted.Store(true)
	}
	closeOnce(s.known)
	if s.welcome {
		closeOnce(s.settled)
	}
}

// shown tells apart what a node shows of itself at different times: a refusal counts
// for what was shown, and says nothing once that has changed.
type shown struct{ roster, credential uint64 }

// shows records what this node shows in a dialogue that begins.
func (s *session) shows(what shown) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.shown = what
}

// outdated tells whether the session was refused for what this node no longer shows.
func (s *session) outdated(now shown) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return final(s.err) && s.shown != now
}

// welcomed records that the peer admitted this node.
func (s *session) welcomed() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.welcome = true
	if s.who != nil {
		closeOnce(s.settled)
	}
}

// fail records the refusal or the end, once; the first one counts.
func (s *session) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err == nil {
		s.err = err
	}
	closeOnce(s.known)
	closeOnce(s.settled)
}

func (s *session) failEnded() {
	if s.ending() == nil {
		s.fail(fault.New(fault.Unreachable, "the connection to %s ended", s.peer))
	}
}

// ending is the refusal or the end, nil while neither is known.
func (s *session) ending() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// ready tells whether both sides admitted each other and nothing ended it.
func (s *session) ready() bool {
	if !closed(s.settled) || closed(s.gone) || s.conn.IsClosed() {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err == nil
}

// wait blocks until both sides have spoken.
func (s *session) wait(ctx context.Context) error {
	select {
	case <-s.settled:
	case <-ctx.Done():
		return ctxFault(ctx, "be admitted by", s.peer)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// admitted blocks until this node has judged the peer, at most limit.
func (s *session) admitted(limit time.Duration) (Caller, bool) {
	t := time.NewTimer(limit)
	defer t.Stop()
	select {
	case <-s.known:
	case <-s.gone:
	case <-t.C:
	}
	return s.caller()
}

func (s *session) holds(roster, info uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.roster, s.info = max(s.roster, roster), max(s.info, info)
}

func (s *session) held() (roster, info uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.roster, s.info
}

func ctxFault(ctx context.Context, what string, p peer.ID) error {
	if ctx.Err() == context.DeadlineExceeded {
		return fault.Wrap(fault.Timeout, ctx.Err(), "%s %s", what, p)
	}
	return fault.Wrap(fault.Canceled, ctx.Err(), "%s %s", what, p)
}

// transport names the way for people: "tcp" or "quic".
func (s *session) transport() string {
	if _, err := s.conn.RemoteMultiaddr().ValueForProtocol(ma.P_QUIC_V1); err == nil && !s.relayed {
		return "quic"
	}
	return "tcp"
}

func (s *session) describe() *meshv1.Peer {
	p := &meshv1.Peer{
		Key: s.peer.String(), Transport: s.transport(), Relayed: s.relayed, Inbound: s.inbound,
		Address: s.address, ConnectedAt: timestamppb.New(s.opened),
		Suspect: s.suspect.Load(), RoundTripMicroseconds: s.rtt.Load() / 1000,
	}
	if c, ok := s.caller(); ok {
		p.Class, p.Name, p.Roles = c.Class, c.Name(), c.Member.GetRoles()
	}
	return p
}

// sessions holds every connection of the node.
type sessions struct {
	mu    sync.Mutex
	byID  map[network.Conn]*session
	peers map[peer.ID][]*session
	past  map[string]*session // by the connection's id; ended a moment ago: a dialer may still ask why
}

// pastMost bounds the ended sessions that are remembered.
const pastMost = 4096

func newSessions() *sessions {
	return &sessions{byID: make(map[network.Conn]*session), peers: make(map[peer.ID][]*session), past: make(map[string]*session)}
}

// begin makes the session of a new connection. The library says Connected before
// it hands out the connection or its streams, and Disconnected after that.
func (t *sessions) begin(c network.Conn, life *pulse, now int64) *session {
	s := newSession(c, life, now)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.byID[c] = s
	t.peers[s.peer] = append(t.peers[s.peer], s)
	return s
}

// get returns the session of a connection, nil when it has ended.
func (t *sessions) get(c network.Conn) *session {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.byID[c]
}

// dialed returns the session of a connection that a dial gave, also when it ended
// before the dial returned: a refusal is that quick.
func (t *sessions) dialed(c network.Conn) *session {
	t.mu.Lock()
	defer t.mu.Unlock()
	if s := t.byID[c]; s != nil {
		return s
	}
	return t.past[c.ID()]
}

// forgetPast drops what ended longer ago.
func (t *sessions) forgetPast(older time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for c, s := range t.past {
		if time.Since(s.ended) > older {
			delete(t.past, c)
		}
	}
}

// end removes the session of a closed connection.
func (t *sessions) end(c network.Conn) {
	s := t.get(c)
	if s == nil {
		return
	}
	closeOnce(s.gone)
	past := s
	if s.asking.Load() == 0 { // else the introduction says why: a refusal closes too
		s.failEnded()
		past = s.remains()
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.byID, c)
	if len(t.past) >= pastMost {
		clear(t.past)
	}
	past.ended = time.Now()
	t.past[c.ID()] = past
	rest := t.peers[s.peer][:0:0]
	for _, o := range t.peers[s.peer] {
		if o != s {
			rest = append(rest, o)
		}
	}
	if len(rest) == 0 {
		delete(t.peers, s.peer)
	} else {
		t.peers[s.peer] = rest
	}
}

// remains is what is kept of an ended session: why it ended, and not the connection,
// whose buffers strangers would fill memory with.
func (s *session) remains() *session {
	s.mu.Lock()
	defer s.mu.Unlock()
	return &session{peer: s.peer, inbound: s.inbound, gone: s.gone, known: s.known, settled: s.settled, shown: s.shown, err: s.err}
}

func (t *sessions) all() []*session {
	t.mu.Lock()
	defer t.mu.Unlock()
	list := make([]*session, 0, len(t.byID))
	for _, s := range t.byID {
		list = append(list, s)
	}
	return list
}

func (t *sessions) to(p peer.ID) []*session {
	t.mu.Lock()
	defer t.mu.Unlock()
	return append([]*session(nil), t.peers[p]...)
}

// best picks which session new streams to p should take: admitted both ways,
// not suspect before suspect, direct before relayed, younger before older (a peer
// that dials again has often lost the old one). Of those that one dial made it is
// the better kind.
func (t *sessions) best(p peer.ID) *session {
	var best *session
	for _, s := range t.to(p) {
		if s.ready() && (best == nil || better(s, best)) {
			best = s
		}
	}
	return best
}

func better(a, b *session) bool {
	if x, y := a.suspect.Load(), b.suspect.Load(); x != y {
		return y
	}
	if a.relayed != b.relayed {
		return b.relayed
	}
	if a.rank() != b.rank() && a.opened.Sub(b.opened).Abs() < oneDial {
		return a.rank() > b.rank()
	}
	return a.opened.After(b.opened)
}

// anyAdmitted tells whether some connection of p is admitted here.
func (t *sessions) anyAdmitted(p peer.ID) (Caller, bool) {
	for _, s := range t.to(p) {
		if c, ok := s.caller(); ok {
			return c, true
		}
	}
	return Caller{}, false
}
