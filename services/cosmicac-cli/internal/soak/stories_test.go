package soak

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cosmicac/cosmicac/services/cosmicac-cli/internal/client"
)

// TestStoriesEndToEnd are bugs that users of products like this one reported,
// played on one platform. Each ends with the ledger equal to the truth.
func TestStoriesEndToEnd(t *testing.T) {
	p := start(t)
	for _, s := range []struct {
		name string
		play func(*platform, *rules)
	}{
		{"twenty jobs ask for eight cards at once", crowded},
		{"the worker is out of sight for a while", outOfSight},
		{"every daemon is killed with jobs in five phases", killedInEveryPhase},
		{"a job of the same name does not take the dying one for its own", sameName},
		{"the cluster refuses the credentials for a while", refusedCredentials},
		{"a slow and faltering link leaves no orphan", faltering},
		{"an update under load loses no answer", updatedUnderLoad},
		{"the orchestrator and a worker stand still for longer than any silence", stoodStill},
	} {
		if !t.Run(s.name, func(t *testing.T) {
			p.t = t
			r := newRules(p)
			p.note("story: %s", s.name)
			s.play(p, r)
			p.rest(r)
		}) {
			break // the next would stand on a platform that is not at rest
		}
		p.t = t
	}
}

// rest deletes every job and demands that nothing is left.
func (p *platform) rest(r *rules) {
	p.t.Helper()
	p.thaw()
	p.mustFault("clear")
	p.allReady()
	var ids []string
	p.eventually("the jobs can be listed", func() string {
		var err error
		if ids, err = p.jobs(); err != nil {
			return err.Error()
		}
		return ""
	})
	p.gone(ids...)
	p.eventually("nothing is left in the cluster", func() string {
		if err := p.NothingLeft(p.t.Context()); err != nil {
			return err.Error()
		}
		return ""
	})
	p.eventually("the ledger is the truth", r.same)
}

// obeys looks at the rules for a while.
func (p *platform) obeys(r *rules, d time.Duration, ids ...string) {
	p.t.Helper()
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(300 * time.Millisecond) {
		if broken := r.check(ids); len(broken) > 0 {
			p.t.Fatal(strings.Join(broken, "; "))
		}
	}
}

func uid(j *client.Job) string {
	if len(j.ReplicaList) == 0 || len(j.ReplicaList[0].Attempts) == 0 {
		return ""
	}
	a := j.ReplicaList[0].Attempts
	if nodes := a[len(a)-1].Nodes; len(nodes) > 0 {
		return nodes[0].VMIUID
	}
	return ""
}

func crowded(p *platform, r *rules) {
	ids := make([]string, 20)
	var wg sync.WaitGroup
	for i := range ids {
		wg.Go(func() {
			var j client.Job
			name := fmt.Sprintf("crowd-%d", i)
			for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
				if p.ask("POST", "/api/v1/jobs", map[string][]string{"Idempotency-Key": {name}}, gpuJob(name, "in", 1), &j) == nil {
					ids[i] = j.ID
					return
				}
			}
		})
	}
	p.kill("app-node") // in the middle of it
	wg.Wait()
	if i := slices.Index(ids, ""); i >= 0 {
		p.t.Fatalf("job %d was never made", i)
	}
	p.eventually("eight run and twelve wait, with the reason", func() string {
		if broken := r.check(ids); len(broken) > 0 {
			p.t.Fatal(strings.Join(broken, "; "))
		}
		count := map[string]int{}
		for _, id := range ids {
			j, err := p.job(id)
			if err != nil {
				return err.Error()
			}
			words := j.State
			if j.State == "queued" {
				words += " " + j.Reason
			}
			count[words]++
		}
		if count["running"] == 8 && count["queued busy"] == 12 {
			return ""
		}
		return fmt.Sprint(count)
	})
	if all, err := p.jobs(); err != nil || len(all) != 20 {
		p.t.Errorf("%d jobs are listed, %v", len(all), err)
	}
}

