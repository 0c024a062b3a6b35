package report

import (
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
)

// Metrics exposes the newest report. Labels come from closed sets: GPU models
// that the cluster and the operator know, and phases.
type Metrics struct {
	hub  *Hub
	held func() bool
}

// NewMetrics makes a collector of a hub; held says whether this process works
// on the rack.
func NewMetrics(hub *Hub, held func() bool) *Metrics { return &Metrics{hub: hub, held: held} }

var (
	gpuDesc = prometheus.NewDesc("cosmicac_rack_gpus", "GPUs of the rack by model: total, healthy, held, offerable.", []string{"model", "count"}, nil)
	attempt = prometheus.NewDesc("cosmicac_rack_attempts", "Attempts that the cluster holds something of, by phase.", []string{"phase"}, nil)
	nodes   = prometheus.NewDesc("cosmicac_rack_nodes", "Nodes of the rack, by whether they take new work.", []string{"schedulable"}, nil)
	synced  = prometheus.NewDesc("cosmicac_rack_synced", "1 once everything was listed.", nil, nil)
	faulty  = prometheus.NewDesc("cosmicac_rack_cluster_fault", "1 while the cluster cannot be asked.", nil, nil)
	holding = prometheus.NewDesc("cosmicac_rack_lease_held", "1 while this process works on the rack.", nil, nil)
)

// Describe implements prometheus.Collector.
func (m *Metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{gpuDesc, attempt, nodes, synced, faulty, holding} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (m *Metrics) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	truth := func(b bool) float64 {
		if b {
			return 1
		}
		return 0
	}
	gauge(holding, truth(m.held()))
	r, _ := m.hub.Latest()
	if r == nil {
		return
	}
	gauge(synced, truth(r.Synced))
	gauge(faulty, truth(r.ClusterFault != ""))
	type sums struct{ total, healthy, held, offerable uint32 }
	models, open, closed := map[string]*sums{}, 0, 0
	for _, n := range r.Nodes {
		if n.Schedulable {
			open++
		} else {
			closed++
		}
		for _, g := range n.Gpus {
			s := models[g.Model]
			if s == nil {
				s = &sums{}
				models[g.Model] = s
			}
			s.total += g.Total
			s.healthy += g.Healthy
			s.held += g.Held
			s.offerable += g.Offerable
		}
	}
	gauge(nodes, float64(open), "true")
	gauge(nodes, float64(closed), "false")
	for model, s := range models {
		gauge(gpuDesc, float64(s.total), model, "total")
		gauge(gpuDesc, float64(s.healthy), model, "healthy")
		gauge(gpuDesc, float64(s.held), model, "held")
		gauge(gpuDesc, float64(s.offerable), model, "offerable")
	}
	phases := map[workerv1.AttemptPhase]int{}
	for _, a := range r.Attempts {
		phases[a.Phase]++
	}
	for number, name := range workerv1.AttemptPhase_name {
		if number != 0 {
			gauge(attempt, float64(phases[workerv1.AttemptPhase(number)]), strings.ToLower(strings.TrimPrefix(name, "ATTEMPT_PHASE_")))
		}
	}
}
