// Package identity holds the one Ed25519 keypair that is a daemon's address.
//
// The key file is a libp2p protobuf private key with mode 0600. A file that is
// readable by others, owned by someone else, or not a key is refused with words
// on what to do; it is never overwritten, because the key is the daemon's place
// in the roster.
//
// It does not rotate keys, does not encrypt them at rest, does not print the
// private half in any form, and knows nothing of who may do what: that is
// pkg/trust.
package identity

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/libp2p/go-libp2p/core/crypto"
	"github.com/libp2p/go-libp2p/core/peer"
	"golang.org/x/sys/unix"

	"github.com/cosmicac/cosmicac/pkg/fault"
)

// maxFileBytes bounds what is read of a key file; a real one has 68 bytes.
const maxFileBytes = 4 << 10

// Key is an Ed25519 keypair. It is immutable. Printing it shows the public half.
type Key struct {
	private crypto.PrivKey
	id      peer.ID
}

// New makes a key from a source of randomness.
func New(random io.Reader) (*Key, error) {
	private, _, err := crypto.GenerateEd25519Key(random)
	if err != nil {
		return nil, fault.Wrap(fault.Internal, err, "make an ed25519 key")
	}
	return wrap(private)
}

// Unmarshal reads a key in the form of a key file, as an agent's seed or an
// environment without files may carry it.
func Unmarshal(data []byte) (*Key, error) {
	private, err := crypto.UnmarshalPrivateKey(data)
	if err != nil {
		// The parser's words are left out: they may quote the bytes.
		return nil, fault.New(fault.Invalid, "not a private key in libp2p protobuf form")
	}
	return wrap(private)
}

// Marshal is the form of the key file. The caller keeps it secret.
func (k *Key) Marshal() ([]byte, error) { return crypto.MarshalPrivateKey(k.private) }

func wrap(private crypto.PrivKey) (*Key, error) {
	if private.Type() != crypto.Ed25519 {
		return nil, fault.New(fault.Invalid, "key is of type %s, want Ed25519", private.Type())
	}
	id, err := peer.IDFromPrivateKey(private)
	if err != nil {
		return nil, fault.Wrap(fault.Internal, err, "derive peer id")
	}
	return &Key{private: private, id: id}, nil
}

// ID is the public key as a libp2p peer id.
func (k *Key) ID() peer.ID { return k.id }

// Private is the key for libp2p. It must not be stored or shown.
func (k *Key) Private() crypto.PrivKey { return k.private }

// Hex is the public key as 64 hex digits.
func (k *Key) Hex() string { return HexID(k.id) }

// String is the peer id, so that a key that reaches a log shows nothing secret.
func (k *Key) String() string { return k.id.String() }

// GoString keeps %#v from showing the private half.
func (k *Key) GoString() string { return "identity.Key(" + k.id.String() + ")" }

// Format keeps every other verb from it.
func (k *Key) Format(s fmt.State, verb rune) {
	if verb == 'q' {
		fmt.Fprintf(s, "%q", k.String())
		return
	}
	if verb == 'v' && s.Flag('#') {
		_, _ = io.WriteString(s, k.GoString())
		return
	}
	_, _ = io.WriteString(s, k.String())
}

// HexID shows a peer id as 64 hex digits, or "" if it does not hold an Ed25519 key.
func HexID(p peer.ID) string {
	public, err := p.ExtractPublicKey()
	if err != nil || public.Type() != crypto.Ed25519 {
		return ""
	}
	raw, err := public.Raw()
	if err != nil {
		return ""
	}
	return hex.EncodeToString(raw)
}

// ParseID reads a public key as a peer id ("12D3Koo...") or as 64 hex digits.
func ParseID(s string) (peer.ID, error) {
	if len(s) == 64 {
		raw, err := hex.DecodeString(s)
		if err != nil {
			return "", fault.New(fault.Invalid, "%q is not 64 hex digits", s)
		}
		public, err := crypto.UnmarshalEd25519PublicKey(raw)
		if err != nil {
			return "", fault.New(fault.Invalid, "%q is not an ed25519 public key", s)
		}
		return peer.IDFromPublicKey(public)
	}
	if len(s) > 128 {
		return "", fault.New(fault.Invalid, "a key of %d characters: want a peer id or 64 hex digits", len(s))
	}
	p, err := peer.Decode(s)
	if err != nil || HexID(p) == "" {
		return "", fault.New(fault.Invalid, "%q is neither a peer id of an ed25519 key nor 64 hex digits", s)
	}
	return p, nil
}

