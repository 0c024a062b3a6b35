//go:build linux

package ssh_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/ssh"
)

// bridgeEnv makes this test binary a bridge between its standard input and
// output and a TCP address, as OpenSSH's ProxyCommand wants one.
const bridgeEnv = "COSMICAC_TEST_BRIDGE"

func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == ssh.FilesCommand {
		os.Exit(ssh.ServeFiles())
	}
	if address := os.Getenv(bridgeEnv); address != "" {
		os.Exit(bridge(address))
	}
	goleak.VerifyTestMain(m)
}

func bridge(address string) int {
	conn, err := net.Dial("tcp", address)
	if err != nil {
		return 1
	}
	go func() {
		_, _ = io.Copy(conn, os.Stdin)
		_ = conn.(*net.TCPConn).CloseWrite()
	}()
	_, _ = io.Copy(os.Stdout, conn)
	return 0
}

// world is a server with an account of its own and a way to reach it.
type world struct {
	server  *ssh.Server
	hostKey string
	home    string
}

func start(t *testing.T, change func(*ssh.ServerOptions)) *world {
	t.Helper()
	dir := t.TempDir()
	key, err := ssh.HostKey(filepath.Join(dir, "host_key"), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	w := &world{home: filepath.Join(dir, "home")}
	if err := os.Mkdir(w.home, 0o755); err != nil {
		t.Fatal(err)
	}
	// Root of this VM, with a home of its own and a shell without start files that talk.
	passwd := "root:x:0:0::" + w.home + ":/bin/bash\n"
	if err := os.WriteFile(filepath.Join(dir, "passwd"), []byte(passwd), 0o644); err != nil {
		t.Fatal(err)
	}
	o := ssh.ServerOptions{HostKey: key, User: "root", Etc: dir, HangUpGrace: 500 * time.Millisecond}
	if change != nil {
		change(&o)
	}
	if w.server, err = ssh.NewServer(o); err != nil {
		t.Fatal(err)
	}
	w.hostKey = w.server.HostKey()
	return w
}

var every = []string{"shell", "exec", "files", "forward"}

// listen serves each TCP connection with access until the test ends.
func (w *world) listen(t *testing.T, access ssh.Access) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var tasks sync.WaitGroup
	tasks.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			tasks.Go(func() {
				// A client that is only refused is no fault of the server.
				_ = w.server.Serve(ctx, conn, access)
				conn.Close()
			})
		}
	})
	t.Cleanup(func() {
		l.Close()
		cancel()
		tasks.Wait()
	})
	return l.Addr().String()
}

func (w *world) client(t *testing.T, rights ...string) *ssh.Client {
	t.Helper()
	c, err := w.dial(t, w.listen(t, ssh.Access{Rights: rights}), "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func (w *world) dial(t *testing.T, address, user string) (*ssh.Client, error) {
	t.Helper()
	conn, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	return ssh.Dial(ctx, conn, w.hostKey, user)
}

func testContext(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// run executes a line and returns status, output and errors.
func run(t *testing.T, c *ssh.Client, line string, input io.Reader) (int, string, string, error) {
	t.Helper()
	var out, errs bytes.Buffer
	status, err := c.Exec(testContext(t), ssh.Command{Line: line, Input: input, Output: &out, Errors: &errs})
	return status, out.String(), errs.String(), err
}

func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if f() {
			return
		}
	}
	t.Fatalf("did not come to pass: %s", what)
}

func TestExitStatusIsTheCommands(t *testing.T) {
	t.Parallel()
	c := start(t, nil).client(t, every...)
	if status, _, _, err := run(t, c, "exit 37", nil); status != 37 || err != nil {
		t.Fatalf("status %d, error %v", status, err)
	}
	if status, _, _, err := run(t, c, "true", nil); status != 0 || err != nil {
		t.Fatalf("status %d, error %v", status, err)
	}
	status, _, _, err := run(t, c, "kill -TERM $$", nil)
	if status != 143 || err == nil || !strings.Contains(err.Error(), "TERM") {
		t.Fatalf("killed by TERM: status %d, error %v", status, err)
	}
}

func TestStandardErrorStaysApart(t *testing.T) {
	t.Parallel()
	c := start(t, nil).client(t, every...)
	status, out, errs, err := run(t, c, "echo out; echo err >&2; exit 5", nil)
	if status != 5 || out != "out\n" || errs != "err\n" || err != nil {
		t.Fatalf("status %d, out %q, err %q, error %v", status, out, errs, err)
	}
}

