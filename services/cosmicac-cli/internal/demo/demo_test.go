package demo

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"

	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/services/cosmicac-cli/internal/client"
)

// platform starts everything once; the parts of the test use it in turn.
func platform(t *testing.T) (*Demo, *bytes.Buffer) {
	t.Helper()
	if os.Getenv("COSMICAC_END_TO_END") == "" {
		t.Skip("needs the built binaries and the embedded cluster; make test-end-to-end (part of make test) runs it")
	}
	var out bytes.Buffer
	repository, err := filepath.Abs("../../../..")
	if err != nil {
		t.Fatal(err)
	}
	d, err := Start(t.Context(), Options{Bin: filepath.Join(repository, "build", "bin"), UI: filepath.Join(repository, "build", "ui"),
		Repository: repository, Directory: filepath.Join(t.TempDir(), "demo"), Out: &out})
	if err != nil {
		t.Fatalf("start the platform: %v\n%s", err, out.String())
	}
	t.Cleanup(d.Stop)
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(out.String())
			for _, x := range d.daemons {
				t.Logf("-- last lines of %s\n%s", x.Name, tail(d.files(x).Log, 3000))
			}
		}
	})
	return d, &out
}

func (d *Demo) must(t *testing.T, args ...string) string {
	t.Helper()
	out, err := d.cli(t.Context(), "", false, nil, args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func (d *Demo) job(t *testing.T, name string) client.Job {
	t.Helper()
	var j client.Job
	if err := json.Unmarshal([]byte(d.must(t, "jobs", "get", name, "-o", "json")), &j); err != nil {
		t.Fatal(err)
	}
	return j
}

// eventually polls generously: machines are shared and slow.
func eventually(t *testing.T, what string, ok func() (bool, string)) {
	t.Helper()
	var last string
	for deadline := time.Now().Add(3 * time.Minute); time.Now().Before(deadline); time.Sleep(200 * time.Millisecond) {
		var done bool
		if done, last = ok(); done {
			return
		}
	}
	t.Fatalf("%s never came true: %s", what, last)
}

func TestEndToEnd(t *testing.T) {
	d, out := platform(t)
	run := func(name string, f func(t *testing.T)) {
		t.Helper()
		if !t.Run(name, f) {
			t.FailNow()
		}
	}
	run("the main job: shell, completion, nothing left", func(t *testing.T) {
		if err := d.MainJob(t.Context()); err != nil {
			t.Fatal(err)
		}
	})
	run("the table names what runs, with its memory", func(t *testing.T) {
		d.PrintTable()
		for _, x := range d.daemons {
			if !strings.Contains(out.String(), x.Name) {
				t.Errorf("the table does not name %s", x.Name)
			}
		}
	})
	run("bad input names the field and the rule, and leaves nothing", func(t *testing.T) { badInput(t, d) })
	run("eight GPUs where nodes have four fail at once, recorded", func(t *testing.T) { neverFits(t, d) })
	run("any one daemon is killed: jobs and shells do not notice", func(t *testing.T) { killed(t, d) })
	run("a shell closes when its user is disabled, and when its job is deleted", func(t *testing.T) { revoked(t, d) })
	run("a key that is not in the roster is denied in words", func(t *testing.T) { stranger(t, d) })
	run("nothing listens beyond loopback and the ports of the table", func(t *testing.T) { listeners(t, d) })
	run("a second demo beside the first does not collide", func(t *testing.T) { second(t, d) })
	run("nothing is left at the end", func(t *testing.T) {
		if err := d.nothingLeft(t.Context()); err != nil {
			t.Fatal(err)
		}
	})
}

func badInput(t *testing.T, d *Demo) {
	good := map[string]string{"--kind": "gpu-container", "--name": "bad", "--location": "us", "--gpu": "GH100_H100_SXM5_80GB", "--gpus": "1", "--image": "Ubuntu22.04/CUDA12.8.1"}
	for _, c := range []struct{ flag, value, field string }{
		{"--gpus", "0", "gpu.count"}, {"--gpus", "-1", "gpu"}, {"--gpus", "99999999", "gpu.count"},
		{"--name", "", "name"}, {"--name", strings.Repeat("x", 200), "name"}, {"--name", "two\nlines", "name"},
		{"--image", "NoSuchImage", "image"}, {"--location", "", "location"}, {"--kind", "toaster", "kind"}, {"--disk", "-5", "disk_gib"},
	} {
		args := []string{"jobs", "create"}
		for k, v := range good {
			if k == c.flag {
				v = c.value
			}
			args = append(args, k, v)
		}
		if _, ok := good[c.flag]; !ok {
			args = append(args, c.flag, c.value)
		}
		out, err := d.cli(t.Context(), "", false, nil, args...)
		if err == nil || !strings.Contains(out, c.field) {
			t.Errorf("%s %.20q: want an error that names %s, got %v %s", c.flag, c.value, c.field, err, out)
		}
	}
	// Well-formed but not to be had: recorded, and failed with the reason.
	for _, c := range []struct{ flag, value, reason string }{{"--gpu", "GX999_UNKNOWN", "unknown_model"}, {"--location", "mars", "unknown_location"}} {
		args := []string{"jobs", "create", "--wait"}
		for k, v := range good {
			if k == c.flag {
				v = c.value
			}
			args = append(args, k, v)
		}
		out, err := d.cli(t.Context(), "", false, nil, args...)
		if err == nil || !strings.Contains(out, c.reason) {
			t.Errorf("%s %s: want failed (%s), got %v %s", c.flag, c.value, c.reason, err, out)
		}
	}
	// Unicode is kept byte for byte or refused, never accepted and then stuck.
	d.must(t, "jobs", "create", "--kind", "gpu-container", "--name", "campaña 模型", "--location", "us", "--gpu", "GH100_H100_SXM5_80GB", "--gpus", "1", "--image", "Ubuntu22.04/CUDA12.8.1", "--wait")
	if got := d.job(t, "campaña 模型").Name; got != "campaña 模型" {
		t.Errorf("the name came back as %q", got)
	}
	var list struct {
		Jobs []client.Job `json:"jobs"`
	}
	if err := json.Unmarshal([]byte(d.must(t, "jobs", "list", "-o", "json")), &list); err != nil {
		t.Fatal(err)
	}
	for _, j := range list.Jobs {
		d.must(t, "jobs", "delete", j.ID, "--wait")
	}
}

func neverFits(t *testing.T, d *Demo) {
	_, err := d.cli(t.Context(), "", false, nil, "jobs", "create", "--kind", "gpu-container", "--name", "too-big", "--location", "in",
		"--gpu", "GA100_A100_PCIE_80GB", "--gpus", "8", "--image", "Ubuntu22.04/CUDA12.8.1", "--wait")
	if err == nil {
		t.Fatal("eight GPUs on nodes of four were accepted")
	}
	if j := d.job(t, "too-big"); j.State != "failed" || j.Reason != "never_fits" {
		t.Errorf("the job is %s (%s), want failed (never_fits)", j.State, j.Reason)
	}
	d.must(t, "jobs", "delete", "too-big", "--wait")
}

// killed kills every daemon in turn with SIGKILL while a job runs and a shell
// is open.
func killed(t *testing.T, d *Demo) {
	d.must(t, "jobs", "create", "--kind", "gpu-container", "--name", "steady", "--location", "us", "--gpu", "GH100_H100_SXM5_80GB", "--gpus", "8", "--image", "Ubuntu22.04/CUDA12.8.1", "--wait")
	before := d.job(t, "steady")
	uid := before.ReplicaList[0].Attempts[0].Nodes[0].VMIUID
	if uid == "" {
		t.Fatal("the job's VM has no uid")
	}
	cmd := exec.CommandContext(t.Context(), filepath.Join(d.o.Bin, "cosmicac"), "jobs", "shell", "steady")
	cmd.Env = append(d.environment(), "TERM=dumb")
	terminal, err := pty.Start(cmd)
	if err != nil {
		t.Fatal(err)
	}
	defer terminal.Close()
	lines := make(chan string, 1000)
	go func() {
		defer close(lines)
		buf := make([]byte, 4096)
		for {
			n, err := terminal.Read(buf)
			if n > 0 {
				lines <- string(buf[:n])
			}
			if err != nil {
				return
			}
		}
	}()
	said := ""
	echo := func(round int) {
		t.Helper()
		want := fmt.Sprintf("round-%d-%d", round, round*7)
		if _, err := io.WriteString(terminal, fmt.Sprintf("echo round-%d-$((%d*7))\n", round, round)); err != nil {
			t.Fatalf("the open shell is gone: %v", err)
		}
		eventually(t, "the open shell answering", func() (bool, string) {
			for {
				select {
				case s, ok := <-lines:
					if !ok {
						t.Fatalf("the open shell ended: %s", said)
					}
					said += s
				default:
					return strings.Contains(said, want), said
				}
			}
		})
	}
	echo(1)
	for i, m := range append([]*member(nil), d.group.parts...) {
		p := m.process
		old := p.PID()
		if err := syscall.Kill(old, syscall.SIGKILL); err != nil {
			t.Fatalf("kill %s: %v", p.name, err)
		}
		echo(10 + i)
		eventually(t, p.name+" coming back", func() (bool, string) {
			for _, x := range d.daemons {
				if x.Name == p.name {
					s := d.status(x)
					return s.Ready && s.PID != old, fmt.Sprintf("%+v", s)
				}
			}
			return p.PID() != 0 && p.PID() != old, "no new process"
		})
		eventually(t, "the job being seen as running after "+p.name+" was killed", func() (bool, string) {
			raw, err := d.cli(t.Context(), "", false, nil, "jobs", "get", "steady", "-o", "json")
			var j client.Job
			if err != nil || json.Unmarshal([]byte(raw), &j) != nil {
				return false, raw
			}
			if n := len(j.ReplicaList[0].Attempts); n != 1 {
				t.Fatalf("killing %s made attempt %d", p.name, n)
			}
			return j.State == "running" && len(j.Conditions) == 0 && j.ReplicaList[0].Attempts[0].Nodes[0].VMIUID == uid, fmt.Sprintf("%s %v", j.State, j.Conditions)
		})
	}
	// And the whole way still works for new work.
	eventually(t, "a command in the job", func() (bool, string) {
		out, err := d.cli(t.Context(), "", false, nil, "jobs", "exec", "steady", "--", "echo", "still", "here")
		return err == nil && strings.Contains(out, "still here"), out
	})
	if _, err := io.WriteString(terminal, "exit\n"); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("the open shell ended with %v", err)
	}
	d.must(t, "jobs", "delete", "steady", "--wait")
}

// stranger starts a real daemon whose key nobody admitted.
func stranger(t *testing.T, d *Demo) {
	var ork string
	for _, x := range d.daemons {
		if x.Name == "wrk-ork" {
			ork = d.files(x).State
		}
	}
	dir := t.TempDir()
	if out, err := exec.Command("cp", "-r", filepath.Join(ork, "network"), filepath.Join(dir, "network")).CombinedOutput(); err != nil {
		t.Fatal(err, string(out))
	}
	port := freePort(t)
	config := fmt.Sprintf("name: intruder\nstate_directory: %s\nstatus_file: %s\nlog: {file: %s}\nmesh: {listen: [/ip4/127.0.0.1/tcp/%d]}\n",
		dir, filepath.Join(dir, "status.json"), filepath.Join(dir, "log"), port)
	if err := os.WriteFile(filepath.Join(dir, "config.yaml"), []byte(config), 0o644); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), filepath.Join(d.o.Bin, "cosmicac-wrk-ork"), "--config", filepath.Join(dir, "config.yaml"))
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &said, &said
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { _ = cmd.Wait(); close(ended) }()
	defer func() { _ = cmd.Process.Kill(); <-ended }()
	eventually(t, "the stranger reading that it is denied", func() (bool, string) {
		raw, _ := os.ReadFile(filepath.Join(dir, "log"))
		select {
		case <-ended:
			raw = append(raw, said.Bytes()...)
		default:
		}
		return strings.Contains(string(raw), "denied") || strings.Contains(string(raw), "not in the roster"), string(raw)
	})
	key, err := identity.Load(filepath.Join(dir, "identity.key"))
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "another daemon's log naming the refused key", func() (bool, string) {
		for _, x := range d.daemons {
			raw, _ := os.ReadFile(d.files(x).Log)
			for _, line := range strings.Split(string(raw), "\n") {
				if strings.Contains(line, "refused peer") && strings.Contains(line, key.ID().String()) {
					return true, ""
				}
			}
		}
		return false, "no log names it"
	})
}

