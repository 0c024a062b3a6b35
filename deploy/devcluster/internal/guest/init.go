package guest

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"

	"golang.org/x/sys/unix"
)

// Init is the whole of a machine: the entry point of the vm-init sub-command. It returns the exit code.
func Init(args []string) int {
	runtime.LockOSThread()
	debug.SetGCPercent(20)
	if len(args) == 2 && args[0] == "--probe" {
		if err := tryNamespaces(args[1]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return 0
	}
	if len(args) != 1 {
		fmt.Fprintln(os.Stderr, "vm-init is started by cosmicac-devcluster, not by hand")
		return 2
	}
	// The folder is held open: once the machine has its own root, the path leads nowhere.
	folder, err := os.OpenRoot(args[0])
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	console, err := openConsole(folder)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	end := exitRecord{}
	if err := boot(args[0], folder, console); err != nil {
		fmt.Fprintf(console, "simulated machine: %v\n", err)
		end = exitRecord{Code: 1, Reason: err.Error()}
	} else {
		end.Reason = "powered off"
	}
	raw, err := json.Marshal(end)
	if err == nil {
		err = folder.WriteFile(exitFile+".new", raw, 0o600)
	}
	if err == nil {
		err = folder.Rename(exitFile+".new", exitFile)
	}
	if err != nil {
		fmt.Fprintf(console, "simulated machine: keep the end: %v\n", err)
	}
	return end.Code
}

func boot(dir string, folder *os.Root, console *console) error {
	raw, err := folder.ReadFile(specFile)
	if err != nil {
		return err
	}
	var m Machine
	if err := json.Unmarshal(raw, &m); err != nil {
		return fmt.Errorf("read %s: %w", specFile, err)
	}
	// Wait at the gate: see Runtime.launch.
	gate := os.NewFile(3, "gate")
	if n, err := gate.Read(make([]byte, 1)); n != 1 {
		if err == nil || errors.Is(err, io.EOF) {
			err = errors.New("the starter died before the machine was recorded")
		}
		return err
	}
	gate.Close()

	root, err := filepath.EvalSymlinks(filepath.Join(dir, rootName))
	if err != nil {
		return err
	}
	if m.Isolated {
		if err := unix.Sethostname([]byte(m.Hostname)); err != nil {
			return fmt.Errorf("set the host name: %w", err)
		}
		if err := enterRoot(root, m); err != nil {
			return err
		}
	}
	fmt.Fprintf(console, "simulated machine %s boots\n", m.Hostname)
	s := supervisor{m: m, root: root, console: console}
	return s.run()
}

// tryNamespaces does in small what enterRoot does.
func tryNamespaces(dir string) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if err := unix.Mount(dir, dir, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind: %w", err)
	}
	for _, d := range []string{"proc", "old", "usr"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o755); err != nil {
			return err
		}
	}
	if err := bind("/usr", filepath.Join(dir, "usr"), true); err != nil {
		return err
	}
	if err := unix.Mount("proc", filepath.Join(dir, "proc"), "proc", 0, ""); err != nil {
		return fmt.Errorf("mount proc: %w", err)
	}
	if err := unix.Sethostname([]byte("probe")); err != nil {
		return fmt.Errorf("set the host name: %w", err)
	}
	if err := unix.PivotRoot(dir, filepath.Join(dir, "old")); err != nil {
		return fmt.Errorf("pivot root: %w", err)
	}
	return nil
}

// enterRoot makes root the root of this mount namespace: programs come read-only from the host, everything that is
// written stays in the machine's folder, and the rest of the host's files is out of sight.
func enterRoot(root string, m Machine) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if err := unix.Mount(root, root, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind the root: %w", err)
	}
	in := func(p string) string { return filepath.Join(root, p) }
	for _, d := range []string{"usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "opt"} {
		target, err := os.Readlink("/" + d)
		if err == nil { // a merged /usr
			if err := os.Symlink(target, in(d)); err != nil && !os.IsExist(err) {
				return err
			}
			continue
		}
		if _, err := os.Stat("/" + d); err != nil {
			continue
		}
		if err := bindNew("/"+d, in(d)); err != nil {
			return err
		}
	}
	for _, d := range hostDirs {
		if fi, err := os.Stat("/etc/" + d); err == nil && fi.IsDir() {
			if err := bindNew("/etc/"+d, in("etc/"+d)); err != nil {
				return err
			}
		}
	}
	for _, b := range m.Binds {
		if err := bindNew(b, in(b)); err != nil {
			return err
		}
	}
	if m.AgentDir != "" {
		if err := bindNew(m.AgentDir, in(agentMount)); err != nil {
			return err
		}
	}
	if err := bindVolumes(root, m); err != nil {
		return err
	}
	for _, d := range []string{"dev", "sys", "proc", ".host"} {
		if err := os.MkdirAll(in(d), 0o755); err != nil {
			return err
		}
	}
	if err := unix.Mount("/dev", in("dev"), "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("bind /dev: %w", err)
	}
	if err := unix.Mount("tmpfs", in("dev/shm"), "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=1777"); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("mount /dev/shm: %w", err)
	}
	if err := bind("/sys", in("sys"), true); err != nil {
		return err
	}
	if err := unix.Mount("proc", in("proc"), "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	if err := unix.PivotRoot(root, in(".host")); err != nil {
		return fmt.Errorf("pivot root: %w", err)
	}
	if err := os.Chdir("/"); err != nil {
		return err
	}
	if err := unix.Unmount("/.host", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("detach the host's root: %w", err)
	}
	_ = os.Remove("/.host")
	return nil
}

// bindNew shows a host folder read-only at a place that is made for it.
func bindNew(from, to string) error {
	if err := os.MkdirAll(to, 0o755); err != nil {
		return err
	}
	return bind(from, to, true)
}

func bind(from, to string, readOnly bool) error {
	if err := unix.Mount(from, to, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("bind %s: %w", from, err)
	}
	if !readOnly {
		return nil
	}
	// A remount must repeat the flags that the mount already has, where the kernel locks them.
	var st unix.Statfs_t
	flags := uintptr(unix.MS_BIND | unix.MS_REMOUNT | unix.MS_RDONLY)
	if err := unix.Statfs(to, &st); err == nil {
		for from, as := range map[int64]uintptr{
			unix.ST_NOSUID: unix.MS_NOSUID, unix.ST_NODEV: unix.MS_NODEV, unix.ST_NOEXEC: unix.MS_NOEXEC,
		} {
			if st.Flags&from != 0 {
				flags |= as
			}
		}
	}
	if err := unix.Mount("", to, "", flags, ""); err != nil {
		return fmt.Errorf("make %s read-only: %w", to, err)
	}
	return nil
}
