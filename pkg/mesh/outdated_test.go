package mesh_test

import (
	"bytes"
	"sync"
	"testing"

	"github.com/cosmicac/cosmicac/pkg/mesh"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	"github.com/hashicorp/go-hclog"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// halting stops who logs a line with the words until it is let go.
type halting struct {
	words       []byte
	halted, let chan struct{}
	once        sync.Once
}

func (h *halting) Write(b []byte) (int, error) {
	if bytes.Contains(b, h.words) {
		h.once.Do(func() {
			close(h.halted)
			<-h.let
		})
	}
	return len(b), nil
}

// A key that signs itself into the roster while its refusal is on the way is not held to
// the refusal: neither the call that met it nor the next one.
func TestWhoSignsItselfInWhileItIsRefusedIsAdmitted(t *testing.T) {
	t.Parallel()
	for name, listen := range transports {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t)
			boot := l.start(l.member("boot", meshv1.Role_ROLE_BOOTSTRAP), func(o *mesh.Options) {
				o.Role, o.Relay, o.AllowGuests, o.Listen = meshv1.Role_ROLE_BOOTSTRAP, true, true, listen
			})
			key := newKey(t)
			refused := &halting{words: []byte("refused by peer"), halted: make(chan struct{}), let: make(chan struct{})}
			operator := l.start(key, func(o *mesh.Options) {
				o.Role, o.Listen, o.DHT = meshv1.Role_ROLE_OPERATOR, nil, mesh.DHTOff
				o.Log = hclog.New(&hclog.LoggerOptions{Output: refused, Level: hclog.Warn})
			})
			calls := make(chan error, 2)
			call := func() { calls <- ping(within(t), operator.Node, boot.ID(), boot.Addresses()...) }
			go call()
			<-refused.halted
			l.edit(func(r *meshv1.Roster) {
				r.Members = append(r.Members, &meshv1.Member{Key: key.ID().String(), Name: "operator",
					Roles: []meshv1.Role{meshv1.Role_ROLE_OPERATOR}, AdmittedAt: timestamppb.Now()})
			})
			if _, err := operator.Network().Adopt(l.founder.RosterEnvelope(), nil); err != nil {
				t.Fatal(err)
			}
			go call()
			close(refused.let)
			for range 2 {
				if err := <-calls; err != nil {
					t.Error(err)
				}
			}
		})
	}
}
