package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

// followed is what the orchestrator says of the jobs, from one watching stream.
type followed struct {
	mu      sync.Mutex
	states  map[string]orkv1.State
	words   map[string]string
	lastRun time.Time
	lastEnd time.Time
	ran     map[string]bool
	err     error
}

func follow(ctx context.Context, jobs orkv1.JobsClient) (*followed, error) {
	stream, err := jobs.WatchJobs(ctx, &orkv1.WatchJobsRequest{ProjectIds: []string{project}})
	if err != nil {
		return nil, err
	}
	w := &followed{states: map[string]orkv1.State{}, words: map[string]string{}, ran: map[string]bool{}}
	go func() {
		for {
			m, err := stream.Recv()
			w.mu.Lock()
			now := time.Now()
			switch {
			case err != nil:
				w.err = err
				w.mu.Unlock()
				return
			case m.GetJob() != nil:
				j := m.GetJob()
				w.states[j.Id] = j.State
				w.words[j.Id] = j.State.String() + " " + j.Reason.String() + " " + j.Message
				if j.State == orkv1.State_STATE_RUNNING && !w.ran[j.Id] {
					w.ran[j.Id] = true
					w.lastRun = now
				}
			case m.GetDeletedJobId() != "":
				delete(w.states, m.GetDeletedJobId())
				delete(w.words, m.GetDeletedJobId())
				w.lastEnd = now
			}
			w.mu.Unlock()
		}
	}()
	return w, nil
}

// sum counts states in words.
func (w *followed) sum() string {
	count := map[string]int{}
	for _, s := range w.states {
		count[strings.TrimPrefix(s.String(), "STATE_")]++
	}
	return fmt.Sprint(count)
}

