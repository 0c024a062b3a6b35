package app

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"

	"github.com/cosmicac/cosmicac/pkg/health"
	"github.com/cosmicac/cosmicac/pkg/id"
	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	"github.com/cosmicac/cosmicac/pkg/mesh/cards"
	"github.com/cosmicac/cosmicac/pkg/trust"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/agents"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/api"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/endpoint"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/metrics"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/notice"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/rack"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/reconcile"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/record"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/volume"
)

// Setup is what an orchestrator is made of; all but Alive is required.
type Setup struct {
	Config Config
	// Store is the open record; its changes are published on Hub.
	Store   *record.Store
	Hub     *notice.Hub
	Key     *identity.Key
	Network *trust.Network
	Health  *health.Set
	Metrics prometheus.Registerer
	Clock   func() time.Time
	Log     hclog.Logger
	// NewMesh makes the node; it is called once, with what ork adds.
	NewMesh func(func(*mesh.Options)) (*mesh.Node, error)
	// Alive is told at each pass of the loop.
	Alive func()
}

// Task is a part that runs until its context ends.
type Task struct {
	Name string
	Run  func(context.Context) error
}

// Ork is an orchestrator that was put together; it runs with its tasks, and
// answers once its node is started.
type Ork struct {
	Node  *mesh.Node
	Tasks []Task
}

// Build puts the parts together, in the order in which they need each other.
// ctx is the life of the racks' streams.
func Build(ctx context.Context, s Setup) (*Ork, error) {
	store, hub := s.Store, s.Hub
	entries, err := store.Racks(ctx)
	if err != nil {
		return nil, err
	}

	// Node, loop and the rest point at each other; the node and the loop are
	// filled in below, before anything runs.
	var node *mesh.Node
	var loop *reconcile.Loop
	var volumes *volume.Keeper
	registry := cards.New(s.Network, s.Clock)
	fleet := rack.New(rack.Options{
		Quarantined: store.Quarantined,
		Dial:        func(worker peer.ID) grpc.ClientConnInterface { return node.Client(worker) },
		Changed:     func(jobs []string) { loop.Poke(jobs...); volumes.Poke() },
		Silence:     s.Config.Workers.StreamSilence, Clock: s.Clock, Log: s.Log.Named("racks"),
	})
	policy := s.Config.Policy()
	policy.Nodes = func(rackID string) int {
		v, _ := fleet.View(rackID)
		return len(v.Report.GetNodes())
	}
	store.Keep(policy)
	desk, err := agents.New(ctx, agents.Options{
		Store: store, Key: s.Key, Network: s.Network, Hub: hub,
		CertificateLife: s.Config.Agents.CertificateLife, TokenLife: s.Config.Agents.TokenLife,
		Changed: func(jobID string) { loop.Poke(jobID) },
		PutCard: registry.Put, Card: registry.Get,
		Revet: func() { node.Revet() },
		Clock: s.Clock, Log: s.Log.Named("agents"),
	})
	if err != nil {
		return nil, err
	}
	watch := &wellbeing{health: s.Health, store: store, fleet: fleet, clock: s.Clock, unrecorded: func() map[string]bool { return loop.Unrecorded() }}
	counters, err := metrics.New(s.Metrics, store.Counts, fleet.Views, watch.storage)
	if err != nil {
		return nil, err
	}
	source := id.NewSource(s.Clock, nil)
	loop = reconcile.New(reconcile.Options{
		Store: store, Hub: hub, Racks: fleet, Agents: desk, Counters: counters,
		Seeds:  func() reconcile.Seeds { return seeds(node) },
		Limits: s.Config.Limits(), NewID: source.New, Clock: s.Clock, Log: s.Log.Named("jobs"),
		CallTimeout: s.Config.Workers.CallTimeout, Repeat: s.Config.Workers.Repeat, ReserveAfter: s.Config.Placement.ReserveAfter, Age: s.Config.Placement.Age, Alive: s.Alive,
		StartsAtOnce: s.Config.Quarantine.StartsAtOnce, Stood: watch.stood,
	})
	volumes = volume.New(volume.Options{
		Store: store, Racks: fleet, Changed: func() { loop.Poke() }, Clock: s.Clock, Log: s.Log.Named("volumes"),
		Every: 2 * time.Second, CallTimeout: s.Config.Workers.CallTimeout, Repeat: s.Config.Workers.Repeat, Grace: s.Config.Deadlines.AbsenceGrace,
	})
	board := endpoint.New(store, hub)

	if node, err = s.NewMesh(func(m *mesh.Options) {
		m.Role, m.DHT = meshv1.Role_ROLE_ORK, mesh.DHTServer
		m.VerifyJoin, m.Vet = desk.VerifyJoin, desk.Vet
	}); err != nil {
		return nil, err
	}
	orkv1.RegisterJobsServer(node, &api.Jobs{Store: store, Hub: hub, NewID: source.New, Clock: s.Clock, Queue: loop.Queue})
	orkv1.RegisterRacksServer(node, &api.Racks{Store: store, Fleet: fleet, Network: s.Network, Log: s.Log.Named("racks"), Queue: loop.Queue, Unrecorded: loop.Unrecorded, Changed: loop.Poke, Clock: s.Clock})
	orkv1.RegisterVolumesServer(node, &api.Volumes{Store: store, Fleet: fleet, NewID: source.New, Clock: s.Clock, Changed: volumes.Poke, Log: s.Log.Named("volumes")})
	orkv1.RegisterQuotasServer(node, &api.Quotas{Store: store, Changed: func() { loop.Poke() }})
	orkv1.RegisterAgentsServer(node, desk)
	orkv1.RegisterRevocationsServer(node, desk)
	orkv1.RegisterEndpointsServer(node, board)
	meshv1.RegisterCardsServer(node, registry)

	fleet.Start(ctx, entries)
	return &Ork{Node: node, Tasks: []Task{
		{"racks", fleet.Wait},
		{"certificates", desk.Run},
		{"jobs", loop.Run},
		{"volumes", volumes.Run},
		{"endpoints", board.Run},
		{"wellbeing", watch.run},
	}}, nil
}

