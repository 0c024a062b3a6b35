package demo

import (
	"bytes"
	"io"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/creack/pty"

	"github.com/cosmicac/cosmicac/services/cosmicac-cli/internal/client"
)

// terminal is a shell in a job, as a person sees it.
type terminal struct {
	keys  io.Writer
	ended chan struct{} // closed when the command line has ended

	mu   sync.Mutex
	seen bytes.Buffer
}

func (x *terminal) text() string {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.seen.String()
}

// openShell opens a shell with the command line and waits until it answers.
func (d *Demo) openShell(t *testing.T, env []string, job string) *terminal {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), filepath.Join(d.o.Bin, "cosmicac"), "jobs", "shell", job)
	cmd.Env = append(append(d.environment(), env...), "TERM=dumb")
	file, err := pty.Start(cmd)
	if err != nil {
		t.Fatal(err)
	}
	x := &terminal{keys: file, ended: make(chan struct{})}
	go func() {
		defer close(x.ended)
		defer file.Close()
		buf := make([]byte, 4096)
		for {
			n, err := file.Read(buf)
			x.mu.Lock()
			x.seen.Write(buf[:n])
			x.mu.Unlock()
			if err != nil {
				_ = cmd.Wait()
				return
			}
		}
	}()
	if _, err := io.WriteString(file, "echo answer-$((6*7))\n"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the shell answering", func() (bool, string) { return strings.Contains(x.text(), "answer-42"), x.text() })
	return x
}

// closes waits for the end of a shell and says how long it took.
func (x *terminal) closes(t *testing.T, why string) {
	t.Helper()
	began := time.Now()
	select {
	case <-x.ended:
		t.Logf("the shell closed %s after %s", time.Since(began).Round(10*time.Millisecond), why)
	case <-time.After(3 * time.Minute):
		t.Fatalf("the shell is still open after %s: %s", why, x.text())
	}
}

// revoked takes rights away under open shells.
func revoked(t *testing.T, d *Demo) {
	anonymous, err := client.New(d.URL(), "")
	if err != nil {
		t.Fatal(err)
	}
	var in struct{ Token string }
	if err := anonymous.Call(t.Context(), "POST", "/api/v1/login", nil, nil, map[string]string{"email": Email, "password": d.password}, &in); err != nil {
		t.Fatal(err)
	}
	admin, err := client.New(d.URL(), in.Token)
	if err != nil {
		t.Fatal(err)
	}
	const email, password = "ana@example.org", "a password for one test"
	var ana struct{ ID string }
	if err := admin.Call(t.Context(), "POST", "/api/v1/users", nil, nil, map[string]string{"email": email, "password": password}, &ana); err != nil {
		t.Fatal(err)
	}
	hers := []string{"COSMICAC_CONFIG_DIR=" + filepath.Join(t.TempDir(), "ana")}
	for _, c := range []struct {
		stdin string
		args  []string
	}{
		{password + "\n", []string{"login", d.URL(), "--email", email}},
		{"", []string{"jobs", "create", "--kind", "gpu-container", "--name", "hers", "--location", "us", "--gpu", "GH100_H100_SXM5_80GB", "--gpus", "1", "--image", "Ubuntu22.04/CUDA12.8.1", "--wait"}},
	} {
		if _, err := d.cli(t.Context(), c.stdin, false, hers, c.args...); err != nil {
			t.Fatal(err)
		}
	}
	hersOpen, mineOpen := d.openShell(t, hers, "hers"), d.openShell(t, nil, "hers") // an administrator sees every job
	if err := admin.Call(t.Context(), "PATCH", "/api/v1/users/"+ana.ID, nil, nil, map[string]bool{"disabled": true}, nil); err != nil {
		t.Fatal(err)
	}
	hersOpen.closes(t, "its user was disabled")
	if out, err := d.cli(t.Context(), "", false, hers, "jobs", "exec", "hers", "--", "true"); err == nil {
		t.Errorf("the disabled user ran a command: %s", out)
	}
	// The other's shell goes on, until the job is deleted under it.
	if _, err := io.WriteString(mineOpen.keys, "echo still-$((6*8))\n"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "another user's shell going on", func() (bool, string) { return strings.Contains(mineOpen.text(), "still-48"), mineOpen.text() })
	d.must(t, "jobs", "delete", "hers")
	mineOpen.closes(t, "its job was deleted")
	eventually(t, "the job being gone", func() (bool, string) {
		out, err := d.cli(t.Context(), "", false, nil, "jobs", "get", "hers")
		return err != nil, out
	})
}
