package app_test

import (
	"bytes"
	"context"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/cosmicac/cosmicac/pkg/agent"
	"github.com/cosmicac/cosmicac/pkg/agent/agenttest"
	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	"github.com/cosmicac/cosmicac/pkg/ssh"
	agentv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	"github.com/cosmicac/cosmicac/services/wrk-agent-instance/internal/app"
)

// asAgent makes this test binary the agent itself.
const asAgent = "COSMICAC_TEST_AS_AGENT"

func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == ssh.FilesCommand {
		os.Exit(ssh.ServeFiles())
	}
	if os.Getenv(asAgent) != "" {
		os.Exit(agent.Command("wrk-agent-instance", "test", os.Args[1:], os.Stderr, app.New))
	}
	goleak.VerifyTestMain(m)
}

var eventually = agenttest.Eventually

func seedOf(lab *agenttest.Lab) *agentv1.Seed {
	seed := lab.Seed()
	seed.DefaultUser = "root"
	seed.Environment = map[string]string{"JOB_GREETING": "hello"}
	return seed
}

// run starts the agent in this process.
func run(t *testing.T, lab *agenttest.Lab, seed *agentv1.Seed) *agent.Agent {
	t.Helper()
	a, err := agent.New(agent.Options{Name: "wrk-agent-instance", Version: "test", Seed: seed, StateDirectory: t.TempDir(), ReportEvery: 50 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	w, err := app.New(a)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- a.Run(ctx, w) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("run: %v", err)
		}
	})
	eventually(t, "the agent is ready", func() bool {
		return lab.Ork.Report().GetPhase() == agentv1.Phase_PHASE_READY && lab.Ork.Card() != nil
	})
	return a
}

// open makes an SSH connection as the command line does: a grant, the mesh, the host key of the card.
func open(t *testing.T, lab *agenttest.Lab, n *mesh.Node, a *agent.Agent) *ssh.Client {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), agenttest.Patience)
	defer cancel()
	card := lab.Ork.Card()
	conn, err := n.OpenStream(ctx, a.ID(), app.StreamName, card.GetAddresses()...)
	if err != nil {
		t.Fatal(err)
	}
	c, err := ssh.Dial(ctx, conn, card.GetSshHostKey(), card.GetDefaultUser())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func TestHolderOfAGrantGetsAShellOverTheMesh(t *testing.T) {
	t.Parallel()
	lab := agenttest.New(t)
	seed := seedOf(lab)
	a := run(t, lab, seed)
	c := open(t, lab, lab.Client(a.ID(), 1, "shell", "exec", "files"), a)
	var out, errs bytes.Buffer
	status, err := c.Exec(context.Background(), ssh.Command{Line: "echo $JOB_GREETING; echo no >&2; exit 37", Output: &out, Errors: &errs})
	if status != 37 || err != nil || out.String() != "hello\n" || errs.String() != "no\n" {
		t.Fatalf("status %d, error %v, out %q, err %q", status, err, out.String(), errs.String())
	}
	sh, err := c.OpenShell(ssh.Size{Columns: 97, Rows: 33}, "xterm", "stty size; read x; exit 5", nil)
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the session is reported", func() bool { return lab.Ork.Report().GetShellSessions() == 1 })
	_, _ = io.WriteString(sh, "go\n")
	if text, err := io.ReadAll(sh); err != nil || !strings.Contains(string(text), "33 97") {
		t.Fatalf("%q, %v", text, err)
	}
	if status, err := sh.Wait(context.Background()); status != 5 || err != nil {
		t.Fatalf("status %d, error %v", status, err)
	}
	files, err := c.Files()
	if err != nil {
		t.Fatal(err)
	}
	_, err = files.Stat("/etc/passwd")
	files.Close()
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "no session is reported", func() bool { return lab.Ork.Report().GetShellSessions() == 0 })
	if _, err := c.DialTCP(context.Background(), "127.0.0.1:1"); fault.KindOf(err) != fault.Denied {
		t.Fatalf("forward without the right: %v", err)
	}
}

func TestMembersWithoutAGrantGetNoShell(t *testing.T) {
	t.Parallel()
	lab := agenttest.New(t)
	a := run(t, lab, seedOf(lab))
	ctx, cancel := context.WithTimeout(context.Background(), agenttest.Patience)
	defer cancel()
	conn, err := lab.Proxy().OpenStream(ctx, a.ID(), app.StreamName, lab.Ork.Card().GetAddresses()...)
	if err == nil {
		_, err = ssh.Dial(ctx, conn, lab.Ork.Card().GetSshHostKey(), "root")
	}
	if err == nil {
		t.Fatal("a proxy got a shell")
	}
}

