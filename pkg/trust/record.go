package trust

import (
	"bytes"
	"time"

	"github.com/libp2p/go-libp2p/core/crypto"
	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/libp2p/go-libp2p/core/record"
	"google.golang.org/protobuf/proto"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/identity"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

// Skew is the difference of clocks that every signed expiry allows.
const Skew = 15 * time.Minute

// The domain string of each record. It is part of what is signed.
const (
	domainGenesis     = "cosmicac/genesis/1"
	domainRoster      = "cosmicac/roster/1"
	domainNetworkInfo = "cosmicac/network-info/1"
	domainCertificate = "cosmicac/certificate/1"
	domainGrant       = "cosmicac/grant/1"
	domainCard        = "cosmicac/card/1"
)

// Bounds of an envelope, in bytes, checked before anything is parsed.
const (
	// MaxRosterBytes is the largest roster envelope. Roster and NetworkInfo
	// together fit one frame of admission (1 MiB).
	MaxRosterBytes = 896 << 10
	// MaxInfoBytes is the largest NetworkInfo envelope.
	MaxInfoBytes = 64 << 10
	// MaxRecordBytes is the largest envelope of every other record.
	MaxRecordBytes = 16 << 10
)

// payload makes a protobuf message a libp2p record of one domain.
type payload struct {
	domain  string
	message proto.Message
}

var _ record.Record = (*payload)(nil)

func (p *payload) Domain() string { return p.domain }
func (p *payload) Codec() []byte  { return []byte(p.domain) }
func (p *payload) MarshalRecord() ([]byte, error) {
	return proto.MarshalOptions{Deterministic: true}.Marshal(p.message)
}
func (p *payload) UnmarshalRecord(b []byte) error { return proto.Unmarshal(b, p.message) }

func seal(key *identity.Key, domain string, limit int, m proto.Message) ([]byte, error) {
	env, err := record.Seal(&payload{domain, m}, key.Private())
	if err != nil {
		return nil, fault.Wrap(fault.Internal, err, "sign %s", domain)
	}
	data, err := env.Marshal()
	if err != nil {
		return nil, fault.Wrap(fault.Internal, err, "sign %s", domain)
	}
	if len(data) > limit {
		return nil, fault.New(fault.TooLarge, "%s of %d bytes is over the bound of %d", domain, len(data), limit)
	}
	return data, nil
}

// open checks the signature of an envelope, reads its payload into m and returns
// who signed it. Whether that key may sign such a record is the caller's question.
func open(data []byte, domain string, limit int, m proto.Message) (signer peer.ID, err error) {
	if len(data) == 0 {
		return "", fault.New(fault.Invalid, "no %s given", domain)
	}
	if len(data) > limit {
		return "", fault.New(fault.TooLarge, "%s of %d bytes is over the bound of %d", domain, len(data), limit)
	}
	// The envelope of a key without a parser would reach Verify of a nil key.
	env, err := record.UnmarshalEnvelope(data)
	if err != nil {
		return "", fault.Wrap(fault.Invalid, err, "%s is not a signed envelope", domain)
	}
	if env.PublicKey == nil || env.PublicKey.Type() != crypto.Ed25519 {
		return "", fault.New(fault.Invalid, "%s is not signed by an ed25519 key", domain)
	}
	if !bytes.Equal(env.PayloadType, []byte(domain)) {
		return "", fault.New(fault.Invalid, "envelope holds %.64q, want %s", env.PayloadType, domain)
	}
	if _, err := record.ConsumeTypedEnvelope(data, &payload{domain, m}); err != nil {
		return "", fault.Wrap(fault.Unauthenticated, err, "signature of %s does not hold", domain)
	}
	signer, err = peer.IDFromPublicKey(env.PublicKey)
	if err != nil {
		return "", fault.Wrap(fault.Invalid, err, "signer of %s", domain)
	}
	return signer, nil
}

// SealGenesis signs a genesis record with its first root key.
func SealGenesis(key *identity.Key, m *meshv1.Genesis) ([]byte, error) {
	if err := checkGenesis(m); err != nil {
		return nil, err
	}
	if m.GetRootKeys()[0] != key.ID().String() {
		return nil, fault.New(fault.Invalid, "a genesis record is signed by its first root key %s, not by %s", m.GetRootKeys()[0], key)
	}
	return seal(key, domainGenesis, MaxRecordBytes, m)
}

// SealRotation signs new root keys for the same network with a root key of the
// set in force. It goes into NetworkInfo.rotation_envelopes.
func SealRotation(key *identity.Key, m *meshv1.Genesis) ([]byte, error) {
	if err := checkGenesis(m); err != nil {
		return nil, err
	}
	return seal(key, domainGenesis, MaxRecordBytes, m)
}

// SealRoster signs a roster.
func SealRoster(key *identity.Key, m *meshv1.Roster) ([]byte, error) {
	if err := checkRoster(m, true); err != nil {
		return nil, err
	}
	return seal(key, domainRoster, MaxRosterBytes, m)
}

// SealNetworkInfo signs a NetworkInfo.
func SealNetworkInfo(key *identity.Key, m *meshv1.NetworkInfo) ([]byte, error) {
	if err := checkNetworkInfo(m); err != nil {
		return nil, err
	}
	return seal(key, domainNetworkInfo, MaxInfoBytes, m)
}

// SealCertificate signs a job certificate.
func SealCertificate(key *identity.Key, m *meshv1.JobCertificate) ([]byte, error) {
	if err := checkCertificate(m); err != nil {
		return nil, err
	}
	return seal(key, domainCertificate, MaxRecordBytes, m)
}

// SealGrant signs a grant.
func SealGrant(key *identity.Key, m *meshv1.Grant) ([]byte, error) {
	if err := checkGrant(m); err != nil {
		return nil, err
	}
	return seal(key, domainGrant, MaxRecordBytes, m)
}

// SealCard signs a node's own card.
func SealCard(key *identity.Key, m *meshv1.Card) ([]byte, error) {
	if err := checkCard(m, key.ID()); err != nil {
		return nil, err
	}
	return seal(key, domainCard, MaxRecordBytes, m)
}

// OpenGenesis checks that the first root key named in the record signed it.
// Whether that network is the wanted one is the caller's question.
func OpenGenesis(env []byte) (*meshv1.Genesis, error) {
	m, signer, err := openGenesis(env)
	if err != nil {
		return nil, err
	}
	if m.GetRootKeys()[0] != signer.String() {
		return nil, fault.New(fault.Denied, "genesis is signed by %s, not by its first root key", signer)
	}
	return m, nil
}

func openGenesis(env []byte) (*meshv1.Genesis, peer.ID, error) {
	m := &meshv1.Genesis{}
	signer, err := open(env, domainGenesis, MaxRecordBytes, m)
	if err != nil {
		return nil, "", err
	}
	return m, signer, checkGenesis(m)
}

// OpenRoster checks signature and form, not that the signer may sign rosters:
// Network.Adopt does.
func OpenRoster(env []byte) (*meshv1.Roster, error) {
	m, _, err := openRoster(env)
	return m, err
}

func openRoster(env []byte) (*meshv1.Roster, peer.ID, error) {
	m := &meshv1.Roster{}
	signer, err := open(env, domainRoster, MaxRosterBytes, m)
	if err != nil {
		return nil, "", err
	}
	if err := checkRoster(m, false); err != nil {
		return nil, "", err
	}
	return m, signer, nil
}

// OpenNetworkInfo checks signature and form, not that the signer may sign it:
// Network.Adopt does.
func OpenNetworkInfo(env []byte) (*meshv1.NetworkInfo, error) {
	m, _, err := openNetworkInfo(env)
	return m, err
}

func openNetworkInfo(env []byte) (*meshv1.NetworkInfo, peer.ID, error) {
	m := &meshv1.NetworkInfo{}
	signer, err := open(env, domainNetworkInfo, MaxInfoBytes, m)
	if err != nil {
		return nil, "", err
	}
	if err := checkNetworkInfo(m); err != nil {
		return nil, "", err
	}
	return m, signer, nil
}

// OpenCertificate checks signature and form only: Network.CheckCertificate
// checks the rest.
func OpenCertificate(env []byte) (*meshv1.JobCertificate, error) {
	m, _, err := openCertificate(env)
	return m, err
}

func openCertificate(env []byte) (*meshv1.JobCertificate, peer.ID, error) {
	m := &meshv1.JobCertificate{}
	signer, err := open(env, domainCertificate, MaxRecordBytes, m)
	if err != nil {
		return nil, "", err
	}
	if err := checkCertificate(m); err != nil {
		return nil, "", err
	}
	return m, signer, nil
}

// OpenGrant checks signature and form only: Network.CheckGrant checks the rest.
func OpenGrant(env []byte) (*meshv1.Grant, error) {
	m, _, err := openGrant(env)
	return m, err
}

func openGrant(env []byte) (*meshv1.Grant, peer.ID, error) {
	m := &meshv1.Grant{}
	signer, err := open(env, domainGrant, MaxRecordBytes, m)
	if err != nil {
		return nil, "", err
	}
	if err := checkGrant(m); err != nil {
		return nil, "", err
	}
	return m, signer, nil
}

// OpenCard checks that the card's own key signed it. Everything a card says is
// its key's word alone.
func OpenCard(env []byte) (*meshv1.Card, error) {
	m := &meshv1.Card{}
	signer, err := open(env, domainCard, MaxRecordBytes, m)
	if err != nil {
		return nil, err
	}
	if err := checkCard(m, signer); err != nil {
		return nil, err
	}
	return m, nil
}
