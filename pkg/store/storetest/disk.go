// Package storetest gives tests a disk that can be full. It knows nothing of stores,
// and does without where a test may not mount.
package storetest

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// Disk is a small file system of a test's own.
type Disk struct {
	// Folder is its root.
	Folder string
}

// SmallDisk mounts a file system in memory of so many bytes, until the test ends. A
// test that may not mount is skipped.
func SmallDisk(t *testing.T, bytes int) *Disk {
	t.Helper()
	d := &Disk{Folder: t.TempDir()}
	err := unix.Mount("tmpfs", d.Folder, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, fmt.Sprintf("size=%d,mode=0700", bytes))
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) {
		t.Skip("mounting a small disk needs root")
	}
	if err != nil {
		t.Fatalf("mount a small disk: %v", err)
	}
	t.Cleanup(func() {
		// What is still open there goes with its process.
		if err := unix.Unmount(d.Folder, unix.MNT_DETACH); err != nil {
			t.Errorf("unmount the small disk: %v", err)
		}
	})
	return d
}

func (d *Disk) filler() string { return filepath.Join(d.Folder, "filler") }

// Fill takes all room that is left.
func (d *Disk) Fill(t *testing.T) {
	t.Helper()
	f, err := os.Create(d.filler())
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for block := make([]byte, 4096); err == nil; {
		_, err = f.Write(block)
	}
	if !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("fill the small disk: %v", err)
	}
}

// Free gives back what Fill took.
func (d *Disk) Free(t *testing.T) {
	t.Helper()
	if err := os.Remove(d.filler()); err != nil {
		t.Fatal(err)
	}
}
