package api_test

import (
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/cosmicac/cosmicac/services/app-node/internal/api"
)

// operations lists the document's operations as method, path and right.
func operations(t *testing.T, l *lab) (all [][3]string) {
	t.Helper()
	var document struct {
		OpenAPI string `json:"openapi"`
		Servers []struct{ URL string }
		Paths   map[string]map[string]map[string]any
	}
	r := l.ok(200, &document, "GET", "/api/v1/openapi.json", "", nil)
	if !strings.HasPrefix(document.OpenAPI, "3.1") || document.Servers[0].URL != "/api/v1" || r.header.Get("Content-Type") != "application/openapi+json" {
		t.Errorf("unexpected document: %s at %v", document.OpenAPI, document.Servers)
	}
	for _, path := range slices.Sorted(maps.Keys(document.Paths)) {
		for method, op := range document.Paths[path] {
			right, _ := op[api.Extension].(string)
			all = append(all, [3]string{strings.ToUpper(method), path, right})
		}
	}
	return all
}

func TestEveryOperationNamesItsRightAndNoneIsOpenByAccident(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	public := map[string]bool{"GET /openapi.json": true, "POST /login": true}
	all := operations(t, l)
	if len(all) < 30 {
		t.Fatalf("the document has only %d operations", len(all))
	}
	for _, op := range all {
		name := op[0] + " " + op[1]
		if op[2] == "" {
			t.Errorf("%s names no right", name)
		}
		if (op[2] == "public") != public[name] {
			t.Errorf("%s has the right %q", name, op[2])
		}
		if public[name] {
			continue
		}
		path := "/api/v1" + strings.ReplaceAll(op[1], "{id}", "x")
		for _, token := range []string{"", "garbage", "cat_" + strings.Repeat("a", 52)} {
			if r := l.do(op[0], path, token, nil); r.status != 401 || r.header.Get("WWW-Authenticate") == "" {
				t.Errorf("%s with a bad token got %d", name, r.status)
			}
		}
		if r := l.do(op[0], path, "", nil, "Authorization", "Basic "+l.admin); r.status != 401 {
			t.Errorf("%s with basic authentication got %d", name, r.status)
		}
	}
}

func TestEveryPathOfTheContractIsThere(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	have := map[string]bool{}
	for _, op := range operations(t, l) {
		have[op[0]+" "+op[1]] = true
	}
	for _, want := range []string{
		"POST /login", "POST /logout", "POST /me/logout-everywhere", "POST /users/{id}/logout", "GET /me", "GET /network", "POST /jobs", "GET /jobs", "GET /jobs/{id}", "POST /jobs/{id}/stop",
		"POST /jobs/{id}/start", "POST /jobs/{id}/update", "DELETE /jobs/{id}", "GET /jobs/{id}/events", "GET /jobs/{id}/history", "POST /jobs/{id}/grants", "GET /racks",
		"GET /jobs/{id}/gateway", "POST /jobs/{id}/gateway", "DELETE /jobs/{id}/gateway", "POST /jobs/{id}/gateway/peers", "DELETE /jobs/{id}/gateway/peers/{name}",
		"PUT /racks/{id}", "POST /racks/{id}/cordon", "DELETE /racks/{id}", "GET /nodes", "GET /gpus", "POST /jobs/plan", "GET /projects", "POST /volumes", "GET /volumes", "GET /volumes/{id}", "POST /volumes/{id}/attach", "POST /volumes/{id}/detach", "DELETE /volumes/{id}", "GET /projects/{id}/quota", "PUT /projects/{id}/quota", "GET /api-keys", "POST /api-keys",
		"GET /api-keys/{id}", "PATCH /api-keys/{id}", "POST /api-keys/{id}/revoke", "GET /api-keys/usage", "GET /models", "GET /images",
		"GET /locations", "GET /health", "GET /mesh", "GET /openapi.json", "GET /users", "POST /users", "PATCH /users/{id}", "DELETE /users/{id}",
	} {
		if !have[want] {
			t.Errorf("there is no %s", want)
		}
	}
}

