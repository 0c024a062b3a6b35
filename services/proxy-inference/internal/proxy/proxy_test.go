package proxy

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"mime/multipart"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"

	appv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/app/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	"github.com/cosmicac/cosmicac/services/proxy-inference/internal/route"
)

const (
	plainBody  = `{"model":"m","messages":[{"role":"user","content":"hi"}]}`
	streamBody = `{"model":"m","stream":true,"messages":[{"role":"user","content":"hi"}]}`
)

func TestOfficialClientGetsItsAnswer(t *testing.T) {
	t.Parallel()
	s := startSite(t, nil)
	s.serve("ep-1", "m", startEngine(t, switches{chunks: 5}))
	client := openai.NewClient(option.WithBaseURL(s.URL+"/v1"), option.WithAPIKey(s.full), option.WithHTTPClient(s.Client()))
	q := openai.ChatCompletionNewParams{Model: "m", Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage("hi")}}
	got, err := client.Chat.Completions.New(context.Background(), q)
	if err != nil || got.Choices[0].Message.Content != "hello" || got.Usage.TotalTokens != 10 {
		t.Fatalf("%+v %v", got, err)
	}
	if u := s.newest(); u.GetPromptTokens() != 7 || u.GetCompletionTokens() != 3 || u.GetHttpStatus() != 200 || u.GetApiKeyId() == "" || u.GetEndpointId() != "ep-1" {
		t.Errorf("record %v", u)
	}
	stream := client.Chat.Completions.NewStreaming(context.Background(), q)
	text := ""
	for stream.Next() {
		if len(stream.Current().Choices) == 0 {
			t.Error("a chunk without choices came though usage was not asked for")
			continue
		}
		text += stream.Current().Choices[0].Delta.Content
	}
	if stream.Err() != nil || text != "t0 t1 t2 t3 t4 " {
		t.Fatalf("%q %v", text, stream.Err())
	}
	until(t, "the stream's record", func() bool { return s.count() == 2 })
	if u := s.newest(); u.GetPromptTokens() != 7 || u.GetCompletionTokens() != 5 || u.GetIncomplete() {
		t.Errorf("record %v", u)
	}
}

// Many clients hang up as soon as they read the end, and engines end a moment later.
func TestWhoHangsUpWithTheWholeAnswerHasAWholeRecord(t *testing.T) {
	t.Parallel()
	s := startSite(t, nil)
	g := startEngine(t, switches{chunks: 5, die: "hang", dieAt: 7})
	s.serve("ep-1", "m", g)
	leave := func(end string) {
		t.Helper()
		r, err := http.NewRequest("POST", s.URL+"/v1/chat/completions", strings.NewReader(streamBody))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Authorization", "Bearer "+s.full)
		resp, err := s.Client().Do(r)
		if err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(resp.Body)
		for lines.Scan() && lines.Text() != end {
		}
		if lines.Text() != end {
			t.Fatalf("no %q: %v", end, lines.Err())
		}
		resp.Body.Close()
		until(t, "the engine is told", func() bool { return g.running.Load() == 0 })
	}
	leave("data: [DONE]")
	until(t, "the first record", func() bool { return s.count() == 1 })
	if u := s.newest(); u.GetHttpStatus() != 200 || u.GetIncomplete() || u.GetPromptTokens() != 7 || u.GetCompletionTokens() != 5 {
		t.Errorf("left with all of it: %v", u)
	}
	g.set(func(s *switches) { s.dieAt = 5 })
	leave(strings.TrimSpace(streamText(switches{chunks: 5}, false)[4]))
	until(t, "the second record", func() bool { return s.count() == 2 })
	if u := s.newest(); u.GetHttpStatus() != 499 || !u.GetIncomplete() {
		t.Errorf("left before the end: %v", u)
	}
}

