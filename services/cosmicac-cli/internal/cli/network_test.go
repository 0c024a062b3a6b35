package cli

import (
	"bytes"
	"context"
	crand "crypto/rand"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/trust"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

// bootstrapProgram builds the real mesh-bootstrap once.
var bootstrapProgram = sync.OnceValues(func() (string, error) {
	program := filepath.Join(os.Getenv("COSMICAC_CONFIG_DIR"), "mesh-bootstrap")
	build := exec.Command("go", "build", "-o", program, "github.com/cosmicac/cosmicac/services/mesh-bootstrap")
	build.Env = append(os.Environ(), "CGO_ENABLED=0") // the flavour that make build leaves in the cache
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build mesh-bootstrap: %w: %s", err, out)
	}
	return program, nil
})

// site is a network with an operator's folder and bootstraps as real processes.
type site struct {
	*testing.T
	dir        string
	host       string // a loopback address of its own, so that ports need no luck
	bootstraps []*bootstrap
}

type bootstrap struct {
	state, config string
	key           *identity.Key
	process       *exec.Cmd
	ended         chan error
	said          bytes.Buffer
}

func must[T any](t *testing.T) func(T, error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

// eventually is generous: the machine may be many times slower than expected.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(3 * time.Minute); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if ok() {
			return
		}
	}
	t.Fatalf("%s: not in time", what)
}

// found founds a network with bootstraps, which are not started yet.
func found(t *testing.T, bootstraps int) *site {
	t.Helper()
	s := &site{T: t, dir: t.TempDir(), host: fmt.Sprintf("127.%d.%d.%d", 16+rand.IntN(200), 1+rand.IntN(250), 1+rand.IntN(250))}
	args := []string{"network", "init", "lab"}
	for i := range bootstraps {
		b := &bootstrap{state: s.path(fmt.Sprintf("bootstrap-%d", i+1))}
		if err := os.MkdirAll(b.state, 0o700); err != nil {
			t.Fatal(err)
		}
		b.config = b.state + ".yaml"
		b.key = must[*identity.Key](t)(identity.LoadOrCreate(filepath.Join(b.state, "identity.key")))
		s.bootstraps = append(s.bootstraps, b)
		args = append(args, "--bootstrap", b.key.ID().String()+"="+s.at(4801+i))
	}
	s.ok(args...)
	return s
}

// start gives every bootstrap the newest records and starts it.
func (s *site) start() *site {
	s.Helper()
	s.ok("network", "export", s.path("founding"))
	for i := range s.bootstraps {
		s.ok("network", "restore", s.path("founding"), "--state", s.bootstraps[i].state)
		s.run(i, 4801+i)
	}
	return s
}

func (s *site) path(name string) string { return filepath.Join(s.dir, name) }
func (s *site) operator() string        { return s.path("operator") }
func (s *site) at(port int) string      { return fmt.Sprintf("/ip4/%s/tcp/%d", s.host, port) }

// run starts bootstrap i and waits until it listens.
func (s *site) run(i, port int) {
	s.Helper()
	b := s.bootstraps[i]
	config := fmt.Sprintf("name: bootstrap-%d\nstate_directory: %s\nmesh:\n  listen: [%s]\n", i+1, b.state, s.at(port))
	if err := os.WriteFile(b.config, []byte(config), 0o600); err != nil {
		s.Fatal(err)
	}
	_ = os.Remove(filepath.Join(b.state, "status.json"))
	b.process = exec.Command(must[string](s.T)(bootstrapProgram()), "--config", b.config)
	b.process.Stdout, b.process.Stderr = &b.said, &b.said
	b.process.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := b.process.Start(); err != nil {
		s.Fatal(err)
	}
	process, ended := b.process, make(chan error, 1)
	b.ended = ended
	go func() { ended <- process.Wait() }()
	s.Cleanup(func() {
		_ = process.Process.Kill() // it may have ended
		<-ended
		if s.Failed() {
			s.Logf("bootstrap-%d said:\n%s", i+1, b.said.String())
		}
	})
	eventually(s.T, fmt.Sprintf("bootstrap-%d is ready", i+1), func() bool {
		status, err := os.ReadFile(filepath.Join(b.state, "status.json"))
		return err == nil && strings.Contains(string(status), `"ready": true`)
	})
}

