// Package app wires the orchestrator: it puts its parts together and runs them
// under the daemon's life. It holds no logic of jobs.
package app

import (
	"context"
	"path/filepath"
	"time"

	"github.com/cosmicac/cosmicac/pkg/daemon"
	"github.com/cosmicac/cosmicac/pkg/mesh"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/notice"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/record"
)

// Run is the program, from a checked configuration to the end of ctx.
func Run(ctx context.Context, env *daemon.Env, c Config) error {
	// The record first: all else is derived from it, and a broken one must stop
	// the start before anybody is answered. Stopping goes in reverse, so it is
	// closed last.
	hub := &notice.Hub{}
	store, err := record.Open(ctx, filepath.Join(env.StateDirectory, "ork.db"), hub, time.Now)
	if err != nil {
		return err
	}
	env.OnStop("record", func(context.Context) error { return store.Close() })
	ork, err := Build(ctx, Setup{
		Config: c, Store: store, Hub: hub, Key: env.Key, Network: env.Network,
		Health: env.Health, Metrics: env.Metrics, Clock: time.Now, Log: env.Log,
		NewMesh: func(add func(*mesh.Options)) (*mesh.Node, error) { return env.Mesh(ctx, add) },
		// A disk may hold the loop up for a while; it is not dead then.
		Alive: env.Beat("jobs", 5*time.Minute),
	})
	if err != nil {
		return err
	}
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
