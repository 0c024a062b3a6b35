package joining

import (
	"context"
	"crypto/rand"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	"github.com/cosmicac/cosmicac/pkg/trust"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

func key(t *testing.T) *identity.Key {
	t.Helper()
	k, err := identity.New(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

type office struct {
	*Desk
	t    *testing.T
	root *identity.Key
	path string
	now  time.Time
}

func newOffice(t *testing.T) *office {
	t.Helper()
	o := &office{t: t, root: key(t), path: filepath.Join(t.TempDir(), "requests.json"), now: time.Now()}
	network, err := trust.Create("", "lab", o.root, nil, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	o.open(network)
	return o
}

func (o *office) open(network *trust.Network) {
	o.t.Helper()
	var err error
	if o.Desk, err = Open(o.path, network, hclog.NewNullLogger(), func() time.Time { return o.now }); err != nil {
		o.t.Fatal(err)
	}
}

func (o *office) ask(k *identity.Key, from string, in *meshv1.RequestJoinRequest) (*meshv1.RequestJoinResponse, error) {
	return o.RequestJoin(mesh.WithCaller(context.Background(), mesh.Caller{ID: k.ID(), Class: meshv1.Class_CLASS_GUEST, Address: "/ip4/" + from + "/tcp/1"}), in)
}

func (o *office) list() []*meshv1.JoinRequest {
	o.t.Helper()
	answer, err := o.ListJoinRequests(context.Background(), &meshv1.ListJoinRequestsRequest{})
	if err != nil {
		o.t.Fatal(err)
	}
	return answer.GetRequests()
}

func want(t *testing.T, err error, kind fault.Kind) {
	t.Helper()
	if fault.KindOf(err) != kind {
		t.Fatalf("got %v, want kind %q", err, kind)
	}
}

func TestRequestIsKeptUntilTheRosterListsItsKey(t *testing.T) {
	t.Parallel()
	o, k := newOffice(t), key(t)
	in := &meshv1.RequestJoinRequest{Name: "worker-1", Roles: []meshv1.Role{meshv1.Role_ROLE_WORKER}, Proof: trust.JoinProof([]byte("secret"), k.ID())}
	asked := o.now
	for range 3 { // one of a key
		answer, err := o.ask(k, "192.0.2.1", in)
		want(t, err, "")
		if answer.GetAdmitted() || answer.GetRosterEnvelope() != nil {
			t.Fatal("admitted by asking")
		}
		if !answer.GetFirstSeenAt().AsTime().Equal(asked) {
			t.Errorf("the request stands since %s, not %s", asked, answer.GetFirstSeenAt().AsTime())
		}
		o.now = o.now.Add(time.Minute)
	}
	o.open(o.network) // a restart
	list := o.list()
	if len(list) != 1 || list[0].GetKey() != k.ID().String() || list[0].GetName() != "worker-1" || string(list[0].GetProof()) != string(in.GetProof()) ||
		list[0].GetRoles()[0] != meshv1.Role_ROLE_WORKER || list[0].GetRemoteAddress() != "/ip4/192.0.2.1/tcp/1" {
		t.Fatalf("%v", list)
	}
	if info, err := os.Stat(o.path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("file: %v, %v", info, err)
	}

	env, err := o.network.NextRoster(o.root, time.Now(), func(r *meshv1.Roster) {
		r.Members = append(r.Members, &meshv1.Member{Key: k.ID().String(), Name: "worker-1", Roles: in.GetRoles()})
	})
	want(t, err, "")
	_, err = o.network.Adopt(env, nil)
	want(t, err, "")
	answer, err := o.ask(k, "192.0.2.1", in)
	want(t, err, "")
	if !answer.GetAdmitted() || len(answer.GetRosterEnvelope()) == 0 || len(answer.GetGenesisEnvelope()) == 0 {
		t.Errorf("%v", answer)
	}
	if len(o.list()) != 0 {
		t.Error("still open after admission")
	}
}

func TestDeskIsBounded(t *testing.T) {
	t.Parallel()
	o := newOffice(t)
	in := &meshv1.RequestJoinRequest{Name: "x"}
	for i := range MaxPerPrefix {
		_, err := o.ask(key(t), "192.0.2.1", in)
		want(t, err, "")
		_ = i
		o.now = o.now.Add(time.Second)
	}
	_, err := o.ask(key(t), "192.0.2.1", in)
	want(t, err, fault.Exhausted)
	for i := len(o.list()); i < MaxRequests; i++ {
		_, err = o.ask(key(t), fmt.Sprintf("198.51.100.%d", i%250), in)
		want(t, err, "")
	}
	_, err = o.ask(key(t), "203.0.113.9", in)
	want(t, err, fault.Exhausted)
	o.now = o.now.Add(Life + time.Hour)
	_, err = o.ask(key(t), "203.0.113.9", in)
	want(t, err, "")
	if n := len(o.list()); n != 1 {
		t.Errorf("%d open after their life", n)
	}

	again := key(t)
	var refused error
	for range burst + 1 {
		if _, refused = o.ask(again, "203.0.113.77", in); refused != nil {
			break
		}
	}
	want(t, refused, fault.Exhausted)
}

func TestMalformedRequestsAreRefused(t *testing.T) {
	t.Parallel()
	o := newOffice(t)
	for _, in := range []*meshv1.RequestJoinRequest{
		{}, {Name: "Bad Name"}, {Name: "x", Proof: make([]byte, 65)}, {Name: "x", Roles: make([]meshv1.Role, 9)},
	} {
		_, err := o.ask(key(t), "192.0.2.1", in)
		want(t, err, fault.Invalid)
	}
	_, err := o.RequestJoin(context.Background(), &meshv1.RequestJoinRequest{Name: "x"})
	want(t, err, fault.Denied)
	_, err = o.DropJoinRequest(context.Background(), &meshv1.DropJoinRequestRequest{Key: "nobody"})
	want(t, err, fault.NotFound)
	k := key(t)
	_, err = o.ask(k, "192.0.2.1", &meshv1.RequestJoinRequest{Name: "x"})
	want(t, err, "")
	_, err = o.DropJoinRequest(context.Background(), &meshv1.DropJoinRequestRequest{Key: k.ID().String()})
	want(t, err, "")
	if len(o.list()) != 0 {
		t.Error("dropped and still listed")
	}
	if err := os.WriteFile(o.path, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err = Open(o.path, o.network, hclog.NewNullLogger(), nil)
	want(t, err, fault.Invalid)
}
