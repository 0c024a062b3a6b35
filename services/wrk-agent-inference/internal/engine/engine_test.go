package engine_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"go.uber.org/goleak"

	"github.com/cosmicac/cosmicac/services/wrk-agent-inference/internal/engine"
	"github.com/cosmicac/cosmicac/services/wrk-agent-inference/internal/ngram"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func start(t *testing.T, change func(*engine.Options)) (url string, client openai.Client) {
	t.Helper()
	o := engine.Options{Model: ngram.Default(), Names: []string{"demo", "alias"}, Version: "test", Random: rand.Reader, Now: time.Now}
	if change != nil {
		change(&o)
	}
	s := httptest.NewServer(engine.New(o).Handler())
	transport := &http.Transport{}
	t.Cleanup(func() {
		transport.CloseIdleConnections()
		s.Close()
	})
	return s.URL, openai.NewClient(option.WithBaseURL(s.URL+"/v1"), option.WithAPIKey("unused"), option.WithHTTPClient(&http.Client{Transport: transport}), option.WithMaxRetries(0))
}

func ask(text string, seed int64) openai.ChatCompletionNewParams {
	return openai.ChatCompletionNewParams{
		Model: "demo", Seed: openai.Int(seed), MaxCompletionTokens: openai.Int(60),
		Messages: []openai.ChatCompletionMessageParamUnion{openai.SystemMessage("Answer shortly."), openai.UserMessage(text)},
	}
}

