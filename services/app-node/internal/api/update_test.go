package api_test

import (
	"slices"
	"testing"
)

func TestAnUpdateLeavesWhatIsNotNamedAndIsTheOwnersAlone(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	_, token := l.user("ana@example.org")
	id := l.job(token, map[string]any{"kind": "managed_inference", "name": "chat", "location": "us", "model": "cosmicac/ngram-demo"})
	own := slices.Clone(l.ork.spec(id).GetInference().GetArguments())
	path := "/api/v1/jobs/" + id + "/update"
	var job struct {
		EngineArguments []string `json:"engine_arguments"`
		Replicas        uint32
		SpecRevision    uint64 `json:"spec_revision"`
	}
	l.ok(200, &job, "POST", path, token, map[string]any{"strategy": "stop_first", "engine_arguments": []string{"--a", "1"}})
	revision := job.SpecRevision
	if !slices.Equal(job.EngineArguments, []string{"--a", "1"}) || job.Replicas != 1 {
		t.Errorf("%+v", job)
	}
	l.ok(200, &job, "POST", path, token, map[string]any{"strategy": "surge_first", "replicas": 3, "expected_spec_revision": revision})
	if !slices.Equal(job.EngineArguments, []string{"--a", "1"}) || job.Replicas != 3 || job.SpecRevision != revision+1 {
		t.Errorf("%+v", job)
	}
	// None given are the model's own.
	job.EngineArguments = nil
	l.ok(200, &job, "POST", path, token, map[string]any{"strategy": "stop_first", "engine_arguments": []string{}})
	if !slices.Equal(job.EngineArguments, own) {
		t.Errorf("%q, and the model's own are %q", job.EngineArguments, own)
	}
	if r := l.do("POST", path, token, map[string]any{"strategy": "stop_first", "replicas": 3}, "Idempotency-Key", "seen"); r.status != 200 || r.header.Get("Idempotency-Replayed") != "true" {
		t.Errorf("a repeated update is answered %d: %s", r.status, r.body)
	}
	l.refused("invalid", "POST", path, token, map[string]any{"strategy": "all_at_once", "replicas": 3})
	l.refused("invalid", "POST", path, token, map[string]any{"replicas": 3})
	if p := l.refused("invalid", "POST", path, token, map[string]any{"strategy": "stop_first", "replicas": 0}); !p.names("body.replicas") {
		t.Errorf("%+v", p)
	}
	_, stranger := l.user("bob@example.org")
	l.refused("not_found", "POST", path, stranger, map[string]any{"strategy": "stop_first", "replicas": 3})
}
