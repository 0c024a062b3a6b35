package e2e

import (
	"fmt"
	"net/http"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// fault runs `cosmicac-devcluster fault` on the cluster and demands that it works.
func (c *cluster) fault(t *testing.T, args ...string) string {
	t.Helper()
	out, err := exec.Command(binary, append([]string{"fault", args[0], "--dir", c.dir}, args[1:]...)...).CombinedOutput()
	if err != nil {
		t.Fatalf("fault %q: %v %s", args, err, out)
	}
	return string(out)
}

// TestFaults switches every fault on and off from the command line while the cluster runs.
func TestFaults(t *testing.T) {
	t.Parallel()
	base := t.TempDir()
	c := start(t, filepath.Join(base, "state"),
		"--pool", "name=us,nodes=2,gpus=8,resource=nvidia.com/GH100_H100_SXM5_80GB,hostdev=rdma/ib,hostdevs=8",
		"--kubeconfig-for", "default/default="+filepath.Join(base, "account.kubeconfig"), "--api-proxy",
		"--import-time", "200ms", "--boot-time", "100ms")
	for _, part := range []struct {
		name string
		f    func(*testing.T, *cluster)
	}{
		{"the command line refuses what it does not know, and lists the rest", faultCommand},
		{"nodes offer other things than they have", nodeOffers},
		{"vms do not start, each in the words of who fails", vmFaults},
		{"imports hang or fail and never say Failed", diskFaults},
		{"a lost node keeps its pods until an operator says that the power is off", lostNode},
		{"a deleted node comes back", deletedNode},
		{"an eviction is answered as each vm's strategy says", evictions},
		{"a drained node is cordoned and its vms are asked to go", drainedNode},
		{"disks that wait for their consumer go where a temporary pod was", waitingDisks},
		{"requests through the proxy meet the api faults, the administrator's do not", apiFaults},
	} {
		t.Run(part.name, func(t *testing.T) {
			part.f(t, c)
			c.fault(t, "clear")
		})
	}
}

func faultCommand(t *testing.T, c *cluster) {
	for _, args := range [][]string{{"set", "--dir", c.dir, "no-such-fault", "*"}, {"set", "--dir", c.dir, "node-lost"}, {"set", "--dir", c.dir, "webhook-down", "us"}, {"list"}} {
		out, err := exec.Command(binary, append([]string{"fault"}, args...)...).CombinedOutput()
		if err == nil {
			t.Errorf("%q was taken: %s", args, out)
		}
	}
	c.fault(t, "set", "stuck-terminating", "us-gpu-00", "us-gpu-01")
	if out := c.fault(t, "list"); !strings.Contains(out, "us-gpu-00 us-gpu-01") || !strings.Contains(out, "api-drop-reply") {
		t.Errorf("list says %s", out)
	}
	c.fault(t, "clear", "stuck-terminating")
	if out := c.fault(t, "list"); strings.Contains(out, "us-gpu-00") {
		t.Errorf("list says %s", out)
	}
}

func (c *client) offers(node string, want map[string]any) {
	c.t.Helper()
	eventually(c.t, func() string {
		got, _ := c.get("/api/v1/nodes/" + node).at("status.allocatable").(map[string]any)
		for name, n := range want {
			if got[name] != n {
				return fmt.Sprintf("%s offers %v of %s, want %v", node, got[name], name, n)
			}
		}
		return ""
	})
}

func nodeOffers(t *testing.T, c *cluster) {
	k := c.in(t)
	const gpu, other, ib = "nvidia.com/GH100_H100_SXM5_80GB", "nvidia.com/gh100_h100_sxm5_80gb", "rdma/ib"
	k.offers("us-gpu-00", map[string]any{gpu: "8", ib: "8"})
	c.fault(t, "set", "allocatable-zero", "us-gpu-00")
	c.fault(t, "set", "resource-renamed", "us-gpu-01")
	k.offers("us-gpu-00", map[string]any{gpu: "0", ib: "0"})
	k.offers("us-gpu-01", map[string]any{gpu: nil, other: "8", ib: "8"})
	c.fault(t, "clear")
	k.offers("us-gpu-00", map[string]any{gpu: "8", ib: "8"})
	k.offers("us-gpu-01", map[string]any{gpu: "8", other: nil})
}

// pinned is a VMI with one GPU that only fits this node.
func pinned(name, node, disks, volumes string) string {
	return strings.Replace(gpuVMI(name, 1, disks, volumes), "spec:\n", "spec:\n  nodeSelector: {kubernetes.io/hostname: "+node+"}\n", 1)
}

func (c *client) launcher(vmi object) object {
	pods := c.items(ns + "pods?labelSelector=kubevirt.io%2Fcreated-by%3D" + vmi.str("metadata.uid"))
	if len(pods) != 1 {
		return object{}
	}
	return pods[0]
}

func vmFaults(t *testing.T, c *cluster) {
	k := c.in(t)
	for _, f := range []struct {
		name, target string
		shows        func(vmi, pod object) bool
		heals        bool
	}{
		{"oom-killed", "us-gpu-00", func(vmi, pod object) bool {
			return vmi.str("status.phase") == "Failed" && strings.Contains(fmt.Sprint(pod.at("status.containerStatuses")), "OOMKilled")
		}, false},
		{"reject-pods", "us-gpu-00", func(vmi, _ object) bool {
			return vmi.str("status.phase") == "Failed" && vmi.str("status.reason") == "UnexpectedAdmissionError"
		}, false},
		{"vfio-busy", "us-gpu-00", func(vmi, _ object) bool {
			return vmi.str("status.phase") == "Scheduled" && strings.Contains(vmi.condition("Synchronized").str("message"), "Device or resource busy")
		}, true},
		{"vfio-missing", "us-gpu-00", func(vmi, pod object) bool {
			return vmi.str("status.phase") == "Scheduling" && strings.Contains(fmt.Sprint(pod.at("status.containerStatuses")), "lstat /dev/vfio/42")
		}, true},
		{"stuck-scheduling", "us-gpu-00", func(vmi, pod object) bool {
			return vmi.str("status.phase") == "Scheduling" && strings.Contains(fmt.Sprint(pod.at("status.containerStatuses")), "ContainerCreating")
		}, true},
		{"stuck-scheduled", "us-gpu-00", func(vmi, _ object) bool { return vmi.str("status.phase") == "Scheduled" }, true},
		{"not-permitted", "nvidia.com/GH100_H100_SXM5_80GB", func(vmi, _ object) bool {
			return vmi.str("status.phase") == "Pending" && strings.Contains(vmi.condition("Synchronized").str("message"), "is not permitted")
		}, true},
	} {
		c.fault(t, "set", f.name, f.target)
		k.seen(c)
		k.create(vmis, pinned(f.name, "us-gpu-00", "", ""))
		eventually(t, func() string {
			vmi := k.get(vmis + "/" + f.name)
			if pod := k.launcher(vmi); !f.shows(vmi, pod) {
				return fmt.Sprint(f.name, " says ", vmi["status"], " and its pod ", pod["status"])
			}
			return ""
		})
		c.fault(t, "clear", f.name)
		if f.heals {
			k.untilPhase(vmis+"/"+f.name, "Running")
		}
		k.delete(vmis + "/" + f.name)
		k.untilGone(vmis + "/" + f.name)
	}
	c.fault(t, "set", "webhook-down", "*")
	k.seen(c)
	eventually(t, func() string {
		code, o := k.do(http.MethodPost, vmis+"?dryRun=All", yamlObject(t, gpuVMI("refused", 1, "", "")))
		if code == http.StatusInternalServerError && strings.Contains(fmt.Sprint(o["message"]), "failed calling webhook") {
			return ""
		}
		return fmt.Sprint(code, o["message"])
	})
	c.fault(t, "clear")
	eventually(t, func() string {
		if code, o := k.do(http.MethodPost, vmis+"?dryRun=All", yamlObject(t, gpuVMI("taken", 1, "", ""))); code != http.StatusCreated {
			return fmt.Sprint(code, o["message"])
		}
		return ""
	})
}

// seen waits until the simulator has read the switches: it says so in its log.
func (k *client) seen(c *cluster) {
	k.t.Helper()
	cm := k.get("/api/v1/namespaces/kube-system/configmaps/cosmicac-devcluster-faults")
	data, _ := cm["data"].(map[string]any)
	eventually(k.t, func() string {
		at := strings.LastIndex(c.log.String(), "simulated faults changed")
		if at < 0 {
			return "no change was seen"
		}
		line, _, _ := strings.Cut(c.log.String()[at:], "\n")
		for name := range data {
			if !strings.Contains(line, name) {
				return "the last change was " + line
			}
		}
		return ""
	})
}

func diskFaults(t *testing.T, c *cluster) {
	k := c.in(t)
	for _, f := range []struct{ name, condition, words string }{
		{"import-refused", "Running", "unauthorized"}, {"import-too-small", "Running", "larger than the reported available storage"},
		{"import-no-scratch", "Running", "Scratch space required and none found"}, {"storage-pending", "Bound", "Pending"},
		{"import-stalled", "Running", ""},
	} {
		c.fault(t, "set", f.name, "disk-"+f.name)
		k.seen(c)
		k.create(dvs, dataVolume("disk-"+f.name, "docker://reg.example/ubuntu:1"))
		eventually(t, func() string {
			o := k.get(dvs + "/disk-" + f.name)
			cond := o.condition(f.condition)
			if o.str("status.phase") == "Failed" || o.str("status.phase") == "Succeeded" {
				t.Fatalf("%s ended: %v", f.name, o["status"])
			}
			if f.name == "import-stalled" && o.str("status.progress") == "37.0%" {
				return ""
			}
			if f.words != "" && strings.Contains(cond.str("message"), f.words) {
				return ""
			}
			return fmt.Sprint(f.name, " says ", o["status"])
		})
		c.fault(t, "clear", f.name)
		k.untilPhase(dvs+"/disk-"+f.name, "Succeeded")
		k.delete(dvs + "/disk-" + f.name)
	}
	c.fault(t, "set", "clone-fallback", "*")
	k.seen(c)
	k.create(dvs, `
apiVersion: cdi.kubevirt.io/v1beta1
kind: DataVolume
metadata: {name: copy}
spec:
  source: {pvc: {namespace: default, name: golden}}
  storage: {resources: {requests: {storage: 10Gi}}}
`)
	k.untilPhase(dvs+"/copy", "Succeeded")
	if o := k.get(ns + "persistentvolumeclaims/copy"); !strings.Contains(fmt.Sprint(o.at("metadata.annotations")), "cloneFallbackReason") {
		t.Errorf("the claim of the copy says %v", o.at("metadata.annotations"))
	}
	k.delete(dvs + "/copy")
}

func lostNode(t *testing.T, c *cluster) {
	k := c.in(t)
	k.create(vmis, pinned("lost", "us-gpu-01", "", ""))
	uid := k.untilPhase(vmis+"/lost", "Running").str("metadata.uid")
	c.fault(t, "set", "node-lost", "us-gpu-01")
	eventually(t, func() string {
		vmi := k.get(vmis + "/lost")
		ready, pod := vmi.condition("Ready"), k.launcher(vmi)
		if vmi.str("status.phase") == "Running" && vmi.str("metadata.uid") == uid && ready.str("reason") == "PodTerminating" && pod.str("metadata.deletionTimestamp") != "" {
			return ""
		}
		return fmt.Sprint("the vmi says ", vmi["status"], ", its pod ", pod["metadata"])
	})
	// Only the operator's word ends it; the collector of Kubernetes does the rest.
	code, o := k.do(http.MethodPatch, "/api/v1/nodes/us-gpu-01",
		`{"spec":{"taints":[{"key":"node.kubernetes.io/out-of-service","value":"nodeshutdown","effect":"NoExecute"},{"key":"node.kubernetes.io/unreachable","effect":"NoSchedule"}]}}`)
	if code != http.StatusOK {
		t.Fatal(code, o["message"])
	}
	if o := k.untilPhase(vmis+"/lost", "Failed"); o.str("status.reason") != "NodeUnresponsive" {
		t.Errorf("the vmi says %v", o["status"])
	}
	k.delete(vmis + "/lost")
	k.untilGone(vmis + "/lost")
	if code, o := k.do(http.MethodPatch, "/api/v1/nodes/us-gpu-01", `{"spec":{"taints":null}}`); code != http.StatusOK {
		t.Fatal(code, o["message"])
	}
	c.fault(t, "clear")
	k.create(vmis, pinned("again", "us-gpu-01", "", ""))
	k.untilPhase(vmis+"/again", "Running")
	k.delete(vmis + "/again")
	k.untilGone(vmis + "/again")
}

func deletedNode(t *testing.T, c *cluster) {
	k := c.in(t)
	c.fault(t, "set", "node-deleted", "us-gpu-01")
	k.untilGone("/api/v1/nodes/us-gpu-01")
	c.fault(t, "clear")
	k.offers("us-gpu-01", map[string]any{"nvidia.com/GH100_H100_SXM5_80GB": "8"})
}

func waitingDisks(t *testing.T, c *cluster) {
	k := c.in(t)
	root := func(name string) string {
		return strings.Replace(dataVolume(name, "docker://reg.example/ubuntu:1"), "  storage: {", "  storage: {storageClassName: simulated-wait, ", 1)
	}
	k.create(dvs, root("root-w"))
	k.untilPhase(dvs+"/root-w", "WaitForFirstConsumer")
	before := k.get(ns + "pods").str("metadata.resourceVersion")
	k.create(vmis, gpuVMI("waits", 2, "{name: root, disk: {bus: virtio}}", "{name: root, dataVolume: {name: root-w}}"))
	k.untilPhase(vmis+"/waits", "Running")
	chooser := false
	for _, pod := range k.since(before, ns+"pods") {
		notes, _ := pod.at("metadata.annotations").(map[string]any)
		if notes["kubevirt.io/ephemeral-provisioning"] == "true" && strings.Contains(fmt.Sprint(pod.at("spec.containers")), "nvidia.com/GH100_H100_SXM5_80GB:2") {
			chooser = true
		}
	}
	if !chooser {
		t.Error("there was no temporary pod with the GPUs of the vm")
	}
	vmi := k.get(vmis + "/waits")
	pv := k.get("/api/v1/persistentvolumes/" + k.get(ns+"persistentvolumeclaims/root-w").str("spec.volumeName"))
	if !strings.Contains(fmt.Sprint(pv.at("spec.nodeAffinity")), vmi.str("status.nodeName")) {
		t.Errorf("the vm runs on %s, its disk is on %v", vmi.str("status.nodeName"), pv.at("spec.nodeAffinity"))
	}
	k.delete(vmis + "/waits")
	k.untilGone(vmis + "/waits")

	c.fault(t, "set", "volume-astray", "us-gpu-00")
	k.seen(c)
	k.create(dvs, root("root-a"))
	k.create(vmis, pinned("astray", "us-gpu-00", "{name: root, disk: {bus: virtio}}", "{name: root, dataVolume: {name: root-a}}"))
	eventually(t, func() string {
		o := k.get(vmis + "/astray")
		if m := o.condition("PodScheduled").str("message"); o.str("status.phase") == "Scheduling" && strings.Contains(m, "node") && strings.Contains(m, "affinity") {
			return ""
		}
		return fmt.Sprint("the vmi says ", o["status"])
	})
	k.delete(vmis + "/astray")
	k.untilGone(vmis + "/astray")
	for _, d := range []string{"root-w", "root-a"} {
		k.delete(dvs + "/" + d)
	}
}

func apiFaults(t *testing.T, c *cluster) {
	through := c.client(c.Kubeconfigs["default/default"])
	through.t = t
	if through.url == c.URL {
		t.Fatal("the account does not go through the proxy")
	}
	if code, _ := through.do(http.MethodGet, "/version", nil); code != http.StatusOK {
		t.Fatalf("without faults: %d", code)
	}
	c.fault(t, "set", "api-answer", "code=429 verb=list resource=pods")
	eventually(t, func() string {
		if code, _ := through.do(http.MethodGet, ns+"pods", nil); code != http.StatusTooManyRequests {
			return fmt.Sprint("pods are answered ", code)
		}
		return ""
	})
	if code, _ := through.do(http.MethodGet, ns+"services", nil); code != http.StatusForbidden {
		t.Errorf("services are answered %d, want the API server's own refusal", code)
	}
	if code, _ := c.in(t).do(http.MethodGet, ns+"pods", nil); code != http.StatusOK {
		t.Errorf("the administrator is answered %d", code)
	}
}
