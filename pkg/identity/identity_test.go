package identity

import (
	"bytes"
	"crypto/rand"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/cosmicac/cosmicac/pkg/fault"
)

func TestKeyIsMadeOnceAndComesBack(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "key")
	var wg sync.WaitGroup
	ids := make([]string, 8)
	for i := range ids {
		wg.Go(func() {
			k, err := LoadOrCreate(path)
			if err != nil {
				t.Error(err)
				return
			}
			ids[i] = k.Hex()
		})
	}
	wg.Wait()
	for _, id := range ids {
		if id != ids[0] || len(id) != 64 {
			t.Fatalf("keys differ: %v", ids)
		}
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Fatalf("mode %v, %v", info.Mode(), err)
	}
	if left, _ := os.ReadDir(filepath.Dir(path)); len(left) != 1 {
		t.Fatalf("left behind: %v", left)
	}
}

func TestLooseBrokenAndForeignKeyFilesAreRefusedAndKept(t *testing.T) {
	t.Parallel()
	good, err := New(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	data, _ := good.Marshal()
	for _, c := range []struct {
		name string
		data []byte
		mode os.FileMode
		want string
	}{
		{"readable by the group", data, 0o640, "chmod 600"},
		{"readable by all", data, 0o644, "chmod 600"},
		{"empty", nil, 0o600, "does not hold"},
		{"garbage", []byte("-----BEGIN PRIVATE KEY-----"), 0o600, "does not hold"},
		{"truncated", data[:len(data)-3], 0o600, "does not hold"},
	} {
		path := filepath.Join(t.TempDir(), "key")
		if err := os.WriteFile(path, c.data, c.mode); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, c.mode); err != nil {
			t.Fatal(err)
		}
		_, err := LoadOrCreate(path)
		if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v", c.name, err)
		}
		if len(c.data) > 8 && strings.Contains(err.Error(), string(c.data[4:])) {
			t.Errorf("%s: the error shows the key", c.name)
		}
		if now, _ := os.ReadFile(path); !bytes.Equal(now, c.data) {
			t.Errorf("%s: the file was changed", c.name)
		}
	}

	path := filepath.Join(t.TempDir(), "key")
	if err := Save(path, good); err != nil {
		t.Fatal(err)
	}
	if err := Save(path, good); !fault.Is(err, fault.Conflict) {
		t.Errorf("overwriting: %v", err)
	}
	link := path + "-link"
	if err := os.Symlink(path, link); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(link); !fault.Is(err, fault.Denied) {
		t.Errorf("symbolic link: %v", err)
	}
	if os.Geteuid() == 0 {
		if err := os.Chown(path, 4242, -1); err != nil {
			t.Fatal(err)
		}
		if _, err := Load(path); !fault.Is(err, fault.Denied) || !strings.Contains(err.Error(), "user 4242") {
			t.Errorf("another user's file: %v", err)
		}
	}
}

func TestBothFormsOfAPublicKeyAreRead(t *testing.T) {
	t.Parallel()
	k, err := New(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range []string{k.ID().String(), k.Hex(), strings.ToUpper(k.Hex())} {
		got, err := ParseID(s)
		if err != nil || got != k.ID() {
			t.Errorf("%s: %v, %v", s, got, err)
		}
	}
	for _, s := range []string{"", "x", k.Hex()[:63], strings.Repeat("z", 64), "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", strings.Repeat("1", 5000)} {
		if got, err := ParseID(s); !fault.Is(err, fault.Invalid) {
			t.Errorf("%q was read as %v, %v", s, got, err)
		}
	}
}

func TestPrintingAKeyNeverShowsItsPrivateHalf(t *testing.T) {
	t.Parallel()
	k, err := New(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%d"} {
		if got := fmt.Sprintf(verb, k); !strings.Contains(got, k.ID().String()) || len(got) > 100 {
			t.Errorf("%s shows %s", verb, got)
		}
	}
}
