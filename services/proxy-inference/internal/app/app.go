// Package app wires proxy-inference from top to bottom.
//
// The usage spool comes first, so that no request is served that could not be
// counted. Then the mesh, the links in it and the tables that come over them.
// HTTP is last. It does not wait for the tables: a request that comes before them
// is told so, and the last tables stay in force while wrk-ork or app-node is away.
// The stop goes backwards: open requests, then what is still to be written of
// their usage, then the mesh.
//
// The package holds wiring and configuration only.
package app

import (
	"context"
	"crypto/rand"
	"fmt"
	mathrand "math/rand/v2"
	"net/http"
	"path/filepath"
	"time"

	"github.com/hashicorp/go-hclog"
	"google.golang.org/grpc"

	"github.com/cosmicac/cosmicac/pkg/daemon"
	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/health"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	appv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/app/v1"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"

	"github.com/cosmicac/cosmicac/services/proxy-inference/internal/keys"
	"github.com/cosmicac/cosmicac/services/proxy-inference/internal/links"
	"github.com/cosmicac/cosmicac/services/proxy-inference/internal/proxy"
	"github.com/cosmicac/cosmicac/services/proxy-inference/internal/route"
	"github.com/cosmicac/cosmicac/services/proxy-inference/internal/usage"
)

// Run starts the proxy. It returns once everything runs; env owns what it started.
func Run(ctx context.Context, env *daemon.Env, cfg Config) error {
	apiKeys := keys.New(time.Now)
	routes := route.New(route.Options{Hold: cfg.Routing.LoadingHold, MaximumHeld: cfg.Routing.MaximumHeld,
		MaximumInFlight: cfg.Routing.ReplicaInFlight, Now: time.Now, Random: mathrand.IntN})
	away := &away{health: env.Health, log: env.Log, keys: apiKeys, routes: routes}
	away.start()

	node, err := env.Mesh(ctx, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_PROXY })
	if err != nil {
		return err
	}
	link := &links.Links{Mesh: node, Network: env.Network}

	records, err := usage.Open(usage.Options{
		Directory: filepath.Join(env.StateDirectory, "usage"), MaximumBytes: cfg.Usage.SpoolMiB << 20,
		SyncInterval: cfg.Usage.SyncInterval, SendInterval: cfg.Usage.SendInterval, Log: env.Log.Named("usage"),
		Send: func(ctx context.Context, batch []*appv1.UsageRecord) error {
			return link.Call(meshv1.Role_ROLE_APP_NODE, func(c grpc.ClientConnInterface) error {
				_, err := appv1.NewUsageClient(c).RecordUsage(ctx, &appv1.RecordUsageRequest{Records: batch})
				return err
			})
		},
	})
	if err != nil {
		return fault.Wrap(fault.Internal, err, "open the usage spool in %s: %v", env.StateDirectory, err)
	}
	env.Go("usage", records.Run)
	registerMetrics(env.Metrics, records, apiKeys, routes)

	if err := env.StartMesh(ctx); err != nil {
		return err
	}
	for _, role := range []meshv1.Role{meshv1.Role_ROLE_ORK, meshv1.Role_ROLE_APP_NODE} {
		env.Go("link to "+role.String(), func(ctx context.Context) error { return link.KeepRole(ctx, role) })
	}
	env.Go("links to replicas", func(ctx context.Context) error { return link.KeepReplicas(ctx, routes) })
	env.Go("api keys", func(ctx context.Context) error {
		return link.Follow(ctx, meshv1.Role_ROLE_APP_NODE, func(ctx context.Context, c grpc.ClientConnInterface, received func()) error {
			return apiKeys.Watch(ctx, appv1.NewApiKeysClient(c), func() { received(); away.keysCame() })
		}, away.keysLost)
	})
	env.Go("endpoints", func(ctx context.Context) error {
		return link.Follow(ctx, meshv1.Role_ROLE_ORK, func(ctx context.Context, c grpc.ClientConnInterface, received func()) error {
			return routes.Watch(ctx, orkv1.NewEndpointsClient(c), func() { received(); away.endpointsCame() })
		}, away.endpointsLost)
	})
	env.Go("usage warnings", func(ctx context.Context) error { return warnOfSpool(ctx, env.Health, records) })

	handler := proxy.New(proxy.Options{
		Keys: apiKeys, Routes: routes, Dial: link.Dial, Record: records.Record, Metrics: proxy.NewMetrics(env.Metrics),
		Log: env.Log.Named("proxy"), Now: time.Now, Random: rand.Reader,
		Limits: proxy.Limits{Body: cfg.HTTP.BodyLimitMiB << 20, BodyMemory: cfg.HTTP.BodyMemoryMiB << 20, Requests: cfg.HTTP.MaximumRequests,
			Attempts: cfg.Routing.Attempts, AffinityBytes: cfg.Routing.AffinityBytes},
		Timeouts: proxy.Timeouts{Connect: cfg.Timeouts.Connect, FirstByte: cfg.Timeouts.FirstByte, Idle: cfg.Timeouts.Idle,
			KeepAlive: cfg.Timeouts.EngineKeepAlive, Upload: cfg.Timeouts.Upload, Write: cfg.Timeouts.ClientWrite,
			Commit: cfg.Timeouts.HeadersAfter, Comment: cfg.Timeouts.StreamComments},
	})
	env.OnStop("open requests", func(ctx context.Context) error { return drained(ctx, handler) })
	server := &http.Server{
		Handler:           handler,
		ReadHeaderTimeout: 30 * time.Second,
		IdleTimeout:       5 * time.Minute, // longer than the front door keeps its own
		MaxHeaderBytes:    64 << 10,
		ErrorLog:          env.Log.Named("http").StandardLogger(&hclog.StandardLoggerOptions{ForceLevel: hclog.Debug}),
	}
	if err := env.ServeHTTP("http.listen", cfg.HTTP.Listen, server); err != nil {
		return err
	}
	env.Ready()
	return nil
}

