package trust

import (
	"bytes"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/identity"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

// NewChangeRequest begins a request that builds on what is held: it asks for
// nothing yet, and members and bootstraps are the ones in force.
func (n *Network) NewChangeRequest() *meshv1.ChangeRequest {
	s := n.snapshot()
	return proto.CloneOf(&meshv1.ChangeRequest{Base: n.Records(), Members: s.roster.GetMembers(), Bootstraps: s.info.GetBootstraps()})
}

// SignChange signs what a request asks for and returns the genesis and the records
// that are new; n is what they build on, and it is not changed. Key is a root key
// or, for what is within its powers, an online signer. Fresh are the new root
// keys of a rotation, first the one that signs from now on; the rotation itself is
// signed by key, which must be a root key in force.
//
// The records that the request builds on must be the newest that the signer
// knows: the version that is signed follows theirs.
func SignChange(r *meshv1.ChangeRequest, key *identity.Key, fresh []*identity.Key, now time.Time) (*meshv1.NetworkRecords, error) {
	if err := checkChangeRequest(r); err != nil {
		return nil, err
	}
	n, err := OpenRecords(r.GetBase())
	if err != nil {
		return nil, err
	}
	n.SetClock(func() time.Time { return now })
	for _, issued := range []*timestamppb.Timestamp{n.Roster().GetIssuedAt(), n.Info().GetIssuedAt()} {
		// What is signed would be over too early, or already.
		if issued.AsTime().After(now.Add(Skew)) {
			return nil, fault.New(fault.FailedPrecondition, "the clock here says %s, but what the change builds on was signed at %s: set the time first",
				now.UTC().Format(time.RFC3339), issued.AsTime().Format(time.RFC3339))
		}
	}
	signed := &meshv1.NetworkRecords{GenesisEnvelope: n.Genesis()}
	keep := func(roster, info []byte) error {
		if len(roster) > 0 {
			signed.RosterEnvelope = roster
		}
		if len(info) > 0 {
			signed.NetworkInfoEnvelope = info
		}
		_, err := n.Adopt(roster, info)
		return err
	}
	if r.GetRotateRootKeys() {
		info, err := n.rotate(key, fresh, r.GetBootstraps(), now)
		if err != nil {
			return nil, err
		}
		if err := keep(nil, info); err != nil {
			return nil, err
		}
		key = fresh[0]
	}
	// The roster of old root keys proves no delegation any more, so that a
	// rotation signs it anew.
	if r.GetSignRoster() || r.GetRotateRootKeys() {
		roster, err := n.NextRoster(key, now, func(m *meshv1.Roster) { m.Members = r.GetMembers() })
		if err != nil {
			return nil, err
		}
		if err := keep(roster, nil); err != nil {
			return nil, err
		}
	}
	if r.GetSignNetworkInfo() && !r.GetRotateRootKeys() {
		info, err := n.NextInfo(key, now, func(m *meshv1.NetworkInfo) { m.Bootstraps = r.GetBootstraps() })
		if err != nil {
			return nil, err
		}
		if err := keep(nil, info); err != nil {
			return nil, err
		}
	}
	return signed, nil
}

// rotate signs the NetworkInfo that takes the power of the root keys in force and
// gives it to fresh ones.
func (n *Network) rotate(key *identity.Key, fresh []*identity.Key, bootstraps []*meshv1.BootstrapAddress, now time.Time) ([]byte, error) {
	if !n.IsRoot(key.ID()) {
		return nil, fault.New(fault.Denied, "key %s is not a root key in force, so it cannot name new ones", key)
	}
	if len(fresh) == 0 {
		return nil, fault.New(fault.Invalid, "a rotation of root keys without new ones")
	}
	g, err := OpenGenesis(n.Genesis())
	if err != nil {
		return nil, err
	}
	keys := make([]string, len(fresh))
	for i, k := range fresh {
		keys[i] = k.ID().String()
	}
	rotation, err := SealRotation(key, &meshv1.Genesis{NetworkId: n.id[:], Name: g.GetName(), RootKeys: keys, CreatedAt: timestamppb.New(now)})
	if err != nil {
		return nil, err
	}
	return n.NextInfo(fresh[0], now, func(m *meshv1.NetworkInfo) {
		m.RotationEnvelopes = append(m.RotationEnvelopes, rotation)
		m.RootKeys, m.Bootstraps = keys, bootstraps
	})
}

// Apply adopts a signed change, all of it or nothing. Unlike Adopt it refuses, as
// fault.Conflict, what builds on older records than the held ones: someone would
// wonder where the change went. What is held already is no error.
func (n *Network) Apply(r *meshv1.NetworkRecords) (changed bool, err error) {
	g, err := OpenGenesis(r.GetGenesisEnvelope())
	if err != nil {
		return false, err
	}
	if !bytes.Equal(g.GetNetworkId(), n.id[:]) {
		return false, otherNetwork("the signed change", g.GetNetworkId(), n.id)
	}
	s := n.snapshot()
	if env := r.GetRosterEnvelope(); len(env) > 0 && !bytes.Equal(env, s.rosterEnv) {
		m, err := OpenRoster(env)
		if err != nil {
			return false, err
		}
		if m.GetVersion() <= s.roster.GetVersion() {
			return false, stale("roster version", m.GetVersion(), s.roster.GetVersion())
		}
	}
	if env := r.GetNetworkInfoEnvelope(); len(env) > 0 && !bytes.Equal(env, s.infoEnv) {
		m, err := OpenNetworkInfo(env)
		if err != nil {
			return false, err
		}
		if m.GetSequence() <= s.info.GetSequence() {
			return false, stale("network info", m.GetSequence(), s.info.GetSequence())
		}
	}
	return n.Adopt(r.GetRosterEnvelope(), r.GetNetworkInfoEnvelope())
}

func stale(what string, got, held uint64) error {
	return fault.New(fault.Conflict, "the change is %s %d, but %d is in force already: it was signed for an older state; make the request anew", what, got, held)
}