func outOfSight(p *platform, r *rules) {
	j := p.create("unseen", gpuJob("unseen", "us", 2))
	j = p.until(j.ID, "running")
	was := uid(&j)
	p.freeze("worker-us")
	p.eventually("the job is shown as not seen", func() string {
		now, err := p.job(j.ID)
		if err != nil {
			return err.Error()
		}
		if now.State != "running" || len(now.ReplicaList[0].Attempts) != 1 {
			p.t.Fatalf("the job became %s (%s) with %d attempts", now.State, now.Reason, len(now.ReplicaList[0].Attempts))
		}
		if len(now.Conditions) == 0 {
			return "it is shown as if nothing were"
		}
		return ""
	})
	p.obeys(r, 5*time.Second, j.ID)
	p.thaw()
	p.eventually("the job is seen again, as it was", func() string {
		now, err := p.job(j.ID)
		if err != nil {
			return err.Error()
		}
		if now.State != "running" || uid(&now) != was || len(now.ReplicaList[0].Attempts) != 1 {
			p.t.Fatalf("the job is %s (%s), machine %s was %s, %d attempts", now.State, now.Reason, uid(&now), was, len(now.ReplicaList[0].Attempts))
		}
		if len(now.Conditions) > 0 {
			return fmt.Sprint(now.Conditions)
		}
		return ""
	})
}

// order of the states that a job passes; later is fine, back is not.
var order = map[string]int{"queued": 0, "reserving": 1, "provisioning": 2, "starting": 3, "running": 4, "stopping": 5, "stopped": 6}

func killedInEveryPhase(p *platform, r *rules) {
	runs := p.create("runs", gpuJob("runs", "us", 8))
	stops := p.create("stops", gpuJob("stops", "us", 8))
	serves := p.create("serves", inferenceJob("serves", 1))
	rested := p.create("rested", gpuJob("rested", "in", 1))
	fills := p.create("fills", gpuJob("fills", "us", 1))
	stopping := p.until(stops.ID, "running")
	for _, id := range []string{runs.ID, serves.ID, rested.ID, fills.ID} {
		p.until(id, "running")
	}
	if err := p.act(rested.ID, "stop"); err != nil {
		p.t.Fatal(err)
	}
	p.until(rested.ID, "stopped")
	a := stopping.ReplicaList[0].Attempts
	p.mustFault("set", "stuck-terminating", a[len(a)-1].Nodes[0].NodeName)
	p.mustFault("set", "import-stalled", "*")
	time.Sleep(2 * time.Second) // the switches are read each second
	if err := p.act(stops.ID, "stop"); err != nil {
		p.t.Fatal(err)
	}
	imports := p.create("imports", gpuJob("imports", "us", 8))
	p.until(imports.ID, "provisioning")
	waits := p.create("waits", gpuJob("waits", "us", 8))
	p.until(stops.ID, "stopping")
	p.until(waits.ID, "queued")

	ids := []string{runs.ID, stops.ID, serves.ID, rested.ID, fills.ID, imports.ID, waits.ID}
	before := map[string]client.Job{}
	for _, id := range ids {
		j, err := p.job(id)
		if err != nil {
			p.t.Fatal(err)
		}
		before[id] = j
	}
	for _, name := range p.Processes() {
		p.kill(name)
		time.Sleep(500 * time.Millisecond)
		p.allReady()
		p.eventually("all is as it was after "+name+" was killed", func() string {
			if broken := r.check(ids); len(broken) > 0 {
				p.t.Fatal(strings.Join(broken, "; "))
			}
			for _, id := range ids {
				now, err := p.job(id)
				if err != nil {
					return err.Error()
				}
				was := before[id]
				if now.State == "failed" || order[now.State] < order[was.State] {
					p.t.Fatalf("after %s was killed %s went from %s to %s (%s)", name, was.Name, was.State, now.State, now.Reason)
				}
				if uid(&was) != "" && uid(&now) != uid(&was) {
					p.t.Fatalf("after %s was killed %s has machine %s, had %s", name, was.Name, uid(&now), uid(&was))
				}
				if was.State == "running" && len(now.Conditions) > 0 {
					return fmt.Sprintf("%s: %v", was.Name, now.Conditions)
				}
			}
			return ""
		})
	}
	// And each goes on from where it was.
	p.mustFault("clear")
	p.until(imports.ID, "running")
	p.until(stops.ID, "stopped")
	p.until(waits.ID, "running")
}

