package trust

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/identity"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

// carried is a message after its way through a file.
func carried[M proto.Message](t testing.TB, m, into M) M {
	t.Helper()
	text := must[[]byte](t)(EncodeFile(m))
	if err := DecodeFile(append([]byte("\ufeff\n"), append(text, "-- \nsent by mail\n"...)...), into); err != nil {
		t.Fatal(err)
	}
	if !proto.Equal(m, into) {
		t.Fatal("a file does not hold what was written")
	}
	return into
}

// newcomer is a key that is not in the roster, and an entry for it.
func newcomer(t testing.TB, name string) (*identity.Key, *meshv1.Member) {
	k := newKey(t)
	return k, &meshv1.Member{Key: k.ID().String(), Name: name, Roles: []meshv1.Role{meshv1.Role_ROLE_WORKER}}
}

func TestAChangeIsSignedWhereTheRootKeyIsAndAppliedWhereTheNetworkIs(t *testing.T) {
	t.Parallel()
	l := newLab(t, "")
	comer, entry := newcomer(t, "rack-9")
	request := l.NewChangeRequest()
	request.SignRoster, request.Members = true, append(request.Members, entry)
	request.SignNetworkInfo, request.Bootstraps[0].Addresses = true, []string{"/ip4/192.0.2.7/tcp/4801"}

	// On the signing machine nothing but the file and the key is there.
	signed := must[*meshv1.NetworkRecords](t)(SignChange(carried(t, request, &meshv1.ChangeRequest{}), l.root, nil, time.Now()))
	if _, ok := l.Member(comer.ID()); ok {
		t.Fatal("in force before it is applied")
	}
	for _, again := range []bool{false, true} {
		if changed, err := l.Apply(carried(t, signed, &meshv1.NetworkRecords{})); err != nil || changed == again {
			t.Fatalf("apply: %v, %v", changed, err)
		}
	}
	if _, ok := l.Member(comer.ID()); !ok || l.Roster().GetVersion() != 2 || l.Info().GetBootstraps()[0].GetAddresses()[0] != "/ip4/192.0.2.7/tcp/4801" {
		t.Error("applied and not in force")
	}
}

func TestASignedChangeOfAnOlderStateIsRefusedInWords(t *testing.T) {
	t.Parallel()
	l, other := newLab(t, ""), newLab(t, "")
	request := l.NewChangeRequest()
	request.SignRoster, request.SignNetworkInfo = true, true
	late := must[*meshv1.NetworkRecords](t)(SignChange(request, l.root, nil, time.Now()))
	meanwhile := must[[]byte](t)(l.NextRoster(l.root, time.Now(), func(r *meshv1.Roster) { r.Members = r.Members[:3] }))
	if _, err := l.Adopt(meanwhile, nil); err != nil {
		t.Fatal(err)
	}
	_, err := l.Apply(late)
	wantKind(t, "built on version 1", err, fault.Conflict)
	if err == nil || !strings.Contains(err.Error(), "make the request anew") || l.Info().GetSequence() != 1 {
		t.Errorf("half of it was taken, or without words: %v", err)
	}
	_, err = l.Apply(&meshv1.NetworkRecords{GenesisEnvelope: late.GenesisEnvelope, NetworkInfoEnvelope: late.NetworkInfoEnvelope})
	wantKind(t, "the part that is not stale", err, "")
	_, err = other.Apply(late)
	wantKind(t, "another network's", err, fault.Denied)
}

func TestOnlyWhoMaySignAChangeSignsIt(t *testing.T) {
	t.Parallel()
	l := newLab(t, "")
	_, entry := newcomer(t, "rack-9")
	admit := l.NewChangeRequest()
	admit.SignRoster, admit.Members = true, append(admit.Members, entry)
	empower := l.NewChangeRequest()
	empower.SignRoster, empower.Members[3].SignsCertificates = true, true
	rotate := l.NewChangeRequest()
	rotate.RotateRootKeys = true
	fresh := []*identity.Key{newKey(t)}
	for _, c := range []struct {
		what  string
		ask   *meshv1.ChangeRequest
		key   *identity.Key
		fresh []*identity.Key
		want  fault.Kind
	}{
		{"an online signer admits", admit, l.signer, nil, ""},
		{"the second root key admits", admit, l.second, nil, ""},
		{"a member without the power", admit, l.ork, nil, fault.Denied},
		{"a stranger", admit, l.stranger, nil, fault.Denied},
		{"an online signer gives a power", empower, l.signer, nil, fault.Denied},
		{"a root key gives it", empower, l.root, nil, ""},
		{"an online signer rotates", rotate, l.signer, fresh, fault.Denied},
		{"a rotation to nothing", rotate, l.root, nil, fault.Invalid},
		{"a rotation", rotate, l.root, fresh, ""},
		{"nothing is asked for", l.NewChangeRequest(), l.root, nil, fault.Invalid},
	} {
		_, err := SignChange(c.ask, c.key, c.fresh, time.Now())
		wantKind(t, c.what, err, c.want)
	}
	forged := proto.CloneOf(admit)
	forged.Base.RosterEnvelope = must[[]byte](t)(SealRoster(l.stranger, l.Roster()))
	_, err := SignChange(forged, l.root, nil, time.Now())
	wantKind(t, "a base that no root key signed", err, fault.Denied)
}

