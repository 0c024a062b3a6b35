// Package apiproxy stands between clients and the API server and makes the trouble that its rules ask for: delay, lost
// replies, made-up answers, broken connections, cut watches. It passes credentials through, changes no request, and
// without rules is just a detour. It reads no switches itself: Set tells it.
package apiproxy

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/cosmicac/cosmicac/deploy/devcluster/internal/fault"
)

// Options of a Proxy.
type Options struct {
	Listener          net.Listener
	Server            string // URL of the API server
	CAFile            string // its certificate, which the proxy shows as its own, too
	CertFile, KeyFile string
	Log               hclog.Logger
}

// Proxy is running from Start to Stop.
type Proxy struct {
	URL string

	log     hclog.Logger
	pass    *httputil.ReverseProxy
	server  *http.Server
	closing func()
	wg      sync.WaitGroup

	mu      sync.Mutex
	rules   map[string][]*rule // by switch
	values  map[string]string
	watches map[*context.CancelFunc]request
}

// rule is a fault.Rule with its memory.
type rule struct {
	fault.Rule
	until time.Time
	seen  int
	met   int
}

// Start serves on the listener.
func Start(o Options) (*Proxy, error) {
	target, err := url.Parse(o.Server)
	if err != nil {
		return nil, fmt.Errorf("api proxy: server %q: %w", o.Server, err)
	}
	ca, err := os.ReadFile(o.CAFile)
	if err != nil {
		return nil, fmt.Errorf("api proxy: %w", err)
	}
	cert, err := tls.LoadX509KeyPair(o.CertFile, o.KeyFile)
	if err != nil {
		return nil, fmt.Errorf("api proxy: %w", err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(ca)
	// HTTP/1.1 both ways: a cut then ends one request, not everything that shares a connection with it.
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}, MaxIdleConnsPerHost: 64}
	p := &Proxy{
		URL: "https://" + o.Listener.Addr().String(), log: o.Log, closing: transport.CloseIdleConnections,
		rules: map[string][]*rule{}, values: map[string]string{}, watches: map[*context.CancelFunc]request{},
		pass: &httputil.ReverseProxy{
			Rewrite:       func(r *httputil.ProxyRequest) { r.SetURL(target) },
			Transport:     transport,
			FlushInterval: -1,
			ErrorLog:      log.New(io.Discard, "", 0),
			ErrorHandler:  func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) },
		},
	}
	p.server = &http.Server{
		Handler: p, ErrorLog: log.New(io.Discard, "", 0), ReadHeaderTimeout: time.Minute,
		TLSConfig:    &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS12},
		TLSNextProto: map[string]func(*http.Server, *tls.Conn, http.Handler){},
	}
	p.wg.Go(func() {
		if err := p.server.ServeTLS(o.Listener, "", ""); !errors.Is(err, http.ErrServerClosed) {
			p.log.Error("api proxy ended", "error", err)
		}
	})
	return p, nil
}

// Stop breaks every connection.
func (p *Proxy) Stop() {
	if err := p.server.Close(); err != nil {
		p.log.Warn("api proxy does not close its listener", "error", err)
	}
	p.wg.Wait()
	p.closing()
}

// Set takes the switches. A rule whose text is unchanged keeps its count; watches that a new rule cuts end now.
func (p *Proxy) Set(switches map[string]string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range fault.Switches {
		if s.Kind != fault.API || switches[s.Name] == p.values[s.Name] {
			continue
		}
		p.values[s.Name] = switches[s.Name]
		p.rules[s.Name] = nil
		if switches[s.Name] == "" {
			continue
		}
		parsed, err := fault.ParseRules(switches[s.Name])
		if err != nil {
			p.log.Warn("api fault is not understood and does nothing", "switch", s.Name, "error", err)
			continue
		}
		for _, r := range parsed {
			held := &rule{Rule: r}
			if r.For > 0 {
				held.until = time.Now().Add(r.For)
			}
			p.rules[s.Name] = append(p.rules[s.Name], held)
		}
		if s.Name == fault.APICutWatch {
			for cancel, q := range p.watches {
				for _, r := range p.rules[s.Name] {
					if r.Delay == 0 && r.about(q) {
						(*cancel)()
					}
				}
			}
		}
	}
}