func TestStreamPassesByteForByteAndUsageIsHiddenOnlyFromWhoDidNotAsk(t *testing.T) {
	t.Parallel()
	for _, eol := range []string{"\n", "\r\n", "\r"} {
		s := startSite(t, nil)
		sw := switches{chunks: 20, lineEnd: eol}
		s.serve("ep-1", "m", startEngine(t, sw))
		a := s.chat(streamBody)
		if want := strings.Join(streamText(sw, false), ""); a.body != want || a.err != nil {
			t.Errorf("%q: got %q", eol, a.body)
		}
		a = s.chat(`{"stream_options":{"include_usage":true},` + streamBody[1:])
		if want := strings.Join(streamText(sw, true), ""); a.body != want || a.err != nil {
			t.Errorf("%q with usage: got %q", eol, a.body)
		}
		if a.Header.Get("Content-Type") != "text/event-stream; charset=utf-8" || a.Header.Get("X-Accel-Buffering") != "no" {
			t.Errorf("headers %v", a.Header)
		}
	}
}

func TestFirstTokenComesAtOnce(t *testing.T) {
	t.Parallel()
	s := startSite(t, nil)
	s.serve("ep-1", "m", startEngine(t, switches{chunks: 2, pace: time.Hour}))
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	r, _ := http.NewRequestWithContext(ctx, "POST", s.URL+"/v1/chat/completions", strings.NewReader(streamBody))
	r.Header.Set("X-API-Key", s.full)
	resp, err := s.Client().Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	want := streamText(switches{chunks: 1}, false)[0]
	got := make([]byte, len(want))
	if _, err := io.ReadFull(resp.Body, got); err != nil || string(got) != want {
		t.Fatalf("%q %v", got, err)
	}
}

func TestDeadReplicaIsNotNoticed(t *testing.T) {
	t.Parallel()
	for _, how := range []string{"refused", "blackhole", "reset", "close"} {
		s := startSite(t, func(o *Options, _ *route.Options) { o.Timeouts.Connect = 200 * time.Millisecond })
		bad := startEngine(t, switches{die: how})
		s.serve("ep-1", "m", bad, startEngine(t, switches{chunks: 3}))
		switch how {
		case "refused":
			s.at["key-a-ep-1-0"] = "127.0.0.1:1"
		case "blackhole":
			s.at["key-a-ep-1-0"] = "blackhole"
		}
		for i := range 20 {
			body := plainBody
			if i%2 == 1 {
				body = streamBody
			}
			if a := s.chat(body); a.StatusCode != 200 || a.err != nil {
				t.Fatalf("%s: request %d: %d %s %v", how, i, a.StatusCode, a.body, a.err)
			}
		}
		if !strings.Contains(s.log.String(), "rests") {
			t.Errorf("%s: nothing in the log says that a replica rests", how)
		}
	}
}

func TestReplicaThatDiesBeforeItsFirstTokenIsReplaced(t *testing.T) {
	t.Parallel()
	s := startSite(t, nil)
	sw := switches{chunks: 3}
	s.serve("ep-1", "m", startEngine(t, switches{early: true, die: "reset"}), startEngine(t, sw))
	for range 6 {
		if a := s.chat(streamBody); a.body != strings.Join(streamText(sw, false), "") || a.err != nil {
			t.Fatalf("%d %q %v", a.StatusCode, a.body, a.err)
		}
	}
}

func TestBreakInTheMiddleIsSaidAndNotRetried(t *testing.T) {
	t.Parallel()
	for _, how := range []string{"reset", "close"} {
		s := startSite(t, nil)
		sw := switches{chunks: 10, dieAt: 4, die: how}
		s.serve("ep-1", "m", startEngine(t, sw), startEngine(t, sw))
		a := s.chat(streamBody)
		want := strings.Join(streamText(sw, false)[:4], "")
		rest, ok := strings.CutPrefix(a.body, want)
		if !ok || !strings.HasPrefix(rest, `data: {"error":{"message":`) || strings.Contains(rest, "[DONE]") || a.err == nil {
			t.Errorf("%s: %q, end %v", how, a.body, a.err)
		}
		until(t, "record", func() bool { return s.count() == 1 })
		if u := s.newest(); !u.GetIncomplete() {
			t.Errorf("record %v", u)
		}
		client := openai.NewClient(option.WithBaseURL(s.URL+"/v1"), option.WithAPIKey(s.full), option.WithHTTPClient(s.Client()))
		stream := client.Chat.Completions.NewStreaming(context.Background(),
			openai.ChatCompletionNewParams{Model: "m", Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage("hi")}})
		for stream.Next() {
		}
		if stream.Err() == nil {
			t.Errorf("%s: the official client takes a broken stream for a whole one", how)
		}
	}
}

