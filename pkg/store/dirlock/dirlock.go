// Package dirlock keeps two processes from sharing a folder.
//
// It does not guard against a process that does not ask, nor across hosts on a
// network file system whose locks are local.
package dirlock

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/cosmicac/cosmicac/pkg/fault"
)

// Lock is an exclusive lock on a folder. The kernel drops it when the process
// dies, however it dies.
type Lock struct{ f *os.File }

// Take locks a folder by a file of the given name in it. If another
// process, or this one, holds it, the answer is fault.Conflict at once and names
// the holder.
func Take(dir, name string) (*Lock, error) {
	path := filepath.Join(dir, name)
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, storage(err, dir)
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		holder := make([]byte, 32)
		n, _ := f.ReadAt(holder, 0)
		_ = f.Close()
		return nil, fault.New(fault.Conflict, "folder %s is in use by another process (pid %s): stop it, or choose another folder",
			dir, strings.TrimSpace(string(holder[:n])))
	}
	if err != nil {
		_ = f.Close()
		return nil, storage(err, dir)
	}
	// For people only; the lock itself is the kernel's.
	_ = f.Truncate(0)
	_, _ = f.WriteAt(fmt.Appendf(nil, "%d\n", os.Getpid()), 0)
	return &Lock{f}, nil
}

// Unlock lets the folder go. The file stays: removing it would let two processes
// lock two files of one name.
//
// The lock is given up by name, not by closing alone: a program that is being started
// at this moment holds every open file until it runs, and would keep the lock as long.
func (l *Lock) Unlock() error {
	return errors.Join(unix.Flock(int(l.f.Fd()), unix.LOCK_UN), l.f.Close())
}

func storage(err error, dir string) error {
	return fault.Wrap(fault.Unavailable, err, "lock folder %s", dir).With(fault.Detail{Field: "reason", Rule: "storage"})
}