func TestRevokedUsersOpenShellClosesAndOthersStay(t *testing.T) {
	t.Parallel()
	lab := agenttest.New(t)
	a := run(t, lab, seedOf(lab))
	shell := func(c *ssh.Client) *ssh.Shell {
		t.Helper()
		sh, err := c.OpenShell(ssh.Size{}, "xterm", "", nil)
		if err != nil {
			t.Fatal(err)
		}
		return sh
	}
	mine := open(t, lab, lab.Client(a.ID(), 1, "shell"), a)
	other := open(t, lab, lab.ClientOf("u-other", a.ID(), 1, "shell", "exec"), a)
	sh := shell(mine)
	shell(other)
	eventually(t, "both shells are reported", func() bool { return lab.Ork.Report().GetShellSessions() == 2 })
	lab.Ork.Order(&orkv1.AttendResponse{Revocations: &agentv1.Revocations{
		Grants: []*agentv1.GrantFloor{{UserId: agenttest.UserID, MinimumEpoch: 2}},
	}})
	ended, cancel := context.WithTimeout(context.Background(), agenttest.Patience)
	defer cancel()
	if _, err := sh.Wait(ended); err == nil || ended.Err() != nil {
		t.Fatalf("the revoked user's shell: %v", err)
	}
	eventually(t, "its process is gone", func() bool { return lab.Ork.Report().GetShellSessions() == 1 })
	if status, err := other.Exec(context.Background(), ssh.Command{Line: "exit 3"}); status != 3 || err != nil {
		t.Fatalf("another user: status %d, error %v", status, err)
	}
	again := open(t, lab, lab.Client(a.ID(), 2, "exec"), a)
	if status, err := again.Exec(context.Background(), ssh.Command{Line: "exit 4"}); status != 4 || err != nil {
		t.Fatalf("a newer grant: status %d, error %v", status, err)
	}
}

func TestStartScriptRunsAndItsExitCodeIsReported(t *testing.T) {
	t.Parallel()
	lab := agenttest.New(t)
	seed := seedOf(lab)
	seed.StartScript = "echo \"$JOB_GREETING from the script\"; exit 6"
	a := run(t, lab, seed)
	eventually(t, "the exit code is reported", func() bool { return lab.Ork.Report().GetExitCode() == 6 })
	if p := lab.Ork.Report().GetPhase(); p != agentv1.Phase_PHASE_READY {
		t.Fatalf("phase %v: a script's end is the user's own matter", p)
	}
	_ = a
}

func TestStopIsOrderlyAndTakesTheCardBack(t *testing.T) {
	t.Parallel()
	lab := agenttest.New(t)
	dir := t.TempDir()
	raw, err := protojson.Marshal(seedOf(lab))
	if err != nil {
		t.Fatal(err)
	}
	seedPath := filepath.Join(dir, "seed.json")
	if err := os.WriteFile(seedPath, raw, 0o600); err != nil {
		t.Fatal(err)
	}
	var printed syncBuffer
	cmd := exec.Command("/proc/self/exe", "--seed", seedPath, "--state", filepath.Join(dir, "state"))
	cmd.Env = append(os.Environ(), asAgent+"=1")
	cmd.Stderr = &printed
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	eventually(t, "the agent is ready", func() bool { return lab.Ork.Report().GetPhase() == agentv1.Phase_PHASE_READY })
	eventually(t, "its card is known", func() bool { return lab.Ork.Card() != nil })
	key := lab.Ork.Card().GetKey()
	eventually(t, "its card is at a bootstrap", func() bool { _, _, ok := lab.Cards[0].Get(key); return ok })
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-ended:
		if err != nil {
			t.Fatalf("%v\n%s", err, printed.String())
		}
	case <-time.After(agenttest.Patience):
		t.Fatalf("still running\n%s", printed.String())
	}
	eventually(t, "the card is taken back", func() bool { _, _, ok := lab.Cards[0].Get(key); return !ok })
	if strings.Contains(printed.String(), seedOf(lab).GetJoinToken()) {
		t.Fatal("the join token is in the log")
	}
}

type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}
