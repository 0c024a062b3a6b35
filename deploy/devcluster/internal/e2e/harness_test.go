package e2e

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"sigs.k8s.io/yaml"
)

// patience bounds every wait. It is generous because the machine may be busy; nothing depends on its value.
const patience = 180 * time.Second

var binary string

func TestMain(m *testing.M) { os.Exit(testMain(m)) }

func testMain(m *testing.M) int {
	if binary = os.Getenv("COSMICAC_DEVCLUSTER_BIN"); binary != "" {
		return m.Run()
	}
	dir, err := os.MkdirTemp("", "cosmicac-devcluster-test-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	binary = filepath.Join(dir, "cosmicac-devcluster")
	if out, err := exec.Command(filepath.Join("..", "..", "build.sh"), binary).CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "build: %v\n%s", err, out)
		return 1
	}
	return m.Run()
}

// cluster is one running process on a state folder.
type cluster struct {
	t   *testing.T
	dir string
	cmd *exec.Cmd
	log *safeBuffer

	Kubeconfig  string            `json:"kubeconfig"`
	URL         string            `json:"url"`
	CAFile      string            `json:"ca_file"`
	PID         int               `json:"pid"`
	Kubeconfigs map[string]string `json:"kubeconfigs"`
}

// safeBuffer is read while the process still writes its log.
type safeBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *safeBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *safeBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// start runs `up` and waits for its line. The folder's machines are removed with the test, however it ends.
func start(t *testing.T, dir string, args ...string) *cluster {
	t.Helper()
	c := &cluster{t: t, dir: dir, log: &safeBuffer{}}
	c.cmd = exec.Command(binary, append([]string{"up", "--dir", dir}, args...)...)
	c.cmd.Stderr = c.log
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		c.stop()
		if t.Failed() {
			t.Logf("log of the cluster:\n%s", c.log)
		}
	})
	line := make(chan string, 1)
	go func() {
		s, _ := bufio.NewReader(out).ReadString('\n')
		line <- s
		io.Copy(io.Discard, out)
	}()
	select {
	case s := <-line:
		if err := json.Unmarshal([]byte(s), c); err != nil {
			c.cmd.Wait()
			t.Fatalf("ready line %q: %v\n%s", s, err, c.log)
		}
	case <-time.After(patience):
		t.Fatalf("not ready in %s\n%s", patience, c.log)
	}
	return c
}

// stop ends the process as an operator would, and returns how it ended.
func (c *cluster) stop() error {
	if c.cmd.ProcessState != nil {
		return nil
	}
	c.cmd.Process.Signal(syscall.SIGTERM)
	kill := time.AfterFunc(patience, func() { c.cmd.Process.Kill() })
	defer kill.Stop()
	return c.cmd.Wait()
}

// kill9 ends the process without a word to it.
func (c *cluster) kill9() {
	c.cmd.Process.Kill()
	c.cmd.Wait()
}

// client speaks with the cluster as the user of a kubeconfig.
type client struct {
	t     *testing.T
	url   string
	token string
	http  *http.Client
}

func (c *cluster) client(kubeconfig string) *client {
	c.t.Helper()
	raw, err := os.ReadFile(kubeconfig)
	if err != nil {
		c.t.Fatal(err)
	}
	if fi, _ := os.Stat(kubeconfig); fi.Mode().Perm() != 0o600 {
		c.t.Fatalf("%s has mode %s", kubeconfig, fi.Mode())
	}
	var k struct {
		Clusters []struct {
			Cluster struct {
				Server string `json:"server"`
				CA     string `json:"certificate-authority-data"`
			} `json:"cluster"`
		} `json:"clusters"`
		Users []struct {
			User struct {
				Token string `json:"token"`
			} `json:"user"`
		} `json:"users"`
	}
	if err := yaml.Unmarshal(raw, &k); err != nil {
		c.t.Fatal(err)
	}
	ca, err := base64.StdEncoding.DecodeString(k.Clusters[0].Cluster.CA)
	if err != nil {
		c.t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(ca)
	return &client{
		t: c.t, url: k.Clusters[0].Cluster.Server, token: k.Users[0].User.Token,
		http: &http.Client{Timeout: time.Minute, Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}}},
	}
}

func (c *cluster) admin() *client { return c.client(c.Kubeconfig) }

type object map[string]any

// at walks to a value by its path; absent is nil.
func (o object) at(path string) any {
	var v any = map[string]any(o)
	for _, p := range strings.Split(path, ".") {
		m, ok := v.(map[string]any)
		if !ok {
			return nil
		}
		v = m[p]
	}
	return v
}

func (o object) str(path string) string { s, _ := o.at(path).(string); return s }

// condition returns a condition by its type, or an empty one.
func (o object) condition(kind string) object {
	list, _ := o.at("status.conditions").([]any)
	for _, c := range list {
		if m := object(c.(map[string]any)); m.str("type") == kind {
			return m
		}
	}
	return object{}
}

