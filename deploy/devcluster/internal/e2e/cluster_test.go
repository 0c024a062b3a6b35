package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

const agentScript = `#!/bin/sh
echo "agent of $(hostname) sees $(cat "$1")"
printf x >> "$HOME/starts"
trap 'echo agent stops; exit 0' TERM
while :; do sleep 0.1; done
`

const seed = `
apiVersion: v1
kind: Secret
metadata: {name: %s, ownerReferences: [{apiVersion: v1, kind: ConfigMap, name: anchor, uid: %s}]}
stringData:
  networkdata: "version: 2"
  userdata: |
    #cloud-config
    hostname: job-a
    write_files:
    - {path: /etc/cosmicac/seed.json, permissions: '0600', encoding: b64, content: bXktc2VlZA==}
    - path: /etc/systemd/system/cosmicac-agent.service
      content: |
        [Service]
        ExecStart=/run/cosmicac/agent/agent.sh /etc/cosmicac/seed.json
        Restart=always
`

const manifests = `
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: worker, namespace: cosmicac}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: worker}
subjects: [{kind: ServiceAccount, name: worker, namespace: cosmicac}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: worker, namespace: cosmicac}
rules: [{apiGroups: [kubevirt.io], resources: [virtualmachineinstances], verbs: [get, list]}]
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: worker, namespace: cosmicac}
---
apiVersion: v1
kind: Namespace
metadata: {name: cosmicac}
`

// up starts the test's cluster: two nodes of eight GPUs, an agent disk, and manifests that arrive in the wrong order.
func up(t *testing.T) *cluster {
	t.Helper()
	base := t.TempDir()
	agents, yamls, state := filepath.Join(base, "agents"), filepath.Join(base, "manifests"), filepath.Join(base, "state")
	for _, d := range []string{agents, yamls} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(agents, "agent.sh"), []byte(agentScript), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(yamls, "all.yaml"), []byte(manifests), 0o644); err != nil {
		t.Fatal(err)
	}
	return start(t, state, upArgs(base)...)
}

func upArgs(base string) []string {
	return []string{
		"--pool", "name=us,nodes=2,gpus=8,resource=nvidia.com/GH100_H100_SXM5_80GB",
		"--agent-dir", filepath.Join(base, "agents"), "--manifests", filepath.Join(base, "manifests"),
		"--kubeconfig-for", "cosmicac/worker=" + filepath.Join(base, "worker.kubeconfig"),
		"--import-time", "300ms", "--boot-time", "100ms",
	}
}

// TestCluster is one story on one cluster, since starting one costs seconds. Its parts build on each other.
func TestCluster(t *testing.T) {
	c := up(t)
	k := c.admin()

	if n := len(k.items("/api/v1/nodes")); n != 2 {
		t.Fatalf("%d nodes, want 2", n)
	}
	for _, node := range k.items("/api/v1/nodes") {
		labels := node.at("metadata.labels").(map[string]any)
		if labels["topology.kubernetes.io/region"] != "us" || labels["cosmicac.dev/simulated"] != "true" || labels["kubevirt.io/schedulable"] != "true" {
			t.Errorf("labels of %s: %v", node.str("metadata.name"), labels)
		}
		if q := node.at("status.allocatable").(map[string]any)["nvidia.com/GH100_H100_SXM5_80GB"]; q != "8" {
			t.Errorf("%s offers %v GPUs", node.str("metadata.name"), q)
		}
	}
	kv := k.get("/apis/kubevirt.io/v1/namespaces/kubevirt/kubevirts/kubevirt")
	if kv.str("status.phase") != "Deployed" || kv.str("status.observedKubeVirtVersion") != "v1.7.0" {
		t.Errorf("kubevirt says %v", kv["status"])
	}

	t.Run("an account gets just its rights", func(t *testing.T) {
		w := c.client(c.Kubeconfigs["cosmicac/worker"])
		w.t = t
		if code, o := w.do(http.MethodGet, "/apis/kubevirt.io/v1/namespaces/cosmicac/virtualmachineinstances", nil); code != http.StatusOK {
			t.Errorf("list in its namespace: %d %v", code, o["message"])
		}
		if code, _ := w.do(http.MethodGet, ns+"secrets", nil); code != http.StatusForbidden {
			t.Errorf("secrets of another namespace: %d", code)
		}
	})
	t.Run("a second process on the folder is refused", func(t *testing.T) {
		out, err := exec.Command(binary, "up", "--dir", c.dir).CombinedOutput()
		if err == nil || !bytes.Contains(out, []byte("another development cluster runs")) {
			t.Errorf("%v: %s", err, out)
		}
	})
	t.Run("admission is kubevirt's", func(t *testing.T) { admission(t, c) })
	t.Run("gpus are counted by the scheduler", func(t *testing.T) { overbooking(t, c) })
	t.Run("a failing import is retried for ever", func(t *testing.T) { failingImport(t, c) })
	t.Run("faults are switched live", func(t *testing.T) { faultSwitch(t, c) })
	t.Run("an agent boots and survives", func(t *testing.T) { agentLife(t, c) })
}

