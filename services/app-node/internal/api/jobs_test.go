package api_test

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cosmicac/cosmicac/pkg/identity"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	"github.com/cosmicac/cosmicac/services/app-node/internal/api"
)

type jobView struct {
	ID, Kind, Name, Location, Image, Model, Runtime, State, Reason, Message string
	ProjectID                                                               string `json:"project_id"`
	UserID                                                                  string `json:"user_id"`
	Replicas                                                                int
	RequireAuthorization                                                    bool `json:"require_authorization"`
	Revision                                                                int
	ReplicaList                                                             []struct{ State string } `json:"replica_list"`
}

func TestAJobIsMadeListedStoppedAndDeleted(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	userID, token := l.user("ana@example.org")
	body := container("training run")
	body["location"] = "US"
	body["environment"] = map[string]string{"A": "b"}
	body["max_duration_seconds"] = 3600
	var job jobView
	l.ok(201, &job, "POST", "/api/v1/jobs", token, body)
	if job.Kind != "gpu_container" || job.State != "queued" || job.Reason != "busy" || job.UserID != userID || job.Location != "us" || len(job.ReplicaList) != 1 {
		t.Errorf("unexpected job %+v", job)
	}
	spec := l.ork.spec(job.ID)
	if spec.GetImage().GetReference() != "docker://registry.example.org/cosmicac/ubuntu:22.04-cuda12.8.1" || spec.GetImage().GetDefaultUser() != "ubuntu" ||
		spec.GetMaxDuration().AsDuration() != time.Hour || spec.GetEnvironment()["A"] != "b" {
		t.Errorf("the orchestrator got %v", spec)
	}
	var list struct {
		Jobs []jobView
		Next string `json:"next_page_token"`
	}
	l.ok(200, &list, "GET", "/api/v1/jobs?kind=gpu_container&state=queued,running&name=training+run", token, nil)
	if len(list.Jobs) != 1 || list.Jobs[0].ID != job.ID {
		t.Errorf("unexpected list %+v", list)
	}
	l.job(token, container("second"))
	l.ok(200, &list, "GET", "/api/v1/jobs?page_size=1", token, nil)
	if len(list.Jobs) != 1 || list.Jobs[0].Name != "second" || list.Next == "" {
		t.Errorf("unexpected page %+v", list)
	}
	l.ok(200, &job, "POST", "/api/v1/jobs/"+job.ID+"/stop", token, nil)
	if job.State != "stopping" || job.Reason != "stop_requested" {
		t.Errorf("unexpected job %+v", job)
	}
	l.refused("failed_precondition", "POST", "/api/v1/jobs/"+job.ID+"/start", token, nil)
	var history struct{ Events []struct{ State string } }
	l.ok(200, &history, "GET", "/api/v1/jobs/"+job.ID+"/history", token, nil)
	if len(history.Events) != 1 || history.Events[0].State != "queued" {
		t.Errorf("unexpected history %+v", history)
	}
	l.ok(202, &job, "DELETE", "/api/v1/jobs/"+job.ID, token, nil)
}

func TestAnInferenceJobTakesWhatTheCatalogueKnows(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	var job jobView
	l.ok(201, &job, "POST", "/api/v1/jobs", l.admin, map[string]any{"kind": "managed_inference", "name": "chat", "location": "us", "model": "cosmicac/ngram-demo"})
	if job.Runtime != "embedded" || job.Replicas != 1 || !job.RequireAuthorization || job.Image != "Ubuntu22.04/CUDA12.8.1" {
		t.Errorf("unexpected job %+v", job)
	}
	l.ok(201, &job, "POST", "/api/v1/jobs", l.admin, map[string]any{"kind": "managed_inference", "name": "chat", "location": "us", "model": "my/own",
		"runtime": "command", "engine_arguments": []string{"serve"}, "replicas": 3, "require_authorization": false})
	if job.Runtime != "command" || job.Model != "my/own" || job.Replicas != 3 || job.RequireAuthorization {
		t.Errorf("unexpected job %+v", job)
	}
}

func TestTheSameIdempotencyKeyGivesTheSameJob(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	var first, again, other jobView
	l.ok(201, &first, "POST", "/api/v1/jobs", l.admin, container("a"), "Idempotency-Key", "k-1")
	r := l.ok(201, &again, "POST", "/api/v1/jobs", l.admin, container("a"), "Idempotency-Key", "k-1")
	l.ok(201, &other, "POST", "/api/v1/jobs", l.admin, container("a"))
	if first.ID != again.ID || r.header.Get("Idempotency-Replayed") != "true" || other.ID == first.ID {
		t.Errorf("%s, %s, %s", first.ID, again.ID, other.ID)
	}
}

