package guest

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// namespaces a machine gets. The network stays the host's on purpose: the agent must reach the daemons on loopback.
const namespaces = syscall.CLONE_NEWNS | syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC | syscall.CLONE_NEWPID

// process names a process for good: process ids are reused, a pair of id and start time is not, within one boot.
type process struct {
	PID   int    `json:"pid"`
	Start string `json:"start"` // clock ticks since boot
	Boot  string `json:"boot"`
}

func identify(pid int) (process, error) {
	start, _, _, err := stat(pid)
	if err != nil {
		return process{}, err
	}
	return process{PID: pid, Start: start, Boot: bootID()}, nil
}

func bootID() string {
	raw, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(raw))
}

// stat returns start time, state and parent of a process.
func stat(pid int) (start, state string, parent int, err error) {
	raw, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return "", "", 0, err
	}
	// The second field is the name in parentheses and may hold anything, so fields are counted after the last one.
	i := bytes.LastIndexByte(raw, ')')
	f := strings.Fields(string(raw[i+1:]))
	if i < 0 || len(f) < 20 {
		return "", "", 0, fmt.Errorf("process %d has a strange stat", pid)
	}
	parent, _ = strconv.Atoi(f[1])
	return f[19], f[0], parent, nil
}

func (p process) alive() bool {
	if p.PID <= 0 {
		return false
	}
	start, state, _, err := stat(p.PID)
	return err == nil && start == p.Start && state != "Z" && state != "X" && p.Boot == bootID()
}

func (p process) signal(s syscall.Signal) {
	if p.alive() {
		_ = syscall.Kill(p.PID, s)
	}
}

// kill ends a machine at once. With a PID namespace the kernel takes everything inside along; without one the
// descendants are found by their parents first.
func (p process) kill(isolated bool) {
	if !p.alive() {
		return
	}
	var rest []process
	if !isolated {
		rest = descendants(p.PID)
	}
	_ = syscall.Kill(p.PID, syscall.SIGKILL)
	for _, d := range rest {
		d.signal(syscall.SIGKILL)
	}
}

func descendants(root int) []process {
	children := map[int][]process{}
	entries, _ := os.ReadDir("/proc")
	boot := bootID()
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if start, _, parent, err := stat(pid); err == nil {
			children[parent] = append(children[parent], process{PID: pid, Start: start, Boot: boot})
		}
	}
	var out []process
	for queue := []int{root}; len(queue) > 0; queue = queue[1:] {
		for _, c := range children[queue[0]] {
			out = append(out, c)
			queue = append(queue, c.PID)
		}
	}
	return out
}

// probe tries in a child what a machine's init needs: the namespaces, a bind mount, a new /proc.
func probe(self string) error {
	if os.Geteuid() != 0 {
		return fmt.Errorf("not running as root")
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	dir, err := os.MkdirTemp("", "cosmicac-probe-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	cmd := exec.CommandContext(ctx, self, "vm-init", "--probe", dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: namespaces}
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w: %s", err, bytes.TrimSpace(out))
	}
	return nil
}
