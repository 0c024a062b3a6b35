package soak

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cosmicac/cosmicac/services/cosmicac-cli/internal/client"
)

// asker is a client of the models that run, all through the trouble: one
// request after the other, always the same, so that every whole answer must be
// the same too.
type asker struct {
	p   *platform
	key string // the secret
	id  string // of the key

	cancel context.CancelFunc
	done   sync.WaitGroup

	mu      sync.Mutex
	broken  []string // rules that an answer broke
	text    string   // the first whole answer
	sent    uint64   // to a model that there may be
	whole   uint64   // answers with [DONE]
	tokens  uint64   // that the whole ones were told
	known   bool     // the key was taken once
	refused map[string]int
}

const (
	askedTokens  = 24
	servedModel  = "cosmicac/ngram-demo"
	unknownModel = "nobody/serves-this"
)

// words are the codes that a status may come with. The front door's own, while the
// proxy is down, is proxy_unreachable.
var words = map[int][]string{
	404: {"model_not_found"},
	429: {"all_replicas_busy", "rate_limit_exceeded", "concurrent_requests_exceeded"},
	401: {"invalid_api_key"},
	502: {"proxy_unreachable"},
	503: {"model_loading", "waiting_for_capacity", "endpoint_stopped", "no_ready_replica", "replicas_unreachable", "replicas_unavailable", "replicas_failed",
		"api_keys_not_received", "endpoints_not_received", "proxy_overloaded", "proxy_unreachable"},
	504: {"first_byte_timeout", "engine_timeout", "proxy_unreachable"},
}

// newAsker makes a key and begins to ask; end it with stop.
func newAsker(p *platform) *asker {
	p.t.Helper()
	a := &asker{p: p, refused: map[string]int{}}
	var made struct {
		APIKey client.APIKey `json:"api_key"`
		Key    string        `json:"key"`
	}
	p.insist("make an API key", func(ctx context.Context) error {
		return p.api.Call(ctx, "POST", "/api/v1/api-keys", nil, nil, map[string]any{"name": "soak"}, &made)
	})
	a.key, a.id = made.Key, made.APIKey.ID
	var ctx context.Context
	ctx, a.cancel = context.WithCancel(context.Background())
	a.done.Go(func() {
		for n := 0; ctx.Err() == nil; n++ {
			model := servedModel
			if n%8 == 7 {
				model = unknownModel
			}
			a.ask(ctx, model)
			select {
			case <-ctx.Done():
			case <-time.After(200 * time.Millisecond):
			}
		}
	})
	p.t.Cleanup(a.stop)
	return a
}

func (a *asker) stop() {
	a.cancel()
	a.done.Wait()
}

func (a *asker) breaks(format string, args ...any) {
	a.p.note(format, args...)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.broken = append(a.broken, fmt.Sprintf(format, args...))
}

// check returns the rules that were broken since the last check.
func (a *asker) check() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	out := a.broken
	a.broken = nil
	return out
}

// ask sends one streamed request. A refusal must say which kind it is, and an
// answer must be whole or plainly broken off.
func (a *asker) ask(ctx context.Context, model string) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	body, err := json.Marshal(map[string]any{
		"model": model, "stream": true, "stream_options": map[string]any{"include_usage": true}, "max_tokens": askedTokens, "temperature": 0, "seed": 1,
		"messages": []map[string]string{{"role": "user", "content": "Who grants a GPU?"}},
	})
	if err != nil {
		a.breaks("encode a request: %v", err)
		return
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, a.p.URL()+"/inference/v1/chat/completions", bytes.NewReader(body))
	if err != nil {
		a.breaks("make a request: %v", err)
		return
	}
	request.Header.Set("Authorization", "Bearer "+a.key)
	request.Header.Set("Content-Type", "application/json")
	if model == servedModel {
		a.mu.Lock()
		a.sent++
		a.mu.Unlock()
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return // the front door is down, or the test ends
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		a.refusal(model, response)
		return
	}
	if model == unknownModel {
		a.breaks("a model that nobody serves answered")
	}
	a.answer(response)
}

