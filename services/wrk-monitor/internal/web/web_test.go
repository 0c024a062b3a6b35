package web

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/services/wrk-monitor/internal/journal"
	"github.com/cosmicac/cosmicac/services/wrk-monitor/internal/series"
)

// face serves one daemon's and two projects' series and logs.
func face(t *testing.T) *httptest.Server {
	t.Helper()
	store, err := series.Open(t.TempDir(), time.Hour, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { store.Close() })
	logs, err := journal.Open(t.TempDir(), 1<<20, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { logs.Close() })
	now := time.Now()
	add := func(target series.Target, exposition string) {
		if err := store.Append(t.Context(), target, []byte(exposition), now, time.Millisecond); err != nil {
			t.Fatal(err)
		}
	}
	add(series.Target{Instance: "wrk-ork", Role: "ork"}, "cosmicac_jobs 3\n")
	// A tenant claims to be somebody else; the monitor's labels win.
	add(series.Target{Instance: "a-1", Role: "agent", Agent: true, ProjectID: "p-mine", JobID: "j-1", AttemptID: "a-1"}, `cosmicac_shells{project_id="p-theirs",instance="wrk-ork"} 1`+"\nforbidden_family 1\n")
	add(series.Target{Instance: "a-2", Role: "agent", Agent: true, ProjectID: "p-theirs", JobID: "j-2", AttemptID: "a-2"}, "cosmicac_shells 7\n")
	for instance, owner := range map[string]journal.Owner{"wrk-ork": {}, "a-1": {ProjectID: "p-mine", JobID: "j-1"}, "a-2": {ProjectID: "p-theirs", JobID: "j-2"}} {
		if err := logs.Append(instance, owner, "1", []journal.Line{{Time: now, Source: "daemon", Text: "a line of " + instance}}); err != nil {
			t.Fatal(err)
		}
	}
	s := &Server{Series: store, Journal: logs, Log: hclog.NewNullLogger(), Now: time.Now, Identify: func(_ context.Context, token string) (Viewer, error) {
		switch token {
		case "administrator":
			return Viewer{Administrator: true}, nil
		case "member":
			return Viewer{ProjectIDs: []string{"p-mine"}}, nil
		case "nobody":
			return Viewer{}, nil
		}
		return Viewer{}, fault.New(fault.Unauthenticated, "this token is not live")
	}}
	server := httptest.NewServer(s.Handler())
	t.Cleanup(server.Close)
	return server
}

func ask(t *testing.T, server *httptest.Server, token, path string, q url.Values) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), "GET", server.URL+path+"?"+q.Encode(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	res, err := server.Client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	var body json.RawMessage
	if err := json.NewDecoder(res.Body).Decode(&body); err != nil {
		t.Fatalf("%s answered %s without JSON: %v", path, res.Status, err)
	}
	return res.StatusCode, string(body)
}

func TestEveryPathNeedsALiveToken(t *testing.T) {
	t.Parallel()
	server := face(t)
	for _, path := range []string{"query", "query_range", "series", "labels", "label/job_id/values", "status/buildinfo", "logs"} {
		for _, token := range []string{"", "garbage"} {
			if status, body := ask(t, server, token, "/api/v1/"+path, nil); status != http.StatusUnauthorized {
				t.Errorf("%s with token %q: %d %s", path, token, status, body)
			}
		}
	}
}

func TestMembersSeeTheSeriesAndLogsOfTheirProjectsOnly(t *testing.T) {
	t.Parallel()
	server := face(t)
	for _, c := range []struct {
		token        string
		sees, hidden []string
	}{
		{"administrator", []string{"wrk-ork", "a-1", "a-2"}, nil},
		{"member", []string{"a-1"}, []string{"wrk-ork", "a-2", "p-theirs"}},
		{"nobody", nil, []string{"wrk-ork", "a-1", "a-2"}},
	} {
		for path, q := range map[string]url.Values{
			"/monitor/api/v1/query":         {"query": {`{__name__=~".+"}`}},
			"/api/v1/series":                {"match[]": {`{__name__=~".+"}`}},
			"/api/v1/label/instance/values": nil,
			"/monitor/api/v1/logs":          {"tail": {"100"}},
			"/api/v1/query_range":           {"query": {`cosmicac_shells or cosmicac_jobs`}, "step": {"1s"}, "start": {time.Now().Add(-time.Minute).Format(time.RFC3339)}, "end": {time.Now().Add(3 * time.Second).Format(time.RFC3339)}},
		} {
			status, body := ask(t, server, c.token, path, q)
			if status != http.StatusOK {
				t.Fatalf("%s %s: %d %s", c.token, path, status, body)
			}
			for _, s := range c.sees {
				if !strings.Contains(body, s) {
					t.Errorf("%s does not see %s at %s: %s", c.token, s, path, body)
				}
			}
			for _, s := range c.hidden {
				if strings.Contains(body, s) {
					t.Errorf("%s sees %s at %s: %s", c.token, s, path, body)
				}
			}
		}
	}
}

func TestAnAgentBringsKnownFamiliesUnderTheMonitorsLabels(t *testing.T) {
	t.Parallel()
	server := face(t)
	_, body := ask(t, server, "administrator", "/api/v1/query", url.Values{"query": {`cosmicac_shells{project_id="p-theirs"}`}})
	if strings.Contains(body, "a-1") || !strings.Contains(body, "a-2") {
		t.Errorf("an agent chose its own project: %s", body)
	}
	if _, body := ask(t, server, "administrator", "/api/v1/query", url.Values{"query": {"forbidden_family"}}); strings.Contains(body, "a-1") {
		t.Errorf("an agent brought a family of its own: %s", body)
	}
}

func TestAQueryThatWouldTakeAllMemoryIsRefused(t *testing.T) {
	t.Parallel()
	server := face(t)
	for _, query := range []string{
		`sum_over_time((vector(1))[10000d:1ms])`, `sum_over_time((vector(1))[10d:1ms])`,
		`max_over_time(sum_over_time((vector(1))[1d:10s])[1d:10s])`, strings.Repeat("(", 20000), `up{`, ``,
	} {
		if status, body := ask(t, server, "member", "/api/v1/query", url.Values{"query": {query}}); status != http.StatusBadRequest {
			t.Errorf("%.40s: %d %s", query, status, body)
		}
	}
	for name, q := range map[string]url.Values{
		"step of zero":      {"query": {"up"}, "step": {"0"}},
		"too many points":   {"query": {"up"}, "step": {"0.001"}},
		"end before start":  {"query": {"up"}, "step": {"1"}, "start": {"100"}, "end": {"50"}},
		"a time of letters": {"query": {"up"}, "step": {"1"}, "start": {"soon"}},
	} {
		if status, body := ask(t, server, "member", "/api/v1/query_range", q); status != http.StatusBadRequest {
			t.Errorf("%s: %d %s", name, status, body)
		}
	}
	if status, body := ask(t, server, "member", "/api/v1/query", url.Values{"query": {`sum_over_time(up[1h:1m])`}}); status != http.StatusOK {
		t.Errorf("an ordinary subquery: %d %s", status, body)
	}
}
