package claim

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/capacity"
)

const cx7 = "nvidia.com/mlnx_cx7"

// gang is a record over both nodes, each machine with so many GPUs and adapters.
func gang(id string, gpus, adapters int) *Record {
	rec := record(id, "a", gpus)
	rec.Nodes[0].CPUCores = 8
	rec.Nodes = append(rec.Nodes, rec.Nodes[0])
	rec.Nodes[1].Node = "b"
	if adapters > 0 {
		rec.Adapter = cx7
	}
	for k := range rec.Nodes {
		rec.Nodes[k].Adapters = adapters
	}
	return rec
}

func TestAGangIsGrantedWholeWithItsAdaptersOrNothingOfIt(t *testing.T) {
	t.Parallel()
	nodes := []*corev1.Node{node("a"), node("b")}
	for _, n := range nodes {
		n.Status.Capacity[cx7] = resource.MustParse("3") // one map holds both amounts
		n.Status.Capacity["bridge/br-lab"] = resource.MustParse("1k")
	}
	b := NewBook(func(claims []capacity.Claim) *capacity.Rack {
		return capacity.Count(capacity.Input{
			Nodes: nodes, Claims: claims, Entry: &orkv1.RackEntry{Id: "rk"}, Fabric: []string{cx7}, HostDevices: true, Overlay: "bridge/br-lab",
			Permitted: capacity.Permitted{Known: true, Devices: []capacity.Device{{Resource: "nvidia.com/" + model, PCI: "10DE:2330"}, {Resource: cx7, PCI: "15B3:1021"}}},
		})
	}, time.Now)
	grant := func(rec *Record) Refusal {
		t.Helper()
		refused, err := b.Grant(t.Context(), rec, written)
		if err != nil {
			t.Fatal(err)
		}
		return refused
	}
	if r := grant(gang("a-bare", 4, 0)); r.Reason != orkv1.Reason_REASON_CLAIM_REFUSED || !strings.Contains(r.Message, "a, b") {
		t.Errorf("on nodes without adapters in a rack that has some: %v", r)
	}
	none := book(&orkv1.RackEntry{Id: "rk"}, nodes...)
	if r, err := none.Grant(t.Context(), gang("a-bare", 4, 0), written); err != nil || r.Reason != orkv1.Reason_REASON_NO_FABRIC {
		t.Errorf("in a rack without a fabric: %v, %v", r, err)
	}
	if r := grant(gang("a-one", 4, 2)); !r.OK() {
		t.Fatalf("the first: %v", r)
	}
	r := grant(gang("a-two", 4, 2))
	if r.Reason != orkv1.Reason_REASON_BUSY || !strings.Contains(r.Message, "1 "+cx7+" free, 2 are wanted") || b.Holds("a-two") {
		t.Errorf("the second: %v", r)
	}
	if n := b.Rack().Nodes["b"].Adapters[cx7]; n.Held != 2 || n.Free() != 1 {
		t.Errorf("held %d, free %d", n.Held, n.Free())
	}
	if r := grant(gang("a-three", 4, 1)); !r.OK() {
		t.Errorf("the third: %v", r)
	}
	b.Release("a-one")
	if n := b.Rack().Nodes["a"].Adapters[cx7]; n.Held != 1 {
		t.Errorf("after a release: held %d", n.Held)
	}
}
