package mesh_test

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	"github.com/cosmicac/cosmicac/pkg/mesh/rpc"
	agentv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
	appv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/app/v1"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
	"github.com/libp2p/go-libp2p/core/peer"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
)

var everyService = []grpc.ServiceDesc{
	meshv1.Node_ServiceDesc, meshv1.Cards_ServiceDesc, meshv1.Joining_ServiceDesc,
	appv1.ApiKeys_ServiceDesc, appv1.Usage_ServiceDesc, appv1.Identity_ServiceDesc, agentv1.Agent_ServiceDesc, agentv1.Gateways_ServiceDesc,
	orkv1.Jobs_ServiceDesc, orkv1.Racks_ServiceDesc, orkv1.Agents_ServiceDesc, orkv1.Revocations_ServiceDesc, orkv1.Endpoints_ServiceDesc, orkv1.Quotas_ServiceDesc, orkv1.Volumes_ServiceDesc,
	workerv1.Rack_ServiceDesc,
}

// Everybody tries everything: each class and each role calls every method of every
// service, and gets past the door where the table of rights says so and nowhere
// else.
func TestNobodyGetsPastTheTableOfRights(t *testing.T) {
	t.Parallel()
	declared := 0
	protoregistry.GlobalFiles.RangeFiles(func(f protoreflect.FileDescriptor) bool {
		if strings.HasPrefix(string(f.Package()), "cosmicac.") {
			declared += f.Services().Len()
		}
		return true
	})
	if declared != len(everyService) {
		t.Errorf("%d services are declared, this test walks %d", declared, len(everyService))
	}

	l := newLab(t)
	// No handler stands behind the door: who gets past it breaks it, and is told so.
	open := func(s *spot) {
		for _, d := range everyService {
			if d.ServiceName != meshv1.Node_ServiceDesc.ServiceName {
				s.RegisterService(&d, nil)
			}
		}
	}
	ork := l.start(l.ork, func(o *mesh.Options) {
		o.Role, o.VerifyJoin = meshv1.Role_ROLE_ORK, func(context.Context, peer.ID, string) error { return nil }
	}, open)
	boot := l.start(l.member("boot", meshv1.Role_ROLE_BOOTSTRAP), func(o *mesh.Options) { o.Role, o.AllowGuests = meshv1.Role_ROLE_BOOTSTRAP, true }, open)
	agentKey, certificate := l.agent("j-0000000000001")
	agent := l.start(agentKey, func(o *mesh.Options) { o.Credential, o.DHT = mesh.Certificate(certificate), mesh.DHTOff }, open)

	stranger := func(c mesh.Credential) func(*mesh.Options) {
		return func(o *mesh.Options) { o.Network, o.Credential, o.DHT, o.Listen = l.bare(), c, mesh.DHTOff, nil }
	}
	otherKey, otherCertificate := l.agent("j-0000000000001")
	clientKey := newKey(t)
	type who struct {
		node  *spot
		to    *spot
		class meshv1.Class
		role  meshv1.Role
	}
	everybody := map[string]who{
		"a guest":         {l.start(newKey(t), stranger(mesh.Guest())), boot, meshv1.Class_CLASS_GUEST, 0},
		"a joining agent": {l.start(newKey(t), stranger(mesh.JoinToken("token", ork.ID()))), ork, meshv1.Class_CLASS_JOINING, 0},
		"an agent":        {l.start(otherKey, stranger(mesh.Certificate(otherCertificate))), ork, meshv1.Class_CLASS_AGENT, 0},
		"a client":        {l.start(clientKey, stranger(mesh.Grant(l.grant(clientKey.ID(), agent.ID(), "j-0000000000001")))), agent, meshv1.Class_CLASS_CLIENT, 0},
	}
	for number, name := range meshv1.Role_name {
		if number == 0 {
			continue
		}
		role := meshv1.Role(number)
		node := l.start(l.member("m-"+strings.ToLower(strings.ReplaceAll(strings.TrimPrefix(name, "ROLE_"), "_", "-")), role), nil)
		everybody["a member of "+name] = who{node, ork, meshv1.Class_CLASS_MEMBER, role}
	}
	allowed := func(w who, r *meshv1.Right) bool {
		switch w.class {
		case meshv1.Class_CLASS_GUEST:
			return r.GetGuests()
		case meshv1.Class_CLASS_JOINING:
			return r.GetJoining()
		case meshv1.Class_CLASS_AGENT:
			return r.GetAgents()
		case meshv1.Class_CLASS_CLIENT:
			return r.GetClients()
		}
		return r.GetMembers() || slices.Contains(r.GetRoles(), w.role)
	}
	for name, w := range everybody {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tried, past := 0, 0
			cc := w.node.Client(w.to.ID(), w.to.Addresses()...)
			check := func(method string, err error) {
				t.Helper()
				tried++
				got := !fault.Is(err, fault.Denied)
				if got {
					past++
				}
				if fault.Is(err, fault.Unreachable) || fault.Is(err, fault.Timeout) {
					t.Fatalf("%s: %v", method, err)
				}
				if want := allowed(w, rpc.RightOf(method)); got != want {
					t.Errorf("%s: got past the door: %v, the table says %v (%v)", method, got, want, err)
				}
			}
			for _, d := range everyService {
				for _, m := range d.Methods {
					method := "/" + d.ServiceName + "/" + m.MethodName
					ctx, cancel := context.WithTimeout(context.Background(), patience)
					check(method, cc.Invoke(ctx, method, &meshv1.PingRequest{}, &meshv1.PingResponse{}))
					cancel()
				}
				for _, s := range d.Streams {
					method := "/" + d.ServiceName + "/" + s.StreamName
					ctx, cancel := context.WithTimeout(context.Background(), patience)
					stream, err := cc.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, method)
					if err == nil {
						_ = stream.SendMsg(&meshv1.PingRequest{})
						_ = stream.CloseSend()
						err = stream.RecvMsg(&meshv1.PingResponse{})
					}
					check(method, err)
					cancel()
				}
			}
			if tried < 30 || past == 0 || past == tried {
				t.Errorf("%d methods tried, %d let through: this test does not tell", tried, past)
			}
		})
	}
}