func TestStreamThatEndsWithoutDoneIsBroken(t *testing.T) {
	t.Parallel()
	s := startSite(t, nil)
	s.serve("ep-1", "m", startEngine(t, switches{header: http.Header{"Content-Type": {"text/event-stream"}}, body: "data: {\"choices\":[]}\n\ndata: {\"cho"}))
	a := s.chat(streamBody)
	if !strings.HasPrefix(a.body, "data: {\"choices\":[]}\n\ndata: {\"error\"") || a.err == nil {
		t.Errorf("%q %v", a.body, a.err)
	}
}

func TestSilenceEndsWithAnError(t *testing.T) {
	t.Parallel()
	s := startSite(t, func(o *Options, _ *route.Options) {
		o.Timeouts.FirstByte, o.Timeouts.Idle = 300*time.Millisecond, 300*time.Millisecond
	})
	g := startEngine(t, switches{chunks: 3, die: "hang"})
	s.serve("ep-1", "m", g)
	if a := s.chat(plainBody); a.StatusCode != 504 || a.code() != "first_byte_timeout" {
		t.Errorf("%d %s", a.StatusCode, a.body)
	}
	g.set(func(s *switches) { s.dieAt = 2 })
	if a := s.chat(streamBody); !strings.Contains(a.body, "engine_timeout") || a.err == nil {
		t.Errorf("%q %v", a.body, a.err)
	}
	until(t, "the engine is told", func() bool { return g.left.Load() == 2 })
}

