// Package nettest proves the mesh on networks as they are met in the field: sites
// behind address translation, blocked protocols, broken, slow and IPv6-only links.
//
// The whole test binary runs again inside a network, a mount and, without root, a
// user namespace of its own. Every host of a test is a further network namespace
// in there, every node a process on such a host. Addresses look public because
// hole punching considers no others; nothing leads out, so nothing is reached by
// them, and nothing is left behind when the binary ends.
//
// It holds tests only, and no code for others.
package nettest

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

const (
	asNode = "NETTEST_AS_NODE" // the binary is a host's process, see program_test.go
	inside = "NETTEST_INSIDE"  // the binary is in namespaces of its own
)

// unavailable says why there are no namespaces here.
var unavailable string

func TestMain(m *testing.M) {
	if os.Getenv(asNode) != "" {
		if err := serveProgram(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	flag.Parse()
	if os.Getenv(inside) == "" {
		code, err := runInside()
		if err == nil {
			os.Exit(code)
		}
		unavailable = err.Error()
	} else if err := settle(); err != nil {
		unavailable = err.Error()
	}
	// Tests wait most of the time.
	if f := flag.Lookup("test.parallel"); f.Value.String() == fmt.Sprint(runtime.GOMAXPROCS(0)) {
		if err := f.Value.Set("6"); err != nil {
			panic(err)
		}
	}
	goleak.VerifyTestMain(m)
}

// runInside runs this binary with the same arguments in new namespaces. An error
// means that they could not be made.
func runInside() (code int, err error) {
	for _, program := range []string{"ip", "nft", "tc", "nsenter"} {
		if _, err := exec.LookPath(program); err != nil {
			return 0, fmt.Errorf("network namespaces need the program %s, see scripts/setup.sh", program)
		}
	}
	self, err := os.Executable()
	if err != nil {
		return 0, err
	}
	runtime.LockOSThread() // the child dies with the thread that started it
	flags := uintptr(unix.CLONE_NEWNET | unix.CLONE_NEWNS)
	start := func(attr *syscall.SysProcAttr) (*exec.Cmd, error) {
		cmd := exec.Command(self, os.Args[1:]...)
		cmd.Env = append(os.Environ(), inside+"=1")
		cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
		cmd.SysProcAttr = attr
		return cmd, cmd.Start()
	}
	cmd, err := start(&syscall.SysProcAttr{Cloneflags: flags, Pdeathsig: syscall.SIGKILL})
	if errors.Is(err, unix.EPERM) { // without root it takes a user namespace
		cmd, err = start(&syscall.SysProcAttr{Cloneflags: flags | unix.CLONE_NEWUSER, Pdeathsig: syscall.SIGKILL,
			UidMappings: []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}},
			GidMappings: []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}}})
	}
	if err != nil {
		return 0, fmt.Errorf("network namespaces are not permitted here: %w", err)
	}
	var exit *exec.ExitError
	if err := cmd.Wait(); err != nil && !errors.As(err, &exit) {
		return 0, err
	}
	return cmd.ProcessState.ExitCode(), nil
}

// settle gives the namespaces a folder of their own for `ip netns`, and looks whether
// the kernel has what the tests need.
func settle() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make the mounts private: %w", err)
	}
	run, err := filepath.EvalSymlinks("/var/run")
	if err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", run, "tmpfs", 0, "mode=755"); err != nil {
		return fmt.Errorf("mount a folder for the namespaces: %w", err)
	}
	for _, command := range []string{
		"ip netns add probe",
		"ip link add probe type bridge",
		"ip link add probe0 type veth peer name probe1",
		"nsenter --net=/var/run/netns/probe nft table ip probe { chain out { type nat hook postrouting priority 100; masquerade; }; }",
		"tc qdisc add dev probe0 root tbf rate 8kbit burst 1600 latency 5s",
		"ip link del probe0",
		"ip link del probe",
		"ip netns del probe",
	} {
		words := strings.Fields(command)
		if out, err := exec.Command(words[0], words[1:]...).CombinedOutput(); err != nil {
			return fmt.Errorf("this kernel or container does not permit %q: %s", command, strings.TrimSpace(string(out)))
		}
	}
	return nil
}