func TestAnotherUsersJobDoesNotExist(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	_, ana := l.user("ana@example.org")
	_, bob := l.user("bob@example.org")
	jobID := l.job(ana, container("private"))
	key := must(identity.New(rand.Reader))
	l.ork.run(jobID, key.ID().String())
	absent := "j-0000000000000"
	for _, c := range []struct {
		method, path string
		body         any
	}{
		{"GET", "", nil}, {"POST", "/stop", nil}, {"POST", "/start", nil}, {"DELETE", "", nil}, {"GET", "/events", nil}, {"GET", "/history", nil},
		{"POST", "/grants", map[string]any{"client_key": key.ID().String()}},
	} {
		theirs := l.refused("not_found", c.method, "/api/v1/jobs/"+jobID+c.path, bob, c.body)
		none := l.refused("not_found", c.method, "/api/v1/jobs/"+absent+c.path, bob, c.body)
		if strings.ReplaceAll(theirs.Detail, jobID, absent) != none.Detail {
			t.Errorf("%s %s: %q differs from %q", c.method, c.path, theirs.Detail, none.Detail)
		}
	}
	var list struct{ Jobs []jobView }
	l.ok(200, &list, "GET", "/api/v1/jobs", bob, nil)
	if len(list.Jobs) != 0 {
		t.Errorf("bob sees %+v", list)
	}
	l.ok(200, &list, "GET", "/api/v1/jobs", l.admin, nil)
	if len(list.Jobs) != 1 {
		t.Errorf("the administrator sees %+v", list)
	}
	l.ok(200, nil, "GET", "/api/v1/jobs/"+jobID, l.admin, nil)
	if l.ork.spec(jobID); l.do("GET", "/api/v1/jobs/"+jobID, ana, nil).status != 200 {
		t.Error("ana cannot read her job")
	}
	for _, bad := range []string{"..%2Fx", "%00", strings.Repeat("j", 300), "j%0Ax"} {
		l.refused("not_found", "GET", "/api/v1/jobs/"+bad, ana, nil)
	}
}

func TestAGrantIsAcceptedByWhoChecksItAsAnAgentDoes(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	userID, token := l.user("ana@example.org")
	jobID := l.job(token, container("shell me"))
	agent, client := must(identity.New(rand.Reader)), must(identity.New(rand.Reader))
	path := "/api/v1/jobs/" + jobID + "/grants"
	ask := map[string]any{"client_key": client.Hex(), "rights": []string{"shell", "files"}}
	if p := l.refused("failed_precondition", "POST", path, token, ask); !strings.Contains(p.Detail, "queued") {
		t.Errorf("the state is not named: %s", p.Detail)
	}
	l.ork.run(jobID, agent.ID().String())
	var out struct {
		Grant          string
		AgentKey       string    `json:"agent_key"`
		AgentAddresses []string  `json:"agent_addresses"`
		SSHHostKey     string    `json:"ssh_host_key"`
		DefaultUser    string    `json:"default_user"`
		ExpiresAt      time.Time `json:"expires_at"`
	}
	l.ok(201, &out, "POST", path, token, ask)
	envelope := must(base64.StdEncoding.DecodeString(out.Grant))
	grant, err := l.network.CheckGrant(envelope, client.ID(), agent.ID(), l.clock.Now())
	if err != nil {
		t.Fatal(err)
	}
	if grant.GetUserId() != userID || grant.GetJobId() != jobID || !slices.Equal(grant.GetRights(), []string{"shell", "files"}) ||
		grant.GetNotAfter().AsTime().Sub(grant.GetNotBefore().AsTime()) != 12*time.Hour {
		t.Errorf("unexpected grant %v", grant)
	}
	if out.AgentKey != agent.ID().String() || len(out.AgentAddresses) != 1 || out.SSHHostKey != "ssh-ed25519 AAAA host" || out.DefaultUser != "ubuntu" {
		t.Errorf("unexpected answer %+v", out)
	}
	stranger := must(identity.New(rand.Reader))
	if _, err := l.network.CheckGrant(envelope, stranger.ID(), agent.ID(), l.clock.Now()); err == nil {
		t.Error("the grant is good for another client")
	}
	if _, err := l.network.CheckGrant(envelope, client.ID(), agent.ID(), l.clock.Now().Add(13*time.Hour)); err == nil {
		t.Error("the grant is good for ever")
	}
	l.ok(201, &out, "POST", path, token, map[string]any{"client_key": client.ID().String()})
	if grant, err = l.network.CheckGrant(must(base64.StdEncoding.DecodeString(out.Grant)), client.ID(), agent.ID(), l.clock.Now()); err != nil || len(grant.GetRights()) != 4 {
		t.Errorf("all rights: %v, %v", grant, err)
	}
	for field, body := range map[string]map[string]any{
		"body.client_key": {"client_key": "nonsense"},
		"body.rights":     {"client_key": client.Hex(), "rights": []string{"shell", "root"}},
	} {
		if p := l.refused("invalid", "POST", path, token, body); !p.names(field) {
			t.Errorf("%s is not named: %+v", field, p)
		}
	}
}