func TestEachRefusalHasItsStatusAndCode(t *testing.T) {
	t.Parallel()
	s := startSite(t, func(_ *Options, r *route.Options) { r.MaximumInFlight = 1 })
	s.serve("ep-1", "m", startEngine(t, switches{}))
	s.serve("ep-dead", "dead", nil, nil)
	loading := s.serve("ep-loading", "loading", nil)
	loading.Replicas[0].Ready, loading.Replicas[0].State = false, orkv1.State_STATE_STARTING
	loading.JobState = orkv1.State_STATE_STARTING
	s.serve("ep-stopped", "stopped").JobState = orkv1.State_STATE_STOPPED
	s.serve("ep-queued", "queued").JobState = orkv1.State_STATE_QUEUED
	other := s.serve("ep-other", "others", startEngine(t, switches{}))
	other.ProjectId = "p-2"
	slow := startEngine(t, switches{delay: time.Hour})
	s.serve("ep-full", "full", slow)
	full := startEngine(t, switches{status: 429, body: "{}"})
	s.serve("ep-engine-full", "engine-full", full, full)
	unwell := startEngine(t, switches{status: 503, body: "engine dead"})
	s.serve("ep-unwell", "unwell", unwell)
	s.serve("ep-locked", "locked", startEngine(t, switches{status: 401, body: "{}"}))
	s.publish()
	revoked := s.mint(func(k *appv1.ApiKey) { k.Revoked = true })
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		r, _ := http.NewRequestWithContext(ctx, "POST", s.URL+"/v1/chat/completions", strings.NewReader(strings.Replace(plainBody, `"m"`, `"full"`, 1)))
		r.Header.Set("Authorization", "Bearer "+s.full)
		if resp, err := s.Client().Do(r); err == nil {
			resp.Body.Close()
		}
	}()
	until(t, "the full one is full", func() bool { return slow.running.Load() == 1 })

	chat := "/v1/chat/completions"
	model := func(m string) string { return strings.Replace(plainBody, `"m"`, `"`+m+`"`, 1) }
	for _, c := range []struct {
		method, path, key, body string
		status                  int
		code                    string
		retryAfter              bool
	}{
		{"POST", chat, "", plainBody, 401, "missing_api_key", false},
		{"POST", chat, "sk-other", plainBody, 401, "invalid_api_key", false},
		{"POST", chat, revoked, plainBody, 401, "revoked_api_key", false},
		{"POST", chat, s.full, model("unknown"), 404, "model_not_found", false},
		{"POST", chat, s.full, model("others"), 404, "model_not_found", false},
		{"POST", "/e/ep-other" + chat, s.full, model("others"), 404, "model_not_found", false},
		{"POST", "/e/ep-none" + chat, s.full, plainBody, 404, "model_not_found", false},
		{"POST", "/e/ep-1" + chat, "", plainBody, 401, "missing_api_key", false},
		{"POST", chat, s.full, model("dead"), 503, "replicas_unreachable", true},
		{"POST", chat, s.full, model("loading"), 503, "model_loading", true},
		{"POST", chat, s.full, model("stopped"), 503, "endpoint_stopped", false},
		{"POST", chat, s.full, model("queued"), 503, "waiting_for_capacity", true},
		{"POST", chat, s.full, model("full"), 429, "all_replicas_busy", true},
		{"POST", chat, s.full, model("engine-full"), 429, "all_replicas_busy", true},
		{"POST", chat, s.full, model("unwell"), 503, "replicas_unavailable", true},
		{"POST", chat, s.full, model("locked"), 502, "engine_misconfigured", false},
		{"POST", chat, s.full, `{"messages":[]}`, 400, "missing_required_parameter", false},
		{"POST", chat, s.full, `{"model":`, 400, "invalid_json", false},
		{"POST", chat, s.full, ``, 400, "invalid_json", false},
		{"GET", chat, s.full, "", 405, "method_not_allowed", false},
		{"POST", "/v1/models", s.full, "{}", 405, "method_not_allowed", false},
		{"POST", "/invocations", s.full, plainBody, 404, "unknown_url", false},
		{"POST", "/v1/chat/completions/../../pause", s.full, plainBody, 404, "unknown_url", false},
		{"GET", "/e/ep-1/metrics", s.full, "", 404, "unknown_url", false},
		{"GET", "/metrics", s.full, "", 404, "unknown_url", false},
		{"GET", "/v1/models/others", s.full, "", 404, "model_not_found", false},
		{"POST", "/v1/audio/transcriptions", s.full, "{}", 400, "invalid_content_type", false},
	} {
		a := s.do(c.method, c.path, c.key, c.body, nil)
		if a.StatusCode != c.status || a.code() != c.code || (a.Header.Get("Retry-After") != "") != c.retryAfter {
			t.Errorf("%s %s %s: %d %s, Retry-After %q; want %d %s", c.method, c.path, c.body, a.StatusCode, a.body, a.Header.Get("Retry-After"), c.status, c.code)
		}
		if a.Header.Get("Content-Type") != "application/json" {
			t.Errorf("%s %s: content type %q", c.method, c.path, a.Header.Get("Content-Type"))
		}
	}
	unknown := s.chat(model("xx")).body
	if others := strings.Replace(s.chat(model("others")).body, "others", "xx", 1); others != unknown {
		t.Errorf("another project's model can be told from an unknown one: %s", others)
	}
}

func TestNothingIsServedBeforeTheTablesCame(t *testing.T) {
	t.Parallel()
	s := startSite(t, nil)
	if a := s.chat(plainBody); a.StatusCode != 503 || a.code() != "endpoints_not_received" {
		t.Errorf("%d %s", a.StatusCode, a.body)
	}
	if a := s.do("GET", "/health", "", "", nil); a.StatusCode != 503 {
		t.Errorf("health %d", a.StatusCode)
	}
	s.publish()
	if a := s.do("GET", "/health", "", "", nil); a.StatusCode != 200 {
		t.Errorf("health %d", a.StatusCode)
	}
}

func TestLoadingModelIsWaitedFor(t *testing.T) {
	t.Parallel()
	s := startSite(t, func(_ *Options, r *route.Options) { r.Hold = 20 * time.Second })
	e := s.serve("ep-1", "m", startEngine(t, switches{}))
	e.Replicas[0].Ready = false
	s.publish()
	got := make(chan answer)
	go func() { got <- s.chat(plainBody) }()
	until(t, "the request is held", func() bool { return s.h.Running() == 1 })
	e.Replicas[0].Ready = true
	s.publish()
	if a := <-got; a.StatusCode != 200 {
		t.Errorf("%d %s", a.StatusCode, a.body)
	}
}

