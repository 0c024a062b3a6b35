package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"time"

	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/cluster"
)

// options are the flags.
type options struct {
	bin, repository, dir string
	nodes, jobs, callers int
	patience             time.Duration
	keep                 bool
	json                 string
}

func measure() (err error) {
	var o options
	short := flag.Bool("short", false, "20 nodes and 50 jobs")
	flag.StringVar(&o.bin, "bin", "build/bin", "folder with the daemons and cosmicac-devcluster")
	flag.StringVar(&o.repository, "repository", ".", "folder with deploy/")
	flag.StringVar(&o.dir, "dir", "", "folder for everything that is written; empty for one that is removed")
	flag.IntVar(&o.nodes, "nodes", 200, "nodes of 8 GPUs")
	flag.IntVar(&o.jobs, "jobs", 500, "jobs at once")
	flag.IntVar(&o.callers, "callers", 16, "calls under way at a time, ours and those of bare client-go")
	flag.DurationVar(&o.patience, "patience", 10*time.Minute, "longest wait for one step")
	flag.BoolVar(&o.keep, "keep", false, "leave the folder with the daemons' logs")
	flag.StringVar(&o.json, "json", "", "write one object a line to this file, too")
	flag.Parse()
	if *short {
		o.nodes, o.jobs = 20, 50
	}
	if o.nodes < 1 || o.jobs < 1 || o.jobs > 16*o.nodes/5 {
		return fmt.Errorf("-jobs is 1 to %d, what fits on %d nodes of 8 GPUs with 1, 2 or 4 GPUs a job", 16*o.nodes/5, o.nodes)
	}
	if o.dir == "" {
		if o.dir, err = os.MkdirTemp("", "cosmicac-bench-"); err != nil {
			return err
		}
	}
	if o.dir, err = filepath.Abs(o.dir); err != nil {
		return err
	}
	if err := os.MkdirAll(o.dir, 0o700); err != nil {
		return err
	}
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt)
	defer cancel()
	defer func() {
		if o.keep || err != nil {
			fmt.Fprintln(os.Stderr, "logs are in", o.dir)
			return
		}
		err = os.RemoveAll(o.dir)
	}()
	f := &figures{}
	f.note("%d nodes x %d GPUs, %d jobs of 1, 2 or 4 GPUs; %d CPUs, %s", o.nodes, gpusANode, o.jobs, runtime.NumCPU(), time.Now().UTC().Format("2006-01-02"))
	f.note("defaults, but the orchestrator's quarantine.starts_at_once is %d; VMs are played, agents are stubs in one process", gpusANode)
	if err := run(ctx, o, f); err != nil {
		return err
	}
	return f.report(os.Stdout, o.json)
}

const (
	gpusANode = 8
	resource  = "nvidia.com/GH100_H100_SXM5_80GB"
	model     = "GH100_H100_SXM5_80GB"
	rackID    = "scale"
	namespace = "cosmicac"
	project   = "p-scale"
)

// run is the whole measurement: ours first, then bare client-go on the cluster
// that ours has left, with our daemons stopped, so that it has the machine alone.
func run(ctx context.Context, o options, f *figures) (err error) {
	p, err := startPlatform(ctx, o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.stop()) }()
	say("%d nodes are up, the rack is connected", o.nodes)
	seen, err := watchObjects(ctx, p.admin, p.networkID)
	if err != nil {
		return err
	}
	defer seen.stop()

	if err := ours(ctx, o, p, seen, f); err != nil {
		return err
	}
	if err := p.stopDaemons(); err != nil {
		return err
	}
	for _, limit := range []struct {
		name       string
		qps, burst float32
	}{
		{"bare client-go, the worker's limits", cluster.RequestsPerSecond, cluster.RequestBurst},
		{"bare client-go, without a limit", -1, 0},
	} {
		if err := bare(ctx, o, p, seen, f, limit.name, limit.qps, int(limit.burst)); err != nil {
			return err
		}
	}
	return nil
}

func say(format string, a ...any) {
	fmt.Fprintf(os.Stderr, "%s %s\n", time.Now().Format("15:04:05"), fmt.Sprintf(format, a...))
}

// await polls until done says nothing more; done says what is missing.
func await(ctx context.Context, limit time.Duration, what string, done func() (string, error)) error {
	deadline := time.Now().Add(limit)
	for {
		missing, err := done()
		if err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
		if missing == "" {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s: not after %s: %s", what, limit, missing)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(20 * time.Millisecond):
		}
	}
}