// ours creates the jobs, waits until all run, deletes them, and waits until
// nothing is left, of objects and of records.
func ours(ctx context.Context, o options, p *platform, seen *objects, f *figures) error {
	const subject = "cosmicac"
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stubs := newStubs(ctx, seen.client)
	defer stubs.stop()
	seen.reset(stubs.hear)
	watched, err := follow(ctx, p.jobs)
	if err != nil {
		return err
	}
	writes, err := p.writes(ctx)
	if err != nil {
		return err
	}
	ids := make([]string, o.jobs)
	answers := make([]time.Duration, o.jobs)
	start := time.Now()
	err = each(ctx, o.callers, o.jobs, func(ctx context.Context, i int) error {
		began := time.Now()
		r, err := p.jobs.CreateJob(ctx, &orkv1.CreateJobRequest{
			Spec: spec(i, "us"), Owner: &orkv1.Owner{ProjectId: project, UserId: "u-1"}, IdempotencyKey: fmt.Sprintf("bench-%d", i),
		})
		answers[i] = time.Since(began)
		if err == nil {
			ids[i] = r.Job.Id
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("create: %w", err)
	}
	f.add("all jobs created", subject, time.Since(start).Seconds(), "s", o.jobs)
	f.add("answer to create, p50", subject+", "+strconv.Itoa(o.callers)+" callers", quantile(answers, 0.5), "ms", o.jobs)
	f.add("answer to create, p95", subject+", "+strconv.Itoa(o.callers)+" callers", quantile(answers, 0.95), "ms", o.jobs)

	probing, stopProbe := context.WithCancel(ctx)
	probed := make(chan []time.Duration, 1)
	go func() { probed <- p.probe(probing) }()
	err = await(ctx, o.patience, "all jobs run", func() (string, error) {
		watched.mu.Lock()
		defer watched.mu.Unlock()
		if watched.err != nil {
			return "", watched.err
		}
		for id, s := range watched.states {
			if s == orkv1.State_STATE_FAILED {
				return "", fmt.Errorf("job %s failed: %s", id, watched.words[id])
			}
		}
		for _, id := range ids {
			if !watched.ran[id] {
				_, made, running, words := seen.count()
				return fmt.Sprintf("%s; %d objects (%s), %d machines run; %s: %s", watched.sum(), made, words, running, id, watched.words[id]), stubs.failure()
			}
		}
		return "", nil
	})
	stopProbe()
	creates := <-probed
	if err != nil {
		return err
	}
	made, run, _ := seen.times()
	_, count, _, words := seen.count()
	f.note("objects: %s", words)
	f.add("all objects applied", subject, made.Sub(start).Seconds(), "s", count)
	f.add("all VMs running", subject, run.Sub(start).Seconds(), "s", o.jobs)
	f.add("all jobs running", subject, watched.lastRun.Sub(start).Seconds(), "s", o.jobs)
	f.add("answer to create while all are in motion, p50", subject+", 1 caller", quantile(creates, 0.5), "ms", len(creates))
	f.add("answer to create while all are in motion, p95", subject+", 1 caller", quantile(creates, 0.95), "ms", len(creates))
	upTo, err := p.writes(ctx)
	if err != nil {
		return err
	}
	f.add("API writes a job until it runs", subject, float64(upTo-writes)/float64(o.jobs), "", o.jobs)
	if p.captured, err = seen.capture(ctx); err != nil {
		return err
	}

	start = time.Now()
	err = each(ctx, o.callers, len(ids), func(ctx context.Context, i int) error {
		_, err := p.jobs.DeleteJob(ctx, &orkv1.DeleteJobRequest{Id: ids[i]})
		return err
	})
	if err != nil {
		return fmt.Errorf("delete: %w", err)
	}
	err = await(ctx, o.patience, "all gone", func() (string, error) {
		watched.mu.Lock()
		defer watched.mu.Unlock()
		there, _, _, _ := seen.count()
		if there > 0 || len(watched.states) > 0 {
			return fmt.Sprintf("%d objects are left; %s", there, watched.sum()), watched.err
		}
		return "", nil
	})
	if err != nil {
		return err
	}
	_, _, gone := seen.times()
	f.add("all objects gone", subject, gone.Sub(start).Seconds(), "s", count)
	f.add("all jobs gone", subject, watched.lastEnd.Sub(start).Seconds(), "s", o.jobs)
	all, err := p.writes(ctx)
	if err != nil {
		return err
	}
	f.add("API writes a job, all its life, deletes apart", subject, float64(all-writes)/float64(o.jobs), "", o.jobs)
	for _, d := range []*process{p.worker, p.ork, p.cluster} {
		peak, err := d.peak()
		if err != nil {
			return err
		}
		f.add("memory, peak", d.name, peak, "MB", 1)
		f.add("processor time", d.name, d.cpu().Seconds(), "s", 1)
	}
	return nil
}

// spec is the i-th job: 1, 2 or 4 GPUs.
func spec(i int, location string) *orkv1.JobSpec {
	return &orkv1.JobSpec{
		Kind: orkv1.JobKind_JOB_KIND_GPU_CONTAINER, Name: fmt.Sprintf("bench-%d", i), Location: location, DiskGib: 20, CpuCoresPerGpu: 4, MemoryGibPerGpu: 16,
		Gpu:   &orkv1.GpuRequest{Model: model, Count: 1 << (i % 3)},
		Image: &orkv1.Image{Name: "Ubuntu", Reference: "docker://images.example/ubuntu:22.04", DefaultUser: "ubuntu"},
	}
}

// probe creates jobs one after the other while the others are in motion, in a
// location without a rack, so that they touch no cluster, and deletes them. It
// gives how long each creation took to be answered.
func (p *platform) probe(ctx context.Context) (answers []time.Duration) {
	for i := 0; ctx.Err() == nil; i++ {
		began := time.Now()
		r, err := p.jobs.CreateJob(ctx, &orkv1.CreateJobRequest{
			Spec: spec(i, "nowhere"), Owner: &orkv1.Owner{ProjectId: project + "-probe", UserId: "u-1"}, IdempotencyKey: fmt.Sprintf("probe-%d", i),
		})
		if err != nil {
			continue
		}
		answers = append(answers, time.Since(began))
		if _, err := p.jobs.DeleteJob(ctx, &orkv1.DeleteJobRequest{Id: r.Job.Id}); err != nil && ctx.Err() == nil {
			say("a probing job is not deleted: %v", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(100 * time.Millisecond):
		}
	}
	return answers
}

// writes is how many requests but reads and deletions the worker has sent to the
// cluster, renewals of its Lease and reviews of its rights included.
func (p *platform) writes(ctx context.Context) (int, error) {
	r, err := p.metrics.GetMetrics(ctx, &meshv1.GetMetricsRequest{})
	if err != nil {
		return 0, fmt.Errorf("read the worker's metrics: %w", err)
	}
	sum := 0
	for _, line := range strings.Split(string(r.Exposition), "\n") {
		if !strings.HasPrefix(line, "cosmicac_rack_cluster_requests_total{") {
			continue
		}
		for _, method := range []string{"POST", "PUT", "PATCH"} {
			if strings.Contains(line, `method="`+method+`"`) {
				n, err := strconv.ParseFloat(line[strings.LastIndexByte(line, ' ')+1:], 64)
				if err != nil {
					return 0, fmt.Errorf("read the worker's metrics: %w", err)
				}
				sum += int(n)
			}
		}
	}
	return sum, nil
}
