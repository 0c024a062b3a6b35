package revoked_test

import (
	"context"
	"crypto/rand"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	"github.com/cosmicac/cosmicac/pkg/trust"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	"github.com/cosmicac/cosmicac/services/mesh-bootstrap/internal/revoked"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const patience = time.Minute

func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !f(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("did not come to pass: %s", what)
		}
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// fakeOrk tells one void certificate, when it is told to.
type fakeOrk struct {
	orkv1.UnimplementedRevocationsServer
	void chan *orkv1.VoidCertificate
}

func (f *fakeOrk) WatchVoidCertificates(_ *orkv1.WatchVoidCertificatesRequest, s orkv1.Revocations_WatchVoidCertificatesServer) error {
	for {
		select {
		case c := <-f.void:
			if err := s.Send(&orkv1.WatchVoidCertificatesResponse{Certificates: []*orkv1.VoidCertificate{c}}); err != nil {
				return err
			}
		case <-s.Context().Done():
			return s.Context().Err()
		}
	}
}

func TestStoppedAttemptsAgentLosesTheBootstrapAndItsRelay(t *testing.T) {
	t.Parallel()
	newKey := func() *identity.Key { return must(identity.New(rand.Reader)) }
	root, bootKey, orkKey := newKey(), newKey(), newKey()
	member := func(k *identity.Key, name string, role meshv1.Role) *meshv1.Member {
		return &meshv1.Member{Key: k.ID().String(), Name: name, Roles: []meshv1.Role{role}, SignsCertificates: role == meshv1.Role_ROLE_ORK}
	}
	network := must(trust.Create("", "lab", root, nil, []*meshv1.Member{
		member(bootKey, "boot", meshv1.Role_ROLE_BOOTSTRAP), member(orkKey, "ork", meshv1.Role_ROLE_ORK)}, nil))
	id := network.ID()
	start := func(o mesh.Options, before func(*mesh.Node)) *mesh.Node {
		t.Helper()
		o.Listen = []string{"/ip4/127.0.0.1/tcp/0"}
		if o.Network == nil {
			o.Network = network
		}
		n := must(mesh.New(context.Background(), o))
		before(n)
		if err := n.Start(context.Background()); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			defer cancel()
			_ = n.Close(ctx)
		})
		return n
	}
	told := &fakeOrk{void: make(chan *orkv1.VoidCertificate)}
	ork := start(mesh.Options{Key: orkKey, Role: meshv1.Role_ROLE_ORK}, func(n *mesh.Node) { orkv1.RegisterRevocationsServer(n, told) })

	path := filepath.Join(t.TempDir(), "void-certificates.json")
	list := must(revoked.Open(path, hclog.NewNullLogger(), nil))
	boot := start(mesh.Options{Key: bootKey, Role: meshv1.Role_ROLE_BOOTSTRAP, Relay: true, Vet: list.Vet}, func(*mesh.Node) {})
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		ended <- list.Follow(ctx, func() (orkv1.RevocationsClient, error) {
			return orkv1.NewRevocationsClient(boot.Client(ork.ID(), ork.Addresses()...)), nil
		}, boot.Revet)
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})

	agent := func(attempt string) *mesh.Node {
		k := newKey()
		now := time.Now()
		env := must(trust.SealCertificate(orkKey, &meshv1.JobCertificate{
			NetworkId: id[:], Key: k.ID().String(), JobId: "j-0000000000001", ReplicaId: "r-0000000000001", AttemptId: attempt, RackId: "rk-0000000000001",
			NotBefore: timestamppb.New(now), NotAfter: timestamppb.New(now.Add(time.Hour)), Epoch: 1,
		}))
		return start(mesh.Options{Key: k, Network: must(trust.NewMemory(id[:], network.RootKeys())), Credential: mesh.Certificate(env)}, func(*mesh.Node) {})
	}
	ping := func(from *mesh.Node) error {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		_, err := meshv1.NewNodeClient(from.Client(boot.ID(), boot.Addresses()...)).Ping(ctx, &meshv1.PingRequest{})
		if fault.Is(err, fault.Unsupported) { // admitted: this bootstrap has no such service
			return nil
		}
		return err
	}
	stopped, runs := agent("a-0000000000001"), agent("a-0000000000002")
	for _, a := range []*mesh.Node{stopped, runs} {
		if err := ping(a); err != nil {
			t.Fatal(err)
		}
	}
	told.void <- &orkv1.VoidCertificate{AttemptId: "a-0000000000001", Until: timestamppb.New(time.Now().Add(time.Hour))}
	eventually(t, "the stopped attempt's agent is cut", func() bool { return !boot.Connected(stopped.ID()) })
	eventually(t, "and refused in words", func() bool { return fault.Is(ping(stopped), fault.Denied) })
	if err := ping(runs); err != nil {
		t.Errorf("an agent that runs: %v", err)
	}

	// It is refused after a restart too, before wrk-ork was heard.
	eventually(t, "the list is on disk", func() bool { _, err := os.Stat(path); return err == nil })
	void := mesh.Caller{Certificate: &meshv1.JobCertificate{AttemptId: "a-0000000000001"}}
	if err := must(revoked.Open(path, hclog.NewNullLogger(), nil)).Vet(void); !fault.Is(err, fault.Denied) {
		t.Errorf("after a restart: %v", err)
	}
}
