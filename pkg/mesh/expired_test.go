package mesh_test

import (
	"testing"
	"time"

	"github.com/cosmicac/cosmicac/pkg/mesh"
	"github.com/cosmicac/cosmicac/pkg/trust"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// A daemon that slept past the roster's end is renewed by the next member that dials
// it, also when the roster is larger than a stranger may send.
func TestAMemberDialedAfterItsLargeRosterExpiredIsRenewed(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.edit(func(r *meshv1.Roster) {
		for i := range 150 {
			r.Members = append(r.Members, &meshv1.Member{Key: newKey(t).ID().String(), Name: "n-" + itoa(i),
				Roles: []meshv1.Role{meshv1.Role_ROLE_WORKER}, AdmittedAt: timestamppb.Now()})
		}
	})
	// All of it is later, and one node has not heard of the renewal.
	later := func() time.Time { return time.Now().Add(trust.RosterLife + time.Hour) }
	held, fresh := l.memory(), l.bare()
	for _, n := range []*trust.Network{held, fresh, l.founder} {
		n.SetClock(later)
	}
	renewed, err := l.founder.NextRoster(l.root, later(), func(*meshv1.Roster) {})
	if err == nil {
		_, err = l.founder.Adopt(renewed, nil)
	}
	if err == nil {
		err = fresh.AdoptGenesis(l.founder.Genesis())
	}
	if err == nil {
		_, err = fresh.Adopt(renewed, l.founder.InfoEnvelope())
	}
	if err != nil {
		t.Fatal(err)
	}
	slept := l.start(l.ork, func(o *mesh.Options) { o.Network = held })
	if !held.Expired() {
		t.Fatal("the roster of the test has not expired")
	}
	awake := l.start(l.app, func(o *mesh.Options) { o.Network, o.Listen = fresh, nil })
	release := awake.Keep(slept.ID(), slept.Addresses()...)
	defer release()
	eventually(t, "the expired roster is renewed", func() bool { return !held.Expired() })
	if err := ping(within(t), awake.Node, slept.ID()); err != nil {
		t.Error(err)
	}
}
