package agentdisk_test

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/base64"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/cosmicac/cosmicac/deploy/images/internal/agentdisk"
)

// agentSource is an agent as far as this package looks at one.
const agentSource = `package main

import (
	"os"
	"path/filepath"
)

var version string

func main() { os.Stdout.WriteString(filepath.Base(os.Args[0]) + " " + version + "\n") }
`

// program builds a program of a version once a test run.
var program = func() func(t *testing.T, version string, cgo bool) string {
	var mu sync.Mutex
	built := map[string]string{}
	return func(t *testing.T, version string, dynamic bool) string {
		t.Helper()
		mu.Lock()
		defer mu.Unlock()
		key := fmt.Sprint(version, dynamic)
		if built[key] != "" {
			return built[key]
		}
		dir, err := os.MkdirTemp(scratch, "")
		if err != nil {
			t.Fatal(err)
		}
		source := filepath.Join(dir, "main.go")
		text := agentSource
		if dynamic {
			text = strings.Replace(text, "import (", "import \"C\"\nimport (", 1)
		}
		if err := os.WriteFile(source, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command("go", "build", "-ldflags", "-s -w -X main.version="+version, "-o", filepath.Join(dir, "agent"), source)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOWORK=off", "GOFLAGS=")
		if dynamic {
			cmd.Env = append(cmd.Env, "CGO_ENABLED=1")
		}
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("build an agent: %v\n%s", err, out)
		}
		built[key] = filepath.Join(dir, "agent")
		return built[key]
	}
}()

var scratch string

func TestMain(m *testing.M) {
	var err error
	if scratch, err = os.MkdirTemp("", "agentdisk-"); err != nil {
		panic(err)
	}
	code := m.Run()
	os.RemoveAll(scratch)
	os.Exit(code)
}

// agents is a folder with both agents.
func agents(t *testing.T, version string) string {
	t.Helper()
	dir := t.TempDir()
	for _, n := range agentdisk.Agents {
		put(t, program(t, version, false), filepath.Join(dir, n))
	}
	return dir
}

func put(t *testing.T, from, to string) {
	t.Helper()
	raw, err := os.ReadFile(from)
	if err == nil {
		// A program that a parallel test starts meanwhile would hold the file open for
		// a moment, and a file that is open to be written cannot be run.
		syscall.ForkLock.RLock()
		err = os.WriteFile(to, raw, 0o755)
		syscall.ForkLock.RUnlock()
	}
	if err != nil {
		t.Fatal(err)
	}
}

func build(t *testing.T, dir string) (string, agentdisk.Image) {
	t.Helper()
	layout := filepath.Join(t.TempDir(), agentdisk.Name)
	built, err := agentdisk.Build(t.Context(), dir, layout)
	if err != nil {
		t.Fatal(err)
	}
	return layout, built
}

// serve runs a registry and gives its host and port.
func serve(t *testing.T, wrap func(http.Handler) http.Handler) string {
	t.Helper()
	h := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	if wrap != nil {
		h = wrap(h)
	}
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	return strings.TrimPrefix(s.URL, "http://")
}

func TestTheSameAgentsGiveTheSameImage(t *testing.T) {
	t.Parallel()
	dir := agents(t, "v1.2.3")
	layout, first := build(t, dir)
	old := time.Unix(1, 0)
	for _, n := range agentdisk.Agents {
		if err := os.Chtimes(filepath.Join(dir, n), old, old); err != nil {
			t.Fatal(err)
		}
	}
	_, second := build(t, dir)
	if first != second || first.Version != "v1.2.3" || !strings.HasPrefix(first.Digest, "sha256:") || first.DiskBytes == 0 {
		t.Fatalf("first %+v, second %+v", first, second)
	}
	// Building over a layout replaces it.
	newer, err := agentdisk.Build(t.Context(), agents(t, "v1.2.4"), layout)
	if err != nil || newer.Digest == first.Digest {
		t.Fatalf("%+v, %v", newer, err)
	}
	left, err := os.ReadDir(filepath.Dir(layout))
	if err != nil || len(left) != 1 {
		t.Fatalf("left behind: %v, %v", left, err)
	}
}

