package agent

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/google/renameio/v2"

	"github.com/cosmicac/cosmicac/pkg/fault"
)

// DefaultStateDirectory is where an agent keeps its key and certificate in a VM.
const DefaultStateDirectory = "/var/lib/cosmicac-agent"

// Files of the state directory, beside identity.key and ssh_host_key. The root
// disk belongs to the job, so they outlive an attempt.
const (
	certificateFile = "certificate.bin"
	rosterFile      = "roster.bin"
	infoFile        = "network-info.bin"
)

// StateDirectory picks the directory, or when it cannot be written a folder
// beside the seed. It makes what it returns. Others may pass through it, to the
// start script that runs as the login, and read nothing.
func StateDirectory(want, seedPath string) (string, error) {
	if want == "" {
		want = DefaultStateDirectory
	}
	first := makeState(want)
	if first == nil {
		return want, nil
	}
	beside := filepath.Join(filepath.Dir(seedPath), "cosmicac-agent-state")
	if err := makeState(beside); err != nil {
		return "", fault.Wrap(fault.Denied, errors.Join(first, err), "neither %s nor %s can be written", want, beside)
	}
	return beside, nil
}

func makeState(dir string) error {
	if err := os.MkdirAll(dir, 0o711); err != nil {
		return err
	}
	probe, err := os.CreateTemp(dir, ".probe-*")
	if err != nil {
		return err
	}
	probe.Close()
	return os.Remove(probe.Name())
}

// state is the directory's content.
type state string

func (s state) path(name string) string { return filepath.Join(string(s), name) }

// read returns nil when there is no such file.
func (s state) read(name string) []byte {
	raw, err := os.ReadFile(s.path(name))
	if err != nil {
		return nil
	}
	return raw
}

func (s state) write(name string, data []byte) error {
	if err := renameio.WriteFile(s.path(name), data, 0o600, renameio.IgnoreUmask()); err != nil {
		return fault.Wrap(fault.Internal, err, "write %s: %v", s.path(name), err)
	}
	return nil
}

func (s state) remove(name string) error {
	if err := os.Remove(s.path(name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
