package trust

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"strings"

	"github.com/libp2p/go-libp2p/core/peer"
	"google.golang.org/protobuf/proto"

	"github.com/cosmicac/cosmicac/pkg/fault"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

// maxTokenText bounds a join token's text.
const maxTokenText = 16 << 10

func checkJoinToken(m *meshv1.JoinToken) error {
	f := &form{record: "join token"}
	f.network(m.GetNetworkId())
	f.keys("root_keys", m.GetRootKeys(), 1, maxRootKeys)
	f.bootstraps(m.GetBootstraps())
	if n := len(m.GetSecret()); n < 16 || n > 64 {
		f.bad("secret", "has %d bytes, want 16 to 64", n)
	}
	if m.GetName() != "" && !label(m.GetName()) {
		f.bad("name", "%.64q is not a DNS label", m.GetName())
	}
	if len(m.GetRoles()) > 0 {
		f.roles("roles", m.GetRoles(), false)
	}
	return f.err()
}

// EncodeJoinToken is the token as text in base64url. It holds a secret.
func EncodeJoinToken(m *meshv1.JoinToken) string {
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		return ""
	}
	return base64.RawURLEncoding.EncodeToString(b)
}

// DecodeJoinToken reads and checks a token's text. Errors do not quote it.
func DecodeJoinToken(s string) (*meshv1.JoinToken, error) {
	s = strings.TrimRight(strings.TrimSpace(s), "=")
	if len(s) > maxTokenText {
		return nil, fault.New(fault.TooLarge, "a join token of %d characters", len(s))
	}
	b, err := base64.RawURLEncoding.DecodeString(s)
	if err != nil {
		return nil, fault.New(fault.Invalid, "the join token is not base64url: copy the whole of it")
	}
	m := &meshv1.JoinToken{}
	if err := proto.Unmarshal(b, m); err != nil {
		return nil, fault.New(fault.Invalid, "the join token is damaged: copy the whole of it")
	}
	return m, checkJoinToken(m)
}

// JoinProof shows that key's request comes from a holder of a token's secret.
func JoinProof(secret []byte, key peer.ID) []byte {
	mac := hmac.New(sha256.New, secret)
	mac.Write([]byte(key.String()))
	return mac.Sum(nil)
}

// CheckJoinProof compares in constant time.
func CheckJoinProof(secret []byte, key peer.ID, proof []byte) bool {
	return len(secret) >= 16 && hmac.Equal(JoinProof(secret, key), proof)
}
