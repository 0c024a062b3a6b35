package placement

import (
	"flag"
	"fmt"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

// TestMain tries thousands of clusters unless told otherwise; a failure is shrunk
// and names the seed that brings it back (-rapid.seed).
func TestMain(m *testing.M) {
	flag.Parse()
	told := false
	flag.Visit(func(f *flag.Flag) { told = told || f.Name == "rapid.checks" })
	if !told {
		if err := flag.Set("rapid.checks", "2000"); err != nil {
			panic(err)
		}
	}
	os.Exit(m.Run())
}

// clusters draws any cluster, sane or not.
func clusters(t *rapid.T) Snapshot {
	models := []string{h100, strings.ToLower(h100), "GA100_A100", "AD102_L40S"}
	var s Snapshot
	for i := range rapid.IntRange(0, 4).Draw(t, "racks") {
		r := Rack{
			ID: fmt.Sprintf("rk%d", i), Location: rapid.SampledFrom([]string{"us", "de"}).Draw(t, "location"),
			MaximumGPUs: rapid.SampledFrom([]uint32{0, 0, 4, 16}).Draw(t, "maximum"), Held: rapid.Uint32Range(0, 20).Draw(t, "held"),
			Cordoned: rapid.SampledFrom([]bool{false, false, false, true}).Draw(t, "cordoned"),
			Reported: rapid.SampledFrom([]bool{true, true, true, false}).Draw(t, "reported"),
			Fabric:   rapid.Bool().Draw(t, "fabric"), BoardCounts: rapid.SampledFrom([][]uint32{nil, {1, 2, 4, 8}, {1, 2, 3, 4, 5, 6, 7}}).Draw(t, "board"),
		}
		r.Connected = r.Reported && rapid.SampledFrom([]bool{true, true, false}).Draw(t, "connected")
		if rapid.SampledFrom([]bool{false, false, true}).Draw(t, "bounded") {
			r.AllowedModels = []string{h100}
		}
		for k := range rapid.IntRange(0, 5).Draw(t, "nodes") {
			n := Node{
				Name: fmt.Sprintf("n%d", k), Schedulable: rapid.SampledFrom([]bool{true, true, false}).Draw(t, "schedulable"),
				TotalCPUCores: rapid.Uint32Range(0, 256).Draw(t, "cpu"), TotalMemoryBytes: rapid.Uint64Range(0, 2048).Draw(t, "memory") * gib,
			}
			n.FreeCPUCores = rapid.Uint32Range(0, n.TotalCPUCores).Draw(t, "free cpu")
			n.FreeMemoryBytes = rapid.Uint64Range(0, n.TotalMemoryBytes/gib).Draw(t, "free memory") * gib
			for _, m := range models[:rapid.IntRange(0, len(models)).Draw(t, "models")] {
				if n.gpu(m) != nil {
					continue
				}
				n.GPUs = append(n.GPUs, GPU{Model: m, Total: rapid.Uint32Range(0, 16).Draw(t, "total"), Offerable: rapid.Uint32Range(0, 20).Draw(t, "offerable")})
			}
			r.Nodes = append(r.Nodes, n)
		}
		s.Racks = append(s.Racks, r)
	}
	for range rapid.IntRange(0, 2).Draw(t, "quarantines") {
		s.Quarantined = append(s.Quarantined, Quarantine{
			RackID: rapid.SampledFrom([]string{"rk0", "rk1", "rk2"}).Draw(t, "quarantined rack"),
			Node:   rapid.SampledFrom([]string{"", "n0", "n1"}).Draw(t, "quarantined node"),
			Model:  rapid.SampledFrom([]string{"", h100}).Draw(t, "quarantined model"),
		})
	}
	return s
}

func requests(t *rapid.T) Request {
	return Request{
		Location: rapid.SampledFrom([]string{"us", "us", "de", "mars"}).Draw(t, "in"),
		Model:    rapid.SampledFrom([]string{h100, h100, "GA100_A100", "TYPO"}).Draw(t, "model"),
		Count:    rapid.OneOf(rapid.Uint32Range(0, 9), rapid.SampledFrom([]uint32{1, 2, 8, 16, 24}), rapid.Uint32Range(10, 4096)).Draw(t, "count"),

		CPUCoresPerGPU: rapid.Uint32Range(0, 24).Draw(t, "cores"), MemoryGiBPerGPU: rapid.Uint32Range(0, 128).Draw(t, "gib"),
		Spans: rapid.Bool().Draw(t, "spans"), Spread: rapid.Bool().Draw(t, "spread"),
		AvoidNodes: rapid.SliceOfN(places, 0, 2).Draw(t, "avoid"), Beside: rapid.SliceOfN(places, 0, 2).Draw(t, "beside"),
		PreferNode: rapid.SampledFrom([]string{"", "", "n1"}).Draw(t, "prefer"),
	}
}

var places = rapid.Custom(func(t *rapid.T) string {
	return fmt.Sprintf("rk%d/n%d", rapid.IntRange(0, 3).Draw(t, "rack"), rapid.IntRange(0, 4).Draw(t, "node"))
})

func TestAnyBatchOnAnyClusterNeverOverPlacesAndIsDeterministic(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		s := clusters(t)
		left := s.Clone() // what the test itself counts down
		pass := Open(s)
		for _, q := range rapid.SliceOfN(rapid.Custom(requests), 1, 12).Draw(t, "batch") {
			p, refusal := pass.Plan(q)
			// A pass that took much answers like a fresh one on what is left.
			again, refusalAgain := New(s, q)
			// The words of a refusal may be those of an earlier moment of the pass.
			if !reflect.DeepEqual(p, again) || (refusal == nil) != (refusalAgain == nil) || (refusal != nil && refusal.Final != refusalAgain.Final) {
				t.Fatalf("not deterministic: %+v %+v, then %+v %+v", p, refusal, again, refusalAgain)
			}
			if refusal != nil {
				if refusal.Message == "" || refusal.Reason == orkv1.Reason_REASON_UNSPECIFIED {
					t.Fatalf("a refusal without a word: %+v", refusal)
				}
				continue
			}
			charge(t, &left, p, q)
			pass.Take(p, q)
			if rapid.IntRange(0, 3).Draw(t, "ends") == 0 {
				pass.Release(p, q)
				refund(&left, p, q)
			}
		}
	})
}

