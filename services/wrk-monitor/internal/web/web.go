// Package web answers the Prometheus query API and log queries over HTTP, each
// for the person whose token app-node vouches for. It collects nothing.
package web

import (
	"context"
	"encoding/json"
	"errors"
	"math"
	"net/http"
	"sort"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/storage"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/services/wrk-monitor/internal/journal"
	"github.com/cosmicac/cosmicac/services/wrk-monitor/internal/series"
)

// Viewer is who asks and what they may see.
type Viewer struct {
	UserID string
	// Administrator sees every series and log.
	Administrator bool
	ProjectIDs    []string
}

// Identify asks app-node whose token it is. It fails with unauthenticated for
// a token that is not live.
type Identify func(ctx context.Context, token string) (Viewer, error)

// Server serves the API; see Handler.
type Server struct {
	Series   *series.Store
	Journal  *journal.Journal
	Identify Identify
	Log      hclog.Logger
	Now      func() time.Time

	engine *promql.Engine
	slots  chan struct{}
	parser parser.Parser
	seen   cache
}

// Bounds of one query.
const (
	queryTimeout   = 30 * time.Second
	maximumSamples = 1_000_000
	// One query may read 16 MB of samples and make more of them; few at once
	// keep the daemon small however many people look.
	maximumQueries    = 4
	queueTime         = 10 * time.Second
	maximumPoints     = 11_000
	maximumLogLines   = 10_000
	identityFreshness = 5 * time.Second
	subqueryStep      = time.Minute
	maximumQueryBytes = 16 << 10
)

// Handler gives the routes. Caddy's /monitor prefix may be there or stripped.
// Every route needs a live token; there is no public one.
func (s *Server) Handler() http.Handler {
	s.slots = make(chan struct{}, maximumQueries)
	s.parser = parser.NewParser(parser.Options{})
	s.engine = promql.NewEngine(promql.EngineOpts{MaxSamples: maximumSamples, Timeout: queryTimeout, EnableAtModifier: true, EnableNegativeOffset: true, LookbackDelta: time.Minute, Parser: s.parser,
		NoStepSubqueryIntervalFn: func(int64) int64 { return subqueryStep.Milliseconds() }})
	mux := http.NewServeMux()
	for pattern, h := range map[string]func(*http.Request, Viewer) (any, error){
		"/api/v1/query":               s.query,
		"/api/v1/query_range":         s.queryRange,
		"/api/v1/series":              s.series,
		"/api/v1/labels":              s.labels,
		"/api/v1/label/{name}/values": s.labelValues,
		"/api/v1/status/buildinfo":    s.buildInfo,
		"/api/v1/logs":                s.logs,
	} {
		mux.HandleFunc("GET "+pattern, s.guarded(h))
		mux.HandleFunc("POST "+pattern, s.guarded(h))
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		r.URL.Path = strings.TrimPrefix(r.URL.Path, "/monitor")
		r.Body = http.MaxBytesReader(w, r.Body, 1<<20)
		mux.ServeHTTP(w, r)
	})
}

// guarded finds out who asks before anything else.
func (s *Server) guarded(h func(*http.Request, Viewer) (any, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), queryTimeout)
		defer cancel()
		viewer, err := s.who(ctx, r.Header.Get("Authorization"))
		var data any
		if err == nil {
			data, err = h(r.WithContext(ctx), viewer)
		}
		w.Header().Set("Content-Type", "application/json")
		if err != nil {
			kind := fault.KindOf(err)
			w.WriteHeader(kind.HTTP())
			// The query API's own error form, which its clients understand.
			_ = json.NewEncoder(w).Encode(map[string]any{"status": "error", "errorType": string(kind), "error": err.Error()})
			return
		}
		if err := json.NewEncoder(w).Encode(map[string]any{"status": "success", "data": data}); err != nil {
			s.Log.Debug("answer not sent", "error", err)
		}
	}
}

func (s *Server) who(ctx context.Context, header string) (Viewer, error) {
	token, ok := strings.CutPrefix(header, "Bearer ")
	if !ok || token == "" || len(token) > 512 {
		return Viewer{}, fault.New(fault.Unauthenticated, "a login token is needed: Authorization: Bearer <token>")
	}
	if v, ok := s.seen.get(token, s.Now()); ok {
		return v, nil
	}
	v, err := s.Identify(ctx, token)
	if err != nil {
		return Viewer{}, err
	}
	s.seen.put(token, v, s.Now())
	return v, nil
}

// cache remembers live tokens for a few seconds, so that a dashboard does not
// ask app-node for each panel. A revoked token works that much longer.
type cache struct {
	mu sync.Mutex
	m  map[string]cached
}

type cached struct {
	viewer Viewer
	until  time.Time
}

