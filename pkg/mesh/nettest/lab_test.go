package nettest

import (
	"bytes"
	"crypto/rand"
	"io"
	"maps"
	"net/rpc"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/trust"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	"google.golang.org/protobuf/types/known/timestamppb"
)

const (
	patience = 4 * time.Minute // generous; a link is bettered after 1, 5, 30 and 120 s: the machine may be busy
	job      = "j-0000000000001"
	attempt  = "a-0000000000001"
)

// lab is one network of ours in one world.
type lab struct {
	*world
	root, ork  *identity.Key // ork signs certificates
	founder    *trust.Network
	bootstraps map[string][]string
	orkAt      []string // what seeds of agents say of ork
	protocols  []string
}

func newLab(t *testing.T) *lab {
	t.Helper()
	l := &lab{world: newWorld(t), bootstraps: map[string][]string{}, protocols: []string{"tcp", "quic"}}
	l.root, l.ork = l.key(), l.key()
	var err error
	l.founder, err = trust.Create("", "lab", l.root, nil, []*meshv1.Member{
		{Key: l.ork.ID().String(), Name: "ork", Roles: []meshv1.Role{meshv1.Role_ROLE_ORK}, AdmittedAt: timestamppb.Now(), SignsCertificates: true},
	}, nil)
	l.check(err)
	return l
}

func (l *lab) check(err error) {
	l.t.Helper()
	if err != nil {
		l.t.Fatal(err)
	}
}

func (l *lab) key() *identity.Key {
	l.t.Helper()
	k, err := identity.New(rand.Reader)
	l.check(err)
	return k
}

// member puts a new key into the roster.
func (l *lab) member(name string, role meshv1.Role) *identity.Key {
	l.t.Helper()
	k := l.key()
	env, err := l.founder.NextRoster(l.root, time.Now(), func(r *meshv1.Roster) {
		r.Members = append(r.Members, &meshv1.Member{Key: k.ID().String(), Name: name, Roles: []meshv1.Role{role}, AdmittedAt: timestamppb.Now()})
	})
	l.check(err)
	_, err = l.founder.Adopt(env, nil)
	l.check(err)
	return k
}

// remove takes a member out of the roster.
func (l *lab) remove(n *node) {
	l.t.Helper()
	env, err := l.founder.NextRoster(l.root, time.Now(), func(r *meshv1.Roster) {
		r.Members = slices.DeleteFunc(r.Members, func(m *meshv1.Member) bool { return m.GetKey() == n.id })
	})
	l.check(err)
	_, err = l.founder.Adopt(env, nil)
	l.check(err)
}

// publish signs where the bootstraps are.
func (l *lab) publish() {
	l.t.Helper()
	env, err := l.founder.NextInfo(l.root, time.Now(), func(i *meshv1.NetworkInfo) {
		i.Bootstraps = nil
		for k, addresses := range l.bootstraps {
			i.Bootstraps = append(i.Bootstraps, &meshv1.BootstrapAddress{Key: k, Addresses: addresses})
		}
	})
	l.check(err)
	_, err = l.founder.Adopt(nil, env)
	l.check(err)
}

// listen is the mesh's port in every protocol of the lab, at an address.
func (l *lab) listen(h *host, ip string) (list []string) {
	family := "/ip4/"
	if h.address.Is6() {
		family = "/ip6/"
	}
	for _, protocol := range l.protocols {
		switch protocol {
		case "tcp":
			list = append(list, family+ip+"/tcp/4810")
		case "quic":
			list = append(list, family+ip+"/udp/4810/quic-v1")
		}
	}
	return list
}

func (l *lab) anywhere(h *host) []string {
	if h.address.Is6() {
		return l.listen(h, "::")
	}
	return l.listen(h, "0.0.0.0")
}

// bootstrap starts a bootstrap on the host and makes it the network's.
func (l *lab) bootstrap(h *host) *node {
	l.t.Helper()
	k := l.member(h.name, meshv1.Role_ROLE_BOOTSTRAP)
	l.bootstraps[k.ID().String()] = l.listen(h, h.address.String())
	l.publish()
	return l.daemon(h, k, meshv1.Role_ROLE_BOOTSTRAP)
}

// daemon starts a member that holds the network's records as they are now.
func (l *lab) daemon(h *host, k *identity.Key, role meshv1.Role, set ...func(*Spec)) *node {
	l.t.Helper()
	return l.start(h, k, append([]func(*Spec){func(s *Spec) {
		s.Genesis, s.Roster, s.Info, s.Role = l.founder.Genesis(), l.founder.RosterEnvelope(), l.founder.InfoEnvelope(), role
	}}, set...)...)
}

// orchestrator starts ork on the host.
func (l *lab) orchestrator(h *host, set ...func(*Spec)) *node {
	l.t.Helper()
	l.orkAt = l.listen(h, h.address.String())
	return l.daemon(h, l.ork, meshv1.Role_ROLE_ORK, set...)
}