// charge counts a plan against what is left and fails where it cannot be.
func charge(t *rapid.T, s *Snapshot, p Plan, q Request) {
	var r *Rack
	for i := range s.Racks {
		if s.Racks[i].ID == p.RackID {
			r = &s.Racks[i]
		}
	}
	switch {
	case r == nil, r.Location != q.Location, r.Cordoned, !r.Connected, q.Count > 0 && !r.allows(q.Model):
		t.Fatalf("%+v placed on a rack that may not take it: %+v", q, r)
	case len(p.Nodes) > 1 && (!q.Spans || !r.Fabric):
		t.Fatalf("%+v spans nodes: %+v", q, p)
	}
	var sum uint32
	seen := map[string]bool{}
	for _, pn := range p.Nodes {
		if seen[pn.Node] || pn.GPUs != p.Nodes[0].GPUs {
			t.Fatalf("unequal or doubled nodes: %+v", p)
		}
		seen[pn.Node] = true
		sum += pn.GPUs
		for i := range r.Nodes {
			n := &r.Nodes[i]
			if n.Name != pn.Node {
				continue
			}
			for _, out := range s.Quarantined {
				if out.RackID == r.ID && (out.Node == "" || out.Node == n.Name) && (out.Model == "" || q.Count > 0 && strings.EqualFold(out.Model, q.Model)) {
					t.Fatalf("%+v placed in quarantine: %+v", q, out)
				}
			}
			if q.Count > 0 && Board(q.Model) && pn.GPUs != 1 && pn.GPUs != n.gpu(q.Model).Total && !slices.Contains(r.BoardCounts, pn.GPUs) {
				t.Fatalf("%+v takes %d of a board: %+v", q, pn.GPUs, r)
			}
			if !n.Schedulable || n.FreeCPUCores < q.cores(pn.GPUs) || n.FreeMemoryBytes < q.memory(pn.GPUs) || (q.Count > 0 && n.offerable(q.Model) < pn.GPUs) {
				t.Fatalf("%+v over-places node %+v with %+v", q, *n, p)
			}
			n.FreeCPUCores -= q.cores(pn.GPUs)
			n.FreeMemoryBytes -= q.memory(pn.GPUs)
			if g := n.gpu(q.Model); g != nil && q.Count > 0 {
				g.Offerable = min(g.Offerable, g.Total) - pn.GPUs
			}
		}
	}
	if sum != q.Count {
		t.Fatalf("%+v got %d GPUs", q, sum)
	}
	if r.Held += sum; q.Count > 0 && r.MaximumGPUs > 0 && r.Held > r.MaximumGPUs {
		t.Fatalf("rack %s holds %d of %d", r.ID, r.Held, r.MaximumGPUs)
	}
}

