package api

import (
	"context"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"runtime/debug"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/services/app-node/internal/account"
	"github.com/cosmicac/cosmicac/services/app-node/internal/store"
)

// request is what is known of one request while it is served.
type request struct {
	person  account.Person
	token   string
	address string
	// kind is the problem's, empty for success.
	kind string
	// target is the id of what is acted on, for the audit.
	target string
	// actor overrides who acts, where that is known without a token.
	actor string
}

type requestKey struct{}

func requestOf(ctx context.Context) *request {
	r, _ := ctx.Value(requestKey{}).(*request)
	return r
}

// caller is who is signed in. It is only asked where the right demands it.
func caller(ctx context.Context) account.Person { return requestOf(ctx).person }

// target names what an operation acts on, for the audit.
func target(ctx context.Context, id string) { requestOf(ctx).target = id }

// Timeout bounds every request that is not a stream.
const Timeout = 20 * time.Second

// serve is around every operation: who is asking, may they, how did it end.
func (s *Server) serve(ctx huma.Context, next func(huma.Context)) {
	op := ctx.Operation()
	began := s.Now()
	raw, _ := humago.Unwrap(ctx)
	r := &request{address: clientAddress(raw)}
	inner := context.WithValue(ctx.Context(), requestKey{}, r)
	if !streams(op) {
		var cancel context.CancelFunc
		inner, cancel = context.WithTimeout(inner, Timeout)
		defer cancel()
	}
	ctx = huma.WithContext(ctx, inner)
	if action, _ := op.Metadata[auditKey].(string); action != "" {
		if err := s.unwritten.full(func(e store.AuditEntry) error { return s.Store.AddAudit(inner, e) }); err != nil {
			// Without finish, which would want to audit this as well.
			p := problemOf(err)
			writeProblem(ctx, p)
			s.metrics.observe(op.Method, op.Path, p.Status, s.Now().Sub(began), false)
			return
		}
	}
	defer s.finish(ctx, op, r, began)

	if p := s.admit(ctx, op, r); p != nil {
		note(inner, p)
		writeProblem(ctx, p)
		return
	}
	next(ctx)
}

// admit is the one place where an operation is allowed or refused.
func (s *Server) admit(ctx huma.Context, op *huma.Operation, r *request) *Problem {
	right, _ := op.Extensions[Extension].(Right)
	if right == "" {
		return problemOf(fault.New(fault.Denied, "this operation names no right and is refused to all"))
	}
	if right == Public {
		return nil
	}
	r.token = bearer(ctx.Header("Authorization"))
	if r.token == "" {
		return problemOf(fault.New(fault.Unauthenticated, "this needs a token: sign in at /api/v1/login and send it as \"Authorization: Bearer ...\""))
	}
	person, err := s.Accounts.Authenticate(ctx.Context(), r.token)
	if err != nil {
		if fault.Is(err, fault.Internal) {
			s.Log.Error("check a token", "error", err)
		}
		return problemOf(err)
	}
	r.person = person
	if !allows(person, right) {
		return problemOf(fault.New(fault.Denied, "this needs an administrator"))
	}
	return nil
}

func bearer(header string) string {
	scheme, token, ok := strings.Cut(header, " ")
	if !ok || !strings.EqualFold(scheme, "bearer") {
		return ""
	}
	return strings.TrimSpace(token)
}

// finish counts, logs and audits a request. It names the route, never the path,
// and nothing of header, query or body.
func (s *Server) finish(ctx huma.Context, op *huma.Operation, r *request, began time.Time) {
	if broken := recover(); broken != nil {
		if broken == http.ErrAbortHandler {
			panic(broken)
		}
		s.Log.Error("a request broke", "operation", op.OperationID, "panic", broken, "stack", string(debug.Stack()))
		p := problemOf(fault.New(fault.Internal, "broken"))
		note(ctx.Context(), p)
		if ctx.Status() == 0 {
			writeProblem(ctx, p)
		}
	}
	took := s.Now().Sub(began)
	s.metrics.observe(op.Method, op.Path, ctx.Status(), took, streams(op))
	s.Log.Debug("request", "operation", op.OperationID, "status", ctx.Status(), "kind", r.kind, "user", r.person.User.ID,
		"address", r.address, "took", took.Round(time.Microsecond))
	action, _ := op.Metadata[auditKey].(string)
	if action == "" {
		return
	}
	outcome := r.kind
	if outcome == "" {
		outcome = "ok"
	}
	actor := r.person.User.ID
	if actor == "" {
		actor = r.actor
	}
	entry := store.AuditEntry{Time: began, Actor: actor, Action: action, Target: cutText(r.target, 128), Outcome: outcome, Address: r.address}
	// Also for a caller who has left: what was done was done.
	audit, cancel := context.WithTimeout(context.WithoutCancel(ctx.Context()), 5*time.Second)
	defer cancel()
	if err := s.Store.AddAudit(audit, entry); err != nil {
		s.Log.Error("write the audit log; it is tried again with the next entry", "action", action, "actor", actor, "target", entry.Target, "outcome", outcome, "error", err)
		s.unwritten.add(entry)
		return
	}
	s.unwritten.write(func(e store.AuditEntry) error { return s.Store.AddAudit(audit, e) })
}

