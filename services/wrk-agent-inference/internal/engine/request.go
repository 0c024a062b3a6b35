package engine

import (
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"strings"
)

// Bounds of a request.
const (
	maxBodyBytes = 4 << 20
	maxMessages  = 4096
	maxChoices   = 16
	maxStops     = 16
	maxStopBytes = 1 << 10
	// completionTokens is vLLM's default of /v1/completions.
	completionTokens = 16
)

// request is what both completion paths have in common. Pointers tell "not said"
// from zero.
type request struct {
	Model    string    `json:"model"`
	Messages []message `json:"messages"`
	Prompt   *prompt   `json:"prompt"`

	MaxTokens           *int           `json:"max_tokens"`
	MaxCompletionTokens *int           `json:"max_completion_tokens"`
	Temperature         *float64       `json:"temperature"`
	TopP                *float64       `json:"top_p"`
	TopK                *int           `json:"top_k"`
	PresencePenalty     *float64       `json:"presence_penalty"`
	FrequencyPenalty    *float64       `json:"frequency_penalty"`
	Seed                *int64         `json:"seed"`
	Stop                *stops         `json:"stop"`
	N                   *int           `json:"n"`
	Stream              bool           `json:"stream"`
	StreamOptions       *streamOptions `json:"stream_options"`
	IgnoreEOS           bool           `json:"ignore_eos"`

	Echo           bool            `json:"echo"`
	BestOf         *int            `json:"best_of"`
	Logprobs       json.RawMessage `json:"logprobs"`
	Tools          json.RawMessage `json:"tools"`
	ToolChoice     json.RawMessage `json:"tool_choice"`
	ResponseFormat *struct {
		Type string `json:"type"`
	} `json:"response_format"`
}

type streamOptions struct {
	IncludeUsage         bool `json:"include_usage"`
	ContinuousUsageStats bool `json:"continuous_usage_stats"`
}

type message struct {
	Role    string  `json:"role"`
	Content content `json:"content"`
}

// content is a text, or parts of which only text can be read here.
type content string

func (c *content) UnmarshalJSON(raw []byte) error {
	if string(raw) == "null" {
		return nil
	}
	var text string
	if json.Unmarshal(raw, &text) == nil {
		*c = content(text)
		return nil
	}
	var parts []struct {
		Type string `json:"type"`
		Text string `json:"text"`
	}
	if err := json.Unmarshal(raw, &parts); err != nil {
		return fmt.Errorf("content must be a string or a list of parts")
	}
	var b strings.Builder
	for _, p := range parts {
		if p.Type != "text" {
			return fmt.Errorf("content parts of type %q are not supported, this model reads text only", p.Type)
		}
		b.WriteString(p.Text)
	}
	*c = content(b.String())
	return nil
}

// prompt is one text. Lists of texts or tokens are legal OpenAI and not supported here.
type prompt string

func (p *prompt) UnmarshalJSON(raw []byte) error {
	var text string
	if json.Unmarshal(raw, &text) == nil {
		*p = prompt(text)
		return nil
	}
	var list []string
	if json.Unmarshal(raw, &list) == nil && len(list) == 1 {
		*p = prompt(list[0])
		return nil
	}
	return fmt.Errorf("prompt must be one string")
}

type stops []string

func (s *stops) UnmarshalJSON(raw []byte) error {
	if string(raw) == "null" {
		return nil
	}
	var one string
	if json.Unmarshal(raw, &one) == nil {
		*s = stops{one}
		return nil
	}
	var list []string
	if err := json.Unmarshal(raw, &list); err != nil {
		return fmt.Errorf("stop must be a string or a list of strings")
	}
	*s = list
	return nil
}

// apiError is an answer in OpenAI's error shape, with vLLM's type names and numeric code.
type apiError struct {
	status  int
	kind    string
	param   string
	message string
}

func (e *apiError) Error() string { return e.message }

func bad(param, format string, a ...any) *apiError {
	return &apiError{status: http.StatusBadRequest, kind: "BadRequestError", param: param, message: fmt.Sprintf(format, a...)}
}