func (a *asker) refusal(model string, response *http.Response) {
	var said struct {
		Error struct {
			Code string `json:"code"`
		} `json:"error"`
	}
	body, err := io.ReadAll(io.LimitReader(response.Body, 1<<20))
	if err != nil {
		return // cut off: its daemon was killed in the middle of it
	}
	if err := json.Unmarshal(body, &said); err != nil {
		a.breaks("a request for %s was refused with %d and no JSON: %q", model, response.StatusCode, body)
		return
	}
	codes, known := words[response.StatusCode]
	if !known || !slices.Contains(codes, said.Error.Code) {
		a.breaks("a request for %s was refused with %d %q", model, response.StatusCode, said.Error.Code)
	}
	a.mu.Lock()
	refused := response.StatusCode == http.StatusUnauthorized
	forgotten := refused && a.known
	a.known = a.known || !refused && said.Error.Code == "model_not_found"
	a.refused[fmt.Sprintf("%d %s", response.StatusCode, said.Error.Code)]++
	a.mu.Unlock()
	if forgotten {
		a.breaks("a key that was taken before was refused")
	}
}

// answer reads a stream. Whole: one [DONE] at its end, the words that every
// whole answer has, and the engine's count of them. Broken off: no [DONE].
func (a *asker) answer(response *http.Response) {
	var text strings.Builder
	var counted []uint64
	done, failed := false, ""
	lines := bufio.NewScanner(response.Body)
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		if !ok {
			continue
		}
		if done {
			a.breaks("an answer went on after [DONE]: %s", data)
			return
		}
		if data == "[DONE]" {
			done = true
			continue
		}
		var chunk struct {
			Choices []struct {
				Delta struct {
					Content string `json:"content"`
				} `json:"delta"`
			} `json:"choices"`
			Usage *struct {
				CompletionTokens uint64 `json:"completion_tokens"`
			} `json:"usage"`
			Error *struct {
				Code string `json:"code"`
			} `json:"error"`
		}
		if err := json.Unmarshal([]byte(data), &chunk); err != nil {
			// A line that was cut is the end of a cut connection.
			failed = "cut in a line"
			continue
		}
		if chunk.Error != nil {
			failed = chunk.Error.Code
		}
		if chunk.Usage != nil {
			counted = append(counted, chunk.Usage.CompletionTokens)
		}
		for _, c := range chunk.Choices {
			text.WriteString(c.Delta.Content)
		}
	}
	a.mu.Lock()
	first := a.text
	if done && first == "" {
		a.text, first = text.String(), text.String()
	}
	a.mu.Unlock()
	switch {
	case done && failed != "":
		a.breaks("an answer failed (%s) and said [DONE]", failed)
	case done && (len(counted) != 1 || counted[0] < 1 || counted[0] > askedTokens):
		a.breaks("a whole answer came with the counts %v of at most %d tokens", counted, askedTokens)
	case done && text.String() != first:
		a.breaks("an answer is not the others': %q, theirs %q", text.String(), first)
	case !done && !strings.HasPrefix(first, text.String()) && first != "":
		a.breaks("an answer that was broken off is no beginning of the others: %q, theirs %q", text.String(), first)
	case done:
		a.mu.Lock()
		a.whole++
		a.known = true
		a.tokens += counted[0]
		a.mu.Unlock()
	}
}

// accounts demands that the ledger holds what was answered: each whole answer
// once, but for one that a killed proxy took along, and nothing that was not
// asked. It is right only once nobody asks any more.
func (a *asker) accounts(proxyKills uint64) string {
	var list struct {
		Buckets []client.UsageBucket `json:"buckets"`
	}
	if err := a.p.ask("GET", "/api/v1/api-keys/usage?api_key_id="+a.id, nil, nil, &list); err != nil {
		return err.Error()
	}
	var requests, tokens uint64
	for _, b := range list.Buckets {
		requests += b.Requests
		tokens += b.CompletionTokens
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if requests > a.sent || requests+proxyKills < a.whole {
		return fmt.Sprintf("the ledger holds %d requests; %d were sent and %d answered", requests, a.sent, a.whole)
	}
	if most := a.tokens + (a.sent-a.whole)*askedTokens; tokens > most || tokens+proxyKills*askedTokens < a.tokens {
		return fmt.Sprintf("the ledger holds %d tokens; whole answers had %d, others %d at most", tokens, a.tokens, most-a.tokens)
	}
	return ""
}