func freePort(t *testing.T) int {
	t.Helper()
	ports, release, err := freePorts(1)
	if err != nil {
		t.Fatal(err)
	}
	release()
	return ports[0]
}

// listeners reads the kernel's tables: every listening socket of our processes
// is on loopback.
func listeners(t *testing.T, d *Demo) {
	inodes := map[string]string{}
	for _, m := range d.group.parts {
		fds, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", m.process.PID()))
		for _, fd := range fds {
			if to, err := os.Readlink(fd); err == nil && strings.HasPrefix(to, "socket:[") {
				inodes[strings.TrimSuffix(strings.TrimPrefix(to, "socket:["), "]")] = m.process.name
			}
		}
	}
	if len(inodes) == 0 {
		t.Fatal("no sockets found: the check would prove nothing")
	}
	seen := 0
	for _, table := range []string{"tcp", "tcp6", "udp", "udp6"} {
		raw, err := os.ReadFile("/proc/net/" + table)
		if err != nil {
			continue
		}
		for _, line := range strings.Split(string(raw), "\n")[1:] {
			f := strings.Fields(line)
			if len(f) < 10 || inodes[f[9]] == "" {
				continue
			}
			// TCP state 0A listens; an unconnected UDP socket has no remote port.
			if strings.HasPrefix(table, "tcp") && f[3] != "0A" || strings.HasPrefix(table, "udp") && !strings.HasSuffix(f[2], ":0000") {
				continue
			}
			ip, port := parseAddress(t, f[1])
			seen++
			if !ip.IsLoopback() {
				t.Errorf("%s listens on %s:%d (%s)", inodes[f[9]], ip, port, table)
			}
		}
	}
	if seen == 0 {
		t.Fatal("no listening socket found: the check proves nothing")
	}
}

