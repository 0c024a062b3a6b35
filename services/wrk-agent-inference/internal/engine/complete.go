package engine

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/cosmicac/cosmicac/services/wrk-agent-inference/internal/ngram"
)

// usage counts tokens as the model saw and made them.
type usage struct {
	PromptTokens     int `json:"prompt_tokens"`
	TotalTokens      int `json:"total_tokens"`
	CompletionTokens int `json:"completion_tokens"`
}

func (u *usage) add(n int) {
	u.CompletionTokens += n
	u.TotalTokens = u.PromptTokens + u.CompletionTokens
}

// work is one request being answered.
type work struct {
	engine  *Engine
	request *request
	chat    bool
	tokens  []ngram.Token
	topic   string
	limit   int
	id      string
	created int64
	begun   time.Time
	usage   usage
	first   bool // the first token was made
	last    time.Time
}

// complete answers both completion paths.
func (e *Engine) complete(w http.ResponseWriter, r *http.Request, chat bool) {
	begun := time.Now()
	q, fail := read(w, r, chat)
	if fail != nil {
		writeError(w, fail)
		return
	}
	k := &work{engine: e, request: q, chat: chat, begun: begun, created: e.o.Now().Unix()}
	if k.tokens, k.topic, k.limit, fail = e.prepare(q, chat); fail != nil {
		writeError(w, fail)
		return
	}
	k.id = fmt.Sprintf("cmpl-%016x", rand.Uint64())
	if chat {
		k.id = "chat" + k.id
	}
	if fail = e.enter(r.Context()); fail != nil {
		writeError(w, fail)
		return
	}
	defer e.leave()
	e.metrics.queuing.Observe(time.Since(begun).Seconds())
	e.metrics.promptTokens.Add(float64(len(k.tokens)))
	k.usage.PromptTokens = len(k.tokens)
	k.usage.add(0)
	if q.Stream {
		k.stream(w, r)
	} else {
		k.whole(w, r)
	}
	e.metrics.endToEnd.Observe(time.Since(begun).Seconds())
}

// generate makes choice i and gives each piece of text to emit once it is whole
// characters that no stop string can begin with. It returns the finish reason, or
// "abort" when ctx ended or emit failed.
func (k *work) generate(ctx context.Context, i int, emit func(text string) error) (reason string, fail *apiError) {
	e := k.engine
	s, fail := e.sampling(k.request, i)
	if fail != nil {
		return "", fail
	}
	defer func() {
		if fail == nil {
			e.metrics.success.WithLabelValues(reason).Inc()
		}
	}()
	var stop []string
	if k.request.Stop != nil {
		stop = *k.request.Stop
	}
	g := e.o.Model.NewGenerator(k.tokens, k.topic, s)
	text := holder{stop: stop}
	for range k.limit {
		if ctx.Err() != nil {
			return "abort", nil
		}
		t := g.Next()
		k.count()
		if t == ngram.End {
			return k.emitLast(&text, "stop", emit)
		}
		piece, stopped := text.add(e.o.Model.Text(t))
		if stopped {
			if piece != "" && emit(piece) != nil {
				return "abort", nil
			}
			return "stop", nil
		}
		if piece != "" && emit(piece) != nil {
			return "abort", nil
		}
	}
	return k.emitLast(&text, "length", emit)
}

func (k *work) emitLast(text *holder, reason string, emit func(string) error) (string, *apiError) {
	if rest := text.rest(); rest != "" && emit(rest) != nil {
		return "abort", nil
	}
	return reason, nil
}

// count takes one generated token into usage and metrics.
func (k *work) count() {
	m := k.engine.metrics
	k.usage.add(1)
	m.generationTokens.Inc()
	now := time.Now()
	if k.first {
		m.interToken.Observe(now.Sub(k.last).Seconds())
	} else {
		k.first = true
		m.firstToken.Observe(now.Sub(k.begun).Seconds())
	}
	k.last = now
}

// holder keeps back bytes that may still become a character or a stop string.
type holder struct {
	stop []string
	held string
}

func (h *holder) add(piece string) (out string, stopped bool) {
	h.held += piece
	at := -1
	for _, s := range h.stop {
		if i := strings.Index(h.held, s); i >= 0 && (at < 0 || i < at) {
			at = i
		}
	}
	if at >= 0 {
		out, h.held = h.held[:at], ""
		return strings.ToValidUTF8(out, "\ufffd"), true
	}
	keep := incomplete(h.held)
	for _, s := range h.stop {
		for n := min(len(s)-1, len(h.held)); n > keep; n-- {
			if strings.HasSuffix(h.held, s[:n]) {
				keep = n
				break
			}
		}
	}
	out, h.held = h.held[:len(h.held)-keep], h.held[len(h.held)-keep:]
	return strings.ToValidUTF8(out, "\ufffd"), false
}

