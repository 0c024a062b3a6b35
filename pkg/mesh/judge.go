package mesh

import (
	"context"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/trust"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	"github.com/libp2p/go-libp2p/core/peer"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// How long a key that shows little may stay connected.
const (
	guestStay   = 2 * time.Minute
	joiningStay = 10 * time.Minute
)

// judge decides about what a peer shows, after adopting what newer signed words
// it brings.
func (n *Node) judge(ctx context.Context, s *session, shown *meshv1.Credential) (Caller, error) {
	if shown == nil {
		return Caller{}, fault.New(fault.Denied, "the peer showed nothing of itself")
	}
	n.adopt(s.peer, shown.GetRosterEnvelope(), shown.GetNetworkInfoEnvelope())
	var info uint64
	if envelope := shown.GetNetworkInfoEnvelope(); len(envelope) > 0 {
		if i, err := trust.OpenNetworkInfo(envelope); err == nil {
			info = i.GetSequence()
		}
	}
	s.holds(shown.GetRosterVersion(), info)
	c, err := n.classify(s, shown)
	if err != nil {
		return Caller{}, err
	}
	if c.Class == meshv1.Class_CLASS_JOINING {
		if n.o.VerifyJoin == nil {
			return Caller{}, fault.New(fault.Denied, "this node takes no join tokens; show it to wrk-ork")
		}
		if err := n.o.VerifyJoin(ctx, s.peer, shown.GetJoinToken()); err != nil {
			return Caller{}, err
		}
	}
	if err := n.vet(c); err != nil {
		if c.Certificate != nil {
			err = voided{err}
		}
		return Caller{}, err
	}
	if err := n.makeRoom(s, c.Class); err != nil {
		return Caller{}, err
	}
	return c, nil
}

// voided is Vet's refusal of an agent whose certificate is good but for that: no
// stranger, but one of whom this network itself has said that its attempt is over.
type voided struct{ error }

func (v voided) Unwrap() error { return v.error }

func (n *Node) vet(c Caller) error {
	if n.o.Vet == nil {
		return nil
	}
	return n.o.Vet(c)
}

// classify says what the peer counts as by what it shows. It changes nothing, so
// that it serves for looking again as well.
func (n *Node) classify(s *session, shown *meshv1.Credential) (Caller, error) {
	p := s.peer
	switch kind := shown.GetKind().(type) {
	case *meshv1.Credential_RosterEnvelope:
		m, ok := n.network.Member(p)
		if !ok {
			return Caller{}, fault.New(fault.Denied, "key %s is not in the roster (version %d)", p, n.rosterVersion())
		}
		return Caller{ID: p, Class: meshv1.Class_CLASS_MEMBER, Member: m}, nil

	case *meshv1.Credential_CertificateEnvelope:
		return n.classifyAgent(s, kind.CertificateEnvelope)

	case *meshv1.Credential_GrantEnvelope:
		return n.classifyClient(p, kind.GrantEnvelope)

	case *meshv1.Credential_JoinToken:
		if len(kind.JoinToken) == 0 || len(kind.JoinToken) > 1024 {
			return Caller{}, fault.New(fault.Denied, "the join token is malformed")
		}
		return Caller{ID: p, Class: meshv1.Class_CLASS_JOINING}, nil

	case *meshv1.Credential_Guest:
		if m, ok := n.network.Member(p); ok {
			return Caller{ID: p, Class: meshv1.Class_CLASS_MEMBER, Member: m}, nil
		}
		if !n.o.AllowGuests {
			return Caller{}, fault.New(fault.Denied, "key %s is not in the roster (version %d), and this node takes no guests; ask a mesh-bootstrap to join", p, n.rosterVersion())
		}
		return Caller{ID: p, Class: meshv1.Class_CLASS_GUEST}, nil
	}
	return Caller{}, fault.New(fault.Denied, "the peer showed nothing of itself")
}

// classifyAgent admits a job certificate. An agent may come to ork, to
// bootstraps and to peers of its own job; others come to it.
func (n *Node) classifyAgent(s *session, envelope []byte) (Caller, error) {
	c := Caller{ID: s.peer, Class: meshv1.Class_CLASS_AGENT}
	own := n.credential()
	certificate, err := n.network.CheckCertificate(envelope, s.peer, n.now())
	if err != nil {
		// A client may hold no roster to check an agent's certificate by; the
		// grant names the agent's key, and the connection has proven it.
		if agent, ok := own.grantedAgent(); ok && agent == s.peer {
			return c, nil
		}
		return Caller{}, fault.Wrap(fault.Denied, err, "the job certificate of %s is not good", s.peer)
	}
	c.Certificate = certificate
	switch {
	case n.takesAgents(), n.seeks(s):
		return c, nil
	case own.kind == showsCertificate:
		mine, err := n.network.CheckCertificate(own.certificate, n.id, n.now())
		if err == nil && mine.GetJobId() == certificate.GetJobId() {
			return c, nil
		}
		return Caller{}, fault.New(fault.Denied, "this node serves another job")
	}
	return Caller{}, fault.New(fault.Denied, "this node takes no agents")
}

func (n *Node) takesAgents() bool {
	return n.is(meshv1.Role_ROLE_ORK) || n.is(meshv1.Role_ROLE_BOOTSTRAP)
}

// seeks tells whether this node dialed the peer, now or on another connection
// that still stands (a punched hole arrives from outside).
func (n *Node) seeks(s *session) bool {
	if !s.inbound || n.keeps(s.peer) {
		return true
	}
	for _, o := range n.sessions.to(s.peer) {
		if _, ok := o.caller(); ok && !o.inbound {
			return true
		}
	}
	return false
}

func (n *Node) classifyClient(p peer.ID, envelope []byte) (Caller, error) {
	c := Caller{ID: p, Class: meshv1.Class_CLASS_CLIENT}
	switch own := n.credential(); {
	case own.kind == showsCertificate:
		grant, err := n.network.CheckGrant(envelope, p, n.id, n.now())
		if err != nil {
			return Caller{}, fault.Wrap(fault.Denied, err, "the grant of %s is not good here", p)
		}
		c.Grant = grant
		return c, nil
	case n.o.Relay:
		// A relay takes a client for the way to its agent, nothing else.
		claim, err := trust.OpenGrant(envelope)
		if err != nil {
			return Caller{}, fault.Wrap(fault.Denied, err, "the grant of %s is not good", p)
		}
		agent, err := peer.Decode(claim.GetAgentKey())
		if err != nil {
			return Caller{}, fault.Wrap(fault.Denied, err, "the grant of %s names no agent", p)
		}
		grant, err := n.network.CheckGrant(envelope, p, agent, n.now())
		if err != nil {
			return Caller{}, fault.Wrap(fault.Denied, err, "the grant of %s is not good", p)
		}
		c.Grant = grant
		return c, nil
	}
	return Caller{}, fault.New(fault.Denied, "this node takes no grants; only agents do")
}

// grantedAgent is the agent that this node's own grant names.
func (c Credential) grantedAgent() (peer.ID, bool) {
	if c.kind != showsGrant {
		return "", false
	}
	g, err := trust.OpenGrant(c.grant)
	if err != nil {
		return "", false
	}
	p, err := peer.Decode(g.GetAgentKey())
	return p, err == nil
}

// makeRoom bounds the connections of those who have shown little.
func (n *Node) makeRoom(s *session, class meshv1.Class) error {
	var perPrefix, total int
	switch class {
	case meshv1.Class_CLASS_GUEST:
		perPrefix, total = guestsPerPrefix, guestsTotal
	case meshv1.Class_CLASS_JOINING:
		perPrefix, total = joiningTotal, joiningTotal
	default:
		return nil
	}
	prefix := prefixOf(s.conn.RemoteMultiaddr())
	var same, all int
	for _, o := range n.sessions.all() {
		if c, ok := o.caller(); ok && o != s && c.Class == class {
			all++
			if prefixOf(o.conn.RemoteMultiaddr()) == prefix {
				same++
			}
		}
	}
	if same >= perPrefix || all >= total {
		return fault.New(fault.Exhausted, "too many of class %s are connected, try again in a minute", className(class))
	}
	return nil
}

// adopt takes newer signed records in. Older and unsigned ones change nothing.
func (n *Node) adopt(from peer.ID, roster, info []byte) {
	if len(roster) == 0 && len(info) == 0 {
		return
	}
	changed, err := n.network.AdoptEach(roster, info)
	if err != nil {
		n.log.Debug("a peer's record was not adopted", "key", from, "reason", err)
	}
	if changed {
		n.log.Info("adopted newer records", "key", from, "roster_version", n.rosterVersion(), "network_info_sequence", n.network.Info().GetSequence())
	}
}

// overdue tells whether time alone may have ended what the peer showed. Signatures
// are looked at again on changes only: they cost too much for each second.
func (n *Node) overdue(s *session) bool {
	c, ok := s.caller()
	if !ok {
		return false
	}
	after := func(t *timestamppb.Timestamp) bool { return n.now().After(t.AsTime().Add(trust.Skew)) }
	switch {
	case c.Certificate != nil:
		return after(c.Certificate.GetNotAfter())
	case c.Grant != nil:
		return after(c.Grant.GetNotAfter())
	}
	return c.Class == meshv1.Class_CLASS_GUEST || c.Class == meshv1.Class_CLASS_JOINING
}

// Recheck looks at every admitted peer again and cuts those that are no longer
// good: not in the roster, certificate or grant over, or refused by Vet. It runs
// by itself when the network's records change and when an expiry passes.
func (n *Node) Recheck() {
	for _, s := range n.sessions.all() {
		n.recheck(s)
	}
}

// Revet asks Vet again about every admitted peer and cuts those that it refuses
// now. Unlike Recheck it looks at nothing else: signatures of thousands of peers
// would cost seconds.
func (n *Node) Revet() {
	for _, s := range n.sessions.all() {
		if c, ok := s.caller(); ok {
			if err := n.vet(c); err != nil {
				n.cut(s, err)
			}
		}
	}
}

func (n *Node) recheck(s *session) {
	if err := n.judgeAgain(s); err != nil {
		n.cut(s, err)
	}
}

func (n *Node) cut(s *session, why error) {
	if s.ending() != nil {
		return // it is on its way out
	}
	n.refusals.line(n.log, "cut off peer", "key", s.peer, "address", s.conn.RemoteMultiaddr().String(), "reason", why)
	s.shows(n.shows()) // what cut it holds now: nobody dials anew and closes this without a reason
	s.fail(fault.Wrap(fault.Denied, why, "%s was cut off", s.peer))
	n.hangUp(s)
}

// judgeAgain looks at an admitted peer by what it showed; its error says why it
// is no longer good.
func (n *Node) judgeAgain(s *session) error {
	s.mu.Lock()
	who, shown := s.who, s.credential
	s.mu.Unlock()
	if who == nil || shown == nil {
		return nil
	}
	c, err := n.classify(s, shown)
	if err == nil {
		err = n.vet(c)
	}
	if err == nil {
		switch c.Class {
		case meshv1.Class_CLASS_GUEST:
			if time.Since(s.opened) > guestStay {
				err = fault.New(fault.Denied, "a guest stays %s at most", guestStay)
			}
		case meshv1.Class_CLASS_JOINING:
			if time.Since(s.opened) > joiningStay {
				err = fault.New(fault.Denied, "a joining agent stays %s at most", joiningStay)
			}
		}
	}
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.who == who { // not admitted anew meanwhile
		c.Address = s.address
		s.who = &c
	}
	return nil
}
