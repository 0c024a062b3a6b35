package guest

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/hashicorp/go-hclog"

	"github.com/cosmicac/cosmicac/deploy/devcluster/internal/cloudinit"
)

const (
	// agentMount is where a machine sees the agent disk.
	agentMount = "/run/cosmicac/agent"
	userID     = 1000
)

// hostFiles are copied into a new root so that names, certificates and programs of the host's /usr work in it. What
// tells secrets of the host (shadow, keys) is not among them.
var hostFiles = []string{
	"nsswitch.conf", "ld.so.cache", "ld.so.conf", "host.conf", "gai.conf", "protocols", "services", "profile", "bash.bashrc",
	"inputrc", "localtime", "timezone", "login.defs", "shells", "os-release", "debian_version", "locale.conf", "mime.types",
}

// hostDirs of /etc are shown read-only in isolated machines.
var hostDirs = []string{"ssl", "ca-certificates", "pki", "alternatives", "terminfo", "ld.so.conf.d", "crypto-policies"}

// makeRoot makes the root folder, or links to that of the root disk, which keeps its content over machines.
func (r *Runtime) makeRoot(m Machine) error {
	link := filepath.Join(r.folder(m.ID), rootName)
	if m.Disk == "" {
		return os.MkdirAll(link, 0o755)
	}
	disk := filepath.Join(r.dir, "disks", m.Disk)
	if err := os.MkdirAll(disk, 0o755); err != nil {
		return err
	}
	if err := os.Symlink(filepath.Join("..", "..", "disks", m.Disk), link); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return nil
}

// prepareRoot brings a root to the state a booted image has: users, host name, empty /run and /tmp, the seed's files.
// All of it goes through os.Root: an earlier boot ran a tenant's code as root on this folder, and a symbolic link
// left there must not lead a write out of it.
func prepareRoot(dir string, m Machine, log hclog.Logger) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	for _, d := range []string{"run", "tmp"} {
		if err := root.RemoveAll(d); err != nil {
			return err
		}
	}
	for _, d := range []struct {
		path string
		mode fs.FileMode
	}{
		{"etc", 0o755}, {"etc/cosmicac", 0o755}, {"etc/systemd/system", 0o755}, {"run/cosmicac/agent", 0o755}, {"run/lock", 0o755},
		{"tmp", 0o777 | fs.ModeSticky}, {"home", 0o755}, {"root", 0o700}, {"var/lib", 0o755}, {"var/log", 0o755}, {"var/cache", 0o755},
		{"var/tmp", 0o777 | fs.ModeSticky}, {"mnt", 0o755}, {"srv", 0o755},
	} {
		if err := root.MkdirAll(d.path, 0o755); err != nil {
			return fmt.Errorf("make /%s: %w", d.path, err)
		}
		if err := root.Chmod(d.path, d.mode); err != nil {
			return fmt.Errorf("make /%s: %w", d.path, err)
		}
	}
	for _, f := range hostFiles {
		if raw, err := os.ReadFile(filepath.Join("/etc", f)); err == nil {
			if err := create(root, "etc/"+f, raw, 0o644); err != nil {
				return err
			}
		}
	}
	if raw, err := os.ReadFile("/etc/resolv.conf"); err == nil {
		if err := write(root, "etc/resolv.conf", raw, 0o644); err != nil {
			return err
		}
	}
	if err := write(root, "etc/hostname", []byte(m.Hostname+"\n"), 0o644); err != nil {
		return err
	}
	hosts := "127.0.0.1 localhost\n::1 localhost ip6-localhost\n127.0.1.1 " + m.Hostname + "\n"
	if err := write(root, "etc/hosts", []byte(hosts), 0o644); err != nil {
		return err
	}
	if err := prepareUsers(root, m.User); err != nil {
		return err
	}
	if !m.Isolated {
		if err := linkVolumes(root, m); err != nil {
			return fmt.Errorf("show the volumes: %w", err)
		}
	}
	for _, f := range m.Files {
		if err := writeSeedFile(root, f, log); err != nil {
			return fmt.Errorf("write %s of the seed: %w", f.Path, err)
		}
	}
	return nil
}

