package trust

import (
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/identity"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

// NextRoster signs the roster after the one held: its members edited, version up
// by one, good for RosterLife. Key is a root key or an online signer; the roster
// of an online signer carries its base and ends no later than it. The result is
// checked but not adopted.
func (n *Network) NextRoster(key *identity.Key, now time.Time, edit func(*meshv1.Roster)) ([]byte, error) {
	s := n.snapshot()
	next := &meshv1.Roster{NetworkId: n.id[:]}
	if s.roster != nil {
		next = proto.Clone(s.roster).(*meshv1.Roster)
	}
	next.Version++
	next.IssuedAt = timestamppb.New(now)
	next.NotAfter = timestamppb.New(now.Add(RosterLife))
	next.BaseEnvelope = nil
	if !n.IsRoot(key.ID()) {
		base, err := OpenRoster(s.baseEnv)
		if err != nil {
			return nil, fault.Wrap(fault.FailedPrecondition, err, "sign a roster as %s without a roster of a root key", key)
		}
		next.BaseEnvelope = s.baseEnv
		if base.GetNotAfter().AsTime().Before(next.NotAfter.AsTime()) {
			next.NotAfter = base.GetNotAfter()
		}
	}
	if edit != nil {
		edit(next)
	}
	env, err := SealRoster(key, next)
	if err != nil {
		return nil, err
	}
	_, _, err = s.advance(n.id, 0, env, nil, now, false)
	return env, err
}

// NextInfo signs the NetworkInfo after the one held, edited. The result is
// checked but not adopted.
func (n *Network) NextInfo(key *identity.Key, now time.Time, edit func(*meshv1.NetworkInfo)) ([]byte, error) {
	s := n.snapshot()
	next := &meshv1.NetworkInfo{NetworkId: n.id[:], RootKeys: s.roots}
	if s.info != nil {
		next = proto.Clone(s.info).(*meshv1.NetworkInfo)
	}
	next.Sequence++
	next.IssuedAt = timestamppb.New(now)
	if edit != nil {
		edit(next)
	}
	env, err := SealNetworkInfo(key, next)
	if err != nil {
		return nil, err
	}
	_, _, err = s.advance(n.id, 0, nil, env, now, false)
	return env, err
}