func (s *site) stop(i int) {
	s.Helper()
	b := s.bootstraps[i]
	if err := b.process.Process.Signal(syscall.SIGTERM); err != nil {
		s.Fatal(err)
	}
	err := <-b.ended
	b.ended <- err // for the cleanup
	if err != nil {
		s.Errorf("bootstrap-%d ended with %v", i+1, err)
	}
}

// holds is what bootstrap i has on its disk.
func (s *site) holds(i int) *trust.Network {
	n, err := trust.OpenDirectory(filepath.Join(s.bootstraps[i].state, "network"))
	if err != nil {
		return nil
	}
	return n
}

// try runs one command line of the operator.
func (s *site) try(stdin string, args ...string) (status int, out, errOut string) {
	if (args[0] == "network" || args[0] == "mesh") && !strings.Contains(strings.Join(args, " "), "--operator") {
		args = append(args, "--operator", s.operator())
	}
	var o, e bytes.Buffer
	status = Main(args, strings.NewReader(stdin), &o, &e)
	return status, o.String(), e.String()
}

// ok runs one that must succeed.
func (s *site) ok(args ...string) string {
	s.Helper()
	status, out, errOut := s.try("", args...)
	if status != 0 {
		s.Fatalf("cosmicac %v: status %d\n%s%s", args, status, out, errOut)
	}
	return out
}

// refused runs one that must fail with a kind and these words.
func (s *site) refused(want fault.Kind, words string, args ...string) {
	s.Helper()
	status, out, errOut := s.try("", args...)
	if status != want.Exit() || !strings.Contains(errOut, words) {
		s.Errorf("cosmicac %v: status %d, want %d and %q\n%s%s", args, status, want.Exit(), words, out, errOut)
	}
}

// move moves a file of the operator's folder to another folder, as to a safe.
func (s *site) move(name, to string) string {
	s.Helper()
	if err := os.MkdirAll(s.path(to), 0o700); err != nil {
		s.Fatal(err)
	}
	path := filepath.Join(s.path(to), name)
	if err := os.Rename(filepath.Join(s.operator(), name), path); err != nil {
		s.Fatal(err)
	}
	return path
}

var threeWordsOrMore = regexp.MustCompile(`[a-z]+(-[a-z]+){5}`)

// join runs join on a new host until it is admitted, and returns what it said.
func (s *site) join(token, state string, args ...string) (words string, said func() string) {
	s.Helper()
	out := &lockedBuffer{}
	done := make(chan int, 1)
	go func() {
		done <- Main(append([]string{"join", "-", "--state", s.path(state)}, args...), strings.NewReader(token), out, out)
	}()
	eventually(s.T, "join shows the words of its key, and a bootstrap has the request", func() bool {
		words = threeWordsOrMore.FindString(out.String())
		return words != "" && strings.Contains(out.String(), "has the request")
	})
	return words, func() string {
		s.Helper()
		select {
		case status := <-done:
			if status != 0 {
				s.Errorf("join ended with status %d:\n%s", status, out)
			}
		case <-time.After(3 * time.Minute):
			s.Errorf("join does not end:\n%s", out)
		}
		return out.String()
	}
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}
func (l *lockedBuffer) String() string { l.mu.Lock(); defer l.mu.Unlock(); return l.b.String() }