func TestBadInputIsRefusedWithFieldAndRule(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	with := func(change func(map[string]any)) map[string]any {
		body := container("a job")
		change(body)
		return body
	}
	long := strings.Repeat("é", 200)
	for name, c := range map[string]struct {
		method, path string
		body         any
		location     string
	}{
		"no name":               {"POST", "/jobs", with(func(b map[string]any) { delete(b, "name") }), "body.name"},
		"empty name":            {"POST", "/jobs", with(func(b map[string]any) { b["name"] = "" }), "body.name"},
		"200 characters":        {"POST", "/jobs", with(func(b map[string]any) { b["name"] = long }), "body.name"},
		"unknown field":         {"POST", "/jobs", with(func(b map[string]any) { b["colour"] = "red" }), "body.colour"},
		"unknown nested field":  {"POST", "/jobs", with(func(b map[string]any) { b["gpu"] = map[string]any{"model": "m", "count": 1, "size": 1} }), "body.gpu.size"},
		"negative count":        {"POST", "/jobs", with(func(b map[string]any) { b["gpu"] = map[string]any{"model": "m", "count": -1} }), "body.gpu.count"},
		"huge count":            {"POST", "/jobs", with(func(b map[string]any) { b["gpu"] = map[string]any{"model": "m", "count": 1e12} }), "body.gpu.count"},
		"count above ork's":     {"POST", "/jobs", with(func(b map[string]any) { b["gpu"] = map[string]any{"model": "m", "count": 5000} }), "body.gpu.count"},
		"broken count":          {"POST", "/jobs", with(func(b map[string]any) { b["gpu"] = map[string]any{"model": "m", "count": 1.5} }), "body.gpu.count"},
		"text for a number":     {"POST", "/jobs", with(func(b map[string]any) { b["disk_gib"] = "50" }), "body.disk_gib"},
		"negative duration":     {"POST", "/jobs", with(func(b map[string]any) { b["max_duration_seconds"] = -5 }), "body.max_duration_seconds"},
		"unknown kind":          {"POST", "/jobs", with(func(b map[string]any) { b["kind"] = "pod" }), "body.kind"},
		"unknown image":         {"POST", "/jobs", with(func(b map[string]any) { b["image"] = "Windows" }), "body.image"},
		"no image":              {"POST", "/jobs", with(func(b map[string]any) { delete(b, "image") }), "body.image"},
		"model for a container": {"POST", "/jobs", with(func(b map[string]any) { b["model"] = "Qwen/Qwen3-32B" }), "body.model"},
		"unknown model":         {"POST", "/jobs", map[string]any{"kind": "managed_inference", "name": "m", "model": "gpt-9"}, "body.model"},
		"wrong runtime":         {"POST", "/jobs", map[string]any{"kind": "managed_inference", "name": "m", "model": "Qwen/Qwen3-32B", "runtime": "embedded"}, "body.runtime"},
		"no replicas":           {"POST", "/jobs", map[string]any{"kind": "managed_inference", "name": "m", "model": "Qwen/Qwen3-32B", "replicas": 0}, "body.replicas"},
		"bad JSON":              {"POST", "/jobs", `{"kind": `, "body"},
		"not UTF-8":             {"POST", "/api-keys", "{\"name\": \"\xff\xfe\"}", "body"},
		"two values":            {"POST", "/api-keys", `{"name": "a"} {"name": "b"}`, "body"},
		"array":                 {"POST", "/api-keys", `[]`, "body"},
		"empty key name":        {"POST", "/api-keys", map[string]any{"name": ""}, "body.name"},
		"blank key name":        {"POST", "/api-keys", map[string]any{"name": "   "}, "body.name"},
		"long key name":         {"POST", "/api-keys", map[string]any{"name": long}, "body.name"},
		"line break":            {"POST", "/api-keys", map[string]any{"name": "a\nb"}, "body.name"},
		"control character":     {"POST", "/api-keys", map[string]any{"name": "a\x1b[31mb"}, "body.name"},
		"turned direction":      {"POST", "/api-keys", map[string]any{"name": "a\u202eb"}, "body.name"},
		"past expiry":           {"POST", "/api-keys", map[string]any{"name": "a", "expires_at": "2001-01-01T00:00:00Z"}, "body.expires_at"},
		"expiry not a time":     {"POST", "/api-keys", map[string]any{"name": "a", "expires_at": "tomorrow"}, "body.expires_at"},
		"a wider key":           {"POST", "/api-keys", map[string]any{"name": "a", "user_id": "u-1"}, "body.user_id"},
		"a limitless key":       {"POST", "/api-keys", map[string]any{"name": "a", "requests_per_minute": 0}, "body.requests_per_minute"},
		"negative page":         {"GET", "/api-keys?page=-1", nil, "query.page"},
		"large page":            {"GET", "/api-keys?page_size=101", nil, "query.page_size"},
		"unknown order":         {"GET", "/api-keys?sort_by=hmac", nil, "query.sort_by"},
		"unknown parameter":     {"GET", "/jobs?colour=red", nil, "query.colour"},
		"unknown state":         {"GET", "/jobs?state=flying", nil, "query.state"},
		"turned range":          {"GET", "/api-keys/usage?ts_start=2000&ts_end=1000", nil, "query.ts_start"},
		"negative time":         {"GET", "/api-keys/usage?ts_start=-5", nil, "query.ts_start"},
		"bad email":             {"POST", "/users", map[string]any{"email": "nobody", "password": userPassword}, "body.email"},
		"email with a name":     {"POST", "/users", map[string]any{"email": "A <a@example.org>", "password": userPassword}, "body.email"},
		"email with a break":    {"POST", "/users", map[string]any{"email": "a@example.org\r\nBcc: b@example.org", "password": userPassword}, "body.email"},
		"short password":        {"POST", "/users", map[string]any{"email": "a@example.org", "password": "short"}, "body.password"},
		"empty change":          {"PATCH", "/users/u-1", map[string]any{}, "body"},
		"bad rack key":          {"PUT", "/racks/rack-1", map[string]any{"location": "us", "key": "zz"}, "body.key"},
		"bad rack id":           {"PUT", "/racks/RACK_1", map[string]any{"location": "us", "key": l.key.ID().String()}, "path.id"},
	} {
		t.Run(name, func(t *testing.T) {
			p := l.refused("invalid", c.method, "/api/v1"+c.path, l.admin, c.body)
			if !p.names(c.location) {
				t.Errorf("%s is not named: %+v", c.location, p)
			}
			for _, e := range p.Errors {
				if e.Message == "" {
					t.Errorf("no rule: %+v", p)
				}
			}
		})
	}
	if p := l.refused("invalid", "POST", "/api/v1/jobs", l.admin, with(func(b map[string]any) { b["image"] = "Windows" })); !strings.Contains(p.Detail, "Ubuntu24.04/CUDA12.9") {
		t.Errorf("the images that exist are not listed: %s", p.Detail)
	}
	l.refused("invalid", "POST", "/api/v1/jobs", l.admin, container("a"), "Idempotency-Key", strings.Repeat("k", 129))
}

