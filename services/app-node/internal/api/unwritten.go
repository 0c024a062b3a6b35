package api

import (
	"sync"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/services/app-node/internal/store"
)

// unwrittenMost is how many audit entries wait in memory while the disk takes none.
const unwrittenMost = 1000

// unwritten are audit entries that could not be written when they were due. They are
// written after the next one that can be, so they come late and out of order, each with
// its own time. A process that ends meanwhile loses them; its log has each.
type unwritten struct {
	mu      sync.Mutex
	entries []store.AuditEntry
}

// full refuses what would have to be audited while too many wait and cannot be written:
// nothing is done that nobody could be asked about later.
func (u *unwritten) full(add func(store.AuditEntry) error) error {
	u.mu.Lock()
	defer u.mu.Unlock()
	if len(u.entries) >= unwrittenMost {
		u.drain(add)
	}
	if len(u.entries) < unwrittenMost {
		return nil
	}
	return fault.New(fault.Unavailable, "this is recorded in the audit log, which cannot be written: the disk of the control plane is full or broken; try again once it is mended")
}

// add keeps an entry. Requests under way when the bound is reached may go a little
// beyond it.
func (u *unwritten) add(e store.AuditEntry) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.entries = append(u.entries, e)
}

// write writes what waits, oldest first, until one fails.
func (u *unwritten) write(add func(store.AuditEntry) error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.drain(add)
}

func (u *unwritten) drain(add func(store.AuditEntry) error) {
	for len(u.entries) > 0 && add(u.entries[0]) == nil {
		u.entries = u.entries[1:]
	}
}
