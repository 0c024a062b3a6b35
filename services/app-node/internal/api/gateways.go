package api

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"

	"github.com/cosmicac/cosmicac/pkg/fault"
	agentv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	"github.com/cosmicac/cosmicac/services/app-node/internal/grants"
)

// gatewayTimeout bounds the talk with a VM's agent.
const gatewayTimeout = 10 * time.Second

// Bounds of what an agent, which is the tenant's, may say of its gateway.
const (
	gatewayPeers = 64
	gatewayText  = 64
)

// Gateway is WireGuard into a job's VM. The VM's agent is the only record of it.
type Gateway struct {
	JobID     string        `json:"job_id"`
	Open      bool          `json:"open" doc:"Whether there is one"`
	Port      uint32        `json:"port" doc:"The declared UDP port on which it listens"`
	Endpoints []string      `json:"endpoints" doc:"Where it is reached from outside the cluster, host:port; empty while the cluster has not said"`
	PublicKey string        `json:"public_key"`
	Address   string        `json:"address" doc:"The VM's address inside the tunnel; a service of the VM answers there on its own port"`
	MTU       uint32        `json:"mtu" doc:"Of the tunnel, in bytes"`
	Simulated bool          `json:"simulated" doc:"The VM is a process on the simulator's host, which listens there on the port itself; the simulated cluster's endpoints lead nowhere"`
	Peers     []GatewayPeer `json:"peers" doc:"By name"`
}

// GatewayPeer is a key that is let in.
type GatewayPeer struct {
	Name          string     `json:"name"`
	PublicKey     string     `json:"public_key"`
	Address       string     `json:"address" doc:"Its address inside the tunnel"`
	LastHandshake *time.Time `json:"last_handshake,omitempty" doc:"By the gateway itself; none since the agent's start when left out"`
	ReceivedBytes uint64     `json:"received_bytes" doc:"From the peer, since the agent's start"`
	SentBytes     uint64     `json:"sent_bytes" doc:"To the peer, since the agent's start"`
	UserID        string     `json:"user_id,omitempty" doc:"Who let it in. The peer goes when that user's right to the job is revoked, or the password is changed"`
}

type gatewayOutput struct {
	Body Gateway
}

// gatewayOf reads a job of the caller's, and who answers for its gateway.
func (s *Server) gatewayOf(ctx context.Context, jobID string) (*orkv1.Job, *orkv1.Attempt, agentv1.GatewaysClient, error) {
	target(ctx, jobID)
	job, err := s.owned(ctx, jobID)
	if err != nil {
		return nil, nil, nil, err
	}
	if job.GetSpec().GetKind() != orkv1.JobKind_JOB_KIND_GPU_CONTAINER {
		return nil, nil, nil, fault.New(fault.FailedPrecondition, "job %s has no gateway: gateways are for GPU Container Jobs", job.GetId())
	}
	attempt, err := grants.Reachable(job)
	if err != nil {
		return nil, nil, nil, err
	}
	conn, err := s.Agent(attempt.GetAgentKey(), attempt.GetAgentAddresses())
	if err != nil {
		return nil, nil, nil, err
	}
	return job, attempt, agentv1.NewGatewaysClient(conn), nil
}

// askAgent makes one call with a deadline and says in words when the agent is away.
func askAgent[Q, A any](ctx context.Context, job *orkv1.Job, f func(context.Context, Q, ...grpc.CallOption) (A, error), request Q) (A, error) {
	inner, cancel := context.WithTimeout(ctx, gatewayTimeout)
	defer cancel()
	answer, err := f(inner, request)
	if err == nil {
		return answer, nil
	}
	err = fault.FromGRPC(err)
	switch fault.KindOf(err) {
	case fault.Unavailable, fault.Unreachable, fault.Timeout, fault.Denied, fault.Unauthenticated:
		err = fault.Wrap(fault.Unavailable, err, "the agent of job %s cannot be asked now, and whether anything was changed shows once it answers: try again (%v)", job.GetId(), err)
	}
	return answer, err
}

// gatewayView bounds what an agent said and adds where the cluster opens its port.
func gatewayView(job *orkv1.Job, attempt *orkv1.Attempt, g *agentv1.Gateway) *gatewayOutput {
	out := Gateway{JobID: job.GetId(), Open: g.GetOpen(), Port: g.GetPort(), Endpoints: []string{}, PublicKey: short(g.GetPublicKey()), Address: short(g.GetAddress()),
		MTU: g.GetMtu(), Simulated: attempt.GetSimulated(), Peers: []GatewayPeer{}}
	if nodes := attempt.GetNodes(); g.GetOpen() && len(nodes) > 0 {
		for _, p := range portAddresses(attempt, nodes[0]) {
			if p.Protocol != "udp" || p.Port.Port != g.GetPort() || p.PublicPort == 0 {
				continue
			}
			for _, host := range p.Hosts {
				out.Endpoints = append(out.Endpoints, net.JoinHostPort(host, strconv.Itoa(int(p.PublicPort))))
			}
		}
	}
	for _, p := range g.GetPeers()[:min(len(g.GetPeers()), gatewayPeers)] {
		out.Peers = append(out.Peers, GatewayPeer{Name: short(p.GetName()), PublicKey: short(p.GetPublicKey()), Address: short(p.GetAddress()),
			LastHandshake: stamp(p.GetLastHandshake()), ReceivedBytes: p.GetReceivedBytes(), SentBytes: p.GetSentBytes(), UserID: short(p.GetUserId())})
	}
	return &gatewayOutput{Body: out}
}

