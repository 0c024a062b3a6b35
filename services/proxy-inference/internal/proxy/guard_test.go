package proxy

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"strings"
	"testing"
	"time"

	appv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/app/v1"
	"github.com/cosmicac/cosmicac/services/proxy-inference/internal/route"
)

func TestClientThatLeavesFreesItsLimitAndTheEngine(t *testing.T) {
	t.Parallel()
	s := startSite(t, nil)
	g := startEngine(t, switches{chunks: 1000, pace: 10 * time.Millisecond})
	s.serve("ep-1", "m", g)
	key := s.mint(func(k *appv1.ApiKey) { k.ConcurrentRequests = 5; k.RequestsPerMinute = 20 })
	for round := range 2 {
		ctx, cancel := context.WithCancel(context.Background())
		body := streamBody
		if round == 1 {
			g.set(func(s *switches) { s.delay = time.Hour }) // before the first byte
			body = plainBody
		}
		done := make(chan struct{}, 5)
		for range 5 {
			go func() {
				defer func() { done <- struct{}{} }()
				r, _ := http.NewRequestWithContext(ctx, "POST", s.URL+"/v1/chat/completions", strings.NewReader(body))
				r.Header.Set("Authorization", "Bearer "+key)
				if resp, err := s.Client().Do(r); err == nil {
					io.Copy(io.Discard, resp.Body)
					resp.Body.Close()
				}
			}()
		}
		until(t, "five under way", func() bool { return g.running.Load() == 5 })
		for range 10 {
			if a := s.do("POST", "/v1/chat/completions", key, plainBody, nil); a.StatusCode != 429 || a.code() != "concurrent_requests_exceeded" {
				t.Errorf("sixth: %d %s", a.StatusCode, a.body)
			}
		}
		cancel()
		for range 5 {
			<-done
		}
		until(t, "the engine is told", func() bool { return g.running.Load() == 0 })
		until(t, "the places are free", func() bool { return s.h.Running() == 0 })
	}
	g.set(func(s *switches) { s.delay = 0 })
	if a := s.do("POST", "/v1/chat/completions", key, plainBody, nil); a.StatusCode != 200 {
		t.Errorf("after all left: %d %s", a.StatusCode, a.body)
	}
	for _, r := range s.records[:10] {
		if r.GetHttpStatus() != 499 || !r.GetIncomplete() {
			t.Errorf("record %v", r)
		}
	}
	if strings.Contains(s.log.String(), "rests") {
		t.Error("a client's leaving counted against a replica")
	}
}

func TestMinuteBudgetIsKept(t *testing.T) {
	t.Parallel()
	s := startSite(t, nil)
	s.serve("ep-1", "m", startEngine(t, switches{}))
	s.serve("ep-dead", "dead", nil)
	key := s.mint(func(k *appv1.ApiKey) { k.RequestsPerMinute = 3 })
	ask := func(body string) answer { return s.do("POST", "/v1/chat/completions", key, body, nil) }
	for range 20 {
		ask(`{"model":"unknown"}`)
		ask(`{"model":"dead"}`)
		ask(`{`)
	}
	for i := range 3 {
		if a := ask(plainBody); a.StatusCode != 200 {
			t.Fatalf("request %d: %d %s", i, a.StatusCode, a.body)
		}
	}
	if a := ask(plainBody); a.StatusCode != 429 || a.code() != "rate_limit_exceeded" || a.Header.Get("Retry-After") == "" {
		t.Errorf("fourth: %d %s", a.StatusCode, a.body)
	}
}

