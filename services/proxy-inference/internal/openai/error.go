// Package openai is the part of OpenAI's HTTP wire that a gateway must
// understand: the shape of errors, the few top-level fields of a request that
// decide where it goes, the borders of server-sent events, and where an engine
// says what it used.
//
// It never decodes a body into types and encodes it again: unknown fields pass
// unchanged because nobody touches them. It does no I/O, knows no endpoint and
// no key, and does not check what a model would accept.
package openai

import (
	"encoding/json"
	"net/http"
	"strconv"
	"time"
)

// Error is a refusal in OpenAI's shape. Message is for people, Code for programs.
type Error struct {
	Status  int
	Type    string
	Code    string
	Param   string
	Message string
	// RetryAfter is sent as a header in whole seconds, rounded up; zero sends none.
	RetryAfter time.Duration
	// NoRetry tells the official clients not to repeat a request that was
	// already tried everywhere.
	NoRetry bool
	// Allow is the Allow header of a 405.
	Allow string
}

// The types of errors that OpenAI's clients know.
const (
	TypeInvalid    = "invalid_request_error"
	TypeRateLimit  = "rate_limit_error"
	TypeServer     = "server_error"
	TypePermission = "authentication_error"
)

func (e *Error) Error() string { return e.Message }

// Body is the JSON form, without a newline.
func (e *Error) Body() []byte {
	type inner struct {
		Message string  `json:"message"`
		Type    string  `json:"type"`
		Param   *string `json:"param"`
		Code    *string `json:"code"`
	}
	in := inner{Message: e.Message, Type: e.Type}
	if e.Param != "" {
		in.Param = &e.Param
	}
	if e.Code != "" {
		in.Code = &e.Code
	}
	body, err := json.Marshal(struct {
		Error inner `json:"error"`
	}{in})
	if err != nil {
		// Strings always marshal; invalid UTF-8 is replaced.
		return []byte(`{"error":{"message":"internal error","type":"server_error","param":null,"code":null}}`)
	}
	return body
}

// Event is the error as one server-sent event.
func (e *Error) Event() []byte {
	return append(append([]byte("data: "), e.Body()...), "\n\n"...)
}

// Write answers a request with the error. Nothing may have been written before.
func (e *Error) Write(w http.ResponseWriter) {
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("X-Content-Type-Options", "nosniff")
	if e.RetryAfter > 0 {
		h.Set("Retry-After", strconv.Itoa(int((e.RetryAfter+time.Second-1)/time.Second)))
	}
	if e.NoRetry {
		h.Set("X-Should-Retry", "false")
	}
	if e.Status == http.StatusUnauthorized {
		h.Set("Www-Authenticate", "Bearer")
	}
	if e.Allow != "" {
		h.Set("Allow", e.Allow)
	}
	body := append(e.Body(), '\n')
	h.Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(e.Status)
	w.Write(body) // a client that left does not want it
}

// Invalid is a 400 about one parameter; param may be empty.
func Invalid(code, param, message string) *Error {
	return &Error{Status: http.StatusBadRequest, Type: TypeInvalid, Code: code, Param: param, Message: message}
}
