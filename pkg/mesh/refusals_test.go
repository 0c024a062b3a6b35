package mesh_test

import (
	"sync/atomic"
	"testing"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

func TestTheAgentOfADeletedJobIsRefusedWithoutAlarmAndAStrangerIsNot(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	var deleted atomic.Bool
	ork := l.start(l.ork, func(o *mesh.Options) {
		o.Role = meshv1.Role_ROLE_ORK
		o.Vet = func(c mesh.Caller) error {
			if deleted.Load() && c.Certificate != nil {
				return fault.New(fault.Denied, "attempt %s is over; its certificate is void", c.Certificate.GetAttemptId())
			}
			return nil
		}
	})
	key, certificate := l.agent("j-0000000000001")
	agent := l.start(key, func(o *mesh.Options) {
		o.Network, o.Credential, o.Listen, o.DHT = l.bare(), mesh.Certificate(certificate), nil, mesh.DHTOff
	})
	eventually(t, "the agent is admitted", func() bool { return ping(within(t), agent.Node, ork.ID(), ork.Addresses()...) == nil })

	deleted.Store(true)
	ork.Revet()
	eventually(t, "the agent is cut off", func() bool { return !ork.Connected(agent.ID()) })
	eventually(t, "it dials again and is told that its attempt is over", func() bool {
		err := ping(within(t), agent.Node, ork.ID(), ork.Addresses()...)
		return fault.Is(err, fault.Denied) && agent.log.has("refused by peer", "is over")
	})
	// The line comes after the count.
	eventually(t, "the refusal is in the log", func() bool { return ork.log.has("refused peer", agent.ID().String(), "is over") })
	if r := ork.Refusals(); r.Count != 0 {
		t.Errorf("the agent of a deleted job raises an alarm: %+v", r)
	}

	stranger := l.start(newKey(t), func(o *mesh.Options) { o.DHT = mesh.DHTOff })
	if err := ping(within(t), stranger.Node, ork.ID(), ork.Addresses()...); !fault.Is(err, fault.Denied) {
		t.Fatal(err)
	}
	eventually(t, "a stranger raises one", func() bool { r := ork.Refusals(); return r.Count > 0 && r.Key == stranger.ID() })
}
