package soak

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cosmicac/cosmicac/services/cosmicac-cli/internal/client"
)

// run is one soak: what happens next is drawn from the seed alone, so that a
// seed gives the same actions again. How daemons and actions interleave within
// a round is the machine's.
type run struct {
	*platform
	rules  *rules
	random *rand.Rand
	names  []string          // of jobs made, oldest first
	ids    map[string]string // by name, of those whose create was answered
	bodies map[string]map[string]any
	round  int
	asker  *asker
	watch  *watcher
	// proxyKills took along at most one record of use each.
	proxyKills uint64
}

// TestSoakEndToEnd does random things to the whole platform and looks at the
// rules after each, while a client asks a model all the time. SEED replays a run; ROUNDS or DURATION make it longer.
func TestSoakEndToEnd(t *testing.T) {
	seed := uint64(number(t, "SEED", 1))
	rounds := number(t, "ROUNDS", 25)
	var until time.Time
	if v := os.Getenv("DURATION"); v != "" {
		d, err := time.ParseDuration(v)
		if err != nil {
			t.Fatalf("DURATION %q: %v", v, err)
		}
		until, rounds = time.Now().Add(d), 1<<30
	}
	p := start(t)
	r := &run{platform: p, rules: newRules(p), random: rand.New(rand.NewPCG(seed, 0)), ids: map[string]string{}, bodies: map[string]map[string]any{}}
	p.note("seed %d", seed)
	t.Logf("seed %d: make soak SEED=%d ROUNDS=%d replays it", seed, seed, rounds)
	r.steady()
	r.asker, r.watch = newAsker(p), newWatcher(p)
	for r.round = 1; r.round <= rounds && (until.IsZero() || time.Now().Before(until)); r.round++ {
		r.step()
		time.Sleep(time.Duration(100+r.random.IntN(900)) * time.Millisecond)
		r.obey()
		if r.round%50 == 0 {
			r.calm() // now and then everything must come to rest
			t.Logf("round %d after %s: at rest, nothing left", r.round, time.Since(p.began).Round(time.Second))
			r.steady()
		}
	}
	r.asker.stop()
	r.calm()
	r.watch.stop()
	r.obey()
	t.Log(r.watch.report())
	if r.asker.whole == 0 {
		t.Errorf("no request was answered in the whole run; refused were %v", r.asker.refused)
	}
	r.eventually("the use that was counted is what was answered", func() string { return r.asker.accounts(r.proxyKills) })
	t.Logf("%d requests, %d whole answers, %d tokens; refused %v", r.asker.sent, r.asker.whole, r.asker.tokens, r.asker.refused)
}

// steady is an endpoint that no drawn action ends, so that there is somebody to ask.
func (r *run) steady() {
	r.t.Helper()
	j := r.platform.create(fmt.Sprintf("steady-%d", r.round), inferenceJob("steady", 1))
	r.until(j.ID, "running")
}

func number(t *testing.T, name string, fallback int) int {
	t.Helper()
	v := os.Getenv(name)
	if v == "" {
		return fallback
	}
	n, err := strconv.Atoi(v)
	if err != nil || n < 0 {
		t.Fatalf("%s=%q is not a number", name, v)
	}
	return n
}

// obey looks at the rules.
func (r *run) obey() {
	r.t.Helper()
	var ids []string
	for _, name := range r.names {
		if id := r.ids[name]; id != "" {
			ids = append(ids, id)
		}
	}
	broken := r.rules.check(ids)
	if r.asker != nil {
		broken = append(broken, r.asker.check()...)
	}
	if r.watch != nil {
		broken = append(broken, r.watch.check()...)
	}
	if len(broken) > 0 {
		r.t.Fatalf("round %d: %s", r.round, strings.Join(broken, "; "))
	}
}

// step draws and does one action.
func (r *run) step() {
	switch n := r.random.IntN(100); {
	case n < 30:
		r.create()
	case n < 55:
		r.end()
	case n < 70:
		names := r.Processes()
		name := names[r.random.IntN(len(names))]
		if name == "proxy-inference" {
			r.proxyKills++
		}
		r.kill(name)
	case n < 78:
		names := r.Processes()
		name, d := names[r.random.IntN(len(names))], time.Duration(500+r.random.IntN(3000))*time.Millisecond
		r.freeze(name)
		time.Sleep(d)
		r.thaw()
	case n < 92:
		r.breakSomething()
	default:
		_ = r.fault("clear")
	}
}

