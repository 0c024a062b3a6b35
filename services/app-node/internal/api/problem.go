package api

import (
	"context"
	"errors"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/services/app-node/internal/account"
)

// Problem is every error's body: RFC 9457, with a kind to switch on.
type Problem struct {
	Title  string          `json:"title" doc:"The kind as a sentence"`
	Status int             `json:"status" doc:"HTTP status"`
	Detail string          `json:"detail" doc:"What was tried on what, and what to do"`
	Kind   string          `json:"kind" doc:"Closed, append-only list: what to decide by"`
	Errors []ProblemDetail `json:"errors,omitempty" doc:"The parts of the request that broke a rule"`

	retryAfter time.Duration
}

// ProblemDetail names one part of a request and the rule it broke. The value
// itself is never echoed: it may be a password.
type ProblemDetail struct {
	Location string `json:"location" doc:"Like body.gpu.count or query.page"`
	Message  string `json:"message" doc:"The rule"`
}

var (
	_ huma.StatusError       = (*Problem)(nil)
	_ huma.ContentTypeFilter = (*Problem)(nil)
	_ huma.HeadersError      = (*Problem)(nil)
)

// Error is the detail.
func (p *Problem) Error() string { return p.Detail }

// GetStatus is the HTTP status.
func (p *Problem) GetStatus() int { return p.Status }

// ContentType makes JSON problem JSON.
func (p *Problem) ContentType(string) string { return "application/problem+json" }

// GetHeaders adds what a kind asks for.
func (p *Problem) GetHeaders() http.Header {
	h := http.Header{}
	if p.retryAfter > 0 {
		h.Set("Retry-After", strconv.Itoa(int((p.retryAfter+time.Second-1)/time.Second)))
	}
	if p.Kind == string(fault.Unauthenticated) {
		h.Set("WWW-Authenticate", `Bearer realm="cosmicac"`)
	}
	return h
}

// problemOf turns any error into a problem. What nobody classified is not shown.
func problemOf(err error) *Problem {
	var ready *Problem
	if errors.As(err, &ready) {
		return ready
	}
	kind := fault.KindOf(err)
	p := &Problem{Title: kind.Sentence(), Status: kind.HTTP(), Kind: string(kind)}
	var f *fault.Error
	switch {
	case kind == fault.Internal:
		p.Detail = "an error inside app-node; its log says more"
	case errors.As(err, &f):
		p.Detail = f.Message
		if kind == fault.Unavailable && f.Cause != nil {
			p.Detail += " (" + strings.SplitN(f.Cause.Error(), "\n", 2)[0] + ")"
		}
	default:
		p.Detail = strings.ToLower(kind.Sentence())
	}
	var wait account.RetryAfter
	if errors.As(err, &wait) {
		p.retryAfter = time.Duration(wait)
	}
	for _, d := range fault.DetailsOf(err) {
		p.Errors = append(p.Errors, ProblemDetail{Location: location(d.Field), Message: d.Rule})
	}
	return p
}

// queryFields are the names of details that are about the query.
var queryFields = []string{"page_token", "ts_start", "ts_end"}

// location is a field's place in the request. Most details are about the body; a
// machine-readable "reason" is about no field and stays as it is.
func location(field string) string {
	if field == "reason" {
		return field
	}
	if slices.Contains(queryFields, field) {
		return "query." + field
	}
	for _, prefix := range []string{"body.", "query.", "path.", "header."} {
		if strings.HasPrefix(field, prefix) {
			return field
		}
	}
	return "body." + field
}

var missing = regexp.MustCompile(`^expected required property (.+) to be present$`)

// ofFramework turns an error of the HTTP framework's own checks into a problem.
func ofFramework(status int, message string, errs ...error) huma.StatusError {
	for _, err := range errs {
		var p *Problem
		if errors.As(err, &p) {
			return p
		}
	}
	kind := kindOfStatus(status)
	p := &Problem{Title: kind.Sentence(), Status: kind.HTTP(), Kind: string(kind), Detail: message}
	if status == http.StatusMethodNotAllowed || status == http.StatusUnsupportedMediaType || status == http.StatusNotAcceptable {
		p.Status = status
	}
	if status == 0 { // asked for the shape of an error, for the document
		return p
	}
	if kind == fault.Internal {
		p.Detail = "an error inside app-node; its log says more"
		return p
	}
	for _, err := range errs {
		if err == nil {
			continue
		}
		d := ProblemDetail{Location: "body", Message: err.Error()}
		var detailer huma.ErrorDetailer
		if errors.As(err, &detailer) {
			detail := detailer.ErrorDetail()
			d = ProblemDetail{Location: detail.Location, Message: detail.Message}
		}
		if m := missing.FindStringSubmatch(d.Message); m != nil {
			d.Location, d.Message = strings.TrimPrefix(d.Location+"."+m[1], "."), "is required"
		}
		if d.Message == "unexpected property" {
			d.Message = "is not a known field"
		}
		p.Errors = append(p.Errors, d)
	}
	if message == "validation failed" && len(p.Errors) > 0 {
		p.Detail = "the request is not valid: " + strings.TrimPrefix(p.Errors[0].Location, "body.") + ": " + p.Errors[0].Message
	}
	return p
}

func kindOfStatus(status int) fault.Kind {
	switch status {
	case http.StatusRequestTimeout:
		return fault.Timeout
	case http.StatusMethodNotAllowed:
		return fault.Unsupported
	}
	for _, k := range fault.Kinds() {
		if k.HTTP() == status {
			return k
		}
	}
	if status >= 500 {
		return fault.Internal
	}
	return fault.Invalid
}

// framework makes the framework write our problems. It offers package variables
// for that and nothing else, so they are set once, to the same thing for all.
var framework = sync.OnceFunc(func() {
	huma.NewError = ofFramework
	huma.NewErrorWithContext = func(ctx huma.Context, status int, message string, errs ...error) huma.StatusError {
		err := ofFramework(status, message, errs...)
		if p, ok := err.(*Problem); ok && ctx != nil {
			note(ctx.Context(), p)
		}
		return err
	}
})

// note remembers a problem for the log, the metrics and the audit.
func note(ctx context.Context, p *Problem) {
	if r := requestOf(ctx); r != nil {
		r.kind = p.Kind
	}
}
