package app

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/capacity"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/label"
)

const cx7 = "nvidia.com/mlnx_cx7"

// joinedBy names the InfiniBand adapters and the bridge of the pools that have some.
func joinedBy(s *Setup) { s.Config.Fabric.Devices, s.Config.Overlay.Driver = []string{cx7}, "ovs" }

// vllm asks for a replica of a model over these nodes.
func vllm(job, attempt string, gpus uint32, nodes ...string) *workerv1.ApplyAttemptRequest {
	req := request("", job, attempt, gpus, nodes...)
	req.Spec.Kind, req.Spec.Image = orkv1.JobKind_JOB_KIND_MANAGED_INFERENCE, nil
	req.Spec.Inference = &orkv1.InferenceSpec{Model: "Qwen/Qwen3-32B", Runtime: "vllm", Replicas: 1}
	return req
}

func adapters(w *worker, node string) *capacity.Adapters {
	_, rack := w.Hub.Latest()
	return rack.Nodes[node].Adapters[cx7]
}

func TestAReplicaOverTwoNodesGetsAdaptersOnBothOrNothing(t *testing.T) {
	t.Parallel()
	d := start(t)
	w := begin(t, d, "fabric", joinedBy).serves()
	if r, _ := w.Hub.Latest(); !r.Fabric {
		t.Fatalf("the rack reports no fabric: %v", r)
	}
	job, attempt := id(t, "j"), id(t, "a")
	w.claim(vllm(job, attempt, 8, "fabric-gpu-00", "fabric-gpu-01"))
	st := w.until(attempt, up1)
	for k, n := range st.Nodes {
		vmi, err := d.admin.KubeVirt.VirtualMachineInstances(namespace).Get(t.Context(), n.VmiName, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		devices := vmi.Spec.Domain.Devices.HostDevices
		if len(devices) != 4 || devices[0].DeviceName != cx7 || devices[0].Name == devices[1].Name || len(vmi.Spec.Domain.Devices.GPUs) != 8 {
			t.Errorf("machine %d has %v and %d GPUs", k, devices, len(vmi.Spec.Domain.Devices.GPUs))
		}
		pods, err := d.admin.Core.Pods(namespace).List(t.Context(), metav1.ListOptions{LabelSelector: label.KubeVirtCreatedBy + "=" + n.VmiUid})
		if err != nil || len(pods.Items) != 1 || pods.Items[0].Spec.NodeName != fmt.Sprintf("fabric-gpu-0%d", k) {
			t.Fatalf("pods of machine %d: %v, %v", k, pods.Items, err)
		}
		if q := pods.Items[0].Spec.Containers[0].Resources.Requests[corev1.ResourceName(cx7)]; q.Value() != 4 {
			t.Errorf("the pod of machine %d asks for %s adapters", k, &q)
		}
	}
	// Nothing of another gang is made while this one holds the adapters.
	second := id(t, "b")
	if res := w.apply(vllm(id(t, "k"), second, 8, "fabric-gpu-00", "fabric-gpu-01")); res.Claimed || res.Reason != orkv1.Reason_REASON_BUSY {
		t.Errorf("a second one: %v", res)
	}
	if left := d.left(t, of(second)); len(left) > 0 {
		t.Errorf("made for a refused gang: %v", left)
	}
	// A worker that starts anew counts them as held.
	w.end()
	w = begin(t, d, "fabric", joinedBy).serves()
	w.until(attempt, up1)
	if a := adapters(w, "fabric-gpu-01"); a == nil || a.Held != 4 || a.Free() != 0 {
		t.Errorf("after a restart: %+v", a)
	}
	w.remove(attempt)
	w.gone(attempt)
	if left := d.left(t, of(attempt)); len(left) > 0 {
		t.Fatalf("left: %v", left)
	}
	if a := adapters(w, "fabric-gpu-01"); a == nil || a.Free() != 4 {
		t.Errorf("after the end: %+v", a)
	}
	// A machine alone gets none.
	alone := id(t, "c")
	w.claim(request("fabric", id(t, "l"), alone, 1))
	vmi, err := d.admin.KubeVirt.VirtualMachineInstances(namespace).Get(t.Context(), w.until(alone, up1).Nodes[0].VmiName, metav1.GetOptions{})
	if err != nil || len(vmi.Spec.Domain.Devices.HostDevices) > 0 {
		t.Errorf("a machine alone has %v, %v", vmi.Spec.Domain.Devices.HostDevices, err)
	}
	w.remove(alone)
	w.gone(alone)
}

func TestWithoutNamedAdaptersNoReplicaSpansNodes(t *testing.T) {
	t.Parallel()
	d := start(t)
	w := begin(t, d, "fabric", func(s *Setup) { s.Config.Rack.ID = "fabric-none" })
	w.Entry.Put(&orkv1.RackEntry{Id: "fabric-none"})
	w.serves()
	if r, _ := w.Hub.Latest(); r.Fabric {
		t.Error("the rack reports a fabric")
	}
	res := w.apply(vllm(id(t, "j"), id(t, "a"), 1, "fabric-gpu-00", "fabric-gpu-01"))
	if res.Claimed || res.Reason != orkv1.Reason_REASON_NO_FABRIC || !strings.Contains(res.Message, "fabric.devices") {
		t.Errorf("%v", res)
	}
}

func TestTheReadinessCheckSaysWhetherReplicasCanSpanNodes(t *testing.T) {
	t.Parallel()
	d := start(t)
	for device, want := range map[string]string{
		cx7: "joins 2 nodes", "nvidia.com/none": "does not permit nvidia.com/none", "": "stays within one node",
		"off": "the overlay is off", "bridge": "0 of 2 nodes have bridge br-none", "on": "bridge br-cosmicac is on 2 of 2 nodes; ",
	} {
		args := []string{"--kubeconfig", d.kubeconfig, "--node-selector", "topology.kubernetes.io/region=fabric"}
		switch device {
		case "", "off":
		case "bridge":
			args = append(args, "--overlay-bridge", "br-none")
		case "on":
			args = append(args, "--overlay-bridge", "br-cosmicac")
		default:
			args = append(args, "--fabric-device", device, "--overlay-bridge", "br-cosmicac")
		}
		var out, errs bytes.Buffer
		if code := check(t.Context(), args, &out, &errs); code != checkGood || !strings.Contains(out.String(), want) {
			t.Errorf("%q: code %d, nothing of %q in:\n%s%s", device, code, want, out.String(), errs.String())
		}
	}
}
