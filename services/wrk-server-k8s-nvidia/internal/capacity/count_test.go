package capacity

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/label"
)

const (
	h100   = "nvidia.com/GH100_H100_SXM5_80GB"
	model  = "GH100_H100_SXM5_80GB"
	nvlink = "nvidia.com/GH100_H100_NVSWITCH"
)

var listed = Permitted{Known: true, Devices: []Device{
	{Resource: h100, PCI: "10DE:2330"}, {Resource: nvlink, PCI: "10DE:22A3"}, {Resource: "nvidia.com/mlnx_cx7", PCI: "15B3:1021"},
	{Resource: "nvidia.com/2571", PCI: "10de:2571"},
}}

func amounts(kv ...any) corev1.ResourceList {
	l := corev1.ResourceList{}
	for i := 0; i < len(kv); i += 2 {
		l[corev1.ResourceName(kv[i].(string))] = resource.MustParse(fmt.Sprint(kv[i+1]))
	}
	return l
}

// gpuNode is a healthy node with 8 GPUs.
func gpuNode(name string, change ...func(*corev1.Node)) *corev1.Node {
	n := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{label.KubeVirtSchedulable: "true"}},
		Status: corev1.NodeStatus{
			Capacity:    amounts(h100, 8, nvlink, 4, "cpu", 200, "memory", "2Ti", "pods", 110),
			Allocatable: amounts(h100, 8, nvlink, 4, "cpu", 192, "memory", "2000Gi", "pods", 110),
			Conditions:  []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}},
		},
	}
	for _, c := range change {
		c(n)
	}
	return n
}

func gpuPod(node string, gpus int, attempt string, change ...func(*corev1.Pod)) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "cosmicac", Name: "virt-launcher"},
		Spec: corev1.PodSpec{NodeName: node, Containers: []corev1.Container{
			{Name: "compute", Resources: corev1.ResourceRequirements{Requests: amounts(h100, gpus, "cpu", "8", "memory", "65Gi")}},
			{Name: "volume", Resources: corev1.ResourceRequirements{Requests: amounts("cpu", "10m", "memory", "1Mi")}},
		}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning},
	}
	if attempt != "" {
		p.Labels = map[string]string{label.Attempt: attempt}
	}
	for _, c := range change {
		c(p)
	}
	return p
}

func holding(attempt, node string, gpus int) Claim {
	return Claim{AttemptID: attempt, Nodes: []ClaimNode{{Node: node, Model: model, GPUs: gpus, Need: Need{MilliCPU: 8000, MemoryBytes: 64 * GiB}}}}
}