func TestAnAppNodeThatMayNotSignGrantsSaysSo(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	jobID := l.job(l.admin, container("shell me"))
	agent, client := must(identity.New(rand.Reader)), must(identity.New(rand.Reader))
	l.ork.run(jobID, agent.ID().String())
	l.network.Roster().GetMembers()[0].SignsGrants = false
	if p := l.refused("unavailable", "POST", "/api/v1/jobs/"+jobID+"/grants", l.admin, map[string]any{"client_key": client.Hex()}); !strings.Contains(p.Detail, "roster") {
		t.Errorf("unexpected words: %s", p.Detail)
	}
}

func TestAnAbsentOrchestratorIsSaidInWordsAndInTime(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	jobID := l.job(l.admin, container("a"))
	check := func(how string) {
		for _, c := range [][2]string{{"GET", "/api/v1/jobs"}, {"GET", "/api/v1/jobs/" + jobID}, {"GET", "/api/v1/racks"}, {"GET", "/api/v1/locations"}, {"GET", "/api/v1/jobs/" + jobID + "/events"}} {
			began := time.Now()
			p := l.refused("unavailable", c[0], c[1], l.admin, nil)
			if p.Status != 503 || !strings.Contains(p.Detail, "orchestrator") || time.Since(began) > 10*time.Second {
				t.Errorf("%s: %s took %v: %+v", how, c[1], time.Since(began), p)
			}
		}
		l.refused("unavailable", "POST", "/api/v1/jobs", l.admin, container("b"))
	}
	l.ork.mu.Lock()
	l.ork.hang = true
	l.ork.mu.Unlock()
	check("hangs")
	l.away.set(true)
	check("is away")
	// What is app-node's own goes on.
	l.ok(200, nil, "GET", "/api/v1/models", l.admin, nil)
	l.ok(200, nil, "GET", "/api/v1/api-keys", l.admin, nil)
}

// follow reads events of a job's stream, comments aside.
type follow struct {
	t        *testing.T
	response *http.Response
	lines    *bufio.Scanner
	comments int
}

func (l *lab) follow(jobID, token string) *follow {
	l.t.Helper()
	// A stream that stays silent for ever fails the test instead of holding it.
	ctx, cancel := context.WithTimeout(l.t.Context(), time.Minute)
	l.t.Cleanup(cancel)
	response := must(http.DefaultClient.Do(l.request("GET", "/api/v1/jobs/"+jobID+"/events", token, nil).WithContext(ctx)))
	if response.StatusCode != 200 || response.Header.Get("Content-Type") != "text/event-stream" {
		l.t.Fatalf("events: %d %s", response.StatusCode, response.Header.Get("Content-Type"))
	}
	l.t.Cleanup(func() { response.Body.Close() })
	return &follow{t: l.t, response: response, lines: bufio.NewScanner(response.Body)}
}

// next is the next event; ok is false at the end of the stream.
func (f *follow) next() (name string, job jobView, ok bool) {
	f.t.Helper()
	for f.lines.Scan() {
		line := f.lines.Text()
		switch {
		case strings.HasPrefix(line, ":"):
			f.comments++
		case strings.HasPrefix(line, "event: "):
			name = strings.TrimPrefix(line, "event: ")
		case strings.HasPrefix(line, "data: "):
			if err := json.Unmarshal([]byte(strings.TrimPrefix(line, "data: ")), &job); err != nil {
				f.t.Fatal(err)
			}
		case line == "" && name != "":
			return name, job, true
		}
	}
	return "", job, false
}

// until reads until a job in this state comes, and checks that revisions only grow.
func (f *follow) until(state string, after int) int {
	f.t.Helper()
	for {
		name, job, ok := f.next()
		if !ok || name != "job" {
			f.t.Fatalf("the stream gave %q (ended: %v) before %s", name, !ok, state)
		}
		if job.Revision < after {
			f.t.Fatalf("revision %d came after %d", job.Revision, after)
		}
		after = job.Revision
		if job.State == state {
			return after
		}
	}
}