func TestTenMegabytesOfAnyBytesArriveExactlyBothWays(t *testing.T) {
	t.Parallel()
	c := start(t, nil).client(t, every...)
	data := make([]byte, 10<<20)
	_, _ = rand.Read(data)
	status, out, errs, err := run(t, c, "cat", bytes.NewReader(data))
	if status != 0 || err != nil || errs != "" {
		t.Fatalf("status %d, err %q, error %v", status, errs, err)
	}
	if out != string(data) {
		t.Fatalf("sent %d bytes, got %d others back", len(data), len(out))
	}
}

func TestTerminalInRawModePassesAnyBytesBothWays(t *testing.T) {
	t.Parallel()
	c := start(t, nil).client(t, every...)
	const size = 2 << 20
	sh, err := c.OpenShell(ssh.Size{Columns: 80, Rows: 24}, "xterm", "stty raw -echo; echo go; exec head -c 2097152", nil)
	if err != nil {
		t.Fatal(err)
	}
	mark := make([]byte, 3)
	if _, err := io.ReadFull(sh, mark); err != nil || string(mark) != "go\n" {
		t.Fatalf("read %q, error %v", mark, err)
	}
	data := make([]byte, size)
	_, _ = rand.Read(data)
	var writing sync.WaitGroup
	writing.Go(func() { _, _ = sh.Write(data) })
	got, err := io.ReadAll(sh)
	writing.Wait()
	if err != nil || !bytes.Equal(got, data) {
		t.Fatalf("sent %d bytes, got %d, equal %v, error %v", size, len(got), bytes.Equal(got, data), err)
	}
	if status, err := sh.Wait(testContext(t)); status != 0 || err != nil {
		t.Fatalf("status %d, error %v", status, err)
	}
}

func TestLastLinesOfATerminalAreNotLost(t *testing.T) {
	t.Parallel()
	c := start(t, nil).client(t, every...)
	for range 20 {
		sh, err := c.OpenShell(ssh.Size{Columns: 80, Rows: 24}, "xterm", "seq 1 3000", nil)
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(sh)
		if err != nil || !strings.HasSuffix(string(got), "2999\r\n3000\r\n") {
			t.Fatalf("ends with %q, error %v", got[max(0, len(got)-20):], err)
		}
	}
}

// typed collects what a shell prints, so that a test can wait for a text.
type screen struct {
	mu   sync.Mutex
	text bytes.Buffer
	done sync.WaitGroup
}

func watch(sh *ssh.Shell) *screen {
	s := &screen{}
	s.done.Go(func() {
		buffer := make([]byte, 4096)
		for {
			n, err := sh.Read(buffer)
			s.mu.Lock()
			s.text.Write(buffer[:n])
			s.mu.Unlock()
			if err != nil {
				return
			}
		}
	})
	return s
}

func (s *screen) has(text string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return strings.Contains(s.text.String(), text)
}

func (s *screen) count(text string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return strings.Count(s.text.String(), text)
}

func TestShellIsALoginShellOfItsSizeAndSeesResize(t *testing.T) {
	t.Parallel()
	w := start(t, func(o *ssh.ServerOptions) { o.Environment = map[string]string{"JOB_SAYS": "hello"} })
	c := w.client(t, "shell")
	sh, err := c.OpenShell(ssh.Size{Columns: 101, Rows: 31}, "xterm", "", map[string]string{"LC_TEST": "yes", "LD_PRELOAD": "/no"})
	if err != nil {
		t.Fatal(err)
	}
	s := watch(sh)
	defer s.done.Wait()
	defer sh.Close()
	say := func(line string) {
		if _, err := io.WriteString(sh, line+"\n"); err != nil {
			t.Fatal(err)
		}
	}
	say("stty size; shopt -q login_shell && echo is-a-login; echo \"$HOME|$USER|$TERM|$LC_TEST|$LD_PRELOAD|$JOB_SAYS|$PWD\"")
	eventually(t, "first size", func() bool { return s.has("31 101") && s.has("is-a-login") })
	eventually(t, "environment", func() bool { return s.has(w.home + "|root|xterm|yes||hello|" + w.home) })
	if err := sh.Resize(ssh.Size{Columns: 133, Rows: 43}); err != nil {
		t.Fatal(err)
	}
	say("stty size")
	eventually(t, "second size", func() bool { return s.has("43 133") })
	say("exit 9")
	if status, err := sh.Wait(testContext(t)); status != 9 || err != nil {
		t.Fatalf("status %d, error %v", status, err)
	}
}

