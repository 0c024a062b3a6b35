package main

import (
	"math"
	"math/rand/v2"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/placement"
)

// strategy places jobs on its own copy of one cluster.
type strategy struct {
	name string
	// place returns the index of the node, or -1.
	place func(placement.Request) int
	// take and give book a job on a node and off it.
	take, give func(node int, q placement.Request)
	free       func(node int) int
}

// machine is a node of a simulated strategy.
type machine struct {
	gpus, cores, memory int
}

func (m machine) fits(q placement.Request) bool {
	n := int(q.Count)
	return m.gpus >= n && m.cores >= n*int(q.CPUCoresPerGPU) && m.memory >= n*int(q.MemoryGiBPerGPU)
}

func (m *machine) add(q placement.Request, sign int) {
	n := int(q.Count) * sign
	m.gpus += n
	m.cores += n * int(q.CPUCoresPerGPU)
	m.memory += n * int(q.MemoryGiBPerGPU)
}

func strategies(nodes int, seed uint64) []strategy {
	simulated := func(name string, choose func([]machine, placement.Request) int) strategy {
		all := make([]machine, nodes)
		for i := range all {
			all[i] = machine{gpusANode, nodeCores, nodeMemory}
		}
		return strategy{
			name:  name,
			place: func(q placement.Request) int { return choose(all, q) },
			take:  func(i int, q placement.Request) { all[i].add(q, -1) },
			give:  func(i int, q placement.Request) { all[i].add(q, 1) },
			free:  func(i int) int { return all[i].gpus },
		}
	}
	return []strategy{
		ours(nodes), simulated("first fit", firstFit), simulated("best fit", bestFit),
		simulated("kube-scheduler default", kubeScheduler(rand.New(rand.NewPCG(seed, 4)))),
	}
}

// ours is package placement with one rack.
func ours(nodes int) strategy {
	s := cluster(1, nodes)
	rack := &s.Racks[0]
	index := make(map[string]int, nodes)
	for i := range rack.Nodes {
		index[rack.Nodes[i].Name] = i
	}
	pass := placement.Open(s)
	plan := func(i int, q placement.Request) placement.Plan {
		return placement.Plan{RackID: rack.ID, Model: model, Nodes: []placement.PlanNode{{Node: rack.Nodes[i].Name, GPUs: q.Count}}}
	}
	return strategy{
		name: "wrk-ork, pack",
		place: func(q placement.Request) int {
			p, refusal := pass.Plan(q)
			if refusal != nil {
				return -1
			}
			return index[p.Nodes[0].Node]
		},
		take: func(i int, q placement.Request) { pass.Take(plan(i, q), q) },
		give: func(i int, q placement.Request) { pass.Release(plan(i, q), q) },
		free: func(i int) int { return int(rack.Nodes[i].GPUs[0].Offerable) },
	}
}

func firstFit(all []machine, q placement.Request) int {
	for i := range all {
		if all[i].fits(q) {
			return i
		}
	}
	return -1
}

// bestFit takes the first node with the fewest GPUs left over.
func bestFit(all []machine, q placement.Request) int {
	best := -1
	for i := range all {
		if all[i].fits(q) && (best < 0 || all[i].gpus < all[best].gpus) {
			best = i
		}
	}
	return best
}

// kubeScheduler scores as the default profile of kube-scheduler does: least
// allocated and balanced allocation over CPU and memory, weight 1 each (extended
// resources as GPUs are filtered by and not scored), on the first feasible nodes it
// finds from where it last stopped: 50 % less one for each 125 nodes, at least 5 %
// and at least 100. Among equals it draws.
func kubeScheduler(r *rand.Rand) func([]machine, placement.Request) int {
	from := 0
	return func(all []machine, q placement.Request) int {
		most := len(all) * max(50-len(all)/125, 5) / 100
		most = min(max(most, 100), len(all))
		best, score, equal, found, looked := -1, -1.0, 0, 0, 0
		for ; looked < len(all) && found < most; looked++ {
			i := (from + looked) % len(all)
			m := all[i]
			if !m.fits(q) {
				continue
			}
			found++
			m.add(q, -1)
			cpu, memory := 1-float64(m.cores)/nodeCores, 1-float64(m.memory)/nodeMemory
			is := math.Floor((1-cpu)*100)/2 + math.Floor((1-memory)*100)/2 + math.Floor((1-math.Abs(cpu-memory)/2)*100)
			switch {
			case is > score:
				best, score, equal = i, is, 1
			case is == score:
				if equal++; r.IntN(equal) == 0 {
					best = i
				}
			}
		}
		from = (from + looked) % len(all)
		return best
	}
}

// compare lets the same jobs come and go under one strategy, with the cluster 70 %
// full, and samples what is left: a free GPU is stranded for a whole-node job when
// its node is not empty.
func compare(s strategy, nodes, churn int, seed uint64) []figure {
	type job struct {
		node int
		q    placement.Request
	}
	r := rand.New(rand.NewPCG(seed, 3))
	var jobs []job
	held, refused, samples := 0, 0, 0
	var stranded8, stranded4, whole float64
	for i := range churn {
		q := draw(r)
		end := r.Uint64()
		for held+int(q.Count) > int(full*float64(nodes*gpusANode)) {
			k := int(end % uint64(len(jobs)))
			s.give(jobs[k].node, jobs[k].q)
			held -= int(jobs[k].q.Count)
			jobs[k] = jobs[len(jobs)-1]
			jobs = jobs[:len(jobs)-1]
			end = end*6364136223846793005 + 1442695040888963407
		}
		node := s.place(q)
		if node < 0 {
			refused++
			continue
		}
		s.take(node, q)
		held += int(q.Count)
		jobs = append(jobs, job{node, q})
		if i < churn/2 || i%(max(churn/100, 1)) != 0 {
			continue
		}
		samples++
		for n := range nodes {
			switch free := s.free(n); {
			case free == gpusANode:
				whole++
			case free < 4:
				stranded4 += float64(free)
				stranded8 += float64(free)
			default:
				stranded8 += float64(free)
			}
		}
	}
	all := float64(max(samples, 1) * nodes * gpusANode)
	return []figure{
		{"stranded for 8 GPUs", s.name, 100 * stranded8 / all, "% of all GPUs", samples},
		{"stranded for 4 GPUs", s.name, 100 * stranded4 / all, "% of all GPUs", samples},
		{"empty nodes", s.name, 100 * whole * gpusANode / all, "%", samples},
		{"refused", s.name, float64(refused), "jobs", churn},
	}
}
