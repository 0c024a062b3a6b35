package apikey

import (
	"bytes"
	"crypto/rand"
	"errors"
	"strings"
	"testing"
)

func TestNewKeyParsesBackToItsPublicID(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for range 200 {
		full, publicID, err := New(rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		if len(full) != Length || !strings.HasPrefix(full, "cak_"+publicID+"_") {
			t.Fatalf("unexpected shape, length %d", len(full))
		}
		got, err := Parse(full)
		if err != nil || got != publicID {
			t.Fatalf("Parse = %q, %v; want %q", got, err, publicID)
		}
		if seen[full] {
			t.Fatal("the same key twice")
		}
		seen[full] = true
	}
}

func TestMistypedKeyIsToldFromWrongShape(t *testing.T) {
	t.Parallel()
	full, _, err := New(bytes.NewReader(bytes.Repeat([]byte{7}, 64)))
	if err != nil {
		t.Fatal(err)
	}
	for i := len(Prefix); i < Length; i++ {
		if full[i] == '_' {
			continue
		}
		changed := []byte(full)
		changed[i] = 'a'
		if changed[i] == full[i] {
			changed[i] = 'b'
		}
		if _, err := Parse(string(changed)); !errors.Is(err, ErrChecksum) {
			t.Fatalf("digit %d changed: %v", i, err)
		}
	}
	for _, bad := range []string{"", "cak_", full[1:], full + "a", strings.ToUpper(full), strings.Replace(full, "cak_", "sk-_", 1),
		full[:20] + "1" + full[21:], full[:16] + "a" + full[17:]} {
		if _, err := Parse(bad); !errors.Is(err, ErrMalformed) {
			t.Errorf("Parse(%d bytes) = %v, want ErrMalformed", len(bad), err)
		}
	}
}

func TestMACNeedsTheSameKeyAndText(t *testing.T) {
	t.Parallel()
	full, _, _ := New(rand.Reader)
	other, _, _ := New(rand.Reader)
	mac := MAC([]byte("k"), full)
	if !Equal(mac, MAC([]byte("k"), full)) {
		t.Error("the same key and text differ")
	}
	if Equal(mac, MAC([]byte("k"), other)) || Equal(mac, MAC([]byte("l"), full)) || Equal(nil, nil) {
		t.Error("different inputs are equal")
	}
}

func TestShortRandomnessIsAnError(t *testing.T) {
	t.Parallel()
	if _, _, err := New(strings.NewReader("short")); err == nil {
		t.Error("a key was made from too few random bytes")
	}
}
