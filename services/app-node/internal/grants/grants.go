// Package grants signs the records that let one client key reach one agent.
//
// A grant is a statement of app-node: agents check its signature, and that the
// roster delegates the signing of grants to this key. Each names the epoch it was
// signed under; Revocations has agents told which epochs of whom are void. The
// package does not check who owns the job, does not dial agents, and keeps nothing.
package grants

import (
	"slices"
	"strings"
	"time"

	"github.com/multiformats/go-multiaddr"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/libp2p/go-libp2p/core/peer"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/trust"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

// Rights is the closed list of what a grant can allow.
var Rights = []string{"shell", "exec", "files", "forward"}

const maximumAddresses = 32

// Signer makes grants with app-node's key.
type Signer struct {
	Key     *identity.Key
	Network *trust.Network
	Now     func() time.Time
	// Validity is how long a grant is good: 12 h by default.
	Validity time.Duration
}

// Request is what somebody wants to reach.
type Request struct {
	Job       *orkv1.Job
	ClientKey string
	// Rights is empty for all.
	Rights []string
	UserID string
	// Epoch was read together with the user's right to the job, so that a right
	// that is taken away meanwhile voids the grant.
	Epoch uint64
}

// Granted is a signed grant and how to use it.
type Granted struct {
	Envelope []byte
	Grant    *meshv1.Grant
}

// Sign checks a request and signs a grant for the agent of the job's newest
// running attempt, of the first replica that has one.
func (s *Signer) Sign(r Request) (Granted, error) {
	client, rights, err := check(r)
	if err != nil {
		return Granted{}, err
	}
	attempt, err := Reachable(r.Job)
	if err != nil {
		return Granted{}, err
	}
	agent, err := identity.ParseID(attempt.GetAgentKey())
	if err != nil {
		return Granted{}, fault.Wrap(fault.Internal, err, "the orchestrator's record of attempt %s holds no good agent key", attempt.GetId())
	}
	if client == agent {
		return Granted{}, fault.New(fault.Invalid, "client_key is the agent's own key").
			With(fault.Detail{Field: "client_key", Rule: "must be the key of the one who connects"})
	}
	if err := s.delegated(); err != nil {
		return Granted{}, err
	}
	network := s.Network.ID()
	now := s.Now().UTC().Truncate(time.Second)
	grant := &meshv1.Grant{
		NetworkId:      network[:],
		ClientKey:      client.String(),
		AgentKey:       agent.String(),
		JobId:          r.Job.GetId(),
		Rights:         rights,
		NotBefore:      timestamppb.New(now),
		NotAfter:       timestamppb.New(now.Add(s.Validity)),
		Epoch:          r.Epoch,
		UserId:         r.UserID,
		AgentAddresses: addresses(attempt.GetAgentAddresses()),
		SshHostKey:     bounded(attempt.GetSshHostKey(), 4<<10),
		DefaultUser:    bounded(attempt.GetDefaultUser(), 64),
	}
	envelope, err := trust.SealGrant(s.Key, grant)
	if err != nil {
		return Granted{}, fault.Wrap(fault.Internal, err, "sign a grant for job %s", r.Job.GetId())
	}
	return Granted{Envelope: envelope, Grant: grant}, nil
}

func check(r Request) (client peer.ID, rights []string, err error) {
	var details []fault.Detail
	client, err = identity.ParseID(r.ClientKey)
	if err != nil {
		details = append(details, fault.Detail{Field: "client_key", Rule: "must be a peer id or 64 hex digits of an ed25519 public key"})
	}
	for _, right := range r.Rights {
		if !slices.Contains(Rights, right) {
			details = append(details, fault.Detail{Field: "rights", Rule: "must be some of " + strings.Join(Rights, ", ")})
			break
		}
	}
	if len(details) > 0 {
		return "", nil, fault.New(fault.Invalid, "%s %s", details[0].Field, details[0].Rule).With(details...)
	}
	for _, right := range Rights {
		if len(r.Rights) == 0 || slices.Contains(r.Rights, right) {
			rights = append(rights, right)
		}
	}
	return client, rights, nil
}

// Reachable finds the attempt whose agent can be reached now: the newest running one of
// the first replica that has one.
func Reachable(job *orkv1.Job) (*orkv1.Attempt, error) {
	running := false
	for _, replica := range job.GetReplicas() {
		attempts := replica.GetAttempts()
		if len(attempts) == 0 {
			continue
		}
		newest := attempts[len(attempts)-1]
		if newest.GetState() != orkv1.State_STATE_RUNNING {
			continue
		}
		running = true
		if newest.GetAgentKey() != "" {
			return newest, nil
		}
	}
	if running {
		return nil, fault.New(fault.FailedPrecondition, "the agent of job %s has not said hello yet: try again in a moment", job.GetId())
	}
	state := strings.ToLower(strings.TrimPrefix(job.GetState().String(), "STATE_"))
	return nil, fault.New(fault.FailedPrecondition, "job %s is %s; it can be reached while it is running", job.GetId(), state)
}

// delegated says in time what agents would say: that the roster does not let this
// key sign grants.
func (s *Signer) delegated() error {
	member, ok := s.Network.Member(s.Key.ID())
	if !ok || !member.GetSignsGrants() {
		return fault.New(fault.Unavailable, "the network's roster does not let this app-node sign grants: the operator must sign a roster in which its key has signs_grants")
	}
	return nil
}

// addresses keeps what an agent said of itself, as far as it can be an address.
func addresses(all []string) []string {
	var good []string
	for _, a := range all {
		if len(good) == maximumAddresses {
			break
		}
		if len(a) > 512 {
			continue
		}
		if _, err := multiaddr.NewMultiaddr(a); err == nil {
			good = append(good, a)
		}
	}
	return good
}

// bounded drops a text of the agent's that is too long or not one line.
func bounded(text string, most int) string {
	text = strings.TrimSpace(text)
	if len(text) > most || strings.ContainsFunc(text, func(r rune) bool { return r < ' ' || r == 0x7f || r == '\uFFFD' }) {
		return ""
	}
	return text
}
