package capacity

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"pgregory.net/rapid"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

const (
	cx7    = "nvidia.com/mlnx_cx7"
	bridge = "ovs-cni.network.kubevirt.io/br-lab"
)

// withAdapters gives a node so many InfiniBand adapters, and the bridge.
func withAdapters(total, healthy int) func(*corev1.Node) {
	return func(n *corev1.Node) {
		for name, q := range amounts(cx7, total, bridge, "1k") {
			n.Status.Capacity[name] = q
		}
		for name, q := range amounts(cx7, healthy) {
			n.Status.Allocatable[name] = q
		}
	}
}

func joined(change ...func(*Input)) *Rack {
	in := Input{
		Nodes: []*corev1.Node{gpuNode("a", withAdapters(8, 8)), gpuNode("b", withAdapters(8, 8)), gpuNode("c")}, Permitted: listed,
		Entry: &orkv1.RackEntry{Id: "rk"}, Fabric: []string{"other/hca", cx7}, HostDevices: true, Overlay: bridge,
	}
	for _, c := range change {
		c(&in)
	}
	return Count(in)
}

func TestNodesAreJoinedByAllowedAdaptersOnly(t *testing.T) {
	t.Parallel()
	r := joined()
	if !slices.Equal(r.Fabrics, []string{cx7}) || r.Unjoined != "" || r.Joins([]string{"a", "b"}) != cx7 || r.Joins([]string{"a", "c"}) != "" || r.Joins([]string{"a", "x"}) != "" {
		t.Errorf("fabrics %v, %q", r.Fabrics, r.Unjoined)
	}
	for want, change := range map[string]func(*Input){
		"fabric.devices":                func(in *Input) { in.Fabric = nil },
		"overlay.driver":                func(in *Input) { in.Overlay = "" },
		"both " + cx7 + " and other":    func(in *Input) { in.Overlay = "other/bridge" },
		"gate HostDevices is off":       func(in *Input) { in.HostDevices = false },
		"has not said yet":              func(in *Input) { in.Permitted = Permitted{} },
		"does not permit other/hca":     func(in *Input) { in.Fabric = []string{"other/hca"} },
		"1 of 1 nodes have both " + cx7: func(in *Input) { in.Nodes = in.Nodes[:1] },
		"does not permit " + cx7:        func(in *Input) { in.Permitted.Devices = slices.Clone(listed.Devices[:2]) },
		"0 of 2 nodes have both " + cx7: func(in *Input) { in.Nodes = []*corev1.Node{gpuNode("a"), gpuNode("b")} },
		"0 of 0 nodes have both other/hca": func(in *Input) {
			in.Nodes, in.Permitted, in.Fabric = nil, Permitted{Known: true, Any: true}, []string{"other/hca"}
		},
	} {
		if r := joined(change); len(r.Fabrics) > 0 || !strings.Contains(r.Unjoined, want) {
			t.Errorf("%s: %v %q", want, r.Fabrics, r.Unjoined)
		}
	}
	// Closed nodes and a silent device plugin do not take the fabric away.
	r = joined(func(in *Input) {
		in.Nodes = []*corev1.Node{gpuNode("a", withAdapters(8, 0)), gpuNode("b", withAdapters(8, 8), func(n *corev1.Node) { n.Spec.Unschedulable = true })}
	})
	if len(r.Fabrics) != 1 || r.Nodes["a"].Adapters[cx7].Free() != 0 {
		t.Errorf("fabrics %v, %+v", r.Fabrics, r.Nodes["a"].Adapters[cx7])
	}
}

func TestAMachineGetsItsShareOfTheAdapters(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ total, gpus, want int }{{8, 8, 8}, {8, 4, 4}, {4, 8, 4}, {4, 6, 3}, {4, 1, 1}, {1, 2, 1}, {0, 8, 0}} {
		n := joined(func(in *Input) { in.Nodes = []*corev1.Node{gpuNode("a", withAdapters(c.total, c.total))} }).Nodes["a"]
		if got := n.Share(cx7, model, c.gpus); got != c.want {
			t.Errorf("%d of 8 GPUs, %d adapters: share %d, want %d", c.gpus, c.total, got, c.want)
		}
	}
}

// TestAdaptersAreNeverFreeTwice counts any mix of claims, their pods and strangers' pods.
func TestAdaptersAreNeverFreeTwice(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		total := rapid.IntRange(0, 8).Draw(t, "total")
		healthy := rapid.IntRange(0, total).Draw(t, "healthy")
		in := Input{Nodes: []*corev1.Node{gpuNode("a", withAdapters(total, healthy))}, Permitted: listed, Fabric: []string{cx7}, HostDevices: true}
		least := 0
		for i := range rapid.IntRange(0, 4).Draw(t, "claims") {
			attempt := fmt.Sprint("a-", i)
			claimed := rapid.IntRange(0, 4).Draw(t, "claimed")
			in.Claims = append(in.Claims, Claim{AttemptID: attempt, Nodes: []ClaimNode{{Node: "a", Model: model, Adapter: cx7, Adapters: claimed}}})
			least += claimed
			if rapid.Bool().Draw(t, "its pod runs") && claimed > 0 {
				in.Pods = append(in.Pods, gpuPod("a", 0, attempt, func(p *corev1.Pod) {
					p.Spec.Containers[0].Resources.Requests = amounts(cx7, claimed)
				}))
			}
		}
		if n := rapid.IntRange(0, 4).Draw(t, "strangers"); n > 0 {
			in.Pods = append(in.Pods, gpuPod("a", 0, "", func(p *corev1.Pod) { p.Spec.Containers[0].Resources.Requests = amounts(cx7, n) }))
			least += n
		}
		a := Count(in).Nodes["a"].Adapters[cx7]
		if a == nil {
			if total+least > 0 {
				t.Fatalf("%d adapters and %d held are not counted", total, least)
			}
			return
		}
		if a.Held != least || a.Total < a.Held || a.Total < a.Healthy || a.Free() < 0 || a.Free() > max(0, healthy-least) {
			t.Fatalf("%+v, free %d, with %d healthy and %d held", a, a.Free(), healthy, least)
		}
	})
}
