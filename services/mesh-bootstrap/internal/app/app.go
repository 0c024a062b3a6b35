// Package app wires mesh-bootstrap from top to bottom. It holds no logic.
package app

import (
	"context"
	"path/filepath"

	"github.com/cosmicac/cosmicac/pkg/daemon"
	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	"github.com/cosmicac/cosmicac/pkg/mesh/cards"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	"github.com/cosmicac/cosmicac/services/mesh-bootstrap/internal/joining"
	"github.com/cosmicac/cosmicac/services/mesh-bootstrap/internal/revoked"
)

// Config is mesh-bootstrap's file; see mesh-bootstrap.example.yaml.
type Config struct {
	daemon.Base `yaml:",inline"`
	// Relay carries connections of nodes that nobody reaches from outside. [true]
	Relay bool `yaml:"relay"`
	// AllowGuests takes join requests of keys that are not in the roster. [true]
	AllowGuests bool `yaml:"allow_guests"`
}

// Defaults of every key.
func Defaults() Config {
	c := Config{Relay: true, AllowGuests: true}
	c.Mesh.Listen = []string{"/ip4/0.0.0.0/tcp/4801", "/ip4/0.0.0.0/udp/4801/quic-v1"}
	return c
}

// Base is the part that every daemon has.
func Base(c *Config) *daemon.Base { return &c.Base }

// Run starts in this order: the join requests and void certificates from disk, since
// a broken file must stop the start before anyone connects; the node with its
// services; then it listens, follows what wrk-ork says of certificates, and is
// ready. All else is an answer.
func Run(ctx context.Context, env *daemon.Env, c Config) error {
	desk, err := joining.Open(filepath.Join(env.StateDirectory, "join-requests.json"), env.Network, env.Log.Named("joining"), nil)
	if err != nil {
		return err
	}
	void, err := revoked.Open(filepath.Join(env.StateDirectory, "void-certificates.json"), env.Log.Named("revoked"), nil)
	if err != nil {
		return err
	}
	node, err := env.Mesh(ctx, func(o *mesh.Options) {
		o.Vet = void.Vet
		o.Role = meshv1.Role_ROLE_BOOTSTRAP
		o.DHT = mesh.DHTServer
		o.Relay = c.Relay && !o.Private
		o.AllowGuests = c.AllowGuests
	})
	if err != nil {
		return err
	}
	meshv1.RegisterCardsServer(node, cards.New(env.Network, nil))
	meshv1.RegisterJoiningServer(node, desk)
	if err := env.StartMesh(ctx); err != nil {
		return err
	}
	env.Go("void certificates", func(ctx context.Context) error {
		return void.Follow(ctx, func() (orkv1.RevocationsClient, error) {
			for _, m := range env.Network.ByRole(meshv1.Role_ROLE_ORK) {
				if key, err := identity.ParseID(m.GetKey()); err == nil {
					return orkv1.NewRevocationsClient(node.Client(key)), nil
				}
			}
			return nil, fault.New(fault.Unavailable, "the roster names no wrk-ork")
		}, node.Revet)
	})
	env.Ready()
	<-ctx.Done()
	return nil
}
