package vmtest

import (
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cosmicac/cosmicac/pkg/agent/agenttest"
	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	"github.com/cosmicac/cosmicac/pkg/ssh"
	agentv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/claim"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/graph"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/seed"
)

const (
	// host is the address of the mesh, which the machine reaches through qemu.
	host = "192.0.2.1"
	// patience is that of an emulated machine on a busy host.
	patience = 30 * time.Minute
	login    = "debian" // Debian's own default user of cloud-init
)

// eventually polls; a machine that ended will not come any more.
func (m *machine) eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	began := time.Now()
	for time.Since(began) < patience {
		if f() {
			t.Logf("after %s: %s", time.Since(began).Round(time.Second), what)
			return
		}
		select {
		case <-m.ended:
			t.Fatalf("did not come to pass: %s; the console ends with:\n%s", what, m.tail())
		case <-time.After(500 * time.Millisecond):
		}
	}
	t.Fatalf("did not come to pass: %s; the console ends with:\n%s", what, m.tail())
}

// shell opens an SSH connection as the command line does, or gives the reason.
func shell(client *mesh.Node, card *meshv1.Card) (*ssh.Client, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	id, err := identity.ParseID(card.GetKey())
	if err != nil {
		return nil, err
	}
	conn, err := client.OpenStream(ctx, id, "ssh", card.GetAddresses()...)
	if err != nil {
		return nil, err
	}
	return ssh.Dial(ctx, conn, card.GetSshHostKey(), card.GetDefaultUser())
}

// run runs a command in the machine and gives its output.
func run(c *ssh.Client, line string) (string, int, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	var out, errs bytes.Buffer
	status, err := c.Exec(ctx, ssh.Command{Line: line, Output: &out, Errors: &errs})
	return strings.TrimSpace(out.String()), status, err
}

