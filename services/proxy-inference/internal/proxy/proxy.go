// Package proxy is the HTTP face of inference: it checks a request, finds who
// serves it, passes it on and passes the answer back byte for byte.
//
// A request is tried on another replica only while nothing of an answer has gone
// to the client. After that a break is said plainly: an error event in a stream,
// then a connection that ends without its proper end.
//
// Caller's keys and cookies never go to an engine, engines' headers go to the
// caller by a list, and bodies are neither decoded nor logged. The package does
// not keep keys, endpoints or records itself, and knows no model's parameters.
package proxy

import (
	"context"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"

	appv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/app/v1"
	"github.com/cosmicac/cosmicac/services/proxy-inference/internal/keys"
	"github.com/cosmicac/cosmicac/services/proxy-inference/internal/openai"
	"github.com/cosmicac/cosmicac/services/proxy-inference/internal/route"
)

// Limits bound what requests may take of this process.
type Limits struct {
	// Body is the largest request body in bytes.
	Body int64
	// BodyMemory is for the bodies of all requests together, in bytes.
	BodyMemory int64
	// Requests is how many may be under way at once.
	Requests int64
	// Attempts is on how many replicas one request is tried.
	Attempts int
	// AffinityBytes is how much of a prompt's beginning decides its home.
	AffinityBytes int
}

// Timeouts bound silence, never the whole of a request.
type Timeouts struct {
	// Connect is for a new connection to a replica.
	Connect time.Duration
	// FirstByte is for the first byte of an answer, and Idle for each further one.
	FirstByte, Idle time.Duration
	// KeepAlive is how long an idle connection to an engine is kept.
	KeepAlive time.Duration
	// Upload is for each piece of a request body, Write for each piece that a
	// client takes.
	Upload, Write time.Duration
	// Commit is after how long the engine's headers go out without a body, and
	// Comment how often an SSE comment follows them until the first event; zero
	// for never.
	Commit, Comment time.Duration
}

// Dial opens a connection to a replica's engine.
type Dial func(ctx context.Context, r route.Replica) (net.Conn, error)

// Options are what a Handler needs.
type Options struct {
	Keys     *keys.Table
	Routes   *route.Table
	Dial     Dial
	Record   func(*appv1.UsageRecord)
	Limits   Limits
	Timeouts Timeouts
	Metrics  *Metrics
	Log      hclog.Logger
	Now      func() time.Time
	Random   io.Reader
}

// Handler answers requests. Close it after its last one.
type Handler struct {
	Options
	transport *http.Transport
	running   atomic.Int64
	memory    budget
	buffers   sync.Pool // of whole pieces to read into
	events    sync.Pool // of pieces to append events to
}

// New makes a handler.
func New(o Options) *Handler {
	h := &Handler{Options: o, memory: budget{maximum: o.Limits.BodyMemory}}
	h.transport = h.newTransport()
	h.buffers.New = func() any { b := make([]byte, 32<<10); return &b }
	h.events.New = func() any { b := make([]byte, 0, 4<<10); return &b }
	return h
}

// Close drops idle connections to engines.
func (h *Handler) Close() { h.transport.CloseIdleConnections() }

// Running is how many requests are under way.
func (h *Handler) Running() int64 { return h.running.Load() }

// face is one path of the surface.
type face struct {
	method string
	// multipart bodies pass as they are; all others are JSON.
	multipart bool
	// stream: the path may answer with events that end in "[DONE]" and hold
	// usage when asked for.
	stream bool
}

var faces = map[string]face{
	"/v1/chat/completions":     {method: http.MethodPost, stream: true},
	"/v1/completions":          {method: http.MethodPost, stream: true},
	"/v1/embeddings":           {method: http.MethodPost},
	"/v1/audio/transcriptions": {method: http.MethodPost, multipart: true},
}

// call is one request on its way.
type call struct {
	h  *Handler
	w  http.ResponseWriter
	r  *http.Request
	rc *http.ResponseController

	id    string
	start time.Time
	path  string // what the engine gets
	exact string // endpoint named in the path, or empty
	face  face

	key      keys.Key
	lease    *keys.Lease
	endpoint *route.Endpoint

	request *openai.Request // nil for multipart
	model   string
	body    []byte
	pieces  [][]byte
	hide    bool

	// How it ended.
	status     int
	usage      openai.Usage
	firstByte  time.Duration
	incomplete bool
	abort      bool // end the connection without its proper end
}

// ServeHTTP answers one request.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	c := &call{h: h, w: w, r: r, rc: http.NewResponseController(w), start: h.Now(), lease: &keys.Lease{}}
	c.id = requestID(r, h.Random)
	w.Header().Set("X-Request-Id", c.id)
	h.Metrics.begin()
	defer func() {
		h.running.Add(-1)
		h.Metrics.end(c)
		if h.Log.IsDebug() {
			h.Log.Debug("request", "id", c.id, "endpoint", c.endpointID(), "status", c.status, "incomplete", c.incomplete, "duration", h.Now().Sub(c.start))
		}
		if c.abort {
			panic(http.ErrAbortHandler) // the server's own way to cut a connection
		}
	}()
	if h.running.Add(1) > h.Limits.Requests {
		c.refuse(&openai.Error{Status: http.StatusServiceUnavailable, Type: openai.TypeServer, Code: "proxy_overloaded",
			Message: "this proxy has too many requests under way; try again shortly", RetryAfter: time.Second})
		return
	}
	c.serve()
}

