// Package settings keeps what the CLI remembers on a workstation: where the
// control plane is and the login token. It does not talk to anything.
package settings

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/google/renameio/v2"

	"github.com/cosmicac/cosmicac/pkg/fault"
)

// Settings is one workstation's file, <directory>/settings.json, mode 0600.
type Settings struct {
	// URL of the control plane, as https://cosmicac.example.
	URL string `json:"url,omitempty"`
	// Token is the login token; it is never printed.
	Token string `json:"token,omitempty"`
	Email string `json:"email,omitempty"`

	directory string
}

// Directory is where the CLI keeps its files: COSMICAC_CONFIG_DIR, else the
// user's configuration folder.
func Directory() (string, error) {
	if d := os.Getenv("COSMICAC_CONFIG_DIR"); d != "" {
		return d, nil
	}
	d, err := os.UserConfigDir()
	if err != nil {
		return "", fault.Wrap(fault.Invalid, err, "no configuration folder; set COSMICAC_CONFIG_DIR")
	}
	return filepath.Join(d, "cosmicac"), nil
}

// Load reads the settings of a directory; a missing file gives empty ones.
// COSMICAC_URL and COSMICAC_TOKEN override what the file says.
func Load(directory string) (*Settings, error) {
	s := &Settings{directory: directory}
	path := filepath.Join(directory, "settings.json")
	raw, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return nil, fault.Wrap(fault.Invalid, err, "read settings %s", path)
	default:
		if err := json.Unmarshal(raw, s); err != nil {
			return nil, fault.Wrap(fault.Invalid, err, "settings %s are not valid JSON; log in again to replace them", path)
		}
	}
	if v := os.Getenv("COSMICAC_URL"); v != "" {
		s.URL = v
	}
	if v := os.Getenv("COSMICAC_TOKEN"); v != "" {
		s.Token = v
	}
	return s, nil
}

// Save writes the settings atomically, readable by the user alone.
func (s *Settings) Save() error {
	if err := os.MkdirAll(s.directory, 0o700); err != nil {
		return fault.Wrap(fault.Invalid, err, "make settings folder %s", s.directory)
	}
	raw, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return err
	}
	path := filepath.Join(s.directory, "settings.json")
	if err := renameio.WriteFile(path, append(raw, '\n'), 0o600); err != nil {
		return fault.Wrap(fault.Invalid, err, "write settings %s", path)
	}
	return nil
}