func TestCountOfOneModel(t *testing.T) {
	t.Parallel()
	entry := &orkv1.RackEntry{Id: "rk-1"}
	for _, c := range []struct {
		name                            string
		in                              Input
		total, healthy, held, offerable int
		words                           string
	}{
		{"an idle node offers everything", Input{Nodes: []*corev1.Node{gpuNode("n")}}, 8, 8, 0, 8, ""},
		{"a claim counts before its pod exists", Input{
			Nodes: []*corev1.Node{gpuNode("n")}, Claims: []Claim{holding("a-1", "n", 3)},
		}, 8, 8, 3, 5, ""},
		{"a claim and its pod count once", Input{
			Nodes: []*corev1.Node{gpuNode("n")}, Claims: []Claim{holding("a-1", "n", 3)}, Pods: []*corev1.Pod{gpuPod("n", 3, "a-1")},
		}, 8, 8, 3, 5, ""},
		{"pods of others count", Input{
			Nodes: []*corev1.Node{gpuNode("n")}, Claims: []Claim{holding("a-1", "n", 3)}, Pods: []*corev1.Pod{gpuPod("n", 3, "a-1"), gpuPod("n", 2, "")},
		}, 8, 8, 5, 3, ""},
		{"a terminating pod counts without its claim", Input{
			Nodes: []*corev1.Node{gpuNode("n")}, Pods: []*corev1.Pod{gpuPod("n", 4, "a-gone", func(p *corev1.Pod) { p.DeletionTimestamp = &metav1.Time{} })},
		}, 8, 8, 4, 4, ""},
		{"a pod that is over does not count", Input{
			Nodes: []*corev1.Node{gpuNode("n")}, Pods: []*corev1.Pod{gpuPod("n", 4, "", func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed })},
		}, 8, 8, 0, 8, ""},
		{"a pod on no node does not count", Input{
			Nodes: []*corev1.Node{gpuNode("n")}, Pods: []*corev1.Pod{gpuPod("", 4, "")},
		}, 8, 8, 0, 8, ""},
		{"the plugin reports nothing while three are in use", Input{
			Nodes: []*corev1.Node{gpuNode("n", func(n *corev1.Node) { n.Status.Allocatable[h100] = resource.MustParse("0") })},
			Pods:  []*corev1.Pod{gpuPod("n", 3, "a-1")}, Claims: []Claim{holding("a-1", "n", 3)},
		}, 8, 0, 3, 0, "not reporting: 0 healthy while 3 are in use"},
		{"the resource has vanished from the node while in use", Input{
			Nodes: []*corev1.Node{gpuNode("n", func(n *corev1.Node) { delete(n.Status.Allocatable, h100); delete(n.Status.Capacity, h100) })},
			Pods:  []*corev1.Pod{gpuPod("n", 3, "a-1")}, Claims: []Claim{holding("a-1", "n", 3)},
		}, 3, 0, 3, 0, "not reporting"},
		{"unhealthy GPUs stay in the total", Input{
			Nodes: []*corev1.Node{gpuNode("n", func(n *corev1.Node) { n.Status.Allocatable[h100] = resource.MustParse("6") })},
		}, 8, 6, 0, 6, "2 of 8 are not healthy"},
		{"a cordoned node offers nothing", Input{
			Nodes: []*corev1.Node{gpuNode("n", func(n *corev1.Node) { n.Spec.Unschedulable = true })}, Claims: []Claim{holding("a-1", "n", 3)},
		}, 8, 8, 3, 0, "not schedulable"},
		{"a model outside the entry is shown and not offered", Input{
			Nodes: []*corev1.Node{gpuNode("n")}, Entry: &orkv1.RackEntry{AllowedModels: []string{"GH100_H200_NVL"}},
		}, 8, 8, 0, 0, "does not offer this model"},
		{"an entry's model is compared without regard to case", Input{
			Nodes: []*corev1.Node{gpuNode("n")}, Entry: &orkv1.RackEntry{AllowedModels: []string{strings.ToLower(model)}},
		}, 8, 8, 0, 8, ""},
		{"the entry's maximum bounds what is offered", Input{
			Nodes: []*corev1.Node{gpuNode("n")}, Claims: []Claim{holding("a-1", "n", 3)}, Entry: &orkv1.RackEntry{MaximumGpus: 5},
		}, 8, 8, 3, 2, "allows 5 GPUs, 3 are granted"},
		{"a cordoned rack offers nothing", Input{Nodes: []*corev1.Node{gpuNode("n")}, Entry: &orkv1.RackEntry{Cordoned: true}}, 8, 8, 0, 0, "rack is cordoned"},
		{"sidecars add to start-up", Input{
			Nodes: []*corev1.Node{gpuNode("n")}, Pods: []*corev1.Pod{gpuPod("n", 1, "", func(p *corev1.Pod) {
				always := corev1.ContainerRestartPolicyAlways
				p.Spec.InitContainers = []corev1.Container{
					{RestartPolicy: &always, Resources: corev1.ResourceRequirements{Requests: amounts(h100, 1)}},
					{Resources: corev1.ResourceRequirements{Requests: amounts(h100, 3)}},
				}
			})},
		}, 8, 8, 4, 4, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			in := c.in
			in.Permitted = listed
			if in.Entry == nil {
				in.Entry = entry
			}
			r := Count(in)
			g := r.Nodes["n"].GPUs[model]
			if g == nil {
				t.Fatalf("no count of %s: %+v", model, r.Nodes["n"])
			}
			if g.Total != c.total || g.Healthy != c.healthy || g.Held != c.held || g.Offerable != c.offerable || !strings.Contains(g.Message, c.words) || (c.words == "") != (g.Message == "") {
				t.Fatalf("total %d healthy %d held %d offerable %d %q; want %d %d %d %d %q",
					g.Total, g.Healthy, g.Held, g.Offerable, g.Message, c.total, c.healthy, c.held, c.offerable, c.words)
			}
			if len(r.Nodes["n"].GPUs) != 1 {
				t.Fatalf("counts more than one model: %v", sorted(r.Nodes["n"].GPUs))
			}
		})
	}
}

