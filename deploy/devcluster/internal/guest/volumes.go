package guest

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// Volume is a disk beside the root disk. A machine sees it as a folder at /volumes/<name>: what a real guest's agent
// mounts there.
type Volume struct {
	Disk     string `json:"disk"` // id, as a root disk's
	Name     string `json:"name"`
	ReadOnly bool   `json:"readOnly,omitempty"`
	Dir      string `json:"dir"` // on the host; set at the start
}

// makeVolumes makes the folders of a machine's volumes, which outlive the machine.
func (r *Runtime) makeVolumes(m *Machine) error {
	for i := range m.Volumes {
		v := &m.Volumes[i]
		if v.Disk != filepath.Base(v.Disk) || v.Name != filepath.Base(v.Name) || v.Name == "" || v.Disk == "" {
			return fmt.Errorf("volume %q with disk %q is not a name", v.Name, v.Disk)
		}
		dir, err := filepath.Abs(filepath.Join(r.dir, "disks", v.Disk))
		if err != nil {
			return err
		}
		v.Dir = dir
		if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
			return err
		}
		if err := os.Mkdir(dir, 0o755); err == nil && os.Geteuid() == 0 {
			err = os.Chown(dir, userID, userID)
			if err != nil {
				return err
			}
		} else if err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	return nil
}

// bindVolumes shows the volumes in the root of a machine with namespaces.
func bindVolumes(root string, m Machine) error {
	for _, v := range m.Volumes {
		to := filepath.Join(root, "volumes", v.Name)
		if err := os.MkdirAll(to, 0o755); err != nil {
			return err
		}
		if err := bind(v.Dir, to, v.ReadOnly); err != nil {
			return err
		}
	}
	return nil
}

// linkVolumes shows them where the machine has no mounts of its own; read-only is not kept there.
func linkVolumes(root *os.Root, m Machine) error {
	if len(m.Volumes) == 0 {
		return nil
	}
	if err := root.MkdirAll("volumes", 0o755); err != nil {
		return err
	}
	for _, v := range m.Volumes {
		name := filepath.Join("volumes", v.Name)
		if err := root.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if err := root.Symlink(v.Dir, name); err != nil {
			return err
		}
	}
	return nil
}