// do sends one request and returns the HTTP status with the answer.
func (c *client) do(method, path string, body any) (int, object) {
	c.t.Helper()
	var raw []byte
	if s, ok := body.(string); ok {
		raw = []byte(s)
	} else if body != nil {
		raw, _ = json.Marshal(body)
	}
	req, err := http.NewRequest(method, c.url+path, bytes.NewReader(raw))
	if err != nil {
		c.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+c.token)
	req.Header.Set("Content-Type", "application/json")
	if method == http.MethodPatch {
		req.Header.Set("Content-Type", "application/merge-patch+json")
	}
	resp, err := c.http.Do(req)
	if err != nil {
		c.t.Fatalf("%s %s: %v", method, path, err)
	}
	defer resp.Body.Close()
	out := object{}
	json.NewDecoder(resp.Body).Decode(&out)
	return resp.StatusCode, out
}

// since replays what happened to a list from a version of it on: also what has gone.
func (c *client) since(version, path string) (all []object) {
	c.t.Helper()
	req, err := http.NewRequest(http.MethodGet, c.url+path+"?watch=1&timeoutSeconds=3&resourceVersion="+version, nil)
	if err != nil {
		c.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+c.token)
	resp, err := c.http.Do(req)
	if err != nil {
		c.t.Fatalf("watch %s: %v", path, err)
	}
	defer resp.Body.Close()
	for d := json.NewDecoder(resp.Body); ; {
		var e struct{ Object object }
		if err := d.Decode(&e); err != nil {
			return all // the watch is over
		}
		all = append(all, e.Object)
	}
}

func (c *client) get(path string) object {
	c.t.Helper()
	code, o := c.do(http.MethodGet, path, nil)
	if code != http.StatusOK {
		return object{}
	}
	return o
}

func (c *client) items(path string) []object {
	c.t.Helper()
	list, _ := c.get(path)["items"].([]any)
	var out []object
	for _, i := range list {
		out = append(out, object(i.(map[string]any)))
	}
	return out
}

// create posts YAML and demands that it is taken, with strict field validation.
func (c *client) create(path, manifest string) object {
	c.t.Helper()
	js, err := yaml.YAMLToJSON([]byte(manifest))
	if err != nil {
		c.t.Fatal(err)
	}
	code, o := c.do(http.MethodPost, path+"?fieldValidation=Strict", string(js))
	if code != http.StatusCreated {
		c.t.Fatalf("create on %s: %d %v", path, code, o["message"])
	}
	return o
}

func (c *client) delete(path string) {
	c.t.Helper()
	if code, o := c.do(http.MethodDelete, path, nil); code != http.StatusOK && code != http.StatusAccepted {
		c.t.Fatalf("delete %s: %d %v", path, code, o["message"])
	}
}

// eventually polls until done says nothing more; done says what is still missing.
func eventually(t *testing.T, done func() string) {
	t.Helper()
	missing := ""
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(100 * time.Millisecond) {
		if missing = done(); missing == "" {
			return
		}
	}
	t.Fatalf("after %s: %s", patience, missing)
}

const (
	ns   = "/api/v1/namespaces/default/"
	vmis = "/apis/kubevirt.io/v1/namespaces/default/virtualmachineinstances"
	dvs  = "/apis/cdi.kubevirt.io/v1beta1/namespaces/default/datavolumes"
)

func (c *client) untilPhase(path, phase string) object {
	c.t.Helper()
	var o object
	eventually(c.t, func() string {
		o = c.get(path)
		if o.str("status.phase") == phase {
			return ""
		}
		return fmt.Sprintf("%s is %q, want %s: %v", path, o.str("status.phase"), phase, o.at("status.conditions"))
	})
	return o
}

func (c *client) untilGone(path string) {
	c.t.Helper()
	eventually(c.t, func() string {
		code, o := c.do(http.MethodGet, path, nil)
		if code == http.StatusNotFound {
			return ""
		}
		return fmt.Sprintf("%s is still there: %v", path, o["metadata"])
	})
}

// gpuVMI is a small VMI with n GPUs; extra lines go under spec.
func gpuVMI(name string, gpus int, disks, volumes string) string {
	var g strings.Builder
	for i := range gpus {
		fmt.Fprintf(&g, "      - {name: g%d, deviceName: nvidia.com/GH100_H100_SXM5_80GB}\n", i)
	}
	return fmt.Sprintf(`
apiVersion: kubevirt.io/v1
kind: VirtualMachineInstance
metadata: {name: %s, labels: {cosmicac.dev/job: %s}}
spec:
  terminationGracePeriodSeconds: 20
  domain:
    cpu: {cores: 2}
    memory: {guest: 4Gi}
    devices:
      interfaces: [{name: default, masquerade: {}}]
      disks: [%s]
      gpus:
%s  networks: [{name: default, pod: {}}]
  volumes: [%s]
`, name, name, disks, g.String(), volumes)
}

func yamlObject(t *testing.T, manifest string) object {
	t.Helper()
	o := object{}
	if err := yaml.Unmarshal([]byte(manifest), &o); err != nil {
		t.Fatal(err)
	}
	return o
}
