package app_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/cosmicac/cosmicac/pkg/daemon"
	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	"github.com/cosmicac/cosmicac/pkg/trust"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	"github.com/cosmicac/cosmicac/services/mesh-bootstrap/internal/app"
)

// The test binary is the daemon too, so that the test meets a real process.
func TestMain(m *testing.M) {
	if os.Getenv("MESH_BOOTSTRAP_TEST_DAEMON") != "" {
		daemon.Main("mesh-bootstrap", app.Defaults, app.Base, app.Run)
	}
	goleak.VerifyTestMain(m)
}

func must[T any](t *testing.T) func(T, error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(40 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if ok() {
			return
		}
	}
	t.Fatalf("%s: not in time", what)
}

func TestNewDaemonJoinsThroughTheBootstrapAndIsFound(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	newKey := func() *identity.Key { return must[*identity.Key](t)(identity.New(rand.Reader)) }
	root, boot, operator, worker := newKey(), newKey(), newKey(), newKey()
	network := must[*trust.Network](t)(trust.Create(filepath.Join(dir, "network"), "lab", root, nil, []*meshv1.Member{
		{Key: boot.ID().String(), Name: "mesh-bootstrap", Roles: []meshv1.Role{meshv1.Role_ROLE_BOOTSTRAP}},
		{Key: operator.ID().String(), Name: "operator", Roles: []meshv1.Role{meshv1.Role_ROLE_OPERATOR}},
	}, nil))
	if err := identity.Save(filepath.Join(dir, daemon.KeyFile), boot); err != nil {
		t.Fatal(err)
	}
	config := filepath.Join(dir, "mesh-bootstrap.yaml")
	if err := os.WriteFile(config, []byte("state_directory: "+dir+"\nmesh:\n  listen: [/ip4/127.0.0.1/tcp/0, /ip4/127.0.0.1/udp/0/quic-v1]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	var said bytes.Buffer
	process := exec.Command(os.Args[0], "--config", config)
	process.Env = append(os.Environ(), "MESH_BOOTSTRAP_TEST_DAEMON=1")
	process.Stdout, process.Stderr = &said, &said
	if err := process.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- process.Wait() }()
	t.Cleanup(func() {
		_ = process.Process.Kill()
		if t.Failed() {
			t.Logf("the daemon said:\n%s", said.String())
		}
	})
	var status *daemon.Status
	eventually(t, "ready", func() (ok bool) {
		var err error
		status, err = daemon.ReadStatus(filepath.Join(dir, "status.json"))
		return err == nil && status.Ready && len(status.Addresses) > 0
	})
	at := []*meshv1.BootstrapAddress{{Key: boot.ID().String(), Addresses: status.Addresses}}

	id := network.ID()
	start := func(key *identity.Key, credential mesh.Credential, role meshv1.Role) (*mesh.Node, *trust.Network) {
		held := must[*trust.Network](t)(trust.NewMemory(id[:], network.RootKeys()))
		n := must[*mesh.Node](t)(mesh.New(context.Background(), mesh.Options{Key: key, Network: held, Credential: credential, Role: role, Bootstraps: at,
			Listen: []string{"/ip4/127.0.0.1/tcp/0"}, DHT: mesh.DHTClient}))
		t.Cleanup(func() { _ = n.Close(context.Background()) })
		if err := n.Start(context.Background()); err != nil {
			t.Fatal(err)
		}
		return n, held
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	person, personal := start(operator, mesh.Membership(), meshv1.Role_ROLE_OPERATOR)
	comer, held := start(worker, mesh.Guest(), meshv1.Role_ROLE_WORKER)
	ask := func() *meshv1.RequestJoinResponse {
		t.Helper()
		return must[*meshv1.RequestJoinResponse](t)(meshv1.NewJoiningClient(comer.Client(boot.ID())).RequestJoin(ctx,
			&meshv1.RequestJoinRequest{Name: "worker-1", Roles: []meshv1.Role{meshv1.Role_ROLE_WORKER}}))
	}
	if ask().GetAdmitted() {
		t.Fatal("admitted by asking")
	}
	open := must[*meshv1.ListJoinRequestsResponse](t)(meshv1.NewJoiningClient(person.Client(boot.ID())).ListJoinRequests(ctx, &meshv1.ListJoinRequestsRequest{}))
	if len(open.GetRequests()) != 1 || open.GetRequests()[0].GetKey() != worker.ID().String() || open.GetRequests()[0].GetRemoteAddress() == "" {
		t.Fatalf("open requests: %v", open)
	}

	// The operator signs the roster and hands it to the bootstrap.
	roster := must[[]byte](t)(network.NextRoster(root, time.Now(), func(r *meshv1.Roster) {
		r.Members = append(r.Members, &meshv1.Member{Key: worker.ID().String(), Name: "worker-1", Roles: []meshv1.Role{meshv1.Role_ROLE_WORKER}})
	}))
	must[*meshv1.PutNetworkResponse](t)(meshv1.NewNodeClient(person.Client(boot.ID())).PutNetwork(ctx, &meshv1.PutNetworkRequest{RosterEnvelope: roster}))
	must[bool](t)(personal.Adopt(roster, nil))
	answer := ask()
	if !answer.GetAdmitted() {
		t.Fatal("not admitted although the roster lists the key")
	}
	if err := held.AdoptGenesis(answer.GetGenesisEnvelope()); err != nil {
		t.Fatal(err)
	}
	must[bool](t)(held.Adopt(answer.GetRosterEnvelope(), nil))
	comer.SetCredential(mesh.Membership())
	eventually(t, "the new member's card is found", func() bool {
		c, err := person.FindCard(ctx, worker.ID())
		return err == nil && c.GetRole() == meshv1.Role_ROLE_WORKER
	})

	if err := process.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Errorf("the daemon ended with %v", err)
	}
}
