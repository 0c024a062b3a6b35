package fleet

import (
	"context"
	"crypto/rand"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cosmicac/cosmicac/pkg/identity"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// answering is one daemon that answers, as far as it is asked here.
type answering struct {
	meshv1.UnimplementedNodeServer
	asked atomic.Int64
	info  *meshv1.GetInfoResponse
	peers []*meshv1.Peer
	mute  bool // it does not list its peers
}

func (a *answering) GetInfo(context.Context, *meshv1.GetInfoRequest) (*meshv1.GetInfoResponse, error) {
	a.asked.Add(1)
	return a.info, nil
}

func (a *answering) ListPeers(ctx context.Context, _ *meshv1.ListPeersRequest) (*meshv1.ListPeersResponse, error) {
	if a.mute {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return &meshv1.ListPeersResponse{Peers: a.peers}, nil
}

// town is a mesh of daemons behind gRPC.
type town struct {
	id    peer.ID
	conns map[peer.ID]*grpc.ClientConn
	gone  *grpc.ClientConn
}

func (n *town) ID() peer.ID { return n.id }
func (n *town) Client(p peer.ID, _ ...string) grpc.ClientConnInterface {
	if c := n.conns[p]; c != nil {
		return c
	}
	return n.gone
}

func newTown(t *testing.T, daemons map[peer.ID]*answering) *town {
	t.Helper()
	dial := func(d func(context.Context, string) (net.Conn, error)) *grpc.ClientConn {
		c, err := grpc.NewClient("passthrough:///x", grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithContextDialer(d))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	n := &town{conns: map[peer.ID]*grpc.ClientConn{}}
	n.gone = dial(func(context.Context, string) (net.Conn, error) { return nil, io.ErrClosedPipe })
	for p, a := range daemons {
		listener := bufconn.Listen(1 << 16)
		server := grpc.NewServer()
		meshv1.RegisterNodeServer(server, a)
		var serving sync.WaitGroup
		serving.Go(func() { _ = server.Serve(listener) })
		t.Cleanup(func() { server.Stop(); serving.Wait() })
		n.conns[p] = dial(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) })
	}
	return n
}

func key(t *testing.T) peer.ID {
	t.Helper()
	k, err := identity.New(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return k.ID()
}

func TestThePictureJoinsWhatBothEndsSay(t *testing.T) {
	t.Parallel()
	ork, app, worker, silent, person := key(t), key(t), key(t), key(t), key(t)
	now := time.Now()
	stamp := timestamppb.New(now)
	member := func(p peer.ID, name string, role meshv1.Role) *meshv1.Member {
		return &meshv1.Member{Key: p.String(), Name: name, Roles: []meshv1.Role{role}}
	}
	members := []*meshv1.Member{member(worker, "worker", meshv1.Role_ROLE_WORKER), member(ork, "ork", meshv1.Role_ROLE_ORK), member(app, "app", meshv1.Role_ROLE_APP_NODE),
		member(silent, "silent", meshv1.Role_ROLE_MONITOR), member(person, "person", meshv1.Role_ROLE_OPERATOR)}
	link := func(p peer.ID, inbound, relayed bool, roundTrip int64) *meshv1.Peer {
		return &meshv1.Peer{Key: p.String(), Class: meshv1.Class_CLASS_MEMBER, Transport: "tcp", Inbound: inbound, Relayed: relayed, RoundTripMicroseconds: roundTrip, ConnectedAt: stamp}
	}
	daemons := map[peer.ID]*answering{
		ork: {info: &meshv1.GetInfoResponse{Version: "1", Ready: true, Now: timestamppb.New(now.Add(time.Hour)), Warnings: []*meshv1.Warning{{Code: "x"}}},
			peers: []*meshv1.Peer{link(app, true, true, 900), link(app, true, false, 0), link(worker, false, false, 500), link(silent, true, false, 700), link(person, true, false, 1),
				{Key: key(t).String(), Class: meshv1.Class_CLASS_AGENT}, {Key: key(t).String(), Class: meshv1.Class_CLASS_AGENT}, {Key: key(t).String(), Class: meshv1.Class_CLASS_CLIENT}}},
		app:    {info: &meshv1.GetInfoResponse{Version: "2"}, peers: []*meshv1.Peer{link(ork, false, true, 900), link(ork, false, false, 300)}},
		worker: {info: &meshv1.GetInfoResponse{}, mute: true},
	}
	f := New(Options{Node: newTown(t, daemons), Members: func() []*meshv1.Member { return members }, Now: time.Now, Timeout: 2 * time.Second})
	results := make([]Mesh, 4)
	var asking sync.WaitGroup
	for i := range results {
		asking.Go(func() { results[i], _ = f.Mesh(t.Context()) })
	}
	asking.Wait()
	m := results[0]
	if m.Complete || len(m.Nodes) != 4 || m.Nodes[0].Name != "app" || m.Nodes[3].Name != "worker" {
		t.Fatalf("%+v", m)
	}
	if n := m.Nodes[1]; n.Name != "ork" || n.Info.GetVersion() != "1" || n.Agents != 2 || n.Clients != 1 || n.Others != 1 || !n.PeersKnown || n.ClockAhead < 50*time.Minute {
		t.Errorf("%+v", n)
	}
	if n := m.Nodes[2]; n.Name != "silent" || n.Info != nil || n.Reason == "" || n.PeersKnown {
		t.Errorf("%+v", n)
	}
	if n := m.Nodes[3]; n.Info == nil || n.PeersKnown {
		t.Errorf("%+v", n)
	}
	if len(m.Links) != 3 {
		t.Fatalf("%+v", m.Links)
	}
	for _, l := range m.Links {
		switch {
		case l.From == app.String() && l.To == ork.String():
			if l.Peer.GetRelayed() || l.Peer.GetRoundTripMicroseconds() != 300 || l.Connections != 2 || !l.SeenByFrom || !l.SeenByTo {
				t.Errorf("%+v", l)
			}
		case l.From == ork.String() && l.To == worker.String():
			if !l.SeenByFrom || l.SeenByTo || l.Connections != 1 {
				t.Errorf("%+v", l)
			}
		case l.From == silent.String() && l.To == ork.String():
			if l.SeenByFrom || !l.SeenByTo {
				t.Errorf("%+v", l)
			}
		default:
			t.Errorf("%+v", l)
		}
	}
	if asked := daemons[ork].asked.Load(); asked != 1 {
		t.Errorf("%d viewers became %d questions", len(results), asked)
	}
}
