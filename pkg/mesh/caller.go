package mesh

import (
	"context"
	"net"
	"slices"

	"github.com/cosmicac/cosmicac/pkg/fault"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	"github.com/libp2p/go-libp2p/core/peer"
)

// Caller is who stands at the other end, as this node admitted it. It is a
// snapshot of the moment the call began; cutting the connection ends the call.
type Caller struct {
	// ID is proven by the connection.
	ID    peer.ID
	Class meshv1.Class
	// Member is set for CLASS_MEMBER.
	Member *meshv1.Member
	// Certificate is set for CLASS_AGENT.
	Certificate *meshv1.JobCertificate
	// Grant is set for CLASS_CLIENT.
	Grant *meshv1.Grant
	// Address is where its connection comes from, a multiaddress; empty for this
	// node itself.
	Address string
}

// Has tells whether the caller is a member with the role.
func (c Caller) Has(role meshv1.Role) bool {
	return c.Class == meshv1.Class_CLASS_MEMBER && c.Member != nil && slices.Contains(c.Member.GetRoles(), role)
}

// Name is the member's name, or the agent's attempt, or "".
func (c Caller) Name() string {
	switch {
	case c.Member != nil:
		return c.Member.GetName()
	case c.Certificate != nil:
		return c.Certificate.GetAttemptId()
	}
	return ""
}

// allows tells whether the right covers the caller. A nil right covers nobody.
func (c Caller) allows(right *meshv1.Right) bool {
	if right == nil {
		return false
	}
	switch c.Class {
	case meshv1.Class_CLASS_MEMBER:
		return right.GetMembers() || slices.ContainsFunc(right.GetRoles(), c.Has)
	case meshv1.Class_CLASS_AGENT:
		return right.GetAgents()
	case meshv1.Class_CLASS_JOINING:
		return right.GetJoining()
	case meshv1.Class_CLASS_CLIENT:
		return right.GetClients()
	case meshv1.Class_CLASS_GUEST:
		return right.GetGuests()
	}
	return false
}

// className is the class for people.
func className(c meshv1.Class) string {
	switch c {
	case meshv1.Class_CLASS_MEMBER:
		return "member"
	case meshv1.Class_CLASS_AGENT:
		return "agent"
	case meshv1.Class_CLASS_JOINING:
		return "joining agent"
	case meshv1.Class_CLASS_CLIENT:
		return "client"
	case meshv1.Class_CLASS_GUEST:
		return "guest"
	}
	return "stranger"
}

type callerKey struct{}

// CallerFrom returns who made the call that ctx belongs to. It is set in every
// handler of this node, for calls and for streams.
func CallerFrom(ctx context.Context) (Caller, bool) {
	if c, ok := ctx.Value(callerKey{}).(*Caller); ok {
		return *c, true
	}
	return Caller{}, false
}

// WithCaller returns a context as a handler would get it. It is for code that
// answers in process and for tests of handlers.
func WithCaller(ctx context.Context, c Caller) context.Context {
	return withCaller(ctx, &c)
}

func withCaller(ctx context.Context, c *Caller) context.Context {
	return context.WithValue(ctx, callerKey{}, c)
}

// addr is the remote address that handlers of net.Conn see: the peer's key.
type addr struct {
	id      peer.ID
	session *session // nil for the local end
	self    bool
}

func (a *addr) Network() string { return "cosmicac" }
func (a *addr) String() string  { return a.id.String() }

// authorize is asked by the RPC servers before each call.
func (n *Node) authorize(ctx context.Context, remote net.Addr, fullMethod string) (context.Context, error) {
	a, ok := remote.(*addr)
	if !ok {
		return nil, fault.New(fault.Denied, "call %s: the caller is not known", fullMethod)
	}
	var caller *Caller
	if a.self {
		self := n.self()
		caller = &self
	} else {
		caller = a.session.callerNow()
	}
	if caller == nil {
		return nil, fault.New(fault.Denied, "call %s: the caller is not admitted", fullMethod)
	}
	right := n.rightOf(fullMethod)
	if !caller.allows(right) {
		n.log.Debug("call refused", "method", fullMethod, "key", caller.ID, "class", className(caller.Class))
		if right == nil {
			return nil, fault.New(fault.Denied, "call %s: nobody may call it, it names no right", fullMethod)
		}
		return nil, fault.New(fault.Denied, "call %s: a %s with this key's roles may not call it", fullMethod, className(caller.Class))
	}
	return withCaller(ctx, caller), nil
}

// self is this node as its own caller.
func (n *Node) self() Caller {
	if m, ok := n.network.Member(n.id); ok {
		return Caller{ID: n.id, Class: meshv1.Class_CLASS_MEMBER, Member: m}
	}
	c := n.credential()
	switch c.kind {
	case showsCertificate:
		if cert, err := n.network.CheckCertificate(c.certificate, n.id, n.now()); err == nil {
			return Caller{ID: n.id, Class: meshv1.Class_CLASS_AGENT, Certificate: cert}
		}
	case showsToken:
		return Caller{ID: n.id, Class: meshv1.Class_CLASS_JOINING}
	}
	return Caller{ID: n.id, Class: meshv1.Class_CLASS_GUEST}
}
