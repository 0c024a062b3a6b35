//go:build linux

package ssh_test

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cosmicac/cosmicac/pkg/ssh"
)

func TestSessionsRunAsTheLoginAndNotAsTheAgent(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("only root changes to another user")
	}
	home := filepath.Join(os.TempDir(), filepath.Base(t.TempDir())+"-guest")
	if err := os.Mkdir(home, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(home) })
	if err := os.Chown(home, 54321, 54321); err != nil {
		t.Fatal(err)
	}
	w := start(t, func(o *ssh.ServerOptions) {
		o.User = "guest"
		for file, text := range map[string]string{
			"passwd": "root:x:0:0::/root:/bin/sh\nguest:x:54321:54321::" + home + ":/bin/sh\n",
			"group":  "guest:x:54321:\nvideo:x:54322:other,guest\nwheel:x:54323:other\n",
		} {
			if err := os.WriteFile(filepath.Join(o.Etc, file), []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	})
	c := w.client(t, every...)
	status, out, errs, err := run(t, c, "id -u; id -g; id -G; pwd; echo $HOME $USER $LOGNAME $SHELL; cat /etc/shadow", nil)
	if want := "54321\n54321\n54321 54322\n" + home + "\n" + home + " guest guest /bin/sh\n"; out != want || status == 0 || err != nil {
		t.Fatalf("status %d, out %q, err %q, %v", status, out, errs, err)
	}
	// The login owns its terminal and can open it by name.
	sh, err := c.OpenShell(ssh.Size{Columns: 80, Rows: 24}, "xterm", "echo mine > $(tty); stat -c %u $SSH_TTY", nil)
	if err != nil {
		t.Fatal(err)
	}
	if text, err := io.ReadAll(sh); err != nil || !strings.Contains(string(text), "mine") || !strings.Contains(string(text), "54321") {
		t.Fatalf("%q, %v", text, err)
	}
	files, err := c.Files()
	if err != nil {
		t.Fatal(err)
	}
	defer files.Close()
	f, err := files.Create("made")
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	if info, err := files.Stat(filepath.Join(home, "made")); err != nil || info.Size() != 0 {
		t.Fatalf("%v, %v", info, err)
	}
	if _, err := files.Open("/etc/shadow"); err == nil {
		t.Fatal("sftp reads what only root may")
	}
}
