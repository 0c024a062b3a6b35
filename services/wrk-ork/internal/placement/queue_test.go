package placement

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

// policy lets project p hold what it likes.
func policy() Policy {
	return Policy{Quotas: map[string]Quota{"p": {Unlimited: true}}, ReserveAfter: 10 * time.Minute, Age: 10 * time.Minute}
}

func waiting(id string, gpus uint32, waited time.Duration) Waiting {
	return Waiting{ID: id, JobID: "j-" + id, Project: "p", Waited: waited, Request: want(gpus)}
}

// served lists who got a plan, in order, and the reasons of the others.
func served(decisions []Decision) (plans string, refusals map[string]orkv1.Reason) {
	refusals = map[string]orkv1.Reason{}
	for _, d := range decisions {
		if d.Refusal == nil {
			plans += d.Waiting.ID
		} else {
			refusals[d.Waiting.ID] = d.Refusal.Reason
		}
	}
	return plans, refusals
}

func TestAHeadThatNeedsAWholeNodeIsPassedUntilItsTimeAndThenNoMore(t *testing.T) {
	t.Parallel()
	cluster := func() *Pass { return Open(Snapshot{Racks: []Rack{rackOf("r", node("a", 8, 1), node("b", 4, 1))}}) }
	young := []Waiting{waiting("h", 8, 9*time.Minute), waiting("x", 1, time.Minute), waiting("y", 1, time.Second)}
	if plans, _ := served(Decide(cluster(), young, policy())); plans != "xy" {
		t.Errorf("%q were placed; smaller work passes a head that has not waited long", plans)
	}
	old := []Waiting{waiting("h", 8, 11*time.Minute), waiting("x", 1, time.Minute), waiting("y", 1, time.Second)}
	decisions := Decide(cluster(), old, policy())
	plans, refusals := served(decisions)
	if plans != "x" || refusals["y"] != orkv1.Reason_REASON_BUSY || decisions[0].Kept[0] != "a" {
		t.Errorf("%q were placed, %v; node a is kept and b still takes one: %+v", plans, refusals, decisions)
	}
}

func TestPriorityGoesFirstAndAWaitCatchesUpWithIt(t *testing.T) {
	t.Parallel()
	one := func() *Pass { return Open(Snapshot{Racks: []Rack{rackOf("r", node("a", 8, 1))}}) }
	urgent := waiting("u", 1, time.Second)
	urgent.Priority = 5
	if plans, _ := served(Decide(one(), []Waiting{waiting("n", 1, 40*time.Minute), urgent}, policy())); plans != "u" {
		t.Errorf("%q was placed first, want the one with priority", plans)
	}
	if plans, _ := served(Decide(one(), []Waiting{waiting("n", 1, 61*time.Minute), urgent}, policy())); plans != "n" {
		t.Errorf("%q was placed first: an hour outweighs five steps of ten minutes", plans)
	}
}

func TestQuotaIsCountedAsPlansAreMade(t *testing.T) {
	t.Parallel()
	p := Open(Snapshot{Racks: []Rack{rackOf("r", node("a", 8, 8))}})
	rules := policy()
	rules.Quotas["p"] = Quota{Maximum: 4, Held: 1}
	stranger := waiting("s", 1, 0)
	stranger.Project = "never-told"
	bare := waiting("c", 0, 0)
	bare.Project = "never-told"
	decisions := Decide(p, []Waiting{waiting("a", 2, 4), waiting("b", 2, 3), waiting("d", 1, 2), waiting("e", 5, 1), waiting("n", 9, 1), stranger, bare}, rules)
	plans, refusals := served(decisions)
	if plans != "adc" || refusals["b"] != orkv1.Reason_REASON_OVER_QUOTA || refusals["e"] != orkv1.Reason_REASON_OVER_QUOTA || refusals["s"] != orkv1.Reason_REASON_QUOTA_UNKNOWN ||
		refusals["n"] != orkv1.Reason_REASON_NEVER_FITS {
		t.Errorf("placed %q, refused %v", plans, refusals)
	}
	for id, words := range map[string]string{"b": "holds 3 of the 4 GPUs of its quota, 1 too many", "e": "ask for fewer", "s": "project never-told is not known"} {
		for _, d := range decisions {
			if d.Waiting.ID == id && !strings.Contains(d.Refusal.Message, words) {
				t.Errorf("%s is told %q, want %q", id, d.Refusal.Message, words)
			}
		}
	}
}

func TestALargeJobIsNotPassedForEverInItsOwnProjectsQuota(t *testing.T) {
	t.Parallel()
	rules := policy()
	rules.Quotas["p"] = Quota{Maximum: 4, Held: 2}
	p := Open(Snapshot{Racks: []Rack{rackOf("r", node("a", 8, 8))}})
	plans, refusals := served(Decide(p, []Waiting{waiting("h", 4, time.Hour), waiting("x", 1, time.Second)}, rules))
	if plans != "" || refusals["x"] != orkv1.Reason_REASON_OVER_QUOTA {
		t.Errorf("placed %q, refused %v: what is left of the quota is the head's", plans, refusals)
	}
	plans, _ = served(Decide(p, []Waiting{waiting("never", 5, time.Hour), waiting("x", 1, time.Second)}, rules))
	if plans != "x" {
		t.Errorf("placed %q: a job above the whole quota must not block its project", plans)
	}
}

// simulation is a queue over time: jobs come, run for a while and end.
type simulation struct {
	rules   Policy
	racks   Snapshot
	queue   []*arrival
	running []*arrival
	all     []*arrival
	now     time.Duration
}

