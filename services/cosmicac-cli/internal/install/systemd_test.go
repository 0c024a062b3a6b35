package install

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
)

const units = "../../../../deploy/systemd"

var execStart = regexp.MustCompile(`(?m)^ExecStart=(\S+)(.*)$`)

// unitFiles gives each unit's path and text.
func unitFiles(t *testing.T) map[string]string {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(units, "*.service"))
	if err != nil || len(paths) < 7 {
		t.Fatalf("found %d units, %v", len(paths), err)
	}
	all := map[string]string{}
	for _, p := range paths {
		raw, err := os.ReadFile(p)
		if err != nil {
			t.Fatal(err)
		}
		all[filepath.Base(p)] = string(raw)
	}
	return all
}

func TestUnitsAreWhatSystemdUnderstandsAndWellConfined(t *testing.T) {
	t.Parallel()
	if _, err := exec.LookPath("systemd-analyze"); err != nil {
		t.Skip("systemd-analyze is not on this machine")
	}
	dir := t.TempDir()
	for name, text := range unitFiles(t) {
		// The programs are not in /usr/local/bin here; everything else stays.
		text = execStart.ReplaceAllString(text, "ExecStart=/bin/true")
		name = strings.Replace(name, "@.", "@rack.", 1)
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if out, err := exec.Command("systemd-analyze", "verify", "--man=no", path).CombinedOutput(); err != nil || strings.Contains(string(out), name) {
			t.Errorf("%s: %v\n%s", name, err, out)
		}
		if out, err := exec.Command("systemd-analyze", "security", "--offline=true", "--threshold=20", path).CombinedOutput(); err != nil {
			t.Errorf("%s is exposed more than 2.0: %v\n%s", name, err, out)
		}
	}
}

// Each daemon's ExecStart is run as its unit runs it, on files that bootstrap
// wrote, and must tell systemd that it is ready.
func TestEveryUnitsProgramTellsSystemdThatItIsReady(t *testing.T) {
	t.Parallel()
	bin := os.Getenv("COSMICAC_BIN")
	if bin == "" {
		t.Skip("needs the built binaries; make test sets COSMICAC_BIN")
	}
	root := t.TempDir()
	kubeconfig := filepath.Join(root, "kubeconfig")
	// A cluster that does not answer: a worker starts and says so.
	if err := os.WriteFile(kubeconfig, []byte("apiVersion: v1\nkind: Config\nclusters: [{name: c, cluster: {server: 'https://127.0.0.1:1'}}]\nusers: [{name: u, user: {token: x}}]\ncontexts: [{name: c, context: {cluster: c, user: u}}]\ncurrent-context: c\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	h := Host{Root: root, Kubeconfig: kubeconfig, Rack: "us", Location: "us", Namespace: "cosmicac", Announce: "127.0.0.1", Site: "http://localhost:8080", NetworkName: "test", Now: time.Now()}
	if _, err := h.Install(); err != nil {
		t.Fatal(err)
	}
	files := unitFiles(t)
	for _, d := range h.Daemons() {
		text := files[strings.Replace(d.Unit("us"), "@us.", "@.", 1)]
		m := execStart.FindStringSubmatch(text)
		if m == nil {
			t.Fatalf("no unit starts %s", d.Name)
		}
		arguments := strings.Fields(strings.ReplaceAll(m[2], "%i", "us"))
		for j, a := range arguments {
			if strings.HasPrefix(a, "/etc/") {
				arguments[j] = relocate(t, root, a)
			}
		}
		t.Run(d.Name, func(t *testing.T) {
			t.Parallel()
			socket := filepath.Join(os.TempDir(), "cosmicac-notify-"+d.Name+"-"+filepath.Base(root))
			notify, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socket, Net: "unixgram"})
			if err != nil {
				t.Fatal(err)
			}
			defer os.Remove(socket)
			defer notify.Close()
			cmd := exec.Command(filepath.Join(bin, filepath.Base(m[1])), arguments...)
			cmd.Env = append(os.Environ(), "NOTIFY_SOCKET="+socket, "COSMICAC_MESH_LISTEN=/ip4/127.0.0.1/tcp/0", "COSMICAC_HTTP_LISTEN=127.0.0.1:0", "COSMICAC_KUBECONFIG="+kubeconfig)
			var out strings.Builder
			cmd.Stdout, cmd.Stderr = &out, &out
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			done := make(chan error, 1)
			go func() { done <- cmd.Wait() }()
			said := ""
			buf := make([]byte, 4096)
			for deadline := time.Now().Add(3 * time.Minute); !strings.Contains(said, "READY=1") && time.Now().Before(deadline); {
				_ = notify.SetReadDeadline(time.Now().Add(time.Second))
				if n, err := notify.Read(buf); err == nil {
					said += string(buf[:n]) + "\n"
				}
				select {
				case err := <-done:
					t.Fatalf("%s ended before it was ready: %v\n%s", d.Name, err, out.String())
				default:
				}
			}
			if !strings.Contains(said, "READY=1") {
				t.Errorf("%s never said READY=1, only %q\n%s", d.Name, said, out.String())
			}
			_ = cmd.Process.Signal(syscall.SIGTERM)
			if err := <-done; err != nil {
				t.Errorf("%s did not stop cleanly: %v\n%s", d.Name, err, out.String())
			}
		})
	}
}

