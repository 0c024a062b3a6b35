package engine

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/cosmicac/cosmicac/services/wrk-agent-inference/internal/ngram"
)

// Label is what the models list says of the model, in full.
const Label = "cosmicac-ngram (demonstration model, simulated quality)"

// DefaultName is the served name when none is given.
const DefaultName = "cosmicac-ngram"

// Options of an Engine.
type Options struct {
	Model *ngram.Model
	// Names under which the model is served; DefaultName when empty.
	Names []string
	// MaxContext bounds prompt and answer together, in tokens; 8192 when zero.
	MaxContext int
	// Running is how many requests generate at once; 8 when zero.
	Running int
	// Waiting is how many more may wait; 256 when zero. Beyond it is 503.
	Waiting int
	Version string
	// Random gives seeds to requests that bring none.
	Random io.Reader
	// Now is the wall clock for `created`; Since is for latencies.
	Now func() time.Time
}

// Engine is the server. Its Handler is safe for concurrent use.
type Engine struct {
	o       Options
	places  chan struct{}
	pending atomic.Int64
	started time.Time
	metrics *metrics
}

// New makes an engine.
func New(o Options) *Engine {
	if len(o.Names) == 0 {
		o.Names = []string{DefaultName}
	}
	if o.MaxContext <= 0 {
		o.MaxContext = 8192
	}
	if o.Running <= 0 {
		o.Running = 8
	}
	if o.Waiting <= 0 {
		o.Waiting = 256
	}
	return &Engine{o: o, places: make(chan struct{}, o.Running), started: o.Now(), metrics: newMetrics(o.Names[0])}
}

// Handler is the HTTP surface.
func (e *Engine) Handler() http.Handler {
	mux := http.NewServeMux()
	ok := func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) }
	mux.HandleFunc("GET /health", ok)
	mux.HandleFunc("GET /ping", ok)
	mux.HandleFunc("GET /version", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, map[string]string{"version": e.o.Version, "engine": "cosmicac-ngram"})
	})
	mux.HandleFunc("GET /v1/models", e.models)
	mux.HandleFunc("POST /v1/chat/completions", func(w http.ResponseWriter, r *http.Request) { e.complete(w, r, true) })
	mux.HandleFunc("POST /v1/completions", func(w http.ResponseWriter, r *http.Request) { e.complete(w, r, false) })
	mux.Handle("GET /metrics", promhttp.HandlerFor(e.metrics.registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		writeError(w, &apiError{status: http.StatusNotFound, kind: "NotFoundError", message: "this engine has no " + r.Method + " of that path"})
	})
	return mux
}

func (e *Engine) models(w http.ResponseWriter, _ *http.Request) {
	list := []any{}
	for _, name := range e.o.Names {
		list = append(list, map[string]any{
			"id": name, "object": "model", "created": e.started.Unix(), "owned_by": "cosmicac", "root": Label, "parent": nil,
			"max_model_len": e.o.MaxContext,
			"description": fmt.Sprintf("a 5-gram model of %d tokens of CosmicAC's own documentation with a vocabulary of %d; it runs on the CPU and is often wrong",
				e.o.Model.CorpusTokens(), e.o.Model.Vocabulary()),
		})
	}
	writeJSON(w, http.StatusOK, map[string]any{"object": "list", "data": list})
}

// enter takes a place in order of arrival. Leave must be called after nil.
func (e *Engine) enter(ctx context.Context) *apiError {
	select {
	case e.places <- struct{}{}:
		e.metrics.running.Inc()
		return nil
	default:
	}
	if e.pending.Add(1) > int64(e.o.Waiting) {
		e.pending.Add(-1)
		return &apiError{status: http.StatusServiceUnavailable, kind: "ServiceUnavailableError", message: fmt.Sprintf("%d requests run and %d wait, no more are taken now", e.o.Running, e.o.Waiting)}
	}
	e.metrics.waiting.Inc()
	defer func() {
		e.pending.Add(-1)
		e.metrics.waiting.Dec()
	}()
	select {
	case e.places <- struct{}{}: // a channel serves its waiters in order
		e.metrics.running.Inc()
		return nil
	case <-ctx.Done():
		return &apiError{status: 499, kind: "ClientDisconnected", message: "the client went away while its request waited"}
	}
}

func (e *Engine) leave() {
	<-e.places
	e.metrics.running.Dec()
}

