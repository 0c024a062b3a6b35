//go:build linux

package ssh_test

import (
	"bytes"
	"crypto/rand"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/cosmicac/cosmicac/pkg/ssh"
)

// openSSH is the system's own client, with this test binary as ProxyCommand.
type openSSH struct {
	options []string
	env     []string
}

func (w *world) openSSH(t *testing.T, rights ...string) openSSH {
	t.Helper()
	if _, err := exec.LookPath("ssh"); err != nil {
		t.Skip("no OpenSSH client on this machine")
	}
	address := w.listen(t, ssh.Access{Rights: rights})
	known := filepath.Join(t.TempDir(), "known_hosts")
	if err := os.WriteFile(known, []byte("vm "+w.hostKey+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return openSSH{
		options: []string{
			"-F", "none", "-o", "ProxyCommand=" + self, "-o", "UserKnownHostsFile=" + known, "-o", "StrictHostKeyChecking=yes",
			"-o", "BatchMode=yes", "-o", "IdentityFile=none", "-o", "LogLevel=ERROR", "-o", "User=root",
		},
		env: append(os.Environ(), bridgeEnv+"="+address, "SSH_AUTH_SOCK="),
	}
}

func (o openSSH) command(t *testing.T, program string, arguments ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.CommandContext(testContext(t), program, append(o.options, arguments...)...)
	cmd.Env = o.env
	return cmd
}

// code runs a command and returns its exit code.
func code(t *testing.T, cmd *exec.Cmd) int {
	t.Helper()
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode()
}

func TestOpenSSHGetsStatusStreamsAndBytes(t *testing.T) {
	t.Parallel()
	o := start(t, nil).openSSH(t, every...)
	data := make([]byte, 10<<20)
	_, _ = rand.Read(data)
	cmd := o.command(t, "ssh", "vm", "cat; echo apart >&2; exit 37")
	var out, errs bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(data), &out, &errs
	if c := code(t, cmd); c != 37 || errs.String() != "apart\n" || !bytes.Equal(out.Bytes(), data) {
		t.Fatalf("code %d, err %q, %d bytes back of %d", c, errs.String(), out.Len(), len(data))
	}
}

func TestOpenSSHCopiesFilesAndForwards(t *testing.T) {
	t.Parallel()
	w := start(t, nil)
	o := w.openSSH(t, every...)
	dir := t.TempDir()
	data := make([]byte, 1<<20)
	_, _ = rand.Read(data)
	if err := os.WriteFile(filepath.Join(dir, "here"), data, 0o600); err != nil {
		t.Fatal(err)
	}
	batch := "put " + dir + "/here there\nget there " + dir + "/back\n"
	cmd := o.command(t, "sftp", "-b", "-", "vm")
	cmd.Stdin = strings.NewReader(batch)
	var errs bytes.Buffer
	cmd.Stderr = &errs
	if c := code(t, cmd); c != 0 {
		t.Fatalf("sftp: code %d, %s", c, errs.String())
	}
	for _, path := range []string{filepath.Join(w.home, "there"), filepath.Join(dir, "back")} {
		if have, err := os.ReadFile(path); err != nil || !bytes.Equal(have, data) {
			t.Fatalf("%s: %d bytes, %v", path, len(have), err)
		}
	}
	cmd = o.command(t, "scp", "vm:there", dir+"/scp")
	if c := code(t, cmd); c != 0 {
		t.Fatalf("scp: code %d", c)
	}
	if have, err := os.ReadFile(dir + "/scp"); err != nil || !bytes.Equal(have, data) {
		t.Fatalf("scp: %d bytes, %v", len(have), err)
	}
}

func TestOpenSSHIsRefusedWhatTheGrantLacks(t *testing.T) {
	t.Parallel()
	o := start(t, nil).openSSH(t, "exec")
	if c := code(t, o.command(t, "ssh", "vm", "exit 4")); c != 4 {
		t.Errorf("exec: code %d", c)
	}
	if c := code(t, o.command(t, "ssh", "-tt", "vm", "true")); c == 0 {
		t.Error("a terminal without the right shell")
	}
	cmd := o.command(t, "sftp", "-b", "-", "vm")
	cmd.Stdin = strings.NewReader("ls\n")
	if c := code(t, cmd); c == 0 {
		t.Error("sftp without the right files")
	}
	if c := code(t, o.command(t, "ssh", "-o", "ExitOnForwardFailure=yes", "-R", "0:127.0.0.1:1", "vm", "true")); c == 0 {
		t.Error("a remote listener")
	}
	cmd = o.command(t, "ssh", "-W", "127.0.0.1:1", "vm")
	if c := code(t, cmd); c == 0 {
		t.Error("a forward without the right forward")
	}
}

// terminal is a local terminal for a client program to run on.
type terminal struct {
	master *os.File
	slave  *os.File
	screen *screen
}

func newTerminal(t *testing.T, columns, rows uint16) *terminal {
	t.Helper()
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	number, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	x := &terminal{screen: &screen{}}
	x.resize(t, fd, columns, rows)
	x.master = os.NewFile(uintptr(fd), "master")
	if x.slave, err = os.OpenFile("/dev/pts/"+itoa(number), os.O_RDWR|unix.O_NOCTTY, 0); err != nil {
		t.Fatal(err)
	}
	x.screen.done.Go(func() {
		buffer := make([]byte, 4096)
		for {
			n, err := x.master.Read(buffer)
			x.screen.mu.Lock()
			x.screen.text.Write(buffer[:n])
			x.screen.mu.Unlock()
			if err != nil {
				return
			}
		}
	})
	t.Cleanup(func() {
		x.slave.Close()
		x.master.Close()
		x.screen.done.Wait()
	})
	return x
}

func (x *terminal) resize(t *testing.T, fd int, columns, rows uint16) {
	t.Helper()
	if err := unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: rows, Col: columns}); err != nil {
		t.Fatal(err)
	}
}

