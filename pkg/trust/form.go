package trust

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"slices"
	"unicode"
	"unicode/utf8"

	"github.com/multiformats/go-multiaddr"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/libp2p/go-libp2p/core/peer"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/id"
	"github.com/cosmicac/cosmicac/pkg/identity"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

// NetworkID is the random id that a network is born with.
type NetworkID [16]byte

// String is 32 hex digits, as in protocol names.
func (n NetworkID) String() string { return hex.EncodeToString(n[:]) }

// ParseNetworkID reads 16 raw bytes.
func ParseNetworkID(b []byte) (NetworkID, error) {
	var n NetworkID
	if len(b) != len(n) || bytes.Equal(b, n[:]) {
		return n, fault.New(fault.Invalid, "a network id of %d bytes, want 16 that are not all zero", len(b))
	}
	copy(n[:], b)
	return n, nil
}

// The rights that a grant can hold.
var grantRights = []string{"shell", "exec", "files", "forward"}

// Bounds of what a record may hold.
const (
	maxRootKeys   = 8
	maxMembers    = 4096
	maxBootstraps = 64
	maxAddresses  = 64
	maxFeatures   = 64
	maxRotations  = 32
	maxText       = 512
	maxCardTTL    = 3600
)

// form collects what is wrong with a record, all of it at once.
type form struct {
	record string
	faults []fault.Detail
}

func (f *form) bad(field, rule string, a ...any) {
	if len(f.faults) < 16 {
		f.faults = append(f.faults, fault.Detail{Field: field, Rule: fmt.Sprintf(rule, a...)})
	}
}

func (f *form) err() error {
	if len(f.faults) == 0 {
		return nil
	}
	d := f.faults[0]
	return fault.New(fault.Invalid, "%s is malformed: %s: %s", f.record, d.Field, d.Rule).With(f.faults...)
}

func (f *form) network(b []byte) {
	if _, err := ParseNetworkID(b); err != nil {
		f.bad("network_id", "%s", err)
	}
}

// key accepts the one text form, so that a key compares as a string everywhere.
func (f *form) key(field, s string) {
	p, err := identity.ParseID(s)
	if err != nil {
		f.bad(field, "%s", err)
	} else if p.String() != s {
		f.bad(field, "is not in peer id form")
	}
}

func (f *form) keys(field string, keys []string, least, most int) {
	if len(keys) < least || len(keys) > most {
		f.bad(field, "has %d keys, want %d to %d", len(keys), least, most)
		return
	}
	for i, k := range keys {
		f.key(fmt.Sprintf("%s[%d]", field, i), k)
		if slices.Contains(keys[:i], k) {
			f.bad(field, "names %s twice", k)
		}
	}
}

func (f *form) text(field, s string, least int) {
	if len(s) < least || len(s) > maxText {
		f.bad(field, "has %d bytes, want %d to %d", len(s), least, maxText)
	}
	for _, r := range s {
		if unicode.IsControl(r) || r == utf8.RuneError {
			f.bad(field, "holds a control character")
			return
		}
	}
}

func (f *form) addresses(field string, as []string) {
	if len(as) > maxAddresses {
		f.bad(field, "has %d addresses, want at most %d", len(as), maxAddresses)
		return
	}
	for i, a := range as {
		if len(a) > maxText {
			f.bad(field, "has an address of %d bytes", len(a))
		} else if _, err := multiaddr.NewMultiaddr(a); err != nil {
			f.bad(fmt.Sprintf("%s[%d]", field, i), "is not a multiaddress: %.128q", a)
		}
	}
}

func (f *form) span(from, to *timestamppb.Timestamp, fromName string) {
	if !from.IsValid() || from.AsTime().Unix() <= 0 {
		f.bad(fromName, "is not a time")
		return
	}
	if !to.IsValid() || !to.AsTime().After(from.AsTime()) {
		f.bad("not_after", "is not later than %s", fromName)
	}
}

func label(s string) bool {
	if s == "" || len(s) > 63 || s[0] == '-' || s[len(s)-1] == '-' {
		return false
	}
	for _, c := range []byte(s) {
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' {
			return false
		}
	}
	return true
}

func checkGenesis(m *meshv1.Genesis) error {
	f := &form{record: "genesis"}
	f.network(m.GetNetworkId())
	f.text("name", m.GetName(), 1)
	if utf8.RuneCountInString(m.GetName()) > 63 {
		f.bad("name", "is longer than 63 characters")
	}
	f.keys("root_keys", m.GetRootKeys(), 1, maxRootKeys)
	return f.err()
}

// checkRoster checks form. Sealing is strict about roles; a reader lets roles of
// a newer version stand, which give nothing here.
func checkRoster(m *meshv1.Roster, sealing bool) error {
	f := &form{record: "roster"}
	f.network(m.GetNetworkId())
	if m.GetVersion() == 0 {
		f.bad("version", "is 0, the first is 1")
	}
	f.span(m.GetIssuedAt(), m.GetNotAfter(), "issued_at")
	f.members(m.GetMembers(), sealing)
	return f.err()
}

