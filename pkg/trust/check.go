package trust

import (
	"bytes"
	"slices"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cosmicac/cosmicac/pkg/fault"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

// CheckCertificate checks that env lets holder in as an agent now: signed by a
// member that signs certificates, for this network, for this very key, in time.
// The holder's key must have been proven by the connection. Revocation epochs are
// the caller's.
func (n *Network) CheckCertificate(env []byte, holder peer.ID, now time.Time) (*meshv1.JobCertificate, error) {
	m, signer, err := openCertificate(env)
	if err != nil {
		return nil, err
	}
	if err := n.checkSigned("job certificate", m.GetNetworkId(), signer, now, (*meshv1.Member).GetSignsCertificates); err != nil {
		return nil, err
	}
	if m.GetKey() != holder.String() {
		return nil, fault.New(fault.Denied, "job certificate is for key %s, shown by %s", m.GetKey(), holder)
	}
	return m, checkSpan("job certificate", m.GetNotBefore(), m.GetNotAfter(), now)
}

// CheckGrant checks that env lets client reach agent now: signed by a member that
// signs grants, for this network and these two keys, in time. The client's key
// must have been proven by the connection, and agent is the checking node itself.
func (n *Network) CheckGrant(env []byte, client, agent peer.ID, now time.Time) (*meshv1.Grant, error) {
	m, signer, err := openGrant(env)
	if err != nil {
		return nil, err
	}
	if err := n.checkSigned("grant", m.GetNetworkId(), signer, now, (*meshv1.Member).GetSignsGrants); err != nil {
		return nil, err
	}
	if m.GetClientKey() != client.String() {
		return nil, fault.New(fault.Denied, "grant is for client %s, shown by %s", m.GetClientKey(), client)
	}
	if m.GetAgentKey() != agent.String() {
		return nil, fault.New(fault.Denied, "grant is for agent %s, this is %s", m.GetAgentKey(), agent)
	}
	return m, checkSpan("grant", m.GetNotBefore(), m.GetNotAfter(), now)
}

// CheckCard checks that a card was signed by its own key and is of this network.
// A role that the card claims must be the key's role in the roster; a card
// without one proves nothing but its key. Cards have no time of their own: their
// TTL counts from receipt.
func (n *Network) CheckCard(env []byte, now time.Time) (*meshv1.Card, error) {
	m, err := OpenCard(env)
	if err != nil {
		return nil, err
	}
	if !bytes.Equal(m.GetNetworkId(), n.id[:]) {
		return nil, otherNetwork("card", m.GetNetworkId(), n.id)
	}
	if m.GetRole() == meshv1.Role_ROLE_UNSPECIFIED {
		return m, nil
	}
	s := n.snapshot()
	p, err := peer.Decode(m.GetKey())
	if err != nil {
		return nil, fault.Wrap(fault.Invalid, err, "key of a card")
	}
	if !s.inForce(now) || !slices.Contains(s.members[p].GetRoles(), m.GetRole()) {
		return nil, fault.New(fault.Denied, "card of %s claims %s, which the roster does not give it", m.GetKey(), m.GetRole())
	}
	return m, nil
}

func (n *Network) checkSigned(record string, network []byte, signer peer.ID, now time.Time, power func(*meshv1.Member) bool) error {
	if !bytes.Equal(network, n.id[:]) {
		return otherNetwork(record, network, n.id)
	}
	s := n.snapshot()
	if !s.inForce(now) {
		if s.roster == nil {
			return fault.New(fault.Denied, "no roster is held here, so nobody may sign a %s", record)
		}
		return fault.New(fault.Denied, "the roster held here expired at %s, so nobody may sign a %s",
			s.roster.GetNotAfter().AsTime().Format(time.RFC3339), record)
	}
	if !power(s.members[signer]) {
		return fault.New(fault.Denied, "%s is signed by %s, which roster version %d does not let sign one",
			record, signer, s.roster.GetVersion())
	}
	return nil
}

// checkSpan is nil if now lies in the span, give or take Skew.
func checkSpan(record string, from, to *timestamppb.Timestamp, now time.Time) error {
	if now.Before(from.AsTime().Add(-Skew)) {
		return fault.New(fault.Denied, "%s is good from %s, the clock here says %s", record,
			from.AsTime().Format(time.RFC3339), now.UTC().Format(time.RFC3339))
	}
	if now.After(to.AsTime().Add(Skew)) {
		return fault.New(fault.Denied, "%s was good until %s, the clock here says %s", record,
			to.AsTime().Format(time.RFC3339), now.UTC().Format(time.RFC3339))
	}
	return nil
}
