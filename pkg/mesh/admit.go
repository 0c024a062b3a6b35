package mesh

import (
	"context"
	"errors"
	"io"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/mesh/internal/frame"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	"github.com/libp2p/go-libp2p/core/network"
	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/multiformats/go-multistream"
)

const (
	// admitLimit bounds one admit dialogue, and how long a connection may stay
	// without one.
	admitLimit = 5 * time.Second
	// partLimit is how long a refusing side waits for the refused to have read why.
	partLimit = 3 * time.Second
	// dialerRoster is the largest roster a dialer shows unasked: its frame must
	// fit a stranger's bound. A larger one goes to members that refused without it.
	dialerRoster = 10 << 10
	dialerInfo   = 4 << 10

	admitsPerPrefix, admitsTotal = 512, 2048 // dialogues at a time
	guestsPerPrefix, guestsTotal = 16, 256   // connections of class guest or joining
	joiningTotal                 = 4096
)

// introduce runs the dialer's side of the dialogue on s.
func (n *Node) introduce(ctx context.Context, s *session) error {
	ctx, cancel := context.WithTimeout(ctx, n.admitTime(s))
	defer cancel()
	s.asking.Add(1)
	err := n.introduceOnce(ctx, s)
	n.metrics.admit("out", err)
	if err != nil {
		if ctx.Err() == context.DeadlineExceeded && !s.inbound && !s.relayed {
			n.dials.setThin(s.peer, s.transport())
		}
		s.fail(err)
		s.asking.Add(-1)
		_ = s.conn.Close()
		return err
	}
	if s.asking.Add(-1); closed(s.gone) {
		s.failEnded()
	}
	n.settled(s)
	return nil
}

func (n *Node) introduceOnce(ctx context.Context, s *session) error {
	s.shows(n.shows())
	if err := n.unjoined(s); err != nil {
		return err
	}
	stream, err := n.negotiate(ctx, s, n.protocol(admitName))
	if err != nil {
		var unsupported multistream.ErrNotSupported[protocolID]
		if errors.As(err, &unsupported) {
			return n.wasRefused(s, fault.New(fault.Denied, "%s is not of network %s", s.peer, n.network.ID()))
		}
		return fault.Wrap(fault.Unreachable, err, "introduce this node to %s", s.peer)
	}
	defer stream.Close()
	deadline, _ := ctx.Deadline()
	_ = stream.SetDeadline(deadline)
	if err := frame.Write(stream, n.credentialForDial(s)); err != nil {
		_ = stream.Reset()
		return fault.Wrap(fault.Unreachable, err, "introduce this node to %s", s.peer)
	}
	var verdict meshv1.Verdict
	if err := frame.Read(stream, frame.Member, &verdict); err != nil {
		_ = stream.Reset()
		return fault.Wrap(fault.Unreachable, err, "introduce this node to %s: no verdict", s.peer)
	}
	if !verdict.GetOk() {
		n.bringNext(s.peer)
		return n.wasRefused(s, verdictFault(s, &verdict))
	}
	caller, err := n.judge(ctx, s, verdict.GetCredential())
	if err != nil {
		_ = frame.Write(stream, refusal(err))
		part(stream)
		n.refused(s, err)
		return err
	}
	if err := n.admit(s, caller, verdict.GetCredential()); err != nil {
		_ = frame.Write(stream, refusal(err))
		part(stream)
		return err
	}
	n.learnKey(caller, verdict.GetNetworkKey())
	if err := frame.Write(stream, n.verdictFor(caller, nil)); err != nil {
		_ = stream.Reset()
		return fault.Wrap(fault.Unreachable, err, "answer %s", s.peer)
	}
	_ = stream.CloseWrite()
	s.welcomed()
	return nil
}

// serveAdmit runs the listener's side.
func (n *Node) serveAdmit(stream network.Stream) {
	done, ok := n.work()
	if !ok {
		_ = stream.Reset()
		return
	}
	defer done()
	s := n.sessions.get(stream.Conn())
	if s == nil {
		_ = stream.Reset()
		return
	}
	s.heard.Store(n.monotonic())
	release, ok := n.admits.acquire(prefixOf(s.conn.RemoteMultiaddr()), admitsPerPrefix, admitsTotal)
	if !ok {
		_ = stream.ResetWithError(network.StreamRateLimited)
		return
	}
	defer release()
	err := n.answer(stream, s)
	n.metrics.admit("in", err)
	if err != nil {
		s.fail(err)
		_ = s.conn.Close()
		return
	}
	n.settled(s)
}

