//go:build linux

package ssh_test

import (
	"crypto/rand"
	"os"
	"path/filepath"
	"testing"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/ssh"
)

func TestHostKeyIsKeptAndNotReadByOthers(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "key")
	first, err := ssh.HostKey(path, rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	second, err := ssh.HostKey(path, rand.Reader)
	if err != nil || ssh.PublicText(first.PublicKey()) != ssh.PublicText(second.PublicKey()) {
		t.Fatalf("another key after a restart, error %v", err)
	}
	if err := os.Chmod(path, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := ssh.HostKey(path, rand.Reader); fault.KindOf(err) != fault.Denied {
		t.Fatalf("a key that others read: %v", err)
	}
}
