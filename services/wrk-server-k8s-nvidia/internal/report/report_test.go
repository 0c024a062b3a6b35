package report

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/capacity"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/cluster"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("k8s.io/klog/v2.(*flushDaemon).run.func1"))
}

type rack struct {
	attempts atomic.Int32
	builds   atomic.Int32
}

func (r *rack) hub() *Hub {
	return NewHub(Sources{
		RackID: "rk", Version: "1", Synced: func() bool { return true },
		Rack: func() *capacity.Rack {
			r.builds.Add(1)
			return &capacity.Rack{Nodes: map[string]*capacity.Node{"n": {Name: "n", GPUs: map[string]*capacity.GPU{"X": {Model: "X", Total: 8, Held: 3, Offerable: 5}}}}}
		},
		Statuses: func() []*workerv1.AttemptStatus {
			var out []*workerv1.AttemptStatus
			for range r.attempts.Load() {
				out = append(out, &workerv1.AttemptStatus{AttemptId: "a", Phase: workerv1.AttemptPhase_ATTEMPT_PHASE_UP})
			}
			return out
		},
		Volumes: func() []*workerv1.VolumeStatus { return nil }, DiskJobs: func() []string { return nil },
		Fault: func() cluster.Fault {
			if r.attempts.Load() == 7 {
				return cluster.Fault{Code: cluster.FaultRefused, Words: "refused", Since: time.Unix(1, 0)}
			}
			return cluster.Fault{}
		},
	})
}

func start(t *testing.T, h *Hub) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = h.Run(ctx) })
	t.Cleanup(func() { cancel(); wg.Wait() })
}

func TestTheNewestReportAlwaysArrivesAndABurstIsMerged(t *testing.T) {
	t.Parallel()
	r := &rack{}
	h := r.hub()
	start(t, h)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	got := make(chan *workerv1.WatchRackResponse, 1000)
	done := make(chan error, 1)
	go func() {
		done <- h.Watch(ctx, func(m *workerv1.WatchRackResponse) error { got <- m; return nil })
	}()
	if first := <-got; !first.Synced || first.Sequence == 0 || first.Nodes[0].Gpus[0].Held != 3 {
		t.Fatalf("the first report %v", first)
	}
	for range 300 {
		r.attempts.Add(1)
		h.Changed()
		time.Sleep(time.Millisecond)
	}
	reports, last := 0, uint64(0)
	deadline := time.After(30 * time.Second)
	for {
		select {
		case m := <-got:
			reports++
			if m.Sequence <= last {
				t.Fatalf("sequence %d after %d", m.Sequence, last)
			}
			last = m.Sequence
			if len(m.Attempts) != 300 {
				continue
			}
		case <-deadline:
			t.Fatal("the newest report did not arrive")
		}
		break
	}
	if reports > 30 {
		t.Errorf("%d reports of one burst", reports)
	}
	// A change that changes nothing is no report.
	builds := r.builds.Load()
	h.Changed()
	for r.builds.Load() == builds {
		time.Sleep(time.Millisecond)
	}
	select {
	case m := <-got:
		if len(m.Attempts) != 300 {
			t.Errorf("a report without news: %v", m)
		}
	case <-time.After(300 * time.Millisecond):
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
}

func TestAWatcherThatFailsIsLeft(t *testing.T) {
	t.Parallel()
	h := (&rack{}).hub()
	start(t, h)
	broken := errors.New("broken")
	if err := h.Watch(t.Context(), func(*workerv1.WatchRackResponse) error { return broken }); !errors.Is(err, broken) {
		t.Fatal(err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.watchers) != 0 {
		t.Fatal("it is still watched for")
	}
}

func TestAFaultStandsInTheReportAndInTheMetrics(t *testing.T) {
	t.Parallel()
	r := &rack{}
	r.attempts.Store(7)
	h := r.hub()
	h.make(true)
	m, _ := h.Latest()
	if m.ClusterFault != "refused" || m.ClusterFaultSince.AsTime().Unix() != 1 {
		t.Fatalf("report %v", m)
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(NewMetrics(h, func() bool { return true }))
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, f := range families {
		names = append(names, f.GetName())
		if f.GetName() == "cosmicac_rack_gpus" && len(f.Metric) != 4 {
			t.Errorf("%d series of one model", len(f.Metric))
		}
	}
	if got := strings.Join(names, " "); got != "cosmicac_rack_attempts cosmicac_rack_cluster_fault cosmicac_rack_gpus cosmicac_rack_lease_held cosmicac_rack_nodes cosmicac_rack_synced" {
		t.Errorf("metrics %s", got)
	}
}