func (x *terminal) typed(t *testing.T, text string) {
	t.Helper()
	if _, err := io.WriteString(x.master, text); err != nil {
		t.Fatal(err)
	}
}

func TestOpenSSHTerminalResizesAndIsInterrupted(t *testing.T) {
	t.Parallel()
	o := start(t, nil).openSSH(t, every...)
	x := newTerminal(t, 91, 29)
	cmd := o.command(t, "ssh", "-tt", "vm")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = x.slave, x.slave, x.slave
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	var ended sync.WaitGroup
	ended.Go(func() { _ = code(t, cmd) })
	eventually(t, "a prompt", func() bool { return x.screen.has("# ") || x.screen.has("$ ") })
	x.typed(t, "stty size\r")
	eventually(t, "the first size", func() bool { return x.screen.has("29 91") })
	raw, err := x.master.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	_ = raw.Control(func(fd uintptr) { x.resize(t, int(fd), 119, 41) })
	asked := 1
	eventually(t, "the second size", func() bool {
		if x.screen.count("29 91\r\n") == asked { // OpenSSH may send what is typed before the size
			asked++
			x.typed(t, "stty size\r")
		}
		return x.screen.has("41 119")
	})
	x.typed(t, "printf 'gr\\303'; sleep 0.1; printf '\\274n\\n'\r")
	eventually(t, "UTF-8 that came in pieces", func() bool { return x.screen.has("gr\u00fcn\r\n") })
	x.typed(t, "sh -c 'echo rea\"\"dy; exec sleep 1000'\r")
	eventually(t, "sleep runs", func() bool { return x.screen.has("ready\r\n") })
	x.typed(t, "\x03")
	eventually(t, "the key was seen", func() bool { return x.screen.has("^C") })
	x.typed(t, "echo st''atus $?; exit 7\r")
	eventually(t, "its status", func() bool { return x.screen.has("status 130") })
	ended.Wait()
	if c := cmd.ProcessState.ExitCode(); c != 7 {
		t.Fatalf("exit code %d", c)
	}
}

func TestAttachedTerminalIsRawAndRestoredAndEscapes(t *testing.T) {
	t.Parallel()
	c := start(t, nil).client(t, every...)
	x := newTerminal(t, 77, 22)
	before := modes(t, x.slave)
	type outcome struct {
		status int
		err    error
	}
	attach := func(line string) chan outcome {
		ended := make(chan outcome, 1)
		go func() {
			status, err := c.Attach(testContext(t), ssh.Terminal{Input: x.slave, Output: x.slave, Term: "xterm", Line: line})
			ended <- outcome{status, err}
		}()
		return ended
	}
	ended := attach("stty size; echo rea''dy; read x; echo got=$x; exit 12")
	eventually(t, "the shell is up at its size", func() bool { return x.screen.has("22 77") && x.screen.has("ready") })
	x.typed(t, "word~.word\r") // not at the start of a line
	if o := <-ended; o.status != 12 || o.err != nil {
		t.Fatalf("%+v", o)
	}
	// The terminal's other side is read by another goroutine.
	eventually(t, "the shell's answer", func() bool { return x.screen.has("got=word~.word") })
	if after := modes(t, x.slave); after != before {
		t.Fatal("the terminal's modes were not restored")
	}
	ended = attach("echo aga''in; sleep 1000")
	eventually(t, "the second shell is up", func() bool { return x.screen.has("again") })
	x.typed(t, "~.")
	if o := <-ended; !errors.Is(o.err, ssh.ErrEscaped) {
		t.Fatalf("%+v", o)
	}
	if after := modes(t, x.slave); after != before {
		t.Fatal("the terminal's modes were not restored")
	}
}

func modes(t *testing.T, tty *os.File) unix.Termios {
	t.Helper()
	m, err := unix.IoctlGetTermios(int(tty.Fd()), unix.TCGETS)
	if err != nil {
		t.Fatal(err)
	}
	return *m
}