func TestOnlyWholeGPUsThatAreAllowedCount(t *testing.T) {
	t.Parallel()
	node := gpuNode("n", func(n *corev1.Node) {
		for _, name := range []string{"nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-1g.10gb", "nvidia.com/mlnx_cx7", "nvidia.com/2571", "devices.kubevirt.io/kvm", "nvidia.com/TU104GL_Tesla_T4"} {
			n.Status.Capacity[corev1.ResourceName(name)] = resource.MustParse("4")
			n.Status.Allocatable[corev1.ResourceName(name)] = resource.MustParse("4")
		}
	})
	p := listed
	p.Devices = append(p.Devices, Device{Resource: "nvidia.com/TU104GL_TESLA_T4", PCI: "10DE:1EB8"})
	n := Count(Input{Nodes: []*corev1.Node{node}, Permitted: p, Entry: &orkv1.RackEntry{}}).Nodes["n"]
	if got := strings.Join(sorted(n.GPUs), " "); got != model+" TU104GL_Tesla_T4" {
		t.Fatalf("counts %s", got)
	}
	if g := n.GPUs["TU104GL_Tesla_T4"]; g.Offerable != 0 || !strings.Contains(g.Message, "does not permit") {
		t.Fatalf("a resource that is not permitted: %+v", g)
	}
	for _, words := range []string{"nvidia.com/2571 is not known to be a GPU", "advertises nvidia.com/TU104GL_Tesla_T4 but KubeVirt permits nvidia.com/TU104GL_TESLA_T4"} {
		if !strings.Contains(n.Message, words) {
			t.Errorf("node's message %q lacks %q", n.Message, words)
		}
	}
	// The operator's word makes an unknown device a GPU.
	n = Count(Input{Nodes: []*corev1.Node{node}, Permitted: p, Entry: &orkv1.RackEntry{}, GPUModels: []string{"2571"}}).Nodes["n"]
	if g := n.GPUs["2571"]; g == nil || g.Offerable != 4 {
		t.Fatalf("named by the operator: %+v", g)
	}
	// Nothing is offered before KubeVirt's list is known; without a list everything known is.
	if g := Count(Input{Nodes: []*corev1.Node{node}, Entry: &orkv1.RackEntry{}}).Nodes["n"].GPUs[model]; g.Offerable != 0 {
		t.Fatalf("offered before KubeVirt is known: %+v", g)
	}
	if g := Count(Input{Nodes: []*corev1.Node{node}, Entry: &orkv1.RackEntry{}, Permitted: Permitted{Known: true, Any: true}}).Nodes["n"].GPUs[model]; g.Offerable != 8 {
		t.Fatalf("no list permits everything: %+v", g)
	}
	node.Labels[label.GPUWorkload] = "container"
	if n := Count(Input{Nodes: []*corev1.Node{node}, Permitted: p, Entry: &orkv1.RackEntry{}}).Nodes["n"]; len(n.GPUs) != 0 || !strings.Contains(n.Message, "not for passthrough") {
		t.Fatalf("a container node: %+v", n)
	}
}