func sameName(p *platform, r *rules) {
	old := p.create("twin-1", gpuJob("twin", "us", 1))
	old = p.until(old.ID, "running")
	p.mustFault("set", "stuck-terminating", "*")
	time.Sleep(2 * time.Second)
	if err := p.act(old.ID, "delete"); err != nil {
		p.t.Fatal(err)
	}
	j := p.create("twin-2", gpuJob("twin", "us", 1))
	if j.ID == old.ID {
		p.t.Fatalf("the new job has the id of the old one, %s", j.ID)
	}
	j = p.until(j.ID, "running")
	if uid(&j) == "" || uid(&j) == uid(&old) {
		p.t.Fatalf("the new job has machine %q, the old one had %q", uid(&j), uid(&old))
	}
	vmis, err := p.kube.list("/apis/kubevirt.io/v1", "virtualmachineinstances")
	if err != nil {
		p.t.Fatal(err)
	}
	dying := false
	for i := range vmis {
		dying = dying || vmis[i].Metadata.UID == uid(&old)
	}
	if !dying {
		p.t.Error("the old machine was gone already: the story proves nothing")
	}
	for _, job := range []client.Job{j, old} {
		mine := job.ReplicaList[0].Attempts[0].ID
		p.eventually("the log of "+job.ID+" has lines, all of them its own", func() string {
			lines, err := p.log(job.ID)
			if err != nil || len(lines) == 0 {
				return fmt.Sprint(len(lines), " lines, ", err)
			}
			for _, l := range lines {
				if l.Instance != mine {
					p.t.Fatalf("the log of job %s, whose attempt is %s, has a line of %s: %s", job.ID, mine, l.Instance, l.Text)
				}
			}
			return ""
		})
	}
	p.obeys(r, 2*time.Second, j.ID, old.ID)
}

func refusedCredentials(p *platform, r *rules) {
	j := p.create("kept", gpuJob("kept", "us", 1))
	j = p.until(j.ID, "running")
	was := uid(&j)
	p.mustFault("set", "api-answer", "code=401")
	p.eventually("the rack says that its credentials are refused", func() string {
		var racks struct{ Racks []client.Rack }
		if err := p.ask("GET", "/api/v1/racks", nil, nil, &racks); err != nil {
			return err.Error()
		}
		words := fmt.Sprint(racks.Racks)
		if strings.Contains(words, "credentials") || strings.Contains(words, "401") {
			return ""
		}
		return words
	})
	p.obeys(r, 5*time.Second, j.ID)
	later := p.create("later", gpuJob("later", "us", 1))
	p.mustFault("clear")
	p.until(later.ID, "running") // heals without a restart
	now := p.until(j.ID, "running")
	if uid(&now) != was || len(now.ReplicaList[0].Attempts) != 1 {
		p.t.Errorf("the job's machine is %s, was %s", uid(&now), was)
	}
}

// faltering lets the worker answer in short spells only, over a slow API that
// loses replies, while jobs come and go.
func faltering(p *platform, r *rules) {
	p.mustFault("set", "api-slow", "delay=300ms")
	p.mustFault("set", "api-drop-reply", "every=4")
	var ids []string
	for i := range 8 {
		ids = append(ids, p.create(fmt.Sprintf("slow-%d", i), gpuJob(fmt.Sprintf("slow-%d", i), "us", 1+i%4)).ID)
		p.freeze("worker-us")
		time.Sleep(1500 * time.Millisecond)
		p.thaw()
		time.Sleep(700 * time.Millisecond)
		if i%2 == 1 {
			if err := p.act(ids[i-1], "delete"); err != nil {
				p.note("delete: %v", err)
			}
		}
		if broken := r.check(ids); len(broken) > 0 {
			p.t.Fatal(strings.Join(broken, "; "))
		}
	}
}

