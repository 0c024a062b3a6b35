package proxy

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	mathrand "math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"github.com/cosmicac/cosmicac/pkg/apikey"
	appv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/app/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	"github.com/cosmicac/cosmicac/services/proxy-inference/internal/keys"
	"github.com/cosmicac/cosmicac/services/proxy-inference/internal/route"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// engine is an OpenAI-shaped server with switches for what goes wrong. It plays
// what stands behind an agent; it is no model.
type engine struct {
	address string

	mu       sync.Mutex
	requests []*http.Request
	bodies   [][]byte
	s        switches

	running atomic.Int64
	left    atomic.Int64 // requests whose client went away
}

type switches struct {
	delay   time.Duration // before the first byte
	pace    time.Duration // between chunks
	chunks  int
	lineEnd string
	dieAt   int    // break off after so many chunks; 0 for never
	die     string // "reset", "close", "hang"
	status  int
	header  http.Header
	body    string // a fixed answer
	early   bool   // headers before the delay
}

func startEngine(t *testing.T, s switches) *engine {
	t.Helper()
	e := &engine{s: s}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	e.address = l.Addr().String()
	server := &http.Server{Handler: e, IdleTimeout: 5 * time.Second}
	done := make(chan struct{})
	go func() { defer close(done); server.Serve(l) }()
	t.Cleanup(func() { server.Close(); <-done })
	return e
}

func (e *engine) set(f func(*switches)) { e.mu.Lock(); defer e.mu.Unlock(); f(&e.s) }

func (e *engine) seen() ([]*http.Request, [][]byte) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.requests, e.bodies
}

func (e *engine) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	e.running.Add(1)
	defer e.running.Add(-1)
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	e.mu.Lock()
	e.requests, e.bodies = append(e.requests, r), append(e.bodies, body)
	s := e.s
	e.mu.Unlock()
	var q struct {
		Stream  bool `json:"stream"`
		Options struct {
			Usage bool `json:"include_usage"`
		} `json:"stream_options"`
	}
	json.Unmarshal(body, &q)
	for k, v := range s.header {
		w.Header()[k] = v
	}
	wait := func(d time.Duration) bool {
		select {
		case <-time.After(d):
			return true
		case <-r.Context().Done():
			e.left.Add(1)
			return false
		}
	}
	if s.early {
		w.Header().Set("Content-Type", "text/event-stream")
		w.WriteHeader(200)
		w.(http.Flusher).Flush()
	}
	if s.die != "" && s.dieAt == 0 {
		e.end(w, r, s.die)
		return
	}
	if !wait(s.delay) {
		return
	}
	if s.status != 0 || s.body != "" {
		if w.Header().Get("Content-Type") == "" {
			w.Header().Set("Content-Type", "application/json")
		}
		if s.status != 0 {
			w.WriteHeader(s.status)
		}
		io.WriteString(w, s.body)
		return
	}
	if !q.Stream {
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprintf(w, `{"id":"c1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"hello"},"finish_reason":"stop"}],"usage":{"prompt_tokens":7,"completion_tokens":3,"total_tokens":10},"extra":1}`)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	events := streamText(s, q.Options.Usage)
	for i, chunk := range events {
		if s.die != "" && i == s.dieAt {
			e.end(w, r, s.die)
			return
		}
		if i > 0 && !wait(s.pace) {
			return
		}
		io.WriteString(w, chunk)
		w.(http.Flusher).Flush()
	}
	if s.die != "" && s.dieAt >= len(events) {
		e.end(w, r, s.die)
	}
}

// streamText is what the engine streams, event by event.
func streamText(s switches, usage bool) (events []string) {
	eol := s.lineEnd
	if eol == "" {
		eol = "\n"
	}
	for i := range s.chunks {
		events = append(events, fmt.Sprintf(`data: {"id":"c1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":"t%d "}}],"extra":{"k":%d}}`, i, i)+eol+eol)
	}
	if usage {
		events = append(events, `data: {"id":"c1","object":"chat.completion.chunk","created":1,"model":"m","choices":[],"usage":{"prompt_tokens":7,"completion_tokens":5,"total_tokens":12}}`+eol+eol)
	}
	return append(events, "data: [DONE]"+eol+eol)
}

func (e *engine) end(w http.ResponseWriter, r *http.Request, how string) {
	if how == "hang" {
		<-r.Context().Done()
		e.left.Add(1)
		return
	}
	conn, _, err := w.(http.Hijacker).Hijack()
	if err != nil {
		return
	}
	if how == "reset" {
		conn.(*net.TCPConn).SetLinger(0)
	}
	conn.Close()
}

// site is a proxy before its engines.
type site struct {
	*httptest.Server
	t      *testing.T
	h      *Handler
	keys   *keys.Table
	routes *route.Table
	reg    *prometheus.Registry
	log    *syncBuffer
	full   string // a good key of project p-1
	secret []byte

	mu      sync.Mutex
	at      map[string]string // agent key -> address
	dials   map[string]int
	records []*appv1.UsageRecord
	table   []*orkv1.Endpoint
	apiKeys []*appv1.ApiKey
}

type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}
func (b *syncBuffer) String() string { b.mu.Lock(); defer b.mu.Unlock(); return b.b.String() }

