// Package id makes and checks the ids of jobs, replicas, attempts, racks, users
// and the other things that people and cluster objects name.
//
// An id is a typed prefix, a dash and 13 lower-case base32 digits: "j-06f2k9q4hvxna".
// It is a DNS label, sorts by the time it was made, and is never used again.
// 42 bits are milliseconds since 2020 (good until 2159), the other 22 are random
// and grow by at least one within a millisecond, so ids of one Source are
// strictly increasing, also when its clock steps back.
//
// It does not look anything up, and an id is no secret: it authorizes nothing.
package id

import (
	"crypto/rand"
	"encoding/binary"
	"io"
	"strings"
	"sync"
	"time"
)

// The prefixes in use. A prefix is never given to another kind of thing.
const (
	Job      = "j"
	Replica  = "r"
	Attempt  = "a"
	Rack     = "rk"
	User     = "u"
	Project  = "p"
	APIKey   = "k"
	Endpoint = "ep"
	Usage    = "us"
	Volume   = "v"
)

// Digits is the number of digits after the dash.
const Digits = 13

// alphabet is Crockford's base32 in lower case: no i, l, o, u, and its order is
// the order of bytes.
const alphabet = "0123456789abcdefghjkmnpqrstvwxyz"

const randomBits = 22

// epochMilliseconds is 2020-01-01T00:00:00Z.
const epochMilliseconds = 1577836800000

// Source makes ids from a clock and a source of randomness. It is safe for
// concurrent use.
type Source struct {
	now  func() time.Time
	rand io.Reader

	mu   sync.Mutex
	last uint64
}

// NewSource makes a Source. A nil clock is time.Now, a nil reader crypto/rand.
func NewSource(now func() time.Time, random io.Reader) *Source {
	if now == nil {
		now = time.Now
	}
	if random == nil {
		random = rand.Reader
	}
	return &Source{now: now, rand: random}
}

var system = NewSource(nil, nil)

// New makes an id from the system's clock and randomness.
func New(prefix string) string { return system.New(prefix) }

// New makes an id, greater than every id this source made before.
func (s *Source) New(prefix string) string {
	var b [8]byte
	// crypto/rand never fails; another reader that does leaves zeros, and the
	// counter below keeps the ids of this source apart.
	_, _ = io.ReadFull(s.rand, b[:])
	random := binary.BigEndian.Uint64(b[:]) & (1<<randomBits - 1)
	ms := s.now().UnixMilli() - epochMilliseconds
	if ms < 0 {
		ms = 0
	}
	s.mu.Lock()
	v := uint64(ms)<<randomBits | random
	if v <= s.last {
		v = s.last + 1 + random>>(randomBits/2)
	}
	s.last = v
	s.mu.Unlock()
	return prefix + "-" + digits(v)
}

func digits(v uint64) string {
	var out [Digits]byte
	for i := Digits - 1; i >= 0; i-- {
		out[i] = alphabet[v&31]
		v >>= 5
	}
	return string(out[:])
}

// Valid tells whether s is an id with this prefix.
func Valid(prefix, s string) bool {
	rest, ok := strings.CutPrefix(s, prefix+"-")
	if !ok || len(rest) != Digits {
		return false
	}
	for i := range len(rest) {
		if strings.IndexByte(alphabet, rest[i]) < 0 {
			return false
		}
	}
	return true
}

// Time is when an id was made, to the millisecond, by its maker's clock. It is
// the zero time for what is not an id.
func Time(s string) time.Time {
	prefix, rest, ok := strings.Cut(s, "-")
	if !ok || !Valid(prefix, s) {
		return time.Time{}
	}
	var v uint64
	for i := range len(rest) {
		v = v<<5 | uint64(strings.IndexByte(alphabet, rest[i]))
	}
	return time.UnixMilli(int64(v>>randomBits) + epochMilliseconds)
}