func TestALostRootKeyIsReplacedByTheSecond(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	l := newLab(t, dir)
	nid := l.ID()
	agent := must[*Network](t)(NewMemory(nid[:], l.RootKeys())) // as born: it knows the old root keys alone
	request := l.NewChangeRequest()
	request.RotateRootKeys = true
	first, second := newKey(t), newKey(t)
	signed := must[*meshv1.NetworkRecords](t)(SignChange(request, l.second, []*identity.Key{first, second}, time.Now()))
	for _, n := range []*Network{l.Network, agent} {
		if _, err := n.AdoptEach(signed.GetRosterEnvelope(), signed.GetNetworkInfoEnvelope()); err != nil || !n.IsRoot(first.ID()) || !n.IsRoot(second.ID()) || n.IsRoot(l.root.ID()) || n.IsRoot(l.second.ID()) {
			t.Fatalf("the new root keys are not followed: %v, %v", n.RootKeys(), err)
		}
	}
	for _, old := range []*identity.Key{l.root, l.second} {
		r := proto.CloneOf(l.Roster())
		r.Version = 99
		_, err := agent.Adopt(must[[]byte](t)(SealRoster(old, r)), nil)
		wantKind(t, "a roster of an old root key", err, fault.Denied)
		again := l.NewChangeRequest()
		again.RotateRootKeys = true
		_, err = SignChange(again, old, []*identity.Key{newKey(t)}, time.Now())
		wantKind(t, "a rotation by an old root key", err, fault.Denied)
	}

	// A new member by the new key, an online signer on its base, and all of it
	// after a restart; then one more rotation, which the newborn follows too.
	comer, entry := newcomer(t, "rack-9")
	admit := l.NewChangeRequest()
	admit.SignRoster, admit.Members = true, append(admit.Members, entry)
	if _, err := l.Apply(must[*meshv1.NetworkRecords](t)(SignChange(admit, first, nil, time.Now()))); err != nil {
		t.Fatal(err)
	}
	back := must[*Network](t)(OpenDirectory(dir))
	if _, ok := back.Member(comer.ID()); !ok || !back.IsRoot(first.ID()) {
		t.Error("the restart forgot it")
	}
	if _, err := back.Adopt(must[[]byte](t)(back.NextRoster(l.signer, time.Now(), nil)), nil); err != nil {
		t.Errorf("the online signer lost its delegation: %v", err)
	}
	again := back.NewChangeRequest()
	again.RotateRootKeys = true
	last := newKey(t)
	if _, err := back.Apply(must[*meshv1.NetworkRecords](t)(SignChange(again, second, []*identity.Key{last}, time.Now()))); err != nil {
		t.Fatal(err)
	}
	for _, anchor := range [][]string{{l.root.ID().String(), l.second.ID().String()}, {first.ID().String(), second.ID().String()}, {last.ID().String()}} {
		n := must[*Network](t)(NewMemory(nid[:], anchor))
		if _, err := n.Adopt(back.RosterEnvelope(), back.InfoEnvelope()); err != nil || !n.IsRoot(last.ID()) {
			t.Errorf("anchored on %v: %v", anchor, err)
		}
		if err := n.AdoptGenesis(l.Genesis()); err != nil {
			t.Error(err)
		}
	}
}

