package account

import (
	"context"
	"crypto/subtle"
	"encoding/base64"
	"fmt"
	"io"
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/crypto/argon2"

	"github.com/cosmicac/cosmicac/pkg/fault"
)

// Bounds of a password, in characters and bytes.
const (
	MinimumPasswordCharacters = 10
	MaximumPasswordBytes      = 256
)

// Cost of one hash: 19 MiB, two passes, one lane. Written into every hash, so it
// can be raised without making old hashes useless.
const (
	hashMemoryKiB = 19 * 1024
	hashPasses    = 2
	hashLanes     = 1
	hashBytes     = 32
	saltBytes     = 16
)

// Hasher makes and checks argon2id hashes, a few at a time: each takes memory.
type Hasher struct {
	random io.Reader
	slots  chan struct{}
	// dummy is checked when there is no user, so that both answers take the same time.
	dummy string
}

// NewHasher makes a hasher that runs at most `parallel` hashes at once.
func NewHasher(random io.Reader, parallel int) (*Hasher, error) {
	h := &Hasher{random: random, slots: make(chan struct{}, parallel)}
	dummy, err := h.Hash(context.Background(), "a password that nobody has")
	h.dummy = dummy
	return h, err
}

// CheckPolicy says whether a password is good enough for a user with this email.
func CheckPolicy(password, email string) error {
	refuse := func(rule string) error {
		return fault.New(fault.Invalid, "the password %s", rule).With(fault.Detail{Field: "password", Rule: rule})
	}
	switch {
	case !utf8.ValidString(password):
		return refuse("must be UTF-8 text")
	case strings.ContainsFunc(password, unicode.IsControl):
		return refuse("must not hold line breaks or control characters")
	case strings.TrimSpace(password) == "":
		return refuse("must not be blanks alone")
	case utf8.RuneCountInString(password) < MinimumPasswordCharacters:
		return refuse(fmt.Sprintf("must have at least %d characters", MinimumPasswordCharacters))
	case len(password) > MaximumPasswordBytes:
		return refuse(fmt.Sprintf("must have at most %d bytes", MaximumPasswordBytes))
	case strings.EqualFold(password, email):
		return refuse("must not be the email")
	}
	return nil
}

// Hash makes a PHC string of a password with a fresh salt. It waits for a slot.
func (h *Hasher) Hash(ctx context.Context, password string) (string, error) {
	salt := make([]byte, saltBytes)
	if _, err := io.ReadFull(h.random, salt); err != nil {
		return "", fmt.Errorf("read random bytes for a salt: %w", err)
	}
	if err := h.enter(ctx); err != nil {
		return "", err
	}
	defer h.leave()
	sum := argon2.IDKey([]byte(password), salt, hashPasses, hashMemoryKiB, hashLanes, hashBytes)
	return fmt.Sprintf("$argon2id$v=%d$m=%d,t=%d,p=%d$%s$%s", argon2.Version, hashMemoryKiB, hashPasses, hashLanes,
		base64.RawStdEncoding.EncodeToString(salt), base64.RawStdEncoding.EncodeToString(sum)), nil
}

// Matches tells whether a password is the one that was hashed. An empty hash
// stands for no user: it costs the same time and never matches.
func (h *Hasher) Matches(ctx context.Context, hash, password string) (bool, error) {
	known := hash != ""
	if !known {
		hash = h.dummy
	}
	var version, memory, passes, lanes int
	parts := strings.Split(hash, "$")
	if len(parts) != 6 || parts[1] != "argon2id" {
		return false, fault.New(fault.Internal, "a stored password hash is not in a known form")
	}
	if _, err := fmt.Sscanf(parts[2]+" "+parts[3], "v=%d m=%d,t=%d,p=%d", &version, &memory, &passes, &lanes); err != nil || version != argon2.Version {
		return false, fault.New(fault.Internal, "a stored password hash has unknown parameters")
	}
	salt, err1 := base64.RawStdEncoding.DecodeString(parts[4])
	want, err2 := base64.RawStdEncoding.DecodeString(parts[5])
	if err1 != nil || err2 != nil || len(want) == 0 {
		return false, fault.New(fault.Internal, "a stored password hash is damaged")
	}
	if err := h.enter(ctx); err != nil {
		return false, err
	}
	defer h.leave()
	got := argon2.IDKey([]byte(password), salt, uint32(passes), uint32(memory), uint8(lanes), uint32(len(want)))
	return subtle.ConstantTimeCompare(got, want) == 1 && known, nil
}

func (h *Hasher) enter(ctx context.Context) error {
	select {
	case h.slots <- struct{}{}:
		return nil
	case <-ctx.Done():
		return fault.Wrap(fault.Unavailable, ctx.Err(), "too many sign-ins are being checked: try again")
	}
}

func (h *Hasher) leave() { <-h.slots }
