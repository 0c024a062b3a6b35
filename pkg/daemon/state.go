package daemon

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/google/renameio/v2"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/trust"
)

// KeyFile is the name of the key file in a state folder.
const KeyFile = "identity.key"

// bindingFile says which key and network a state folder belongs to.
const bindingFile = "binding.json"

type binding struct {
	Key     string `json:"key"`
	Network string `json:"network"`
}

// bind refuses a state folder that belongs to another key or network: its data
// would speak of peers and jobs that this daemon cannot know. The first start
// writes the binding.
func bind(dir string, key *identity.Key, network *trust.Network) error {
	now := binding{Key: key.ID().String(), Network: network.ID().String()}
	path := filepath.Join(dir, bindingFile)
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		data, _ = json.Marshal(now)
		if err := renameio.WriteFile(path, append(data, '\n'), 0o600); err != nil {
			return fault.Wrap(fault.Unavailable, err, "write %s", path)
		}
		return nil
	}
	if err != nil {
		return fault.Wrap(fault.Unavailable, err, "read %s", path)
	}
	var was binding
	if err := json.Unmarshal(data, &was); err != nil {
		return fault.Wrap(fault.Invalid, err, "%s is damaged: restore it, or remove it if the folder is this daemon's", path)
	}
	if was.Network != now.Network {
		return fault.New(fault.Conflict, "state folder %s belongs to network %s, but %s holds network %s: use an empty state folder, or the right network",
			dir, was.Network, "mesh.network_directory", now.Network)
	}
	if was.Key != now.Key {
		return fault.New(fault.Conflict, "state folder %s belongs to key %s, but its %s now holds %s: restore the old key file, or use an empty state folder",
			dir, was.Key, KeyFile, now.Key)
	}
	return nil
}

// openState makes the folder if needed, and refuses one that others may write to,
// since they could swap the key.
func openState(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fault.Wrap(fault.Unavailable, err, "make state folder %s (key state_directory)", dir)
	}
	info, err := os.Stat(dir)
	if err != nil {
		return fault.Wrap(fault.Unavailable, err, "state folder %s (key state_directory)", dir)
	}
	if info.Mode().Perm()&0o022 != 0 {
		return fault.New(fault.Denied, "state folder %s has mode %04o, others may write to it: chmod 700 %s", dir, info.Mode().Perm(), dir)
	}
	return nil
}