func (c *cluster) in(t *testing.T) *client { k := c.admin(); k.t = t; return k }

func admission(t *testing.T, c *cluster) {
	k := c.in(t)
	for _, bad := range []struct{ name, body, want string }{
		{"unknown field", strings.Replace(gpuVMI("bad", 1, "", ""), "cpu: {cores: 2}", "cpu: {kores: 2}", 1), "kores"},
		{"wrong type", strings.Replace(gpuVMI("bad", 1, "", ""), "cores: 2", "cores: two", 1), "cores"},
		{"disk without volume", gpuVMI("bad", 1, "{name: root, disk: {bus: virtio}}", ""), "volume"},
	} {
		js, _ := json.Marshal(yamlObject(t, bad.body))
		code, o := k.do(http.MethodPost, vmis+"?fieldValidation=Strict", string(js))
		if code < 400 || code > 422 || !strings.Contains(fmt.Sprint(o["message"]), bad.want) {
			t.Errorf("%s: %d %v", bad.name, code, o["message"])
		}
	}
	k.create(vmis, strings.ReplaceAll(gpuVMI("alien", 1, "", ""), "GH100_H100_SXM5_80GB", "UNHEARD_OF"))
	eventually(t, func() string {
		o := k.get(vmis + "/alien")
		cond := o.condition("Synchronized")
		if o.str("status.phase") == "Pending" && cond.str("reason") == "FailedCreate" &&
			strings.Contains(cond.str("message"), "GPU nvidia.com/UNHEARD_OF is not permitted in permittedHostDevices configuration") {
			return ""
		}
		return fmt.Sprint("the unpermitted vmi says ", o["status"])
	})
	if code, o := k.do(http.MethodPatch, vmis+"/alien", `{"spec":{"hostname":"other"}}`); code != http.StatusForbidden ||
		!strings.Contains(fmt.Sprint(o["message"]), "update of VMI object is restricted") {
		t.Errorf("change of a spec: %d %v", code, o["message"])
	}
	if code, _ := k.do(http.MethodPatch, vmis+"/alien", `{"metadata":{"annotations":{"a":"b"}}}`); code != http.StatusOK {
		t.Errorf("change of an annotation: %d", code)
	}
	if code, _ := k.do(http.MethodGet, vmis+"/alien/status", nil); code != http.StatusNotFound {
		t.Errorf("a vmi has a status subresource: %d", code)
	}
	k.delete(vmis + "/alien")
	k.untilGone(vmis + "/alien")
}

func overbooking(t *testing.T, c *cluster) {
	k := c.in(t)
	for _, name := range []string{"one", "two"} {
		k.create(vmis, gpuVMI(name, 6, "", ""))
	}
	one, two := k.untilPhase(vmis+"/one", "Running"), k.untilPhase(vmis+"/two", "Running")
	if one.str("status.nodeName") == two.str("status.nodeName") {
		t.Errorf("both run on %s", one.str("status.nodeName"))
	}
	if m := one.condition("LiveMigratable"); m.str("status") != "False" || m.str("reason") != "HostDeviceNotLiveMigratable" {
		t.Errorf("LiveMigratable is %v", m)
	}
	if one.condition("Ready").str("status") != "True" || len(one.at("status.phaseTransitionTimestamps").([]any)) < 4 {
		t.Errorf("status is %v", one["status"])
	}
	pods := k.items(ns + "pods?labelSelector=kubevirt.io%3Dvirt-launcher,kubevirt.io/created-by%3D" + one.str("metadata.uid"))
	if len(pods) != 1 || pods[0].at("metadata.labels").(map[string]any)["cosmicac.dev/job"] != "one" {
		t.Errorf("launcher pods of one: %v", pods)
	}
	k.create(vmis, gpuVMI("three", 6, "", ""))
	eventually(t, func() string {
		o := k.get(vmis + "/three")
		cond := o.condition("PodScheduled")
		if o.str("status.phase") == "Scheduling" && cond.str("reason") == "Unschedulable" &&
			strings.Contains(cond.str("message"), "Insufficient nvidia.com/GH100_H100_SXM5_80GB") {
			return ""
		}
		return fmt.Sprint("the third vmi says ", o["status"])
	})
	k.delete(vmis + "/one")
	k.untilPhase(vmis+"/three", "Running")
	for _, name := range []string{"two", "three"} {
		k.delete(vmis + "/" + name)
	}
	for _, name := range []string{"one", "two", "three"} {
		k.untilGone(vmis + "/" + name)
	}
}