// agent starts an agent with a live certificate. It knows the bootstraps only.
func (l *lab) agent(h *host, set ...func(*Spec)) *node {
	l.t.Helper()
	k, id := l.key(), l.founder.ID()
	certificate, err := trust.SealCertificate(l.ork, &meshv1.JobCertificate{
		NetworkId: id[:], Key: k.ID().String(), JobId: job, ReplicaId: "r-0000000000001", AttemptId: attempt, RackId: "rk-0000000000001",
		NotBefore: timestamppb.New(time.Now().Add(-time.Hour)), NotAfter: timestamppb.New(time.Now().Add(time.Hour)), Epoch: 1,
	})
	l.check(err)
	return l.start(h, k, append([]func(*Spec){func(s *Spec) {
		s.Certificate, s.Private, s.Bootstraps = certificate, true, maps.Clone(l.bootstraps)
	}}, set...)...)
}

// private says that nobody reaches the node from outside.
func private(s *Spec) { s.Private = true }

func (l *lab) start(h *host, k *identity.Key, set ...func(*Spec)) *node {
	l.t.Helper()
	id := l.founder.ID()
	secret, err := k.Marshal()
	l.check(err)
	s := &Spec{Key: secret, NetworkID: id[:], Roots: l.founder.RootKeys(), Listen: l.anywhere(h)}
	for _, f := range set {
		f(s)
	}
	if h.process == nil {
		h.process = l.launch(h)
	}
	n := &node{lab: l, host: h, process: h.process, id: k.ID().String(), spec: s}
	if s.Certificate != nil {
		n.given = map[string][]string{l.ork.ID().String(): l.orkAt}
	}
	n.ask("Start", s, nil)
	return n
}

// process runs a host's nodes.
type process struct {
	cmd    *exec.Cmd
	client *rpc.Client
	log    *logbook
}

type logbook struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logbook) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *lab) launch(h *host) *process {
	l.t.Helper()
	self, err := os.Executable()
	l.check(err)
	p := &process{cmd: exec.Command("nsenter", "--net=/var/run/netns/"+h.space, self), log: &logbook{}}
	p.cmd.Env = append(os.Environ(), asNode+"=1", "GOGC=200")
	p.cmd.Stderr = p.log
	in, err := p.cmd.StdinPipe()
	l.check(err)
	out, err := p.cmd.StdoutPipe()
	l.check(err)
	l.check(p.cmd.Start())
	p.client = rpc.NewClient(struct {
		io.Reader
		io.WriteCloser
	}{out, in})
	l.t.Cleanup(func() {
		p.kill()
		p.log.mu.Lock()
		defer p.log.mu.Unlock()
		if strings.Contains(p.log.b.String(), "DATA RACE") || strings.Contains(p.log.b.String(), "panic:") {
			l.t.Errorf("the process on %s:\n%s", h.name, p.log.b.String())
		} else if (l.t.Failed() || os.Getenv("SHOW") != "") && testing.Verbose() {
			l.t.Logf("log of %s:\n%s", h.name, p.log.b.String())
		}
	})
	return p
}

// kill ends the process without a farewell.
func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
	_ = p.client.Close()
}

// kill ends the host's process; the next node gets a new one.
func (h *host) kill() {
	h.process.kill()
	h.process = nil
}

// stop makes the host's process hang, resume lets it go on.
func (h *host) stop()   { _ = h.process.cmd.Process.Signal(syscall.SIGSTOP) }
func (h *host) resume() { _ = h.process.cmd.Process.Signal(syscall.SIGCONT) }

// node is one node in a host's process.
type node struct {
	*lab
	host    *host
	process *process
	id      string
	spec    *Spec
	given   map[string][]string // addresses that it knows from elsewhere: an agent's seed
}

// again starts the node anew on its host, whose process may have been killed, with
// the network's records of now.
func (n *node) again() {
	n.t.Helper()
	if n.host.process == nil {
		n.host.process = n.launch(n.host)
	}
	n.process = n.host.process
	if n.spec.Certificate == nil {
		n.spec.Roster, n.spec.Info = n.founder.RosterEnvelope(), n.founder.InfoEnvelope()
	}
	n.ask("Start", n.spec, nil)
}

func (n *node) ask(method string, args, reply any) {
	n.t.Helper()
	if reply == nil {
		reply = &struct{}{}
	}
	if err := n.process.client.Call("Program."+method, args, reply); err != nil {
		n.t.Fatalf("%s on %s: %v", method, n.host.name, err)
	}
}

func (o Outcome) fault() error {
	if o.Kind == "" {
		return nil
	}
	return fault.New(fault.Kind(o.Kind), "%s", o.Text)
}

// call makes a call that carries so many bytes each way.
func (n *node) call(to *node, size int, limit time.Duration) error {
	n.t.Helper()
	var o Outcome
	n.ask("Call", &Ask{Node: n.id, To: to.id, At: n.given[to.id], Bytes: size, Limit: limit}, &o)
	return o.fault()
}

func (n *node) ping(to *node) error { n.t.Helper(); return n.call(to, 5, 10*time.Second) }