func startSite(t *testing.T, change func(*Options, *route.Options)) *site {
	t.Helper()
	s := &site{t: t, at: map[string]string{}, dials: map[string]int{}, reg: prometheus.NewRegistry(), log: &syncBuffer{}, secret: []byte("hmac key")}
	ro := route.Options{Hold: 50 * time.Millisecond, MaximumHeld: 100, MaximumInFlight: 100, Now: time.Now, Random: mathrand.IntN}
	s.keys = keys.New(time.Now)
	o := Options{Keys: s.keys, Dial: s.dial, Record: s.record, Metrics: NewMetrics(s.reg), Now: time.Now, Random: rand.Reader,
		Log:      hclog.New(&hclog.LoggerOptions{Level: hclog.Trace, Output: s.log}),
		Limits:   Limits{Body: 1 << 20, BodyMemory: 64 << 20, Requests: 1000, Attempts: 3, AffinityBytes: 1024},
		Timeouts: Timeouts{Connect: time.Second, FirstByte: time.Minute, Idle: time.Minute, KeepAlive: 4 * time.Second, Upload: 10 * time.Second, Write: time.Minute, Commit: 10 * time.Second}}
	if change != nil {
		change(&o, &ro)
	}
	s.routes = route.New(ro)
	o.Routes = s.routes
	s.h = New(o)
	s.Server = httptest.NewServer(s.h)
	t.Cleanup(func() { s.Server.CloseClientConnections(); s.Server.Close(); s.h.Close() })
	s.full = s.mint(nil)
	return s
}

func (s *site) dial(ctx context.Context, r route.Replica) (net.Conn, error) {
	s.mu.Lock()
	address := s.at[r.AgentKey]
	s.dials[r.AgentKey]++
	s.mu.Unlock()
	if address == "blackhole" {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	var d net.Dialer
	return d.DialContext(ctx, "tcp", address)
}

func (s *site) record(u *appv1.UsageRecord) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.records = append(s.records, u)
}

// mint makes a key of project p-1 and puts it in force.
func (s *site) mint(change func(*appv1.ApiKey)) string {
	full, publicID, err := apikey.New(rand.Reader)
	if err != nil {
		s.t.Fatal(err)
	}
	k := &appv1.ApiKey{PublicId: publicID, Hmac: apikey.MAC(s.secret, full), Id: "k-" + publicID, ProjectId: "p-1", UserId: "u-1"}
	if change != nil {
		change(k)
	}
	s.apiKeys = append(s.apiKeys, k)
	s.keys.Replace(&appv1.WatchApiKeysResponse{HmacKey: s.secret, Keys: s.apiKeys})
	return full
}

// serve puts an endpoint with these engines behind it in force. A nil engine is
// a replica that nobody answers for.
func (s *site) serve(id, model string, engines ...*engine) *orkv1.Endpoint {
	e := &orkv1.Endpoint{Id: id, JobId: "j-" + id, ProjectId: "p-1", ModelNames: []string{model}, RequireAuthorization: true, JobState: orkv1.State_STATE_RUNNING}
	s.mu.Lock()
	for i, g := range engines {
		name := fmt.Sprintf("a-%s-%d", id, i)
		s.at["key-"+name] = "127.0.0.1:1" // refuses
		if g != nil {
			s.at["key-"+name] = g.address
		}
		e.Replicas = append(e.Replicas, &orkv1.EndpointReplica{AttemptId: name, AgentKey: "key-" + name, State: orkv1.State_STATE_RUNNING, Ready: true})
	}
	s.mu.Unlock()
	s.table = append(s.table, e)
	s.publish()
	return e
}

func (s *site) publish() { s.routes.Replace(&orkv1.WatchEndpointsResponse{Endpoints: s.table}) }

func (s *site) newest() *appv1.UsageRecord {
	s.t.Helper()
	until(s.t, "a usage record", func() bool { s.mu.Lock(); defer s.mu.Unlock(); return len(s.records) > 0 })
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.records[len(s.records)-1]
}

func (s *site) count() int { s.mu.Lock(); defer s.mu.Unlock(); return len(s.records) }

// answer is a whole response.
type answer struct {
	*http.Response
	body string
	err  error // while reading the body
}

func (a answer) code() string {
	var e struct {
		Error struct {
			Message, Type string
			Code          *string
		}
	}
	if json.Unmarshal([]byte(a.body), &e) != nil || e.Error.Message == "" || e.Error.Type == "" || e.Error.Code == nil {
		return "not OpenAI's shape: " + a.body
	}
	return *e.Error.Code
}

func (s *site) do(method, path, key, body string, change func(*http.Request)) answer {
	s.t.Helper()
	r, err := http.NewRequest(method, s.URL+path, strings.NewReader(body))
	if err != nil {
		s.t.Fatal(err)
	}
	if key != "" {
		r.Header.Set("Authorization", "Bearer "+key)
	}
	if body != "" {
		r.Header.Set("Content-Type", "application/json")
	}
	if change != nil {
		change(r)
	}
	resp, err := s.Client().Do(r)
	if err != nil {
		return answer{err: err, Response: &http.Response{}}
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return answer{resp, string(b), err}
}

func (s *site) chat(body string) answer {
	s.t.Helper()
	return s.do("POST", "/v1/chat/completions", s.full, body, nil)
}

func until(t *testing.T, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !f(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("not within 20 s: " + what)
		}
	}
}