func failingImport(t *testing.T, c *cluster) {
	k := c.in(t)
	k.create(dvs, dataVolume("broken", "docker://reg.example/does-not-exist:1"))
	eventually(t, func() string {
		o := k.get(dvs + "/broken")
		if o.str("status.phase") == "Failed" {
			t.Fatal("a failing import became Failed")
		}
		n, _ := o.at("status.restartCount").(float64)
		if r := o.condition("Running"); n >= 3 && r.str("status") == "False" && strings.Contains(r.str("message"), "manifest unknown") {
			return ""
		}
		return fmt.Sprint("the broken import says ", o["status"])
	})
	k.delete(dvs + "/broken")
	k.untilGone(dvs + "/broken")
}

func faultSwitch(t *testing.T, c *cluster) {
	k := c.in(t)
	const faults = "/api/v1/namespaces/kube-system/configmaps/cosmicac-devcluster-faults"
	k.create("/api/v1/namespaces/kube-system/configmaps", `
apiVersion: v1
kind: ConfigMap
metadata: {name: cosmicac-devcluster-faults}
data: {allocatable-zero: us-gpu-00, node-not-ready: us-gpu-01}
`)
	offers := func(node, gpus, ready string) {
		t.Helper()
		eventually(t, func() string {
			o := k.get("/api/v1/nodes/" + node)
			got, _ := o.at("status.allocatable").(map[string]any)
			if got["nvidia.com/GH100_H100_SXM5_80GB"] == gpus && o.condition("Ready").str("status") == ready {
				return ""
			}
			return fmt.Sprint(node, " says ", o["status"])
		})
	}
	offers("us-gpu-00", "0", "True")
	offers("us-gpu-01", "8", "Unknown")
	k.delete(faults)
	offers("us-gpu-00", "8", "True")
	offers("us-gpu-01", "8", "True")
}