func (c *cache) get(token string, now time.Time) (Viewer, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	v, ok := c.m[token]
	return v.viewer, ok && now.Before(v.until)
}

func (c *cache) put(token string, v Viewer, now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.m == nil || len(c.m) > 1000 {
		c.m = map[string]cached{}
	}
	c.m[token] = cached{v, now.Add(identityFreshness)}
}

func (s *Server) view(v Viewer) storage.Queryable {
	return s.Series.View(v.Administrator, v.ProjectIDs)
}

func bad(field, rule string) error {
	return fault.New(fault.Invalid, "parameter %s: %s", field, rule).With(fault.Detail{Field: field, Rule: rule})
}

// moment reads a Unix time in seconds or RFC 3339.
func moment(r *http.Request, field string, missing time.Time) (time.Time, error) {
	text := r.FormValue(field)
	if text == "" {
		return missing, nil
	}
	if f, err := strconv.ParseFloat(text, 64); err == nil && !math.IsNaN(f) && math.Abs(f) < 1e11 {
		return time.UnixMilli(int64(f * 1000)), nil
	}
	if t, err := time.Parse(time.RFC3339Nano, text); err == nil {
		return t, nil
	}
	return time.Time{}, bad(field, "Unix time in seconds, or RFC 3339")
}

func step(text string) (time.Duration, error) {
	if f, err := strconv.ParseFloat(text, 64); err == nil && f > 0 && f < 1e9 {
		return time.Duration(f * float64(time.Second)), nil
	}
	if d, err := time.ParseDuration(text); err == nil && d > 0 {
		return d, nil
	}
	return 0, bad("step", "seconds, or a duration like 30s, above zero")
}

// bounded refuses a query whose subqueries would make more points than a range
// query may. The engine makes room for a subquery's points before it counts
// samples, so one line of text could take all memory.
func (s *Server) bounded(query string) error {
	if len(query) > maximumQueryBytes {
		return bad("query", "at most 16 KiB")
	}
	expression, err := s.parser.ParseExpr(query)
	if err != nil {
		return fault.Wrap(fault.Invalid, err, "the query cannot be read")
	}
	points := 1.0
	parser.Inspect(expression, func(node parser.Node, _ []parser.Node) error {
		if sub, ok := node.(*parser.SubqueryExpr); ok {
			step := sub.Step
			if step <= 0 {
				step = subqueryStep
			}
			// Nested ones multiply; side by side they are counted so too, which errs
			// on the safe side. A range given by an expression is not known here.
			if sub.RangeExpr != nil || sub.StepExpr != nil {
				points = math.Inf(1)
			}
			points *= max(1, float64(sub.Range)/float64(step))
		}
		return nil
	})
	if points > maximumPoints {
		return bad("query", "its subqueries make more than 11000 points; make their range smaller or their step larger")
	}
	return nil
}