func (n *Node) answer(stream network.Stream, s *session) error {
	defer stream.Close()
	within := n.admitTime(s)
	_ = stream.SetDeadline(time.Now().Add(within))
	ctx, cancel := context.WithTimeout(n.ctx, within)
	defer cancel()
	limit := frame.Guest
	if _, ok := n.network.Known(s.peer); ok { // of an expired roster too: it may bring the next
		limit = frame.Member
	}
	var shown meshv1.Credential
	if err := frame.Read(stream, limit, &shown); err != nil {
		_ = stream.ResetWithError(network.StreamProtocolViolation)
		n.refused(s, err)
		return err
	}
	s.shows(n.shows())
	if err := n.unjoined(s); err != nil {
		// No refusal of the peer: it may come again once this node has joined.
		_ = frame.Write(stream, refusal(err))
		part(stream)
		return err
	}
	caller, err := n.judge(ctx, s, &shown)
	if err != nil {
		_ = frame.Write(stream, refusal(err))
		part(stream)
		n.refused(s, err)
		return err
	}
	// Before the verdict: its reader may open streams at once.
	if err := n.admit(s, caller, &shown); err != nil {
		_ = frame.Write(stream, refusal(err))
		part(stream)
		return err
	}
	if err := frame.Write(stream, n.verdictFor(caller, n.credentialForAnswer(&shown))); err != nil {
		_ = stream.Reset()
		return fault.Wrap(fault.Unreachable, err, "answer %s", s.peer)
	}
	var theirs meshv1.Verdict
	if err := frame.Read(stream, frame.Member, &theirs); err != nil {
		_ = stream.Reset()
		return fault.Wrap(fault.Unreachable, err, "be admitted by %s: no verdict", s.peer)
	}
	if !theirs.GetOk() {
		return n.wasRefused(s, verdictFault(s, &theirs))
	}
	n.learnKey(caller, theirs.GetNetworkKey())
	s.welcomed()
	return nil
}

// shows is what this node shows of itself now.
func (n *Node) shows() shown {
	n.mu.Lock()
	defer n.mu.Unlock()
	return shown{roster: n.rosterVersion(), credential: n.credentials}
}

// unjoined is the refusal of a node that holds a join token and no certificate:
// it speaks to ork alone, and only where it dialed it. Whoever dials it, ork
// among them, could not be told from a thief of the token.
func (n *Node) unjoined(s *session) error {
	own := n.credential()
	if own.kind != showsToken || (own.tokenFor(s.peer) != "" && !s.inbound) {
		return nil
	}
	return fault.New(fault.Unavailable, "this agent has not joined yet and speaks to wrk-ork alone; try again in a moment")
}

// tokenFor is the join token if p is the one to whom it is shown.
func (c Credential) tokenFor(p peer.ID) string {
	if c.taker != p {
		return ""
	}
	return c.token
}

// admit records the admission of a peer and looks at it again: a Recheck or Revet
// that ran between judging and recording has passed it by.
func (n *Node) admit(s *session, c Caller, shown *meshv1.Credential) error {
	s.admit(c, shown)
	return n.judgeAgain(s)
}

// part lets the other side read the last frame before the connection goes.
func part(stream network.Stream) {
	_ = stream.CloseWrite()
	_ = stream.SetReadDeadline(time.Now().Add(partLimit))
	_, _ = io.Copy(io.Discard, io.LimitReader(stream, frame.Guest))
}

// verdictFor says yes.
func (n *Node) verdictFor(c Caller, own *meshv1.Credential) *meshv1.Verdict {
	v := &meshv1.Verdict{Ok: true, Class: c.Class, Credential: own}
	if c.Class == meshv1.Class_CLASS_MEMBER && n.credential().kind == showsRoster {
		if _, ok := n.network.Member(n.id); ok {
			v.NetworkKey = n.network.NetworkKey()
		}
	}
	return v
}