func TestAnonymousEndpointNeedsItsExactPath(t *testing.T) {
	t.Parallel()
	s := startSite(t, nil)
	g := startEngine(t, switches{})
	s.serve("ep-open", "m", g).RequireAuthorization = false
	s.publish()
	if a := s.do("POST", "/e/ep-open/v1/chat/completions", "", plainBody, nil); a.StatusCode != 200 {
		t.Errorf("anonymous: %d %s", a.StatusCode, a.body)
	}
	if u := s.newest(); u.GetApiKeyId() != "" || u.GetProjectId() != "p-1" {
		t.Errorf("record %v", u)
	}
	if a := s.do("POST", "/e/ep-open/v1/chat/completions", "none", plainBody, nil); a.StatusCode != 200 {
		t.Errorf("with a made-up key: %d %s", a.StatusCode, a.body)
	}
	if a := s.do("POST", "/e/ep-open/v1/chat/completions", s.full, plainBody, nil); a.StatusCode != 200 || s.newest().GetApiKeyId() == "" {
		t.Errorf("with a key: %d, record %v", a.StatusCode, s.newest())
	}
	if a := s.do("POST", "/v1/chat/completions", "", plainBody, nil); a.StatusCode != 401 {
		t.Errorf("without the path: %d", a.StatusCode)
	}
	if a := s.do("GET", "/e/ep-open/v1/models", "", "", nil); a.StatusCode != 200 || !strings.Contains(a.body, `"id":"m"`) {
		t.Errorf("models: %d %s", a.StatusCode, a.body)
	}
}

func TestModelsAreThoseOfTheKeysProject(t *testing.T) {
	t.Parallel()
	s := startSite(t, nil)
	s.serve("ep-1", "b/model")
	s.serve("ep-2", "a")
	s.serve("ep-3", "secret").ProjectId = "p-2"
	s.serve("ep-4", "old").JobState = orkv1.State_STATE_STOPPED
	s.publish()
	client := openai.NewClient(option.WithBaseURL(s.URL+"/v1"), option.WithAPIKey(s.full), option.WithHTTPClient(s.Client()))
	page, err := client.Models.List(context.Background())
	if err != nil || len(page.Data) != 2 || page.Data[0].ID != "a" || page.Data[1].ID != "b/model" {
		t.Errorf("%+v %v", page, err)
	}
	if a := s.do("GET", "/v1/models/b/model", s.full, "", nil); a.StatusCode != 200 {
		t.Errorf("%d %s", a.StatusCode, a.body)
	}
}

func TestBodyPassesUnchangedButForTheUsageOption(t *testing.T) {
	t.Parallel()
	s := startSite(t, nil)
	g := startEngine(t, switches{chunks: 1})
	s.serve("ep-1", "m", g)
	s.chat(` {"vendor":{"x":1.50},"model":"m"} `)
	s.chat(`{"model":"m","stream":true}`)
	_, bodies := g.seen()
	if string(bodies[0]) != ` {"vendor":{"x":1.50},"model":"m"} ` || string(bodies[1]) != `{"stream_options":{"include_usage":true},"model":"m","stream":true}` {
		t.Errorf("%q", bodies)
	}
}

func TestAudioFormPassesUnchanged(t *testing.T) {
	t.Parallel()
	s := startSite(t, nil)
	g := startEngine(t, switches{body: `{"text":"hi","usage":{"type":"tokens","input_tokens":14,"output_tokens":4}}`})
	s.serve("ep-1", "parakeet", g)
	var form bytes.Buffer
	w := multipart.NewWriter(&form)
	f, _ := w.CreateFormFile("file", "a.wav")
	f.Write(bytes.Repeat([]byte{0, 1, 2, 255}, 10000))
	w.WriteField("model", "parakeet")
	w.Close()
	a := s.do("POST", "/v1/audio/transcriptions", s.full, form.String(), func(r *http.Request) { r.Header.Set("Content-Type", w.FormDataContentType()) })
	if a.StatusCode != 200 || !strings.Contains(a.body, `"hi"`) {
		t.Fatalf("%d %s", a.StatusCode, a.body)
	}
	_, bodies := g.seen()
	if !bytes.Equal(bodies[0], form.Bytes()) {
		t.Error("the form changed")
	}
	if u := s.newest(); u.GetPromptTokens() != 14 || u.GetCompletionTokens() != 4 {
		t.Errorf("record %v", u)
	}
}