func (r *run) create() {
	name := fmt.Sprintf("soak-%d", r.round)
	var body map[string]any
	switch kind := r.random.IntN(10); {
	case kind < 6:
		body = gpuJob(name, "us", 1+r.random.IntN(8))
	case kind < 8:
		body = gpuJob(name, "in", 1+r.random.IntN(4))
	default:
		body = inferenceJob(name, 1+r.random.IntN(2))
	}
	r.names, r.bodies[name] = append(r.names, name), body
	r.post(name)
}

// post creates, or creates again what was not answered: under one idempotency
// key it must be one job.
func (r *run) post(name string) {
	var j client.Job
	err := r.ask("POST", "/api/v1/jobs", http.Header{"Idempotency-Key": {name}}, r.bodies[name], &j)
	r.note("create %s: %s %v", name, j.ID, err)
	if err != nil {
		return
	}
	if was := r.ids[name]; was != "" && was != j.ID {
		r.t.Fatalf("round %d: one idempotency key made two jobs, %s and %s", r.round, was, j.ID)
	}
	r.ids[name] = j.ID
}

// end does something to a job that was made: also things that do not apply,
// which must be refused in words and change nothing.
func (r *run) end() {
	verb := []string{"stop", "start", "restart", "delete", "delete", "create"}[r.random.IntN(6)]
	pick := r.random.IntN(1 << 20)
	if len(r.names) == 0 {
		return
	}
	i := pick % len(r.names)
	name := r.names[i]
	if verb == "create" || r.ids[name] == "" {
		r.post(name)
		return
	}
	err := r.act(r.ids[name], verb)
	r.note("%s %s: %v", verb, name, err)
}

func (r *run) breakSomething() {
	node := []string{"us-gpu-00", "us-gpu-01", "us-gpu-02", "us-gpu-03", "in-gpu-00", "in-gpu-01"}[r.random.IntN(6)]
	switch n := r.random.IntN(12); n {
	case 0, 1, 2, 3, 4, 5, 6:
		name := []string{"allocatable-zero", "node-not-ready", "reject-pods", "stuck-terminating", "oom-killed", "vfio-busy", "stuck-scheduling"}[n]
		_ = r.fault("set", name, node)
	case 7:
		_ = r.fault("set", "import-refused", "*")
	default:
		rule := []string{
			"api-drop-reply verb=create every=2 for=5s", "api-answer code=500 every=3 for=5s", "api-answer code=401 for=3s", "api-answer code=429 every=2 for=4s",
			"api-cut every=3 for=5s", "api-cut-watch *", "api-slow delay=700ms for=5s", "api-answer code=409 verb=update every=2 for=5s", "api-answer code=410 verb=watch for=5s",
		}[r.random.IntN(9)]
		name, rest, _ := strings.Cut(rule, " ")
		_ = r.fault("set", name, rest)
	}
}

// kept names jobs that run and are still said to be unreachable.
func (r *run) kept(ids []string) string {
	var words []string
	for _, id := range ids {
		j, err := r.job(id)
		if err != nil {
			return err.Error()
		}
		for _, c := range j.Conditions {
			if c.Kind == "unreachable" {
				words = append(words, fmt.Sprintf("%s is %s: %s since %s: %s", j.Name, j.State, c.Kind, c.Since, c.Message))
			}
		}
	}
	return strings.Join(words, "; ")
}

// calm ends the trouble, deletes every job, and demands that nothing is left
// and that the ledger is the truth.
func (r *run) calm() {
	r.t.Helper()
	r.note("coming to rest")
	r.thaw()
	r.mustFault("clear")
	r.allReady()
	var ids []string
	r.eventually("the jobs can be listed", func() string {
		var err error
		if ids, err = r.jobs(); err != nil {
			return err.Error()
		}
		return ""
	})
	r.obey()
	r.eventually("nothing that was seen in the trouble is still held against a job", func() string { return r.kept(ids) })
	r.gone(ids...)
	r.note("all jobs are gone")
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	r.eventually("nothing is left in the cluster", func() string {
		if err := r.NothingLeft(ctx); err != nil {
			return err.Error()
		}
		return ""
	})
	r.eventually("the ledger is the truth", r.rules.same)
	r.names, r.ids, r.bodies = nil, map[string]string{}, map[string]map[string]any{}
}
