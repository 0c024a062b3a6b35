package daemon

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/health"
	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/trust"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

func TestMain(m *testing.M) {
	if os.Getenv(asHeap) != "" {
		allocateAndCount()
		return
	}
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/ipfs/go-log/writer.(*MirrorWriter).logRoutine"))
}

// testConfig is a daemon's configuration with keys of its own.
type testConfig struct {
	Base `yaml:",inline"`
	HTTP struct {
		Listen string `yaml:"listen"`
	} `yaml:"http"`
	Interval time.Duration `yaml:"interval"`
	Limit    int           `yaml:"limit"`
	Models   []string      `yaml:"models"`
	Secret   string        `yaml:"secret"`
}

func (c *testConfig) Validate() (faults []fault.Detail) {
	if c.Limit < 1 {
		faults = append(faults, fault.Detail{Field: "limit", Rule: "must be at least 1"})
	}
	if c.Interval <= 0 {
		faults = append(faults, fault.Detail{Field: "interval", Rule: "must be positive"})
	}
	return faults
}

func defaults() testConfig {
	return testConfig{Interval: time.Second, Limit: 3, Models: []string{"a"}}
}
func base(c *testConfig) *Base { return &c.Base }

// safeBuffer is a buffer that a daemon and a test may use at once.
type safeBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *safeBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}
func (s *safeBuffer) String() string { s.mu.Lock(); defer s.mu.Unlock(); return s.b.String() }

// site is a state folder with a key, a network that lists it, and a config file.
type site struct {
	t       *testing.T
	dir     string
	config  string
	root    *identity.Key
	stderr  safeBuffer
	stdout  safeBuffer
	signals chan os.Signal
	environ []string
}

func newSite(t *testing.T) *site {
	t.Helper()
	s := &site{t: t, dir: filepath.Join(t.TempDir(), "state"), signals: make(chan os.Signal, 4)}
	s.config = filepath.Join(filepath.Dir(s.dir), "x.yaml")
	if err := os.Mkdir(s.dir, 0o700); err != nil {
		t.Fatal(err)
	}
	key, err := identity.LoadOrCreate(filepath.Join(s.dir, KeyFile))
	if err != nil {
		t.Fatal(err)
	}
	s.found(key)
	s.write("state_directory: " + s.dir + "\nmesh:\n  listen: [/ip4/127.0.0.1/tcp/0]\n")
	return s
}

// found makes a new network that lists the key.
func (s *site) found(key *identity.Key) {
	s.t.Helper()
	root, err := identity.New(rand.Reader)
	if err != nil {
		s.t.Fatal(err)
	}
	s.root = root
	_, err = trust.Create(filepath.Join(s.dir, "network"), "lab", root, nil, []*meshv1.Member{
		{Key: key.ID().String(), Name: "x", Roles: []meshv1.Role{meshv1.Role_ROLE_ORK, meshv1.Role_ROLE_OPERATOR}}}, nil)
	if err != nil {
		s.t.Fatal(err)
	}
}

func (s *site) write(text string) {
	s.t.Helper()
	if err := os.WriteFile(s.config, []byte(text), 0o600); err != nil {
		s.t.Fatal(err)
	}
}

// run runs the daemon to its end.
func (s *site) run(run func(context.Context, *Env, testConfig) error, args ...string) int {
	if len(args) == 0 {
		args = []string{"--config", s.config}
	}
	return start(process{service: "x", args: args, environ: s.environ, stdout: &s.stdout, stderr: &s.stderr, signals: s.signals}, defaults, base, run)
}

// launch runs it beside the test.
func (s *site) launch(run func(context.Context, *Env, testConfig) error) (code <-chan int) {
	c := make(chan int, 1)
	go func() { c <- s.run(run) }()
	return c
}

func (s *site) status() *Status {
	st, err := ReadStatus(filepath.Join(s.dir, "status.json"))
	if err != nil {
		return &Status{}
	}
	return st
}

func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		if f() {
			return
		}
	}
	t.Fatalf("never: %s", what)
}

func never(context.Context, *Env, testConfig) error { panic("the service ran") }

