// Package app wires app-node from top to bottom.
//
// It starts the store first, since all else needs it, then the parts without a
// network, then the mesh with app-node's services on it, then the watch of the
// orchestrator, and the HTTP API last, so that nobody is let in before what they
// ask for is there. The orchestrator may be away: app-node starts without it and
// says so. It stops in reverse.
//
// It holds no logic: wiring and configuration only, each concern is a package
// beside it.
package app

import (
	"context"
	"crypto/rand"
	"path/filepath"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"

	"github.com/cosmicac/cosmicac/pkg/daemon"
	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/health"
	"github.com/cosmicac/cosmicac/pkg/id"
	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	"github.com/cosmicac/cosmicac/pkg/trust"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	"github.com/cosmicac/cosmicac/services/app-node/internal/account"
	"github.com/cosmicac/cosmicac/services/app-node/internal/api"
	"github.com/cosmicac/cosmicac/services/app-node/internal/apikeys"
	"github.com/cosmicac/cosmicac/services/app-node/internal/catalogue"
	"github.com/cosmicac/cosmicac/services/app-node/internal/fleet"
	"github.com/cosmicac/cosmicac/services/app-node/internal/grants"
	"github.com/cosmicac/cosmicac/services/app-node/internal/orchestrator"
	"github.com/cosmicac/cosmicac/services/app-node/internal/peers"
	"github.com/cosmicac/cosmicac/services/app-node/internal/quotas"
	"github.com/cosmicac/cosmicac/services/app-node/internal/store"
)

// Files of the state directory.
const (
	databaseFile = "app-node.db"
	hmacKeyFile  = "api-keys.hmac"
)

// hashesAtOnce bounds the memory that checking passwords takes: 19 MiB each.
const hashesAtOnce = 4

// Run starts app-node. It returns once everything runs; env owns what it started.
func Run(ctx context.Context, env *daemon.Env, cfg Config) error {
	rows, err := catalogue.Build(cfg.Catalogue)
	if err != nil {
		return err
	}
	db, err := store.Open(ctx, filepath.Join(env.StateDirectory, databaseFile))
	if err != nil {
		return err
	}
	env.OnStop("store", func(context.Context) error { return db.Close() })
	if err := db.ReplaceCatalogue(ctx, rows); err != nil {
		return err
	}
	hmacKey, err := apikeys.LoadHMACKey(filepath.Join(env.StateDirectory, hmacKeyFile))
	if err != nil {
		return err
	}
	hasher, err := account.NewHasher(rand.Reader, hashesAtOnce)
	if err != nil {
		return err
	}
	ids := id.NewSource(time.Now, rand.Reader)
	// Filled in below, once the orchestrator can be asked and before anybody is let in.
	var revocations *grants.Revocations
	keys := apikeys.New(apikeys.Options{Store: db, HMACKey: hmacKey, IDs: ids, Random: rand.Reader, Now: time.Now})
	accounts := account.New(account.Options{Store: db, Hasher: hasher, IDs: ids, Random: rand.Reader, Now: time.Now,
		Idle: cfg.Sessions.Idle, Longest: cfg.Sessions.Longest, OnChange: func() { keys.Changed(); revocations.Changed() }})
	warnWithoutAdministrator(ctx, env, db)

	node, err := env.Mesh(ctx, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_APP_NODE })
	if err != nil {
		return err
	}
	services := &peers.Service{Keys: keys, Accounts: accounts, Now: time.Now, Refresh: time.Minute}
	services.Register(node)
	if err := env.StartMesh(ctx); err != nil {
		return err
	}

	env.Go("link to the orchestrator", func(ctx context.Context) error {
		keepOrchestrator(ctx, node, env.Network)
		return nil
	})
	connect := findOrchestrator(node, env.Network)
	watch := orchestrator.NewWatch(connect, env.Log.Named("ork"), func(err error) {
		if err == nil {
			env.Health.Clear(health.OrkUnreachable)
		} else {
			env.Health.Raise(health.OrkUnreachable, err)
		}
	})
	env.Go("watch of the orchestrator", watch.Run)
	ork := orchestrator.NewClient(connect, orchestrator.Timeout, countCalls(env.Metrics))
	revocations = grants.NewRevocations(db, ork.PutGrantFloors, env.Log.Named("revocations"))
	env.Go("revocations", revocations.Run)
	teller := quotas.NewTeller(db, ork.PutQuotas, env.Log.Named("quotas"))
	env.Go("quotas", teller.Run)
	env.Go("pruning", func(ctx context.Context) error { return prune(ctx, env, db, cfg.Retention) })

	server := api.New(api.Options{
		Store: db, Accounts: accounts, Keys: keys, Catalogue: catalogue.New(db, cfg.Catalogue),
		Ork: ork, Watch: watch, Quotas: teller,
		Grants: &grants.Signer{Key: env.Key, Network: env.Network, Now: time.Now, Validity: cfg.Grants.Validity},
		Fleet: fleet.New(fleet.Options{Node: node, Now: time.Now, Timeout: 2 * time.Second,
			Members: func() []*meshv1.Member { return env.Network.Roster().GetMembers() }, Own: env.Health.List}),
		Agent: func(key string, addresses []string) (grpc.ClientConnInterface, error) {
			agent, err := identity.ParseID(key)
			if err != nil {
				return nil, fault.Wrap(fault.Internal, err, "the orchestrator's record holds no good agent key")
			}
			return node.Client(agent, addresses...), nil
		},
		Network: env.Network, Log: env.Log.Named("api"), Metrics: env.Metrics, Now: time.Now, Version: env.Version,
	})
	if err := serve(ctx, env, server, cfg.HTTP.Listen); err != nil {
		return err
	}
	env.Ready()
	return nil
}