// refund gives back what charge took.
func refund(s *Snapshot, p Plan, q Request) {
	for i := range s.Racks {
		r := &s.Racks[i]
		for _, pn := range p.Nodes {
			for k := range r.Nodes {
				n := &r.Nodes[k]
				if r.ID != p.RackID || n.Name != pn.Node {
					continue
				}
				r.Held -= pn.GPUs
				n.FreeCPUCores += q.cores(pn.GPUs)
				n.FreeMemoryBytes += q.memory(pn.GPUs)
				if g := n.gpu(q.Model); g != nil && q.Count > 0 {
					g.Offerable += pn.GPUs
				}
			}
		}
	}
}

func TestNeverFitsDoesNotDependOnWhatIsFree(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		s, q := clusters(t), requests(t)
		_, before := New(s, q)
		full := s.Clone()
		for i := range full.Racks {
			for k := range full.Racks[i].Nodes {
				n := &full.Racks[i].Nodes[k]
				n.FreeCPUCores, n.FreeMemoryBytes = 0, 0
				for g := range n.GPUs {
					n.GPUs[g].Offerable = 0
				}
			}
		}
		_, after := New(full, q)
		final := func(r *Refusal) bool { return r != nil && r.Final }
		if final(before) != final(after) {
			t.Fatalf("%+v: final %+v when as it is, %+v when full", q, before, after)
		}
	})
}

// possible answers by trying: is there a rack that takes work now, and so many
// nodes of it that have the equal parts free?
func possible(s Snapshot, q Request) bool {
	usable := func(r *Rack, n *Node) bool {
		for _, out := range s.Quarantined {
			if out.RackID == r.ID && (out.Node == "" || out.Node == n.Name) && (out.Model == "" || q.Count > 0 && strings.EqualFold(out.Model, q.Model)) {
				return false
			}
		}
		return n.Schedulable
	}
	var largest uint32
	for i := range s.Racks {
		for k := range s.Racks[i].Nodes {
			if r := &s.Racks[i]; r.Location == q.Location && r.allows(q.Model) {
				if g := r.Nodes[k].gpu(q.Model); g != nil {
					largest = max(largest, g.Total)
				}
			}
		}
	}
	if q.Count > 0 && largest == 0 {
		return false
	}
	spans := q.Spans && q.Count > largest && largest > 0
	for i := range s.Racks {
		r := &s.Racks[i]
		switch {
		case r.Location != q.Location, r.Cordoned, !r.Connected, !r.Reported, q.Count > 0 && !r.allows(q.Model), spans && !r.Fabric:
			continue
		case q.Count > 0 && r.MaximumGPUs > 0 && r.Held+q.Count > r.MaximumGPUs:
			continue
		}
		most := uint32(1)
		if spans {
			most = uint32(len(r.Nodes))
		}
		for nodes := uint32(1); nodes <= most; nodes++ {
			if q.Count%nodes != 0 || (spans && nodes == 1) {
				continue
			}
			per, holding := q.Count/nodes, uint32(0)
			for k := range r.Nodes {
				n := &r.Nodes[k]
				if !usable(r, n) || n.FreeCPUCores < max(per, 1)*q.CPUCoresPerGPU || n.FreeMemoryBytes < uint64(max(per, 1))*uint64(q.MemoryGiBPerGPU)*gib {
					continue
				}
				if per > 0 {
					g := n.gpu(q.Model)
					if g == nil || min(g.Offerable, g.Total) < per || (Board(q.Model) && per > 1 && per != g.Total && !slices.Contains(r.BoardCounts, per)) {
						continue
					}
				}
				holding++
			}
			if holding >= nodes {
				return true
			}
		}
	}
	return false
}