func TestAHostJoinsWithOneLineAndBothSidesSeeTheSameWords(t *testing.T) {
	t.Parallel()
	s := found(t, 1).start()
	token := s.ok("network", "token", "--name", "worker-in", "--roles", "worker")

	// It is interrupted, and says where the request stands.
	ctx, interrupt := context.WithCancel(context.Background())
	out := &lockedBuffer{}
	e := &environment{in: strings.NewReader(token), out: out, err: out}
	root := e.root()
	root.SetArgs([]string{"join", "-", "--state", s.path("worker")})
	ended := make(chan error, 1)
	go func() { ended <- root.ExecuteContext(ctx) }()
	eventually(t, "the request is filed", func() bool { return strings.Contains(out.String(), "has the request since") })
	interrupt()
	err := <-ended
	if !fault.Is(err, fault.Canceled) || !strings.Contains(err.Error(), "the request stands since") || strings.Contains(err.Error(), "not admitted within") {
		t.Errorf("an interrupted join says: %v", err)
	}
	first := regexp.MustCompile(`since [0-9-]+ [0-9:]+`).FindString(out.String())

	// Resumed, it speaks of the same request; the operator sees the same words.
	words, said := s.join(token, "worker")
	list := s.ok("network", "requests")
	if !strings.Contains(list, words) || !strings.Contains(list, "yes") || strings.Count(list, "\n") != 2 {
		t.Errorf("the operator sees\n%s, the host %s", list, words)
	}
	s.refused(fault.NotFound, "no open request", "network", "admit", "legal-winner-thank-year-wave-sausage")
	if admitted := s.ok("network", "admit", words); !strings.Contains(admitted, "adds worker-in as worker") {
		t.Errorf("admit says\n%s", admitted)
	}
	if text := said(); !strings.Contains(text, first) || !strings.Contains(text, "admitted as worker-in (worker) by roster version 2") {
		t.Errorf("the request stood %s; the resumed join says\n%s", first, text)
	}
	// And again, on a host that has joined.
	if text := s.ok("join", strings.TrimSpace(token), "--state", s.path("worker")); !strings.Contains(text, "admitted before, as worker-in") {
		t.Errorf("join after all is done says\n%s", text)
	}
	if list := s.ok("network", "requests"); strings.Count(list, "\n") != 1 {
		t.Errorf("still open:\n%s", list)
	}
}

func TestARequestWithoutATokenIsAdmittedByItsWordsOnly(t *testing.T) {
	t.Parallel()
	s := found(t, 1).start()
	token := must[*meshv1.JoinToken](t)(trust.DecodeJoinToken(s.ok("network", "token")))
	token.Secret = bytes.Repeat([]byte{1}, 32)
	words, said := s.join(trust.EncodeJoinToken(token), "stranger", "--name", "ork-2", "--roles", "ork")
	s.refused(fault.Denied, "holds no token of yours", "network", "admit", "ork-2")
	s.ok("network", "admit", words, "--roles", "proxy")
	if text := said(); !strings.Contains(text, "admitted as ork-2 (proxy)") {
		t.Errorf("the operator's roles do not count:\n%s", text)
	}
	_, out, _ := s.try("", "join", trust.EncodeJoinToken(token), "--state", s.path("other"), "--name", "x", "--roles", "proxy", "--wait", "2s")
	other := threeWordsOrMore.FindString(out)
	s.ok("network", "requests", "drop", other)
	if list := s.ok("network", "requests"); strings.Contains(list, other) {
		t.Errorf("dropped and still open:\n%s", list)
	}
}

func TestAnApprovedTokenAdmitsItsFirstHostAndStaysOutOfCommandLines(t *testing.T) {
	t.Parallel()
	s := found(t, 1).start()
	out, done := &lockedBuffer{}, make(chan int, 1)
	go func() {
		done <- Main([]string{"network", "token", "--approve", "--name", "proxy-1", "--roles", "proxy", "--operator", s.operator()}, strings.NewReader(""), out, io.Discard)
	}()
	eventually(t, "the token is printed", func() bool { return strings.Contains(out.String(), "\n") })
	token, _, _ := strings.Cut(out.String(), "\n")
	if status, _, errOut := s.try("", "join", token, "--state", s.path("proxy")); status != 2 || strings.Contains(errOut, token) {
		t.Errorf("status %d: %s", status, errOut)
	}
	if status, text, errOut := s.try(token+"\n", "join", "--state", s.path("proxy")); status != 0 || !strings.Contains(text, "admitted as proxy-1 (proxy)") {
		t.Errorf("status %d: %s%s", status, text, errOut)
	}
	if status := <-done; status != 0 {
		t.Errorf("token --approve ended with status %d:\n%s", status, out)
	}
}