func TestControlCEndsTheForegroundAlone(t *testing.T) {
	t.Parallel()
	c := start(t, nil).client(t, every...)
	sh, err := c.OpenShell(ssh.Size{Columns: 80, Rows: 24}, "xterm", "", nil)
	if err != nil {
		t.Fatal(err)
	}
	s := watch(sh)
	defer s.done.Wait()
	defer sh.Close()
	// Says so only once it is the foreground of the terminal itself.
	_, _ = io.WriteString(sh, "sh -c 'echo rea\"\"dy; exec sleep 1000'\n")
	eventually(t, "sleep runs", func() bool { return s.has("ready\r\n") })
	_, _ = sh.Write([]byte{3})
	eventually(t, "the key was seen", func() bool { return s.has("^C") })
	_, _ = io.WriteString(sh, "echo st''atus $?; exit\n")
	eventually(t, "status of an interrupted command", func() bool { return s.has("status 130") })
	if _, err := sh.Wait(testContext(t)); err != nil {
		t.Fatal(err)
	}
}

func TestSignalReachesTheCommand(t *testing.T) {
	t.Parallel()
	c := start(t, nil).client(t, every...)
	sh, err := c.OpenShell(ssh.Size{}, "xterm", "trap 'echo caught; exit 3' USR1; echo waits; while :; do sleep 0.05; done", nil)
	if err != nil {
		t.Fatal(err)
	}
	s := watch(sh)
	defer s.done.Wait()
	eventually(t, "the trap is set", func() bool { return s.has("waits") })
	if err := sh.Signal("USR1"); err != nil {
		t.Fatal(err)
	}
	status, err := sh.Wait(testContext(t))
	if err == nil && status != 3 {
		t.Fatalf("status %d, error %v", status, err)
	}
	if err := sh.Signal("NONE"); fault.KindOf(err) != fault.Invalid {
		t.Fatalf("unknown signal: %v", err)
	}
}

func TestRightsThatTheGrantLacksAreRefused(t *testing.T) {
	t.Parallel()
	w := start(t, nil)
	shell, exec, none := w.client(t, "shell"), w.client(t, "exec"), w.client(t)
	if _, _, _, err := run(t, shell, "true", nil); fault.KindOf(err) != fault.Denied {
		t.Errorf("exec with shell alone: %v", err)
	}
	if _, err := exec.OpenShell(ssh.Size{}, "", "", nil); fault.KindOf(err) != fault.Denied {
		t.Errorf("shell with exec alone: %v", err)
	}
	if status, _, _, err := run(t, exec, "exit 4", nil); status != 4 || err != nil {
		t.Errorf("exec with exec alone: status %d, error %v", status, err)
	}
	if _, err := exec.Files(); fault.KindOf(err) != fault.Denied {
		t.Errorf("files with exec alone: %v", err)
	}
	if _, err := none.DialTCP(testContext(t), "127.0.0.1:1"); fault.KindOf(err) != fault.Denied {
		t.Errorf("forward with nothing: %v", err)
	}
	if _, _, _, err := run(t, none, "true", nil); fault.KindOf(err) != fault.Denied {
		t.Errorf("exec with nothing: %v", err)
	}
}

func TestFilesGoBothWays(t *testing.T) {
	t.Parallel()
	w := start(t, nil)
	files, err := w.client(t, "files").Files()
	if err != nil {
		t.Fatal(err)
	}
	defer files.Close()
	data := make([]byte, 3<<20)
	_, _ = rand.Read(data)
	put, err := files.Create("sent.bin") // relative to the login's home
	if err != nil {
		t.Fatal(err)
	}
	if _, err := put.ReadFrom(bytes.NewReader(data)); err != nil {
		t.Fatal(err)
	}
	if err := put.Close(); err != nil {
		t.Fatal(err)
	}
	if have, err := os.ReadFile(filepath.Join(w.home, "sent.bin")); err != nil || !bytes.Equal(have, data) {
		t.Fatalf("put %d bytes, found %d, error %v", len(data), len(have), err)
	}
	get, err := files.Open("sent.bin")
	if err != nil {
		t.Fatal(err)
	}
	defer get.Close()
	if have, err := io.ReadAll(get); err != nil || !bytes.Equal(have, data) {
		t.Fatalf("got %d bytes, error %v", len(have), err)
	}
	if _, err := files.Open("no-such-file"); !errors.Is(err, os.ErrNotExist) {
		t.Fatalf("a file that is not there: %v", err)
	}
}

func TestForwardedConnectionsAreIndependent(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var echoes sync.WaitGroup
	defer echoes.Wait()
	defer l.Close()
	echoes.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			echoes.Go(func() {
				defer conn.Close()
				_, _ = io.Copy(conn, conn)
			})
		}
	})
	c := start(t, nil).client(t, "forward")
	var conns []net.Conn
	for range 5 {
		conn, err := c.DialTCP(testContext(t), l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		conns = append(conns, conn)
	}
	conns[2].Close()
	for i, conn := range conns {
		if i == 2 {
			continue
		}
		if _, err := io.WriteString(conn, "still here"); err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
		_ = conn.(interface{ CloseWrite() error }).CloseWrite()
		if back, err := io.ReadAll(conn); string(back) != "still here" || err != nil {
			t.Fatalf("connection %d: %q, %v", i, back, err)
		}
	}
	if _, err := c.DialTCP(testContext(t), "127.0.0.1:1"); fault.KindOf(err) != fault.Unavailable {
		t.Fatalf("nobody listens: %v", err)
	}
}

