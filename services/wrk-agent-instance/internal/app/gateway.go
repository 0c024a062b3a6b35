package app

import (
	"context"

	agentv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
	"github.com/cosmicac/cosmicac/services/wrk-agent-instance/internal/gateway"
)

// gateways answers agentv1.Gateways. The mesh has checked that app-node asks.
type gateways struct {
	agentv1.UnimplementedGatewaysServer
	gateway *gateway.Gateway
}

func (s *gateways) GetGateway(context.Context, *agentv1.GetGatewayRequest) (*agentv1.GetGatewayResponse, error) {
	g, err := s.gateway.Show()
	return &agentv1.GetGatewayResponse{Gateway: g}, err
}

func (s *gateways) OpenGateway(_ context.Context, r *agentv1.OpenGatewayRequest) (*agentv1.OpenGatewayResponse, error) {
	g, err := s.gateway.Open(r.GetPort())
	return &agentv1.OpenGatewayResponse{Gateway: g}, err
}

func (s *gateways) CloseGateway(context.Context, *agentv1.CloseGatewayRequest) (*agentv1.CloseGatewayResponse, error) {
	return &agentv1.CloseGatewayResponse{}, s.gateway.Delete()
}

func (s *gateways) AddGatewayPeer(_ context.Context, r *agentv1.AddGatewayPeerRequest) (*agentv1.AddGatewayPeerResponse, error) {
	g, err := s.gateway.Add(gateway.Peer{Name: r.GetName(), PublicKey: r.GetPublicKey(), UserID: r.GetUserId(), Epoch: r.GetEpoch()})
	return &agentv1.AddGatewayPeerResponse{Gateway: g}, err
}

func (s *gateways) RemoveGatewayPeer(_ context.Context, r *agentv1.RemoveGatewayPeerRequest) (*agentv1.RemoveGatewayPeerResponse, error) {
	g, err := s.gateway.Remove(r.GetName())
	return &agentv1.RemoveGatewayPeerResponse{Gateway: g}, err
}