func TestTheRootKeyStaysOffline(t *testing.T) {
	t.Parallel()
	s := found(t, 1).start()
	s.move("root.key", "vault")
	s.move("second-root.key", "safe")
	request, signed := s.path("give.request"), s.path("give.request.signed")
	s.refused(fault.FailedPrecondition, "--request FILE", "network", "renew")
	s.ok("network", "delegate", "operator", "--give", "rosters", "--request", request)

	// On the signing machine, which holds nothing but the key.
	vault := []string{"network", "sign", request, "--operator", s.path("vault")}
	for answer, want := range map[string]int{"": fault.Canceled.Exit(), "n\n": fault.Canceled.Exit()} {
		if status, _, _ := s.try(answer, vault...); status != want {
			t.Errorf("answer %q: status %d", answer, status)
		}
	}
	if _, err := os.Stat(signed); err == nil {
		t.Error("signed without a yes")
	}
	status, out, errOut := s.try("y\n", vault...)
	if status != 0 || !strings.Contains(out, "lets operator sign rosters") || !strings.Contains(out, "roster version 1 becomes 2, good until") {
		t.Fatalf("status %d: %s%s", status, out, errOut)
	}
	s.ok("network", "apply", signed)
	s.ok("network", "apply", signed) // twice is once

	// The operator's own key admits and revokes now, and gives no power.
	comer := must[*identity.Key](t)(identity.New(crand.Reader)).ID().String()
	s.ok("network", "admit", comer, "--name", "proxy-1", "--roles", "proxy")
	s.ok("network", "revoke", "proxy-1")
	s.refused(fault.Denied, "use --request FILE", "network", "admit", comer, "--name", "ork-1", "--roles", "ork")
	s.refused(fault.FailedPrecondition, "only a root key signs this", "network", "delegate", "operator", "--take", "rosters")
	if n := s.holds(0); n.Roster().GetVersion() != 4 {
		t.Errorf("the bootstrap holds version %d", n.Roster().GetVersion())
	}

	// What was signed for an older state is refused, at both ends.
	s.refused(fault.Conflict, "make the request anew", "network", "apply", signed)
	s.ok("network", "export", s.path("newest"))
	s.ok("network", "restore", s.path("newest"), "--state", s.path("vault"))
	s.refused(fault.Conflict, "make the request anew", "network", "sign", request, "--operator", s.path("vault"), "--yes", "--out", s.path("late.signed"))
	s.refused(fault.Invalid, "COSMICAC SIGNED CHANGE", "network", "sign", signed, "--operator", s.path("vault"))
	s.refused(fault.Invalid, "COSMICAC CHANGE REQUEST", "network", "apply", request)
}

func TestALostRootKeyIsReplacedByTheSecondAndTheNetworkGoesOn(t *testing.T) {
	t.Parallel()
	s := found(t, 2).start()
	token := s.ok("network", "token", "--name", "worker-1", "--roles", "worker") // names the old root keys
	second := s.move("second-root.key", "safe")
	if err := os.Remove(filepath.Join(s.operator(), "root.key")); err != nil {
		t.Fatal(err)
	}
	if out := s.ok("network", "rotate-root", "--root-key", second); !strings.Contains(out, "second-root-2.key to a safe place") {
		t.Errorf("no word about the new second key:\n%s", out)
	}
	s.refused(fault.Denied, "not a root key in force", "network", "renew", "--root-key", second)
	next := must[*identity.Key](t)(identity.Load(filepath.Join(s.operator(), "root-2.key")))
	for i := range s.bootstraps {
		eventually(t, "the bootstraps follow", func() bool { n := s.holds(i); return n != nil && n.IsRoot(next.ID()) })
	}
	words, said := s.join(token, "worker")
	s.ok("network", "admit", words)
	if text := said(); !strings.Contains(text, "admitted as worker-1") {
		t.Errorf("join with a token from before:\n%s", text)
	}
	// A token and a host from after it, with the network restarted from its disks.
	s.stop(0)
	s.run(0, 4801)
	words, said = s.join(s.ok("network", "token", "--name", "worker-2", "--roles", "worker"), "worker-2")
	s.ok("network", "admit", words)
	if text := said(); !strings.Contains(text, "admitted as worker-2") {
		t.Errorf("join with a token from after:\n%s", text)
	}
}

