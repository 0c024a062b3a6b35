package trust

import (
	"bytes"
	"crypto/rand"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/id"
	"github.com/cosmicac/cosmicac/pkg/identity"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

func newKey(t testing.TB) *identity.Key {
	t.Helper()
	k, err := identity.New(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// lab is a network with one key of each sort.
type lab struct {
	*Network
	root, second, signer, ork, app, worker, stranger *identity.Key
}

func newLab(t testing.TB, dir string) *lab {
	t.Helper()
	l := &lab{root: newKey(t), second: newKey(t), signer: newKey(t), ork: newKey(t), app: newKey(t), worker: newKey(t), stranger: newKey(t)}
	n, err := Create(dir, "lab", l.root, l.second, []*meshv1.Member{
		{Key: l.signer.ID().String(), Name: "operator", Roles: []meshv1.Role{meshv1.Role_ROLE_OPERATOR}, SignsRosters: true},
		{Key: l.ork.ID().String(), Name: "ork", Roles: []meshv1.Role{meshv1.Role_ROLE_ORK}, SignsCertificates: true},
		{Key: l.app.ID().String(), Name: "app", Roles: []meshv1.Role{meshv1.Role_ROLE_APP_NODE}, SignsGrants: true},
		{Key: l.worker.ID().String(), Name: "rack-1", Roles: []meshv1.Role{meshv1.Role_ROLE_WORKER}},
	}, []*meshv1.BootstrapAddress{{Key: l.signer.ID().String(), Addresses: []string{"/dns/boot.example/tcp/4801"}}})
	if err != nil {
		t.Fatal(err)
	}
	l.Network = n
	return l
}

func (l *lab) certificate(holder *identity.Key, from, to time.Time) *meshv1.JobCertificate {
	nid := l.ID()
	return &meshv1.JobCertificate{NetworkId: nid[:], Key: holder.ID().String(), JobId: id.New(id.Job), ReplicaId: id.New(id.Replica),
		AttemptId: id.New(id.Attempt), NotBefore: timestamppb.New(from), NotAfter: timestamppb.New(to)}
}

func (l *lab) grant(client, agent *identity.Key, from, to time.Time) *meshv1.Grant {
	nid := l.ID()
	return &meshv1.Grant{NetworkId: nid[:], ClientKey: client.ID().String(), AgentKey: agent.ID().String(), JobId: id.New(id.Job),
		Rights: []string{"shell"}, NotBefore: timestamppb.New(from), NotAfter: timestamppb.New(to)}
}

func must[T any](t testing.TB) func(v T, err error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func wantKind(t testing.TB, what string, err error, want fault.Kind) {
	t.Helper()
	if fault.KindOf(err) != want {
		t.Errorf("%s: got %v (%s), want %s", what, err, fault.KindOf(err), want)
	}
}

func TestNobodyIsAMemberWithoutARoster(t *testing.T) {
	t.Parallel()
	l := newLab(t, "")
	nid := l.ID()
	n := must[*Network](t)(NewMemory(nid[:], l.RootKeys()))
	for _, k := range []*identity.Key{l.root, l.ork, l.stranger} {
		if _, ok := n.Member(k.ID()); ok || n.HasRole(k.ID(), meshv1.Role_ROLE_ORK) {
			t.Errorf("%s is a member of nothing", k)
		}
	}
	_, err := n.CheckCertificate(must[[]byte](t)(SealCertificate(l.ork, l.certificate(l.stranger, time.Now(), time.Now().Add(time.Hour)))), l.stranger.ID(), time.Now())
	wantKind(t, "certificate without a roster", err, fault.Denied)
	if changed, err := n.Adopt(l.RosterEnvelope(), l.InfoEnvelope()); err != nil || !changed {
		t.Fatal(changed, err)
	}
	if !n.HasRole(l.ork.ID(), meshv1.Role_ROLE_ORK) || n.HasRole(l.ork.ID(), meshv1.Role_ROLE_WORKER) || n.HasRole(l.ork.ID(), 0) {
		t.Error("ork's roles are wrong")
	}
	if _, ok := n.Member(l.root.ID()); ok {
		t.Error("a root key is a member without being listed")
	}
	if err := n.AdoptGenesis(l.Genesis()); err != nil {
		t.Error(err)
	}
	if got := n.ByRole(meshv1.Role_ROLE_WORKER); len(got) != 1 || got[0].GetName() != "rack-1" {
		t.Errorf("workers: %v", got)
	}
}

func TestAnOlderRosterNeverReplacesANewerOne(t *testing.T) {
	t.Parallel()
	l := newLab(t, "")
	first := l.RosterEnvelope()
	changes, cancel := l.Subscribe()
	defer cancel()
	second := must[[]byte](t)(l.NextRoster(l.root, time.Now(), func(r *meshv1.Roster) { r.Members = r.Members[:3] }))
	if changed, err := l.Adopt(second, nil); !changed || err != nil {
		t.Fatal(changed, err)
	}
	select {
	case <-changes:
	default:
		t.Error("removing a member gave no signal")
	}
	if _, ok := l.Member(l.worker.ID()); ok {
		t.Error("the removed worker is still a member")
	}
	for _, env := range [][]byte{first, second} {
		if changed, err := l.Adopt(env, nil); changed || err != nil {
			t.Errorf("replay: %v, %v", changed, err)
		}
	}
	if l.Roster().GetVersion() != 2 {
		t.Errorf("version %d", l.Roster().GetVersion())
	}
	info := l.InfoEnvelope()
	newer := must[[]byte](t)(l.NextInfo(l.signer, time.Now(), func(i *meshv1.NetworkInfo) { i.Bootstraps = nil }))
	if changed, err := l.Adopt(nil, newer); !changed || err != nil {
		t.Fatal(changed, err)
	}
	if changed, err := l.Adopt(nil, info); changed || err != nil || l.Info().GetSequence() != 2 {
		t.Errorf("replayed network info: %v, %v", changed, err)
	}
}

func TestForgedAndForeignRostersAreRefused(t *testing.T) {
	t.Parallel()
	l, other := newLab(t, ""), newLab(t, "")
	forge := func(signer *identity.Key, edit func(*meshv1.Roster)) []byte {
		r := proto.Clone(l.Roster()).(*meshv1.Roster)
		r.Version = 9
		if edit != nil {
			edit(r)
		}
		return must[[]byte](t)(seal(signer, domainRoster, MaxRosterBytes, r))
	}
	tampered := forge(l.root, nil)
	i := bytes.Index(tampered, []byte("rack-1"))
	tampered[i] = 'x'
	expired := timestamppb.New(time.Now().Add(-Skew - time.Minute))
	for _, c := range []struct {
		what string
		env  []byte
		want fault.Kind
	}{
		{"another network's", other.RosterEnvelope(), fault.Denied},
		{"signed by a stranger", forge(l.stranger, nil), fault.Denied},
		{"signed by a member without the power", forge(l.ork, nil), fault.Denied},
		{"signed by an online signer without a base", forge(l.signer, nil), fault.Denied},
		{"changed after signing", tampered, fault.Unauthenticated},
		{"a record of another domain", l.InfoEnvelope(), fault.Invalid},
		{"truncated", forge(l.root, nil)[:200], fault.Invalid},
		{"expired", forge(l.root, func(r *meshv1.Roster) { r.IssuedAt, r.NotAfter = timestamppb.New(time.Unix(1e9, 0)), expired }), fault.FailedPrecondition},
		{"a key twice", forge(l.root, func(r *meshv1.Roster) { r.Members[1].Key = r.Members[0].Key }), fault.Invalid},
		{"a name twice", forge(l.root, func(r *meshv1.Roster) { r.Members[1].Name = r.Members[0].Name }), fault.Invalid},
		{"no role", forge(l.root, func(r *meshv1.Roster) { r.Members[1].Roles = nil }), fault.Invalid},
		{"role zero", forge(l.root, func(r *meshv1.Roster) { r.Members[1].Roles = []meshv1.Role{0} }), fault.Invalid},
		{"a hex key", forge(l.root, func(r *meshv1.Roster) { r.Members[1].Key = l.ork.Hex() }), fault.Invalid},
		{"huge", make([]byte, MaxRosterBytes+1), fault.TooLarge},
	} {
		changed, err := l.Adopt(c.env, nil)
		wantKind(t, c.what, err, c.want)
		if changed {
			t.Errorf("%s was adopted", c.what)
		}
	}
	if l.Roster().GetVersion() != 1 {
		t.Error("the roster changed")
	}
	_, err := l.Adopt(nil, other.InfoEnvelope())
	wantKind(t, "another network's info", err, fault.Denied)
	_, err = l.NextInfo(l.ork, time.Now(), nil)
	wantKind(t, "info by ork", err, fault.Denied)
	l.SetMinimumRosterVersion(5)
	old := must[[]byte](t)(l.NextRoster(l.root, time.Now(), nil))
	_, err = l.Adopt(old, nil)
	wantKind(t, "below the join token's version", err, fault.Denied)
}

func TestAnOnlineSignerAdmitsButGivesNoPowers(t *testing.T) {
	t.Parallel()
	l := newLab(t, "")
	add := func(power bool) func(*meshv1.Roster) {
		return func(r *meshv1.Roster) {
			r.Members = append(r.Members, &meshv1.Member{Key: l.stranger.ID().String(), Name: "proxy",
				Roles: []meshv1.Role{meshv1.Role_ROLE_PROXY}, SignsGrants: power})
		}
	}
	_, err := l.NextRoster(l.signer, time.Now(), add(true))
	wantKind(t, "a new power", err, fault.Denied)
	_, err = l.NextRoster(l.ork, time.Now(), add(false))
	wantKind(t, "signed by ork", err, fault.Denied)
	byRoot := l.RosterEnvelope()
	bySigner := must[[]byte](t)(l.NextRoster(l.signer, time.Now(), add(false)))

	// Someone who knows only the root keys follows it.
	nid := l.ID()
	fresh := must[*Network](t)(NewMemory(nid[:], l.RootKeys()))
	if _, err := fresh.Adopt(bySigner, l.InfoEnvelope()); err != nil || !fresh.HasRole(l.stranger.ID(), meshv1.Role_ROLE_PROXY) {
		t.Fatalf("fresh node: %v", err)
	}
	// A root key takes the delegation back; the signer cannot build on the older one.
	revoked := must[[]byte](t)(l.NextRoster(l.root, time.Now(), func(r *meshv1.Roster) { r.Members[0].SignsRosters = false }))
	if _, err := l.Adopt(revoked, nil); err != nil {
		t.Fatal(err)
	}
	r := must[*meshv1.Roster](t)(OpenRoster(bySigner))
	r.Version, r.BaseEnvelope = 7, byRoot
	_, err = l.Adopt(must[[]byte](t)(SealRoster(l.signer, r)), nil)
	wantKind(t, "a signer whose delegation was taken back", err, fault.Denied)
}

func TestAnExpiredRosterAdmitsNobodyButKeepsNames(t *testing.T) {
	t.Parallel()
	l := newLab(t, "")
	now := time.Now().Add(RosterLife)
	l.SetClock(func() time.Time { return now })
	changes, cancel := l.Subscribe()
	defer cancel()
	if _, ok := l.Member(l.ork.ID()); !ok {
		t.Error("denied within the skew")
	}
	if err := l.Tick(); err != nil || len(changes) != 0 {
		t.Error("signal before expiry", err)
	}
	now = now.Add(Skew + time.Minute)
	if _, ok := l.Member(l.ork.ID()); ok || !l.Expired() || len(l.ByRole(meshv1.Role_ROLE_ORK)) != 0 {
		t.Error("still admitted")
	}
	if m, ok := l.Known(l.ork.ID()); !ok || m.GetName() != "ork" {
		t.Error("the name is gone")
	}
	for range 3 {
		_ = l.Tick()
	}
	if len(changes) != 1 {
		t.Error("no signal at expiry")
	}
	if _, err := l.Adopt(must[[]byte](t)(l.NextRoster(l.root, now, nil)), nil); err != nil || l.Expired() {
		t.Errorf("a new roster does not help: %v", err)
	}
}

func TestCertificatesAndGrantsAreBoundToSignerKeysNetworkAndTime(t *testing.T) {
	t.Parallel()
	l, other := newLab(t, ""), newLab(t, "")
	agent, client, now := newKey(t), newKey(t), time.Now()
	hour := func(n int) time.Time { return now.Add(time.Duration(n) * time.Hour) }
	for _, c := range []struct {
		what           string
		net            *lab
		signC, signG   *identity.Key
		holder, target *identity.Key
		from, to       time.Time
		want           fault.Kind
	}{
		{"good", l, l.ork, l.app, client, agent, hour(-1), hour(1), ""},
		{"just expired, within skew", l, l.ork, l.app, client, agent, hour(-1), now.Add(-10 * time.Minute), ""},
		{"just ahead, within skew", l, l.ork, l.app, client, agent, now.Add(10 * time.Minute), hour(1), ""},
		{"expired", l, l.ork, l.app, client, agent, hour(-2), hour(-1), fault.Denied},
		{"from the future", l, l.ork, l.app, client, agent, hour(1), hour(2), fault.Denied},
		{"another network", other, other.ork, other.app, client, agent, hour(-1), hour(1), fault.Denied},
		{"signed by a member without the power", l, l.app, l.ork, client, agent, hour(-1), hour(1), fault.Denied},
		{"signed by a stranger", l, l.stranger, l.stranger, client, agent, hour(-1), hour(1), fault.Denied},
		{"signed by a root key", l, l.root, l.root, client, agent, hour(-1), hour(1), fault.Denied},
		{"shown by another key", l, l.ork, l.app, l.stranger, agent, hour(-1), hour(1), fault.Denied},
	} {
		cert := must[[]byte](t)(SealCertificate(c.signC, c.net.certificate(c.holder, c.from, c.to)))
		_, err := l.CheckCertificate(cert, client.ID(), now)
		wantKind(t, "certificate "+c.what, err, c.want)
		grant := must[[]byte](t)(SealGrant(c.signG, c.net.grant(c.holder, c.target, c.from, c.to)))
		_, err = l.CheckGrant(grant, client.ID(), agent.ID(), now)
		wantKind(t, "grant "+c.what, err, c.want)
		if c.what != "good" {
			continue
		}
		_, err = l.CheckGrant(grant, client.ID(), l.stranger.ID(), now)
		wantKind(t, "grant at another agent", err, fault.Denied)
		_, err = l.CheckCertificate(grant, client.ID(), now)
		wantKind(t, "grant as certificate", err, fault.Invalid)
		for cut := range len(grant) {
			if _, err := OpenGrant(grant[:cut]); err == nil {
				t.Fatalf("a grant cut to %d of %d bytes passes", cut, len(grant))
			}
		}
	}
	g := l.grant(client, agent, hour(-1), hour(1))
	g.Rights = []string{"shell", "root"}
	_, err := SealGrant(l.app, g)
	wantKind(t, "unknown right", err, fault.Invalid)
}

func TestCardsSpeakForTheirOwnKeyOnly(t *testing.T) {
	t.Parallel()
	l := newLab(t, "")
	nid := l.ID()
	card := func(k *identity.Key, role meshv1.Role) *meshv1.Card {
		return &meshv1.Card{NetworkId: nid[:], Key: k.ID().String(), Role: role, Sequence: 1, TtlSeconds: 60, Addresses: []string{"/ip4/127.0.0.1/tcp/1"}}
	}
	if _, err := l.CheckCard(must[[]byte](t)(SealCard(l.worker, card(l.worker, meshv1.Role_ROLE_WORKER))), time.Now()); err != nil {
		t.Error(err)
	}
	if _, err := l.CheckCard(must[[]byte](t)(SealCard(l.stranger, card(l.stranger, 0))), time.Now()); err != nil {
		t.Errorf("an agent's card: %v", err)
	}
	_, err := l.CheckCard(must[[]byte](t)(SealCard(l.worker, card(l.worker, meshv1.Role_ROLE_ORK))), time.Now())
	wantKind(t, "a role it has not", err, fault.Denied)
	_, err = OpenCard(must[[]byte](t)(seal(l.stranger, domainCard, MaxRecordBytes, card(l.worker, 0))))
	wantKind(t, "another key's card", err, fault.Invalid)
}

func TestRootKeysCanBeRotatedAndOldOnesLoseTheirPower(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	l := newLab(t, dir)
	nid, next := l.ID(), newKey(t)
	keys := []string{l.second.ID().String(), next.ID().String()}
	rotation := must[[]byte](t)(SealRotation(l.second, &meshv1.Genesis{NetworkId: nid[:], Name: "lab", RootKeys: keys, CreatedAt: timestamppb.Now()}))
	evil := must[[]byte](t)(SealRotation(l.stranger, &meshv1.Genesis{NetworkId: nid[:], Name: "lab", RootKeys: []string{l.stranger.ID().String()}}))
	_, err := l.NextInfo(l.stranger, time.Now(), func(i *meshv1.NetworkInfo) {
		i.RotationEnvelopes, i.RootKeys = [][]byte{evil}, []string{l.stranger.ID().String()}
	})
	wantKind(t, "rotation by a stranger", err, fault.Denied)
	_, err = l.NextInfo(l.signer, time.Now(), func(i *meshv1.NetworkInfo) { i.RootKeys = keys })
	wantKind(t, "new root keys without a rotation", err, fault.Denied)

	info := must[[]byte](t)(l.NextInfo(next, time.Now(), func(i *meshv1.NetworkInfo) { i.RotationEnvelopes, i.RootKeys = [][]byte{rotation}, keys }))
	if _, err := l.Adopt(nil, info); err != nil || !l.IsRoot(next.ID()) || l.IsRoot(l.root.ID()) {
		t.Fatal(err)
	}
	_, err = l.NextRoster(l.root, time.Now(), nil)
	wantKind(t, "roster by a root key that was rotated out", err, fault.Denied)
	back := must[*Network](t)(OpenDirectory(dir))
	if !back.IsRoot(next.ID()) || back.Roster().GetVersion() != 1 {
		t.Error("the rotation did not survive a restart")
	}
	roster := must[[]byte](t)(back.NextRoster(next, time.Now(), nil))
	for _, anchor := range [][]string{{l.root.ID().String(), l.second.ID().String()}, keys} {
		n := must[*Network](t)(NewMemory(nid[:], anchor))
		if _, err := n.Adopt(roster, info); err != nil || !n.IsRoot(next.ID()) {
			t.Errorf("anchored on %v: %v", anchor, err)
		}
		if err := n.AdoptGenesis(l.Genesis()); err != nil {
			t.Error(err)
		}
	}
}

func TestNetworkSurvivesARestart(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "network")
	_, err := OpenDirectory(dir)
	wantKind(t, "empty folder", err, fault.NotFound)
	l := newLab(t, dir)
	for _, k := range []*identity.Key{l.root, l.signer} {
		if _, err := l.Adopt(must[[]byte](t)(l.NextRoster(k, time.Now(), nil)), must[[]byte](t)(l.NextInfo(k, time.Now(), nil))); err != nil {
			t.Fatal(err)
		}
	}
	back := must[*Network](t)(OpenDirectory(dir))
	if back.ID() != l.ID() || back.Roster().GetVersion() != 3 || back.Info().GetSequence() != 3 || !bytes.Equal(back.NetworkKey(), l.NetworkKey()) {
		t.Errorf("came back as %v", back.Roster())
	}
	for name, want := range map[string]os.FileMode{keyFile: 0o600, genesisFile: 0o644, rosterFile: 0o644, infoFile: 0o644} {
		if fi, err := os.Stat(filepath.Join(dir, name)); err != nil || fi.Mode().Perm() != want {
			t.Errorf("%s: %v, %v", name, fi.Mode(), err)
		}
	}
	_, err = Create(dir, "again", l.root, nil, nil, nil)
	wantKind(t, "founding twice", err, fault.Conflict)

	path := filepath.Join(dir, rosterFile)
	data, _ := os.ReadFile(path)
	if err := os.WriteFile(path, data[:len(data)-1], 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenDirectory(dir); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("a damaged roster: %v", err)
	}
}

func TestAMemoryOfRemovalIsKeptEvenIfTheDiskRefuses(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "network")
	l := newLab(t, dir)
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(dir, nil, 0o600); err != nil { // a file where the folder was
		t.Fatal(err)
	}
	env := must[[]byte](t)(l.NextRoster(l.root, time.Now(), func(r *meshv1.Roster) { r.Members = r.Members[:3] }))
	changed, err := l.Adopt(env, nil)
	if _, ok := l.Member(l.worker.ID()); !changed || ok || fault.Reason(err) != "storage" {
		t.Errorf("%v, %v", changed, err)
	}
	if err := os.Remove(dir); err != nil {
		t.Fatal(err)
	}
	if err := l.Tick(); err != nil {
		t.Error(err)
	}
	if back := must[*Network](t)(OpenDirectory(dir)); back.Roster().GetVersion() != 2 {
		t.Error("not saved later")
	}
}

func TestJoinTokenRoundTrip(t *testing.T) {
	t.Parallel()
	l := newLab(t, "")
	nid := l.ID()
	token := &meshv1.JoinToken{NetworkId: nid[:], RootKeys: l.RootKeys(), Bootstraps: l.Info().GetBootstraps(), MinimumRosterVersion: 1, Secret: bytes.Repeat([]byte{7}, 32)}
	text := EncodeJoinToken(token)
	got, err := DecodeJoinToken(text + "\n")
	if err != nil || !proto.Equal(got, token) || strings.ContainsAny(text, "+/=") {
		t.Fatalf("%v: %v", got, err)
	}
	for _, s := range []string{"", "x", text[:20], text + "!", strings.Repeat("A", 1<<20)} {
		if _, err := DecodeJoinToken(s); err == nil || len(s) > 4 && strings.Contains(err.Error(), s) {
			t.Errorf("%.20q: %v", s, err)
		}
	}
	proof := JoinProof(token.Secret, l.worker.ID())
	if !CheckJoinProof(token.Secret, l.worker.ID(), proof) || CheckJoinProof(token.Secret, l.ork.ID(), proof) || CheckJoinProof(nil, l.ork.ID(), JoinProof(nil, l.ork.ID())) {
		t.Error("proofs")
	}
	dir := filepath.Join(t.TempDir(), "n")
	n := must[*Network](t)(Join(dir, got))
	if _, err := n.Adopt(l.RosterEnvelope(), l.InfoEnvelope()); err != nil {
		t.Fatal(err)
	}
	if err := n.AdoptGenesis(l.Genesis()); err != nil {
		t.Fatal(err)
	}
	if err := n.SetNetworkKey(l.NetworkKey()); err != nil {
		t.Fatal(err)
	}
	if back := must[*Network](t)(OpenDirectory(dir)); back.ID() != l.ID() || back.Roster() == nil {
		t.Error("the joined folder does not open")
	}
	if _, err := Join(dir, got); err != nil {
		t.Error(err)
	}
	other := newLab(t, "")
	oid := other.ID()
	token.NetworkId = oid[:]
	_, err = Join(dir, token)
	wantKind(t, "a folder of another network", err, fault.Conflict)
}
