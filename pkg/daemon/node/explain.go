package node

import (
	"context"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/identity"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

// maxPings bounds the calls of one PingPeer.
const maxPings = 20

// TracePeer looks for a peer and tells what was tried.
func (s *Service) TracePeer(ctx context.Context, r *meshv1.TracePeerRequest) (*meshv1.TracePeerResponse, error) {
	p, err := s.other(r.GetKey())
	if err != nil {
		return nil, fault.ToGRPC(err)
	}
	return &meshv1.TracePeerResponse{Trace: s.Mesh.Trace(ctx, p)}, nil
}

// PingPeer calls a peer some times and times it.
func (s *Service) PingPeer(ctx context.Context, r *meshv1.PingPeerRequest) (*meshv1.PingPeerResponse, error) {
	p, err := s.other(r.GetKey())
	if err != nil {
		return nil, fault.ToGRPC(err)
	}
	count := int(r.GetCount())
	if count == 0 {
		count = 3
	}
	if count > maxPings {
		return nil, fault.ToGRPC(fault.New(fault.Invalid, "ping %d times, want at most %d", count, maxPings).
			With(fault.Detail{Field: "count", Rule: "at most 20"}))
	}
	answer, err := PingPeer(ctx, s.Mesh, p, count)
	return answer, fault.ToGRPC(err)
}

// PingPeer calls mesh.v1.Node/Ping of p so many times, one after the other, and
// times each call. The first error ends it.
func PingPeer(ctx context.Context, m Mesh, p peer.ID, count int) (*meshv1.PingPeerResponse, error) {
	client, answer := meshv1.NewNodeClient(m.Client(p)), &meshv1.PingPeerResponse{}
	for range count {
		began := time.Now()
		if _, err := client.Ping(ctx, &meshv1.PingRequest{Payload: []byte("ping")}); err != nil {
			return nil, err
		}
		answer.RoundTripMicroseconds = append(answer.RoundTripMicroseconds, time.Since(began).Microseconds())
	}
	answer.Path = m.Path(ctx, p)
	return answer, nil
}

// CheckNetwork says what this node sees of the network it stands in.
func (s *Service) CheckNetwork(ctx context.Context, _ *meshv1.CheckNetworkRequest) (*meshv1.CheckNetworkResponse, error) {
	return s.Mesh.CheckNetwork(ctx), nil
}

// RunSpeedTest measures bulk and calls between this node and a peer.
func (s *Service) RunSpeedTest(ctx context.Context, r *meshv1.RunSpeedTestRequest) (*meshv1.RunSpeedTestResponse, error) {
	p, err := s.other(r.GetKey())
	if err != nil {
		return nil, fault.ToGRPC(err)
	}
	answer, err := s.Mesh.SpeedTest(ctx, p, time.Duration(r.GetSeconds())*time.Second, r.GetBytes())
	return answer, fault.ToGRPC(err)
}

// other is the peer of a request, which this node itself is not.
func (s *Service) other(key string) (peer.ID, error) {
	p, err := identity.ParseID(key)
	if err != nil {
		return "", fault.New(fault.Invalid, "key %q is none", cut(key)).With(fault.Detail{Field: "key", Rule: "must be a peer id or 64 hex digits"})
	}
	if p == s.Mesh.ID() {
		return "", fault.New(fault.Invalid, "%s is this node itself", s.Name).With(fault.Detail{Field: "key", Rule: "must be another peer's"})
	}
	return p, nil
}

func cut(text string) string { return text[:min(len(text), 80)] }

// ListServices names what this node serves, with the descriptors to call it.
func (s *Service) ListServices(context.Context, *meshv1.ListServicesRequest) (*meshv1.ListServicesResponse, error) {
	answer, set := &meshv1.ListServicesResponse{}, &descriptorpb.FileDescriptorSet{}
	added := make(map[string]bool)
	var add func(f protoreflect.FileDescriptor)
	add = func(f protoreflect.FileDescriptor) {
		if added[f.Path()] {
			return
		}
		added[f.Path()] = true
		for i := range f.Imports().Len() {
			add(f.Imports().Get(i).FileDescriptor)
		}
		set.File = append(set.File, protodesc.ToFileDescriptorProto(f))
	}
	for _, name := range s.Mesh.Services() {
		d, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(name))
		if err != nil {
			continue // not of a wire file: it names no right, so nobody may call it
		}
		answer.Services = append(answer.Services, name)
		add(d.ParentFile())
	}
	var err error
	if answer.FileDescriptorSet, err = proto.Marshal(set); err != nil {
		return nil, fault.ToGRPC(fault.Wrap(fault.Internal, err, "encode the descriptors"))
	}
	return answer, nil
}