// meets takes the first rule of a switch that wants this request, and counts it.
func (p *Proxy) meets(name string, q request) (fault.Rule, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, r := range p.rules[name] {
		if !r.about(q) || !r.until.IsZero() && time.Now().After(r.until) || r.Count > 0 && r.met >= r.Count {
			continue
		}
		if r.seen++; r.Every > 1 && r.seen%r.Every != 0 {
			continue
		}
		r.met++
		p.log.Debug("simulated api fault", "switch", name, "verb", q.verb, "resource", q.resource)
		return r.Rule, true
	}
	return fault.Rule{}, false
}

func (r *rule) about(q request) bool {
	return (r.Verb == "" || r.Verb == q.verb) && (r.Resource == "" || r.Resource == q.resource)
}

// ServeHTTP passes a request on, or breaks it as the rules say.
func (p *Proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	q := classify(r)
	if rule, ok := p.meets(fault.APISlow, q); ok {
		select {
		case <-time.After(rule.Delay):
		case <-r.Context().Done():
			return
		}
	}
	if _, ok := p.meets(fault.APICut, q); ok {
		panic(http.ErrAbortHandler)
	}
	if rule, ok := p.meets(fault.APIAnswer, q); ok {
		answer(w, max(rule.Code, http.StatusBadRequest))
		return
	}
	if q.verb == "watch" {
		p.watch(w, r, q)
		return
	}
	if _, ok := p.meets(fault.APIDropReply, q); ok {
		p.pass.ServeHTTP(&dropped{header: http.Header{}}, r.WithContext(context.WithoutCancel(r.Context())))
		panic(http.ErrAbortHandler)
	}
	p.pass.ServeHTTP(w, r)
}

func (p *Proxy) watch(w http.ResponseWriter, r *http.Request, q request) {
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	if rule, ok := p.meets(fault.APICutWatch, q); ok {
		t := time.AfterFunc(rule.Delay, cancel)
		defer t.Stop()
	}
	p.mu.Lock()
	p.watches[&cancel] = q
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		delete(p.watches, &cancel)
		p.mu.Unlock()
	}()
	p.pass.ServeHTTP(w, r.WithContext(ctx))
}

// answer is a Kubernetes Status of the code.
func answer(w http.ResponseWriter, code int) {
	reason, ok := map[int]string{
		401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 409: "Conflict", 410: "Expired", 422: "Invalid", 429: "TooManyRequests",
		500: "InternalError", 503: "ServiceUnavailable", 504: "Timeout",
	}[code]
	if !ok {
		reason = "Unknown"
	}
	w.Header().Set("Content-Type", "application/json")
	if code == http.StatusTooManyRequests {
		w.Header().Set("Retry-After", "1")
	}
	w.WriteHeader(code)
	fmt.Fprintf(w, `{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","reason":%q,"code":%d,"message":"made up by the api proxy (simulated)"}`, reason, code)
}

// request is what rules ask of a request.
type request struct{ verb, resource string }

// classify reads verb and resource off a request as the API server does.
func classify(r *http.Request) request {
	parts := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	switch {
	case len(parts) >= 2 && parts[0] == "api":
		parts = parts[2:]
	case len(parts) >= 3 && parts[0] == "apis":
		parts = parts[3:]
	default:
		return request{verb: strings.ToLower(r.Method)}
	}
	if len(parts) >= 3 && parts[0] == "namespaces" {
		parts = parts[2:]
	}
	q := request{}
	if len(parts) > 0 {
		q.resource = parts[0]
	}
	if len(parts) > 2 {
		q.resource += "/" + parts[2]
	}
	named := len(parts) > 1
	switch r.Method {
	case http.MethodGet, http.MethodHead:
		switch {
		case r.URL.Query().Get("watch") == "true" || r.URL.Query().Get("watch") == "1":
			q.verb = "watch"
		case named:
			q.verb = "get"
		default:
			q.verb = "list"
		}
	case http.MethodPost:
		q.verb = "create"
	case http.MethodPut:
		q.verb = "update"
	case http.MethodPatch:
		q.verb = "patch"
	case http.MethodDelete:
		q.verb = "delete"
	}
	return q
}

// dropped takes a reply and forgets it.
type dropped struct{ header http.Header }

func (d *dropped) Header() http.Header         { return d.header }
func (d *dropped) Write(b []byte) (int, error) { return len(b), nil }
func (d *dropped) WriteHeader(int)             {}
func (d *dropped) Flush()                      {}