func TestTheDiskHoldsTheAgentsAndTheirVersion(t *testing.T) {
	t.Parallel()
	for _, tool := range []string{"e2fsck", "debugfs"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("%s of e2fsprogs is not here", tool)
		}
	}
	dir := agents(t, "v1")
	layout, built := build(t, dir)
	disk := filepath.Join(t.TempDir(), "agents.img")
	if err := agentdisk.Unpack(layout, disk); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(disk); err != nil || info.Size() != built.DiskBytes {
		t.Fatalf("%v, %v; want %d bytes", info, err, built.DiskBytes)
	}
	// The bitmap's padding is for nobody: the kernel never reads it.
	out, err := exec.Command("e2fsck", "-f", "-n", disk).CombinedOutput()
	if questions, padding := strings.Count(string(out), "? no"), strings.Count(string(out), "Padding at end of inode bitmap is not set."); questions != padding {
		t.Fatalf("the file system has faults: %v\n%s", err, out)
	}
	cat := func(file string) []byte {
		out, err := exec.Command("debugfs", "-R", "cat /"+file, disk).Output()
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	if got := string(cat(agentdisk.VersionFile)); got != "v1\n" {
		t.Errorf("version file: %q", got)
	}
	for _, n := range agentdisk.Agents {
		want, err := os.ReadFile(filepath.Join(dir, n))
		if err != nil || !bytes.Equal(cat(n), want) {
			t.Errorf("%s on the disk is another (%v)", n, err)
		}
		stat, err := exec.Command("debugfs", "-R", "stat /"+n, disk).Output()
		if err != nil || !strings.Contains(string(stat), "Mode:  0555") {
			t.Errorf("%s: %v\n%s", n, err, stat)
		}
	}
}

func TestARegistryGivesTheImageBackAsKubeVirtWantsIt(t *testing.T) {
	t.Parallel()
	layout, built := build(t, agents(t, "v1"))
	host := serve(t, nil)
	where, pushed, err := agentdisk.Push(t.Context(), layout, host+"/cosmicac", false)
	if err != nil || where != host+"/cosmicac/agents:v1" || pushed != built {
		t.Fatalf("%q, %+v, %v", where, pushed, err)
	}
	if _, _, err := agentdisk.Push(t.Context(), layout, host+"/cosmicac", false); err != nil {
		t.Fatalf("the same again: %v", err)
	}
	for _, ref := range []string{where, host + "/cosmicac/agents@" + built.Digest} {
		if found, err := agentdisk.CheckRemote(t.Context(), ref); err != nil || found != built {
			t.Fatalf("%s: %+v, %v", ref, found, err)
		}
	}
	ref, err := name.ParseReference(where)
	if err != nil {
		t.Fatal(err)
	}
	img, err := remote.Image(ref)
	if err != nil {
		t.Fatal(err)
	}
	var files []string
	flat := mutate.Extract(img)
	defer flat.Close()
	for r := tar.NewReader(flat); ; {
		h, err := r.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, fmt.Sprintf("%s %d:%d %o", h.Name, h.Uid, h.Gid, h.Mode))
	}
	if got := strings.Join(files, ", "); got != "disk/ 107:107 555, disk/agents.img 107:107 440" && got != "disk 107:107 555, disk/agents.img 107:107 440" {
		t.Errorf("files: %s", got)
	}
	media, err := img.MediaType()
	if err != nil || media != types.OCIManifestSchema1 {
		t.Errorf("%s, %v", media, err)
	}
}

func TestATagThatNamesAnotherImageIsLeftAlone(t *testing.T) {
	t.Parallel()
	host := serve(t, nil)
	ref, err := name.ParseReference(host + "/agents:v1")
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(ref, empty.Image); err != nil {
		t.Fatal(err)
	}
	layout, built := build(t, agents(t, "v1"))
	if _, _, err := agentdisk.Push(t.Context(), layout, host, false); err == nil || !strings.Contains(err.Error(), "already another image") {
		t.Fatalf("error %v", err)
	}
	if _, _, err := agentdisk.Push(t.Context(), layout, host, true); err != nil {
		t.Fatal(err)
	}
	if found, err := agentdisk.CheckRemote(t.Context(), ref.String()); err != nil || found != built {
		t.Fatalf("%+v, %v", found, err)
	}
}

// It sets the environment, so it runs alone.
func TestCredentialsAreThoseOfTheDockerConfiguration(t *testing.T) {
	basic := "Basic " + base64.StdEncoding.EncodeToString([]byte("pusher:s3cret"))
	host := serve(t, func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("Authorization") != basic {
				w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
				w.WriteHeader(http.StatusUnauthorized)
				return
			}
			next.ServeHTTP(w, r)
		})
	})
	layout, _ := build(t, agents(t, "v1"))
	dir := t.TempDir()
	t.Setenv("DOCKER_CONFIG", dir)
	if _, _, err := agentdisk.Push(t.Context(), layout, host, false); err == nil || !strings.Contains(err.Error(), host) {
		t.Fatalf("without credentials: %v", err)
	}
	config := fmt.Sprintf(`{"auths": {%q: {"auth": %q}}}`, host, strings.TrimPrefix(basic, "Basic "))
	if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := agentdisk.Push(t.Context(), layout, host, false); err != nil {
		t.Fatal(err)
	}
	// An error names the registry and no secret.
	config = strings.Replace(config, strings.TrimPrefix(basic, "Basic "), base64.StdEncoding.EncodeToString([]byte("pusher:wr0ng")), 1)
	if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	_, _, err := agentdisk.Push(t.Context(), layout, host, false)
	if err == nil || !strings.Contains(err.Error(), host) || strings.Contains(err.Error(), "wr0ng") {
		t.Fatalf("with wrong credentials: %v", err)
	}
}

