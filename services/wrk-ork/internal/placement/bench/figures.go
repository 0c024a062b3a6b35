package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/placement"
)

// figure is one measured number.
type figure struct {
	Figure  string  `json:"figure"`
	Subject string  `json:"subject"`
	Value   float64 `json:"value"`
	Unit    string  `json:"unit"`
	N       int     `json:"n"`
}

const (
	gpusANode = 8
	full      = 0.7
	model     = "GH100_H100_SXM5_80GB"
)

// measure reads flags and reports every figure.
func measure() error {
	nodes := flag.Int("nodes", 10_000, "nodes of 8 GPUs")
	placements := flag.Int("placements", 10_000, "placements to make")
	gangs := flag.Int("gangs", 1000, "gangs of 2 to 4 whole nodes to place")
	churn := flag.Int("churn", 60_000, "jobs that come and go in the comparison")
	seed := flag.Uint64("seed", 1, "of everything that is drawn")
	file := flag.String("json", "", "write one object a line to this file, too")
	flag.Parse()
	runtime.GOMAXPROCS(1)
	var all []figure
	for _, racks := range []int{50, 1} {
		all = append(all, speed(racks, *nodes, *placements, *gangs, *seed)...)
	}
	all = append(all, queue(*nodes, *placements, *seed)...)
	all = append(all, figure{"memory", "peak of the process", float64(peakBytes()) / (1 << 20), "MB", 1})
	for _, s := range strategies(*nodes, *seed) {
		all = append(all, compare(s, *nodes, *churn, *seed)...)
	}
	return report(os.Stdout, *file, all)
}

// report prints a table and, with a file, the same as lines of JSON.
func report(out io.Writer, file string, all []figure) error {
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "figure\tsubject\tvalue\tunit\tn")
	for _, f := range all {
		fmt.Fprintf(t, "%s\t%s\t%.4g\t%s\t%d\n", f.Figure, f.Subject, f.Value, f.Unit, f.N)
	}
	if err := t.Flush(); err != nil || file == "" {
		return err
	}
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	e := json.NewEncoder(f)
	for _, one := range all {
		if err := e.Encode(one); err != nil {
			return err
		}
	}
	return f.Close()
}

func peakBytes() int64 {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return u.Maxrss << 10
}

// cluster is so many empty nodes in racks of one size.
func cluster(racks, nodes int) placement.Snapshot {
	var s placement.Snapshot
	for i := range racks {
		r := placement.Rack{
			ID: fmt.Sprintf("rk-%03d", i), Location: "us", Reported: true, Connected: true, Fabric: true, BoardCounts: []uint32{1, 2, 4, 8},
		}
		for k := range nodes / racks {
			r.Nodes = append(r.Nodes, placement.Node{
				Name: fmt.Sprintf("n%05d", k), Schedulable: true,
				FreeCPUCores: nodeCores, TotalCPUCores: nodeCores, FreeMemoryBytes: nodeMemory << 30, TotalMemoryBytes: nodeMemory << 30,
				GPUs: []placement.GPU{{Model: model, Total: gpusANode, Offerable: gpusANode}},
			})
		}
		s.Racks = append(s.Racks, r)
	}
	return s
}

const (
	nodeCores  = 192
	nodeMemory = 2048 // GiB
)

// draw makes a job as people ask for them: mostly small.
func draw(r *rand.Rand) placement.Request {
	sizes := []uint32{1, 1, 1, 1, 1, 2, 2, 4, 4, 8}
	return placement.Request{
		Location: "us", Model: model, Count: sizes[r.IntN(len(sizes))],
		CPUCoresPerGPU: []uint32{8, 8, 16, 24}[r.IntN(4)], MemoryGiBPerGPU: []uint32{32, 64, 128, 224}[r.IntN(4)],
	}
}

type running struct {
	plan placement.Plan
	q    placement.Request
}

// filled opens a cluster and fills it to 70 %.
func filled(racks, nodes int, r *rand.Rand) (pass *placement.Pass, jobs []running, held int) {
	pass = placement.Open(cluster(racks, nodes))
	for held < int(full*float64(nodes*gpusANode)) {
		q := draw(r)
		plan, refusal := pass.Plan(q)
		if refusal != nil {
			continue
		}
		pass.Take(plan, q)
		jobs = append(jobs, running{plan, q})
		held += int(q.Count)
	}
	return pass, jobs, held
}