func (c *call) serve() {
	path := c.r.URL.Path
	if rest, ok := strings.CutPrefix(path, "/e/"); ok {
		c.exact, path, _ = strings.Cut(rest, "/")
		path = "/" + path
	}
	c.path = path
	if path == "/health" && c.exact == "" {
		c.health()
		return
	}
	if path == "/v1/models" || strings.HasPrefix(path, "/v1/models/") {
		if c.methodIs(http.MethodGet) && c.authenticate() {
			c.models(strings.TrimPrefix(strings.TrimPrefix(path, "/v1/models"), "/"))
		}
		return
	}
	var ok bool
	if c.face, ok = faces[path]; !ok {
		c.refuse(&openai.Error{Status: http.StatusNotFound, Type: openai.TypeInvalid, Code: "unknown_url",
			Message: "unknown request URL: no such path here; see /v1/models, /v1/chat/completions, /v1/completions, /v1/embeddings, /v1/audio/transcriptions"})
		return
	}
	if !c.methodIs(c.face.method) || !c.authenticate() {
		return
	}
	if c.key.ID != "" {
		lease, ok := c.h.Keys.Begin(c.key)
		if !ok {
			c.refuse(&openai.Error{Status: http.StatusTooManyRequests, Type: openai.TypeRateLimit, Code: "concurrent_requests_exceeded",
				Message: "this api key has as many requests under way as it may; wait for one to end", RetryAfter: time.Second})
			return
		}
		c.lease = lease
		defer lease.End()
	}
	defer c.readBody()()
	if c.status != 0 || !c.resolve() {
		return
	}
	if wait, ok := c.lease.Charge(); !ok {
		c.refuse(&openai.Error{Status: http.StatusTooManyRequests, Type: openai.TypeRateLimit, Code: "rate_limit_exceeded",
			Message: "this api key has used up its requests of this minute", RetryAfter: wait})
		return
	}
	defer c.record()
	c.forward()
}

// resolve finds the endpoint of a request that named its model.
func (c *call) resolve() bool {
	if _, since := c.h.Routes.Status(); since.IsZero() {
		c.refuse(notReceived)
		return false
	}
	if c.exact == "" {
		if c.model == "" {
			c.refuse(openai.Invalid("missing_required_parameter", "model", "you must provide a model parameter"))
			return false
		}
		endpoint, ok := c.h.Routes.Resolve(c.key.ProjectID, c.model)
		if !ok {
			c.refuse(noModel(c.model))
			return false
		}
		c.endpoint = endpoint
	}
	return true
}

var notReceived = &openai.Error{Status: http.StatusServiceUnavailable, Type: openai.TypeServer, Code: "endpoints_not_received",
	Message: "this proxy has just started and does not know the endpoints yet; try again shortly", RetryAfter: 2 * time.Second}

// noModel is the same whether a model is unknown or another project's.
func noModel(model string) *openai.Error {
	message := "the model does not exist or you do not have access to it"
	if model != "" && len(model) <= 200 {
		message = "the model '" + strings.ToValidUTF8(model, "?") + "' does not exist or you do not have access to it"
	}
	return &openai.Error{Status: http.StatusNotFound, Type: openai.TypeInvalid, Code: "model_not_found", Param: "model", Message: message}
}

func (c *call) methodIs(method string) bool {
	if c.r.Method == method {
		return true
	}
	c.refuse(&openai.Error{Status: http.StatusMethodNotAllowed, Type: openai.TypeInvalid, Code: "method_not_allowed", Allow: method,
		Message: "not allowed to " + printable(c.r.Method) + " here: use " + method})
	return false
}

// refuse answers with an error. Nothing has been answered before.
func (c *call) refuse(e *openai.Error) {
	c.status = e.Status
	e.Write(c.w)
}

func (c *call) endpointID() string {
	if c.endpoint == nil {
		return ""
	}
	return c.endpoint.ID
}

// health says whether this proxy can tell good requests from bad. It tells
// nothing about endpoints.
func (c *call) health() {
	if !c.methodIs(http.MethodGet) {
		return
	}
	_, keysSince := c.h.Keys.Status()
	_, routesSince := c.h.Routes.Status()
	if keysSince.IsZero() || routesSince.IsZero() {
		c.refuse(&openai.Error{Status: http.StatusServiceUnavailable, Type: openai.TypeServer, Code: "not_ready",
			Message: "this proxy waits for its tables", RetryAfter: 2 * time.Second})
		return
	}
	c.status = http.StatusOK
	c.w.Header().Set("Content-Type", "application/json")
	io.WriteString(c.w, `{"status":"ok"}`+"\n")
}

// servesModel tells whether an endpoint is known by a model's name.
func servesModel(e *route.Endpoint, model string) bool { return slices.Contains(e.Models, model) }
