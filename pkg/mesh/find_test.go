package mesh_test

import (
	"slices"
	"testing"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

func TestPeersAreFoundByTheDHTAlone(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	key, worker := l.member("boot", meshv1.Role_ROLE_BOOTSTRAP), l.member("worker", meshv1.Role_ROLE_WORKER)
	network := l.memory()
	// A bootstrap without a registry and without relay.
	b := l.start(key, func(o *mesh.Options) { o.Network, o.Role = network, meshv1.Role_ROLE_BOOTSTRAP })
	l.bootstrapAt(b.Node)
	w := l.start(worker, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_WORKER })
	ork := l.start(l.ork, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_ORK })
	eventually(t, "found by key", func() bool { return ping(within(t), ork.Node, w.ID()) == nil })
	app := l.start(l.app, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_APP_NODE })
	eventually(t, "found by role", func() bool {
		list, err := app.FindRole(within(t), meshv1.Role_ROLE_WORKER)
		return err == nil && len(list) == 1 && len(list[0].GetAddresses()) > 0
	})
	// With the bootstrap gone, members still find each other.
	if err := b.Close(within(t)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "found without the bootstrap", func() bool { return ping(within(t), app.Node, ork.ID()) == nil })
	wantKind(t, ping(within(t), app.Node, newKey(t).ID()), fault.Unreachable)
}

func TestNodeThatLeavesTakesItsCardBack(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	worker := l.member("worker", meshv1.Role_ROLE_WORKER)
	l.bootstrap()
	app := l.start(l.app, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_APP_NODE })
	w := l.start(worker, func(o *mesh.Options) { o.Role, o.Features = meshv1.Role_ROLE_WORKER, []string{"overlay"} })
	eventually(t, "its card is held", func() bool {
		c, err := app.FindCard(within(t), w.ID())
		return err == nil && len(c.GetFeatures()) == 1
	})
	if err := w.Close(within(t)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "its card is gone", func() bool {
		_, err := app.FindCard(within(t), w.ID())
		return fault.Is(err, fault.NotFound)
	})
}

func TestAgentFindsAnOrkThatHasMoved(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	worker := l.member("worker", meshv1.Role_ROLE_WORKER)
	b := l.bootstrap()
	before := l.start(l.ork, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_ORK })
	w := l.start(worker, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_WORKER })
	key, certificate := l.agent("j-0000000000001")
	agent := l.start(key, func(o *mesh.Options) {
		o.Network, o.Credential, o.DHT, o.Listen = l.bare(), mesh.Certificate(certificate), mesh.DHTOff, nil
		o.Bootstraps = []*meshv1.BootstrapAddress{{Key: b.ID().String(), Addresses: b.Addresses()}}
	})
	seed := before.Addresses()
	if err := ping(within(t), agent.Node, before.ID(), seed...); err != nil {
		t.Fatal(err)
	}
	if err := before.Close(within(t)); err != nil {
		t.Fatal(err)
	}
	after := l.start(l.ork, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_ORK })
	if slices.Equal(seed, after.Addresses()) {
		t.Fatal("ork did not move")
	}
	eventually(t, "found where it is now", func() bool { return ping(within(t), agent.Node, after.ID(), seed...) == nil })

	// Of nobody else does an agent learn anything.
	if _, err := agent.FindCard(within(t), w.ID()); !fault.Is(err, fault.NotFound) {
		t.Errorf("an agent finds a worker's card: %v", err)
	}
}