func TestEventsBeginWithTheJobFollowItAndEndWithIt(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	_, token := l.user("ana@example.org")
	jobID := l.job(token, container("followed"))
	f := l.follow(jobID, token)
	name, job, _ := f.next()
	if name != "job" || job.ID != jobID || job.State != "queued" || job.Name != "followed" {
		t.Fatalf("the first event is %s %+v", name, job)
	}
	seen := job.Revision
	for _, state := range []orkv1.State{orkv1.State_STATE_RESERVING, orkv1.State_STATE_PROVISIONING, orkv1.State_STATE_STARTING, orkv1.State_STATE_RUNNING} {
		l.ork.change(jobID, func(j *orkv1.Job) { j.State = state })
	}
	seen = f.until("running", seen)

	// The watch behind it breaks while the job changes: the newest still comes.
	l.away.set(true)
	l.ork.cut()
	l.ork.change(jobID, func(j *orkv1.Job) { j.State = orkv1.State_STATE_STOPPING })
	l.away.set(false)
	seen = f.until("stopping", seen)
	l.ork.change(jobID, func(j *orkv1.Job) { j.State = orkv1.State_STATE_STOPPED })
	f.until("stopped", seen)

	l.ork.remove(jobID)
	if name, _, _ := f.next(); name != "deleted" {
		t.Fatalf("%q instead of deleted", name)
	}
	if name, _, ok := f.next(); ok {
		t.Errorf("%q came after deleted", name)
	}
}

func TestAJobThatWentWhileTheWatchWasBrokenIsToldAsDeleted(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	jobID := l.job(l.admin, container("followed"))
	f := l.follow(jobID, l.admin)
	f.until("queued", 0)
	l.away.set(true)
	l.ork.cut()
	l.ork.remove(jobID)
	l.away.set(false)
	for {
		name, _, ok := f.next()
		if !ok {
			t.Fatal("the stream ended without deleted")
		}
		if name == "deleted" {
			return
		}
	}
}

func TestManyWatchersShareOneWatchOfTheOrchestrator(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	jobID := l.job(l.admin, container("followed"))
	var all []*follow
	for range 20 {
		all = append(all, l.follow(jobID, l.admin))
	}
	l.ork.change(jobID, func(j *orkv1.Job) { j.State = orkv1.State_STATE_RUNNING })
	for _, f := range all {
		f.until("running", 0)
	}
	l.ork.mu.Lock()
	defer l.ork.mu.Unlock()
	if l.ork.watches != 1 {
		t.Errorf("%d watches of the orchestrator", l.ork.watches)
	}
}

func TestEventsStopWhenTheTokenDoes(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	userID, token := l.user("ana@example.org")
	jobID := l.job(token, container("followed"))
	f := l.follow(jobID, token)
	f.until("queued", 0)
	l.ok(200, nil, "PATCH", "/api/v1/users/"+userID, l.admin, map[string]any{"disabled": true})
	if name, _, ok := f.next(); ok {
		t.Errorf("%q came after the user was disabled", name)
	}
	if f.response.Body.Close(); f.lines.Err() != nil {
		t.Errorf("the stream broke: %v", f.lines.Err())
	}
}

func TestJobsWhoseImageModelAndLocationLeftTheCatalogueCanBeReadAndDeleted(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	chat := map[string]any{"kind": "managed_inference", "name": "chat", "location": "us", "model": "cosmicac/ngram-demo"}
	machine, model := l.job(l.admin, container("old")), l.job(l.admin, chat)
	rows := must(l.store.Catalogue(t.Context()))
	rows.Images, rows.Models = rows.Images[1:], nil
	for i := range rows.Locations {
		rows.Locations[i].Code = "zz" + rows.Locations[i].Code
	}
	if err := l.store.ReplaceCatalogue(t.Context(), rows); err != nil {
		t.Fatal(err)
	}
	for _, body := range []map[string]any{container("new"), chat} {
		l.refused("invalid", "POST", "/api/v1/jobs", l.admin, body)
	}
	for id, want := range map[string]string{machine: "Ubuntu22.04/CUDA12.8.1", model: "cosmicac/ngram-demo"} {
		var job struct{ Image, Model, Location string }
		l.ok(200, &job, "GET", "/api/v1/jobs/"+id, l.admin, nil)
		if job.Image != want && job.Model != want || job.Location != "us" {
			t.Errorf("%s became %+v", id, job)
		}
		l.ok(202, nil, "DELETE", "/api/v1/jobs/"+id, l.admin, nil)
	}
}

func TestAnEventStreamOutlivesTheTimeoutsOfOtherRequests(t *testing.T) {
	t.Parallel()
	l := newLab(t, func(o *api.Options) { o.ReadTimeout, o.WriteTimeout = 4*time.Second, 5*time.Second })
	jobID := l.job(l.admin, container("followed"))
	f := l.follow(jobID, l.admin)
	f.until("queued", 0)
	time.Sleep(6 * time.Second) // longer than both
	l.ork.change(jobID, func(j *orkv1.Job) { j.State = orkv1.State_STATE_RUNNING })
	f.until("running", 0)
	if f.comments == 0 {
		t.Error("no comment kept the stream alive")
	}
}