func TestADaemonStartsServesAndStopsInReverseOrder(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	var mu sync.Mutex
	var order []string
	note := func(what string) { mu.Lock(); order = append(order, what); mu.Unlock() }
	code := s.launch(func(_ context.Context, env *Env, _ testConfig) error {
		env.OnStop("database", func(context.Context) error { note("database"); return nil })
		env.Go("loop", func(ctx context.Context) error { <-ctx.Done(); note("loop"); return ctx.Err() })
		if err := env.ServeHTTP("http.listen", "127.0.0.1:0", &http.Server{Handler: http.NotFoundHandler()}); err != nil {
			return err
		}
		env.OnStop("last", func(context.Context) error { note("last"); return errors.New("shrug") })
		env.Ready()
		return nil
	})
	eventually(t, "ready in the status file", func() bool { return s.status().Ready })
	st := s.status()
	if st.PID != os.Getpid() || st.Name != "x" || len(st.HTTPAddresses) != 1 || st.RosterVersion != 1 || st.LogFile == "" {
		t.Errorf("%+v", st)
	}
	r, err := http.Get("http://" + st.HTTPAddresses[0])
	if err != nil || r.StatusCode != 404 {
		t.Errorf("%v, %v", r, err)
	} else {
		_ = r.Body.Close()
	}
	http.DefaultClient.CloseIdleConnections()
	if _, _, err := prepare(process{service: "x", stderr: io.Discard}, Base{StateDirectory: s.dir}, time.Now()); !fault.Is(err, fault.Conflict) {
		t.Errorf("a second daemon in the folder: %v", err)
	}
	// SIGHUP after another program moved the log.
	if err := os.Rename(st.LogFile, st.LogFile+".moved"); err != nil {
		t.Fatal(err)
	}
	s.signals <- syscall.SIGHUP
	eventually(t, "a new log file", func() bool { _, err := os.Stat(st.LogFile); return err == nil })
	s.signals <- syscall.SIGTERM
	if c := <-code; c != 0 {
		t.Errorf("exit %d: %s", c, s.stderr.String())
	}
	if got := strings.Join(order, " "); got != "last loop database" {
		t.Errorf("stopped in order %s", got)
	}
	if st := s.status(); st.Ready || st.StoppedAt == nil || len(st.HTTPAddresses) != 0 {
		t.Errorf("%+v", st)
	}
	if log, _ := os.ReadFile(st.LogFile); !strings.Contains(string(log), "stopped") {
		t.Errorf("log: %s", log)
	}
}

func TestAFatalErrorStopsEverythingAndExitsOneWithOneLine(t *testing.T) {
	t.Parallel()
	for name, run := range map[string]func(context.Context, *Env, testConfig) error{
		"from run": func(context.Context, *Env, testConfig) error { return fault.New(fault.Unavailable, "open ledger") },
		"from a part": func(_ context.Context, env *Env, _ testConfig) error {
			env.Ready()
			env.Go("part", func(context.Context) error { return errors.New("open ledger") })
			return nil
		},
		"from a panic": func(_ context.Context, env *Env, _ testConfig) error {
			env.Go("part", func(context.Context) error { panic("open ledger") })
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSite(t)
			stopped := false
			code := s.run(func(ctx context.Context, env *Env, c testConfig) error {
				env.OnStop("x", func(context.Context) error { stopped = true; return nil })
				return run(ctx, env, c)
			})
			lines := strings.Split(strings.TrimSpace(s.stderr.String()), "\n")
			if code != 1 || !stopped || !strings.Contains(lines[len(lines)-1], "open ledger") || !strings.Contains(lines[len(lines)-1], "ended by an error") {
				t.Errorf("exit %d, %q", code, lines)
			}
		})
	}
}

func TestABlockingRunEndsWithItsContextAndASecondSignalExitsAtOnce(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	code := s.launch(func(ctx context.Context, env *Env, _ testConfig) error { env.Ready(); <-ctx.Done(); return ctx.Err() })
	eventually(t, "ready", func() bool { return s.status().Ready })
	s.signals <- syscall.SIGINT
	if c := <-code; c != 0 {
		t.Errorf("exit %d", c)
	}

	release := make(chan struct{})
	code = s.launch(func(_ context.Context, env *Env, _ testConfig) error {
		env.OnStop("stuck", func(context.Context) error { <-release; return nil })
		env.Ready()
		return nil
	})
	eventually(t, "ready again", func() bool { return s.status().Ready })
	s.signals <- syscall.SIGTERM
	s.signals <- syscall.SIGTERM
	if c := <-code; c != 1 || !strings.Contains(s.stderr.String(), "exiting at once") {
		t.Errorf("exit %d", c)
	}
	close(release)
}