func TestNamesOfAnyScriptAreKeptByteForByte(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	for _, name := range []string{"campaña", "模型-1", "🚀", "👩‍🚀", "مفتاح", "e\u0301 é", "A B", "a/b", "../x", "<b>&amp;", strings.Repeat("é", 63)} {
		var made struct {
			APIKey struct{ ID, Name string } `json:"api_key"`
		}
		l.ok(201, &made, "POST", "/api/v1/api-keys", l.admin, map[string]any{"name": name})
		var read struct{ Name string }
		l.ok(200, &read, "GET", "/api/v1/api-keys/"+made.APIKey.ID, l.admin, nil)
		if made.APIKey.Name != name || read.Name != name {
			t.Errorf("%q became %q and %q", name, made.APIKey.Name, read.Name)
		}
		jobID := l.job(l.admin, container(name))
		if got := l.ork.spec(jobID).GetName(); got != name && utf8.ValidString(got) {
			t.Errorf("job %q became %q", name, got)
		}
	}
}

func TestBodiesAreBoundedAndPathsThatAreNotThereSaySo(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.refused("too_large", "POST", "/api/v1/jobs", l.admin, `{"start_script": "`+strings.Repeat("x", 1<<20)+`"}`)
	l.refused("not_found", "GET", "/api/v1/nothing", l.admin, nil)
	l.refused("not_found", "GET", "/", "", nil)
	r := l.do("DELETE", "/api/v1/me", l.admin, nil)
	if r.status != 405 || r.header.Get("Allow") != "GET" {
		t.Errorf("a wrong method got %d, Allow %q: %s", r.status, r.header.Get("Allow"), r.body)
	}
	if r := l.do("POST", "/api/v1/api-keys", l.admin, `name=x`, "Content-Type", "application/x-www-form-urlencoded"); r.status != 415 {
		t.Errorf("a form got %d: %s", r.status, r.body)
	}
	if r := l.do("GET", "/api/v1/me", l.admin, nil); r.header.Get("Cache-Control") != "no-store" || r.header.Get("Set-Cookie") != "" {
		t.Errorf("unexpected headers %v", r.header)
	}
}

func TestMetricsDoNotGrowWithWhatPeopleSend(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	count := func() (n int) {
		families, err := l.registry.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range families {
			n += len(f.GetMetric())
		}
		return n
	}
	visit := func(from, to int) {
		for i := from; i < to; i++ {
			name := strings.Repeat("x", i%30+1)
			l.do("GET", "/api/v1/jobs/j-"+name, l.admin, nil)
			l.do("GET", "/"+name, l.admin, nil)
			l.do("GET", "/api/v1/jobs?name="+name, l.admin, nil)
			l.do("POST", "/api/v1/api-keys/"+name+"/revoke", l.admin, nil)
		}
	}
	visit(0, 2)
	before := count()
	visit(2, 40)
	if after := count(); after != before {
		t.Errorf("%d series became %d", before, after)
	}
}

func TestTheDocumentIsJSON(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	if raw, err := json.Marshal(l.server.Document()); err != nil || len(raw) < 10_000 {
		t.Errorf("%d bytes, %v", len(raw), err)
	}
}
