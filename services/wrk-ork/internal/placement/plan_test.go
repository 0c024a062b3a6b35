package placement

import (
	"fmt"
	"reflect"
	"strings"
	"testing"

	"pgregory.net/rapid"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

const h100 = "GH100_H100_SXM5_80GB"

// node is a machine with total GPUs of which free are offered, and plenty else.
func node(name string, total, free uint32) Node {
	return Node{
		Name: name, Schedulable: true, FreeCPUCores: 256, TotalCPUCores: 256,
		FreeMemoryBytes: 2048 * gib, TotalMemoryBytes: 2048 * gib,
		GPUs: []GPU{{Model: h100, Total: total, Offerable: free}},
	}
}

func rackOf(id string, nodes ...Node) Rack {
	return Rack{ID: id, Location: "us", Reported: true, Connected: true, Nodes: nodes}
}

func want(count uint32) Request {
	return Request{Location: "us", Model: h100, Count: count, CPUCoresPerGPU: 8, MemoryGiBPerGPU: 32}
}

func TestTightestNodeIsChosenSoThatWholeNodesStayEmpty(t *testing.T) {
	t.Parallel()
	s := Snapshot{Racks: []Rack{rackOf("r", node("a", 8, 8), node("b", 8, 3), node("c", 8, 5))}}
	for count, wanted := range map[uint32]string{1: "b", 3: "b", 4: "c", 6: "a", 8: "a"} {
		p, refusal := New(s, want(count))
		if refusal != nil || p.Nodes[0].Node != wanted {
			t.Errorf("%d GPUs: %+v %+v, want node %s", count, p, refusal, wanted)
		}
	}
}

func TestModelIsMatchedWithoutRegardToCaseAndSpeltAsTheRackDoes(t *testing.T) {
	t.Parallel()
	q := want(1)
	q.Model = strings.ToLower(h100)
	p, refusal := New(Snapshot{Racks: []Rack{rackOf("r", node("a", 8, 8))}}, q)
	if refusal != nil || p.Model != h100 {
		t.Errorf("%+v %+v", p, refusal)
	}
}

func TestEveryRefusalHasItsOwnCodeAndSaysWhatWouldHaveToChange(t *testing.T) {
	t.Parallel()
	full := Snapshot{Racks: []Rack{rackOf("r1", node("a", 4, 0), node("b", 4, 0))}}
	cordoned := Snapshot{Racks: []Rack{rackOf("r1", node("a", 4, 4))}}
	cordoned.Racks[0].Cordoned = true
	closed := Snapshot{Racks: []Rack{rackOf("r1", node("a", 4, 4))}}
	closed.Racks[0].Nodes[0].Schedulable = false
	away := Snapshot{Racks: []Rack{rackOf("r1", node("a", 4, 4))}}
	away.Racks[0].Connected = false
	silent := Snapshot{Racks: []Rack{{ID: "r1", Location: "us"}}}
	poor := Snapshot{Racks: []Rack{rackOf("r1", node("a", 4, 4))}}
	poor.Racks[0].Nodes[0].FreeCPUCores = 4
	bounded := Snapshot{Racks: []Rack{rackOf("r1", node("a", 8, 8))}}
	bounded.Racks[0].MaximumGPUs, bounded.Racks[0].Held = 4, 3
	barred := Snapshot{Racks: []Rack{rackOf("r1", node("a", 8, 8))}}
	barred.Racks[0].AllowedModels = []string{"OTHER"}

	other := want(1)
	other.Location = "mars"
	odd := want(1)
	odd.Model = "TYPO"
	greedy := want(4)
	greedy.CPUCoresPerGPU = 100
	vllm := want(8)
	vllm.Spans = true
	bound := want(1)
	bound.RackID = "gone"

	for name, c := range map[string]struct {
		s      Snapshot
		q      Request
		reason orkv1.Reason
		final  bool
		words  string
	}{
		"no such location":       {full, other, orkv1.Reason_REASON_UNKNOWN_LOCATION, true, "racks are in: us"},
		"no such model":          {full, odd, orkv1.Reason_REASON_UNKNOWN_MODEL, true, h100},
		"model barred by entry":  {barred, want(1), orkv1.Reason_REASON_UNKNOWN_MODEL, true, "does not allow it"},
		"more than a node has":   {full, want(8), orkv1.Reason_REASON_NEVER_FITS, true, "ask for 4 or fewer"},
		"more CPU than there is": {full, greedy, orkv1.Reason_REASON_NEVER_FITS, true, "lower cpu_cores_per_gpu"},
		"all held":               {full, want(1), orkv1.Reason_REASON_BUSY, false, "0 of 8"},
		"free in parts":          {Snapshot{Racks: []Rack{rackOf("r1", node("a", 8, 4), node("b", 8, 4))}}, want(8), orkv1.Reason_REASON_BUSY, false, "most on one node is 4"},
		"GPU free, CPU not":      {poor, want(1), orkv1.Reason_REASON_BUSY, false, "CPU or memory is not"},
		"entry's maximum":        {bounded, want(2), orkv1.Reason_REASON_BUSY, false, "allows 4 at once"},
		"above the maximum":      {bounded, want(5), orkv1.Reason_REASON_NEVER_FITS, true, "maximum in the entry of rack r1"},
		"rack cordoned":          {cordoned, want(1), orkv1.Reason_REASON_CORDONED, false, "uncordons"},
		"nodes closed":           {closed, want(1), orkv1.Reason_REASON_CORDONED, false, "closed to new work"},
		"worker away":            {away, want(1), orkv1.Reason_REASON_RACK_UNREACHABLE, false, "r1"},
		"worker silent so far":   {silent, want(1), orkv1.Reason_REASON_RACK_UNREACHABLE, false, "first report"},
		"spans without fabric":   {full, vllm, orkv1.Reason_REASON_NO_FABRIC, true, "InfiniBand"},
		"its rack was removed":   {full, bound, orkv1.Reason_REASON_RACK_FORGOTTEN, true, "root disk"},
	} {
		p, refusal := New(c.s, c.q)
		if refusal == nil {
			t.Errorf("%s: placed on %+v", name, p)
			continue
		}
		if refusal.Reason != c.reason || refusal.Final != c.final || !strings.Contains(refusal.Message, c.words) {
			t.Errorf("%s: got %s final=%v %q; want %s final=%v with %q", name, refusal.Reason, refusal.Final, refusal.Message, c.reason, c.final, c.words)
		}
	}
}

func TestWhatIsFreeNeverMakesAReplicaSpanNodes(t *testing.T) {
	t.Parallel()
	r := rackOf("r", node("a", 8, 4), node("b", 8, 4))
	r.Fabric = true
	q := want(8)
	q.Spans = true
	if p, refusal := New(Snapshot{Racks: []Rack{r}}, q); refusal == nil || refusal.Reason != orkv1.Reason_REASON_BUSY {
		t.Errorf("%+v %+v: 8 fit one node when empty, so it waits", p, refusal)
	}
	r = rackOf("r", node("a", 8, 8), node("b", 8, 8), node("c", 8, 8))
	r.Fabric = true
	q.Count = 16
	p, refusal := New(Snapshot{Racks: []Rack{r}}, q)
	if refusal != nil || len(p.Nodes) != 2 || p.Nodes[0].GPUs != 8 || p.Nodes[1].GPUs != 8 {
		t.Errorf("%+v %+v: want two whole nodes", p, refusal)
	}
}

func TestWorkWithoutGPUsKeepsOffGPUNodes(t *testing.T) {
	t.Parallel()
	bare := node("plain", 0, 0)
	bare.GPUs = nil
	q := Request{Location: "us", CPUCoresPerGPU: 2, MemoryGiBPerGPU: 4}
	p, refusal := New(Snapshot{Racks: []Rack{rackOf("r", node("gpu", 8, 8), bare)}}, q)
	if refusal != nil || p.Nodes[0].Node != "plain" || p.Nodes[0].GPUs != 0 {
		t.Errorf("%+v %+v", p, refusal)
	}
}

func TestAJobThatWaitedLongestGetsItsNodeKept(t *testing.T) {
	t.Parallel()
	s := Snapshot{Racks: []Rack{rackOf("r", node("a", 8, 1), node("b", 8, 5))}}
	if kept := s.Hold(want(8), "j-head"); !reflect.DeepEqual(kept, []string{"b"}) {
		t.Fatalf("kept %v", kept)
	}
	p, refusal := New(s, want(1))
	if refusal != nil || p.Nodes[0].Node != "a" {
		t.Errorf("%+v %+v: smaller work goes elsewhere", p, refusal)
	}
	if _, refusal := New(s, want(2)); refusal == nil || !strings.Contains(refusal.Message, "j-head") {
		t.Errorf("%+v: want the waiting job named", refusal)
	}
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
			Fabric:   rapid.Bool().Draw(t, "fabric"),
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
	return s
}

func requests(t *rapid.T) Request {
	return Request{
		Location: rapid.SampledFrom([]string{"us", "de", "mars"}).Draw(t, "in"),
		Model:    rapid.SampledFrom([]string{h100, "GA100_A100", "TYPO"}).Draw(t, "model"),
		Count:    rapid.OneOf(rapid.Uint32Range(0, 9), rapid.Uint32Range(10, 4096)).Draw(t, "count"),

		CPUCoresPerGPU: rapid.Uint32Range(0, 64).Draw(t, "cores"), MemoryGiBPerGPU: rapid.Uint32Range(0, 256).Draw(t, "gib"),
		Spans: rapid.Bool().Draw(t, "spans"),
	}
}

func TestAnyBatchOnAnyClusterNeverOverPlacesAndIsDeterministic(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		s := clusters(t)
		truth := s.Clone()
		left := s.Clone() // what the test itself counts down
		batch := rapid.SliceOfN(rapid.Custom(requests), 1, 12).Draw(t, "batch")
		for _, q := range batch {
			p, refusal := New(s, q)
			again, refusalAgain := New(s.Clone(), q)
			if !reflect.DeepEqual(p, again) || !reflect.DeepEqual(refusal, refusalAgain) {
				t.Fatalf("not deterministic: %+v %+v, then %+v %+v", p, refusal, again, refusalAgain)
			}
			if refusal != nil {
				if refusal.Message == "" || refusal.Reason == orkv1.Reason_REASON_UNSPECIFIED {
					t.Fatalf("a refusal without a word: %+v", refusal)
				}
				continue
			}
			charge(t, &left, p, q)
			s.Take(p, q)
		}
		for i, r := range s.Racks {
			for k, n := range r.Nodes {
				was := truth.Racks[i].Nodes[k]
				if n.FreeCPUCores > was.FreeCPUCores || n.FreeMemoryBytes > was.FreeMemoryBytes {
					t.Fatalf("node %s of %s went below zero: %+v was %+v", n.Name, r.ID, n, was)
				}
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
	case r == nil, r.Location != q.Location, r.Cordoned, !r.Connected, !r.allows(q.Model):
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
			if !n.Schedulable || n.FreeCPUCores < q.cores(pn.GPUs) || n.FreeMemoryBytes < q.memory(pn.GPUs) || n.offerable(q.Model) < pn.GPUs {
				t.Fatalf("%+v over-places node %+v with %+v", q, *n, p)
			}
			n.FreeCPUCores -= q.cores(pn.GPUs)
			n.FreeMemoryBytes -= q.memory(pn.GPUs)
			if g := n.gpu(q.Model); g != nil {
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