// before counts the jobs that may ever have stood before one: who came earlier,
// or later with a priority that its wait had not caught up with.
func (sim *simulation) before(a *arrival) (n int) {
	for _, o := range sim.all {
		if o != a && o.at <= a.at+max(0, time.Duration(o.Priority-a.Priority+1))*sim.rules.Age {
			n++
		}
	}
	return n
}

type arrival struct {
	Waiting
	at, runs, until time.Duration
	plan            Plan
	// first is since when it has been the overdue first of its line, without a break.
	first time.Duration
	heads bool
}

// TestNobodyWaitsForEverInAQueue runs random queues on random clusters and
// checks the stated bounds at each step. Once nodes are kept for a job it starts
// within the longest time that a job runs, unless somebody before it in the queue
// starts meanwhile; and those who may ever stand before it are counted.
func TestNobodyWaitsForEverInAQueue(t *testing.T) {
	t.Parallel()
	held := 0
	rapid.Check(t, func(t *rapid.T) {
		const longest = 30 * time.Minute
		sim := &simulation{rules: policy()}
		sim.rules.Quotas["small"] = Quota{Maximum: 8}
		racks := Rack{ID: "r", Location: "us", Reported: true, Connected: true, Fabric: true, BoardCounts: []uint32{2, 4, 6}}
		for i := range rapid.IntRange(1, 4).Draw(t, "nodes") {
			racks.Nodes = append(racks.Nodes, node(fmt.Sprintf("n%d", i), 8, 8))
		}
		racks.MaximumGPUs = rapid.SampledFrom([]uint32{0, 16}).Draw(t, "maximum")
		sim.racks.Racks = []Rack{racks}
		arrivals := rapid.IntRange(5, 15).Draw(t, "jobs")
		for step := 0; arrivals > 0 || len(sim.queue)+len(sim.running) > 0; step++ {
			if step > 4000 {
				t.Fatalf("%d jobs still wait after %s: %+v", len(sim.queue), sim.now, sim.queue[0].Waiting)
			}
			for n := rapid.IntRange(0, 3).Draw(t, "come"); n > 0 && arrivals > 0; n-- {
				arrivals--
				w := waiting(fmt.Sprintf("%03d", arrivals), rapid.SampledFrom([]uint32{0, 1, 1, 1, 2, 4, 8, 16}).Draw(t, "gpus"), 0)
				w.Priority = rapid.SampledFrom([]int32{0, 0, 0, 3, -3}).Draw(t, "priority")
				w.Project = rapid.SampledFrom([]string{"p", "p", "small"}).Draw(t, "project")
				w.Request.Spans = true
				if w.Project == "small" {
					w.Request.Count = min(w.Request.Count, 8)
				}
				if w.Request.Count > 8*uint32(len(racks.Nodes)) {
					w.Request.Count = 8
				}
				a := &arrival{Waiting: w, at: sim.now, runs: time.Duration(rapid.Int64Range(1, int64(longest/time.Minute)).Draw(t, "runs")) * time.Minute}
				sim.queue, sim.all = append(sim.queue, a), append(sim.all, a)
			}
			held += sim.step(t, longest)
			sim.now += time.Minute
		}
	})
	if held == 0 {
		t.Error("nobody ever had a node kept: the test tries nothing")
	}
}

// step ends what is over, serves the queue and checks the bound.
func (sim *simulation) step(t *rapid.T, longest time.Duration) (held int) {
	var on []*arrival
	for _, r := range sim.running {
		if r.until > sim.now {
			on = append(on, r)
		}
	}
	sim.running = on
	pass := Open(sim.racks.Clone())
	rules := sim.rules
	rules.Quotas = map[string]Quota{}
	for name, q := range sim.rules.Quotas {
		rules.Quotas[name] = q
	}
	for _, r := range sim.running {
		pass.Take(r.plan, r.Request)
		q := rules.Quotas[r.Project]
		q.Held += r.Request.Count
		rules.Quotas[r.Project] = q
	}
	byID := map[string]*arrival{}
	var queue []Waiting
	for _, a := range sim.queue {
		a.Waited = sim.now - a.at
		byID[a.ID], queue = a, append(queue, a.Waiting)
	}
	sim.queue = nil
	passed := false
	for _, d := range Decide(pass, queue, rules) {
		a := byID[d.Waiting.ID]
		switch {
		case d.Refusal == nil:
			passed = true
			a.plan, a.until = d.Plan, sim.now+a.runs
			sim.running = append(sim.running, a)
			if most := rules.ReserveAfter + longest*time.Duration(1+sim.before(a)); a.Waited > most {
				t.Fatalf("%s waited %s, and with %d before it %s is the bound", a.ID, a.Waited, sim.before(a), most)
			}
			continue
		case len(d.Kept) == 0:
			a.heads = false
		case !a.heads || passed:
			a.heads, a.first = true, sim.now
			held++
		case sim.now-a.first > longest:
			t.Fatalf("%s has been the first of its line for %s, and no job runs longer than %s: %s", a.ID, sim.now-a.first, longest, d.Refusal.Message)
		}
		if d.Refusal.Final {
			t.Fatalf("%+v can never be placed: %s", a.Waiting, d.Refusal.Message)
		}
		sim.queue = append(sim.queue, a)
	}
	for name, q := range sim.rules.Quotas {
		var holds uint32
		for _, r := range sim.running {
			if r.Project == name {
				holds += r.Request.Count
			}
		}
		if !q.Unlimited && holds > q.Maximum {
			t.Fatalf("project %s holds %d of %d", name, holds, q.Maximum)
		}
	}
	return held
}
