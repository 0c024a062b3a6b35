// Package node answers mesh.v1.Node, the service of every daemon and agent: who
// are you, how are you, your metrics, your log, your peers, your network.
//
// It does not decide who may ask (the rights in the wire file do), does not keep
// anything, and changes nothing but the signed roster and NetworkInfo, which prove
// themselves.
package node

import (
	"bytes"
	"context"
	"os"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/expfmt"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/health"
	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/log"
	"github.com/cosmicac/cosmicac/pkg/trust"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

// Bounds of the service.
const (
	// MaxPingBytes is the largest payload that Ping takes.
	MaxPingBytes = 64 << 10
	// maxExpositionBytes is the largest answer of GetMetrics.
	maxExpositionBytes = 8 << 20
	// A message of StreamLogs holds at most so many lines and bytes, and one more line.
	maxBatchLines = 256
	maxBatchBytes = 256 << 10
)

// Mesh is what the service asks of the node in the mesh.
type Mesh interface {
	ID() peer.ID
	Addresses() []string
	Peers() []*meshv1.Peer
	Services() []string
	Client(p peer.ID, addrs ...string) grpc.ClientConnInterface
	Path(ctx context.Context, p peer.ID) *meshv1.Peer
	Trace(ctx context.Context, p peer.ID) *meshv1.PeerTrace
	CheckNetwork(ctx context.Context) *meshv1.CheckNetworkResponse
	SpeedTest(ctx context.Context, p peer.ID, d time.Duration, bytes uint64) (*meshv1.RunSpeedTestResponse, error)
}

// Service implements mesh.v1.Node. Its fields are set before it is registered.
type Service struct {
	meshv1.UnimplementedNodeServer

	Key       *identity.Key
	Network   *trust.Network
	Mesh      Mesh
	Name      string
	Version   string
	Features  []string
	StartedAt time.Time
	LogFile   string
	Ring      *log.Ring
	Health    *health.Set
	Metrics   prometheus.Gatherer
	// Ready tells whether the node serves.
	Ready func() bool
	// Clock is the node's own.
	Clock func() time.Time
}

var _ meshv1.NodeServer = (*Service)(nil)

// Ping answers with the payload.
func (s *Service) Ping(_ context.Context, r *meshv1.PingRequest) (*meshv1.PingResponse, error) {
	if n := len(r.GetPayload()); n > MaxPingBytes {
		return nil, fault.ToGRPC(fault.New(fault.TooLarge, "ping with %d bytes, want at most %d", n, MaxPingBytes))
	}
	return &meshv1.PingResponse{Payload: r.GetPayload()}, nil
}

// GetInstanceId names this start of the process.
func (s *Service) GetInstanceId(context.Context, *meshv1.GetInstanceIdRequest) (*meshv1.GetInstanceIdResponse, error) {
	return &meshv1.GetInstanceIdResponse{InstanceId: s.Ring.Instance()}, nil
}

// GetInfo says what this node is, and what is wrong with it.
func (s *Service) GetInfo(context.Context, *meshv1.GetInfoRequest) (*meshv1.GetInfoResponse, error) {
	member, _ := s.Network.Known(s.Key.ID())
	return &meshv1.GetInfoResponse{
		Key: s.Key.ID().String(), Name: s.Name, Roles: member.GetRoles(), Version: s.Version, Features: s.Features,
		StartedAt: timestamppb.New(s.StartedAt), InstanceId: s.Ring.Instance(),
		RosterVersion: s.Network.Roster().GetVersion(), NetworkInfoSequence: s.Network.Info().GetSequence(),
		Addresses: s.Mesh.Addresses(), Ready: s.Ready(), Warnings: s.Health.List(),
		Now: timestamppb.New(s.Clock()), ResidentBytes: ResidentBytes(), Pid: int64(os.Getpid()), LogFile: s.LogFile,
	}, nil
}

// GetMetrics returns the text exposition. A collector that fails does not hide
// the others.
func (s *Service) GetMetrics(context.Context, *meshv1.GetMetricsRequest) (*meshv1.GetMetricsResponse, error) {
	families, err := s.Metrics.Gather()
	if len(families) == 0 && err != nil {
		return nil, fault.ToGRPC(fault.Wrap(fault.Internal, err, "gather metrics"))
	}
	var text bytes.Buffer
	for _, f := range families {
		if _, err := expfmt.MetricFamilyToText(&text, f); err != nil {
			return nil, fault.ToGRPC(fault.Wrap(fault.Internal, err, "write metrics"))
		}
	}
	if text.Len() > maxExpositionBytes {
		return nil, fault.ToGRPC(fault.New(fault.TooLarge, "metrics of %d bytes are over the bound of %d", text.Len(), maxExpositionBytes))
	}
	return &meshv1.GetMetricsResponse{Exposition: text.Bytes()}, nil
}

// StreamLogs sends what is kept after a position, in order, then follows. A reader
// that is slower than the log loses the oldest lines and is told by a gap.
func (s *Service) StreamLogs(r *meshv1.StreamLogsRequest, stream grpc.ServerStreamingServer[meshv1.StreamLogsResponse]) error {
	added, cancel := s.Ring.Subscribe()
	defer cancel()
	after, tail := r.GetAfter(), int(min(r.GetTail(), log.RingLines))
	for first := true; ; first = false {
		for {
			lines := s.Ring.After(after, tail, maxBatchLines)
			size := 0
			for i, l := range lines {
				if size += len(l.GetText()); size > maxBatchBytes {
					lines = lines[:i+1]
					break
				}
			}
			if len(lines) == 0 {
				break
			}
			if err := stream.Send(&meshv1.StreamLogsResponse{Lines: lines}); err != nil {
				return err
			}
			after = lines[len(lines)-1].GetPosition()
		}
		if first && !r.GetFollow() {
			return nil
		}
		select {
		case <-added:
		case <-stream.Context().Done():
			return fault.ToGRPC(fault.Wrap(fault.KindOf(stream.Context().Err()), stream.Context().Err(), "follow log"))
		}
	}
}

// ListPeers says whom this node is connected to.
func (s *Service) ListPeers(context.Context, *meshv1.ListPeersRequest) (*meshv1.ListPeersResponse, error) {
	return &meshv1.ListPeersResponse{Peers: s.Mesh.Peers()}, nil
}

// GetNetwork returns the newest signed records held here.
func (s *Service) GetNetwork(context.Context, *meshv1.GetNetworkRequest) (*meshv1.GetNetworkResponse, error) {
	return &meshv1.GetNetworkResponse{
		GenesisEnvelope: s.Network.Genesis(), RosterEnvelope: s.Network.RosterEnvelope(), NetworkInfoEnvelope: s.Network.InfoEnvelope(),
	}, nil
}

// PutNetwork adopts what is newer and proves itself. What was adopted but could
// not be saved yet is no error to the caller.
func (s *Service) PutNetwork(_ context.Context, r *meshv1.PutNetworkRequest) (*meshv1.PutNetworkResponse, error) {
	changed, err := s.Network.Adopt(r.GetRosterEnvelope(), r.GetNetworkInfoEnvelope())
	if err != nil && !changed {
		return nil, fault.ToGRPC(err)
	}
	return &meshv1.PutNetworkResponse{
		RosterVersion: s.Network.Roster().GetVersion(), NetworkInfoSequence: s.Network.Info().GetSequence(),
	}, nil
}