// prepare renders the prompt, checks model and context, and says how much may be generated.
func (e *Engine) prepare(q *request, chat bool) (tokens []ngram.Token, topic string, limit int, fail *apiError) {
	if !slices.Contains(e.o.Names, q.Model) {
		return nil, "", 0, &apiError{status: http.StatusNotFound, kind: "NotFoundError", param: "model", message: fmt.Sprintf("The model `%s` does not exist.", q.Model)}
	}
	m := e.o.Model
	if chat {
		for _, message := range q.Messages {
			text := string(message.Content)
			switch message.Role {
			case "system", "developer":
				tokens = append(tokens, ngram.System)
			case "assistant":
				tokens = append(tokens, ngram.Assistant)
			default:
				tokens = append(tokens, ngram.User)
				topic = text // the newest question chooses the passages
			}
			tokens = append(append(tokens, m.Encode(text)...), ngram.End)
		}
		tokens = append(tokens, ngram.Assistant)
	} else {
		topic = string(*q.Prompt)
		tokens = m.Encode(topic)
	}
	room := e.o.MaxContext - len(tokens)
	wanted := q.maxTokens()
	if room < 1 || wanted != nil && *wanted > room {
		return nil, "", 0, bad("max_tokens", "This model's maximum context length is %d tokens. However, you requested %d tokens (%d in the prompt, %d in the completion). Please reduce the length of either.",
			e.o.MaxContext, len(tokens)+value(wanted, 1), len(tokens), value(wanted, 1))
	}
	switch {
	case wanted != nil:
		limit = *wanted
	case chat:
		limit = room
	default:
		limit = min(completionTokens, room)
	}
	return tokens, topic, limit, nil
}

// sampling gives choice number i of a request.
func (e *Engine) sampling(q *request, i int) (ngram.Sampling, *apiError) {
	s := ngram.Sampling{
		Temperature: value(q.Temperature, 1), TopP: value(q.TopP, 1), TopK: max(0, value(q.TopK, 0)),
		PresencePenalty: value(q.PresencePenalty, 0), FrequencyPenalty: value(q.FrequencyPenalty, 0), NoEnd: q.IgnoreEOS,
	}
	if q.Seed != nil {
		s.Seed = uint64(*q.Seed) + uint64(i)*0x9e3779b97f4a7c15
		return s, nil
	}
	var b [8]byte
	if _, err := io.ReadFull(e.o.Random, b[:]); err != nil {
		return s, &apiError{status: http.StatusInternalServerError, kind: "InternalServerError", message: "no random seed could be read"}
	}
	s.Seed = binary.LittleEndian.Uint64(b[:])
	return s, nil
}

func asError[T error](err error, target *T) bool { return errors.As(err, target) }

type metrics struct {
	registry                                  *prometheus.Registry
	running, waiting                          prometheus.Gauge
	promptTokens, generationTokens            prometheus.Counter
	firstToken, interToken, endToEnd, queuing prometheus.Observer
	success                                   *prometheus.CounterVec
}

func newMetrics(name string) *metrics {
	labels := prometheus.Labels{"model_name": name, "engine": "0"}
	m := &metrics{registry: prometheus.NewRegistry()}
	gauge := func(name, help string) prometheus.Gauge {
		g := prometheus.NewGauge(prometheus.GaugeOpts{Name: name, Help: help, ConstLabels: labels})
		m.registry.MustRegister(g)
		return g
	}
	counter := func(name, help string) prometheus.Counter {
		c := prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help, ConstLabels: labels})
		m.registry.MustRegister(c)
		return c
	}
	histogram := func(name, help string, buckets []float64) prometheus.Observer {
		h := prometheus.NewHistogram(prometheus.HistogramOpts{Name: name, Help: help, ConstLabels: labels, Buckets: buckets})
		m.registry.MustRegister(h)
		return h
	}
	latency := prometheus.ExponentialBuckets(0.001, 2, 16)
	m.running = gauge("vllm:num_requests_running", "Number of requests that generate.")
	m.waiting = gauge("vllm:num_requests_waiting", "Number of requests that wait for a place.")
	m.promptTokens = counter("vllm:prompt_tokens_total", "Number of prompt tokens processed.")
	m.generationTokens = counter("vllm:generation_tokens_total", "Number of tokens generated.")
	m.firstToken = histogram("vllm:time_to_first_token_seconds", "Time from the request to its first token.", latency)
	m.interToken = histogram("vllm:inter_token_latency_seconds", "Time between two tokens of a request.", prometheus.ExponentialBuckets(0.0001, 2, 16))
	m.endToEnd = histogram("vllm:e2e_request_latency_seconds", "Time from the request to its end.", latency)
	m.queuing = histogram("vllm:request_queue_time_seconds", "Time that a request waited for a place.", latency)
	m.success = prometheus.NewCounterVec(prometheus.CounterOpts{Name: "vllm:request_success_total", Help: "Requests by how they ended.", ConstLabels: labels}, []string{"finished_reason"})
	for _, reason := range []string{"stop", "length", "abort"} {
		m.success.WithLabelValues(reason)
	}
	m.registry.MustRegister(m.success)
	return m
}
