package trust

import (
	"bytes"
	"slices"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/identity"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

// advance computes the state after an offer. It changes nothing: the receiver is
// a copy. Rotations of root keys come first since they decide who may sign the
// roster, then the roster since it decides who else may sign NetworkInfo.
// An expired roster is taken only from the own disk.
func (s state) advance(id NetworkID, floor uint64, rosterEnv, infoEnv []byte, now time.Time, disk bool) (next state, changed bool, err error) {
	next = s
	var info *meshv1.NetworkInfo
	var infoSigner peer.ID
	roots := s.roots
	if len(infoEnv) > 0 && !bytes.Equal(infoEnv, s.infoEnv) {
		info, infoSigner, err = openNetworkInfo(infoEnv)
		if err != nil {
			return s, false, err
		}
		if !bytes.Equal(info.GetNetworkId(), id[:]) {
			return s, false, otherNetwork("network info", info.GetNetworkId(), id)
		}
		if info.GetSequence() <= s.info.GetSequence() {
			info = nil
		} else if err := notAhead("network info", info.GetSequence(), info.GetIssuedAt(), now, disk); err != nil {
			return s, false, err
		} else if roots, err = follow(id, s.roots, info.GetRotationEnvelopes()); err != nil {
			return s, false, err
		}
	}

	if len(rosterEnv) > 0 && !bytes.Equal(rosterEnv, s.rosterEnv) {
		took, err := next.takeRoster(id, floor, roots, rosterEnv, now, disk)
		if err != nil {
			return s, false, err
		}
		changed = changed || took
	}

	if info != nil {
		if !slices.Equal(info.GetRootKeys(), roots) {
			return s, false, fault.New(fault.Denied, "network info %d names root keys that no rotation leads to", info.GetSequence())
		}
		// On the own disk its signer may have lost the delegation since it was taken.
		if !disk && !slices.Contains(roots, infoSigner.String()) {
			if !next.members[infoSigner].GetSignsRosters() || !next.inForce(now) {
				return s, false, fault.New(fault.Denied, "network info %d is signed by %s, which is neither a root key nor delegated to", info.GetSequence(), infoSigner)
			}
		}
		next.info, next.infoEnv, next.roots = info, bytes.Clone(infoEnv), roots
		changed = true
	}
	return next, changed, nil
}

// takeRoster checks a roster against the root keys and makes it the held one.
func (s *state) takeRoster(id NetworkID, floor uint64, roots []string, env []byte, now time.Time, disk bool) (took bool, err error) {
	roster, signer, err := openRoster(env)
	if err != nil {
		return false, err
	}
	if !bytes.Equal(roster.GetNetworkId(), id[:]) {
		return false, otherNetwork("roster", roster.GetNetworkId(), id)
	}
	if roster.GetVersion() <= s.roster.GetVersion() {
		return false, nil
	}
	if roster.GetVersion() < floor {
		return false, fault.New(fault.Denied, "roster version %d is older than version %d that the join token asks for", roster.GetVersion(), floor)
	}
	baseEnv, base := env, roster.GetVersion()
	if !slices.Contains(roots, signer.String()) {
		b, err := checkBase(id, roots, roster, signer)
		if err != nil {
			return false, err
		}
		// A root key may have taken the delegation back in a roster held here.
		if b.GetVersion() < s.base {
			return false, fault.New(fault.Denied, "roster version %d builds on version %d, but a root key signed version %d since",
				roster.GetVersion(), b.GetVersion(), s.base)
		}
		baseEnv, base = roster.GetBaseEnvelope(), b.GetVersion()
	}
	if err := notAhead("roster version", roster.GetVersion(), roster.GetIssuedAt(), now, disk); err != nil {
		return false, err
	}
	if !disk && now.After(roster.GetNotAfter().AsTime().Add(Skew)) {
		return false, fault.New(fault.FailedPrecondition, "roster version %d expired at %s: sign a new one with `cosmicac network renew`",
			roster.GetVersion(), roster.GetNotAfter().AsTime().Format(time.RFC3339))
	}
	members := make(map[peer.ID]*meshv1.Member, len(roster.GetMembers()))
	for _, m := range roster.GetMembers() {
		p, err := identity.ParseID(m.GetKey())
		if err != nil {
			return false, err
		}
		members[p] = m
	}
	s.roster, s.rosterEnv, s.members = roster, bytes.Clone(env), members
	s.baseEnv, s.base = bytes.Clone(baseEnv), base
	return true, nil
}

// notAhead refuses a record that was signed later than this clock says, give or
// take Skew. On the own disk it stands: this clock may have been set back.
func notAhead(record string, number uint64, issued *timestamppb.Timestamp, now time.Time, disk bool) error {
	if disk || !issued.AsTime().After(now.Add(Skew)) {
		return nil
	}
	return fault.New(fault.FailedPrecondition, "%s %d was signed at %s, the clock here says %s: set the time where it was signed, or here",
		record, number, issued.AsTime().Format(time.RFC3339), now.UTC().Format(time.RFC3339))
}

// checkBase checks a roster of an online signer against the root-signed roster
// it carries: the signer is delegated to there, and nobody gets a power or a
// life beyond it.
func checkBase(id NetworkID, roots []string, roster *meshv1.Roster, signer peer.ID) (*meshv1.Roster, error) {
	denied := func(format string, a ...any) error {
		return fault.New(fault.Denied, "roster version %d, signed by %s, is refused: "+format,
			append([]any{roster.GetVersion(), signer}, a...)...)
	}
	if len(roster.GetBaseEnvelope()) == 0 {
		return nil, denied("the signer is not a root key and shows no roster of one")
	}
	base, baseSigner, err := openRoster(roster.GetBaseEnvelope())
	if err != nil {
		return nil, err
	}
	if !bytes.Equal(base.GetNetworkId(), id[:]) {
		return nil, otherNetwork("base roster", base.GetNetworkId(), id)
	}
	if !slices.Contains(roots, baseSigner.String()) || len(base.GetBaseEnvelope()) > 0 {
		return nil, denied("its base is not signed by a root key")
	}
	if base.GetVersion() >= roster.GetVersion() {
		return nil, denied("its base has version %d", base.GetVersion())
	}
	powers := make(map[string]*meshv1.Member, len(base.GetMembers()))
	for _, m := range base.GetMembers() {
		powers[m.GetKey()] = m
	}
	if !powers[signer.String()].GetSignsRosters() {
		return nil, denied("no root key lets the signer sign rosters")
	}
	if roster.GetNotAfter().AsTime().After(base.GetNotAfter().AsTime()) {
		return nil, denied("it outlives its base")
	}
	for _, m := range roster.GetMembers() {
		was := powers[m.GetKey()]
		if m.GetSignsCertificates() && !was.GetSignsCertificates() ||
			m.GetSignsGrants() && !was.GetSignsGrants() ||
			m.GetSignsRosters() && !was.GetSignsRosters() {
			return nil, denied("it gives %s (%s) a signing power that no root key gave", m.GetName(), m.GetKey())
		}
	}
	return base, nil
}

// follow walks rotations of root keys from a trusted set. Rotations before the
// one that led to the trusted set are skipped unread.
func follow(id NetworkID, trusted []string, rotations [][]byte) ([]string, error) {
	type step struct {
		keys   []string
		signer string
	}
	steps := make([]step, len(rotations))
	start := 0
	for i, env := range rotations {
		g, signer, err := openGenesis(env)
		if err != nil {
			return nil, err
		}
		if !bytes.Equal(g.GetNetworkId(), id[:]) {
			return nil, otherNetwork("rotation of root keys", g.GetNetworkId(), id)
		}
		steps[i] = step{g.GetRootKeys(), signer.String()}
		if slices.Equal(g.GetRootKeys(), trusted) {
			start = i + 1
		}
	}
	for _, st := range steps[start:] {
		if !slices.Contains(trusted, st.signer) {
			return nil, fault.New(fault.Denied, "rotation of root keys is signed by %s, which is no root key in force", st.signer)
		}
		trusted = st.keys
	}
	return trusted, nil
}
