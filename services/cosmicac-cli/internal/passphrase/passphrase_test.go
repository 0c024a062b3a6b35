package passphrase

import (
	"bytes"
	"testing"

	"github.com/cosmicac/cosmicac/pkg/fault"
)

const cheap = 10

func TestAFileOpensWithItsPassphraseOnly(t *testing.T) {
	t.Parallel()
	plain := []byte("-----BEGIN SOMETHING-----\n")
	sealed, err := Encrypt(plain, "correct horse battery", cheap)
	if err != nil || !Encrypted(append([]byte("\n"), sealed...)) || bytes.Contains(sealed, plain) {
		t.Fatalf("%v\n%s", err, sealed)
	}
	if back, err := Decrypt(append(sealed, '\n'), "correct horse battery"); err != nil || !bytes.Equal(back, plain) {
		t.Errorf("%q, %v", back, err)
	}
	for what, text := range map[string][]byte{"cut": sealed[:len(sealed)-60], "nothing": nil, "plain": plain} {
		if _, err := Decrypt(text, "correct horse battery"); err == nil {
			t.Errorf("%s opens", what)
		}
	}
	if _, err := Decrypt(sealed, "another passphrase"); !fault.Is(err, fault.Unauthenticated) {
		t.Errorf("a wrong passphrase: %v", err)
	}
}