func (h *holder) rest() string {
	out := h.held
	h.held = ""
	return strings.ToValidUTF8(out, "\ufffd")
}

// incomplete is the number of bytes at the end that begin a character and do not end it.
func incomplete(s string) int {
	for n := 1; n <= min(3, len(s)); n++ {
		b := s[len(s)-n]
		if utf8.RuneStart(b) {
			if b >= 0x80 && !utf8.FullRuneInString(s[len(s)-n:]) {
				return n
			}
			return 0
		}
	}
	return 0
}

func (k *work) object(chunk bool) string {
	switch {
	case k.chat && chunk:
		return "chat.completion.chunk"
	case k.chat:
		return "chat.completion"
	}
	return "text_completion"
}

// whole answers in one piece, with usage always.
func (k *work) whole(w http.ResponseWriter, r *http.Request) {
	choices := []any{}
	for i := range value(k.request.N, 1) {
		var b strings.Builder
		reason, fail := k.generate(r.Context(), i, func(text string) error {
			b.WriteString(text)
			return nil
		})
		if fail != nil {
			writeError(w, fail)
			return
		}
		if reason == "abort" {
			return // nobody is there to read an answer
		}
		choice := map[string]any{"index": i, "finish_reason": reason, "logprobs": nil, "stop_reason": nil}
		if k.chat {
			choice["message"] = map[string]any{"role": "assistant", "content": strings.TrimLeft(b.String(), " "), "refusal": nil}
		} else {
			choice["text"] = b.String()
		}
		choices = append(choices, choice)
	}
	writeJSON(w, http.StatusOK, map[string]any{
		"id": k.id, "object": k.object(false), "created": k.created, "model": k.request.Model, "choices": choices, "usage": k.usage,
	})
}

// stream answers token by token as server-sent events.
func (k *work) stream(w http.ResponseWriter, r *http.Request) {
	control := http.NewResponseController(w)
	header := w.Header()
	header.Set("Content-Type", "text/event-stream; charset=utf-8")
	header.Set("Cache-Control", "no-cache")
	header.Set("X-Accel-Buffering", "no")
	w.WriteHeader(http.StatusOK)
	options := value(k.request.StreamOptions, streamOptions{})
	send := func(choices []any, withUsage bool) error {
		body := map[string]any{"id": k.id, "object": k.object(true), "created": k.created, "model": k.request.Model, "choices": choices}
		if withUsage {
			body["usage"] = k.usage
		}
		raw, err := json.Marshal(body)
		if err != nil {
			return err
		}
		if _, err := fmt.Fprintf(w, "data: %s\n\n", raw); err != nil {
			return err
		}
		return control.Flush()
	}
	one := func(i int, text string, reason any) error {
		choice := map[string]any{"index": i, "finish_reason": reason, "logprobs": nil}
		if k.chat {
			delta := map[string]any{}
			if reason == nil {
				delta["content"] = text
			}
			choice["delta"] = delta
		} else {
			choice["text"] = text
		}
		return send([]any{choice}, options.ContinuousUsageStats)
	}
	for i := range value(k.request.N, 1) {
		if k.chat {
			opening := map[string]any{"index": i, "finish_reason": nil, "logprobs": nil, "delta": map[string]any{"role": "assistant", "content": ""}}
			if send([]any{opening}, options.ContinuousUsageStats) != nil {
				return
			}
		}
		begun := false
		reason, fail := k.generate(r.Context(), i, func(text string) error {
			if k.chat && !begun { // as the whole answer has it
				text = strings.TrimLeft(text, " ")
			}
			if text == "" {
				return nil
			}
			begun = true
			return one(i, text, nil)
		})
		if reason == "abort" {
			return
		}
		if fail != nil {
			raw, _ := json.Marshal(map[string]any{"error": map[string]any{"message": fail.message, "type": fail.kind, "param": nil, "code": fail.status}})
			_, _ = fmt.Fprintf(w, "data: %s\n\ndata: [DONE]\n\n", raw)
			return
		}
		if one(i, "", reason) != nil {
			return
		}
	}
	if options.IncludeUsage && send([]any{}, true) != nil {
		return
	}
	_, _ = fmt.Fprint(w, "data: [DONE]\n\n")
	_ = control.Flush()
}