func TestEnginesOwnRefusalsPassThrough(t *testing.T) {
	t.Parallel()
	s := startSite(t, nil)
	body := `{"object":"error","message":"max_tokens is too large","type":"BadRequestError","code":400}`
	s.serve("ep-1", "m", startEngine(t, switches{status: 400, body: body}))
	if a := s.chat(streamBody); a.StatusCode != 400 || a.body != body {
		t.Errorf("%d %s", a.StatusCode, a.body)
	}
}

func TestSilentLinkGivesItsWaitingRequestsAway(t *testing.T) {
	t.Parallel()
	s := startSite(t, nil)
	hung := startEngine(t, switches{delay: time.Hour})
	s.serve("ep-1", "m", hung, startEngine(t, switches{}))
	for hung.running.Load() == 0 { // until one went to the hung one
		done := make(chan answer)
		go func() { done <- s.chat(plainBody) }()
		select {
		case a := <-done:
			if a.StatusCode != 200 {
				t.Fatalf("%d %s", a.StatusCode, a.body)
			}
			continue
		case <-time.After(300 * time.Millisecond):
		}
		if hung.running.Load() == 0 {
			<-done
			continue
		}
		s.routes.Silent(map[string]bool{"key-a-ep-1-0": true})
		if a := <-done; a.StatusCode != 200 {
			t.Errorf("%d %s", a.StatusCode, a.body)
		}
		return
	}
}

func TestImpatientClientsEjectNobody(t *testing.T) {
	t.Parallel()
	s := startSite(t, nil)
	s.serve("ep-1", "m", startEngine(t, switches{delay: time.Hour}))
	for range 20 {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
		r, _ := http.NewRequestWithContext(ctx, "POST", s.URL+"/v1/chat/completions", strings.NewReader(plainBody))
		r.Header.Set("Authorization", "Bearer "+s.full)
		if resp, err := s.Client().Do(r); err == nil {
			resp.Body.Close()
		}
		cancel()
	}
	until(t, "all ended", func() bool { return s.h.Running() == 0 })
	if strings.Contains(s.log.String(), "rests") {
		t.Error("the replica was ejected")
	}
}

// An engine that closes its kept connections just as the next request comes on
// them: what a keep-alive of five seconds does to a client of the same habit.
func TestKeptConnectionsThatTheEngineClosesCauseNoError(t *testing.T) {
	t.Parallel()
	s := startSite(t, nil)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var running sync.WaitGroup
	t.Cleanup(func() { l.Close(); running.Wait() })
	var connections, cut atomic.Int64
	running.Add(1)
	go func() {
		defer running.Done()
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			connections.Add(1)
			running.Add(1)
			go func() {
				defer running.Done()
				defer conn.Close()
				in := bufio.NewReader(conn)
				for first := true; ; first = false {
					r, err := http.ReadRequest(in)
					if err != nil {
						return
					}
					io.Copy(io.Discard, r.Body)
					if !first {
						cut.Add(1)
						return
					}
					io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
				}
			}()
		}
	}()
	s.serve("ep-1", "m", &engine{address: l.Addr().String()})
	for i := range 30 {
		if a := s.chat(plainBody); a.StatusCode != 200 || a.body != "{}" {
			t.Fatalf("request %d: %d %s", i, a.StatusCode, a.body)
		}
	}
	if cut.Load() == 0 {
		t.Error("no connection was kept, so nothing was tried")
	}
	if strings.Contains(s.log.String(), "rests") {
		t.Error("the replica was ejected")
	}
}
