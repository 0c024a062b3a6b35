package api_test

import (
	"strings"
	"testing"

	"github.com/cosmicac/cosmicac/pkg/id"
	"github.com/cosmicac/cosmicac/pkg/lexicon"
)

func TestWhatTheCatalogueAndTheOrchestratorRefuseComesAsOneList(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	body := container("")
	body["image"], body["model"] = "Windows", "gpt-9"
	body["gpu"] = map[string]any{"model": "m", "count": 5000}
	p := l.refused("invalid", "POST", "/api/v1/jobs", l.admin, body)
	for _, field := range []string{"body.image", "body.model", "body.name", "body.gpu.count"} {
		if !p.names(field) {
			t.Errorf("%s is not named in %+v", field, p)
		}
	}
	if len(l.ork.order) != 0 {
		t.Error("a job was recorded by asking what is wrong with it")
	}
	// What is wrong by both is said once.
	body = container("x")
	delete(body, "image")
	body["cuda"] = "CUDA 12.8"
	if p := l.refused("invalid", "POST", "/api/v1/jobs", l.admin, body); !p.names("body.image") {
		t.Errorf("%+v", p)
	}
}

func TestAJobKeepsThePriceOfItsCreation(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	type priced struct {
		Price    *uint64 `json:"price_cents_per_gpu_hour"`
		Currency string
		Idle     int    `json:"idle_stop_seconds"`
		CUDA     string `json:"cuda"`
		Alerts   struct {
			CostPercent int `json:"cost_percent"`
		}
	}
	var job priced
	body := container("x")
	body["gpu"] = map[string]any{"model": "GH100_H100_SXM5_80GB", "count": 1}
	body["cost_limit_cents"], body["idle_stop_seconds"], body["cuda"] = 1000, 600, "CUDA 12.8"
	body["alerts"] = map[string]any{"cost_percent": 80}
	l.ok(201, &job, "POST", "/api/v1/jobs", l.admin, body)
	if job.Price == nil || *job.Price != 249 || job.Currency != "USD" || job.Idle != 600 || job.CUDA != "CUDA 12.8" || job.Alerts.CostPercent != 80 {
		t.Errorf("%+v", job)
	}
	body["gpu"] = map[string]any{"model": "TU104GL_TESLA_T4", "count": 1}
	var unpriced priced
	l.ok(201, &unpriced, "POST", "/api/v1/jobs", l.admin, body)
	if unpriced.Price != nil {
		t.Errorf("a price that nobody set: %+v", unpriced)
	}
	body["cuda"] = "CUDA 11.8"
	if p := l.refused("invalid", "POST", "/api/v1/jobs", l.admin, body); !p.names("body.cuda") {
		t.Errorf("%+v", p)
	}
}

func TestRestartIsTheOwnersAndAFenceTheAdministrators(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	_, ana := l.user("ana@example.org")
	_, bob := l.user("bob@example.org")
	jobID := l.job(ana, container("x"))
	var job jobView
	l.ok(200, &job, "POST", "/api/v1/jobs/"+jobID+"/restart", ana, nil)
	if job.Reason != "restart_requested" {
		t.Errorf("%+v", job)
	}
	l.refused("not_found", "POST", "/api/v1/jobs/"+jobID+"/restart", bob, nil)
	attempt := id.New(id.Attempt)
	confirm := map[string]any{"confirm": attempt}
	l.refused("denied", "POST", "/api/v1/attempts/"+attempt+"/fence", ana, confirm)
	l.refused("invalid", "POST", "/api/v1/attempts/"+attempt+"/fence", l.admin, map[string]any{"confirm": "yes"})
	l.ok(200, &job, "POST", "/api/v1/attempts/"+attempt+"/fence", l.admin, confirm)
	var audit struct {
		Entries []struct{ Action, Target string }
	}
	l.ok(200, &audit, "GET", "/api/v1/audit", l.admin, nil)
	if len(audit.Entries) == 0 || audit.Entries[0].Action != "attempt.fence" || audit.Entries[0].Target != attempt {
		t.Errorf("%+v", audit)
	}
}

func TestWorkersKeysAreShownToAdministratorsWhoAsk(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	_, ana := l.user("ana@example.org")
	l.ok(200, nil, "PUT", "/api/v1/racks/us-1", l.admin, map[string]any{"location": "us", "key": l.key.Hex()})
	l.refused("denied", "GET", "/api/v1/racks?keys=true", ana, nil)
	for path, shown := range map[string]bool{"/api/v1/racks": false, "/api/v1/racks?keys=true": true} {
		if r := l.ok(200, nil, "GET", path, l.admin, nil); strings.Contains(string(r.body), l.key.ID().String()) != shown {
			t.Errorf("%s: %s", path, r.body)
		}
	}
	for _, c := range [][2]string{
		{"POST", "/racks/us-1/drain"}, {"GET", "/forgotten-racks"}, {"POST", "/forgotten-racks/us-1"}, {"GET", "/quarantines"},
		{"POST", "/quarantines"}, {"POST", "/quarantines/lift"},
	} {
		l.refused("denied", c[0], "/api/v1"+c[1], ana, nil)
	}
}

func TestTheDocumentNamesEveryStateReasonAndCondition(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	text := string(l.ok(200, nil, "GET", "/api/v1/openapi.json", "", nil).body)
	for _, all := range [][]lexicon.Entry{lexicon.States(), lexicon.Reasons(), lexicon.Conditions()} {
		for _, e := range all {
			if !strings.Contains(text, `"`+e.Name+`"`) || !strings.Contains(text, e.Label) {
				t.Errorf("%s is not in the document", e.Name)
			}
		}
	}
}