// short cuts a tenant's text and keeps what a key, an address or a name is made of:
// it ends up in a configuration file.
func short(text string) string {
	text = strings.Map(func(r rune) rune {
		if r <= ' ' || r > '~' {
			return -1
		}
		return r
	}, text)
	return text[:min(len(text), gatewayText)]
}

func (s *Server) getGateway(ctx context.Context, in *JobPath) (*gatewayOutput, error) {
	job, attempt, agent, err := s.gatewayOf(ctx, in.ID)
	if err != nil {
		return nil, err
	}
	r, err := askAgent(ctx, job, agent.GetGateway, &agentv1.GetGatewayRequest{})
	if err != nil {
		return nil, err
	}
	return gatewayView(job, attempt, r.GetGateway()), nil
}

type openGatewayInput struct {
	JobPath
	Body struct {
		Port uint32 `json:"port,omitempty" maximum:"65535" doc:"One of the UDP ports that the job declared; may be left out where it declared one"`
	}
}

func (s *Server) openGateway(ctx context.Context, in *openGatewayInput) (*gatewayOutput, error) {
	job, attempt, agent, err := s.gatewayOf(ctx, in.ID)
	if err != nil {
		return nil, err
	}
	port, err := gatewayPort(job, in.Body.Port)
	if err != nil {
		return nil, err
	}
	r, err := askAgent(ctx, job, agent.OpenGateway, &agentv1.OpenGatewayRequest{Port: port})
	if err != nil {
		return nil, err
	}
	return gatewayView(job, attempt, r.GetGateway()), nil
}

// gatewayPort is the declared UDP port to listen on: nothing else is let into the VM.
func gatewayPort(job *orkv1.Job, asked uint32) (uint32, error) {
	var declared []string
	only := uint32(0)
	for _, p := range job.GetSpec().GetPorts() {
		if p.GetProtocol() != "udp" {
			continue
		}
		if p.GetPort() == asked {
			return asked, nil
		}
		only = p.GetPort()
		declared = append(declared, strconv.Itoa(int(p.GetPort())))
	}
	switch {
	case len(declared) == 0:
		return 0, fault.New(fault.FailedPrecondition, "job %s declared no public UDP port, so nothing could reach a gateway: create it with --port 51820/udp", job.GetId()).
			With(fault.Detail{Field: "body.port", Rule: "is a UDP port that the job declared; it declared none"})
	case asked == 0 && len(declared) == 1:
		return only, nil
	}
	return 0, fault.New(fault.Invalid, "port must be a UDP port that job %s declared: %s", job.GetId(), strings.Join(declared, ", ")).
		With(fault.Detail{Field: "body.port", Rule: fmt.Sprintf("is one of %s", strings.Join(declared, ", "))})
}

func (s *Server) closeGateway(ctx context.Context, in *JobPath) (*nothing, error) {
	job, _, agent, err := s.gatewayOf(ctx, in.ID)
	if err != nil {
		return nil, err
	}
	_, err = askAgent(ctx, job, agent.CloseGateway, &agentv1.CloseGatewayRequest{})
	return nil, err
}

type addGatewayPeerInput struct {
	JobPath
	Body struct {
		Name      string `json:"name" maxLength:"32" doc:"1 to 32 of a-z, 0-9 and hyphens"`
		PublicKey string `json:"public_key" maxLength:"64" doc:"A WireGuard public key: 32 bytes in base64. The private key stays with its user"`
	}
}

func (s *Server) addGatewayPeer(ctx context.Context, in *addGatewayPeerInput) (*gatewayOutput, error) {
	job, attempt, agent, err := s.gatewayOf(ctx, in.ID)
	if err != nil {
		return nil, err
	}
	r, err := askAgent(ctx, job, agent.AddGatewayPeer, &agentv1.AddGatewayPeerRequest{Name: in.Body.Name, PublicKey: in.Body.PublicKey, UserId: caller(ctx).User.ID, Epoch: caller(ctx).GrantEpoch})
	if err != nil {
		return nil, err
	}
	return gatewayView(job, attempt, r.GetGateway()), nil
}

type removeGatewayPeerInput struct {
	JobPath
	Name string `path:"name" maxLength:"32"`
}

func (s *Server) removeGatewayPeer(ctx context.Context, in *removeGatewayPeerInput) (*gatewayOutput, error) {
	job, attempt, agent, err := s.gatewayOf(ctx, in.ID)
	if err != nil {
		return nil, err
	}
	r, err := askAgent(ctx, job, agent.RemoveGatewayPeer, &agentv1.RemoveGatewayPeerRequest{Name: in.Name})
	if err != nil {
		return nil, err
	}
	return gatewayView(job, attempt, r.GetGateway()), nil
}