func TestABackupRebuildsTheOperatorsFolderAndHoldsNoKeyUnlessAsked(t *testing.T) {
	t.Parallel()
	s := found(t, 1).start()
	s.ok("network", "token")
	plain, private := s.path("plain"), s.path("private")
	s.ok("network", "export", plain)
	const words = "a passphrase of many words"
	if status, _, errOut := s.try("short\n", "network", "export", "--with-keys", private); status == 0 {
		t.Errorf("a short passphrase is taken: %s", errOut)
	}
	if status, _, errOut := s.try(words+"\n", "network", "export", "--with-keys", private); status != 0 || strings.Contains(errOut, words) {
		t.Fatalf("status %d: %s", status, errOut)
	}
	if info, err := os.Stat(private); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the file with keys: %v, %v", info, err)
	}
	backup := &meshv1.Backup{}
	if err := trust.DecodeFile(must[[]byte](t)(os.ReadFile(plain)), backup); err != nil || len(backup.GetFiles()) > 0 || len(backup.GetNetworkKey()) > 0 {
		t.Errorf("the plain file holds secrets: %v", err)
	}
	s.refused(fault.Conflict, "not overwritten", "network", "export", plain)

	if status, _, _ := s.try("not the passphrase\n", "network", "restore", private, "--operator", s.path("again")); status != fault.Unauthenticated.Exit() {
		t.Errorf("a wrong passphrase: status %d", status)
	}
	if status, out, errOut := s.try(words+"\n", "network", "restore", private, "--operator", s.path("again")); status != 0 || !strings.Contains(out, "operator.key is operator of the roster") {
		t.Fatalf("status %d: %s%s", status, out, errOut)
	}
	for _, name := range []string{"root.key", "second-root.key", "operator.key", tokenFile} {
		was, is := must[[]byte](t)(os.ReadFile(filepath.Join(s.operator(), name))), must[[]byte](t)(os.ReadFile(filepath.Join(s.path("again"), name)))
		info, err := os.Stat(filepath.Join(s.path("again"), name))
		if !bytes.Equal(was, is) || err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s is another one, or readable by others: %v", name, err)
		}
	}
	if out := s.ok("network", "renew", "--operator", s.path("again")); !strings.Contains(out, "bootstrap-1 holds it") {
		t.Errorf("the rebuilt folder:\n%s", out)
	}

	// All is lost but the second root key: the newest records come from a daemon.
	s.ok("network", "export", s.path("daemon"), "--state", s.bootstraps[0].state)
	made := s.ok("network", "restore", s.path("daemon"), "--operator", s.path("new"))
	key := regexp.MustCompile(`12D3\w+`).FindString(made)
	s.ok("network", "admit", key, "--name", "operator-2", "--roles", "operator", "--root-key", filepath.Join(s.operator(), "second-root.key"), "--operator", s.path("new"))
	s.ok("network", "requests", "--operator", s.path("new"))
	s.ok("network", "init", "other", "--operator", s.path("other"))
	s.refused(fault.Conflict, "choose another folder", "network", "restore", s.path("daemon"), "--operator", s.path("other"))
	if status, _, errOut := s.try(words+"\n", "network", "restore", private, "--operator", s.path("other")); status != fault.Conflict.Exit() || !strings.Contains(errOut, "is another one") {
		t.Errorf("another network's keys were overwritten: status %d, %s", status, errOut)
	}
}

func TestAnExpiredNetworkIsRenewed(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		what    string
		members int
	}{{"over the mesh", 3}, {"by a file where the roster is too large to be shown to strangers", 150}} {
		t.Run(c.what, func(t *testing.T) {
			t.Parallel()
			s := found(t, 1)
			s.expire(c.members)
			s.start()
			if out := s.ok("network", "roster"); !strings.Contains(out, "over since") {
				t.Errorf("an expired roster is shown as\n%s", out)
			}
			if status, out, errOut := s.try("", "network", "renew"); c.members == 3 && (status != 0 || !strings.Contains(out, "bootstrap-1 holds it")) {
				t.Errorf("renew: status %d\n%s%s", status, out, errOut)
			} else if c.members > 3 && status != 0 {
				if !strings.Contains(errOut, "restore --state") {
					t.Errorf("renew does not say what to do:\n%s", errOut)
				}
				s.stop(0)
				s.ok("network", "export", s.path("renewed"))
				s.ok("network", "restore", s.path("renewed"), "--state", s.bootstraps[0].state)
				s.run(0, 4801)
				s.ok("network", "requests")
			}
			if held := s.holds(0); held == nil || held.Expired() {
				t.Error("the bootstrap's roster is still over")
			}
		})
	}
}