func TestANodeThatIsGoneKeepsWhatIsHeldOnIt(t *testing.T) {
	t.Parallel()
	r := Count(Input{
		Nodes: []*corev1.Node{gpuNode("a")}, Permitted: listed, Entry: &orkv1.RackEntry{Id: "rk-1"},
		Pods:   []*corev1.Pod{gpuPod("b", 2, "a-1"), gpuPod("c", 4, "")},
		Claims: []Claim{holding("a-1", "b", 2), holding("a-2", "b", 3)},
	})
	n := r.Nodes["b"]
	if n == nil || n.Schedulable || !strings.Contains(n.Message, "missing from the cluster; 2 attempts hold 5 GPUs") {
		t.Fatalf("the missing node: %+v", n)
	}
	if g := n.GPUs[model]; g.Total != 5 || g.Held != 5 || g.Offerable != 0 || g.Healthy != 0 || g.Holders["a-1"] != 2 || g.Holders["a-2"] != 3 {
		t.Fatalf("what it holds: %+v", g)
	}
	if r.Nodes["c"] != nil {
		t.Error("a node that is not the rack's and holds nothing of it is counted")
	}
	if r.Granted != 5 || r.Nodes["a"].GPUs[model].Offerable != 8 {
		t.Errorf("the rest: %+v", r.Nodes["a"].GPUs[model])
	}
}

func TestWhyANodeTakesNothing(t *testing.T) {
	t.Parallel()
	tolerations := []corev1.Toleration{{Key: "gpu", Operator: corev1.TolerationOpExists}}
	for _, c := range []struct {
		name, words string
		change      func(*corev1.Node)
	}{
		{"fine", "", func(*corev1.Node) {}},
		{"a tolerated taint", "", func(n *corev1.Node) {
			n.Spec.Taints = []corev1.Taint{{Key: "gpu", Value: "yes", Effect: corev1.TaintEffectNoSchedule}}
		}},
		{"a preference", "", func(n *corev1.Node) {
			n.Spec.Taints = []corev1.Taint{{Key: "x", Effect: corev1.TaintEffectPreferNoSchedule}}
		}},
		{"cordoned", "cordoned", func(n *corev1.Node) { n.Spec.Unschedulable = true }},
		{"not ready", "not ready since", func(n *corev1.Node) {
			n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionUnknown, Reason: "NodeStatusUnknown", LastTransitionTime: metav1.Now()}}
		}},
		{"no condition", "not ready", func(n *corev1.Node) { n.Status.Conditions = nil }},
		{"a taint", "taint maintenance=now:NoExecute", func(n *corev1.Node) {
			n.Spec.Taints = []corev1.Taint{{Key: "maintenance", Value: "now", Effect: corev1.TaintEffectNoExecute}}
		}},
		{"virt-handler lost", "KubeVirt does not run", func(n *corev1.Node) { n.Labels[label.KubeVirtSchedulable] = "false" }},
		{"disk full", "DiskPressure", func(n *corev1.Node) {
			n.Status.Conditions = append(n.Status.Conditions, corev1.NodeCondition{Type: corev1.NodeDiskPressure, Status: corev1.ConditionTrue})
		}},
	} {
		n := Count(Input{Nodes: []*corev1.Node{gpuNode("n", c.change)}, Permitted: listed, Entry: &orkv1.RackEntry{}, Tolerations: tolerations}).Nodes["n"]
		if n.Schedulable != (c.words == "") || !strings.Contains(n.Message, c.words) {
			t.Errorf("%s: schedulable %v, message %q", c.name, n.Schedulable, n.Message)
		}
	}
}