// seeds is what the network looks like for a VM born now.
func seeds(node *mesh.Node) reconcile.Seeds {
	n := node.Network()
	network := n.ID()
	return reconcile.Seeds{
		NetworkID: network[:], RootKeys: n.RootKeys(), Bootstraps: n.Info().GetBootstraps(),
		OrkKey: node.ID().String(), OrkAddresses: node.Addresses(),
	}
}

// wellbeing raises and clears the daemon's health warnings.
type wellbeing struct {
	health *health.Set
	store  *record.Store
	fleet  *rack.Fleet
	clock  func() time.Time
	// unrecorded are the jobs that racks report and no record knows.
	unrecorded func() map[string]bool

	mu      sync.Mutex
	stoodAt time.Time // when the process went on after it had stood still
}

// noticeLife is how long after a stand-still that is worth a notice.
const noticeLife = 15 * time.Minute

// stood is told when the process had stood still.
func (w *wellbeing) stood(still time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.stoodAt = w.clock()
	w.health.Raise(health.StoodStill, still.Round(time.Second))
}

func (w *wellbeing) storage(err error) {
	if err != nil {
		w.health.RaiseFor(health.StorageFailing, "job record", "using the job record", err)
		return
	}
	w.health.ClearFor(health.StorageFailing, "job record")
}

// cleanupPatience is how long an ended attempt may leave objects before it is
// worth a warning.
const cleanupPatience = 5 * time.Minute

func (w *wellbeing) run(ctx context.Context) error {
	tick := time.NewTicker(5 * time.Second)
	defer tick.Stop()
	prune := w.clock()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		w.look(ctx)
		if now := w.clock(); now.Sub(prune) > time.Hour {
			prune = now
			if err := w.store.Prune(ctx); err != nil && ctx.Err() == nil {
				w.storage(err)
			}
		}
	}
}

