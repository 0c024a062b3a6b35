// Package app wires a rack's worker and runs it under the daemon's life. It
// holds no logic of claims or objects, and the only loop of its own is the one
// that registers the rack with the orchestrator.
package app

import (
	"context"
	"os"
	"time"

	"github.com/go-logr/logr/funcr"
	"github.com/hashicorp/go-hclog"
	"google.golang.org/grpc"
	"k8s.io/klog/v2"

	"github.com/libp2p/go-libp2p/core/peer"

	"github.com/cosmicac/cosmicac/pkg/daemon"
	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/health"
	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	"github.com/cosmicac/cosmicac/pkg/trust"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/tenure"
)

// Run is the program, from a checked configuration to the end of ctx.
func Run(ctx context.Context, env *daemon.Env, c Config) error {
	quietKubernetes(env.Log.Named("client-go"))
	host, err := os.Hostname()
	if err != nil {
		return fault.Wrap(fault.Internal, err, "ask for this host's name")
	}
	w, err := Build(Setup{
		Config: c, Network: env.Network.ID().String(), Version: env.Version, Health: env.Health, Metrics: env.Metrics, Now: time.Now, Log: env.Log,
		Self: tenure.Holder{Key: env.Key.ID().String(), Place: host + ":" + env.StateDirectory, Instance: env.Instance()},
	})
	if err != nil {
		return err
	}
	node, err := env.Mesh(ctx, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_WORKER })
	if err != nil {
		return err
	}
	workerv1.RegisterRackServer(node, w.Server)
	// The cluster first: until it is listed, reports say that they are not
	// complete, and nothing is granted. The stop goes backwards: the mesh ends,
	// then passes that were begun return, then the Lease is given up.
	for _, t := range w.Tasks {
		env.Go(t.Name, t.Run)
	}
	if err := env.StartMesh(ctx); err != nil {
		return err
	}
	r := registrar{
		rack: c.Rack.ID, version: env.Version, self: env.Key.ID().String(), network: env.Network, worker: w, health: env.Health, log: env.Log.Named("register"),
		client: func(p peer.ID) grpc.ClientConnInterface { return node.Client(p) }, keep: func(p peer.ID) func() { return node.Keep(p) },
	}
	env.Go("register", r.run)
	env.Go("reach", func(ctx context.Context) error {
		return followMesh(ctx, env.Network, node.FindCard, w.Server.Engine.SetReach)
	})
	env.Ready()
	<-ctx.Done()
	return nil
}

// quietKubernetes sends the lines of the Kubernetes libraries to our log.
func quietKubernetes(log hclog.Logger) {
	klog.SetLogger(funcr.New(func(prefix, args string) { log.Debug(args, "part", prefix) }, funcr.Options{}))
}

// registrar tells the orchestrator, again and again, that this worker is there.
// A registration makes ork watch the worker at once; without it ork would come
// by itself later.
type registrar struct {
	rack, version, self string
	network             *trust.Network
	worker              *Worker
	health              *health.Set
	log                 hclog.Logger
	client              func(peer.ID) grpc.ClientConnInterface
	keep                func(peer.ID) func()
}

// Pauses of the registrar.
const (
	registerAgain = 30 * time.Second
	registerSoon  = 250 * time.Millisecond
	registerRetry = 2 * time.Second
	registerMost  = 30 * time.Second
	registerCall  = 10 * time.Second
)

func (r registrar) run(ctx context.Context) error {
	kept := map[peer.ID]func(){}
	defer func() {
		for _, release := range kept {
			release()
		}
	}()
	changed, cancel := r.network.Subscribe()
	defer cancel()
	wait, last := registerRetry, ""
	for {
		orks := map[peer.ID]bool{}
		for _, m := range r.network.ByRole(meshv1.Role_ROLE_ORK) {
			if p, err := identity.ParseID(m.Key); err == nil {
				orks[p] = true
				if kept[p] == nil {
					kept[p] = r.keep(p)
				}
			}
		}
		for p, release := range kept {
			if !orks[p] {
				release()
				delete(kept, p)
			}
		}
		pause := registerAgain
		if _, other := r.worker.Tenure.Other(); !other && !r.worker.Tenure.Held() {
			pause = registerSoon // the Lease is about to be taken, or the cluster is away and said to be
		} else if err := r.register(ctx, orks); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			if err.Error() != last {
				r.log.Warn("the rack is not registered", "error", err)
			}
			last = err.Error()
			pause = wait
			wait = min(2*wait, registerMost)
		} else {
			if last != "" {
				r.log.Info("the rack is registered")
			}
			wait, last = registerRetry, ""
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case <-time.After(pause):
		}
	}
}

// register calls each ork; one that takes the rack is enough.
func (r registrar) register(ctx context.Context, orks map[peer.ID]bool) error {
	if other, ok := r.worker.Tenure.Other(); ok {
		return fault.New(fault.Unavailable, "key %s on %s works on this rack", other.Key, other.Place)
	}
	if len(orks) == 0 {
		r.health.Raise(health.OrkUnreachable, "the roster lists none")
		return fault.New(fault.FailedPrecondition, "no orchestrator in the roster")
	}
	var first error
	for p := range orks {
		callCtx, cancel := context.WithTimeout(ctx, registerCall)
		answer, err := orkv1.NewRacksClient(r.client(p)).RegisterRack(callCtx, &orkv1.RegisterRackRequest{RackId: r.rack, Version: r.version})
		cancel()
		if err == nil {
			r.health.Clear(health.OrkUnreachable)
			r.health.Clear(health.RackNotRegistered)
			if answer.GetEntry().GetId() == r.rack {
				r.worker.Entry.Put(answer.Entry)
				r.worker.Hub.Changed()
			}
			return nil
		}
		if err = fault.FromGRPC(err); first == nil {
			first = err
		}
	}
	switch fault.KindOf(first) {
	case fault.NotFound, fault.Conflict, fault.Denied:
		r.health.Clear(health.OrkUnreachable)
		r.health.RaiseFor(health.RackNotRegistered, r.rack, r.rack, r.self)
	default:
		r.health.Raise(health.OrkUnreachable, first.Error())
	}
	return first
}
