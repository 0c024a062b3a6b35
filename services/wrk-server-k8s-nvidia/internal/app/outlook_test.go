package app

import (
	"strings"
	"testing"
	"time"

	"github.com/cosmicac/cosmicac/pkg/health"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/capacity"
)

func TestSomebodyIsCalledForASilentPluginAfterAWhileAndForAMissingNodeAtOnce(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_000_000, 0)
	set := health.NewSet(nil)
	gpu := &capacity.GPU{Model: "X", Total: 8, Held: 3, Degraded: true, Message: "the device plugin is not reporting"}
	rack := &capacity.Rack{Nodes: map[string]*capacity.Node{"gpu-07": {Name: "gpu-07", GPUs: map[string]*capacity.GPU{"X": gpu}}}}
	o := &outlook{
		s: Setup{Health: set, Now: func() time.Time { return now }}, rack: func() *capacity.Rack { return rack },
		nodes: map[string]bool{}, degraded: map[string]time.Time{},
	}
	said := func() string {
		var all []string
		for _, w := range set.List() {
			all = append(all, w.Text+" | "+w.Remedy)
		}
		return strings.Join(all, "\n")
	}
	o.troubledNodes()
	now = now.Add(9 * time.Minute)
	if o.troubledNodes(); said() != "" {
		t.Fatalf("called too soon: %s", said())
	}
	now = now.Add(2 * time.Minute)
	if o.troubledNodes(); !strings.Contains(said(), "node gpu-07: the device plugin is not reporting") || !strings.Contains(said(), "virt-handler") {
		t.Fatalf("nobody is called: %q", said())
	}
	gpu.Degraded = false
	rack.Nodes["gpu-08"] = &capacity.Node{Name: "gpu-08", Missing: true, Message: "the node is missing from the cluster"}
	if o.troubledNodes(); strings.Contains(said(), "plugin") || !strings.Contains(said(), "gpu-08: the node is missing") {
		t.Fatalf("after it healed and another went: %q", said())
	}
	delete(rack.Nodes, "gpu-08")
	if o.troubledNodes(); said() != "" {
		t.Fatalf("still: %q", said())
	}
}