func refusal(err error) *meshv1.Verdict {
	message := err.Error()
	if len(message) > 1024 {
		message = message[:1024]
	}
	return &meshv1.Verdict{FaultKind: string(fault.KindOf(err)), Message: message}
}

func verdictFault(s *session, v *meshv1.Verdict) error {
	kind := fault.Kind(v.GetFaultKind())
	if !kind.Known() {
		kind = fault.Denied
	}
	return fault.New(kind, "%s refused this node: %s", s.peer, clean(v.GetMessage()))
}

// clean makes a peer's words fit for a log line and a terminal.
func clean(text string) string {
	if len(text) > 1024 {
		text = text[:1024]
	}
	b := []rune(text)
	for i, r := range b {
		if r < ' ' || r == 0x7f || (r >= 0x80 && r < 0xa0) {
			b[i] = ' '
		}
	}
	return string(b)
}

// credentialForDial is what this node shows first. It fits a stranger's bound:
// a bigger roster is offered after admission.
func (n *Node) credentialForDial(s *session) *meshv1.Credential {
	c := n.baseCredential()
	if token := n.credential().tokenFor(s.peer); token != "" && !s.inbound {
		c.Kind = &meshv1.Credential_JoinToken{JoinToken: token}
	}
	if r := n.network.RosterEnvelope(); n.credential().kind == showsRoster && (len(r) <= dialerRoster || n.brings(s.peer)) {
		c.Kind = &meshv1.Credential_RosterEnvelope{RosterEnvelope: r}
	}
	if i := n.network.InfoEnvelope(); len(i) <= dialerInfo {
		c.NetworkInfoEnvelope = i
	}
	return c
}

// bringNext has the next introduction to a member that refused this node bring the
// roster, however large: the member's own may have expired. Who knows this node from an
// expired one reads that much of it.
func (n *Node) bringNext(p peer.ID) {
	if _, member := n.network.Member(p); member && len(n.network.RosterEnvelope()) > dialerRoster {
		n.mu.Lock()
		n.bringing[p] = struct{}{}
		n.mu.Unlock()
	}
}

// brings tells, once, whether this introduction is to bring it: when that does not
// help either, the one after it is small again.
func (n *Node) brings(p peer.ID) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	_, ok := n.bringing[p]
	delete(n.bringing, p)
	return ok
}

// credentialForAnswer is what this node shows to one it has admitted. It brings
// the roster when the other holds an older one, and never a join token.
func (n *Node) credentialForAnswer(shown *meshv1.Credential) *meshv1.Credential {
	c := n.baseCredential()
	if n.credential().kind == showsRoster && n.rosterVersion() > shown.GetRosterVersion() {
		c.Kind = &meshv1.Credential_RosterEnvelope{RosterEnvelope: n.network.RosterEnvelope()}
	}
	c.NetworkInfoEnvelope = n.network.InfoEnvelope()
	return c
}

func (n *Node) baseCredential() *meshv1.Credential {
	c := &meshv1.Credential{Version: n.o.Version, RosterVersion: n.rosterVersion()}
	switch own := n.credential(); own.kind {
	case showsRoster:
		c.Kind = &meshv1.Credential_RosterEnvelope{}
	case showsCertificate:
		c.Kind = &meshv1.Credential_CertificateEnvelope{CertificateEnvelope: own.certificate}
	case showsGrant:
		c.Kind = &meshv1.Credential_GrantEnvelope{GrantEnvelope: own.grant}
	case showsGuest, showsToken:
		c.Kind = &meshv1.Credential_Guest{Guest: true}
	}
	return c
}

// wasRefused logs that the peer refused this node.
func (n *Node) wasRefused(s *session, err error) error {
	n.refusals.line(n.log, "refused by peer", "key", s.peer, "address", s.conn.RemoteMultiaddr().String(), "reason", err)
	return err
}

// refused logs and counts that this node refused the peer. That the agent of a deleted
// job dials once more before its VM is gone is as it should be, and no news.
func (n *Node) refused(s *session, err error) {
	n.gate.refused(s.peer)
	if !errors.As(err, new(voided)) {
		n.turnedAway.add(s.peer, err, n.now())
	}
	n.refusals.line(n.log, "refused peer", "key", s.peer, "address", s.conn.RemoteMultiaddr().String(), "reason", err)
}
