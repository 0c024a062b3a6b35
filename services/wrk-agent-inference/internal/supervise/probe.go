package supervise

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"sync/atomic"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

const (
	askTime       = 5 * time.Second
	maxAnswer     = 1 << 20
	maxExposition = 8 << 20
)

// prober asks the engine over HTTP, each time on a new connection, so that it
// sees what a client would see.
type prober struct {
	launch Launch
	client *http.Client
	// chat is set once the engine turned out to know the chat path only.
	chat atomic.Bool
}

func newProber(l Launch) *prober {
	return &prober{launch: l, client: &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{Timeout: askTime}).DialContext(ctx, l.Network, l.Address)
		},
	}}}
}

func (p *prober) ask(ctx context.Context, method, path string, body any, limit int64) (status int, answer []byte, err error) {
	var reader io.Reader
	if body != nil {
		raw, err := json.Marshal(body)
		if err != nil {
			return 0, nil, err
		}
		reader = bytes.NewReader(raw)
	}
	r, err := http.NewRequestWithContext(ctx, method, "http://engine"+path, reader)
	if err != nil {
		return 0, nil, err
	}
	if body != nil {
		r.Header.Set("Content-Type", "application/json")
	}
	a, err := p.client.Do(r)
	if err != nil {
		return 0, nil, err
	}
	defer a.Body.Close()
	answer, err = io.ReadAll(io.LimitReader(a.Body, limit))
	return a.StatusCode, answer, err
}

// health is the engine's own word: 200, another status, or an error.
func (p *prober) health(ctx context.Context) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	status, _, err := p.ask(ctx, http.MethodGet, "/health", nil, maxAnswer)
	return status, err
}

// models checks that the engine lists a name that it is to serve. An engine
// without the path is taken at the word of its completions.
func (p *prober) models(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	status, raw, err := p.ask(ctx, http.MethodGet, "/v1/models", nil, maxAnswer)
	if err != nil {
		return err
	}
	if status == http.StatusNotFound {
		return nil
	}
	var list struct {
		Data []struct {
			ID string `json:"id"`
		} `json:"data"`
	}
	if status != http.StatusOK || json.Unmarshal(raw, &list) != nil {
		return fmt.Errorf("/v1/models answered %d", status)
	}
	for _, m := range list.Data {
		if slices.Contains(p.launch.Models, m.ID) {
			return nil
		}
	}
	return fmt.Errorf("/v1/models lists none of %q", p.launch.Models)
}

// complete asks for one token, and is nil when it came.
func (p *prober) complete(ctx context.Context) error {
	name := ""
	if len(p.launch.Models) > 0 {
		name = p.launch.Models[0]
	}
	if !p.chat.Load() {
		status, raw, err := p.ask(ctx, http.MethodPost, "/v1/completions", map[string]any{
			"model": name, "prompt": "Hello", "max_tokens": 1, "temperature": 0,
		}, maxAnswer)
		switch {
		case err != nil:
			return err
		case status != http.StatusNotFound && status != http.StatusMethodNotAllowed && status != http.StatusBadRequest && status != http.StatusNotImplemented:
			return oneToken("/v1/completions", status, raw)
		}
	}
	status, raw, err := p.ask(ctx, http.MethodPost, "/v1/chat/completions", map[string]any{
		"model": name, "messages": []any{map[string]any{"role": "user", "content": "Hello"}}, "max_tokens": 1, "temperature": 0,
	}, maxAnswer)
	if err != nil {
		return err
	}
	if err := oneToken("/v1/chat/completions", status, raw); err != nil {
		return err
	}
	p.chat.Store(true)
	return nil
}

func oneToken(path string, status int, raw []byte) error {
	var answer struct {
		Choices []json.RawMessage `json:"choices"`
	}
	if status != http.StatusOK {
		return fmt.Errorf("%s answered %d: %s", path, status, raw[:min(len(raw), 200)])
	}
	if json.Unmarshal(raw, &answer) != nil || len(answer.Choices) == 0 {
		return fmt.Errorf("%s answered 200 without a choice", path)
	}
	return nil
}

// load is what the engine's own metrics say.
type load struct {
	running, waiting uint32
	tokens           float64
}

// load reads the metrics; ok is false for an engine without the names of vLLM.
func (p *prober) load(ctx context.Context) (l load, ok bool) {
	families, err := p.families(ctx)
	if err != nil {
		return load{}, false
	}
	running, has := sum(families["vllm:num_requests_running"])
	if !has {
		return load{}, false
	}
	waiting, _ := sum(families["vllm:num_requests_waiting"])
	generated, _ := sum(families["vllm:generation_tokens_total"])
	prompted, _ := sum(families["vllm:prompt_tokens_total"])
	return load{uint32(max(running, 0)), uint32(max(waiting, 0)), generated + prompted}, true
}

func (p *prober) families(ctx context.Context) (map[string]*dto.MetricFamily, error) {
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	status, raw, err := p.ask(ctx, http.MethodGet, "/metrics", nil, maxExposition)
	if err != nil {
		return nil, err
	}
	if status != http.StatusOK {
		return nil, fmt.Errorf("/metrics answered %d", status)
	}
	parser := expfmt.NewTextParser(model.LegacyValidation)
	return parser.TextToMetricFamilies(bytes.NewReader(raw))
}

// sum adds the series of a family: a data-parallel engine has one for each part.
func sum(f *dto.MetricFamily) (total float64, ok bool) {
	for _, m := range f.GetMetric() {
		switch {
		case m.Gauge != nil:
			total += m.Gauge.GetValue()
		case m.Counter != nil:
			total += m.Counter.GetValue()
		case m.Untyped != nil:
			total += m.Untyped.GetValue()
		}
		ok = true
	}
	return total, ok
}
