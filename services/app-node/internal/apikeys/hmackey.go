package apikeys

import (
	"crypto/rand"
	"errors"
	"io"
	"io/fs"
	"os"

	"github.com/google/renameio/v2"

	"github.com/cosmicac/cosmicac/pkg/fault"
)

const hmacKeyBytes = 32

// LoadHMACKey reads the key under which API keys are hashed, or makes one. Losing
// the file makes every API key useless; it is part of a backup. A file that
// others may read is refused.
func LoadHMACKey(path string) ([]byte, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		key := make([]byte, hmacKeyBytes)
		if _, err := io.ReadFull(rand.Reader, key); err != nil {
			return nil, err
		}
		if err := renameio.WriteFile(path, key, 0o600, renameio.WithPermissions(0o600)); err != nil {
			return nil, fault.Wrap(fault.Internal, err, "write the key of api keys to %s", path)
		}
		return key, nil
	}
	if err != nil {
		return nil, fault.Wrap(fault.Internal, err, "read the key of api keys from %s", path)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if info.Mode().Perm()&0o077 != 0 {
		return nil, fault.New(fault.Denied, "%s has mode %04o and others may read it: run chmod 600 on it", path, info.Mode().Perm())
	}
	key := make([]byte, hmacKeyBytes+1)
	n, err := io.ReadFull(f, key)
	if n != hmacKeyBytes || !errors.Is(err, io.ErrUnexpectedEOF) {
		return nil, fault.New(fault.Internal, "%s must hold %d bytes: restore it from a backup, or remove it and make every api key anew", path, hmacKeyBytes)
	}
	return key[:hmacKeyBytes], nil
}