func TestRecordsOfTheFutureAreRefused(t *testing.T) {
	t.Parallel()
	l := newLab(t, "")
	signAt := func(ahead time.Duration) ([]byte, []byte) {
		r := proto.CloneOf(l.Roster())
		r.Version += uint64(ahead/time.Minute) + 1
		r.IssuedAt = timestamppb.New(time.Now().Add(ahead))
		i := proto.CloneOf(l.Info())
		i.Sequence += uint64(ahead/time.Minute) + 1
		i.IssuedAt = r.IssuedAt
		return must[[]byte](t)(SealRoster(l.root, r)), must[[]byte](t)(SealNetworkInfo(l.root, i))
	}
	roster, info := signAt(20 * time.Minute)
	_, err := l.Adopt(roster, nil)
	wantKind(t, "a roster of in 20 minutes", err, fault.FailedPrecondition)
	_, err = l.Adopt(nil, info)
	wantKind(t, "a network info of in 20 minutes", err, fault.FailedPrecondition)
	roster, info = signAt(10 * time.Minute)
	if changed, err := l.Adopt(roster, info); !changed || err != nil {
		t.Errorf("a clock 10 minutes ahead: %v, %v", changed, err)
	}
	// A signing machine whose clock is far behind would sign what is over soon.
	request := l.NewChangeRequest()
	request.SignRoster = true
	_, err = SignChange(request, l.root, nil, time.Now().Add(-24*time.Hour))
	wantKind(t, "signed a day back", err, fault.FailedPrecondition)
}

func TestAnExpiredNetworkIsRenewedFromItsFiles(t *testing.T) {
	t.Parallel()
	l := newLab(t, "")
	later := time.Now().Add(2 * RosterLife)
	l.SetClock(func() time.Time { return later })
	if !l.Expired() {
		t.Fatal("not expired")
	}
	request := l.NewChangeRequest()
	request.SignRoster = true
	signed := must[*meshv1.NetworkRecords](t)(SignChange(request, l.root, nil, later))
	if _, err := l.Apply(signed); err != nil || l.Expired() || l.RosterNotAfter().Sub(later).Round(time.Hour) != RosterLife {
		t.Errorf("not renewed: %v, until %s", err, l.RosterNotAfter())
	}
}

func TestABackupFoundsTheNetworkElsewhere(t *testing.T) {
	t.Parallel()
	l, other := newLab(t, ""), newLab(t, "")
	file := carried(t, &meshv1.Backup{Records: l.Records()}, &meshv1.Backup{})
	dir := filepath.Join(t.TempDir(), "network")
	n := must[*Network](t)(Restore(dir, file.GetRecords(), nil))
	if n.ID() != l.ID() || n.NetworkKey() != nil {
		t.Error("another network, or a key from nowhere")
	}
	newer := must[[]byte](t)(l.NextRoster(l.root, time.Now(), nil))
	if _, err := l.Adopt(newer, nil); err != nil {
		t.Fatal(err)
	}
	for range 2 { // an older backup takes nothing back
		must[*Network](t)(Restore(dir, l.Records(), l.NetworkKey()))
		must[*Network](t)(Restore(dir, file.GetRecords(), nil))
	}
	back := must[*Network](t)(OpenDirectory(dir))
	if back.Roster().GetVersion() != 2 || !bytes.Equal(back.NetworkKey(), l.NetworkKey()) {
		t.Errorf("version %d", back.Roster().GetVersion())
	}
	_, err := Restore(dir, other.Records(), nil)
	wantKind(t, "another network's backup", err, fault.Conflict)
	mixed := l.Records()
	mixed.RosterEnvelope = other.RosterEnvelope()
	_, err = Restore(filepath.Join(t.TempDir(), "n"), mixed, nil)
	wantKind(t, "a backup with another network's roster", err, fault.Denied)
}

func TestFilesThatAreNotWhatTheySayAreRefused(t *testing.T) {
	t.Parallel()
	l := newLab(t, "")
	text := must[[]byte](t)(EncodeFile(&meshv1.Backup{Records: l.Records()}))
	for what, bad := range map[string][]byte{
		"empty": nil, "cut": text[:len(text)/2], "no PEM": []byte("hello"), "huge": make([]byte, MaxFileBytes+1),
		"damaged": bytes.Replace(text, []byte("\n"), []byte("\nAAAA"), 1),
	} {
		err := DecodeFile(bad, &meshv1.Backup{})
		if fault.KindOf(err) != fault.Invalid && fault.KindOf(err) != fault.TooLarge {
			t.Errorf("%s: %v", what, err)
		}
	}
	err := DecodeFile(text, &meshv1.ChangeRequest{})
	if err == nil || !strings.Contains(err.Error(), "COSMICAC NETWORK") {
		t.Errorf("a backup as a request: %v", err)
	}
	for _, name := range []string{"", "../root.key", "a/b", ".key", "root.key\x00", strings.Repeat("a", 80)} {
		_, err := EncodeFile(&meshv1.Backup{Records: l.Records(), Files: []*meshv1.BackupFile{{Name: name}}})
		wantKind(t, fmt.Sprintf("a private file %q", name), err, fault.Invalid)
	}
	_, err = EncodeFile(l.Roster())
	wantKind(t, "a roster as a file", err, fault.Internal)
}

