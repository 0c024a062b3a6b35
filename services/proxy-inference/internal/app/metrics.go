package app

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/cosmicac/cosmicac/services/proxy-inference/internal/keys"
	"github.com/cosmicac/cosmicac/services/proxy-inference/internal/route"
	"github.com/cosmicac/cosmicac/services/proxy-inference/internal/usage"
)

// registerMetrics adds what is read when asked for.
func registerMetrics(r prometheus.Registerer, records *usage.Recorder, apiKeys *keys.Table, routes *route.Table) {
	gauge := func(name, help string, f func() float64) {
		r.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, f))
	}
	gauge("cosmicac_proxy_usage_spool_records", "Usage records that app-node has not acknowledged.", func() float64 { return float64(records.Status().Records) })
	gauge("cosmicac_proxy_usage_spool_bytes", "Bytes of usage records that app-node has not acknowledged.", func() float64 { return float64(records.Status().Bytes) })
	r.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "cosmicac_proxy_usage_lost_total", Help: "Usage records that could not be kept."},
		func() float64 { return float64(records.Status().Lost) }))
	gauge("cosmicac_proxy_api_keys", "API keys in force.", func() float64 { n, _ := apiKeys.Status(); return float64(n) })
	gauge("cosmicac_proxy_endpoints", "Endpoints known.", func() float64 { n, _ := routes.Status(); return float64(n) })
	gauge("cosmicac_proxy_endpoints_age_seconds", "Age of the table of endpoints, which comes anew on each change; -1 for none.", func() float64 {
		_, since := routes.Status()
		if since.IsZero() {
			return -1
		}
		return time.Since(since).Seconds()
	})
}
