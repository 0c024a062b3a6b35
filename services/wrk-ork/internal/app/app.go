// Package app wires the orchestrator: it puts its parts together and runs them
// under the daemon's life. It holds no logic of jobs.
package app

import (
	"context"
	"path/filepath"
	"time"

	"github.com/cosmicac/cosmicac/pkg/daemon"
	"github.com/cosmicac/cosmicac/pkg/mesh"
)

// Run is the program, from a checked configuration to the end of ctx.
func Run(ctx context.Context, env *daemon.Env, c Config) error {
	if err := c.Check(); err != nil {
		return err
	}
	ork, err := Build(ctx, Setup{
		Config: c, Path: filepath.Join(env.StateDirectory, "ork.db"),
		Key: env.Key, Network: env.Network, Health: env.Health, Metrics: env.Metrics,
		Clock: time.Now, Log: env.Log,
		NewMesh: func(add func(*mesh.Options)) (*mesh.Node, error) { return env.Mesh(ctx, add) },
	})
	if err != nil {
		return err
	}
	// Stopped in reverse: what runs first, the record last.
	env.OnStop("record", func(context.Context) error { return ork.Close() })
	// Nothing is judged before the racks' first reports, so the loop may start
	// before anybody can be heard.
	for _, t := range ork.Tasks {
		env.Go(t.Name, t.Run)
	}
	// Last: from here on others call.
	if err := env.StartMesh(ctx); err != nil {
		return err
	}
	env.Ready()
	<-ctx.Done()
	return nil
}