func TestCommandDiesWithItsConnection(t *testing.T) {
	t.Parallel()
	w := start(t, nil)
	c := w.client(t, every...)
	note := filepath.Join(w.home, "pids")
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		// The child ignores SIGHUP, so that only SIGKILL to the whole group ends it.
		_, _ = c.Exec(context.Background(), ssh.Command{Line: "trap '' HUP; sleep 1000 & echo $$ $! > " + note + ".new; mv " + note + ".new " + note + "; wait"})
	}()
	var pids []int
	eventually(t, "the command runs", func() bool {
		raw, err := os.ReadFile(note)
		return err == nil && scan(string(raw), &pids)
	})
	c.Close()
	<-ended
	for _, pid := range pids {
		eventually(t, "the group is gone", func() bool { return !alive(pid) })
	}
	eventually(t, "no session is counted", func() bool { return w.server.Sessions() == 0 })
}

func scan(text string, pids *[]int) bool {
	*pids = nil
	for _, f := range strings.Fields(text) {
		n := 0
		for _, r := range f {
			n = n*10 + int(r-'0')
		}
		*pids = append(*pids, n)
	}
	return len(*pids) == 2
}

// alive is false for a process that is gone or waits to be reaped by its new parent.
func alive(pid int) bool {
	if syscall.Kill(pid, 0) != nil {
		return false
	}
	raw, err := os.ReadFile(filepath.Join("/proc", itoa(pid), "stat"))
	return err == nil && !strings.Contains(string(raw), ") Z ")
}

func itoa(n int) string {
	if n < 10 {
		return string(rune('0' + n))
	}
	return itoa(n/10) + string(rune('0'+n%10))
}

func TestSessionsAreCapped(t *testing.T) {
	t.Parallel()
	w := start(t, func(o *ssh.ServerOptions) { o.Sessions = 2 })
	c := w.client(t, every...)
	for range 2 {
		sh, err := c.OpenShell(ssh.Size{}, "xterm", "sleep 1000", nil)
		if err != nil {
			t.Fatal(err)
		}
		defer sh.Close()
	}
	if w.server.Sessions() != 2 {
		t.Fatalf("%d sessions", w.server.Sessions())
	}
	if _, err := c.OpenShell(ssh.Size{}, "xterm", "true", nil); err == nil {
		t.Fatal("a third session opened")
	}
}

func TestMissingUserIsSaidOnTheChannel(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("only root changes to another user")
	}
	c := start(t, func(o *ssh.ServerOptions) { o.User = "nosuchuser" }).client(t, every...)
	status, _, errs, _ := run(t, c, "true", nil)
	if status != 255 || !strings.Contains(errs, `no such user "nosuchuser"`) {
		t.Fatalf("status %d, errors %q", status, errs)
	}
}

func TestAnotherLoginNameIsRefusedInWords(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("without root every name is the current user")
	}
	w := start(t, nil)
	_, err := w.dial(t, w.listen(t, ssh.Access{Rights: every}), "somebody")
	if fault.KindOf(err) != fault.Denied || !strings.Contains(err.Error(), `"root" only`) {
		t.Fatal(err)
	}
}

func TestAnotherHostKeyIsRefused(t *testing.T) {
	t.Parallel()
	w, other := start(t, nil), start(t, nil)
	w.hostKey = other.hostKey
	if _, err := w.dial(t, w.listen(t, ssh.Access{Rights: every}), ""); err == nil {
		t.Fatal("spoke with a server of another key")
	}
}

func TestProgramThatLeavesAChildBehindDoesNotHangTheSession(t *testing.T) {
	t.Parallel()
	w := start(t, nil)
	c := w.client(t, every...)
	status, out, _, err := run(t, c, "sleep 1000 & echo $!; exit 6", nil)
	if status != 6 || err != nil {
		t.Fatalf("status %d, error %v", status, err)
	}
	// A normal end leaves background work alone, as every SSH server does.
	pid := 0
	for _, r := range strings.TrimSpace(out) {
		pid = pid*10 + int(r-'0')
	}
	if !alive(pid) {
		t.Fatal("the background process is gone")
	}
	_ = syscall.Kill(pid, syscall.SIGKILL)
}
