package mesh

import (
	"context"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/trust"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	"github.com/hashicorp/go-hclog"
	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/prometheus/client_golang/prometheus"
)

// Credential is what a node shows of itself. The zero value is Membership.
type Credential struct {
	kind        credentialKind
	certificate []byte
	grant       []byte
	token       string
	taker       peer.ID // the one key that is shown the token
}

type credentialKind int

const (
	showsRoster credentialKind = iota
	showsCertificate
	showsGrant
	showsToken
	showsGuest
)

// Membership says: my key is in the roster.
func Membership() Credential { return Credential{} }

// Certificate shows a job certificate's envelope (agents).
func Certificate(envelope []byte) Credential {
	return Credential{kind: showsCertificate, certificate: envelope}
}

// Grant shows a grant's envelope (the CLI).
func Grant(envelope []byte) Credential { return Credential{kind: showsGrant, grant: envelope} }

// JoinToken shows an agent's one-time token, before it has a certificate, to ork
// alone and only where this node dials it. Until it has a certificate the node
// introduces itself to nobody else and admits nobody.
func JoinToken(token string, ork peer.ID) Credential {
	return Credential{kind: showsToken, token: token, taker: ork}
}

// EndedCertificate shows ork the join token again, for a certificate that could
// not be renewed in time, and the certificate to all others: those who hold a
// grant need not notice.
func EndedCertificate(envelope []byte, token string, ork peer.ID) Credential {
	return Credential{kind: showsCertificate, certificate: envelope, token: token, taker: ork}
}

// Guest shows nothing; only bootstraps take it, for the join request alone.
func Guest() Credential { return Credential{kind: showsGuest} }

// DHTMode says what part a node takes in the network's DHT.
type DHTMode int

const (
	// DHTOff is for agents and the CLI: no part at all.
	DHTOff DHTMode = iota
	// DHTServer is for daemons.
	DHTServer
	// DHTClient asks without answering.
	DHTClient
)

// Options sets up a Node. Key and Network are required.
type Options struct {
	// Key is the node's identity.
	Key *identity.Key
	// Network is what the node holds of its network; it adopts newer rosters.
	Network *trust.Network
	// Credential is what the node shows.
	Credential Credential
	// Listen are multiaddresses; those without /quic-v1 or /tcp are refused.
	// Empty listens on nothing.
	Listen []string
	// Announce replaces the listen addresses in what others are told.
	Announce []string
	// Bootstraps are used until the network's own NetworkInfo is known.
	Bootstraps []*meshv1.BootstrapAddress
	// Role is what this node is; unspecified for agents and the CLI.
	Role meshv1.Role
	// Name, Version and Features are told in its card and credential.
	Name, Version string
	Features      []string
	// StateDirectory keeps the last good addresses (peers.json); may be empty.
	StateDirectory string
	// Relay serves relayed connections to members and live certificates
	// (bootstraps).
	Relay bool
	// Private says that nobody reaches this node from outside: it keeps
	// reservations at the bootstraps' relays and punches holes.
	Private bool
	// DHT is the node's part in the DHT.
	DHT DHTMode
	// GRPCOnly carries all calls as gRPC, as nodes of version 0.1 did: for tests
	// of both channels, and for comparing them.
	GRPCOnly bool
	// AllowGuests admits keys that nobody admitted, for methods with the guests
	// right alone (bootstraps).
	AllowGuests bool
	// VerifyJoin checks the join token of a key (ork); nil refuses all tokens.
	// It must not redeem it.
	VerifyJoin func(ctx context.Context, p peer.ID, token string) error
	// Vet has a last word on a caller about to be admitted, and again at Revet
	// and Recheck; an error refuses or cuts it (revoked certificates, epochs). It
	// must be quick and must not call the node. May be nil.
	Vet func(Caller) error
	// Card completes the node's card before it is signed (agents add the job).
	Card func(*meshv1.Card)
	// Log gets the node's lines; nil is silence.
	Log hclog.Logger
	// Metrics is where libp2p registers its own; nil turns them off.
	Metrics prometheus.Registerer
	// Clock is the wall clock for signed times; time.Now if nil. Silence is
	// always timed by the monotonic clock.
	Clock func() time.Time
}

func (o *Options) complete() error {
	if o.Key == nil || o.Network == nil {
		return fault.New(fault.Invalid, "make a mesh node: key and network are required")
	}
	if o.Log == nil {
		o.Log = hclog.NewNullLogger()
	}
	if o.Clock == nil {
		o.Clock = time.Now
	}
	if len(o.Name) > 63 || len(o.Version) > 128 || len(o.Features) > 64 {
		return fault.New(fault.Invalid, "make a mesh node: name, version or features are too long")
	}
	return nil
}