func TestKeysAndCookiesStayHereAndEnginesHeadersAreFiltered(t *testing.T) {
	t.Parallel()
	s := startSite(t, nil)
	g := startEngine(t, switches{header: http.Header{"Set-Cookie": {"a=b"}, "Server": {"uvicorn"}, "X-Internal": {"10.0.0.1"}, "Access-Control-Allow-Origin": {"*"}, "Openai-Version": {"1"}}})
	s.serve("ep-1", "m", g)
	a := s.do("POST", "/v1/chat/completions?api_key="+s.full, s.full, plainBody, func(r *http.Request) {
		r.Header.Set("Cookie", "session=secret")
		r.Header.Set("X-API-Key", s.full)
		r.Header.Set("X-Forwarded-For", "192.0.2.1")
		r.Header.Set("X-Request-Id", "mine-1")
		r.Header.Set("Traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
	})
	if a.StatusCode != 200 {
		t.Fatal(a.body)
	}
	for _, name := range []string{"Set-Cookie", "Server", "X-Internal", "Access-Control-Allow-Origin"} {
		if a.Header.Get(name) != "" {
			t.Errorf("the client got %s", name)
		}
	}
	if a.Header.Get("Openai-Version") != "1" || a.Header.Get("X-Request-Id") != "mine-1" {
		t.Errorf("headers %v", a.Header)
	}
	seen, _ := g.seen()
	sent := fmt.Sprint(seen[0].Header, seen[0].URL)
	for _, word := range []string{s.full, "secret", "192.0.2.1", "Authorization", "Cookie", "Idempotency"} {
		if strings.Contains(sent, word) {
			t.Errorf("the engine got %q", word)
		}
	}
	if seen[0].Header.Get("Traceparent") == "" || seen[0].Header.Get("X-Request-Id") != "mine-1" {
		t.Errorf("the engine got %v", seen[0].Header)
	}
	// A wrong key is logged as little as a good one.
	s.do("POST", "/v1/chat/completions", s.full[:54]+"a", plainBody, nil)
	metrics, err := s.reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	everything := s.log.String() + fmt.Sprint(metrics, s.records)
	for _, word := range []string{s.full, s.full[17:49], "session=secret", `"content"`} {
		if strings.Contains(everything, word) {
			t.Errorf("log, metrics or records hold %.8s...", word)
		}
	}
}

func TestFloodOfNamesMakesNoNewSeries(t *testing.T) {
	t.Parallel()
	s := startSite(t, nil)
	s.serve("ep-1", "m", startEngine(t, switches{}))
	series := func() (n int) {
		families, err := s.reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range families {
			n += len(f.GetMetric())
		}
		return n
	}
	s.chat(plainBody)
	s.chat(`{"model":"x"}`)
	s.do("POST", "/x", "", "", nil)
	before := series()
	for i := range 300 {
		s.do("POST", fmt.Sprintf("/x%d", i), fmt.Sprint("k", i), "", nil)
		s.chat(fmt.Sprintf(`{"model":"m%d"}`, i))
		s.do("POST", fmt.Sprintf("/e/ep-%d/v1/completions", i), s.full, "{}", nil)
	}
	if after := series(); after != before {
		t.Errorf("%d series became %d", before, after)
	}
}

func TestHugeBodiesAreRefusedWithBoundedMemory(t *testing.T) {
	s := startSite(t, func(o *Options, _ *route.Options) { o.Limits.Body = 1 << 20 })
	g := startEngine(t, switches{})
	s.serve("ep-1", "m", g)
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	send := func(size int64, chunked bool) answer {
		return s.do("POST", "/v1/chat/completions", s.full, "", func(r *http.Request) {
			r.Body = io.NopCloser(io.LimitReader(endless{}, size))
			r.ContentLength = size
			if chunked {
				r.ContentLength = -1
			}
		})
	}
	for _, chunked := range []bool{false, true} {
		if a := send(50<<20, chunked); a.StatusCode != 413 || a.code() != "request_too_large" {
			t.Errorf("50 MB, chunked %v: %d %s %v", chunked, a.StatusCode, a.body, a.err)
		}
		if a := send(1<<20+1, chunked); a.StatusCode != 413 {
			t.Errorf("limit plus one, chunked %v: %d %v", chunked, a.StatusCode, a.err)
		}
		if a := send(1<<20, chunked); a.StatusCode != 400 { // spaces alone are no JSON
			t.Errorf("the limit, chunked %v: %d %v", chunked, a.StatusCode, a.err)
		}
	}
	runtime.ReadMemStats(&after)
	if grown := after.TotalAlloc - before.TotalAlloc; grown > 40<<20 {
		t.Errorf("%d MB allocated", grown>>20)
	}
	if s.h.memory.used != 0 {
		t.Errorf("%d bytes of the budget are still held", s.h.memory.used)
	}
	if seen, _ := g.seen(); len(seen) != 0 {
		t.Error("a refused body reached the engine")
	}
}

type endless struct{}

func (endless) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = ' '
	}
	return len(p), nil
}