// serve opens the API's listener. The stop lets running requests end before it
// goes on to what they need.
func serve(ctx context.Context, env *daemon.Env, server *api.Server, address string) error {
	listener, err := env.Listen("http.listen", address)
	if err != nil {
		return err
	}
	serving, end := context.WithCancel(context.WithoutCancel(ctx))
	done := make(chan struct{})
	env.Go("http", func(context.Context) error {
		defer close(done)
		return server.Serve(serving, listener)
	})
	env.OnStop("http", func(ctx context.Context) error {
		end()
		select {
		case <-done:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	})
	return nil
}

// findOrchestrator looks the orchestrator up in the roster each time, so that a
// new roster counts at once.
func findOrchestrator(node *mesh.Node, network *trust.Network) orchestrator.Connector {
	return func() (grpc.ClientConnInterface, error) {
		for _, member := range network.ByRole(meshv1.Role_ROLE_ORK) {
			if key, err := identity.ParseID(member.GetKey()); err == nil {
				return node.Client(key), nil
			}
		}
		return nil, fault.New(fault.Unavailable, "the roster names no wrk-ork")
	}
}

// keepOrchestrator supervises the link to every wrk-ork of the roster: silence is
// noticed within seconds, and watches break instead of hanging.
func keepOrchestrator(ctx context.Context, node *mesh.Node, network *trust.Network) {
	changed, cancel := network.Subscribe()
	defer cancel()
	kept := map[string]func(){}
	defer func() {
		for _, release := range kept {
			release()
		}
	}()
	for {
		wanted := map[string]bool{}
		for _, member := range network.ByRole(meshv1.Role_ROLE_ORK) {
			key, err := identity.ParseID(member.GetKey())
			if err != nil {
				continue
			}
			wanted[member.GetKey()] = true
			if kept[member.GetKey()] == nil {
				kept[member.GetKey()] = node.Keep(key)
			}
		}
		for key, release := range kept {
			if !wanted[key] {
				release()
				delete(kept, key)
			}
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}

func countCalls(registry prometheus.Registerer) func(method string, kind fault.Kind) {
	calls := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "cosmicac_app_node_ork_calls_total", Help: "Calls of the orchestrator by method and outcome.",
	}, []string{"method", "outcome"})
	registry.MustRegister(calls)
	return func(method string, kind fault.Kind) {
		if kind == "" {
			kind = "ok"
		}
		calls.WithLabelValues(method, string(kind)).Inc()
	}
}

func warnWithoutAdministrator(ctx context.Context, env *daemon.Env, db *store.Store) {
	has, err := db.HasAdministrator(ctx)
	if err != nil {
		env.Log.Error("look for an administrator", "error", err)
	} else if !has {
		env.Log.Warn("there is no administrator: stop app-node, run `cosmicac-app-node " + CreateAdministratorCommand + " --config FILE --email EMAIL`, start it again")
	}
}

// prune removes what has had its time, once an hour.
func prune(ctx context.Context, env *daemon.Env, db *store.Store, r RetentionConfig) error {
	log := env.Log.Named("pruning")
	hour := time.NewTicker(time.Hour)
	defer hour.Stop()
	for {
		now := time.Now()
		for what, remove := range map[string]func() error{
			"tokens":        func() error { return db.PruneTokens(ctx, now) },
			"revocations":   func() error { return db.PruneGrantFloors(ctx, now.Add(-grants.Remembered)) },
			"audit":         func() error { return db.PruneAudit(ctx, now.Add(-r.Audit)) },
			"usage records": func() error { return db.PruneUsageRecords(ctx, now.Add(-r.UsageRecords)) },
		} {
			if err := remove(); err != nil && ctx.Err() == nil {
				log.Error("remove what is old", "of", what, "error", err)
				env.Health.Raise(health.StorageFailing, "removing old rows", err)
			}
		}
		select {
		case <-hour.C:
		case <-ctx.Done():
			return nil
		}
	}
}
