package cli

import (
	"context"
	crand "crypto/rand"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/id"
	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	"github.com/cosmicac/cosmicac/pkg/trust"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

// follower is a daemon or an agent that does nothing but belong to the network.
type follower struct {
	meshv1.UnimplementedNodeServer
	network *trust.Network
	node    *mesh.Node
}

func (f *follower) PutNetwork(_ context.Context, r *meshv1.PutNetworkRequest) (*meshv1.PutNetworkResponse, error) {
	if _, err := f.network.Adopt(r.GetRosterEnvelope(), r.GetNetworkInfoEnvelope()); err != nil {
		return nil, fault.ToGRPC(err)
	}
	return &meshv1.PutNetworkResponse{RosterVersion: f.network.Roster().GetVersion(), NetworkInfoSequence: f.network.Info().GetSequence()}, nil
}

// follow starts one that knows the root keys and bootstraps of founding, as a seed
// or a token names them, and nothing newer.
func (s *site) follow(o mesh.Options) *follower {
	s.Helper()
	born := must[*trust.Network](s.T)(trust.OpenDirectory(filepath.Join(s.path("born"), "network")))
	id := born.ID()
	f := &follower{network: must[*trust.Network](s.T)(trust.NewMemory(id[:], born.RootKeys()))}
	o.Network, o.Bootstraps, o.Listen = f.network, born.Info().GetBootstraps(), []string{s.at(0)}
	f.node = must[*mesh.Node](s.T)(mesh.New(context.Background(), o))
	s.Cleanup(func() { _ = f.node.Close(context.Background()) })
	meshv1.RegisterNodeServer(f.node, f)
	if err := f.node.Start(context.Background()); err != nil {
		s.Fatal(err)
	}
	return f
}

func (f *follower) linked(s *site) bool {
	for _, b := range s.bootstraps {
		if !f.node.Connected(b.key.ID()) {
			return false
		}
	}
	return true
}

func TestDaemonsAndAgentsFollowNewRootKeysAndMovedBootstraps(t *testing.T) {
	t.Parallel()
	s := found(t, 2).start()
	s.ok("network", "restore", s.path("founding"), "--state", s.path("born"))
	newKey := func() *identity.Key { return must[*identity.Key](t)(identity.New(crand.Reader)) }
	ork, worker, agent := newKey(), newKey(), newKey()
	s.ok("network", "admit", ork.ID().String(), "--name", "ork-1", "--roles", "ork")
	s.ok("network", "admit", worker.ID().String(), "--name", "worker-1", "--roles", "worker")
	network := must[*trust.Network](t)(trust.OpenDirectory(filepath.Join(s.operator(), "network")))
	nid := network.ID()
	certificate := must[[]byte](t)(trust.SealCertificate(ork, &meshv1.JobCertificate{NetworkId: nid[:], Key: agent.ID().String(), JobId: id.New(id.Job), ReplicaId: id.New(id.Replica),
		AttemptId: id.New(id.Attempt), NotBefore: timestamppb.Now(), NotAfter: timestamppb.New(time.Now().Add(time.Hour))}))
	daemon := s.follow(mesh.Options{Key: worker, Role: meshv1.Role_ROLE_WORKER, DHT: mesh.DHTServer})
	guest := s.follow(mesh.Options{Key: agent, Credential: mesh.Certificate(certificate)})
	followers := []*follower{daemon, guest}
	for _, f := range followers {
		eventually(t, "both bootstraps are linked", func() bool { return f.linked(s) })
	}

	// The second bootstrap is away while the root keys change; nobody who signed
	// it is there when it comes back.
	s.stop(1)
	s.ok("network", "rotate-root")
	root := must[*identity.Key](t)(identity.Load(filepath.Join(s.operator(), "root-2.key")))
	for _, f := range followers {
		eventually(t, "the new root keys are followed", func() bool { return f.network.IsRoot(root.ID()) && f.network.Roster().GetVersion() == 4 })
	}
	s.run(1, 4802)
	eventually(t, "the late bootstrap learns from the others", func() bool {
		n := s.holds(1)
		return n != nil && n.IsRoot(root.ID()) && n.Roster().GetVersion() == 4
	})

	// The first bootstrap moves; nobody but the operator is told by hand.
	s.stop(0)
	s.run(0, 4811)
	s.ok("network", "bootstraps", "set", "bootstrap-1", s.at(4811))
	for _, f := range followers {
		eventually(t, "the new place is known and linked", func() bool {
			return slices.Equal(f.network.Info().GetBootstraps()[0].GetAddresses(), []string{s.at(4811)}) && f.linked(s)
		})
	}

	// Nothing goes backwards, whoever brings it.
	old := must[*trust.Network](t)(trust.OpenDirectory(filepath.Join(s.path("born"), "network")))
	call, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	answer, err := meshv1.NewNodeClient(guest.node.Client(s.bootstraps[0].key.ID())).PutNetwork(call, &meshv1.PutNetworkRequest{RosterEnvelope: old.RosterEnvelope(), NetworkInfoEnvelope: old.InfoEnvelope()})
	if err != nil || answer.GetRosterVersion() != 4 || answer.GetNetworkInfoSequence() != 3 {
		t.Errorf("an old roster: %v, %v", answer, err)
	}

	s.ok("network", "revoke", "worker-1")
	eventually(t, "the revoked daemon is cut", func() bool {
		return !daemon.node.Connected(s.bootstraps[0].key.ID()) && !daemon.node.Connected(s.bootstraps[1].key.ID())
	})
	if _, err := meshv1.NewNodeClient(daemon.node.Client(s.bootstraps[0].key.ID())).Ping(call, &meshv1.PingRequest{}); !fault.Is(err, fault.Denied) {
		t.Errorf("the revoked daemon calls and gets %v", err)
	}
	eventually(t, "the agent keeps its links", func() bool { return guest.linked(s) })
}
