package ssh

import (
	"crypto/ed25519"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"

	"github.com/google/renameio/v2"
	"golang.org/x/crypto/ssh"

	"github.com/cosmicac/cosmicac/pkg/fault"
)

// HostKey loads the server's Ed25519 host key, or makes one with mode 0600. A
// file that others may read is refused. random is read only when a key is made.
func HostKey(path string, random io.Reader) (ssh.Signer, error) {
	raw, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return makeHostKey(path, random)
	}
	if err != nil {
		return nil, fault.Wrap(fault.Internal, err, "read ssh host key %s", path)
	}
	info, err := os.Stat(path)
	if err != nil {
		return nil, fault.Wrap(fault.Internal, err, "look at ssh host key %s", path)
	}
	if info.Mode().Perm()&0o077 != 0 {
		return nil, fault.New(fault.Denied, "ssh host key %s may be read by others (mode %04o): chmod 600 it, or remove it to have a new one made", path, info.Mode().Perm())
	}
	signer, err := ssh.ParsePrivateKey(raw)
	if err != nil {
		// The parser's error says nothing of the key's content.
		return nil, fault.Wrap(fault.Internal, err, "parse ssh host key %s; remove it to have a new one made", path)
	}
	return signer, nil
}

func makeHostKey(path string, random io.Reader) (ssh.Signer, error) {
	_, private, err := ed25519.GenerateKey(random)
	if err != nil {
		return nil, fmt.Errorf("make ssh host key: %w", err)
	}
	block, err := ssh.MarshalPrivateKey(private, "")
	if err != nil {
		return nil, fmt.Errorf("encode ssh host key: %w", err)
	}
	if err := renameio.WriteFile(path, pem.EncodeToMemory(block), 0o600, renameio.IgnoreUmask()); err != nil {
		return nil, fault.Wrap(fault.Internal, err, "write ssh host key %s", path)
	}
	return ssh.NewSignerFromKey(private)
}

// PublicText is a key in authorized_keys form without a comment, as cards and
// grants carry it.
func PublicText(key ssh.PublicKey) string {
	return strings.TrimSpace(string(ssh.MarshalAuthorizedKey(key)))
}