func parseAddress(t *testing.T, s string) (net.IP, int) {
	t.Helper()
	host, port, _ := strings.Cut(s, ":")
	raw := make([]byte, len(host)/2)
	for i := range raw {
		b, err := strconv.ParseUint(host[2*i:2*i+2], 16, 8)
		if err != nil {
			t.Fatal(err)
		}
		// Each 32-bit word is in the machine's order.
		raw[i/4*4+3-i%4] = byte(b)
	}
	p, err := strconv.ParseUint(port, 16, 16)
	if err != nil {
		t.Fatal(err)
	}
	return net.IP(raw), int(p)
}

func second(t *testing.T, d *Demo) {
	var out bytes.Buffer
	o := d.o
	o.Directory, o.Out = filepath.Join(t.TempDir(), "second"), &out
	other, err := Start(t.Context(), o)
	if err != nil {
		t.Fatalf("the second demo: %v\n%s", err, out.String())
	}
	defer other.Stop()
	if other.port == d.port {
		t.Error("both demos have the same port")
	}
	if racks, err := other.racks(t.Context()); err != nil || len(racks) != 2 {
		t.Errorf("the second demo's racks: %v %v", racks, err)
	}
	if _, err := Start(context.Background(), o); err == nil || !strings.Contains(err.Error(), "another demo runs") {
		t.Errorf("a third demo in the second's folder: want a refusal that says so, got %v", err)
	}
}
