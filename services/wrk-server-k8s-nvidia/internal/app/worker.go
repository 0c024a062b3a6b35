package app

import (
	"context"
	"fmt"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/cosmicac/cosmicac/pkg/health"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/api"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/capacity"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/claim"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/cluster"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/graph"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/preflight"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/probe"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/report"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/tenure"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/volume"
)

// Setup is what a Worker is made of.
type Setup struct {
	Config Config
	// Network is the network's id in hexadecimal.
	Network string
	// Self is who this process is in the rack's Lease.
	Self    tenure.Holder
	Version string
	Health  *health.Set
	Metrics prometheus.Registerer
	Now     func() time.Time
	Log     hclog.Logger
}

// Task is a part that runs until its context ends. An error is fatal.
type Task struct {
	Name string
	Run  func(ctx context.Context) error
}

// Worker is a rack's worker without its place in the mesh.
type Worker struct {
	Server *api.Server
	Entry  *api.Entry
	Tenure *tenure.Tenure
	Hub    *report.Hub
	// Tasks in the order of starting; stop them in reverse.
	Tasks []Task

	client *cluster.Client
	view   *cluster.View
}

// Build puts a worker together. Nothing runs and nothing is dialled yet.
func Build(s Setup) (*Worker, error) {
	c := s.Config
	entry := &api.Entry{}
	var hub *report.Hub
	var engine *graph.Engine
	var conn *cluster.Connection
	var view *cluster.View
	requests := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "cosmicac_rack_cluster_requests_total", Help: "Requests to the Kubernetes API, by method and class of the answer.",
	}, []string{"method", "class"})
	s.Metrics.MustRegister(requests)

	// The way to the cluster.
	conn, err := cluster.NewConnection(cluster.ConnectionOptions{
		Kubeconfig: c.Kubeconfig, Now: s.Now, Log: s.Log.Named("cluster"),
		Changed: func() {
			if fault := conn.Fault(); fault.Code == cluster.FaultNone {
				view.Hurry()
			}
			showFault(s.Health, conn.Server(), conn.Fault())
			hub.Changed()
		},
		Observed: func(method, class string) { requests.WithLabelValues(method, class).Inc() },
	})
	if err != nil {
		return nil, err
	}
	client, err := cluster.NewClient(conn, c.Namespace, "cosmicac-wrk-server-k8s-nvidia/"+s.Version)
	if err != nil {
		return nil, err
	}

	// One process a rack.
	hold := tenure.New(tenure.Options{
		Client: client.Coordination.Leases(c.Namespace), Name: "cosmicac-rack-" + c.Rack.ID, Self: s.Self, Log: s.Log.Named("lease"),
		Changed: func() { hub.Changed() },
	})

	// What the cluster shows, and what it is worth.
	view = cluster.NewView(client, cluster.ViewOptions{
		Rack: c.Rack.ID, Network: s.Network, NodeSelector: c.NodeSelector, Relist: c.Relist, Log: s.Log.Named("view"),
		Changed: func(change cluster.Change) { engine.Touch(change) },
	})
	settings := c.settings(s.Network, s.Version)
	settings.Overlay = c.Overlay.driver(client, s.Now)
	book := claim.NewBook(func(claims []capacity.Claim) *capacity.Rack {
		return capacity.Count(capacity.Input{
			Nodes: view.Nodes(), Pods: view.Pods(), Claims: claims, Permitted: preflight.PermittedBy(kubeVirt(view)), Entry: entry.Get(),
			GPUModels: c.GPUModels, Tolerations: settings.Tolerations, Fabric: c.Fabric.Devices, Overlay: c.Overlay.resource(),
			HostDevices: preflight.HostDevices(kubeVirt(view)),
		})
	}, s.Now)

	// Attempts.
	engine = graph.New(graph.Options{
		Client: client, View: view, Book: book, Settings: settings, Active: hold.Held,
		Answers: func() bool { return conn.Fault().Code == cluster.FaultNone },
		Now:     s.Now, Log: s.Log.Named("graph"),
		Changed: func() { hub.Changed() },
		Stuck: func(attempts []string) {
			if len(attempts) == 0 {
				s.Health.Clear(health.CleanupPending)
				return
			}
			s.Health.Raise(health.CleanupPending, fmt.Sprint(len(attempts)), attempts[0])
		},
	})
	volumes := volume.New(volume.Options{
		Client: client, View: view, Rack: c.Rack.ID, Network: s.Network, StorageClass: c.StorageClass, VolumeMode: c.VolumeMode,
		Writable: engine.Writable, Users: engine.VolumeUsers, Log: s.Log.Named("volumes"),
	})
	hub = report.NewHub(report.Sources{
		RackID: c.Rack.ID, Version: s.Version, Synced: func() bool { return view.Synced() && engine.Loaded() },
		Rack: book.Rack, Statuses: engine.Statuses, DiskJobs: engine.DiskJobs, Volumes: volumes.Statuses, Fault: conn.Fault,
	})
	s.Metrics.MustRegister(report.NewMetrics(hub, hold.Held))

	target := preflight.Target{
		Client: client, NodeSelector: c.NodeSelector, StorageClass: c.StorageClass, GPUModels: c.GPUModels,
		Tolerations: settings.Tolerations, Fabric: c.Fabric.Devices, Skew: conn.Skew,
		Overlay: settings.Overlay, OverlayResource: c.Overlay.resource(),
	}
	return &Worker{
		Server: &api.Server{
			RackID: c.Rack.ID, Engine: engine, Volumes: volumes, Hub: hub, Entry: entry, Tenure: hold, Log: s.Log.Named("api"), Answers: api.NewAnswers(s.Metrics),
			Prober: probe.New(probe.Options{
				Engine: engine, Rack: book.Rack, Image: settings.RuntimeImages["command"], Namespace: c.Namespace, Removal: c.Deadlines.Deletion,
				Now: s.Now, Log: s.Log.Named("probe"),
			}),
			Check: func(ctx context.Context) []*workerv1.CheckFinding { return preflight.Check(ctx, target) },
		},
		Entry: entry, Tenure: hold, Hub: hub, client: client, view: view,
		Tasks: []Task{
			{"kubeconfig", conn.Run},
			{"lease", hold.Run},
			{"view", view.Run},
			{"graph", engine.Run},
			{"report", hub.Run},
			{"preflight", func(ctx context.Context) error {
				return (&outlook{s: s, target: target, view: view, hold: hold, rack: book.Rack}).run(ctx)
			}},
		},
	}, nil
}

func showFault(set *health.Set, server string, f cluster.Fault) {
	switch f.Code {
	case cluster.FaultRefused:
		set.Clear(health.ClusterUnreachable)
		set.Raise(health.CredentialsRefused, server, fmt.Sprintf("%s, since %s", f.Words, f.Since.UTC().Format(time.RFC3339)))
	case cluster.FaultUnreachable:
		set.Clear(health.CredentialsRefused)
		set.Raise(health.ClusterUnreachable, server, fmt.Sprintf("%s, since %s", f.Words, f.Since.UTC().Format(time.RFC3339)))
	default:
		set.Clear(health.ClusterUnreachable)
		set.Clear(health.CredentialsRefused)
	}
}