// reaches waits until a call succeeds.
func (n *node) reaches(to *node) {
	n.t.Helper()
	var last error
	n.eventually(n.host.name+" calls "+to.host.name, func() bool { last = n.ping(to); return last == nil }, &last)
}

// send streams bytes and has them summed.
func (n *node) send(to *node, size int) error {
	n.t.Helper()
	var o Outcome
	n.ask("Send", &Ask{Node: n.id, To: to.id, At: n.given[to.id], Bytes: size, Limit: 2 * patience}, &o)
	return o.fault()
}

// hold opens a stream on which bytes come and go.
func (n *node) hold(to *node) *held { n.t.Helper(); return n.stream(to, "echo") }

// drip opens a stream on which a few bytes go again and again, and none come.
func (n *node) drip(to *node) *held { n.t.Helper(); return n.stream(to, "sink") }

func (n *node) stream(to *node, name string) *held {
	n.t.Helper()
	h, err := n.open(to, name)
	n.check(err)
	return h
}

// holdsSoon is hold for a peer that may not be ready yet.
func (n *node) holdsSoon(to *node) (h *held) {
	n.t.Helper()
	var err error
	n.eventually(n.host.name+" opens a stream to "+to.host.name, func() bool { h, err = n.open(to, "echo"); return err == nil }, &err)
	return h
}

func (n *node) open(to *node, name string) (*held, error) {
	n.t.Helper()
	h := &held{node: n}
	n.ask("Hold", &Ask{Node: n.id, To: to.id, At: n.given[to.id], Stream: name, Limit: patience}, &h.last)
	return h, h.last.Outcome.fault()
}

type held struct {
	*node
	last Held
}

// drop ends the stream.
func (h *held) drop() { h.t.Helper(); h.ask("Drop", h.last.ID, nil) }

func (h *held) look() (bytes int, err error) {
	h.t.Helper()
	h.last = Held{ID: h.last.ID}
	h.ask("Look", h.last.ID, &h.last)
	return h.last.Bytes, h.last.Outcome.fault()
}

// flows waits until more bytes have come back on the stream than until now.
func (h *held) flows() {
	h.t.Helper()
	before, _ := h.look()
	h.eventually("bytes flow", func() bool {
		now, err := h.look()
		h.check(err)
		return now > before+2000
	})
}

// breaks waits until the stream ends and tells how.
func (h *held) breaks() (err error) {
	h.t.Helper()
	h.eventually("the stream ends", func() bool { _, err = h.look(); return err != nil })
	return err
}

func (n *node) keep(to *node) {
	n.t.Helper()
	n.ask("Keep", &Ask{Node: n.id, To: to.id, At: n.given[to.id]}, nil)
}

// links lists the node's connections to a peer.
func (n *node) links(to *node) []Link {
	n.t.Helper()
	var all, list []Link
	n.ask("Links", n.id, &all)
	for _, l := range all {
		if l.Key == to.id {
			list = append(list, l)
		}
	}
	return list
}

// peers are the keys of everyone that the node is connected to.
func (n *node) peers() map[string]bool {
	n.t.Helper()
	var all []Link
	n.ask("Links", n.id, &all)
	keys := make(map[string]bool)
	for _, l := range all {
		keys[l.Key] = true
	}
	return keys
}

// linked tells whether some connection to the peer is like that.
func (n *node) linked(to *node, like func(Link) bool) bool {
	n.t.Helper()
	for _, l := range n.links(to) {
		if like(l) {
			return true
		}
	}
	return false
}

func good(l Link) bool     { return !l.Suspect }
func suspect(l Link) bool  { return l.Suspect }
func direct(l Link) bool   { return !l.Relayed }
func relayed(l Link) bool  { return l.Relayed }
func overTCP(l Link) bool  { return !l.Relayed && !l.QUIC && !l.Suspect }
func overQUIC(l Link) bool { return l.QUIC && !l.Suspect }

// versions tells which roster and network info the node holds.
func (n *node) versions() [2]uint64 {
	n.t.Helper()
	var held Records
	n.ask("Adopt", &Records{Node: n.id}, &held)
	return held.Versions
}

// tell gives the node the newest records, as an operator does.
func (n *node) tell() {
	n.t.Helper()
	n.ask("Adopt", &Records{Node: n.id, Roster: n.founder.RosterEnvelope(), Info: n.founder.InfoEnvelope()}, &Records{})
}

// knows waits until the node holds the newest records.
func (n *node) knows() {
	n.t.Helper()
	want := [2]uint64{n.founder.Roster().GetVersion(), n.founder.Info().GetSequence()}
	n.eventually(n.host.name+" holds the newest records", func() bool { return n.versions() == want })
}

// eventually polls until the condition holds; what is given is shown if it never
// does.
func (l *lab) eventually(what string, ok func() bool, shown ...*error) {
	l.t.Helper()
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if ok() {
			return
		}
	}
	for _, err := range shown {
		l.t.Logf("the last error: %v", *err)
	}
	l.t.Fatalf("%s: not within %s", what, patience)
}