func cutText(text string, most int) string {
	if len(text) > most {
		text = strings.ToValidUTF8(text[:most], "")
	}
	return text
}

// clientAddress is who sent a request. Only what stands in front of us on this
// host (a unix socket or loopback) is believed about others: the last entry of
// X-Forwarded-For is the one that it added itself.
func clientAddress(r *http.Request) string {
	host, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil {
		host = r.RemoteAddr
	}
	peer, err := netip.ParseAddr(host)
	local := err != nil || peer.Unmap().IsLoopback() // a unix socket has no address
	if local {
		if forwarded := r.Header.Values("X-Forwarded-For"); len(forwarded) > 0 {
			all := strings.Split(forwarded[len(forwarded)-1], ",")
			if a, err := netip.ParseAddr(strings.TrimSpace(all[len(all)-1])); err == nil {
				return a.Unmap().String()
			}
		}
	}
	if err != nil {
		return "local"
	}
	return peer.Unmap().String()
}

func writeProblem(ctx huma.Context, p *Problem) {
	for name, values := range p.GetHeaders() {
		for _, v := range values {
			ctx.SetHeader(name, v)
		}
	}
	ctx.SetHeader("Content-Type", "application/problem+json")
	ctx.SetStatus(p.Status)
	_ = encode(ctx.BodyWriter(), p)
}

// outside is around the whole mux: headers of every answer, bounds of every
// request, and answers for paths that are no operation.
func (s *Server) outside(mux *http.ServeMux) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Cache-Control", "no-store")
		h.Set("X-Content-Type-Options", "nosniff")
		if _, pattern := mux.Handler(r); pattern == "" {
			s.noRoute(mux, w, r)
			return
		}
		if place := notText(r.URL); place != "" {
			s.refuse(w, problemOf(fault.New(fault.Invalid, "the request's %s must be UTF-8 text", place).With(fault.Detail{Field: place, Rule: "must be UTF-8 text"})))
			return
		}
		r.Body = http.MaxBytesReader(w, r.Body, MaximumBodyBytes+4096)
		mux.ServeHTTP(w, r)
	})
}

func (s *Server) noRoute(mux *http.ServeMux, w http.ResponseWriter, r *http.Request) {
	p := problemOf(fault.New(fault.NotFound, "there is no such path in this API: /api/v1/openapi.json lists them"))
	var allowed []string
	for _, method := range []string{"GET", "POST", "PUT", "PATCH", "DELETE"} {
		try := r.Clone(r.Context())
		try.Method = method
		if _, pattern := mux.Handler(try); pattern != "" && method != r.Method {
			allowed = append(allowed, method)
		}
	}
	if len(allowed) > 0 {
		w.Header().Set("Allow", strings.Join(allowed, ", "))
		p = &Problem{Title: "This method is not supported here.", Status: http.StatusMethodNotAllowed, Kind: string(fault.Unsupported),
			Detail: "this path takes " + strings.Join(allowed, ", ")}
	}
	s.refuse(w, p)
}

// refuse answers a request that reaches no operation.
func (s *Server) refuse(w http.ResponseWriter, p *Problem) {
	s.metrics.observe("other", "other", p.Status, 0, true)
	w.Header().Set("Content-Type", "application/problem+json")
	w.WriteHeader(p.Status)
	_ = encode(w, p)
}

// notText names the part of a URL that is not UTF-8 once decoded: nothing behind
// this API could carry it.
func notText(u *url.URL) string {
	if !utf8.ValidString(u.Path) {
		return "path"
	}
	if query, err := url.QueryUnescape(u.RawQuery); err != nil || !utf8.ValidString(query) {
		return "query"
	}
	return ""
}

func statusClass(status int) string {
	if status < 100 || status > 599 {
		return "none"
	}
	return strconv.Itoa(status/100) + "xx"
}