// speed times single placements and gangs on a full cluster. As each comes, others
// end at random, so that it stays as full; what ends is not timed.
func speed(racks, nodes, placements, gangs int, seed uint64) []figure {
	r := rand.New(rand.NewPCG(seed, 1))
	pass, jobs, held := filled(racks, nodes, r)
	end := func() {
		i := r.IntN(len(jobs))
		pass.Release(jobs[i].plan, jobs[i].q)
		held -= int(jobs[i].q.Count)
		jobs[i] = jobs[len(jobs)-1]
		jobs = jobs[:len(jobs)-1]
	}
	var spent, single []time.Duration
	refused := 0
	place := func(q placement.Request) {
		start := time.Now()
		plan, refusal := pass.Plan(q)
		if refusal == nil {
			pass.Take(plan, q)
		}
		took := time.Since(start)
		if q.Spans {
			spent = append(spent, took)
		} else {
			single = append(single, took)
		}
		if refusal != nil {
			refused++
			return
		}
		held += int(q.Count)
		jobs = append(jobs, running{plan, q})
		for held > int(full*float64(nodes*gpusANode)) {
			end()
		}
	}
	for i := range placements {
		place(draw(r))
		if gangs > 0 && i%max(placements/gangs, 1) == 0 {
			q := draw(r)
			q.Count, q.Spans = gpusANode*uint32(2+r.IntN(3)), true
			q.CPUCoresPerGPU = min(q.CPUCoresPerGPU, nodeCores/gpusANode)
			place(q)
		}
	}
	subject := fmt.Sprintf("%d nodes in %d racks, %.0f %% full", nodes, racks, full*100)
	out := []figure{
		{"placements", subject, rate(single), "1/s", len(single)},
		{"placement p50", subject, quantile(single, 0.5), "us", len(single)},
		{"placement p99", subject, quantile(single, 0.99), "us", len(single)},
		{"gangs of 2 to 4 nodes", subject, rate(spent), "1/s", len(spent)},
		{"gang p99", subject, quantile(spent, 0.99), "us", len(spent)},
		{"refused", subject, float64(refused), "of them", len(single) + len(spent)},
	}
	return out
}

func rate(all []time.Duration) float64 {
	var sum time.Duration
	for _, d := range all {
		sum += d
	}
	return float64(len(all)) / sum.Seconds()
}

func quantile(all []time.Duration, q float64) float64 {
	if len(all) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(all))
	return float64(sorted[int(q*float64(len(sorted)-1))].Nanoseconds()) / 1000
}

// queue times one whole pass over many who wait, more than fit: from the snapshot to
// a decision for each.
func queue(nodes, waiting int, seed uint64) []figure {
	r := rand.New(rand.NewPCG(seed, 2))
	_, jobs, _ := filled(50, nodes, r)
	s := cluster(50, nodes)
	var list []placement.Waiting
	for i := range waiting {
		list = append(list, placement.Waiting{
			ID: fmt.Sprintf("a-%05d", i), JobID: fmt.Sprintf("j-%05d", i), Project: "p", Priority: int32(r.IntN(3)),
			Waited: time.Duration(r.IntN(3600)) * time.Second, Request: draw(r),
		})
	}
	start := time.Now()
	pass := placement.Open(s)
	opened := time.Since(start)
	for _, j := range jobs {
		pass.Take(j.plan, j.q)
	}
	start = time.Now()
	decisions := placement.Decide(pass, list, placement.Policy{Quotas: map[string]placement.Quota{"p": {Unlimited: true}}, ReserveAfter: 10 * time.Minute, Age: 10 * time.Minute})
	took := time.Since(start)
	placed := 0
	for _, d := range decisions {
		if d.Refusal == nil {
			placed++
		}
	}
	subject := fmt.Sprintf("%d wait on %d nodes", waiting, nodes)
	return []figure{
		{"opening a snapshot", subject, float64(opened.Microseconds()) / 1000, "ms", 1},
		{"decisions of one pass", subject, float64(len(decisions)) / took.Seconds(), "1/s", len(decisions)},
		{"placed by it", subject, float64(placed), "jobs", len(decisions)},
	}
}
