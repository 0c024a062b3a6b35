package api

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/cosmicac/cosmicac/pkg/fault"
)

// metrics counts requests. Labels are routes of the table, methods of the table
// and kinds of a closed list: nothing that a caller can make up.
type metrics struct {
	requests *prometheus.CounterVec
	seconds  *prometheus.HistogramVec
	logins   *prometheus.CounterVec
	streams  prometheus.Gauge
}

func newMetrics(registry prometheus.Registerer) *metrics {
	m := &metrics{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "cosmicac_app_node_http_requests_total", Help: "Requests by route, method and class of status.",
		}, []string{"route", "method", "status"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "cosmicac_app_node_http_request_seconds", Help: "Time to answer by route; streams are left out.",
			Buckets: []float64{.001, .005, .02, .1, .5, 2, 10},
		}, []string{"route", "method"}),
		logins: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "cosmicac_app_node_logins_total", Help: "Sign-ins by outcome.",
		}, []string{"outcome"}),
		streams: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "cosmicac_app_node_event_streams", Help: "Event streams that are open now.",
		}),
	}
	if registry != nil {
		registry.MustRegister(m.requests, m.seconds, m.logins, m.streams)
	}
	return m
}

func (m *metrics) observe(method, route string, status int, took time.Duration, stream bool) {
	m.requests.WithLabelValues(route, method, statusClass(status)).Inc()
	if !stream {
		m.seconds.WithLabelValues(route, method).Observe(took.Seconds())
	}
}

func (m *metrics) login(err error) {
	outcome := "ok"
	if err != nil {
		outcome = string(fault.KindOf(err))
	}
	m.logins.WithLabelValues(outcome).Inc()
}