func TestBadConfigurationsExitTwoAndNameTheKey(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	for _, c := range []struct {
		what, config string
		environ      []string
		want         []string
	}{
		{"unknown key", "limit: 2\nmesh:\n  lisen: []\n", nil, []string{s.config + ":3:3", `unknown key "lisen"`}},
		{"unknown key at the top", "limt: 2\n", nil, []string{s.config + ":1:1", `unknown key "limt"`}},
		{"wrong type", "limit: many\n", nil, []string{s.config + ":1:8"}},
		{"no yaml", "limit: [\n", nil, []string{s.config + ":1:"}},
		{"a key twice", "limit: 1\nlimit: 2\n", nil, []string{s.config + ":2:1"}},
		{"all rules at once", "limit: 0\ninterval: 0s\nname: Not_A_Label\nlog: {level: loud}\nmesh: {listen: [nonsense]}\n", nil,
			[]string{"limit: must be at least 1", "interval: must", "name: must", "log.level: must", "mesh.listen: must"}},
		{"environment", "", []string{"COSMICAC_LIMIT=hunter2"}, []string{"COSMICAC_LIMIT", "key limit"}},
	} {
		s.write(c.config)
		s.stderr = safeBuffer{}
		s.environ = c.environ
		if code := s.run(never); code != 2 {
			t.Errorf("%s: exit %d", c.what, code)
		}
		for _, w := range append(c.want, "cosmicac-x: ") {
			if !strings.Contains(s.stderr.String(), w) {
				t.Errorf("%s: %q does not say %q", c.what, s.stderr.String(), w)
			}
		}
		if strings.Contains(s.stderr.String(), "hunter2") {
			t.Error("the value of a variable is shown")
		}
	}
	if code := s.run(never, "--config", s.config+".gone"); code != 2 {
		t.Errorf("missing file: exit %d", code)
	}
	for _, args := range [][]string{{"--nope"}, {"stray"}} {
		if code := s.run(never, args...); code != 2 {
			t.Errorf("%v: exit %d", args, code)
		}
	}
	s.write("limit: 1")
	s.environ = nil
	if code := s.run(never, "--config", s.config, "--check-config"); code != 0 || !strings.Contains(s.stdout.String(), "good") {
		t.Errorf("exit %d", code)
	}
	if code := s.run(never, "--version"); code != 0 || !strings.Contains(s.stdout.String(), "cosmicac-x "+Version) {
		t.Errorf("exit %d", code)
	}
	s.write("state_directory: " + s.dir)
	if code := s.run(func(context.Context, *Env, testConfig) error { return fault.New(fault.Invalid, "bad model") }); code != 2 {
		t.Errorf("refused by run: exit %d", code)
	}
}

func TestTheEnvironmentOverridesTheFile(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	s.write("limit: 2\nmodels: [x]\nhttp: {listen: '127.0.0.1:1'}\n")
	cfg, unused, err := loadConfig("x", s.config, true, []string{
		"COSMICAC_LIMIT=7", "COSMICAC_MODELS=b, c", "COSMICAC_HTTP_LISTEN=unix:/x", "COSMICAC_INTERVAL=90s", "COSMICAC_MESH_LISTEN=/ip4/1.2.3.4/tcp/5",
		"COSMICAC_SECRET=[a: b", "COSMICAC_STATE_DIRECTORY=/s", "COSMICAC_TYPO=1", "HOME=/",
	}, defaults, base)
	if err != nil {
		t.Fatal(err)
	}
	if cfg.Limit != 7 || strings.Join(cfg.Models, "|") != "b|c" || cfg.HTTP.Listen != "unix:/x" || cfg.Interval != 90*time.Second ||
		cfg.Mesh.Listen[0] != "/ip4/1.2.3.4/tcp/5" || cfg.Secret != "[a: b" || cfg.StatusFile != "/s/status.json" || cfg.Name != "x" {
		t.Errorf("%+v", cfg)
	}
	if len(unused) != 1 || unused[0] != "COSMICAC_TYPO" {
		t.Errorf("unused: %v", unused)
	}
}