func (f *form) members(members []*meshv1.Member, sealing bool) {
	if len(members) > maxMembers {
		f.bad("members", "has %d, want at most %d", len(members), maxMembers)
		return
	}
	keys, names := make(map[string]bool), make(map[string]bool)
	for i, member := range members {
		at := fmt.Sprintf("members[%d]", i)
		f.key(at+".key", member.GetKey())
		if keys[member.GetKey()] {
			f.bad(at+".key", "%s is listed twice", member.GetKey())
		}
		keys[member.GetKey()] = true
		if !label(member.GetName()) {
			f.bad(at+".name", "%.64q is not a DNS label", member.GetName())
		}
		if names[member.GetName()] {
			f.bad(at+".name", "%q is used twice", member.GetName())
		}
		names[member.GetName()] = true
		f.roles(at+".roles", member.GetRoles(), sealing)
	}
}

func (f *form) roles(field string, roles []meshv1.Role, strict bool) {
	if len(roles) == 0 || len(roles) > 32 {
		f.bad(field, "has %d roles, want 1 to 32", len(roles))
		return
	}
	for i, r := range roles {
		_, known := meshv1.Role_name[int32(r)]
		if r <= meshv1.Role_ROLE_UNSPECIFIED || strict && !known {
			f.bad(field, "%s is not a role", r)
		}
		if slices.Contains(roles[:i], r) {
			f.bad(field, "%s is listed twice", r)
		}
	}
}

func checkNetworkInfo(m *meshv1.NetworkInfo) error {
	f := &form{record: "network info"}
	f.network(m.GetNetworkId())
	if m.GetSequence() == 0 {
		f.bad("sequence", "is 0, the first is 1")
	}
	f.keys("root_keys", m.GetRootKeys(), 1, maxRootKeys)
	if len(m.GetRotationEnvelopes()) > maxRotations {
		f.bad("rotation_envelopes", "has %d, want at most %d", len(m.GetRotationEnvelopes()), maxRotations)
	}
	f.bootstraps(m.GetBootstraps())
	return f.err()
}

func (f *form) bootstraps(bs []*meshv1.BootstrapAddress) {
	if len(bs) > maxBootstraps {
		f.bad("bootstraps", "has %d, want at most %d", len(bs), maxBootstraps)
		return
	}
	seen := make(map[string]bool)
	for i, b := range bs {
		at := fmt.Sprintf("bootstraps[%d]", i)
		f.key(at+".key", b.GetKey())
		if seen[b.GetKey()] {
			f.bad(at+".key", "%s is listed twice", b.GetKey())
		}
		seen[b.GetKey()] = true
		f.addresses(at+".addresses", b.GetAddresses())
	}
}

func checkCertificate(m *meshv1.JobCertificate) error {
	f := &form{record: "job certificate"}
	f.network(m.GetNetworkId())
	f.key("key", m.GetKey())
	f.id("job_id", id.Job, m.GetJobId())
	f.id("replica_id", id.Replica, m.GetReplicaId())
	f.id("attempt_id", id.Attempt, m.GetAttemptId())
	f.text("rack_id", m.GetRackId(), 0)
	f.span(m.GetNotBefore(), m.GetNotAfter(), "not_before")
	return f.err()
}

func (f *form) id(field, prefix, s string) {
	if !id.Valid(prefix, s) {
		f.bad(field, "%.64q is not an id of the form %s-...", s, prefix)
	}
}

func checkGrant(m *meshv1.Grant) error {
	f := &form{record: "grant"}
	f.network(m.GetNetworkId())
	f.key("client_key", m.GetClientKey())
	f.key("agent_key", m.GetAgentKey())
	f.id("job_id", id.Job, m.GetJobId())
	if n := len(m.GetRights()); n == 0 || n > len(grantRights) {
		f.bad("rights", "has %d rights, want 1 to %d", n, len(grantRights))
	} else {
		for i, r := range m.GetRights() {
			if !slices.Contains(grantRights, r) || slices.Contains(m.GetRights()[:i], r) {
				f.bad("rights", "%.32q is not one of %v, each once", r, grantRights)
			}
		}
	}
	f.span(m.GetNotBefore(), m.GetNotAfter(), "not_before")
	f.text("user_id", m.GetUserId(), 0)
	f.addresses("agent_addresses", m.GetAgentAddresses())
	if len(m.GetSshHostKey()) > 4<<10 {
		f.bad("ssh_host_key", "has %d bytes", len(m.GetSshHostKey()))
	}
	f.text("default_user", m.GetDefaultUser(), 0)
	return f.err()
}

func checkCard(m *meshv1.Card, signer peer.ID) error {
	f := &form{record: "card"}
	f.network(m.GetNetworkId())
	f.key("key", m.GetKey())
	if m.GetKey() != signer.String() {
		f.bad("key", "the card of %.64s is signed by %s", m.GetKey(), signer)
	}
	f.addresses("addresses", m.GetAddresses())
	if len(m.GetFeatures()) > maxFeatures {
		f.bad("features", "has %d, want at most %d", len(m.GetFeatures()), maxFeatures)
	} else {
		for _, s := range m.GetFeatures() {
			f.text("features", s, 1)
		}
	}
	for _, t := range []struct{ field, s string }{
		{"version", m.GetVersion()}, {"job_id", m.GetJobId()}, {"replica_id", m.GetReplicaId()},
		{"attempt_id", m.GetAttemptId()}, {"default_user", m.GetDefaultUser()}, {"name", m.GetName()},
	} {
		f.text(t.field, t.s, 0)
	}
	if len(m.GetSshHostKey()) > 4<<10 {
		f.bad("ssh_host_key", "has %d bytes", len(m.GetSshHostKey()))
	}
	if m.GetTtlSeconds() > maxCardTTL {
		f.bad("ttl_seconds", "is %d, want at most %d", m.GetTtlSeconds(), maxCardTTL)
	}
	return f.err()
}