// relocate rewrites a config's absolute paths below root and returns the
// rewritten file.
func relocate(t *testing.T, root, path string) string {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(root, path))
	if err != nil {
		t.Fatalf("bootstrap did not write %s: %v", path, err)
	}
	text := string(raw)
	for _, dir := range []string{"/var/lib/", "/var/log/", "/run/", "/etc/"} {
		text = strings.ReplaceAll(text, " "+dir, " "+root+dir)
	}
	to := filepath.Join(root, path) + ".here"
	if err := os.WriteFile(to, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return to
}

func TestBootstrapNamesEveryWrongFieldAndWritesNothing(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	_, err := Host{Root: root, Kubeconfig: "/no/such/file", Location: "US West", Rack: ""}.Install()
	if err == nil {
		t.Fatal("nonsense was accepted")
	}
	entries, _ := os.ReadDir(root)
	if len(entries) != 0 {
		t.Errorf("bootstrap wrote %v before it refused", entries)
	}
	for _, field := range []string{"location", "rack", "announce", "kubeconfig"} {
		if !strings.Contains(detailsText(err), field) {
			t.Errorf("the refusal does not name %s: %v", field, err)
		}
	}
}

func TestASecondBootstrapIsRefusedAndChangesNothing(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	kubeconfig := filepath.Join(root, "kubeconfig")
	if err := os.WriteFile(kubeconfig, []byte("clusters: []\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	h := Host{Root: root, Kubeconfig: kubeconfig, Rack: "us", Location: "us", Namespace: "cosmicac", Announce: "a.example", NetworkName: "test", Now: time.Now()}
	if _, err := h.Install(); err != nil {
		t.Fatal(err)
	}
	key := filepath.Join(root, "var/lib/cosmicac/wrk-ork/identity.key")
	before, err := os.ReadFile(key)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := h.Install(); err == nil || !strings.Contains(err.Error(), "already holds a network") {
		t.Errorf("the second bootstrap: %v", err)
	}
	if after, err := os.ReadFile(key); err != nil || string(after) != string(before) {
		t.Errorf("the second bootstrap changed a key: %v", err)
	}
}

// Each daemon is a user of its own: it must get to its state folder, and only to
// its own.
func TestEachDaemonReachesItsOwnStateAndNoOtherDoes(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	kubeconfig := filepath.Join(root, "kubeconfig")
	if err := os.WriteFile(kubeconfig, []byte("clusters: []\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	h := Host{Root: root, Kubeconfig: kubeconfig, Rack: "us", Location: "us", Namespace: "cosmicac", Announce: "a.example", NetworkName: "test", Now: time.Now()}
	if _, err := h.Install(); err != nil {
		t.Fatal(err)
	}
	for _, d := range h.Daemons() {
		state := h.Files(d).State
		for dir, want := state, os.FileMode(0o700); dir != "/"; dir, want = filepath.Dir(dir), 0o755 {
			info, err := os.Stat(filepath.Join(root, dir))
			if err != nil {
				t.Fatal(err)
			}
			if info.Mode().Perm() != want {
				t.Errorf("%s of %s has mode %o, not %o", dir, d.Name, info.Mode().Perm(), want)
			}
		}
	}
}

func detailsText(err error) string {
	var all []string
	for _, d := range fault.DetailsOf(err) {
		all = append(all, d.Field+": "+d.Rule)
	}
	return strings.Join(all, "\n")
}
