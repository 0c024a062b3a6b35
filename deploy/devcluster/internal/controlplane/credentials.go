package controlplane

import (
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// User is a built-in user of the API server.
type User string

// The built-in users. The simulator has a name of its own so that admission can tell it, as KubeVirt's own service
// accounts are told, from everybody else.
const (
	Admin     User = "admin"
	Simulator User = "cosmicac-devcluster-simulator"
)

type credentials struct {
	dir       string
	tokens    map[User]string
	tokenFile string
	keyFile   string // signs service account tokens
}

// loadCredentials reads the tokens and the signing key from dir and makes what is missing. They stay the same over
// restarts, so that kubeconfigs handed out before stay good.
func loadCredentials(dir string) (credentials, error) {
	c := credentials{
		dir: dir, tokens: map[User]string{},
		tokenFile: filepath.Join(dir, "tokens.csv"), keyFile: filepath.Join(dir, "service-accounts.key"),
	}
	if err := os.MkdirAll(filepath.Join(dir, "serving"), 0o700); err != nil {
		return c, fmt.Errorf("make the key folder: %w", err)
	}
	if _, err := os.Stat(c.keyFile); errors.Is(err, fs.ErrNotExist) {
		key, err := rsa.GenerateKey(rand.Reader, 2048)
		if err != nil {
			return c, fmt.Errorf("make the service account key: %w", err)
		}
		block := pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)})
		if err := writeAtomic(c.keyFile, block); err != nil {
			return c, err
		}
	}
	if raw, err := os.ReadFile(c.tokenFile); err == nil {
		for line := range strings.Lines(string(raw)) {
			if f := strings.Split(strings.TrimSpace(line), ","); len(f) >= 2 {
				c.tokens[User(f[1])] = f[0]
			}
		}
	}
	if c.tokens[Admin] == "" || c.tokens[Simulator] == "" {
		var csv strings.Builder
		for _, u := range []User{Admin, Simulator} {
			raw := make([]byte, 24)
			rand.Read(raw)
			c.tokens[u] = hex.EncodeToString(raw)
			fmt.Fprintf(&csv, "%s,%s,%s,system:masters\n", c.tokens[u], u, u)
		}
		if err := writeAtomic(c.tokenFile, []byte(csv.String())); err != nil {
			return c, err
		}
	}
	return c, nil
}

// writeAtomic leaves either the old file or the whole new one, readable by the owner alone.
func writeAtomic(file string, data []byte) error {
	tmp := file + ".new"
	if err := os.WriteFile(tmp, data, 0o600); err != nil {
		return fmt.Errorf("write %s: %w", file, err)
	}
	if err := os.Rename(tmp, file); err != nil {
		return fmt.Errorf("write %s: %w", file, err)
	}
	return nil
}