func TestUnfitAgentsAreRefusedInWords(t *testing.T) {
	t.Parallel()
	for want, spoil := range map[string]func(t *testing.T, dir string){
		"read the agent": func(t *testing.T, dir string) { os.Remove(filepath.Join(dir, agentdisk.Agents[1])) },
		"build them together": func(t *testing.T, dir string) {
			put(t, program(t, "v2", false), filepath.Join(dir, agentdisk.Agents[1]))
		},
		"good as an image tag": func(t *testing.T, dir string) {
			put(t, program(t, "v1+x", false), filepath.Join(dir, agentdisk.Agents[0]))
		},
		"CGO_ENABLED=0": func(t *testing.T, dir string) {
			put(t, program(t, "v1", true), filepath.Join(dir, agentdisk.Agents[0]))
		},
	} {
		t.Run(want, func(t *testing.T) {
			t.Parallel()
			if strings.HasPrefix(want, "CGO") {
				if _, err := exec.LookPath("gcc"); err != nil {
					t.Skip("gcc is not here, so nothing can be linked dynamically")
				}
			}
			dir := agents(t, "v1")
			spoil(t, dir)
			layout := filepath.Join(t.TempDir(), agentdisk.Name)
			if _, err := agentdisk.Build(context.Background(), dir, layout); err == nil || !strings.Contains(err.Error(), want) {
				t.Fatalf("error %v, want %q", err, want)
			}
			if left, err := os.ReadDir(filepath.Dir(layout)); err != nil || len(left) != 0 {
				t.Fatalf("left behind: %v, %v", left, err)
			}
		})
	}
}

// image is one with these files and our labels.
func image(t *testing.T, files ...*tar.Header) v1.Image {
	t.Helper()
	var raw bytes.Buffer
	w := tar.NewWriter(&raw)
	for _, h := range files {
		h.Typeflag = tar.TypeReg
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		body := make([]byte, h.Size)
		if h.Size > 1100 && h.Name != "disk/blank.img" {
			body[1024+0x38], body[1024+0x39] = 0x53, 0xEF
		}
		if _, err := w.Write(body); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(raw.Bytes())), nil })
	if err != nil {
		t.Fatal(err)
	}
	img, err := mutate.ConfigFile(empty.Image, &v1.ConfigFile{OS: "linux", Architecture: "amd64", RootFS: v1.RootFS{Type: "layers"},
		Config: v1.Config{Labels: map[string]string{"org.opencontainers.image.version": "v1"}}})
	if err == nil {
		img, err = mutate.AppendLayers(img, layer)
	}
	if err != nil {
		t.Fatal(err)
	}
	return img
}

func TestImagesThatKubeVirtCouldNotUseAreRefusedInWords(t *testing.T) {
	t.Parallel()
	disk := func(name string, uid int, mode, size int64) *tar.Header {
		return &tar.Header{Name: name, Uid: uid, Gid: uid, Mode: mode, Size: size}
	}
	host := serve(t, nil)
	// Checked as a registry gives it.
	check := func(img v1.Image) (agentdisk.Image, error) {
		t.Helper()
		ref, err := name.ParseReference(host + "/agents:v1")
		if err == nil {
			err = remote.Write(ref, img)
		}
		if err != nil {
			t.Fatal(err)
		}
		return agentdisk.CheckRemote(t.Context(), ref.String())
	}
	if found, err := check(image(t, disk("disk/a.img", 107, 0o440, 4096), disk("etc/passwd", 0, 0o644, 10))); err != nil || found.DiskBytes != 4096 {
		t.Fatalf("a good one: %+v, %v", found, err)
	}
	for want, img := range map[string]v1.Image{
		"not one of ours":               empty.Image,
		"no disk in /disk":              image(t, disk("agents.img", 107, 0o440, 4096)),
		"second disk":                   image(t, disk("disk/a.img", 107, 0o440, 4096), disk("disk/b.img", 107, 0o440, 4096)),
		"belongs to 0:0":                image(t, disk("disk/a.img", 0, 0o440, 4096)),
		"mode 0040":                     image(t, disk("disk/a.img", 107, 0o040, 4096)),
		"no whole sectors":              image(t, disk("disk/a.img", 107, 0o440, 4097)),
		"is shorter than a file system": image(t, disk("disk/a.img", 107, 0o440, 512)),
		"no raw ext4 file system":       image(t, disk("disk/blank.img", 107, 0o440, 4096)),
	} {
		if _, err := check(img); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
	if _, err := agentdisk.CheckRemote(t.Context(), "UPPER/case"); err == nil {
		t.Error("a reference that is none was taken")
	}
	ref, err := name.ParseReference(host + "/agents:v2")
	if err == nil {
		err = remote.Write(ref, image(t, disk("disk/a.img", 107, 0o440, 4096)))
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, err := agentdisk.CheckRemote(t.Context(), ref.String()); err == nil || !strings.Contains(err.Error(), "holds version v1") {
		t.Errorf("a tag of another version: %v", err)
	}
}
