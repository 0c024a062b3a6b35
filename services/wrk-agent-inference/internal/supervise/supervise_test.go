package supervise_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/cosmicac/cosmicac/services/wrk-agent-inference/internal/supervise"
)

// The test binary is the engine when this is set to its folder. Files there steer it:
// hang: completions hang; sick: health says 503; slow: not up yet; child: it has a
// grandchild in a session of its own that holds a port; hub: lines of what the hub answers,
// one for each start, empty for well.
const engineEnv = "COSMICAC_TEST_ENGINE"

func TestMain(m *testing.M) {
	if dir := os.Getenv(engineEnv); dir != "" {
		os.Exit(fakeEngine(dir, os.Args[1]))
	}
	goleak.VerifyTestMain(m)
}

func exists(dir, name string) bool {
	_, err := os.Stat(filepath.Join(dir, name))
	return err == nil
}

func fakeEngine(dir, address string) int {
	fmt.Println("engine: hello")
	note(dir, "starts", "x")
	if exists(dir, "crash") {
		fmt.Println("out of memory")
		return 3
	}
	if answers := strings.Split(read(dir, "hub"), "\n"); len(read(dir, "starts")) <= len(answers) {
		if answer := answers[len(read(dir, "starts"))-1]; answer != "" {
			fmt.Println("huggingface_hub: " + answer)
			fmt.Println("RuntimeError: Engine core initialization failed. See root cause above.")
			return 1
		}
	}
	if exists(dir, "child") {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return 4
		}
		f, _ := l.(*net.TCPListener).File()
		child := exec.Command("/bin/sleep", "1000")
		child.ExtraFiles = []*os.File{f}
		child.Stdout = os.Stdout // holds the pipe too
		child.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		if child.Start() != nil {
			return 4
		}
		note(dir, "port", l.Addr().String())
		note(dir, "child-pid", strconv.Itoa(child.Process.Pid))
	}
	note(dir, "pid", strconv.Itoa(os.Getpid()))
	mux := http.NewServeMux()
	mux.HandleFunc("/health", func(w http.ResponseWriter, _ *http.Request) {
		if exists(dir, "sick") || exists(dir, "slow") {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	})
	mux.HandleFunc("/v1/models", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"data":[{"id":"m"}]}`) })
	mux.HandleFunc("/v1/chat/completions", func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		note(dir, "asked", "x")
		for exists(dir, "hang") {
			select {
			case <-r.Context().Done():
				return
			case <-time.After(10 * time.Millisecond):
			}
		}
		fmt.Fprint(w, `{"choices":[{"message":{"content":"a"}}]}`)
	})
	l, err := net.Listen("tcp", address)
	if err != nil {
		return 5
	}
	_ = http.Serve(l, mux)
	return 6
}

// note appends, whole.
func note(dir, name, text string) {
	f, err := os.OpenFile(filepath.Join(dir, name), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err == nil {
		_, _ = f.WriteString(text)
		f.Close()
	}
}

func read(dir, name string) string {
	raw, _ := os.ReadFile(filepath.Join(dir, name))
	return string(raw)
}

func touch(t *testing.T, dir, name string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
		t.Fatal(err)
	}
}

func remove(dir string, names ...string) {
	for _, n := range names {
		_ = os.Remove(filepath.Join(dir, n))
	}
}

type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lines) last() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	all := strings.Split(strings.TrimSpace(l.b.String()), "\n")
	return all[len(all)-1]
}

var quick = supervise.Timing{
	StartPoll: 20 * time.Millisecond, Poll: 20 * time.Millisecond, ProbeAfter: 100 * time.Millisecond, ProbeTime: 100 * time.Millisecond,
	NoProgress: 600 * time.Millisecond, Stuck: time.Hour, Pause: 10 * time.Millisecond, PauseMost: 50 * time.Millisecond, Grace: time.Second,
}

func start(t *testing.T, dir string, change func(*supervise.Options)) (s *supervise.Supervisor, stop func()) {
	t.Helper()
	out := &lines{}
	o := supervise.Options{
		Prepare: func() (supervise.Launch, error) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				return supervise.Launch{}, err
			}
			defer l.Close()
			return supervise.Launch{
				Path: "/proc/self/exe", Arguments: []string{l.Addr().String()}, Environment: append(os.Environ(), engineEnv+"="+dir),
				Directory: "/", Network: "tcp", Address: l.Addr().String(), Models: []string{"m"},
			}, nil
		},
		Mark: dir, Output: out, LastLine: out.last, Timing: quick, Now: time.Now,
	}
	if change != nil {
		change(&o)
	}
	s = supervise.New(o)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("run: %v", err)
		}
	})
	t.Cleanup(stop)
	return s, stop
}

func eventually(t *testing.T, s *supervise.Supervisor, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if f() {
			return
		}
	}
	t.Fatalf("did not come to pass: %s; status %+v", what, s.Status())
}

func is(s *supervise.Supervisor, state supervise.State) func() bool {
	return func() bool { return s.Status().State == state }
}

func alive(pid string) bool {
	n, err := strconv.Atoi(pid)
	if err != nil || syscall.Kill(n, 0) != nil {
		return false
	}
	raw, err := os.ReadFile("/proc/" + pid + "/stat")
	return err == nil && !strings.Contains(string(raw), ") Z ")
}

func TestReadyOnlyAfterARealToken(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	touch(t, dir, "slow")
	touch(t, dir, "hang")
	s, _ := start(t, dir, nil)
	eventually(t, s, "the engine runs", func() bool { return read(dir, "pid") != "" })
	remove(dir, "slow") // health is 200 and the models are there, and no token comes
	eventually(t, s, "a token is asked for", func() bool { return read(dir, "asked") != "" })
	if s.Status().State != supervise.Starting {
		t.Fatalf("%+v", s.Status())
	}
	if _, err := s.Dial(context.Background()); err == nil {
		t.Fatal("dialed an engine that was never ready")
	}
	remove(dir, "hang")
	eventually(t, s, "ready", is(s, supervise.Ready))
	conn, err := s.Dial(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
}

func TestHealthyEngineWithoutTokensIsNotReadyAndComesBack(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s, _ := start(t, dir, nil)
	eventually(t, s, "ready", is(s, supervise.Ready))
	touch(t, dir, "hang")
	eventually(t, s, "lost", func() bool {
		st := s.Status()
		return st.State == supervise.Lost && strings.Contains(st.Message, "no progress")
	})
	if read(dir, "starts") != "x" {
		t.Fatal("it was restarted before its time")
	}
	remove(dir, "hang")
	eventually(t, s, "ready again", is(s, supervise.Ready))
}

func TestStuckEngineIsRestarted(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s, _ := start(t, dir, func(o *supervise.Options) { o.Timing.Stuck = time.Second })
	eventually(t, s, "ready", is(s, supervise.Ready))
	touch(t, dir, "hang")
	eventually(t, s, "started a second time", func() bool { return len(read(dir, "starts")) >= 2 })
	remove(dir, "hang")
	eventually(t, s, "ready again", is(s, supervise.Ready))
}

func TestEngineThatSaysItIsDeadIsRestarted(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s, _ := start(t, dir, nil)
	eventually(t, s, "ready", is(s, supervise.Ready))
	touch(t, dir, "sick")
	eventually(t, s, "started a second time", func() bool { return len(read(dir, "starts")) >= 2 })
	remove(dir, "sick")
	eventually(t, s, "ready again", is(s, supervise.Ready))
}

func TestKilledEngineLeavesNothingBehindAndIsRestarted(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	touch(t, dir, "child")
	s, stop := start(t, dir, nil)
	eventually(t, s, "ready", is(s, supervise.Ready))
	pid, child, port := read(dir, "pid"), read(dir, "child-pid"), read(dir, "port")
	if !alive(child) {
		t.Fatal("the grandchild does not run")
	}
	remove(dir, "pid", "child-pid", "port")
	n, _ := strconv.Atoi(pid)
	if err := syscall.Kill(n, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, s, "another engine runs", func() bool { return read(dir, "child-pid") != "" })
	if alive(child) {
		t.Fatal("the grandchild outlived its engine and its restart")
	}
	if l, err := net.Listen("tcp", port); err != nil {
		t.Fatalf("its port is still held: %v", err)
	} else {
		l.Close()
	}
	eventually(t, s, "ready again", is(s, supervise.Ready))
	if st := s.Status(); st.ExitCode != 128+9 || st.Ended != 1 {
		t.Fatalf("%+v", st)
	}
	second := read(dir, "child-pid")
	stop()
	if alive(second) {
		t.Fatal("the grandchild outlived the stop")
	}
}

func TestEngineThatNeverStartsIsGivenUpWithItsWords(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	touch(t, dir, "crash")
	s, _ := start(t, dir, nil)
	eventually(t, s, "failed", is(s, supervise.Failed))
	if st := s.Status(); st.ExitCode != 3 || !strings.Contains(st.Message, "exit code 3") || !strings.Contains(st.Message, "out of memory") {
		t.Fatalf("%+v", st)
	}
	if n := len(read(dir, "starts")); n != 5 {
		t.Fatalf("it was started %d times", n)
	}
}

func TestEngineOfAKilledAgentIsEndedByTheNext(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	left := exec.Command("/bin/sleep", "1000")
	left.Env = append(os.Environ(), supervise.MarkVariable+"="+dir)
	left.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := left.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		_ = left.Wait()
		close(ended)
	}()
	s, _ := start(t, dir, nil)
	eventually(t, s, "ready", is(s, supervise.Ready))
	select {
	case <-ended:
	case <-time.After(time.Minute):
		t.Fatal("it still runs")
	}
}
