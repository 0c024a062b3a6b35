package placement

import (
	"reflect"
	"strings"
	"testing"

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
	return Rack{ID: id, Location: "us", Reported: true, Connected: true, Nodes: nodes, BoardCounts: []uint32{1, 2, 3, 4, 5, 6, 7, 8}}
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
	sick := Snapshot{Racks: []Rack{rackOf("r1", node("a", 4, 4), node("b", 4, 4))}, Quarantined: []Quarantine{
		{RackID: "r1", Node: "a", Model: h100, Why: "5 starts failed in 10 minutes"}, {RackID: "r1", Node: "b"}}}
	board := Snapshot{Racks: []Rack{rackOf("r1", node("a", 8, 8))}}
	board.Racks[0].BoardCounts = nil
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
		"nodes quarantined":      {sick, want(1), orkv1.Reason_REASON_QUARANTINED, false, "5 starts failed"},
		"half a board":           {board, want(4), orkv1.Reason_REASON_FABRIC_COUNT, true, "1, 8"},
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
	p := Open(Snapshot{Racks: []Rack{rackOf("r", node("a", 8, 1), node("b", 8, 5))}})
	if kept := p.Hold(want(8), "j-head"); !reflect.DeepEqual(kept, []string{"b"}) {
		t.Fatalf("kept %v", kept)
	}
	plan, refusal := p.Plan(want(1))
	if refusal != nil || plan.Nodes[0].Node != "a" {
		t.Errorf("%+v %+v: smaller work goes elsewhere", plan, refusal)
	}
	if _, refusal := p.Plan(want(2)); refusal == nil || !strings.Contains(refusal.Message, "j-head") {
		t.Errorf("%+v: want the waiting job named", refusal)
	}
}

func TestTheRestOfARacksMaximumIsKeptToo(t *testing.T) {
	t.Parallel()
	r := rackOf("r", node("a", 8, 8), node("b", 8, 5))
	r.MaximumGPUs, r.Held = 8, 3
	p := Open(Snapshot{Racks: []Rack{r}})
	p.Hold(want(8), "j-head")
	if plan, refusal := p.Plan(want(1)); refusal == nil || !strings.Contains(refusal.Message, "j-head") {
		t.Errorf("%+v %+v: what is left of the maximum is the head's", plan, refusal)
	}
}

func TestAnNVSwitchBoardGivesOneOrAllUnlessItsPartitionsAreKnown(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		model  string
		counts []uint32
		gives  []uint32
	}{
		{h100, nil, []uint32{1, 8}},
		{"GB100_B200", nil, []uint32{1, 8}},
		{h100, []uint32{1, 2, 4, 8}, []uint32{1, 2, 4, 8}},
		{"GH100_H100_PCIE", nil, []uint32{1, 2, 3, 4, 5, 6, 7, 8}},
		{"GH100_H200_NVL", nil, []uint32{1, 2, 3, 4, 5, 6, 7, 8}},
	} {
		n := node("a", 8, 8)
		n.GPUs[0].Model = c.model
		r := rackOf("r", n)
		r.BoardCounts = c.counts
		var gives []uint32
		for count := uint32(1); count <= 8; count++ {
			q := want(count)
			q.Model = c.model
			_, refusal := New(Snapshot{Racks: []Rack{r}}, q)
			switch {
			case refusal == nil:
				gives = append(gives, count)
			case refusal.Reason != orkv1.Reason_REASON_FABRIC_COUNT || !refusal.Final:
				t.Errorf("%d of %s: %+v", count, c.model, refusal)
			}
		}
		if !reflect.DeepEqual(gives, c.gives) {
			t.Errorf("%s with %v gives %v, want %v", c.model, c.counts, gives, c.gives)
		}
	}
}

func TestReplicasThatSpreadKeepOffEachOther(t *testing.T) {
	t.Parallel()
	p := Open(Snapshot{Racks: []Rack{rackOf("r1", node("a", 8, 8), node("b", 8, 6)), rackOf("r2", node("c", 8, 2))}})
	q := want(1)
	q.Spread = true
	var got []string
	for range 4 {
		plan, refusal := p.Plan(q)
		if refusal != nil {
			t.Fatal(refusal)
		}
		p.Take(plan, q)
		q.Beside = append(q.Beside, plan.RackID+"/"+plan.Nodes[0].Node)
		got = append(got, plan.Nodes[0].Node)
	}
	if want := []string{"a", "c", "b", "c"}; !reflect.DeepEqual(got, want) {
		t.Errorf("placed on %v, want %v: the emptiest, then another rack, then another node", got, want)
	}
}

func TestAQuarantineLeavesOutNoMoreThanItNames(t *testing.T) {
	t.Parallel()
	both := node("a", 8, 8)
	both.GPUs = append(both.GPUs, GPU{Model: "AD102_L40S", Total: 4, Offerable: 4})
	s := Snapshot{Racks: []Rack{rackOf("r1", both), rackOf("r2", node("a", 8, 1))}, Quarantined: []Quarantine{{RackID: "r1", Node: "a", Model: strings.ToLower(h100)}}}
	if p, refusal := New(s, want(1)); refusal != nil || p.RackID != "r2" {
		t.Errorf("%+v %+v: the other rack's node of the same name takes it", p, refusal)
	}
	other := want(1)
	other.Model = "AD102_L40S"
	if p, refusal := New(s, other); refusal != nil || p.RackID != "r1" {
		t.Errorf("%+v %+v: the node's other model is well", p, refusal)
	}
	s.Quarantined = append(s.Quarantined, Quarantine{RackID: "r2", Why: "its storage is away"})
	if _, refusal := New(s, want(1)); refusal == nil || refusal.Reason != orkv1.Reason_REASON_QUARANTINED || !strings.Contains(refusal.Message, "storage") {
		t.Errorf("%+v", refusal)
	}
}

func TestADryRunHearsOfEveryRackWhatStandsInItsWay(t *testing.T) {
	t.Parallel()
	cordoned, full, small, away := rackOf("r1", node("a", 8, 8)), rackOf("r2", node("b", 8, 1)), rackOf("r3", node("c", 4, 4)), rackOf("r4", node("d", 8, 8))
	cordoned.Cordoned, away.Connected = true, false
	p := Open(Snapshot{Racks: []Rack{cordoned, full, small, away}})
	got := map[string]orkv1.Reason{}
	for _, r := range p.Explain(want(8)) {
		got[r.RackID] = r.Reason
	}
	if want := map[string]orkv1.Reason{"r1": orkv1.Reason_REASON_CORDONED, "r2": orkv1.Reason_REASON_BUSY, "r3": orkv1.Reason_REASON_NEVER_FITS,
		"r4": orkv1.Reason_REASON_RACK_UNREACHABLE}; !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestRackThatOffersMoreThanItHasIsNotBelieved(t *testing.T) {
	t.Parallel()
	pass := Open(Snapshot{Racks: []Rack{{
		ID: "rk", Location: "us", Reported: true, Connected: true,
		Nodes: []Node{{Name: "n", Schedulable: true, GPUs: []GPU{{Model: h100, Total: 1, Offerable: 20}}}},
	}}})
	q := Request{Location: "us", Model: h100, Count: 1}
	plan, refusal := pass.Plan(q)
	if refusal != nil {
		t.Fatal(refusal)
	}
	pass.Take(plan, q)
	if plan, refusal = pass.Plan(q); refusal == nil {
		t.Fatalf("the only GPU was planned twice: %+v", plan)
	}
}