// agentLife boots a VM from a seed and an imported disk, kills the cluster under it, stops it cleanly, and at last
// deletes everything.
func agentLife(t *testing.T, c *cluster) {
	k := c.in(t)
	base := filepath.Dir(c.dir)
	anchor := k.create(ns+"configmaps", `{apiVersion: v1, kind: ConfigMap, metadata: {name: anchor}}`)
	k.create(dvs, dataVolume("root", "docker://reg.example/ubuntu:1"))
	k.create(vmis, gpuVMI("a", 1,
		"{name: root, disk: {bus: virtio}}, {name: seed, disk: {bus: virtio}}, {name: agent, disk: {bus: virtio}}",
		"{name: root, dataVolume: {name: root}}, {name: seed, cloudInitNoCloud: {secretRef: {name: seed}, networkDataSecretRef: {name: seed}}}, "+
			"{name: agent, containerDisk: {image: reg.example/agent}}"))
	// The seed comes late: the pod must wait for it, as a kubelet does.
	eventually(t, func() string {
		if o := k.get(vmis + "/a"); o.str("status.phase") != "Scheduling" {
			return "phase is " + o.str("status.phase")
		}
		return ""
	})
	k.create(ns+"secrets", fmt.Sprintf(seed, "seed", anchor.str("metadata.uid")))
	vmi := k.untilPhase(vmis+"/a", "Running")
	uid := vmi.str("metadata.uid")
	folder := filepath.Join(c.dir, "vms", uid)
	says := func(n int) {
		t.Helper()
		eventually(t, func() string {
			raw, _ := os.ReadFile(filepath.Join(folder, "console.log"))
			if strings.Count(string(raw), " sees my-seed\n") >= n {
				return ""
			}
			return fmt.Sprintf("console says %q", raw)
		})
	}
	says(1)
	if os.Geteuid() == 0 && strings.Contains(c.log.String(), "plain processes") {
		t.Log("namespaces are not permitted here: vms ran as plain processes")
	} else if raw, _ := os.ReadFile(filepath.Join(folder, "console.log")); !bytes.Contains(raw, []byte("agent of job-a sees")) && os.Geteuid() == 0 {
		t.Errorf("the agent does not see its host name: %q", raw)
	}
	pid := vmPID(t, folder)

	c.kill9()
	if !alive(pid) {
		t.Fatal("the vm died with the cluster")
	}
	c2 := start(t, c.dir, upArgs(base)...)
	k = c2.in(t)
	if c2.URL != c.URL {
		t.Errorf("the url changed from %s to %s", c.URL, c2.URL)
	}
	again := k.untilPhase(vmis+"/a", "Running")
	if again.str("metadata.uid") != uid || vmPID(t, folder) != pid || !alive(pid) {
		t.Errorf("uid %s and pid %d became %s and %d", uid, pid, again.str("metadata.uid"), vmPID(t, folder))
	}

	began := time.Now()
	if err := c2.stop(); err != nil {
		t.Errorf("clean stop: %v", err)
	}
	t.Logf("clean stop took %s", time.Since(began).Round(time.Millisecond))
	if alive(pid) {
		t.Error("the vm outlived a clean stop")
	}
	c3 := start(t, c.dir, upArgs(base)...)
	k = c3.in(t)
	if o := k.untilPhase(vmis+"/a", "Running"); o.str("metadata.uid") != uid {
		t.Errorf("uid %s became %s", uid, o.str("metadata.uid"))
	}
	says(2)
	if raw, _ := os.ReadFile(filepath.Join(folder, "root", "root", "starts")); len(raw) < 2 {
		t.Errorf("the root disk was not kept: %q", raw)
	}

	claim := k.get(ns + "persistentvolumeclaims/root")
	k.delete(vmis + "/a")
	k.untilGone(vmis + "/a")
	k.delete(dvs + "/root")
	k.delete(ns + "configmaps/anchor")
	for _, path := range []string{
		ns + "secrets/seed", ns + "persistentvolumeclaims/root", dvs + "/root",
		"/api/v1/persistentvolumes/" + claim.str("spec.volumeName"),
	} {
		k.untilGone(path)
	}
	eventually(t, func() string {
		if pods := k.items(ns + "pods"); len(pods) > 0 {
			return fmt.Sprint("pods remain: ", len(pods))
		}
		for _, d := range []string{folder, filepath.Join(c.dir, "disks", claim.str("metadata.uid"))} {
			if _, err := os.Stat(d); err == nil {
				return d + " remains"
			}
		}
		return ""
	})
}

func TestBadFlagsNameTheFlag(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"up"}, "--dir is required"},
		{[]string{"up", "--dir", filepath.Join(file, "x")}, "--dir must be a writable folder"},
		{[]string{"up", "--dir", t.TempDir(), "--pool", "nonsense"}, "--pool"},
		{[]string{"up", "--dir", t.TempDir(), "--pool", "name=a,nodes=0,resource=nvidia.com/AD104GL_L4"}, "nodes must be a whole number"},
		{[]string{"down"}, "unknown command"},
	} {
		out, err := exec.Command(binary, c.args...).CombinedOutput()
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.ExitCode() != 2 || !bytes.Contains(out, []byte(c.want)) {
			t.Errorf("%q: %v %s", c.args, err, out)
		}
	}
}

func dataVolume(name, url string) string {
	return fmt.Sprintf(`
apiVersion: cdi.kubevirt.io/v1beta1
kind: DataVolume
metadata: {name: %s}
spec:
  source: {registry: {url: %q}}
  storage: {resources: {requests: {storage: 10Gi}}}
`, name, url)
}

func vmPID(t *testing.T, folder string) int {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(folder, "process.json"))
	if err != nil {
		t.Fatal(err)
	}
	var p struct {
		PID int `json:"pid"`
	}
	if err := json.Unmarshal(raw, &p); err != nil {
		t.Fatal(err)
	}
	return p.PID
}

// alive takes a zombie for dead: after a kill of the cluster nobody may reap.
func alive(pid int) bool {
	if syscall.Kill(pid, 0) != nil {
		return false
	}
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && !bytes.Contains(raw, []byte(") Z "))
}
