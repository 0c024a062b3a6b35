package soak

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/goccy/go-yaml"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/services/cosmicac-cli/internal/client"
	"github.com/cosmicac/cosmicac/services/cosmicac-cli/internal/demo"
)

// patience bounds every wait for a state that must come. Nothing depends on
// its value.
const patience = 4 * time.Minute

// platform is the whole of it, started for one test.
type platform struct {
	*demo.Demo
	t    *testing.T
	bin  string
	api  *client.Client
	kube *kube

	mu      sync.Mutex
	began   time.Time
	history []string
	frozen  map[int]string
}

// start brings everything up; the workers' way to the cluster leads through
// the proxy that makes API faults.
func start(t *testing.T) *platform {
	t.Helper()
	if os.Getenv("COSMICAC_END_TO_END") == "" {
		t.Skip("needs the built binaries and the embedded cluster; make test-end-to-end and make soak run it")
	}
	repository, err := filepath.Abs("../../../..")
	if err != nil {
		t.Fatal(err)
	}
	bin := os.Getenv("COSMICAC_BIN")
	if bin == "" {
		bin = filepath.Join(repository, "build", "bin")
	}
	ui := os.Getenv("COSMICAC_UI")
	if ui == "" {
		ui = filepath.Join(repository, "build", "ui")
	}
	var out bytes.Buffer
	d, err := demo.Start(t.Context(), demo.Options{
		Bin: bin, UI: ui, Repository: repository, Directory: filepath.Join(t.TempDir(), "platform"), Out: &out,
		ClusterFlags: []string{"--api-proxy", "--import-time", "500ms", "--boot-time", "300ms"},
	})
	if err != nil {
		t.Fatalf("start the platform: %v\n%s", err, out.String())
	}
	p := &platform{Demo: d, t: t, bin: bin, began: time.Now(), frozen: map[int]string{}}
	t.Cleanup(d.Stop)
	t.Cleanup(func() {
		p.thaw()
		if t.Failed() {
			t.Logf("history:\n%s", strings.Join(p.history, "\n"))
			for name, words := range d.LastWords() {
				t.Logf("-- last lines of %s\n%s", name, words)
			}
		}
	})
	anonymous, err := client.New(d.URL(), "")
	if err != nil {
		t.Fatal(err)
	}
	var in struct{ Token string }
	p.insist("log in", func(ctx context.Context) error {
		return anonymous.Call(ctx, "POST", "/api/v1/login", nil, nil, map[string]string{"email": demo.Email, "password": d.Password()}, &in)
	})
	if p.api, err = client.New(d.URL(), in.Token); err != nil {
		t.Fatal(err)
	}
	p.kube = newKube(t, d.Kubeconfig())
	return p
}

// note keeps a line of history, printed when the test fails.
func (p *platform) note(format string, a ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	line := fmt.Sprintf("%7.2fs %s", time.Since(p.began).Seconds(), fmt.Sprintf(format, a...))
	p.history = append(p.history, line)
	if os.Getenv("COSMICAC_SOAK_TRACE") != "" {
		fmt.Fprintln(os.Stderr, line)
	}
}

// insist repeats a call until it works.
func (p *platform) insist(what string, call func(context.Context) error) {
	p.t.Helper()
	p.eventually(what, func() string {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		if err := call(ctx); err != nil {
			return err.Error()
		}
		return ""
	})
}

// eventually waits until f has nothing to say.
func (p *platform) eventually(what string, f func() string) {
	p.t.Helper()
	words := ""
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(200 * time.Millisecond) {
		if words = f(); words == "" {
			return
		}
	}
	p.t.Fatalf("%s never came true: %s", what, words)
}

// ask is one call of the API with a bounded wait.
func (p *platform) ask(method, path string, headers http.Header, in, out any) error {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	path, query, _ := strings.Cut(path, "?")
	values, err := url.ParseQuery(query)
	if err != nil {
		return err
	}
	return p.api.Call(ctx, method, path, values, headers, in, out)
}

// spec is a GPU Container Job's body.
func gpuJob(name, location string, gpus int) map[string]any {
	model := map[string]string{"us": "GH100_H100_SXM5_80GB", "in": "GA100_A100_PCIE_80GB"}[location]
	return map[string]any{
		"kind": "gpu_container", "name": name, "location": location, "image": "Ubuntu22.04/CUDA12.8.1", "disk_gib": 20,
		"gpu": map[string]any{"model": model, "count": gpus}, "cpu_cores_per_gpu": 1, "memory_gib_per_gpu": 2,
	}
}

func inferenceJob(name string, replicas int) map[string]any {
	return map[string]any{
		"kind": "managed_inference", "name": name, "location": "in", "model": "cosmicac/ngram-demo", "replicas": replicas,
		"gpu": map[string]any{"model": "GA100_A100_PCIE_80GB", "count": 1},
	}
}

// create makes a job under an idempotency key, again and again until it is
// answered: the key makes it one job.
func (p *platform) create(key string, body map[string]any) client.Job {
	p.t.Helper()
	var j client.Job
	p.insist("create "+key, func(ctx context.Context) error {
		return p.api.Call(ctx, "POST", "/api/v1/jobs", nil, http.Header{"Idempotency-Key": {key}}, body, &j)
	})
	p.note("created %s %s", key, j.ID)
	return j
}

func (p *platform) job(id string) (client.Job, error) {
	var j client.Job
	return j, p.ask("GET", "/api/v1/jobs/"+url.PathEscape(id), nil, nil, &j)
}

type logLine struct{ Instance, Text string }

