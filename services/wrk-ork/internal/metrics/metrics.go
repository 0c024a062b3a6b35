// Package metrics is what the orchestrator counts about itself, in Prometheus
// form. Every label comes from a closed list of the wire (states, reasons) or
// of this service, so a flood of odd input cannot add series. It holds no truth:
// counters start at zero with the process.
package metrics

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/rack"
)

// Metrics implements the loop's counters.
type Metrics struct {
	placements *prometheus.CounterVec
	attempts   *prometheus.CounterVec
	failures   *prometheus.CounterVec
	storage    func(error)
}

// New registers the metrics. jobs counts the recorded jobs by state, views
// lists the racks; both are asked at each scrape. storage is told of the
// record's health.
func New(r prometheus.Registerer, jobs func(context.Context) (map[orkv1.State]int, error), views func() []rack.View, storage func(error)) (*Metrics, error) {
	m := &Metrics{
		placements: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "cosmicac_ork_placements_total", Help: "Placement decisions by result: placed, or a reason that is news to its job.",
		}, []string{"result"}),
		attempts: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "cosmicac_ork_attempts_ended_total", Help: "Attempts that ended, by state and reason.",
		}, []string{"state", "reason"}),
		failures: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "cosmicac_ork_reconcile_errors_total", Help: "Reads, writes and calls of the reconciler that failed and are tried again.",
		}, []string{"doing"}),
		storage: storage,
	}
	for _, c := range []prometheus.Collector{m.placements, m.attempts, m.failures, &scrape{jobs: jobs, views: views}} {
		if err := r.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// Placement counts one decision.
func (m *Metrics) Placement(result string) { m.placements.WithLabelValues(result).Inc() }

// Outcome counts an attempt that ended.
func (m *Metrics) Outcome(state, reason string) { m.attempts.WithLabelValues(state, reason).Inc() }

// Failure counts something that is tried again.
func (m *Metrics) Failure(doing string) { m.failures.WithLabelValues(doing).Inc() }

// Storage passes on how the record answered.
func (m *Metrics) Storage(err error) { m.storage(err) }

var (
	jobsDesc      = prometheus.NewDesc("cosmicac_ork_jobs", "Recorded jobs by state.", []string{"state"}, nil)
	racksDesc     = prometheus.NewDesc("cosmicac_ork_racks", "Rack entries.", nil, nil)
	connectedDesc = prometheus.NewDesc("cosmicac_ork_racks_connected", "Racks whose worker is watched now.", nil, nil)
	closedDesc    = prometheus.NewDesc("cosmicac_ork_quarantines", "Nodes, or GPU models of a node, that are left out of placement.", nil, nil)
	gpusDesc      = prometheus.NewDesc("cosmicac_ork_gpus", "GPUs of the racks' newest reports: total, held, offerable.", []string{"count"}, nil)
)

// scrape collects what is counted at the moment it is asked.
type scrape struct {
	jobs  func(context.Context) (map[orkv1.State]int, error)
	views func() []rack.View
}

// Describe implements prometheus.Collector.
func (s *scrape) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{jobsDesc, racksDesc, connectedDesc, closedDesc, gpusDesc} {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (s *scrape) Collect(out chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	if counts, err := s.jobs(ctx); err == nil {
		for _, state := range job.States() {
			gauge(jobsDesc, float64(counts[state]), job.StateName(state))
		}
	}
	views := s.views()
	connected, closed, total, held, offerable := 0, 0, 0, 0, 0
	for _, v := range views {
		closed += len(v.Quarantined)
		if v.Connected {
			connected++
		}
		for _, n := range v.Report.GetNodes() {
			for _, g := range n.Gpus {
				total += int(g.Total)
				held += int(g.Held)
				offerable += int(g.Offerable)
			}
		}
	}
	gauge(racksDesc, float64(len(views)))
	gauge(connectedDesc, float64(connected))
	gauge(closedDesc, float64(closed))
	gauge(gpusDesc, float64(total), "total")
	gauge(gpusDesc, float64(held), "held")
	gauge(gpusDesc, float64(offerable), "offerable")
}