func (w *wellbeing) look(ctx context.Context) {
	w.mu.Lock()
	if w.clock().Sub(w.stoodAt) > noticeLife {
		w.health.Clear(health.StoodStill)
	}
	w.mu.Unlock()
	away, simulated := 0, ""
	views := w.fleet.Views()
	for _, v := range views {
		if !v.Connected && !v.ReportedAt.IsZero() {
			away++
		}
		if v.Report.GetSimulated() {
			simulated = v.Entry.Id
		}
	}
	set := func(on bool, code health.Code, args ...any) {
		if on {
			w.health.Raise(code, args...)
		} else {
			w.health.Clear(code)
		}
	}
	set(simulated != "", health.Simulated, "rack "+simulated)
	live, err := w.store.Live(ctx)
	if err != nil {
		return
	}
	late, oldest := 0, ""
	silent, known := 0, 0
	for _, j := range live {
		for _, r := range j.Replicas {
			for _, a := range r.Attempts {
				if !job.Ended(a.State) && a.RackID != "" {
					known++
					if a.Unreachable.Set() {
						silent++
					}
				}
				if job.Ended(a.State) && !a.Gone && w.clock().Sub(a.EndedAt) > cleanupPatience {
					if late++; oldest == "" {
						oldest = a.ID + " of job " + j.ID
					}
				}
			}
		}
	}
	set(late > 0, health.CleanupPending, late, oldest)
	many := fmt.Sprintf("%d of %d racks", away, len(views))
	if silent >= manySilent && silent*2 > known {
		many = fmt.Sprintf("%d of %d attempts", silent, known)
	}
	set(away > 1 && away*2 > len(views) || silent >= manySilent && silent*2 > known, health.ManyUnreachable, many)
	w.returned(ctx, views)
	unrecorded := w.unrecorded()
	for _, v := range views {
		held := make(map[string]bool)
		for _, a := range v.Report.GetAttempts() {
			held[a.JobId] = unrecorded[a.JobId]
		}
		for _, id := range v.Report.GetDiskJobIds() {
			held[id] = unrecorded[id]
		}
		maps.DeleteFunc(held, func(_ string, unknown bool) bool { return !unknown })
		if jobs := slices.Sorted(maps.Keys(held)); len(jobs) > 0 {
			w.health.RaiseFor(health.UnrecordedWork, v.Entry.Id, v.Entry.Id, len(jobs), jobs[0], v.Entry.Id)
		} else {
			w.health.ClearFor(health.UnrecordedWork, v.Entry.Id)
		}
		if why := w.store.Failing(v.Entry.Id); why != "" {
			w.health.RaiseFor(health.RackFailing, v.Entry.Id, v.Entry.Id, why)
		} else {
			w.health.ClearFor(health.RackFailing, v.Entry.Id)
		}
	}
}

// manySilent is how many silent attempts are many.
const manySilent = 3

// returned warns of racks that were removed by force and are back with what was
// left there.
func (w *wellbeing) returned(ctx context.Context, views []rack.View) {
	left, err := w.store.Forgotten(ctx)
	if err != nil {
		return // shown by the loop, which reads the record all the time
	}
	for _, v := range views {
		if !slices.ContainsFunc(left, func(f *orkv1.ForgottenRack) bool { return f.RackId == v.Entry.Id }) {
			w.health.ClearFor(health.AbandonedWork, v.Entry.Id)
		}
	}
	for _, f := range left {
		v, back := w.fleet.View(f.RackId)
		if !back || v.Report == nil {
			continue
		}
		var present []string
		for _, a := range f.Attempts {
			if v.Status(a.AttemptId) != nil {
				present = append(present, a.AttemptId+" of job "+a.JobId)
			}
		}
		w.health.RaiseFor(health.AbandonedWork, f.RackId, f.RackId, f.ForgottenAt.AsTime().Format(time.RFC3339), len(present), strings.Join(present, ", "), f.RackId)
	}
}