func TestThereIsAPlanIfAndOnlyIfTryingEverythingFindsOne(t *testing.T) {
	t.Parallel()
	plans := 0
	rapid.Check(t, func(t *rapid.T) {
		s, q := clusters(t), requests(t)
		p, refusal := New(s, q)
		if (refusal == nil) != possible(s, q) {
			t.Fatalf("%+v: plan %+v, refusal %+v; trying everything says %v", q, p, refusal, possible(s, q))
		}
		if refusal == nil {
			plans++
		}
	})
	if plans == 0 {
		t.Error("no request of any cluster had a plan: the test tries nothing")
	}
}

func TestMoreThatIsFreeNeverTurnsAPlanIntoARefusal(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		s, q := clusters(t), requests(t)
		if _, refusal := New(s, q); refusal != nil {
			return // nothing to lose
		}
		for i := range s.Racks {
			for k := range s.Racks[i].Nodes {
				n := &s.Racks[i].Nodes[k]
				n.FreeCPUCores += rapid.Uint32Range(0, n.TotalCPUCores-n.FreeCPUCores).Draw(t, "more cpu")
				n.FreeMemoryBytes += rapid.Uint64Range(0, n.TotalMemoryBytes-n.FreeMemoryBytes).Draw(t, "more memory")
				for g := range n.GPUs {
					n.GPUs[g].Offerable += rapid.Uint32Range(0, 4).Draw(t, "more GPUs")
				}
			}
		}
		if _, refusal := New(s, q); refusal != nil {
			t.Fatalf("%+v was placed, and with more free it is refused: %+v", q, refusal)
		}
	})
}

func TestAGangIsEqualNodesOfOneRackOrNothing(t *testing.T) {
	t.Parallel()
	gangs := 0
	rapid.Check(t, func(t *rapid.T) {
		var s Snapshot
		for i := range rapid.IntRange(1, 3).Draw(t, "racks") {
			r := Rack{ID: fmt.Sprintf("rk%d", i), Location: "us", Reported: true, Connected: true, Fabric: rapid.IntRange(0, 3).Draw(t, "fabric") > 0}
			for k := range rapid.IntRange(1, 6).Draw(t, "nodes") {
				r.Nodes = append(r.Nodes, node(fmt.Sprintf("n%d", k), 8, rapid.SampledFrom([]uint32{0, 4, 8, 8}).Draw(t, "free")))
			}
			s.Racks = append(s.Racks, r)
		}
		q := want(8 * rapid.Uint32Range(2, 4).Draw(t, "size"))
		q.Spans = true
		p, refusal := New(s, q)
		whole := map[string]uint32{}
		for _, r := range s.Racks {
			for _, n := range r.Nodes {
				if r.Fabric && n.GPUs[0].Offerable == 8 {
					whole[r.ID]++
				}
			}
		}
		fits := false
		for _, n := range whole {
			fits = fits || n >= q.Count/8
		}
		if refusal != nil {
			if fits {
				t.Fatalf("%+v on %v: %+v", q, whole, refusal)
			}
			return
		}
		gangs++
		seen := map[string]bool{}
		for _, n := range p.Nodes {
			if n.GPUs != 8 || seen[n.Node] {
				t.Fatalf("%+v: want whole nodes, each once", p)
			}
			seen[n.Node] = true
		}
		if !fits || len(p.Nodes) != int(q.Count/8) {
			t.Fatalf("%+v for %+v on %v", p, q, whole)
		}
	})
	if gangs == 0 {
		t.Error("no gang was ever placed")
	}
}