// updatedUnderLoad replaces both replicas of a model that answers all the time, one
// after the other in either order: no request is refused or broken off.
func updatedUnderLoad(p *platform, r *rules) {
	j := p.create("updated", inferenceJob("updated", 2))
	serve := func(revision uint64) {
		p.t.Helper()
		p.eventually("both replicas serve", func() string {
			now, err := p.job(j.ID)
			if err != nil {
				return err.Error()
			}
			for _, c := range now.Conditions {
				if c.Kind == "update_stopped" {
					p.t.Fatal(c.Message)
				}
			}
			n := 0
			for _, replica := range now.ReplicaList {
				if a := replica.Attempts[len(replica.Attempts)-1]; a.State == "running" && a.SpecRevision == revision {
					n++
				}
			}
			if n != 2 || len(now.Conditions) > 0 {
				return fmt.Sprintf("%d of specification %d, %v", n, revision, now.Conditions)
			}
			return ""
		})
	}
	serve(1)
	a := newAsker(p)
	answers := func(more uint64) {
		p.t.Helper()
		a.mu.Lock()
		from := a.whole
		a.mu.Unlock()
		p.eventually("the model answers", func() string {
			a.mu.Lock()
			defer a.mu.Unlock()
			if a.whole < from+more {
				return fmt.Sprintf("%d of %d answers, refused %v", a.whole-from, more, a.refused)
			}
			return ""
		})
	}
	answers(3)
	a.mu.Lock()
	sent, whole := a.sent, a.whole // one may be under way: it is counted with those to come
	clear(a.refused)               // until the key had arrived
	a.mu.Unlock()
	for i, strategy := range []string{"stop_first", "surge_first"} {
		body := map[string]any{"strategy": strategy, "engine_arguments": []string{"--max-num-seqs", fmt.Sprint(4 + i)}}
		if err := p.ask("POST", "/api/v1/jobs/"+j.ID+"/update", nil, body, nil); err != nil {
			p.t.Fatal(err)
		}
		serve(uint64(i) + 2)
		p.obeys(r, time.Second, j.ID)
	}
	answers(3)
	a.stop()
	if broken := a.check(); len(broken) > 0 {
		p.t.Fatal(strings.Join(broken, "; "))
	}
	delete(a.refused, "404 model_not_found") // of the model that nobody serves
	lost := int64(a.sent-sent) - int64(a.whole-whole)
	if len(a.refused) > 0 || lost > 1 { // the last one may have been cut by stop
		p.t.Errorf("of %d requests during two updates %d got no whole answer; refused %v", a.sent-sent, lost, a.refused)
	}
}

// stoodStill stops two processes, not their links, for longer than a link may be
// silent: what they then find out of date they must look at anew before they judge.
func stoodStill(p *platform, r *rules) {
	jobs := []client.Job{p.create("still", gpuJob("still", "us", 2)), p.create("still-chat", inferenceJob("still-chat", 1))}
	was := map[string]string{}
	for i := range jobs {
		now := p.until(jobs[i].ID, "running")
		was[now.ID] = uid(&now)
	}
	p.freeze("wrk-ork")
	p.freeze("worker-us")
	time.Sleep(40 * time.Second) // a link is closed after 10 s of silence
	p.thaw()
	for id, machine := range was {
		p.eventually("the job is as it was", func() string {
			now, err := p.job(id)
			if err != nil {
				return err.Error()
			}
			if now.State != "running" || uid(&now) != machine || len(now.ReplicaList) != 1 || len(now.ReplicaList[0].Attempts) != 1 {
				p.t.Fatalf("the job is %s (%s), machine %s was %s, %v", now.State, now.Reason, uid(&now), machine, now.ReplicaList)
			}
			if len(now.Conditions) > 0 {
				return fmt.Sprint(now.Conditions)
			}
			return ""
		})
	}
	p.obeys(r, 5*time.Second, jobs[0].ID, jobs[1].ID)
}
