// Package volume mounts a job's volumes: disks that outlive the VM, found by their
// serial, at /volumes/<name>.
//
// An empty disk is given an ext4 file system, once. A disk counts as empty when blkid
// finds no signature on it and its first and last bytes are zeros, read by us:
// mkfs.ext4 itself asks nobody where there is no terminal. A disk that holds anything
// else is never written: it is mounted if it has a file system, and left alone if not,
// so that a tenant may partition or encrypt it. Where nothing is mounted there is no
// folder either, so that nobody writes to the root disk unawares.
//
// It does not unmount, resize or repair.
package volume

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// Volume is one disk.
type Volume struct {
	Name     string
	ReadOnly bool
}

// Mounter mounts volumes. New makes one for a real guest.
type Mounter struct {
	// Directory holds the folders of volumes, Disks the links to disks by serial.
	Directory, Disks string
	// Mounts is the kernel's list of this process's mounts.
	Mounts string
	// UserID and GroupID own a file system that was made here.
	UserID, GroupID int
	// Patience is how long a disk that is not there is waited for.
	Patience time.Duration
	// Run runs a program and gives its output and exit code; an error says that it
	// could not be run.
	Run func(ctx context.Context, program string, arguments ...string) (output string, code int, err error)
}

// New is a Mounter of this machine.
func New(userID, groupID int) *Mounter {
	return &Mounter{
		Directory: "/volumes", Disks: "/dev/disk/by-id", Mounts: "/proc/self/mountinfo", UserID: userID, GroupID: groupID,
		Patience: time.Minute, Run: run,
	}
}

// run runs a program without input: what asks a question gets no answer.
func run(ctx context.Context, program string, arguments ...string) (string, int, error) {
	cmd := exec.CommandContext(ctx, program, arguments...)
	cmd.WaitDelay = 5 * time.Second
	out, err := cmd.CombinedOutput()
	text := strings.TrimSpace(string(out[:min(len(out), 1000)]))
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return text, exit.ExitCode(), nil
	}
	return text, 0, err
}

// Tidy removes folders of volumes that are no longer attached, where they are empty.
func (m *Mounter) Tidy() {
	entries, err := os.ReadDir(m.Directory)
	if err != nil {
		return
	}
	for _, e := range entries {
		path := filepath.Join(m.Directory, e.Name())
		if mounted, err := m.mounted(path); err == nil && !mounted && e.IsDir() {
			_ = os.Remove(path) // one that holds something stays
		}
	}
}

// Mount mounts one volume and says in words what it did beside that; mounting it
// again changes nothing. An error says why it is not mounted.
func (m *Mounter) Mount(ctx context.Context, v Volume) (did string, err error) {
	target := filepath.Join(m.Directory, v.Name)
	if mounted, err := m.mounted(target); err != nil || mounted {
		return "", err
	}
	disk, err := m.find(ctx, v.Name)
	if err != nil {
		return "", err
	}
	kind, err := m.kind(ctx, disk)
	if err != nil {
		return "", err
	}
	fresh := false
	switch {
	case kind != "":
	case v.ReadOnly:
		return "", errors.New("it is empty and attached read-only: a job that may write must use it first")
	default:
		out, code, err := m.Run(ctx, "mkfs.ext4", "-q", "-m", "0", "-L", v.Name[:min(len(v.Name), 16)], disk)
		if err != nil {
			return "", fmt.Errorf("give it a file system: %w; the image needs mkfs.ext4", err)
		}
		if code != 0 {
			return "", fmt.Errorf("give it a file system: mkfs.ext4 ended with %d: %s", code, out)
		}
		fresh, did = true, "it was empty and got an ext4 file system"
	}
	if err := os.MkdirAll(target, 0o755); err != nil {
		return did, err
	}
	if err := m.mount(ctx, disk, target, v.ReadOnly, kind); err != nil {
		return did, errors.Join(err, os.Remove(target))
	}
	if fresh {
		if err := os.Chown(target, m.UserID, m.GroupID); err != nil {
			return did, fmt.Errorf("it is mounted, and belongs to root: %w", err)
		}
	}
	return did, nil
}

func (m *Mounter) mount(ctx context.Context, disk, target string, readOnly bool, kind string) error {
	options := []string{"nosuid,nodev"}
	if readOnly {
		// One whose writer was cut off has a journal that nobody may replay here.
		options = []string{"nosuid,nodev,ro"}
		if strings.HasPrefix(kind, "ext") {
			options = append(options, "nosuid,nodev,ro,noload")
		}
	}
	var last error
	for _, o := range options {
		out, code, err := m.Run(ctx, "mount", "-o", o, disk, target)
		switch {
		case err != nil:
			return fmt.Errorf("mount %s: %w", disk, err)
		case code == 0:
			return nil
		}
		last = fmt.Errorf("mount %s as %s: %s", disk, orUnknown(kind), out)
	}
	return last
}