func (s *Server) run(ctx context.Context, q promql.Query, err error) (any, error) {
	if err != nil {
		return nil, fault.Wrap(fault.Invalid, err, "the query cannot be read")
	}
	defer q.Close()
	wait := time.NewTimer(queueTime)
	defer wait.Stop()
	select {
	case s.slots <- struct{}{}:
		defer func() { <-s.slots }()
	case <-wait.C:
		return nil, fault.New(fault.Exhausted, "%d queries run already; try again shortly", maximumQueries)
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	res := q.Exec(ctx)
	if res.Err != nil {
		var canceled promql.ErrQueryCanceled
		var timeout promql.ErrQueryTimeout
		var tooMany promql.ErrTooManySamples
		switch {
		case errors.As(res.Err, &canceled):
			return nil, fault.Wrap(fault.Canceled, res.Err, "the query was given up")
		case errors.As(res.Err, &timeout):
			return nil, fault.Wrap(fault.Timeout, res.Err, "the query took longer than %s", queryTimeout)
		case errors.As(res.Err, &tooMany):
			return nil, fault.Wrap(fault.Exhausted, res.Err, "the query reads too many samples; narrow it")
		}
		return nil, fault.Wrap(fault.Invalid, res.Err, "the query failed")
	}
	return map[string]any{"resultType": res.Value.Type(), "result": res.Value}, nil
}

func (s *Server) query(r *http.Request, v Viewer) (any, error) {
	at, err := moment(r, "time", s.Now())
	if err != nil {
		return nil, err
	}
	if err := s.bounded(r.FormValue("query")); err != nil {
		return nil, err
	}
	q, err := s.engine.NewInstantQuery(r.Context(), s.view(v), nil, r.FormValue("query"), at)
	return s.run(r.Context(), q, err)
}

func (s *Server) queryRange(r *http.Request, v Viewer) (any, error) {
	start, err := moment(r, "start", s.Now().Add(-time.Hour))
	if err != nil {
		return nil, err
	}
	end, err := moment(r, "end", s.Now())
	if err != nil {
		return nil, err
	}
	d, err := step(r.FormValue("step"))
	if err != nil {
		return nil, err
	}
	if end.Before(start) {
		return nil, bad("end", "not before start")
	}
	if end.Sub(start)/d > maximumPoints {
		return nil, bad("step", "at most 11000 points a series; make it larger")
	}
	if err := s.bounded(r.FormValue("query")); err != nil {
		return nil, err
	}
	q, err := s.engine.NewRangeQuery(r.Context(), s.view(v), nil, r.FormValue("query"), start, end, d)
	return s.run(r.Context(), q, err)
}

// selection opens a querier over the request's time range and reads match[].
func (s *Server) selection(r *http.Request, v Viewer) (storage.Querier, [][]*labels.Matcher, error) {
	start, err := moment(r, "start", s.Now().Add(-time.Hour))
	if err != nil {
		return nil, nil, err
	}
	end, err := moment(r, "end", s.Now())
	if err != nil {
		return nil, nil, err
	}
	sets, err := s.parser.ParseMetricSelectors(r.Form["match[]"])
	if err != nil {
		return nil, nil, fault.Wrap(fault.Invalid, err, "match[] cannot be read")
	}
	q, err := s.view(v).Querier(start.UnixMilli(), end.UnixMilli())
	if err != nil {
		return nil, nil, fault.Wrap(fault.Unavailable, err, "open the time series")
	}
	return q, sets, nil
}

func (s *Server) series(r *http.Request, v Viewer) (any, error) {
	if err := r.ParseForm(); err != nil || len(r.Form["match[]"]) == 0 {
		return nil, bad("match[]", "at least one selector")
	}
	q, sets, err := s.selection(r, v)
	if err != nil {
		return nil, err
	}
	defer q.Close()
	found := []labels.Labels{}
	for _, set := range sets {
		for one := q.Select(r.Context(), true, nil, set...); one.Next(); {
			if found = append(found, one.At().Labels()); len(found) > 10_000 {
				return nil, fault.New(fault.TooLarge, "more than 10000 series; narrow match[]")
			}
		}
	}
	return found, nil
}

func (s *Server) labels(r *http.Request, v Viewer) (any, error) {
	return s.names(r, v, func(q storage.Querier, m []*labels.Matcher) ([]string, error) {
		names, _, err := q.LabelNames(r.Context(), nil, m...)
		return names, err
	})
}

func (s *Server) labelValues(r *http.Request, v Viewer) (any, error) {
	return s.names(r, v, func(q storage.Querier, m []*labels.Matcher) ([]string, error) {
		values, _, err := q.LabelValues(r.Context(), r.PathValue("name"), nil, m...)
		return values, err
	})
}

func (s *Server) names(r *http.Request, v Viewer, read func(storage.Querier, []*labels.Matcher) ([]string, error)) (any, error) {
	if err := r.ParseForm(); err != nil {
		return nil, bad("body", "a form")
	}
	q, sets, err := s.selection(r, v)
	if err != nil {
		return nil, err
	}
	defer q.Close()
	if len(sets) == 0 {
		sets = [][]*labels.Matcher{nil}
	}
	all := map[string]bool{}
	for _, set := range sets {
		found, err := read(q, set)
		if err != nil {
			return nil, fault.Wrap(fault.Unavailable, err, "read label names")
		}
		for _, n := range found {
			all[strings.Clone(n)] = true
		}
	}
	list := make([]string, 0, len(all))
	for n := range all {
		list = append(list, n)
	}
	sort.Strings(list)
	return list, nil
}

func (s *Server) buildInfo(*http.Request, Viewer) (any, error) {
	// Dashboards pick the query features by this version of Prometheus' API.
	return map[string]string{"application": "cosmicac-wrk-monitor", "version": "3.0.0"}, nil
}

func (s *Server) logs(r *http.Request, v Viewer) (any, error) {
	n := 200
	if text := r.FormValue("tail"); text != "" {
		var err error
		if n, err = strconv.Atoi(text); err != nil || n < 1 || n > maximumLogLines {
			return nil, bad("tail", "1 to 10000")
		}
	}
	instance := r.FormValue("instance")
	if a := r.FormValue("attempt_id"); a != "" {
		instance = a
	}
	lines, err := s.Journal.Tail(journal.Filter{Instance: instance, JobID: r.FormValue("job_id"), Everything: v.Administrator, Projects: v.ProjectIDs}, n)
	if err != nil {
		return nil, err
	}
	if lines == nil {
		lines = []journal.Line{}
	}
	return map[string]any{"lines": lines}, nil
}
