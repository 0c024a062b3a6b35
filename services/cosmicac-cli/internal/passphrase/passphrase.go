// Package passphrase puts a small file under a passphrase, in the form of armored
// age files, so that the age program opens it too. It does not ask anybody for a
// passphrase, does not judge it, and keeps nothing.
package passphrase

import (
	"bytes"
	"io"

	"filippo.io/age"
	"filippo.io/age/armor"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/trust"
)

// Encrypted tells whether text looks like a file of Encrypt.
func Encrypted(text []byte) bool { return bytes.HasPrefix(bytes.TrimSpace(text), []byte(armor.Header)) }

// Work is the cost of one guess for Encrypt, as the binary logarithm of scrypt's N:
// about a second and 256 MiB.
const Work = 18

// Encrypt puts text under a passphrase, as an armored age file.
func Encrypt(text []byte, passphrase string, work int) ([]byte, error) {
	to, err := age.NewScryptRecipient(passphrase)
	if err != nil {
		return nil, fault.Wrap(fault.Invalid, err, "encrypt the backup")
	}
	to.SetWorkFactor(work)
	var out bytes.Buffer
	lines := armor.NewWriter(&out)
	w, err := age.Encrypt(lines, to)
	if err == nil {
		_, err = w.Write(text)
	}
	if err == nil {
		err = w.Close()
	}
	if err == nil {
		err = lines.Close()
	}
	if err != nil {
		return nil, fault.Wrap(fault.Internal, err, "encrypt the backup")
	}
	return out.Bytes(), nil
}

// Decrypt opens a file of Encrypt, of at most trust.MaxFileBytes inside. A wrong
// passphrase is fault.Unauthenticated. It takes as long as Encrypt did, and refuses
// files that ask for more than 8 times the cost of Work.
func Decrypt(text []byte, passphrase string) ([]byte, error) {
	with, err := age.NewScryptIdentity(passphrase)
	if err != nil {
		return nil, fault.Wrap(fault.Invalid, err, "decrypt the backup")
	}
	with.SetMaxWorkFactor(Work + 3)
	r, err := age.Decrypt(armor.NewReader(bytes.NewReader(bytes.TrimSpace(text))), with)
	if err != nil {
		return nil, fault.Wrap(fault.Unauthenticated, err, "the backup does not open: a wrong passphrase, or a damaged file")
	}
	plain, err := io.ReadAll(io.LimitReader(r, trust.MaxFileBytes+1))
	if err != nil {
		return nil, fault.Wrap(fault.Invalid, err, "the backup is damaged")
	}
	if len(plain) > trust.MaxFileBytes {
		return nil, fault.New(fault.TooLarge, "the backup has more than %d bytes", trust.MaxFileBytes)
	}
	return plain, nil
}
