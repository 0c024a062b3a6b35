package volume

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// guest is a machine with one disk that is a file; blkid and mkfs.ext4 are the real
// ones, mount only notes what it was asked.
type guest struct {
	*Mounter
	disk  string
	calls []string
	fails int // so many mounts fail
}

func newGuest(t *testing.T) *guest {
	t.Helper()
	for _, program := range []string{"blkid", "mkfs.ext4"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("%s is not on this machine: scripts/setup.sh installs it", program)
		}
	}
	dir := t.TempDir()
	g := &guest{disk: filepath.Join(dir, "disk")}
	if err := os.WriteFile(g.disk, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(g.disk, 32<<20); err != nil {
		t.Fatal(err)
	}
	g.Mounter = New(os.Getuid(), os.Getgid())
	g.Directory, g.Disks, g.Mounts, g.Patience = filepath.Join(dir, "volumes"), filepath.Join(dir, "by-id"), filepath.Join(dir, "mountinfo"), time.Second
	if err := os.Mkdir(g.Disks, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("../disk", filepath.Join(g.Disks, "virtio-data")); err != nil {
		t.Fatal(err)
	}
	g.Run = func(ctx context.Context, program string, arguments ...string) (string, int, error) {
		g.calls = append(g.calls, program+" "+strings.Join(arguments, " "))
		if program != "mount" {
			return run(ctx, program, arguments...)
		}
		if g.fails > 0 {
			g.fails--
			return "write access unavailable, cannot proceed", 32, nil
		}
		line := fmt.Sprintf("36 35 254:16 / %s rw - ext4 /dev/vdb rw\n", arguments[3])
		return "", 0, os.WriteFile(g.Mounts, []byte(line), 0o600)
	}
	return g
}

// off is a reboot: nothing is mounted any more.
func (g *guest) off(t *testing.T) {
	t.Helper()
	if err := os.Remove(g.Mounts); err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	g.calls = nil
}

func (g *guest) made() bool { return strings.Contains(strings.Join(g.calls, "\n"), "mkfs") }

func (g *guest) uuid(t *testing.T) string {
	t.Helper()
	out, code, err := run(t.Context(), "blkid", "-p", "-s", "UUID", "-o", "value", g.disk)
	if err != nil || code != 0 || out == "" {
		t.Fatalf("blkid: %q, %d, %v", out, code, err)
	}
	return out
}

func TestAnEmptyDiskGetsAFileSystemOnceAndNeverAgain(t *testing.T) {
	t.Parallel()
	g := newGuest(t)
	if did, err := g.Mount(t.Context(), Volume{Name: "data"}); err != nil || !strings.Contains(did, "ext4") {
		t.Fatalf("%q, %v", did, err)
	}
	first := g.uuid(t)
	if did, err := g.Mount(t.Context(), Volume{Name: "data"}); err != nil || did != "" {
		t.Errorf("mounted again: %q, %v", did, err)
	}
	g.off(t)
	if did, err := g.Mount(t.Context(), Volume{Name: "data"}); err != nil || did != "" || g.made() || g.uuid(t) != first {
		t.Errorf("after a reboot: %q, %v, %v", did, err, g.calls)
	}
	// Read-only, with a journal that its writer left behind.
	g.off(t)
	g.fails = 1
	if _, err := g.Mount(t.Context(), Volume{Name: "data", ReadOnly: true}); err != nil || !strings.Contains(strings.Join(g.calls, "\n"), "ro,noload") {
		t.Errorf("read-only: %v, %v", err, g.calls)
	}
	// No longer attached: its empty folder goes, so that nobody writes there unawares.
	g.off(t)
	g.Tidy()
	if _, err := os.Stat(filepath.Join(g.Directory, "data")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the folder of a volume that is gone: %v", err)
	}
}

func TestADiskThatHoldsAnythingIsNeverGivenAFileSystem(t *testing.T) {
	t.Parallel()
	write := func(at int64, text string) func(*testing.T, *guest) {
		return func(t *testing.T, g *guest) {
			f, err := os.OpenFile(g.disk, os.O_WRONLY, 0)
			if err == nil {
				_, err = f.WriteAt([]byte(text), at)
				err = errors.Join(err, f.Close())
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	for name, c := range map[string]struct {
		before   func(*testing.T, *guest)
		readOnly bool
		words    string
	}{
		"unknown bytes at its start":   {write(1<<20, "precious"), false, "not empty"},
		"unknown bytes at its end":     {write(32<<20-10, "precious"), false, "not empty"},
		"a partition table":            {write(510, "\x55\xaa"), false, "left to you"},
		"an encrypted container":       {write(0, "LUKS\xba\xbe\x00\x02"+strings.Repeat("\x00", 4)+"\x40\x00"), false, "left to you"},
		"nothing, and it is read-only": {func(*testing.T, *guest) {}, true, "a job that may write"},
		"no size": {func(t *testing.T, g *guest) {
			if err := os.Truncate(g.disk, 0); err != nil {
				t.Fatal(err)
			}
		}, false, ""},
		"no disk": {func(t *testing.T, g *guest) {
			if err := os.Remove(g.disk); err != nil {
				t.Fatal(err)
			}
		}, false, "no disk with its serial"},
		"blkid cannot tell": {func(_ *testing.T, g *guest) {
			real := g.Run
			g.Run = func(ctx context.Context, program string, arguments ...string) (string, int, error) {
				if program == "blkid" {
					return "ambivalent result", 8, nil
				}
				return real(ctx, program, arguments...)
			}
		}, false, "blkid ended with 8"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := newGuest(t)
			c.before(t, g)
			did, err := g.Mount(t.Context(), Volume{Name: "data", ReadOnly: c.readOnly})
			if err == nil || !strings.Contains(err.Error(), c.words) || did != "" || g.made() {
				t.Errorf("%q, %v, %v", did, err, g.calls)
			}
			if _, err := os.Stat(filepath.Join(g.Directory, "data")); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("a folder where nothing is mounted: %v", err)
			}
		})
	}
}
