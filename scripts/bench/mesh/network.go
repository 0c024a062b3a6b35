package main

import (
	"context"
	"crypto/rand"
	"fmt"
	"time"

	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	"github.com/cosmicac/cosmicac/pkg/mesh/cards"
	"github.com/cosmicac/cosmicac/pkg/trust"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// Where a node listens, by transport.
var listenOn = map[string]string{"TCP": "/ip4/127.0.0.1/tcp/0", "QUIC": "/ip4/127.0.0.1/udp/0/quic-v1"}

// founding is a network as its operator holds it, in memory.
type founding struct {
	root    *identity.Key
	founder *trust.Network
	members []*identity.Key
	roles   []meshv1.Role // of the members
}

// found makes a network with a member of each role, in this order.
func found(roles ...meshv1.Role) (*founding, error) {
	root, err := identity.New(rand.Reader)
	if err != nil {
		return nil, err
	}
	f := &founding{root: root, roles: roles}
	var list []*meshv1.Member
	for i, role := range roles {
		k, err := identity.New(rand.Reader)
		if err != nil {
			return nil, err
		}
		f.members = append(f.members, k)
		list = append(list, &meshv1.Member{Key: k.ID().String(), Name: fmt.Sprintf("member-%d", i), Roles: []meshv1.Role{role},
			AdmittedAt: timestamppb.Now(), SignsCertificates: role == meshv1.Role_ROLE_ORK})
	}
	f.founder, err = trust.Create("", "bench", root, nil, list, nil)
	return f, err
}

// bootstrapsAt tells the network where its bootstraps are.
func (f *founding) bootstrapsAt(list []*meshv1.BootstrapAddress) error {
	env, err := f.founder.NextInfo(f.root, time.Now(), func(i *meshv1.NetworkInfo) { i.Bootstraps = list })
	if err == nil {
		_, err = f.founder.Adopt(nil, env)
	}
	return err
}

// NodeSpec is one node that a process of the bench is to start.
type NodeSpec struct {
	Key, NetworkID        []byte
	Roots                 []string
	Genesis, Roster, Info []byte // members
	NetworkKey            []byte // members
	Certificate           []byte // agents
	Role                  meshv1.Role
	Listen                []string
	DHT                   mesh.DHTMode
	GRPCOnly              bool
}

// member is the spec of a member of the founding.
func (f *founding) member(i int, listen ...string) (*NodeSpec, error) {
	s, err := f.spec(f.members[i])
	if err != nil {
		return nil, err
	}
	s.Genesis, s.Roster, s.Info = f.founder.Genesis(), f.founder.RosterEnvelope(), f.founder.InfoEnvelope()
	s.Role, s.Listen, s.DHT, s.NetworkKey = f.roles[i], listen, mesh.DHTServer, f.founder.NetworkKey()
	return s, nil
}

// agent is the spec of a node with a new key and a certificate signed by a member.
func (f *founding) agent(signer *identity.Key, number int) (*NodeSpec, error) {
	k, err := identity.New(rand.Reader)
	if err != nil {
		return nil, err
	}
	s, err := f.spec(k)
	if err != nil {
		return nil, err
	}
	s.Certificate, err = trust.SealCertificate(signer, &meshv1.JobCertificate{
		NetworkId: s.NetworkID, Key: k.ID().String(), JobId: fmt.Sprintf("j-%013d", number), ReplicaId: fmt.Sprintf("r-%013d", number),
		AttemptId: fmt.Sprintf("a-%013d", number), RackId: "rk-0000000000001",
		NotBefore: timestamppb.New(time.Now().Add(-time.Hour)), NotAfter: timestamppb.New(time.Now().Add(24 * time.Hour)), Epoch: 1,
	})
	return s, err
}

func (f *founding) spec(k *identity.Key) (*NodeSpec, error) {
	raw, err := k.Marshal()
	id := f.founder.ID()
	return &NodeSpec{Key: raw, NetworkID: id[:], Roots: f.founder.RootKeys()}, err
}

// start runs the node in this process. It answers Ping and streams of bulk.
func (s *NodeSpec) start() (*mesh.Node, error) {
	key, err := identity.Unmarshal(s.Key)
	if err != nil {
		return nil, err
	}
	network, err := trust.NewMemory(s.NetworkID, s.Roots)
	if err != nil {
		return nil, err
	}
	o := mesh.Options{Key: key, Network: network, Role: s.Role, Listen: s.Listen, DHT: s.DHT, GRPCOnly: s.GRPCOnly}
	if s.Certificate != nil {
		o.Credential = mesh.Certificate(s.Certificate)
	} else {
		if err := network.AdoptGenesis(s.Genesis); err != nil {
			return nil, err
		}
		if _, err := network.Adopt(s.Roster, s.Info); err != nil {
			return nil, err
		}
		if err := network.SetNetworkKey(s.NetworkKey); err != nil {
			return nil, err
		}
	}
	bootstrap := s.Role == meshv1.Role_ROLE_BOOTSTRAP
	o.Relay, o.AllowGuests = bootstrap, bootstrap
	n, err := mesh.New(context.Background(), o)
	if err != nil {
		return nil, err
	}
	meshv1.RegisterNodeServer(n, &nodeService{network: network})
	if bootstrap {
		meshv1.RegisterCardsServer(n, cards.New(network, nil))
	}
	n.Handle(bulkName, &meshv1.Right{Members: true}, func(_ context.Context, st *mesh.Stream) { serveBulk(st) })
	return n, n.Start(context.Background())
}

// nodeService is what the subjects that speak protobuf answer with.
type nodeService struct {
	meshv1.UnimplementedNodeServer
	network *trust.Network
}

// Ping answers with the payload.
func (s *nodeService) Ping(_ context.Context, r *meshv1.PingRequest) (*meshv1.PingResponse, error) {
	return &meshv1.PingResponse{Payload: r.GetPayload()}, nil
}

// PutNetwork takes what other nodes spread.
func (s *nodeService) PutNetwork(_ context.Context, r *meshv1.PutNetworkRequest) (*meshv1.PutNetworkResponse, error) {
	if _, err := s.network.Adopt(r.GetRosterEnvelope(), r.GetNetworkInfoEnvelope()); err != nil {
		return nil, err
	}
	return &meshv1.PutNetworkResponse{RosterVersion: s.network.Roster().GetVersion(), NetworkInfoSequence: s.network.Info().GetSequence()}, nil
}
