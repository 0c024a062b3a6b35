package proxy

import (
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// maximumEndpoints bounds the endpoints that have series of their own. One that
// was let in stays; all later ones are "other".
const maximumEndpoints = 1000

// Metrics counts requests. Labels come from known sets alone: ids of endpoints
// that exist, classes of status, and this package's own words.
type Metrics struct {
	requests  *prometheus.CounterVec
	inFlight  prometheus.Gauge
	firstByte *prometheus.HistogramVec
	tokens    *prometheus.CounterVec
	retries   *prometheus.CounterVec

	mu    sync.Mutex
	known map[string]bool
}

// NewMetrics makes and registers the metrics.
func NewMetrics(r prometheus.Registerer) *Metrics {
	m := &Metrics{
		known: map[string]bool{},
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "cosmicac_proxy_requests_total",
			Help: "Requests by endpoint and outcome: a class of status, broken (cut off after the first byte) or left (by the client)."}, []string{"endpoint", "outcome"}),
		inFlight: prometheus.NewGauge(prometheus.GaugeOpts{Name: "cosmicac_proxy_requests_in_flight", Help: "Requests under way."}),
		firstByte: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "cosmicac_proxy_first_byte_seconds",
			Help: "Time from the request to the first byte of an answer.", Buckets: []float64{.01, .03, .1, .3, 1, 3, 10, 30, 100, 300}}, []string{"endpoint"}),
		tokens: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "cosmicac_proxy_tokens_total",
			Help: "Tokens as the engines counted them."}, []string{"endpoint", "kind"}),
		retries: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "cosmicac_proxy_failed_tries_total",
			Help: "Tries on a replica that gave no answer, by reason."}, []string{"reason"}),
	}
	r.MustRegister(m.requests, m.inFlight, m.firstByte, m.tokens, m.retries)
	return m
}

func (m *Metrics) begin() { m.inFlight.Inc() }

func (m *Metrics) end(c *call) {
	m.inFlight.Dec()
	endpoint := m.label(c.endpointID())
	outcome := strconv.Itoa(c.status/100) + "xx"
	switch {
	case c.status == statusClientGone:
		outcome = "left"
	case c.incomplete:
		outcome = "broken"
	}
	m.requests.WithLabelValues(endpoint, outcome).Inc()
	if c.firstByte > 0 {
		m.firstByte.WithLabelValues(endpoint).Observe(float64(c.firstByte) / float64(time.Second))
	}
	if c.usage.PromptTokens > 0 {
		m.tokens.WithLabelValues(endpoint, "prompt").Add(float64(c.usage.PromptTokens))
	}
	if c.usage.CompletionTokens > 0 {
		m.tokens.WithLabelValues(endpoint, "completion").Add(float64(c.usage.CompletionTokens))
	}
}

func (m *Metrics) retried(f failure) {
	m.retries.WithLabelValues([]string{"unreached", "broke", "busy", "unwell"}[f]).Inc()
}

// label is an endpoint's own id while there is room for it.
func (m *Metrics) label(endpoint string) string {
	if endpoint == "" {
		return "none"
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.known[endpoint] {
		if len(m.known) >= maximumEndpoints {
			return "other"
		}
		m.known[endpoint] = true
	}
	return endpoint
}