// prepareUsers adds root and the default user where they are missing; users that the tenant added stay.
func prepareUsers(root *os.Root, user string) error {
	passwd, _ := root.ReadFile("etc/passwd")
	group, _ := root.ReadFile("etc/group")
	add := func(file *[]byte, name, line string) {
		if !strings.HasPrefix(string(*file), name+":") && !strings.Contains(string(*file), "\n"+name+":") {
			*file = append(*file, line+"\n"...)
		}
	}
	add(&passwd, "root", "root:x:0:0:root:/root:/bin/bash")
	add(&passwd, "daemon", "daemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin")
	add(&passwd, "nobody", "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin")
	add(&passwd, user, fmt.Sprintf("%s:x:%d:%d:%s:/home/%s:/bin/bash", user, userID, userID, user, user))
	add(&group, "root", "root:x:0:")
	add(&group, "daemon", "daemon:x:1:")
	add(&group, "tty", "tty:x:5:")
	add(&group, "sudo", "sudo:x:27:"+user)
	add(&group, "nogroup", "nogroup:x:65534:")
	add(&group, user, fmt.Sprintf("%s:x:%d:", user, userID))
	if err := write(root, "etc/passwd", passwd, 0o644); err != nil {
		return err
	}
	if err := write(root, "etc/group", group, 0o644); err != nil {
		return err
	}
	home := "home/" + user
	if err := root.Mkdir(home, 0o750); err == nil {
		skel, _ := os.ReadDir("/etc/skel")
		for _, e := range skel {
			if raw, err := os.ReadFile(filepath.Join("/etc/skel", e.Name())); err == nil {
				if err := create(root, home+"/"+e.Name(), raw, 0o644); err != nil {
					return err
				}
				chown(root, home+"/"+e.Name(), userID, userID)
			}
		}
	} else if !errors.Is(err, fs.ErrExist) {
		return err
	}
	chown(root, home, userID, userID)
	return nil
}

func writeSeedFile(root *os.Root, f cloudinit.File, log hclog.Logger) error {
	name := strings.TrimPrefix(f.Path, "/")
	if dir := filepath.Dir(name); dir != "." {
		if err := root.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	if f.Append {
		old, err := root.ReadFile(name)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		f.Content = append(old, f.Content...)
	}
	if err := write(root, name, f.Content, f.Mode); err != nil {
		return err
	}
	if f.Owner == "" {
		return nil
	}
	uid, gid, ok := owner(root, f.Owner)
	if !ok {
		log.Warn("simulated vm: owner of a seed file is not known and stays root", "path", f.Path, "owner", f.Owner)
		return nil
	}
	chown(root, name, uid, gid)
	return nil
}

// owner resolves user[:group] by the machine's own files.
func owner(root *os.Root, s string) (uid, gid int, ok bool) {
	user, group, hasGroup := strings.Cut(s, ":")
	passwd, _ := root.ReadFile("etc/passwd")
	groups, _ := root.ReadFile("etc/group")
	f := entry(string(passwd), user)
	if len(f) < 4 {
		return 0, 0, false
	}
	uid, _ = strconv.Atoi(f[2])
	gid, _ = strconv.Atoi(f[3])
	if hasGroup && group != "" {
		g := entry(string(groups), group)
		if len(g) < 3 {
			return 0, 0, false
		}
		gid, _ = strconv.Atoi(g[2])
	}
	return uid, gid, true
}

func entry(file, name string) []string {
	for line := range strings.Lines(file) {
		if f := strings.Split(strings.TrimSpace(line), ":"); f[0] == name {
			return f
		}
	}
	return nil
}

// create writes a file that is not there yet.
func create(root *os.Root, name string, data []byte, mode fs.FileMode) error {
	if _, err := root.Lstat(name); err == nil {
		return nil
	}
	return write(root, name, data, mode)
}

// write replaces a file whatever stood in its place, and sets its mode whatever the umask says.
func write(root *os.Root, name string, data []byte, mode fs.FileMode) error {
	if fi, err := root.Lstat(name); err == nil && !fi.Mode().IsRegular() {
		if err := root.RemoveAll(name); err != nil {
			return err
		}
	}
	f, err := root.OpenFile(name, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, mode.Perm())
	if err != nil {
		return err
	}
	_, err = io.Copy(f, strings.NewReader(string(data)))
	if err == nil {
		err = f.Chmod(mode)
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	return err
}

// chown is for root only; as a plain user everything belongs to that user anyway.
func chown(root *os.Root, name string, uid, gid int) {
	if os.Geteuid() == 0 {
		_ = root.Lchown(name, uid, gid)
	}
}
