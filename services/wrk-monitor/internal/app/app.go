// Package app wires wrk-monitor from top to bottom. It holds no logic.
package app

import (
	"context"
	"net/http"
	"path/filepath"
	"time"

	"github.com/cosmicac/cosmicac/pkg/daemon"
	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	appv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/app/v1"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	"github.com/cosmicac/cosmicac/services/wrk-monitor/internal/collect"
	"github.com/cosmicac/cosmicac/services/wrk-monitor/internal/journal"
	"github.com/cosmicac/cosmicac/services/wrk-monitor/internal/series"
	"github.com/cosmicac/cosmicac/services/wrk-monitor/internal/web"
)

// Config is wrk-monitor's file; see wrk-monitor.example.yaml.
type Config struct {
	daemon.Base `yaml:",inline"`
	HTTP        struct {
		Listen string `yaml:"listen"`
	} `yaml:"http"`
	PullEverySeconds  int   `yaml:"pull_every_seconds"`
	RetentionHours    int   `yaml:"retention_hours"`
	LogRetentionHours int   `yaml:"log_retention_hours"`
	LogMaximumMiB     int64 `yaml:"log_maximum_mib"`
}

// Defaults of every key.
func Defaults() Config {
	c := Config{PullEverySeconds: 5, RetentionHours: 360, LogRetentionHours: 720, LogMaximumMiB: 16}
	c.HTTP.Listen = "127.0.0.1:8083"
	return c
}

// Base is the part that every daemon has.
func Base(c *Config) *daemon.Base { return &c.Base }

// Validate checks the service's own keys; the kit reports all of them at once.
func (c *Config) Validate() (bad []fault.Detail) {
	within := func(field string, v, least, most int64) {
		if v < least || v > most {
			bad = append(bad, fault.Detail{Field: field, Rule: "out of its range, see wrk-monitor.example.yaml"})
		}
	}
	within("pull_every_seconds", int64(c.PullEverySeconds), 1, 300)
	within("retention_hours", int64(c.RetentionHours), 1, 100_000)
	within("log_retention_hours", int64(c.LogRetentionHours), 1, 100_000)
	within("log_maximum_mib", c.LogMaximumMiB, 1, 10_240)
	return bad
}

// Run starts in this order: the stores first, since everything writes to them;
// the mesh, through which all is collected; the collectors; and the HTTP face
// last, when there is something to ask.
func Run(ctx context.Context, env *daemon.Env, c Config) error {
	samples, err := series.Open(filepath.Join(env.StateDirectory, "series"), time.Duration(c.RetentionHours)*time.Hour, env.Metrics)
	if err != nil {
		return err
	}
	env.OnStop("time series", func(context.Context) error { return samples.Close() })
	logs, err := journal.Open(filepath.Join(env.StateDirectory, "logs"), c.LogMaximumMiB<<20, time.Duration(c.LogRetentionHours)*time.Hour)
	if err != nil {
		return err
	}
	env.OnStop("log journal", func(context.Context) error { return logs.Close() })

	node, err := env.Mesh(ctx, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_MONITOR })
	if err != nil {
		return err
	}
	if err := env.StartMesh(ctx); err != nil {
		return err
	}

	collector := &collect.Collector{Mesh: node, Series: samples, Journal: logs, Every: time.Duration(c.PullEverySeconds) * time.Second, Log: env.Log.Named("collect"), Now: time.Now}
	env.Go("collector", collector.Run)
	env.Go("log retention", func(ctx context.Context) error {
		tick := time.NewTicker(time.Hour)
		defer tick.Stop()
		for {
			if err := logs.Prune(time.Now()); err != nil {
				env.Log.Warn("old logs not removed", "error", err)
			}
			select {
			case <-ctx.Done():
				return nil
			case <-tick.C:
			}
		}
	})

	server := &web.Server{Series: samples, Journal: logs, Identify: identify(node), Log: env.Log.Named("web"), Now: time.Now}
	front := &http.Server{Handler: server.Handler(), ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 64 << 10}
	if err := env.ServeHTTP("http.listen", c.HTTP.Listen, front); err != nil {
		return err
	}
	env.Ready()
	<-ctx.Done()
	return nil
}

// identify asks any app-node of the roster whose token it is.
func identify(node *mesh.Node) web.Identify {
	return func(ctx context.Context, token string) (web.Viewer, error) {
		var last error = fault.New(fault.Unavailable, "the roster has no app-node to ask who you are")
		for _, m := range node.Network().ByRole(meshv1.Role_ROLE_APP_NODE) {
			id, err := identity.ParseID(m.GetKey())
			if err != nil {
				return web.Viewer{}, err
			}
			r, err := appv1.NewIdentityClient(node.Client(id)).IntrospectToken(ctx, &appv1.IntrospectTokenRequest{Token: token})
			if err == nil {
				return web.Viewer{UserID: r.GetUserId(), Administrator: r.GetAdministrator(), ProjectIDs: r.GetProjectIds()}, nil
			}
			if last = err; fault.KindOf(err) == fault.Unauthenticated {
				return web.Viewer{}, err
			}
		}
		return web.Viewer{}, last
	}
}