func TestAStateFolderOfAnotherNetworkOrKeyIsRefusedInWords(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	quit := func(context.Context, *Env, testConfig) error { return errors.New("that is all") }
	if code := s.run(quit); code != 1 || !strings.Contains(s.stderr.String(), "that is all") {
		t.Fatalf("%d: %s", code, s.stderr.String())
	}
	refused := func(what string, want ...string) {
		t.Helper()
		s.stderr = safeBuffer{}
		if code := s.run(never); code != 1 {
			t.Errorf("%s: exit %d", what, code)
		}
		text := s.stderr.String()
		for _, w := range want {
			if !strings.Contains(text, w) {
				t.Errorf("%s: %q does not say %q", what, text, w)
			}
		}
		if strings.Count(text, "\n") != 1 {
			t.Errorf("%s: more than one line: %q", what, text)
		}
	}
	if err := os.Chmod(filepath.Join(s.dir, KeyFile), 0o644); err != nil {
		t.Fatal(err)
	}
	refused("a key that others can read", "chmod 600")
	if err := os.Remove(filepath.Join(s.dir, KeyFile)); err != nil {
		t.Fatal(err)
	}
	refused("another key", "belongs to key", KeyFile)
	if err := os.RemoveAll(filepath.Join(s.dir, "network")); err != nil {
		t.Fatal(err)
	}
	refused("no network", "cosmicac join", "this daemon's key is 12D3")
	other, err := identity.New(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	s.found(other)
	refused("another network", "belongs to network")
	if err := os.Chmod(s.dir, 0o777); err != nil {
		t.Fatal(err)
	}
	refused("a folder that others write to", "chmod 700")
}

func TestATakenPortIsNamedWithItsKey(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	code := s.run(func(_ context.Context, env *Env, _ testConfig) error {
		return env.ServeHTTP("http.listen", l.Addr().String(), &http.Server{})
	})
	if text := s.stderr.String(); code != 1 || !strings.Contains(text, "http.listen: "+l.Addr().String()+" is taken") {
		t.Errorf("exit %d: %s", code, text)
	}
	_, port, _ := net.SplitHostPort(l.Addr().String())
	s.write("state_directory: " + s.dir + "\nmesh:\n  listen: [/ip4/127.0.0.1/tcp/" + port + "]\n")
	s.stderr = safeBuffer{}
	code = s.run(func(ctx context.Context, env *Env, _ testConfig) error {
		if _, err := env.Mesh(ctx, nil); err != nil {
			return err
		}
		return env.StartMesh(ctx)
	})
	if text := s.stderr.String(); code != 1 || !strings.Contains(text, "mesh.listen: /ip4/127.0.0.1/tcp/"+port+" is taken") {
		t.Errorf("exit %d: %s", code, text)
	}
}

func TestASocketOfADeadProcessIsReplaced(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	path := filepath.Join(s.dir, "x.sock")
	dead, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	dead.SetUnlinkOnClose(false)
	_ = dead.Close()
	code := s.run(func(_ context.Context, env *Env, _ testConfig) error {
		if err := env.ServeHTTP("http.listen", "unix:"+path, &http.Server{}); err != nil {
			return err
		}
		if _, err := env.Listen("http.other", "unix:"+path); !fault.Is(err, fault.Conflict) {
			return errors.New("took a socket that is served")
		}
		return errors.New("that is all")
	})
	if code != 1 || !strings.Contains(s.stderr.String(), "that is all") {
		t.Errorf("exit %d: %s", code, s.stderr.String())
	}
}

func TestWarningsOfRosterAndStorageAreRaised(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	e, lock, err := prepare(process{service: "x", stderr: io.Discard}, func() Base { b := Base{StateDirectory: s.dir}; b.fill("x"); return b }(), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = lock.Unlock(); _ = e.log.Close() }()
	now := time.Now()
	e.clock = func() time.Time { return now }
	e.Network.SetClock(e.clock)
	for _, c := range []struct {
		after      time.Duration
		soon, gone bool
	}{{0, false, false}, {61 * 24 * time.Hour, true, false}, {trust.RosterLife + time.Hour, false, true}} {
		now = time.Now().Add(c.after)
		e.watch()
		if e.Health.Has(health.RosterExpiresSoon) != c.soon || e.Health.Has(health.RosterExpired) != c.gone || e.Health.Has(health.NotInRoster) {
			t.Errorf("after %s: %v", c.after, e.Health.List())
		}
	}
	e.base.StatusFile = filepath.Join(s.dir, "gone", "status.json")
	e.writeStatus(nil)
	if !e.Health.Has(health.StorageFailing) {
		t.Error("a status file that cannot be written is no warning")
	}
	e.base.StatusFile = filepath.Join(s.dir, "status.json")
	e.writeStatus(nil)
	if e.Health.Has(health.StorageFailing) {
		t.Error("the warning stays")
	}
	alive := e.Beat("main", 20*time.Millisecond)
	eventually(t, "a late beat", func() bool { return strings.HasPrefix(e.late(), "main") })
	if alive(); e.late() != "" {
		t.Error("late though it beats")
	}
}