// Load reads a key file and checks its owner and mode.
func Load(path string) (*Key, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, fault.Wrap(fault.NotFound, err, "read key file")
	case errors.Is(err, unix.ELOOP):
		return nil, refuse(fault.Denied, path, "is a symbolic link", "put the key file itself there")
	case errors.Is(err, fs.ErrPermission):
		return nil, fault.Wrap(fault.Denied, err, "read key file (run as its owner, or chown it to the daemon's user)")
	case err != nil:
		return nil, fault.Wrap(fault.Internal, err, "read key file")
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, fault.Wrap(fault.Internal, err, "read key file")
	}
	if err := checkOwner(path, info); err != nil {
		return nil, err
	}
	data, err := io.ReadAll(io.LimitReader(f, maxFileBytes+1))
	if err != nil {
		return nil, fault.Wrap(fault.Internal, err, "read key file")
	}
	key, err := Unmarshal(data)
	if err != nil || len(data) > maxFileBytes {
		return nil, refuse(fault.Invalid, path, "does not hold an ed25519 private key in libp2p form",
			"restore it from a backup, or move it away to have a new key made (the new key must be admitted again)")
	}
	return key, nil
}

func checkOwner(path string, info fs.FileInfo) error {
	if !info.Mode().IsRegular() {
		return refuse(fault.Denied, path, "is not a regular file", "put the key file itself there")
	}
	if mode := info.Mode().Perm(); mode&0o077 != 0 {
		return refuse(fault.Denied, path, fmt.Sprintf("has mode %04o, others may read it; want 0600", mode), "chmod 600 "+path)
	}
	if uid, ok := ownerOf(info); ok && uid != os.Geteuid() {
		return refuse(fault.Denied, path, fmt.Sprintf("belongs to user %d, this process runs as user %d", uid, os.Geteuid()),
			fmt.Sprintf("chown %d %s", os.Geteuid(), path))
	}
	return nil
}

func refuse(kind fault.Kind, path, rule, remedy string) error {
	return fault.New(kind, "key file %s %s: %s", path, rule, remedy).With(fault.Detail{Field: path, Rule: rule})
}

// LoadOrCreate reads a key file, or makes one with mode 0600 if there is none.
// The folder must exist. Of several processes that create at once one wins and
// all load its key.
func LoadOrCreate(path string) (*Key, error) {
	key, err := Load(path)
	if !fault.Is(err, fault.NotFound) {
		return key, err
	}
	key, err = New(rand.Reader)
	if err != nil {
		return nil, err
	}
	if err := Save(path, key); err != nil && !fault.Is(err, fault.Conflict) {
		return nil, err
	}
	return Load(path)
}

// Save writes a key to a new file with mode 0600, whole or not at all. A file
// that exists is never touched: fault.Conflict.
func Save(path string, key *Key) error {
	data, err := key.Marshal()
	if err != nil {
		return fault.Wrap(fault.Internal, err, "encode key")
	}
	dir := filepath.Dir(path)
	tmp, err := os.CreateTemp(dir, "."+filepath.Base(path)+".*") // made with mode 0600
	if err != nil {
		return fault.Wrap(fault.Unavailable, err, "create key file %s", path)
	}
	defer os.Remove(tmp.Name())
	_, err = tmp.Write(data)
	if err == nil {
		err = tmp.Sync()
	}
	if cerr := tmp.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return fault.Wrap(fault.Unavailable, err, "write key file %s", path)
	}
	// A hard link fails if the name exists, which a rename would not.
	if err := os.Link(tmp.Name(), path); err != nil {
		if errors.Is(err, fs.ErrExist) {
			return fault.New(fault.Conflict, "key file %s exists already and is never overwritten", path)
		}
		return fault.Wrap(fault.Unavailable, err, "create key file %s", path)
	}
	if d, err := os.Open(dir); err == nil {
		_ = d.Sync()
		_ = d.Close()
	}
	return nil
}

// Short is a peer id for a log line: its last 8 characters.
func Short(p peer.ID) string {
	s := p.String()
	return s[max(0, len(s)-8):]
}

func ownerOf(info fs.FileInfo) (uid int, ok bool) {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, false
	}
	return int(st.Uid), true
}
