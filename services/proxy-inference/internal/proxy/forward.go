package proxy

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/services/proxy-inference/internal/openai"
	"github.com/cosmicac/cosmicac/services/proxy-inference/internal/route"
)

// statusClientGone is what records and metrics call a client that left first.
const statusClientGone = 499

// Reasons why this proxy itself ends a try.
var (
	errSilent = errors.New("the link to the replica is silent")
	errLate   = errors.New("the engine gave no byte in time")
)

// failure is how a try ended without an answer for the client.
type failure int

const (
	// unreached: the engine saw nothing of the request.
	unreached failure = iota
	// broke: the connection ended after the request was sent.
	broke
	// busy: the replica said that it has too much.
	busy
	// unwell: the replica said that it cannot serve.
	unwell
)

// forward passes the request to one replica after the other until one answers.
func (c *call) forward() {
	h := c.h
	affinity := c.affinity()
	var tried []string
	var last failure
	for {
		lease, refusal := h.Routes.Take(c.r.Context(), c.endpoint.ID, affinity, tried)
		if lease == nil {
			c.unserved(refusal, tried, last)
			return
		}
		tried = append(tried, lease.AttemptID)
		answered, failed := c.try(lease, tried)
		lease.Release()
		if answered {
			return
		}
		last = failed
		h.Metrics.retried(failed)
		if len(tried) >= h.Limits.Attempts {
			c.unserved(&route.Refusal{Reason: route.Tried, Message: "no replica of this model could serve the request", RetryAfter: 2 * time.Second}, tried, last)
			return
		}
	}
}

// affinity is the hash of what the request begins with, or zero for a short one.
func (c *call) affinity() uint64 {
	if c.request == nil {
		return 0
	}
	if k := c.request.CacheKey; k != "" {
		return route.Affinity(c.endpoint.ProjectID, c.endpoint.ID, []byte(k))
	}
	if n := c.h.Limits.AffinityBytes; n > 0 && len(c.request.Prompt) >= n {
		return route.Affinity(c.endpoint.ProjectID, c.endpoint.ID, c.request.Prompt[:n])
	}
	return 0
}

// unserved answers a request that no replica answered.
func (c *call) unserved(refusal *route.Refusal, tried []string, last failure) {
	if c.r.Context().Err() != nil {
		c.gone()
		return
	}
	if len(tried) == 0 || last == unreached || last == busy {
		c.lease.Refund() // no engine worked on it
	}
	e := &openai.Error{Status: http.StatusServiceUnavailable, Type: openai.TypeServer, Code: string(refusal.Reason), Message: refusal.Message, RetryAfter: refusal.RetryAfter}
	switch {
	case refusal.Reason == route.Gone:
		e = noModel(c.model)
	case refusal.Reason == route.Busy, refusal.Reason == route.Tried && last == busy:
		e.Status, e.Type, e.Code = http.StatusTooManyRequests, openai.TypeRateLimit, string(route.Busy)
		if refusal.Reason == route.Tried {
			e.Message = "all replicas of this model are busy; try again shortly"
		}
	case refusal.Reason == route.Ended:
		e.NoRetry = true
	case refusal.Reason == route.Tried && last == broke:
		// It was tried enough; the client's own repeats would multiply.
		e.Code, e.NoRetry = "replicas_failed", true
		e.Message = "each replica that was tried broke off before its first byte"
	case refusal.Reason == route.Tried && last == unwell:
		e.Code = "replicas_unavailable"
		e.Message = "each replica that was tried said that it cannot serve now"
	}
	c.refuse(e)
}

// gone notes that the client left; there is nobody to answer.
func (c *call) gone() {
	c.status, c.incomplete, c.abort = statusClientGone, true, true
}

// try passes the request to one replica. It reports false while nothing of an
// answer has gone to the client and another replica may be tried.
func (c *call) try(lease *route.Lease, tried []string) (answered bool, failed failure) {
	h := c.h
	ctx, cancel := context.WithCancelCause(c.r.Context())
	defer cancel(nil)
	silence := newSilence(h.Timeouts.FirstByte, func() { cancel(errLate) })
	defer silence.stop()
	// A silent link is given up early only when somebody can take over.
	notSilent := lease.OnSilent(func() {
		if h.Routes.Others(c.endpoint.ID, tried) {
			cancel(errSilent)
		}
	})
	defer notSilent()

	q, err := c.outgoing(ctx, lease.Replica)
	if err != nil {
		h.Log.Error("request not made", "id", c.id, "cause", err)
		c.refuse(&openai.Error{Status: http.StatusInternalServerError, Type: openai.TypeServer, Code: "internal_error", Message: "the request could not be passed on"})
		return true, 0
	}
	resp, err := h.transport.RoundTrip(q)
	if err != nil {
		return c.unanswered(ctx, lease, err)
	}
	defer resp.Body.Close()
	switch code := resp.StatusCode; {
	case code == http.StatusTooManyRequests:
		lease.Answered()
		return false, busy
	case code == http.StatusServiceUnavailable, code == http.StatusBadGateway:
		lease.Answered()
		h.Log.Debug("replica cannot serve", "id", c.id, "attempt", lease.AttemptID, "status", code)
		return false, unwell
	case code == http.StatusUnauthorized, code == http.StatusForbidden, code >= 300 && code < 400, code < 200:
		// Between proxy and engine, not the client's affair: its key was good.
		lease.Answered()
		h.Log.Warn("engine gave an answer that is not for clients", "id", c.id, "attempt", lease.AttemptID, "status", code)
		c.refuse(&openai.Error{Status: http.StatusBadGateway, Type: openai.TypeServer, Code: "engine_misconfigured", NoRetry: true,
			Message: "the engine behind this model answered with status " + strconv.Itoa(code) + "; see the job's arguments"})
		return true, 0
	}
	out := &relay{c: c, ctx: ctx, lease: lease, resp: resp, silence: silence, began: notSilent}
	return out.run()
}

// unanswered sorts out why a request got no answer at all.
func (c *call) unanswered(ctx context.Context, lease *route.Lease, err error) (answered bool, failed failure) {
	if c.r.Context().Err() != nil {
		c.gone() // the client's own doing: nothing counts against the replica
		return true, 0
	}
	switch cause := context.Cause(ctx); cause {
	case errLate:
		c.refuse(&openai.Error{Status: http.StatusGatewayTimeout, Type: openai.TypeServer, Code: "first_byte_timeout", NoRetry: true,
			Message: "the model gave no answer within " + c.h.Timeouts.FirstByte.String()})
		return true, 0
	case errSilent:
		return false, broke
	}
	failed = broke
	var dial *dialError
	if errors.As(err, &dial) {
		failed = unreached
	}
	if fault.KindOf(err) == fault.Exhausted {
		return false, busy
	}
	if lease.Faulted() {
		c.h.Log.Warn("replica cannot be reached and rests", "attempt", lease.AttemptID, "agent", lease.AgentKey, "cause", err)
	}
	return false, failed
}

// silence calls back when nothing was heard for a time.
type silence struct {
	timer *time.Timer
}

func newSilence(d time.Duration, f func()) *silence { return &silence{time.AfterFunc(d, f)} }

// heard starts the time anew.
func (s *silence) heard(d time.Duration) { s.timer.Reset(d) }
func (s *silence) stop()                 { s.timer.Stop() }
