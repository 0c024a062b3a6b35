package cards

import (
	"context"
	"crypto/rand"
	"strings"
	"testing"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	"github.com/cosmicac/cosmicac/pkg/trust"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

type desk struct {
	t        *testing.T
	network  *trust.Network
	registry *Registry
	now      time.Time
	worker   *identity.Key
	ork      *identity.Key
}

func newDesk(t *testing.T) *desk {
	t.Helper()
	d := &desk{t: t, now: time.Now()}
	d.worker, d.ork = d.key(), d.key()
	var err error
	d.network, err = trust.Create("", "lab", d.key(), nil, []*meshv1.Member{
		{Key: d.worker.ID().String(), Name: "worker", Roles: []meshv1.Role{meshv1.Role_ROLE_WORKER}},
		{Key: d.ork.ID().String(), Name: "ork", Roles: []meshv1.Role{meshv1.Role_ROLE_ORK}},
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	d.registry = New(d.network, func() time.Time { return d.now })
	return d
}

func (d *desk) key() *identity.Key {
	d.t.Helper()
	k, err := identity.New(rand.Reader)
	if err != nil {
		d.t.Fatal(err)
	}
	return k
}

func (d *desk) card(k *identity.Key, set func(*meshv1.Card)) []byte {
	d.t.Helper()
	id := d.network.ID()
	c := &meshv1.Card{NetworkId: id[:], Key: k.ID().String(), Role: meshv1.Role_ROLE_WORKER, Sequence: 1, TtlSeconds: 60}
	if set != nil {
		set(c)
	}
	env, err := trust.SealCard(k, c)
	if err != nil {
		d.t.Fatal(err)
	}
	return env
}

func (d *desk) put(k *identity.Key, env []byte) error {
	ctx := mesh.WithCaller(context.Background(), mesh.Caller{ID: k.ID(), Class: meshv1.Class_CLASS_MEMBER})
	_, err := d.registry.PutCard(ctx, &meshv1.PutCardRequest{CardEnvelope: env})
	return err
}

func (d *desk) as(class meshv1.Class) context.Context {
	return mesh.WithCaller(context.Background(), mesh.Caller{ID: d.key().ID(), Class: class})
}

func (d *desk) list(r *meshv1.ListCardsRequest) int {
	d.t.Helper()
	answer, err := d.registry.ListCards(d.as(meshv1.Class_CLASS_MEMBER), r)
	if err != nil {
		d.t.Fatal(err)
	}
	return len(answer.GetCardEnvelopes())
}

func want(t *testing.T, err error, kind fault.Kind) {
	t.Helper()
	if fault.KindOf(err) != kind {
		t.Fatalf("got %v, want kind %q", err, kind)
	}
}

func TestCardCountsForItsTimeFromReceipt(t *testing.T) {
	t.Parallel()
	d := newDesk(t)
	want(t, d.put(d.worker, d.card(d.worker, nil)), "")
	for _, r := range []*meshv1.ListCardsRequest{{}, {Role: meshv1.Role_ROLE_WORKER}, {Key: d.worker.ID().String()}} {
		if d.list(r) != 1 {
			t.Errorf("not listed for %v", r)
		}
	}
	if d.list(&meshv1.ListCardsRequest{Role: meshv1.Role_ROLE_ORK})+d.list(&meshv1.ListCardsRequest{JobId: "j-0000000000001"}) != 0 {
		t.Error("listed for another role or job")
	}
	d.now = d.now.Add(59 * time.Second)
	want(t, d.put(d.worker, d.card(d.worker, nil)), "") // the very same renews
	d.now = d.now.Add(59 * time.Second)
	if d.list(&meshv1.ListCardsRequest{}) != 1 {
		t.Error("forgotten although renewed")
	}
	d.now = d.now.Add(2 * time.Second)
	if d.list(&meshv1.ListCardsRequest{}) != 0 || d.registry.Len() != 0 {
		t.Error("listed after its time")
	}
}

func TestOnlyOnesOwnGoodCardIsTaken(t *testing.T) {
	t.Parallel()
	d := newDesk(t)
	other := d.key()
	want(t, d.put(other, d.card(d.worker, nil)), fault.Denied)
	want(t, d.put(other, d.card(other, nil)), fault.Denied) // claims a role it has not
	broken := d.card(d.worker, nil)
	broken[len(broken)-1] ^= 1
	if d.put(d.worker, broken) == nil {
		t.Error("a broken signature was taken")
	}
	want(t, d.put(d.worker, make([]byte, MaxCardBytes+1)), fault.TooLarge)
	_, err := d.registry.PutCard(context.Background(), &meshv1.PutCardRequest{CardEnvelope: d.card(d.worker, nil)})
	want(t, err, fault.Denied)

	agent := mesh.Caller{ID: other.ID(), Class: meshv1.Class_CLASS_AGENT, Certificate: &meshv1.JobCertificate{JobId: "j-0000000000001", AttemptId: "a-0000000000001"}}
	lie := d.card(other, func(c *meshv1.Card) {
		c.Role, c.JobId, c.AttemptId = meshv1.Role_ROLE_UNSPECIFIED, "j-0000000000002", "a-0000000000001"
	})
	want(t, d.registry.Put(agent, lie), fault.Denied)
	truth := d.card(other, func(c *meshv1.Card) {
		c.Role, c.JobId, c.AttemptId = meshv1.Role_ROLE_UNSPECIFIED, "j-0000000000001", "a-0000000000001"
	})
	want(t, d.registry.Put(agent, truth), "")
	if d.list(&meshv1.ListCardsRequest{JobId: "j-0000000000001"}) != 1 {
		t.Error("an agent's card is not listed by its job")
	}
}

func TestOlderCardNeverReplacesANewerOneOrATombstone(t *testing.T) {
	t.Parallel()
	d := newDesk(t)
	at := func(n uint64, tomb bool) []byte {
		return d.card(d.worker, func(c *meshv1.Card) { c.Sequence, c.Tombstone = n, tomb })
	}
	want(t, d.put(d.worker, at(5, false)), "")
	want(t, d.put(d.worker, at(4, false)), fault.Conflict)
	want(t, d.put(d.worker, d.card(d.worker, func(c *meshv1.Card) { c.Sequence, c.Version = 5, "other" })), fault.Conflict)
	want(t, d.put(d.worker, at(6, true)), "")
	if d.list(&meshv1.ListCardsRequest{}) != 0 {
		t.Error("listed after its tombstone")
	}
	want(t, d.put(d.worker, at(5, false)), fault.Conflict)
	want(t, d.put(d.worker, at(7, false)), "")
	if _, _, ok := d.registry.Get(d.worker.ID().String()); !ok {
		t.Error("a new card after a tombstone is not held")
	}
}

func TestALongListComesInPages(t *testing.T) {
	t.Parallel()
	d := newDesk(t)
	all := make(map[string]bool)
	for range 9 {
		k := d.key()
		want(t, d.registry.Put(mesh.Caller{ID: k.ID(), Class: meshv1.Class_CLASS_CLIENT}, d.card(k, func(c *meshv1.Card) { c.Role = meshv1.Role_ROLE_UNSPECIFIED })), "")
		all[k.ID().String()] = true
	}
	one, err := d.registry.ListCards(d.as(meshv1.Class_CLASS_MEMBER), &meshv1.ListCardsRequest{})
	if err != nil || len(one.GetCardEnvelopes()) != 9 || one.GetLastKey() != "" {
		t.Fatalf("in one page: %d cards, last key %q, %v", len(one.GetCardEnvelopes()), one.GetLastKey(), err)
	}
	d.registry.page = 2*len(one.GetCardEnvelopes()[0]) + 64
	after, pages := "", 0
	for {
		got, err := d.registry.ListCards(d.as(meshv1.Class_CLASS_MEMBER), &meshv1.ListCardsRequest{AfterKey: after})
		if err != nil {
			t.Fatal(err)
		}
		pages++
		for _, envelope := range got.GetCardEnvelopes() {
			card, err := trust.OpenCard(envelope)
			if err != nil || !all[card.GetKey()] {
				t.Fatalf("got %v twice or for nothing: %v", card, err)
			}
			delete(all, card.GetKey())
		}
		if after = got.GetLastKey(); after == "" {
			break
		}
	}
	if len(all) > 0 || pages != 5 {
		t.Errorf("%d pages, %d cards in none", pages, len(all))
	}
}

func TestRegistryIsBounded(t *testing.T) {
	t.Parallel()
	d := newDesk(t)
	d.registry.places, d.registry.reserve = 4, 1
	plain := func(k *identity.Key) []byte {
		return d.card(k, func(c *meshv1.Card) { c.Role = meshv1.Role_ROLE_UNSPECIFIED })
	}
	for range 3 {
		k := d.key()
		want(t, d.registry.Put(mesh.Caller{ID: k.ID(), Class: meshv1.Class_CLASS_CLIENT}, plain(k)), "")
	}
	k := d.key()
	want(t, d.registry.Put(mesh.Caller{ID: k.ID(), Class: meshv1.Class_CLASS_CLIENT}, plain(k)), fault.Exhausted)
	want(t, d.put(d.worker, d.card(d.worker, nil)), "") // members have a place left
	want(t, d.put(k, plain(k)), fault.Exhausted)
	d.now = d.now.Add(2 * time.Minute)
	want(t, d.put(k, plain(k)), "")

	var refused error
	for range putBurst + 1 {
		if refused = d.put(k, plain(k)); refused != nil {
			break
		}
	}
	want(t, refused, fault.Exhausted)
	if !strings.Contains(refused.Error(), "a second") {
		t.Error(refused)
	}
}

func TestAgentLearnsWhereOrkIsAndOfNobodyElse(t *testing.T) {
	t.Parallel()
	d := newDesk(t)
	if err := d.put(d.worker, d.card(d.worker, nil)); err != nil {
		t.Fatal(err)
	}
	if err := d.put(d.ork, d.card(d.ork, func(c *meshv1.Card) { c.Role = meshv1.Role_ROLE_ORK })); err != nil {
		t.Fatal(err)
	}
	for _, r := range []*meshv1.ListCardsRequest{{}, {Role: meshv1.Role_ROLE_WORKER}, {Key: d.worker.ID().String()}, {JobId: "j-0000000000001"}} {
		if _, err := d.registry.ListCards(d.as(meshv1.Class_CLASS_AGENT), r); fault.KindOf(err) != fault.Denied {
			t.Errorf("an agent asks for %v: %v", r, err)
		}
	}
	for key, want := range map[string]int{"": 1, d.ork.ID().String(): 1, d.worker.ID().String(): 0} {
		answer, err := d.registry.ListCards(d.as(meshv1.Class_CLASS_AGENT), &meshv1.ListCardsRequest{Role: meshv1.Role_ROLE_ORK, Key: key})
		if err != nil || len(answer.GetCardEnvelopes()) != want {
			t.Errorf("an agent asks for ork with key %q: %d cards, %v", key, len(answer.GetCardEnvelopes()), err)
		}
	}
}
