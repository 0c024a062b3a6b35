package app

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"strings"

	"github.com/cosmicac/cosmicac/pkg/ssh"
)

// installKeys adds the user's own keys to the login's authorized_keys, for an
// sshd that the image may run; the agent's shells do not need them. Keys that
// stand there already, and lines of others, are left alone.
func (i *Instance) installKeys() {
	keys := i.agent.Seed().GetSshAuthorizedKeys()
	if len(keys) == 0 {
		return
	}
	account, err := ssh.FindAccount("/etc", i.agent.Seed().GetDefaultUser())
	if err == nil {
		err = addKeys(account, keys)
	}
	if err != nil {
		i.agent.Log().Warn("the authorized ssh keys were not installed", "error", err)
	}
}

// addKeys works through os.Root: the login owns its home and could have put links there.
func addKeys(account ssh.Account, keys []string) error {
	home, err := os.OpenRoot(account.Home)
	if err != nil {
		return err
	}
	defer home.Close()
	const file = ".ssh/authorized_keys"
	if err := home.Mkdir(".ssh", 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	have, err := home.ReadFile(file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	held := map[string]bool{}
	for line := range strings.Lines(string(have)) {
		held[strings.TrimSpace(line)] = true
	}
	var added bytes.Buffer
	if len(have) > 0 && have[len(have)-1] != '\n' {
		added.WriteByte('\n')
	}
	for _, k := range keys {
		if k = strings.TrimSpace(k); k != "" && !held[k] && !strings.ContainsAny(k, "\n\r") {
			held[k] = true
			added.WriteString(k + "\n")
		}
	}
	if strings.TrimSpace(added.String()) == "" {
		return nil
	}
	f, err := home.OpenFile(file, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(added.Bytes())
	err = errors.Join(err, f.Close())
	if account.Switch {
		err = errors.Join(err, home.Lchown(".ssh", int(account.UID), int(account.GID)), home.Lchown(file, int(account.UID), int(account.GID)))
	}
	return err
}
