// Package apikey is the text form of an inference API key,
// "cak_<public id>_<secret><checksum>", and its keyed hash.
//
// The public id names the key in tables, logs and lists. The secret is never
// stored: both the owner of keys and the proxies hold only the HMAC of the
// whole key. The checksum lets a typing error be told apart from a wrong key
// without a look at any table; it proves nothing.
//
// The package does not store keys, know who owns them, or decide what they
// may do.
package apikey

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base32"
	"errors"
	"fmt"
	"io"
)

// Sizes of the parts, in base32 digits (five bits each).
const (
	// PublicIDLength is the length of the part that may be shown.
	PublicIDLength = 12
	// SecretLength is the length of the secret: 160 bits.
	SecretLength = 32
	// ChecksumLength is the length of the checksum at the end.
	ChecksumLength = 6

	// Prefix stands before every key, so that scanners for leaked secrets find it.
	Prefix = "cak_"

	// Length is the length of a whole key in bytes.
	Length = len(Prefix) + PublicIDLength + 1 + SecretLength + ChecksumLength

	secretStart   = len(Prefix) + PublicIDLength + 1
	checksumStart = secretStart + SecretLength
)

const digits = "abcdefghijklmnopqrstuvwxyz234567"

var encoding = base32.NewEncoding(digits).WithPadding(base32.NoPadding)

// ErrMalformed says that a text is not an API key. It never holds the text.
var ErrMalformed = errors.New("not an api key: want cak_, 12 digits, _, 38 digits out of a-z and 2-7")

// ErrChecksum says that a key has the right shape and a wrong checksum: a
// character was lost or changed on the way. It never holds the text.
var ErrChecksum = errors.New("api key has a wrong checksum: it was not copied whole or a character was changed")

// New makes a key out of random bytes. The full text is for its user, once;
// the public id is for tables and lists.
func New(random io.Reader) (full, publicID string, err error) {
	var raw [PublicIDLength + SecretLength]byte
	if _, err := io.ReadFull(random, raw[:]); err != nil {
		return "", "", fmt.Errorf("make an api key: read random bytes: %w", err)
	}
	for i, b := range raw {
		raw[i] = digits[b&31] // 256 is a multiple of 32: no digit is likelier
	}
	publicID = string(raw[:PublicIDLength])
	full = Prefix + publicID + "_" + string(raw[PublicIDLength:])
	return full + Checksum(full), publicID, nil
}

// Parse checks shape and checksum and returns the public id.
// Its time depends on the text only, not on any stored key.
func Parse(full string) (publicID string, err error) {
	if len(full) != Length || full[:len(Prefix)] != Prefix || full[secretStart-1] != '_' {
		return "", ErrMalformed
	}
	for i := len(Prefix); i < Length; i++ {
		if i != secretStart-1 && !isDigit(full[i]) {
			return "", ErrMalformed
		}
	}
	if Checksum(full[:checksumStart]) != full[checksumStart:] {
		return "", ErrChecksum
	}
	return full[len(Prefix) : secretStart-1], nil
}

// Checksum is the checksum of everything before it.
func Checksum(rest string) string {
	sum := sha256.Sum256([]byte(rest))
	return encoding.EncodeToString(sum[:5])[:ChecksumLength]
}

// MAC is HMAC-SHA256 of the whole key: what is kept in its place.
func MAC(hmacKey []byte, full string) []byte {
	mac := hmac.New(sha256.New, hmacKey)
	io.WriteString(mac, full)
	return mac.Sum(nil)
}

// Equal compares two MACs in constant time. An empty one equals nothing.
func Equal(a, b []byte) bool {
	return len(a) > 0 && hmac.Equal(a, b)
}

func isDigit(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= '2' && c <= '7'
}