// The bound that the operator's guide states.
func TestTheLargestRosterFitsWithAnOnlineSigner(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ members, bytes int }{{500, 112 << 10}, {maxMembers, MaxRosterBytes}} {
		l := newLab(t, "")
		request := l.NewChangeRequest()
		request.SignRoster = true
		for i := len(request.Members); i < c.members; i++ {
			_, entry := newcomer(t, fmt.Sprintf("worker-%09d", i))
			entry.AdmittedAt = timestamppb.Now()
			request.Members = append(request.Members, entry)
		}
		if _, err := l.Apply(must[*meshv1.NetworkRecords](t)(SignChange(carried(t, request, &meshv1.ChangeRequest{}), l.root, nil, time.Now()))); err != nil {
			t.Fatal(err)
		}
		env := must[[]byte](t)(l.NextRoster(l.signer, time.Now(), nil)) // with its base: twice as long
		if len(l.Roster().GetMembers()) != c.members || len(env) > c.bytes {
			t.Errorf("%d members: %d bytes, want at most %d", c.members, len(env), c.bytes)
		}
		if c.members == maxMembers {
			_, one := newcomer(t, "one-more")
			_, err := l.NextRoster(l.root, time.Now(), func(r *meshv1.Roster) { r.Members = append(r.Members, one) })
			wantKind(t, "one member more", err, fault.Invalid)
		}
	}
}

// The guide's way back for a network whose files are lost but one daemon's.
func TestAnyMembersFolderHoldsWhatABackupNeeds(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "network")
	l := newLab(t, dir)
	held := must[*Network](t)(OpenDirectory(dir))
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	must[*Network](t)(Restore(dir, held.Records(), held.NetworkKey()))
	if back := must[*Network](t)(OpenDirectory(dir)); back.ID() != l.ID() || back.NetworkKey() == nil {
		t.Error("not the same network")
	}
}

func TestKeptRecordsAreTakenAsFarAsTheyAreGood(t *testing.T) {
	t.Parallel()
	l := newLab(t, "")
	nid := l.ID()
	moved := must[[]byte](t)(l.NextInfo(l.signer, time.Now(), func(i *meshv1.NetworkInfo) { i.Bootstraps[0].Addresses = []string{"/ip4/192.0.2.7/tcp/1"} }))
	stale := proto.CloneOf(l.Roster())
	stale.IssuedAt, stale.NotAfter = timestamppb.New(time.Unix(1e9, 0)), timestamppb.New(time.Now().Add(-time.Hour))
	over := must[[]byte](t)(SealRoster(l.root, stale))
	for _, c := range []struct {
		what              string
		roster, info      []byte
		version, sequence uint64
		want              fault.Kind
	}{
		{"an online signer's info, known by the roster beside it", l.RosterEnvelope(), moved, 1, 2, ""},
		{"an expired roster beside a root key's info", over, l.InfoEnvelope(), 0, 1, fault.FailedPrecondition},
		{"a damaged info beside a roster", l.RosterEnvelope(), moved[:40], 1, 0, fault.Invalid},
		{"an info whose signer nobody knows", nil, moved, 0, 0, fault.Denied},
	} {
		n := must[*Network](t)(NewMemory(nid[:], l.RootKeys()))
		changed, err := n.AdoptEach(c.roster, c.info)
		wantKind(t, c.what, err, c.want)
		if n.Roster().GetVersion() != c.version || n.Info().GetSequence() != c.sequence || changed != (c.version+c.sequence > 0) {
			t.Errorf("%s: version %d, sequence %d, changed %v", c.what, n.Roster().GetVersion(), n.Info().GetSequence(), changed)
		}
	}
}
