package api_test

import (
	"context"
	"crypto/rand"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/identity"
	agentv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	"github.com/cosmicac/cosmicac/services/app-node/internal/api"
)

// fakeGateway answers as an agent would, out of memory.
type fakeGateway struct {
	agentv1.UnimplementedGatewaysServer
	mu sync.Mutex
	is *agentv1.Gateway
}

func (f *fakeGateway) GetGateway(context.Context, *agentv1.GetGatewayRequest) (*agentv1.GetGatewayResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return &agentv1.GetGatewayResponse{Gateway: f.is}, nil
}

func (f *fakeGateway) OpenGateway(_ context.Context, r *agentv1.OpenGatewayRequest) (*agentv1.OpenGatewayResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.is = &agentv1.Gateway{Open: true, Port: r.GetPort(), PublicKey: "GATEWAY\nKEY", Address: "10.130.7.1", Mtu: 1280}
	return &agentv1.OpenGatewayResponse{Gateway: f.is}, nil
}

func (f *fakeGateway) CloseGateway(context.Context, *agentv1.CloseGatewayRequest) (*agentv1.CloseGatewayResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.is = &agentv1.Gateway{}
	return &agentv1.CloseGatewayResponse{}, nil
}

func (f *fakeGateway) AddGatewayPeer(_ context.Context, r *agentv1.AddGatewayPeerRequest) (*agentv1.AddGatewayPeerResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if r.GetName() == "bad" {
		return nil, fault.ToGRPC(fault.New(fault.Invalid, "name is bad").With(fault.Detail{Field: "name", Rule: "must be good"}))
	}
	f.is.Peers = append(f.is.Peers, &agentv1.GatewayPeer{Name: r.GetName(), UserId: r.GetUserId(), PublicKey: r.GetPublicKey(), Address: "10.130.7.2", LastHandshake: timestamppb.New(time.Unix(1e9, 0))})
	return &agentv1.AddGatewayPeerResponse{Gateway: f.is}, nil
}

func (f *fakeGateway) RemoveGatewayPeer(_ context.Context, r *agentv1.RemoveGatewayPeerRequest) (*agentv1.RemoveGatewayPeerResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.is.GetPeers()) == 0 || f.is.Peers[0].GetName() != r.GetName() {
		return nil, fault.ToGRPC(fault.New(fault.NotFound, "the gateway has no peer %q", r.GetName()))
	}
	f.is.Peers = f.is.Peers[1:]
	return &agentv1.RemoveGatewayPeerResponse{Gateway: f.is}, nil
}

func TestGatewayIsOpenedOnADeclaredPortOnlyAndByItsOwnersOnly(t *testing.T) {
	t.Parallel()
	agent := &fakeGateway{is: &agentv1.Gateway{}}
	conn := serveGRPC(t, func(r grpc.ServiceRegistrar) { agentv1.RegisterGatewaysServer(r, agent) })
	key := must(identity.New(rand.Reader)).ID().String()
	l := newLab(t, func(o *api.Options) {
		o.Agent = func(asked string, _ []string) (grpc.ClientConnInterface, error) {
			if asked != key {
				t.Errorf("agent %s was asked", asked)
			}
			return conn, nil
		}
	})
	var job struct{ ID string }
	plain := container("no port")
	l.ok(201, &job, "POST", "/api/v1/jobs", l.admin, plain)
	l.ork.run(job.ID, key)
	if p := l.refused("failed_precondition", "POST", "/api/v1/jobs/"+job.ID+"/gateway", l.admin, map[string]any{}); !strings.Contains(p.Detail, "--port 51820/udp") {
		t.Errorf("no word on what to do: %+v", p)
	}

	body := container("with a port")
	body["ports"] = []map[string]any{{"port": 8080}, {"port": 51820, "protocol": "udp"}}
	l.ok(201, &job, "POST", "/api/v1/jobs", l.admin, body)
	at := "/api/v1/jobs/" + job.ID + "/gateway"
	l.refused("failed_precondition", "GET", at, l.admin, nil) // it does not run
	l.ork.run(job.ID, key)
	l.ork.change(job.ID, func(j *orkv1.Job) {
		j.Replicas[0].Attempts[0].Nodes = []*orkv1.AttemptNode{{NodeName: "n", Ports: []*orkv1.PortAddress{
			{Port: j.Spec.Ports[0], Hosts: []string{"203.0.113.7"}, PublicPort: 30080},
			{Port: j.Spec.Ports[1], Hosts: []string{"203.0.113.7", "2001:db8::7"}, PublicPort: 30051},
		}}}
	})
	l.refused("invalid", "POST", at, l.admin, map[string]any{"port": 8080})
	type gateway struct {
		Open      bool
		Endpoints []string
		PublicKey string `json:"public_key"`
		Peers     []struct {
			Name          string
			LastHandshake time.Time `json:"last_handshake"`
			UserID        string    `json:"user_id"`
		}
	}
	var is gateway
	l.ok(200, &is, "POST", at, l.admin, map[string]any{})
	if !is.Open || strings.Join(is.Endpoints, " ") != "203.0.113.7:30051 [2001:db8::7]:30051" || is.PublicKey != "GATEWAYKEY" {
		t.Errorf("opened: %+v", is)
	}
	l.ok(200, &is, "POST", at+"/peers", l.admin, map[string]any{"name": "laptop", "public_key": "KEY"})
	if len(is.Peers) != 1 || is.Peers[0].Name != "laptop" || is.Peers[0].LastHandshake.Unix() != 1e9 || !strings.HasPrefix(is.Peers[0].UserID, "u-") {
		t.Errorf("added: %+v", is)
	}
	l.refused("invalid", "POST", at+"/peers", l.admin, map[string]any{"name": "bad", "public_key": "KEY"})
	l.refused("invalid", "POST", at+"/peers", l.admin, map[string]any{"name": strings.Repeat("a", 33), "public_key": "KEY"})
	is = gateway{}
	l.ok(200, &is, "DELETE", at+"/peers/laptop", l.admin, nil)
	if len(is.Peers) != 0 {
		t.Errorf("removed: %+v", is)
	}
	l.refused("not_found", "DELETE", at+"/peers/laptop", l.admin, nil)
	l.ok(204, nil, "DELETE", at, l.admin, nil)
	is = gateway{}
	if l.ok(200, &is, "GET", at, l.admin, nil); is.Open {
		t.Errorf("deleted: %+v", is)
	}

	_, stranger := l.user("stranger@example.com")
	l.refused("not_found", "GET", at, stranger, nil)
	l.refused("not_found", "POST", at+"/peers", stranger, map[string]any{"name": "mine", "public_key": "KEY"})
	if len(agent.is.GetPeers()) != 0 {
		t.Error("a stranger's key was let in")
	}
}