func metric(t *testing.T, url, name string) float64 {
	t.Helper()
	r, err := http.Get(url + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	defer http.DefaultClient.CloseIdleConnections()
	text, _ := io.ReadAll(r.Body)
	m := regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(name) + `\{[^}]*\} (\S+)$`).FindSubmatch(text)
	if m == nil {
		t.Fatalf("no metric %s in\n%s", name, text)
	}
	v, err := strconv.ParseFloat(string(m[1]), 64)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func TestSeedMakesAnswersRepeatableAndPromptsMakeThemDiffer(t *testing.T) {
	t.Parallel()
	_, c := start(t, nil)
	say := func(text string, seed int64) string {
		r, err := c.Chat.Completions.New(context.Background(), ask(text, seed))
		if err != nil {
			t.Fatal(err)
		}
		return r.Choices[0].Message.Content
	}
	first := say("What is a rack?", 5)
	if again := say("What is a rack?", 5); again != first || first == "" {
		t.Fatalf("%q, then %q", first, again)
	}
	if other := say("How do I open a shell?", 5); other == first {
		t.Fatalf("two questions, one answer: %q", other)
	}
	if other := say("qwertz", 5); other == say("asdfgh", 5) {
		t.Fatalf("two unknown words, one answer: %q", other)
	}
}

func TestStreamSaysTheSameAsTheWholeAnswerAndUsageIsCounted(t *testing.T) {
	t.Parallel()
	url, c := start(t, nil)
	whole, err := c.Chat.Completions.New(context.Background(), ask("Tell me about the mesh", 3))
	if err != nil {
		t.Fatal(err)
	}
	p := ask("Tell me about the mesh", 3)
	p.StreamOptions.IncludeUsage = openai.Bool(true)
	s := c.Chat.Completions.NewStreaming(context.Background(), p)
	var text, reason string
	var usage openai.CompletionUsage
	for s.Next() {
		chunk := s.Current()
		if len(chunk.Choices) == 0 {
			usage = chunk.Usage
			continue
		}
		text += chunk.Choices[0].Delta.Content
		if r := chunk.Choices[0].FinishReason; r != "" {
			reason = r
		}
	}
	if err := s.Err(); err != nil {
		t.Fatal(err)
	}
	if text != whole.Choices[0].Message.Content || reason != whole.Choices[0].FinishReason {
		t.Fatalf("streamed %q (%s), whole %q (%s)", text, reason, whole.Choices[0].Message.Content, whole.Choices[0].FinishReason)
	}
	if usage.CompletionTokens != whole.Usage.CompletionTokens || usage.PromptTokens != whole.Usage.PromptTokens ||
		usage.TotalTokens != usage.PromptTokens+usage.CompletionTokens || usage.CompletionTokens == 0 {
		t.Fatalf("usage %+v and %+v", usage, whole.Usage)
	}
	// What the model itself counts.
	m := ngram.Default()
	made := len(m.Encode(text))
	if reason == "stop" {
		made++ // the end is a token
	}
	if int64(made) != usage.CompletionTokens {
		t.Fatalf("%d tokens make up the text, usage says %d", made, usage.CompletionTokens)
	}
	prompt := len(m.Encode("Answer shortly.")) + len(m.Encode("Tell me about the mesh")) + 5
	if int64(prompt) != usage.PromptTokens {
		t.Fatalf("%d tokens make up the prompt, usage says %d", prompt, usage.PromptTokens)
	}
	if got := metric(t, url, "vllm:generation_tokens_total"); got != float64(2*usage.CompletionTokens) {
		t.Fatalf("metric says %v generated tokens, two answers had %d each", got, usage.CompletionTokens)
	}
	if got := metric(t, url, "vllm:prompt_tokens_total"); got != float64(2*prompt) {
		t.Fatalf("metric says %v prompt tokens", got)
	}
	if metric(t, url, "vllm:time_to_first_token_seconds_count") != 2 || metric(t, url, "vllm:num_requests_running") != 0 || metric(t, url, "vllm:num_requests_waiting") != 0 {
		t.Fatal("metrics of load are off")
	}
}

func TestUsageIsOnlyStreamedWhenAsked(t *testing.T) {
	t.Parallel()
	url, _ := start(t, nil)
	body := post(t, url, "/v1/completions", `{"model":"demo","prompt":"A job","max_tokens":4,"stream":true,"seed":1}`, http.StatusOK)
	if strings.Contains(body, `"usage"`) || !strings.HasSuffix(body, "data: [DONE]\n\n") {
		t.Fatalf("stream\n%s", body)
	}
	lines := 0
	for l := bufio.NewScanner(strings.NewReader(body)); l.Scan(); {
		if l.Text() != "" {
			lines++
			if !strings.HasPrefix(l.Text(), "data: ") {
				t.Fatalf("line %q", l.Text())
			}
		}
	}
	if lines < 3 {
		t.Fatalf("%d events", lines)
	}
}

func post(t *testing.T, url, path, body string, want int) string {
	t.Helper()
	r, err := http.Post(url+path, "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	defer http.DefaultClient.CloseIdleConnections()
	raw, _ := io.ReadAll(r.Body)
	if r.StatusCode != want {
		t.Fatalf("%s: status %d, want %d: %s", body, r.StatusCode, want, raw)
	}
	return string(raw)
}

func TestStopAndLengthEndAnAnswer(t *testing.T) {
	t.Parallel()
	_, c := start(t, nil)
	p := openai.CompletionNewParams{Model: "alias", Prompt: openai.CompletionNewParamsPromptUnion{OfString: openai.String("A rack is the")},
		MaxTokens: openai.Int(3), Temperature: openai.Float(0)}
	r, err := c.Completions.New(context.Background(), p)
	if err != nil {
		t.Fatal(err)
	}
	if r.Choices[0].FinishReason != "length" || r.Usage.CompletionTokens != 3 {
		t.Fatalf("%+v", r.Choices[0])
	}
	p.MaxTokens = openai.Int(60)
	whole, err := c.Completions.New(context.Background(), p)
	if err != nil {
		t.Fatal(err)
	}
	text := whole.Choices[0].Text
	words := strings.Fields(text)
	stop := words[2] + " " + words[3] // spans two tokens
	p.Stop = openai.CompletionNewParamsStopUnion{OfStringArray: []string{"never said", stop}}
	cut, err := c.Completions.New(context.Background(), p)
	if err != nil {
		t.Fatal(err)
	}
	if want := text[:strings.Index(text, stop)]; cut.Choices[0].Text != want || cut.Choices[0].FinishReason != "stop" {
		t.Fatalf("got %q (%s), want %q", cut.Choices[0].Text, cut.Choices[0].FinishReason, want)
	}
}

func TestSeveralChoicesDiffer(t *testing.T) {
	t.Parallel()
	_, c := start(t, nil)
	p := ask("What is a job?", 9)
	p.N = openai.Int(3)
	p.Temperature = openai.Float(1.5)
	r, err := c.Chat.Completions.New(context.Background(), p)
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Choices) != 3 || r.Choices[0].Message.Content == r.Choices[1].Message.Content && r.Choices[1].Message.Content == r.Choices[2].Message.Content {
		t.Fatalf("%+v", r.Choices)
	}
}

func TestModelSaysWhatItIs(t *testing.T) {
	t.Parallel()
	url, c := start(t, nil)
	page, err := c.Models.List(context.Background())
	if err != nil || len(page.Data) != 2 || page.Data[0].ID != "demo" || page.Data[1].ID != "alias" {
		t.Fatalf("%+v, %v", page, err)
	}
	r, err := http.Get(url + "/v1/models")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	defer http.DefaultClient.CloseIdleConnections()
	raw, _ := io.ReadAll(r.Body)
	if !bytes.Contains(raw, []byte("cosmicac-ngram (demonstration model, simulated quality)")) {
		t.Fatalf("%s", raw)
	}
	for _, path := range []string{"/health", "/version"} {
		r, err := http.Get(url + path)
		if err != nil || r.StatusCode != http.StatusOK {
			t.Fatalf("%s: %v, %v", path, r, err)
		}
		r.Body.Close()
	}
}

func TestBadRequestsGetOpenAIErrors(t *testing.T) {
	t.Parallel()
	url, c := start(t, func(o *engine.Options) { o.MaxContext = 50 })
	p := ask("hello", 1)
	p.Model = "no-such-model"
	_, err := c.Chat.Completions.New(context.Background(), p)
	var api *openai.Error
	if !errors.As(err, &api) || api.StatusCode != http.StatusNotFound || !strings.Contains(api.Message, "no-such-model") {
		t.Fatalf("unknown model: %v", err)
	}
	message := `"messages":[{"role":"user","content":"hi"}]`
	for _, body := range []string{
		`{`, `[]`, `{"model":"demo"}`, `{"model":"demo","messages":[]}`, `{` + message + `}`,
		`{"model":"demo","messages":[{"role":"wizard","content":"hi"}]}`,
		`{"model":"demo","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]}`,
		`{"model":"demo","temperature":3,` + message + `}`, `{"model":"demo","top_p":0,` + message + `}`,
		`{"model":"demo","max_tokens":0,` + message + `}`, `{"model":"demo","n":0,` + message + `}`, `{"model":"demo","n":"x",` + message + `}`,
		`{"model":"demo","stop":[""],` + message + `}`, `{"model":"demo","stream_options":{"include_usage":true},` + message + `}`,
		`{"model":"demo","logprobs":true,` + message + `}`, `{"model":"demo","tools":[{"type":"function"}],` + message + `}`,
		`{"model":"demo","max_tokens":5000,` + message + `}`,
		`{"model":"demo","messages":[{"role":"user","content":"` + strings.Repeat("job ", 60) + `"}]}`,
	} {
		raw := post(t, url, "/v1/chat/completions", body, http.StatusBadRequest)
		var e struct {
			Error struct {
				Message, Type string
				Code          int
			}
		}
		if json.Unmarshal([]byte(raw), &e) != nil || e.Error.Message == "" || e.Error.Type != "BadRequestError" || e.Error.Code != 400 {
			t.Errorf("%s: %s", body, raw)
		}
	}
	post(t, url, "/v1/chat/completions", `{"model":"demo","messages":[{"role":"user","content":"`+strings.Repeat("x", 5<<20)+`"}]}`, http.StatusRequestEntityTooLarge)
	post(t, url, "/v1/embeddings", `{}`, http.StatusNotFound)
}

func TestClientThatGoesAwayStopsTheGeneration(t *testing.T) {
	t.Parallel()
	url, _ := start(t, func(o *engine.Options) { o.MaxContext = 1 << 30 })
	for _, stream := range []bool{true, false} {
		ctx, cancel := context.WithCancel(context.Background())
		body := fmt.Sprintf(`{"model":"demo","prompt":"A job","max_tokens":100000000,"ignore_eos":true,"stream":%v}`, stream)
		r, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/completions", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		var asking sync.WaitGroup
		client := &http.Client{Transport: &http.Transport{}}
		asking.Go(func() {
			if answer, err := client.Do(r); err == nil {
				_, _ = io.Copy(io.Discard, answer.Body)
				answer.Body.Close()
			}
		})
		eventually(t, "it generates", func() bool { return metric(t, url, "vllm:num_requests_running") == 1 })
		cancel()
		asking.Wait()
		eventually(t, "it stops", func() bool { return metric(t, url, "vllm:num_requests_running") == 0 })
		before := metric(t, url, "vllm:generation_tokens_total")
		time.Sleep(50 * time.Millisecond)
		if after := metric(t, url, "vllm:generation_tokens_total"); after != before {
			t.Fatalf("%v tokens were made for nobody", after-before)
		}
		client.CloseIdleConnections()
	}
}

func TestRequestsWaitForAPlaceAndTheQueueIsBounded(t *testing.T) {
	t.Parallel()
	url, _ := start(t, func(o *engine.Options) { o.Running, o.Waiting, o.MaxContext = 1, 1, 1<<30 })
	ctx, cancel := context.WithCancel(context.Background())
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	var asking sync.WaitGroup
	defer asking.Wait()
	defer cancel()
	long := `{"model":"demo","prompt":"A job","max_tokens":100000000,"ignore_eos":true}`
	for range 2 {
		r, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/completions", strings.NewReader(long))
		if err != nil {
			t.Fatal(err)
		}
		asking.Go(func() {
			if answer, err := client.Do(r); err == nil {
				answer.Body.Close()
			}
		})
	}
	eventually(t, "one runs and one waits", func() bool {
		return metric(t, url, "vllm:num_requests_running") == 1 && metric(t, url, "vllm:num_requests_waiting") == 1
	})
	post(t, url, "/v1/completions", `{"model":"demo","prompt":"A job"}`, http.StatusServiceUnavailable)
	cancel()
	asking.Wait()
	eventually(t, "the places are free again", func() bool {
		return metric(t, url, "vllm:num_requests_running") == 0 && metric(t, url, "vllm:num_requests_waiting") == 0
	})
	post(t, url, "/v1/completions", `{"model":"demo","prompt":"A job"}`, http.StatusOK)
}

func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if f() {
			return
		}
	}
	t.Fatalf("did not come to pass: %s", what)
}

func TestWrongArgumentIsNamedInTheLastLine(t *testing.T) {
	t.Parallel()
	for argument, want := range map[string]string{"--no-such-flag": "no-such-flag", "--max-num-seqs=many": "max-num-seqs", "word": `"word"`} {
		var said bytes.Buffer
		if code := engine.Main([]string{argument}, "test", &said); code != 2 {
			t.Errorf("%s: exit code %d", argument, code)
		}
		lines := strings.Split(strings.TrimSpace(said.String()), "\n")
		if last := lines[len(lines)-1]; !strings.HasPrefix(last, "engine: ") || !strings.Contains(last, want) {
			t.Errorf("%s: the last line is %q", argument, last)
		}
	}
}