// expire makes the operator's folder hold a roster of so many members whose time
// was over yesterday.
func (s *site) expire(members int) {
	s.Helper()
	root := must[*identity.Key](s.T)(identity.Load(filepath.Join(s.operator(), "root.key")))
	folder := filepath.Join(s.operator(), "network")
	n := must[*trust.Network](s.T)(trust.OpenDirectory(folder))
	r := n.Roster()
	for i := len(r.Members); i < members; i++ {
		r.Members = append(r.Members, newMember(must[*identity.Key](s.T)(identity.New(crand.Reader)).ID().String(), fmt.Sprintf("worker-%d", i), []meshv1.Role{meshv1.Role_ROLE_WORKER}))
	}
	r.Version, r.IssuedAt, r.NotAfter = 2, timestamppb.New(time.Now().Add(-91*24*time.Hour)), timestamppb.New(time.Now().Add(-24*time.Hour))
	records := n.Records()
	records.RosterEnvelope = must[[]byte](s.T)(trust.SealRoster(root, r))
	if err := os.RemoveAll(folder); err != nil {
		s.Fatal(err)
	}
	must[*trust.Network](s.T)(trust.Restore(folder, records, n.NetworkKey()))
}

func TestTwoOperatorsWhoSignAtOnceAreTold(t *testing.T) {
	t.Parallel()
	s := found(t, 1).start()
	root := must[*identity.Key](t)(identity.Load(filepath.Join(s.operator(), "root.key")))
	mine := must[*trust.Network](t)(trust.OpenDirectory(filepath.Join(s.operator(), "network")))
	unseen := must[[]byte](t)(mine.NextRoster(root, time.Now(), nil)) // version 2, told nobody
	s.ok("network", "admit", must[*identity.Key](t)(identity.New(crand.Reader)).ID().String(), "--name", "proxy-1", "--roles", "proxy")
	folder := filepath.Join(s.operator(), "network", "roster.bin")
	if err := os.WriteFile(folder, unseen, 0o644); err != nil {
		t.Fatal(err)
	}
	status, out, errOut := s.try("", "network", "renew")
	if status != 0 || !strings.Contains(errOut, "someone else signed at the same time") || !strings.Contains(errOut, "removes proxy-1") {
		t.Errorf("status %d: %s%s", status, out, errOut)
	}
}

func TestARosterOf500MembersIsAdmittedToAndRevokedFrom(t *testing.T) {
	t.Parallel()
	s := found(t, 2)
	root := must[*identity.Key](t)(identity.Load(filepath.Join(s.operator(), "root.key")))
	n := must[*trust.Network](t)(trust.OpenDirectory(filepath.Join(s.operator(), "network")))
	many := must[[]byte](t)(n.NextRoster(root, time.Now(), func(r *meshv1.Roster) {
		for i := len(r.Members); i < 500; i++ {
			r.Members = append(r.Members, newMember(must[*identity.Key](t)(identity.New(crand.Reader)).ID().String(), fmt.Sprintf("worker-%d", i), []meshv1.Role{meshv1.Role_ROLE_WORKER}))
		}
	}))
	must[bool](t)(n.Adopt(many, nil))
	s.start()
	words, said := s.join(s.ok("network", "token", "--name", "proxy-1", "--roles", "proxy"), "proxy")
	s.ok("network", "admit", words)
	if text := said(); !strings.Contains(text, "admitted as proxy-1") {
		t.Errorf("join says\n%s", text)
	}
	s.ok("network", "revoke", "worker-499")
	for i := range s.bootstraps {
		eventually(t, "the bootstraps hold it", func() bool {
			h := s.holds(i)
			return h != nil && h.Roster().GetVersion() == 4 && len(h.Roster().GetMembers()) == 500
		})
	}
}
