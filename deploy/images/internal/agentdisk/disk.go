package agentdisk

import (
	"archive/tar"
	"bytes"
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/Microsoft/hcsshim/ext4/tar2ext4"
)

// Agents are the programs on the disk, in its root folder.
var Agents = []string{"cosmicac-wrk-agent-inference", "cosmicac-wrk-agent-instance"}

// VersionFile is the file on the disk that names the agents' version on one line.
const VersionFile = "version"

// maxDisk bounds the disk; the file system reserves room for its tables by it.
const maxDisk = 1 << 30

// tagForm is what a registry takes as a tag, since the version becomes one.
var tagForm = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$`)

// agent is one program that goes on the disk.
type agent struct {
	name     string
	path     string
	platform string // GOARCH of the program
	version  string
}

// readAgent looks at a program: static, for a platform that we know, and of which version. The version is what the
// program says when it is run, as it will say it to the control plane.
func readAgent(ctx context.Context, dir, name string) (agent, error) {
	a := agent{name: name, path: filepath.Join(dir, name)}
	f, err := elf.Open(a.path)
	if err != nil {
		return a, fmt.Errorf("read the agent %s: %w", a.path, err)
	}
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			return a, fmt.Errorf("the agent %s is linked dynamically and would not run in every image: build it with CGO_ENABLED=0", a.path)
		}
	}
	switch f.Machine {
	case elf.EM_X86_64:
		a.platform = "amd64"
	case elf.EM_AARCH64:
		a.platform = "arm64"
	default:
		return a, fmt.Errorf("the agent %s is for %s; virtual machines are amd64 or arm64", a.path, f.Machine)
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, a.path, "--version").Output()
	if err != nil {
		return a, fmt.Errorf("ask %s --version (it must run on this machine): %w", a.path, err)
	}
	program, version, _ := strings.Cut(strings.TrimSpace(string(out)), " ")
	if program != name || !tagForm.MatchString(version) {
		return a, fmt.Errorf("%s --version says %q; want its name and a version that is good as an image tag", a.path, strings.TrimSpace(string(out)))
	}
	a.version = version
	return a, nil
}

// readAgents reads all of them; they must be of one version and platform.
func readAgents(ctx context.Context, dir string) ([]agent, error) {
	var all []agent
	for _, name := range Agents {
		a, err := readAgent(ctx, dir, name)
		if err != nil {
			return nil, err
		}
		if len(all) > 0 && (a.version != all[0].version || a.platform != all[0].platform) {
			return nil, fmt.Errorf("%s is %s for %s and %s is %s for %s: build them together",
				all[0].name, all[0].version, all[0].platform, a.name, a.version, a.platform)
		}
		all = append(all, a)
	}
	return all, nil
}

// writeDisk writes the file system with the agents into an empty file and gives its size.
func writeDisk(f *os.File, agents []agent) (int64, error) {
	files, feed := io.Pipe()
	fed := make(chan error, 1)
	go func() {
		err := feedAgents(feed, agents)
		feed.CloseWithError(err)
		fed <- err
	}()
	err := tar2ext4.ConvertTarToExt4(files, f, tar2ext4.MaximumDiskSize(maxDisk))
	files.CloseWithError(errors.New("the file system is not written further"))
	err = errors.Join(<-fed, err)
	if err != nil {
		return 0, fmt.Errorf("write the agents' file system: %w", err)
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return 0, fmt.Errorf("write the agents' file system: %w", err)
	}
	size, _, err := tar2ext4.Ext4FileSystemSize(f)
	if err == nil {
		// What the file system counts is what the guest must see, whatever was written last.
		err = f.Truncate(size)
	}
	if err != nil {
		return 0, fmt.Errorf("write the agents' file system: %w", err)
	}
	return size, nil
}

func feedAgents(w io.Writer, agents []agent) error {
	t := tar.NewWriter(w)
	for _, a := range agents {
		if err := feedAgent(t, a); err != nil {
			return err
		}
	}
	text := []byte(agents[0].version + "\n")
	if err := t.WriteHeader(header(VersionFile, 0o444, int64(len(text)))); err != nil {
		return err
	}
	if _, err := io.Copy(t, bytes.NewReader(text)); err != nil {
		return err
	}
	return t.Close()
}

func feedAgent(t *tar.Writer, a agent) error {
	f, err := os.Open(a.path)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if err := t.WriteHeader(header(a.name, 0o555, info.Size())); err != nil {
		return err
	}
	_, err = io.Copy(t, f)
	return err
}

// header is that of a file of root from the epoch: times would change the digest.
func header(name string, mode, size int64) *tar.Header {
	return &tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: mode, Size: size, ModTime: time.Unix(0, 0), Format: tar.FormatUSTAR}
}