func orUnknown(kind string) string {
	if kind == "" {
		return "ext4"
	}
	return kind
}

// find waits for the disk with this serial.
func (m *Mounter) find(ctx context.Context, name string) (string, error) {
	path := filepath.Join(m.Disks, "virtio-"+name)
	deadline := time.NewTimer(m.Patience)
	defer deadline.Stop()
	for {
		if disk, err := filepath.EvalSymlinks(path); err == nil {
			return disk, nil
		}
		tick := time.NewTimer(200 * time.Millisecond)
		select {
		case <-tick.C:
		case <-deadline.C:
			tick.Stop()
			return "", fmt.Errorf("no disk with its serial came within %s: %s is not there", m.Patience, path)
		case <-ctx.Done():
			tick.Stop()
			return "", ctx.Err()
		}
	}
}

// kind is what is on a disk: the type of its file system, or nothing for an empty
// disk. Anything else is an error, and nothing is written.
func (m *Mounter) kind(ctx context.Context, disk string) (string, error) {
	out, code, err := m.Run(ctx, "blkid", "-p", "-o", "export", disk)
	if err != nil {
		return "", fmt.Errorf("look what is on it: %w", err)
	}
	found := map[string]string{}
	for line := range strings.Lines(out) {
		if key, value, ok := strings.Cut(strings.TrimSpace(line), "="); ok {
			found[key] = value
		}
	}
	switch {
	case code == 0 && found["TYPE"] != "" && (found["USAGE"] == "filesystem" || found["USAGE"] == ""):
		return found["TYPE"], nil
	case code == 0:
		return "", fmt.Errorf("it holds %s and no file system: it is left to you at %s", orText(found["TYPE"], orText(found["PTTYPE"], "something"))+tables(found), disk)
	case code != 2:
		return "", fmt.Errorf("look what is on it: blkid ended with %d: %s", code, out)
	}
	// Also what cannot be read ends so: we look ourselves.
	empty, err := blank(disk)
	if err != nil {
		return "", fmt.Errorf("look what is on it: %w", err)
	}
	if !empty {
		return "", fmt.Errorf("it is not empty and holds no file system that is known here: it is left to you at %s; mkfs.ext4 makes one, and removes what is there", disk)
	}
	return "", nil
}

func tables(found map[string]string) string {
	if found["PTTYPE"] != "" && found["TYPE"] == "" {
		return " partitions"
	}
	return ""
}

func orText(text, otherwise string) string {
	if text == "" {
		return otherwise
	}
	return text
}

// What must be zeros for a disk to be empty: where every file system, partition table
// and volume manager keeps its marks.
const (
	headBytes = 4 << 20
	tailBytes = 1 << 20
)

// blank reports whether a disk's first and last bytes are zeros.
func blank(disk string) (bool, error) {
	f, err := os.Open(disk)
	if err != nil {
		return false, err
	}
	defer f.Close()
	size, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return false, err
	}
	if size == 0 {
		return false, fmt.Errorf("%s has no size", disk)
	}
	for _, part := range [][2]int64{{0, min(headBytes, size)}, {max(size-tailBytes, 0), size}} {
		r := bufio.NewReaderSize(io.NewSectionReader(f, part[0], part[1]-part[0]), 1<<16)
		zeros := make([]byte, 1<<16)
		for {
			chunk, err := r.Peek(1 << 16)
			if len(chunk) == 0 {
				if errors.Is(err, io.EOF) {
					break
				}
				return false, err
			}
			if err != nil && !errors.Is(err, io.EOF) {
				return false, err
			}
			if !bytes.Equal(chunk, zeros[:len(chunk)]) {
				return false, nil
			}
			if _, err := r.Discard(len(chunk)); err != nil {
				return false, err
			}
		}
	}
	return true, nil
}

// mounted reports whether something is mounted at a path.
func (m *Mounter) mounted(path string) (bool, error) {
	raw, err := os.ReadFile(m.Mounts)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, err
	}
	for line := range strings.Lines(string(raw)) {
		if f := strings.Fields(line); len(f) > 4 && f[4] == path {
			return true, nil
		}
	}
	return false, nil
}
