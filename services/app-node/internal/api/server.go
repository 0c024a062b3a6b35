// Package api is app-node's HTTP API: JSON under /api/v1, for the web UI, the
// command line and whoever reads its OpenAPI document at /api/v1/openapi.json.
//
// The document is made from this code. routes.go is the one table of operations,
// each with the right it needs; a middleware enforces the right before a handler
// runs and refuses what has none. Errors are RFC 9457 problems with a kind of
// pkg/fault. Callers show a bearer token: there are no cookies, so nothing for
// another site to ride on.
//
// The package holds no state of its own and writes no SQL. It does not place jobs,
// does not carry shells or inference, and believes X-Forwarded-For only of what
// stands in front of it on the same host.
package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"
	"unicode/utf8"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"
	"github.com/hashicorp/go-hclog"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"

	"github.com/cosmicac/cosmicac/pkg/trust"
	"github.com/cosmicac/cosmicac/services/app-node/internal/account"
	"github.com/cosmicac/cosmicac/services/app-node/internal/apikeys"
	"github.com/cosmicac/cosmicac/services/app-node/internal/catalogue"
	"github.com/cosmicac/cosmicac/services/app-node/internal/fleet"
	"github.com/cosmicac/cosmicac/services/app-node/internal/grants"
	"github.com/cosmicac/cosmicac/services/app-node/internal/orchestrator"
	"github.com/cosmicac/cosmicac/services/app-node/internal/quotas"
	"github.com/cosmicac/cosmicac/services/app-node/internal/store"
)

// MaximumBodyBytes bounds a request's body.
const MaximumBodyBytes = 1 << 20

// Prefix stands before every path.
const Prefix = "/api/v1"

// Options are the parts that the API puts into words of HTTP.
type Options struct {
	Store     *store.Store
	Accounts  *account.Accounts
	Keys      *apikeys.Keys
	Catalogue *catalogue.Catalogue
	Ork       *orchestrator.Client
	Watch     *orchestrator.Watch
	Grants    *grants.Signer
	Quotas    *quotas.Teller
	Fleet     *fleet.Fleet
	Network   *trust.Network
	// Agent finds the calls to an agent by its key and addresses. It does not dial.
	Agent   func(key string, addresses []string) (grpc.ClientConnInterface, error)
	Log     hclog.Logger
	Metrics prometheus.Registerer
	Now     func() time.Time
	Version string
	// KeepAlive is the time between comments on a silent event stream.
	KeepAlive time.Duration
	// ReadTimeout and WriteTimeout bound one request that is no event stream; 30 s
	// and 60 s when zero.
	ReadTimeout, WriteTimeout time.Duration
}

// Server answers HTTP. It is safe for concurrent use.
type Server struct {
	Options
	metrics *metrics
	api     huma.API
	handler http.Handler
	streams *streamCount

	unwritten unwritten
}

// New makes a server with every route.
func New(o Options) *Server {
	framework()
	if o.KeepAlive == 0 {
		o.KeepAlive = 15 * time.Second
	}
	if o.ReadTimeout == 0 {
		o.ReadTimeout = 30 * time.Second
	}
	if o.WriteTimeout == 0 {
		o.WriteTimeout = 60 * time.Second
	}
	s := &Server{Options: o, metrics: newMetrics(o.Metrics), streams: newStreamCount()}
	mux := http.NewServeMux()
	config := huma.DefaultConfig("CosmicAC", o.Version)
	config.OpenAPIPath, config.DocsPath, config.SchemasPath = "", "", ""
	config.CreateHooks = nil
	config.RejectUnknownQueryParameters = true
	config.Formats = map[string]huma.Format{"application/json": strictJSON, "json": strictJSON}
	config.Info.Description = "Jobs on GPUs of your own. Sign in at POST /login and send the token as a bearer token. " +
		"Every operation names the right it needs as " + Extension + "."
	config.Components.SecuritySchemes = map[string]*huma.SecurityScheme{"token": {Type: "http", Scheme: "bearer"}}
	s.api = humago.NewWithPrefix(mux, Prefix, config)
	s.api.UseMiddleware(s.serve)
	s.routes()
	s.handler = s.outside(mux)
	return s
}

// Handler answers every path.
func (s *Server) Handler() http.Handler { return s.handler }

// Document is the OpenAPI 3.1 document.
func (s *Server) Document() *huma.OpenAPI { return s.api.OpenAPI() }

// Serve answers on a listener until ctx ends, then lets running requests finish
// for up to three seconds. Event streams end at once.
func (s *Server) Serve(ctx context.Context, listener net.Listener) error {
	base, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	server := &http.Server{
		Handler:           s.handler,
		ReadHeaderTimeout: 10 * time.Second,
		ReadTimeout:       s.ReadTimeout,  // an event stream lifts it
		WriteTimeout:      s.WriteTimeout, // an event stream moves it with each write
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    64 << 10,
		BaseContext:       func(net.Listener) context.Context { return base },
		ErrorLog:          s.Log.StandardLogger(&hclog.StandardLoggerOptions{ForceLevel: hclog.Debug}),
	}
	stopped := make(chan error, 1)
	stop := context.AfterFunc(ctx, func() {
		s.streams.end()
		within, done := context.WithTimeout(context.WithoutCancel(ctx), 3*time.Second)
		defer done()
		err := server.Shutdown(within)
		cancel()
		stopped <- err
	})
	err := server.Serve(listener)
	if stop() || !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve HTTP on %s: %w", listener.Addr(), err)
	}
	if err := <-stopped; err != nil {
		s.Log.Warn("some requests were cut off at the end", "error", err)
		return server.Close()
	}
	return nil
}

// strictJSON refuses bytes that are not UTF-8 instead of replacing them, so that a
// name is kept byte for byte or not at all. Unknown fields are refused by the schema.
var strictJSON = huma.Format{
	Marshal: func(w io.Writer, v any) error { return encode(w, v) },
	Unmarshal: func(data []byte, v any) error {
		if !utf8.Valid(data) {
			return errors.New("must be UTF-8 text")
		}
		return json.Unmarshal(data, v)
	},
}

func encode(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	return e.Encode(v)
}