func writeError(w http.ResponseWriter, e *apiError) {
	body := map[string]any{"message": e.message, "type": e.kind, "param": nil, "code": e.status}
	if e.param != "" {
		body["param"] = e.param
	}
	writeJSON(w, e.status, map[string]any{"error": body})
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	raw, err := json.Marshal(v)
	if err != nil {
		http.Error(w, "encode answer", http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(append(raw, '\n'))
}

// read decodes and checks a body. chat tells which of the two paths it is for.
func read(w http.ResponseWriter, r *http.Request, chat bool) (*request, *apiError) {
	var q request
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBodyBytes)).Decode(&q); err != nil {
		var large *http.MaxBytesError
		if ok := asError(err, &large); ok {
			return nil, &apiError{status: http.StatusRequestEntityTooLarge, kind: "BadRequestError", message: fmt.Sprintf("the body is over %d bytes", maxBodyBytes)}
		}
		return nil, bad("", "the body cannot be read as a request: %v", err)
	}
	return &q, q.check(chat)
}

func (q *request) check(chat bool) *apiError {
	between := func(name string, v *float64, low, high float64) *apiError {
		if v != nil && (math.IsNaN(*v) || *v < low || *v > high) {
			return bad(name, "%s must be in [%g, %g], got %g", name, low, high, *v)
		}
		return nil
	}
	if q.Model == "" {
		return bad("model", "model is missing")
	}
	if chat && len(q.Messages) == 0 {
		return bad("messages", "messages must hold at least one message")
	}
	if len(q.Messages) > maxMessages {
		return bad("messages", "at most %d messages are read", maxMessages)
	}
	for i, m := range q.Messages {
		switch m.Role {
		case "system", "developer", "user", "assistant", "tool":
		default:
			return bad("messages", "messages[%d].role %q is not known", i, m.Role)
		}
	}
	if !chat && q.Prompt == nil {
		return bad("prompt", "prompt is missing")
	}
	for _, e := range []*apiError{
		between("temperature", q.Temperature, 0, 2), between("presence_penalty", q.PresencePenalty, -2, 2),
		between("frequency_penalty", q.FrequencyPenalty, -2, 2), between("top_p", q.TopP, 0, 1),
	} {
		if e != nil {
			return e
		}
	}
	if q.TopP != nil && *q.TopP == 0 {
		return bad("top_p", "top_p must be in (0, 1], got 0")
	}
	for name, v := range map[string]*int{"max_tokens": q.MaxTokens, "max_completion_tokens": q.MaxCompletionTokens} {
		if v != nil && *v < 1 {
			return bad(name, "%s must be at least 1, got %d", name, *v)
		}
	}
	if q.TopK != nil && *q.TopK < -1 {
		return bad("top_k", "top_k must be -1, 0 or more, got %d", *q.TopK)
	}
	if q.N != nil && (*q.N < 1 || *q.N > maxChoices) {
		return bad("n", "n must be in [1, %d], got %d", maxChoices, *q.N)
	}
	if q.StreamOptions != nil && !q.Stream {
		return bad("stream_options", "stream_options is only allowed when stream is true")
	}
	if q.Stop != nil {
		if len(*q.Stop) > maxStops {
			return bad("stop", "at most %d stop strings are taken", maxStops)
		}
		for _, s := range *q.Stop {
			if s == "" || len(s) > maxStopBytes {
				return bad("stop", "a stop string must have 1 to %d bytes", maxStopBytes)
			}
		}
	}
	return q.unsupported()
}

// unsupported names what a larger engine could do and this one cannot.
func (q *request) unsupported() *apiError {
	said := func(raw json.RawMessage) bool {
		text := string(raw)
		return text != "" && text != "null" && text != "false" && text != "[]" && text != "0"
	}
	switch {
	case said(q.Tools) && string(q.ToolChoice) != `"none"`:
		return bad("tools", "this model calls no tools")
	case said(q.Logprobs):
		return bad("logprobs", "this engine gives no log probabilities")
	case q.ResponseFormat != nil && q.ResponseFormat.Type != "text" && q.ResponseFormat.Type != "":
		return bad("response_format", "this model answers in plain text only")
	case q.BestOf != nil && *q.BestOf != 1:
		return bad("best_of", "best_of is not supported")
	case q.Echo:
		return bad("echo", "echo is not supported")
	}
	return nil
}

func (q *request) maxTokens() *int {
	if q.MaxCompletionTokens != nil {
		return q.MaxCompletionTokens
	}
	return q.MaxTokens
}

func value[T any](p *T, otherwise T) T {
	if p == nil {
		return otherwise
	}
	return *p
}
