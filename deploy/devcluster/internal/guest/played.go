package guest

import (
	"fmt"
	"os"
	"path/filepath"
)

// play enters a machine that has no process. Its record is on disk like any other's, so a later process finds it. The
// caller holds the lock.
func (r *Runtime) play(m Machine) error {
	m.Played, m.Disk, m.AgentDir = true, "", ""
	dir := r.folder(m.ID)
	if err := os.MkdirAll(dir, 0o711); err != nil {
		return fmt.Errorf("make the folder of vm %s: %w", m.Name, err)
	}
	if err := writeJSON(filepath.Join(dir, specFile), m); err != nil {
		return err
	}
	r.vms[m.ID] = &vm{m: m, running: true}
	r.log.Debug("simulated vm is played", "vm", m.Name)
	r.hint(m.ID)
	return nil
}

// stopPlaying powers a played machine off, which takes no time. The caller holds the lock.
func (r *Runtime) stopPlaying(v *vm) {
	v.running, v.exit = false, exitRecord{Reason: "powered off (played)"}
	if err := writeJSON(filepath.Join(r.folder(v.m.ID), exitFile), v.exit); err != nil {
		r.log.Error("simulated vm's end is not kept", "vm", v.m.Name, "error", err)
	}
	r.hint(v.m.ID)
}