func TestVMComesInGivesAShellAndComesBackAfterRebootAndRestart(t *testing.T) {
	folder, agentDisk, version := os.Getenv("COSMICAC_VM"), os.Getenv("COSMICAC_AGENT_DISK"), os.Getenv("COSMICAC_AGENT_VERSION")
	if folder == "" {
		t.Skip("a machine is booted by `make test-vm`, which prepares it")
	}
	lab := agenttest.NewAt(t, host)

	root := rootDisk(t, folder)
	reference := t.TempDir()
	if err := os.WriteFile(filepath.Join(reference, "words"), []byte("read by many"), 0o644); err != nil {
		t.Fatal(err)
	}
	// One new volume, and one that others read as well.
	volumes := map[string]string{"v-results": emptyDisk(t, ""), "v-reference": emptyDisk(t, reference)}

	// What ork sends and the worker renders, for each attempt on the job's disk.
	start := func(greeting string) (*machine, *agentv1.Seed) {
		t.Helper()
		s := lab.Seed()
		s.Simulated, s.MeshListen, s.GpuCount, s.GpuModel = false, "", 0, ""
		s.DefaultUser, s.StartScript = login, "echo $JOB_GREETING > proof\n"
		s.Environment = map[string]string{"JOB_GREETING": greeting}
		s.Volumes = []*agentv1.SeedVolume{{Name: "results"}, {Name: "reference", ReadOnly: true}}
		rec := &claim.Record{
			Version: 1, AttemptID: s.AttemptId, JobID: s.JobId, ReplicaID: s.ReplicaId, Image: "docker://registry.example/debian:12",
			DiskBytes: 2 << 30, Nodes: []claim.RecordNode{{Node: "gpu-1", CPUCores: 2, MemoryBytes: memory << 20}},
			Volumes: []claim.RecordVolume{{ID: "v-results", Name: "results"}, {ID: "v-reference", Name: "reference", ReadOnly: true}},
		}
		worker := graph.Settings{Rack: s.RackId, Network: "00ff", AgentImage: "registry.example/cosmicac/agents:" + version}
		s.Hostname = graph.VMIName(rec.AttemptID, 0)
		data, err := seed.Render(s, seed.AgentInstance, s.Hostname)
		if err != nil {
			t.Fatal(err)
		}
		return boot(t, folder, root, volumes, worker.VMI(rec, "anchor", 0), worker.Secret(rec, "anchor", 0, data), agentDisk), s
	}
	const greeting, secondGreeting = "hello from the start script", "hello again"
	m, s := start(greeting)

	m.eventually(t, "the agent is ready", func() bool {
		return lab.Ork.Report().GetPhase() == agentv1.Phase_PHASE_READY && lab.Ork.Card() != nil
	})
	card := lab.Ork.Card()
	if card.GetVersion() != version {
		t.Errorf("the agent says version %q, the control plane's is %q", card.GetVersion(), version)
	}
	id, err := identity.ParseID(card.GetKey())
	if err != nil {
		t.Fatal(err)
	}
	client := lab.Client(id, 1, "shell", "exec")
	var c *ssh.Client
	open := func() bool {
		var err error
		if c, err = shell(client, lab.Ork.Card()); err != nil {
			t.Logf("not yet: %v", err)
		}
		return err == nil
	}
	m.eventually(t, "a shell opens", open)
	for line, want := range map[string]string{
		"id -un":                             login,
		"hostname":                           s.Hostname,
		"cat /run/cosmicac/agent/version":    version,
		"systemctl is-active cosmicac-agent": "active",
		"findmnt -no FSTYPE,VFS-OPTIONS /run/cosmicac/agent | tr -s ' ' | cut -d, -f1":                         "ext4 ro",
		"sudo stat -c '%a %U' /etc/cosmicac/seed.json":                                                         "600 root",
		"cat /etc/cosmicac/seed.json 2>/dev/null || echo closed":                                               "closed",
		"findmnt -no FSTYPE /volumes/results && stat -c '%U' /volumes/results":                                 "ext4\n" + login,
		"findmnt -no VFS-OPTIONS /volumes/reference | cut -d, -f1; cat /volumes/reference/words":               "ro\nread by many",
		"touch /volumes/reference/x 2>/dev/null || sudo touch /volumes/reference/x 2>/dev/null || echo closed": "closed",
		"sudo dd if=/dev/zero of=/dev/disk/by-id/virtio-cosmicac-agent count=1 2>/dev/null || echo read-only":  "read-only",
	} {
		if got, status, err := run(c, line); got != want || err != nil {
			t.Errorf("%s: %q, status %d, error %v; want %q", line, got, status, err, want)
		}
	}
	m.eventually(t, "the start script has run", func() bool {
		got, _, _ := run(c, "cat proof")
		return got == greeting
	})
	terminal, err := c.OpenShell(ssh.Size{Columns: 97, Rows: 33}, "xterm", "stty size; read x; exit 5", nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(terminal, "go\n"); err != nil {
		t.Error(err)
	}
	text, _ := io.ReadAll(terminal)
	if status, err := terminal.Wait(context.Background()); status != 5 || err != nil || !strings.Contains(string(text), "33 97") {
		t.Errorf("terminal: %q, status %d, error %v", text, status, err)
	}
	const result = "/volumes/results/answer"
	if _, status, err := run(c, "echo 42 > "+result+" && sync"); status != 0 || err != nil {
		t.Errorf("write to the volume: status %d, error %v", status, err)
	}
	keeps := func(when string) {
		t.Helper()
		if got, _, err := run(c, "cat "+result+" /volumes/reference/words"); got != "42\nread by many" || err != nil {
			t.Errorf("the volumes %s: %q, %v", when, got, err)
		}
	}
	const bootID = "cat /proc/sys/kernel/random/boot_id"
	before, _, err := run(c, bootID)
	if err != nil {
		t.Fatal(err)
	}
	_, _, attended := lab.Ork.Seen()

	// The connection may go before the answer: that is the point.
	_, _, _ = run(c, "sudo systemctl reboot")
	_ = c.Close()
	m.eventually(t, "the agent has come back by itself", func() bool {
		_, _, now := lab.Ork.Seen()
		return now > attended && lab.Ork.Report().GetPhase() == agentv1.Phase_PHASE_READY
	})
	m.eventually(t, "a shell opens after the reboot", func() bool {
		if !open() {
			return false
		}
		after, _, err := run(c, bootID)
		if err != nil || after == before {
			t.Logf("not yet: boot %q, %v", after, err)
			_ = c.Close()
			return false
		}
		return true
	})
	if again := lab.Ork.Card(); again.GetKey() != card.GetKey() || again.GetSshHostKey() != card.GetSshHostKey() {
		t.Error("the machine came back with another key")
	}
	if redeemed, _, _ := lab.Ork.Seen(); redeemed != 1 {
		t.Errorf("the one-time token was redeemed %d times", redeemed)
	}
	if got, _, err := run(c, "cat proof"); got != greeting || err != nil {
		t.Errorf("the disk after the reboot: %q, %v", got, err)
	}

	keeps("after the reboot")

	// Stopped and started: a new attempt on the same disk.
	m.off.Store(true)
	_, _, _ = run(c, "sudo systemctl poweroff")
	_ = c.Close()
	select {
	case <-m.ended:
	case <-time.After(patience):
		t.Fatalf("the machine does not power off; the console ends with:\n%s", m.tail())
	}
	lab.Ork.Again("a-0000000000002")
	m, s = start(secondGreeting)
	m.eventually(t, "the second attempt's agent is ready", func() bool {
		return lab.Ork.Card().GetAttemptId() == s.AttemptId && lab.Ork.Report().GetPhase() == agentv1.Phase_PHASE_READY
	})
	m.eventually(t, "a shell opens in the second attempt", open)
	m.eventually(t, "its own start script has run", func() bool {
		got, _, _ := run(c, "cat proof")
		return got == secondGreeting
	})
	keeps("in the second attempt")
	if got, _, err := run(c, "hostname"); got != s.Hostname || err != nil {
		t.Errorf("host name of the second attempt: %q, %v", got, err)
	}
	if redeemed, _, _ := lab.Ork.Seen(); redeemed != 2 {
		t.Errorf("two tokens were redeemed %d times", redeemed)
	}
	_ = c.Close()
}