func TestMemoryAndCoresOfClaimsAreTakenOff(t *testing.T) {
	t.Parallel()
	shape := ShapeOf(4, 16, 100)
	need := shape.Need()
	c := Claim{AttemptID: "a-1", Nodes: []ClaimNode{{Node: "n", Model: model, GPUs: 4, Need: need}}}
	n := Count(Input{Nodes: []*corev1.Node{gpuNode("n")}, Claims: []Claim{c}, Permitted: listed, Entry: &orkv1.RackEntry{}}).Nodes["n"]
	if n.Free.MilliCPU != 192_000-64_000 || n.Free.MemoryBytes != 2000*GiB-need.MemoryBytes || n.FreePods != 109 {
		t.Fatalf("free %+v, pods %d", n.Free, n.FreePods)
	}
	if need.MemoryBytes <= shape.MemoryBytes+GiB {
		t.Fatalf("no overhead counted: %d for a guest of %d", need.MemoryBytes, shape.MemoryBytes)
	}
}

// TestNoCountIsEverAbsurd draws clusters at random.
func TestNoCountIsEverAbsurd(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		in := Input{Permitted: listed, Entry: &orkv1.RackEntry{MaximumGpus: uint32(rapid.IntRange(0, 20).Draw(t, "maximum"))}}
		names := []string{"n0", "n1", "n2"}
		for _, name := range names {
			in.Nodes = append(in.Nodes, gpuNode(name, func(n *corev1.Node) {
				n.Status.Capacity[h100] = *resource.NewQuantity(int64(rapid.IntRange(0, 8).Draw(t, "capacity")), resource.DecimalSI)
				n.Status.Allocatable[h100] = *resource.NewQuantity(int64(rapid.IntRange(-1, 9).Draw(t, "allocatable")), resource.DecimalSI)
				n.Spec.Unschedulable = rapid.Bool().Draw(t, "cordoned")
			}))
		}
		node := rapid.SampledFrom(append(names, "elsewhere", ""))
		attempt := rapid.SampledFrom([]string{"", "a-1", "a-2", "a-3"})
		for range rapid.IntRange(0, 6).Draw(t, "pods") {
			in.Pods = append(in.Pods, gpuPod(node.Draw(t, "node"), rapid.IntRange(0, 8).Draw(t, "gpus"), attempt.Draw(t, "attempt")))
		}
		for _, id := range []string{"a-1", "a-2"} {
			if rapid.Bool().Draw(t, id) {
				in.Claims = append(in.Claims, holding(id, node.Draw(t, "claim"), rapid.IntRange(0, 8).Draw(t, "claimed")))
			}
		}
		before := Count(in)
		for name, n := range before.Nodes {
			for _, g := range n.GPUs {
				if g.Total < 0 || g.Healthy < 0 || g.Held < 0 || g.Offerable < 0 || g.Offerable+g.Held > g.Total && g.Offerable > 0 || g.Offerable > g.Healthy || g.Held > g.Total {
					t.Fatalf("%s: %+v", name, g)
				}
				if !n.Schedulable && g.Offerable > 0 {
					t.Fatalf("%s is not schedulable and offers %d", name, g.Offerable)
				}
				sum := 0
				for _, c := range g.Holders {
					sum += c
				}
				if sum > g.Held {
					t.Fatalf("%s: holders have %d of %d", name, sum, g.Held)
				}
			}
			if n.Free.MilliCPU < 0 || n.Free.MemoryBytes < 0 {
				t.Fatalf("%s: free %+v", name, n.Free)
			}
		}
		// One more claim never makes more offerable.
		in.Claims = append(in.Claims, holding("a-new", rapid.SampledFrom(names).Draw(t, "new"), rapid.IntRange(1, 8).Draw(t, "count")))
		for name, n := range Count(in).Nodes {
			for m, g := range n.GPUs {
				if was := before.Nodes[name].GPUs[m]; was != nil && g.Offerable > was.Offerable {
					t.Fatalf("%s offers %d after a claim and %d before", name, g.Offerable, was.Offerable)
				}
			}
		}
	})
}