// drained waits until the last request has left its usage behind. The server was
// closed before, so it is short.
func drained(ctx context.Context, handler *proxy.Handler) error {
	defer handler.Close()
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for handler.Running() > 0 {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("%d requests do not end; their usage is not recorded", handler.Running())
		}
	}
	return nil
}

// away raises and clears the warnings about tables that are old or missing.
type away struct {
	health *health.Set
	log    hclog.Logger
	keys   *keys.Table
	routes *route.Table

	// One line in the log for each absence, however long. Each is used by one
	// goroutine alone.
	keysAway, endpointsAway bool
}

func (a *away) start() {
	a.health.Raise(health.ProxyWithoutKeys, "none have come since the start")
}

func (a *away) keysCame() {
	a.health.Clear(health.ProxyWithoutKeys)
	a.health.Clear(health.AppNodeUnreachable)
	if a.keysAway {
		a.log.Info("api keys are followed again")
	}
	a.keysAway = false
}

func (a *away) keysLost(err error) {
	n, since := a.keys.Status()
	if since.IsZero() {
		a.health.Raise(health.ProxyWithoutKeys, err)
	}
	a.health.Raise(health.AppNodeUnreachable, fmt.Sprintf("%s: %v", staleness("api keys", n, since), err))
	if !a.keysAway {
		a.log.Warn("api keys are not followed", "cause", err)
	}
	a.keysAway = true
}

func (a *away) endpointsCame() {
	a.health.Clear(health.OrkUnreachable)
	if a.endpointsAway {
		a.log.Info("endpoints are followed again")
	}
	a.endpointsAway = false
}

func (a *away) endpointsLost(err error) {
	n, since := a.routes.Status()
	a.health.Raise(health.OrkUnreachable, fmt.Sprintf("%s: %v", staleness("endpoints", n, since), err))
	if !a.endpointsAway {
		a.log.Warn("endpoints are not followed", "cause", err)
	}
	a.endpointsAway = true
}

func staleness(what string, n int, since time.Time) string {
	if since.IsZero() {
		return "no " + what + " are known here, so every request is refused"
	}
	return fmt.Sprintf("%d %s as of %s stay in force", n, what, since.UTC().Format(time.RFC3339))
}

// spoolWarning is what health says about the spool.
const spoolWarning = "keeping usage records"

// warnOfSpool raises and clears the warning that usage is lost.
func warnOfSpool(ctx context.Context, set *health.Set, records *usage.Recorder) error {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		if s := records.Status(); s.Full {
			set.RaiseFor(health.StorageFailing, spoolWarning, spoolWarning,
				fmt.Sprintf("%d are lost since the start; %d of %d bytes wait for app-node", s.Lost, s.Records, s.Bytes))
		} else {
			set.ClearFor(health.StorageFailing, spoolWarning)
		}
	}
}
