package app_test

import (
	"context"
	"crypto/ecdh"
	"crypto/rand"
	"encoding/base64"
	"net"
	"testing"

	"github.com/cosmicac/cosmicac/pkg/agent/agenttest"
	"github.com/cosmicac/cosmicac/pkg/fault"
	agentv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

func TestAppNodeAloneSetsUpTheGateway(t *testing.T) {
	t.Parallel()
	lab := agenttest.New(t)
	a := run(t, lab, seedOf(lab))
	ctx, cancel := context.WithTimeout(context.Background(), agenttest.Patience)
	defer cancel()
	addresses := lab.Ork.Card().GetAddresses()
	gateways := agentv1.NewGatewaysClient(lab.AppNode().Client(a.ID(), addresses...))
	free, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := uint32(free.LocalAddr().(*net.UDPAddr).Port)
	free.Close()
	if is, err := gateways.GetGateway(ctx, &agentv1.GetGatewayRequest{}); err != nil || is.GetGateway().GetOpen() {
		t.Fatalf("before: %v, %v", is, err)
	}
	if _, err := gateways.OpenGateway(ctx, &agentv1.OpenGatewayRequest{Port: port}); err != nil {
		t.Fatal(err)
	}
	key, err := ecdh.X25519().GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	added, err := gateways.AddGatewayPeer(ctx, &agentv1.AddGatewayPeerRequest{Name: "laptop", PublicKey: base64.StdEncoding.EncodeToString(key.PublicKey().Bytes()), UserId: "u-1", Epoch: 3})
	if err != nil || len(added.GetGateway().GetPeers()) != 1 {
		t.Fatalf("add: %v, %v", added, err)
	}
	for who, conn := range map[string]agentv1.GatewaysClient{
		"a proxy":                 agentv1.NewGatewaysClient(lab.Proxy().Client(a.ID(), addresses...)),
		"a user with every right": agentv1.NewGatewaysClient(lab.Client(a.ID(), 1, "shell", "exec", "files", "forward").Client(a.ID(), addresses...)),
	} {
		if _, err := conn.RemoveGatewayPeer(ctx, &agentv1.RemoveGatewayPeerRequest{Name: "laptop"}); fault.KindOf(fault.FromGRPC(err)) != fault.Denied {
			t.Errorf("%s removes a peer: %v", who, err)
		}
	}
	if is, err := gateways.RemoveGatewayPeer(ctx, &agentv1.RemoveGatewayPeerRequest{Name: "laptop"}); err != nil || len(is.GetGateway().GetPeers()) != 0 {
		t.Fatalf("remove: %v, %v", is, err)
	}
	// A peer goes by itself once wrk-ork says that its user's right is revoked.
	let := &agentv1.AddGatewayPeerRequest{Name: "laptop", PublicKey: base64.StdEncoding.EncodeToString(key.PublicKey().Bytes()), UserId: "u-1", Epoch: 3}
	if _, err := gateways.AddGatewayPeer(ctx, let); err != nil {
		t.Fatal(err)
	}
	lab.Ork.Order(&orkv1.AttendResponse{Revocations: &agentv1.Revocations{Grants: []*agentv1.GrantFloor{{UserId: "u-1", MinimumEpoch: 4}}}})
	agenttest.Eventually(t, "the peer is gone", func() bool {
		is, err := gateways.GetGateway(ctx, &agentv1.GetGatewayRequest{})
		return err == nil && len(is.GetGateway().GetPeers()) == 0
	})
	if _, err := gateways.AddGatewayPeer(ctx, let); fault.KindOf(fault.FromGRPC(err)) != fault.Denied {
		t.Errorf("let in by a revoked right: %v", err)
	}
	if _, err := gateways.CloseGateway(ctx, &agentv1.CloseGatewayRequest{}); err != nil {
		t.Fatal(err)
	}
}
