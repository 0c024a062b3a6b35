package e2e

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
)

// onNode is a VMI with one GPU on a node, with an eviction strategy; empty for none.
func onNode(name, node, strategy string) string {
	m := pinned(name, node, "", "")
	if strategy != "" {
		m = strings.Replace(m, "spec:\n", "spec:\n  evictionStrategy: "+strategy+"\n", 1)
	}
	return m
}

// evict asks for a pod's eviction as kubectl drain does.
func (c *client) evict(pod object, dryRun bool) (int, string) {
	c.t.Helper()
	name := pod.str("metadata.name")
	body := object{"apiVersion": "policy/v1", "kind": "Eviction", "metadata": object{"name": name, "namespace": "default"}}
	path := ns + "pods/" + name + "/eviction"
	if dryRun {
		path += "?dryRun=All"
	}
	code, o := c.do(http.MethodPost, path, body)
	return code, o.str("message")
}

func evictions(t *testing.T, c *cluster) {
	k := c.in(t)
	strategies := map[string]string{"outside": "External", "moving": "LiveMigrate", "maybe": "LiveMigrateIfPossible", "careless": ""}
	for name, strategy := range strategies {
		k.create(vmis, onNode(name, "us-gpu-00", strategy))
	}
	for name := range strategies {
		k.untilPhase(vmis+"/"+name, "Running")
	}
	outside := k.launcher(k.get(vmis + "/outside"))
	labels, _ := outside.at("metadata.labels").(map[string]any)
	for label, want := range map[string]string{
		"kubevirt.io": "virt-launcher", "kubevirt.io/nodeName": "us-gpu-00", "vm.kubevirt.io/name": "outside", "vmi.kubevirt.io/id": "outside",
		"kubevirt.io/created-by": k.get(vmis + "/outside").str("metadata.uid"),
	} {
		if labels[label] != want {
			t.Errorf("label %s of the launcher pod is %v, want %s", label, labels[label], want)
		}
	}

	if code, words := k.evict(outside, true); code != http.StatusTooManyRequests || !strings.Contains(words, "triggered evacuation") {
		t.Errorf("a trial is answered %d %s", code, words)
	}
	if vmi := k.get(vmis + "/outside"); vmi.at("status.evacuationNodeName") != nil {
		t.Errorf("a trial marked the vm: %v", vmi.at("status.evacuationNodeName"))
	}
	for _, words := range []string{`Eviction triggered evacuation of VMI "default/outside"`, "Evacuation in progress"} {
		if code, said := k.evict(outside, false); code != http.StatusTooManyRequests || !strings.Contains(said, words) {
			t.Errorf("an external vm: %d %s, want %s", code, said, words)
		}
	}
	eventually(t, func() string {
		vmi := k.get(vmis + "/outside")
		if vmi.str("status.evacuationNodeName") != "us-gpu-00" || vmi.condition("EvictionRequested").str("status") != "True" {
			return fmt.Sprintf("not marked: %v", vmi.at("status"))
		}
		return ""
	})

	// The drain that never ends: a vm that is to move and cannot.
	moving := k.launcher(k.get(vmis + "/moving"))
	for range 2 {
		if code, said := k.evict(moving, false); code != http.StatusTooManyRequests || !strings.Contains(said, "is not live-migratable") {
			t.Errorf("a vm that cannot move: %d %s", code, said)
		}
	}
	if vmi := k.get(vmis + "/moving"); vmi.at("status.evacuationNodeName") != nil || vmi.str("status.phase") != "Running" {
		t.Errorf("a vm that cannot move: %v", vmi.at("status"))
	}

	for _, name := range []string{"maybe", "careless"} {
		if code, said := k.evict(k.launcher(k.get(vmis+"/"+name)), false); code != http.StatusCreated {
			t.Errorf("%s: %d %s", name, code, said)
		}
		eventually(t, func() string { // Failed where the guest was not up to hear the power button
			if phase := k.get(vmis + "/" + name).str("status.phase"); phase != "Succeeded" && phase != "Failed" {
				return name + " is " + phase
			}
			return ""
		})
	}
	for name := range strategies {
		k.delete(vmis + "/" + name)
		k.untilGone(vmis + "/" + name)
	}
}

func drainedNode(t *testing.T, c *cluster) {
	k := c.in(t)
	k.create(vmis, onNode("asked", "us-gpu-01", "External"))
	k.create(vmis, onNode("beside", "us-gpu-00", "External"))
	k.untilPhase(vmis+"/asked", "Running")
	k.untilPhase(vmis+"/beside", "Running")
	drained := func(yes bool) {
		t.Helper()
		eventually(t, func() string {
			node, asked := k.get("/api/v1/nodes/us-gpu-01"), k.get(vmis+"/asked")
			closed, _ := node.at("spec.unschedulable").(bool)
			marked := asked.str("status.evacuationNodeName") == "us-gpu-01"
			if closed != yes || marked != yes || (asked.condition("EvictionRequested").str("status") == "True") != yes {
				return fmt.Sprintf("drained=%v: the node is closed %v, its vm %v", yes, closed, asked.at("status"))
			}
			return ""
		})
	}
	c.fault(t, "set", "node-drained", "us-gpu-01")
	drained(true)
	if vmi := k.get(vmis + "/beside"); vmi.at("status.evacuationNodeName") != nil {
		t.Errorf("a vm of another node is asked to go: %v", vmi.at("status.evacuationNodeName"))
	}
	c.fault(t, "clear", "node-drained")
	drained(false)
	for _, name := range []string{"asked", "beside"} {
		if vmi := k.get(vmis + "/" + name); vmi.str("status.phase") != "Running" {
			t.Errorf("%s is %s", name, vmi.str("status.phase"))
		}
		k.delete(vmis + "/" + name)
		k.untilGone(vmis + "/" + name)
	}
}