// log is what the monitor has collected of a job.
func (p *platform) log(id string) ([]logLine, error) {
	var answer struct{ Data struct{ Lines []logLine } }
	err := p.ask("GET", "/monitor/api/v1/logs?tail=10000&job_id="+url.QueryEscape(id), nil, nil, &answer)
	return answer.Data.Lines, err
}

func (p *platform) until(id string, states ...string) client.Job {
	p.t.Helper()
	var j client.Job
	p.eventually(id+" is "+strings.Join(states, " or "), func() string {
		var err error
		if j, err = p.job(id); err != nil {
			return err.Error()
		}
		if slices.Contains(states, j.State) {
			return ""
		}
		return fmt.Sprintf("%s (%s) %s", j.State, j.Reason, j.Message)
	})
	return j
}

func (p *platform) act(id, verb string) error {
	if verb == "delete" {
		return p.ask("DELETE", "/api/v1/jobs/"+url.PathEscape(id), nil, nil, nil)
	}
	return p.ask("POST", "/api/v1/jobs/"+url.PathEscape(id)+"/"+verb, nil, nil, nil)
}

// gone deletes a job and waits until the API does not know it.
func (p *platform) gone(ids ...string) {
	p.t.Helper()
	p.eventually("all jobs are gone", func() string {
		var left []string
		for _, id := range ids {
			j, err := p.job(id)
			if err != nil {
				if fault.KindOf(err) == fault.NotFound {
					continue
				}
				left = append(left, err.Error())
				continue
			}
			err = p.act(id, "delete")
			left = append(left, fmt.Sprintf("%s is %s (%s), %v, delete says %v", id, j.State, j.Reason, j.Conditions, err))
		}
		return strings.Join(left, "; ")
	})
}

// kill ends a process without a word to it.
func (p *platform) kill(name string) {
	if pid := p.PID(name); pid != 0 {
		p.note("SIGKILL %s (%d)", name, pid)
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
}

// freeze stops a process where it stands: its links are cut in silence.
func (p *platform) freeze(name string) {
	pid := p.PID(name)
	if pid == 0 || p.frozen[pid] != "" {
		return
	}
	p.note("SIGSTOP %s (%d)", name, pid)
	if syscall.Kill(pid, syscall.SIGSTOP) == nil {
		p.mu.Lock()
		p.frozen[pid] = name
		p.mu.Unlock()
	}
}

// thaw lets every frozen process go on.
func (p *platform) thaw() {
	for pid, name := range p.frozen {
		p.note("SIGCONT %s (%d)", name, pid)
		_ = syscall.Kill(pid, syscall.SIGCONT)
		p.mu.Lock()
		delete(p.frozen, pid)
		p.mu.Unlock()
	}
}

// undisturbed reports whether every process serves and none is frozen.
func (p *platform) undisturbed() bool {
	p.mu.Lock()
	frozen := len(p.frozen)
	p.mu.Unlock()
	return frozen == 0 && !slices.ContainsFunc(p.Processes(), func(name string) bool { return !p.Ready(name) })
}

// allReady waits until every process serves.
func (p *platform) allReady() {
	p.t.Helper()
	p.eventually("every daemon serves", func() string {
		for _, name := range p.Processes() {
			if !p.Ready(name) {
				return name + " does not"
			}
		}
		return ""
	})
}

// fault switches a simulated fault. The cluster may be down: then nothing
// happens, and the history says so.
func (p *platform) fault(args ...string) error {
	cmd := exec.Command(filepath.Join(p.bin, "cosmicac-devcluster"), append([]string{"fault", args[0], "--dir", p.ClusterDirectory()}, args[1:]...)...)
	out, err := cmd.CombinedOutput()
	p.note("fault %q: %v", args, err)
	if err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}

func (p *platform) mustFault(args ...string) {
	p.t.Helper()
	p.eventually(fmt.Sprintf("fault %q", args), func() string {
		if err := p.fault(args...); err != nil {
			return err.Error()
		}
		return ""
	})
}

// kube reads the cluster with full rights and past the proxy. A Kubernetes
// client library has no place in the command line's module part.
type kube struct {
	server, token string
	http          *http.Client
}

func newKube(t *testing.T, file string) *kube {
	t.Helper()
	raw, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var k struct {
		Clusters []struct {
			Cluster struct {
				Server string `yaml:"server"`
				CA     string `yaml:"certificate-authority-data"`
			} `yaml:"cluster"`
		} `yaml:"clusters"`
		Users []struct {
			User struct {
				Token string `yaml:"token"`
			} `yaml:"user"`
		} `yaml:"users"`
	}
	if err := yaml.Unmarshal(raw, &k); err != nil || len(k.Clusters) == 0 || len(k.Users) == 0 {
		t.Fatalf("kubeconfig %s: %v", file, err)
	}
	ca, err := base64.StdEncoding.DecodeString(k.Clusters[0].Cluster.CA)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(ca)
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}}
	t.Cleanup(transport.CloseIdleConnections)
	return &kube{server: k.Clusters[0].Cluster.Server, token: k.Users[0].User.Token, http: &http.Client{Timeout: 20 * time.Second, Transport: transport}}
}

// get fills out with an object or a list.
func (k *kube) get(path string, out any) error {
	req, err := http.NewRequest("GET", k.server+path, nil)
	if err != nil {
		return err
	}
	req.Header.Set("Authorization", "Bearer "+k.token)
	res, err := k.http.Do(req)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	body, err := io.ReadAll(io.LimitReader(res.Body, 64<<20))
	if err != nil {
		return err
	}
	if res.StatusCode != http.StatusOK {
		return fmt.Errorf("GET %s: %s", path, res.Status)
	}
	return json.Unmarshal(body, out)
}
