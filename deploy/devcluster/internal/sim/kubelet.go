package sim

import (
	"context"
	"reflect"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	kubevirtv1 "kubevirt.io/api/core/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/cosmicac/cosmicac/deploy/devcluster/internal/fault"
)

// kubelet plays the pods of simulated nodes. No container runs: a virt-launcher pod follows its machine, any other pod
// just is Running until it is deleted.
type kubelet struct{ *world }

func (k *kubelet) add(mgr ctrl.Manager) error {
	return ctrl.NewControllerManagedBy(mgr).Named("simulated-kubelet").
		For(&corev1.Pod{}).
		WatchesRawSource(source.Channel(k.faults.pods, forward{})).
		WithOptions(controller.Options{MaxConcurrentReconciles: 32}).
		Complete(k)
}

// Reconcile does a pod's next step.
func (k *kubelet) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	pod := &corev1.Pod{}
	if err := k.Get(ctx, req.NamespacedName, pod); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if pod.Spec.NodeName == "" {
		return ctrl.Result{}, nil
	}
	node := &corev1.Node{}
	if err := k.Get(ctx, types.NamespacedName{Name: pod.Spec.NodeName}, node); err != nil || !simulated(node) {
		return ctrl.Result{}, client.IgnoreNotFound(err) // pods of a node that is gone are the pod garbage collector's
	}
	if k.faults.dead(node.Name) {
		if err := k.unready(ctx, pod); err != nil {
			return ctrl.Result{}, err
		}
		if k.faults.has(fault.NodeLost, node.Name) && pod.DeletionTimestamp == nil {
			return ctrl.Result{}, ignoreRace(k.Delete(ctx, pod, client.Preconditions{UID: &pod.UID})) // taint eviction
		}
		return ctrl.Result{}, nil
	}
	vm := types.UID(pod.Labels[kubevirtv1.CreatedByLabel])
	switch {
	case pod.DeletionTimestamp != nil:
		return k.terminate(ctx, pod, vm)
	case pod.Status.Phase == corev1.PodPending || pod.Status.Phase == "":
		return k.start(ctx, pod, node)
	case pod.Status.Phase == corev1.PodRunning && vm != "":
		st := k.machines.State(string(vm))
		if st.Exists && !st.Running {
			return ctrl.Result{}, k.finish(ctx, pod, st.Code, "Error")
		}
		if !st.Exists && !temporary(pod) && k.faults.has(fault.OOMKilled, node.Name) {
			return ctrl.Result{}, k.finish(ctx, pod, 137, "OOMKilled")
		}
	}
	if pod.Status.Phase == corev1.PodRunning && !podReady(pod) {
		return ctrl.Result{}, k.run(ctx, pod, node) // a node that came back
	}
	return ctrl.Result{}, nil
}

func (k *kubelet) start(ctx context.Context, pod *corev1.Pod, node *corev1.Node) (ctrl.Result, error) {
	if k.faults.has(fault.RejectPods, node.Name) {
		pod.Status.Phase, pod.Status.Reason = corev1.PodFailed, "UnexpectedAdmissionError"
		pod.Status.Message = "Pod was rejected: Allocate failed due to no healthy devices present; cannot allocate unhealthy devices, which is unexpected (simulated)"
		return ctrl.Result{}, ignoreRace(k.Status().Update(ctx, pod))
	}
	if reason, words := k.stuck(pod, node); reason != "" {
		k.event(pod, corev1.EventTypeWarning, reason, "%s", words)
		if reason == "FailedCreatePodSandBox" {
			reason = "ContainerCreating"
		}
		k.containers(pod, corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason, Message: words}}, false)
		return ctrl.Result{RequeueAfter: 2 * time.Second}, ignoreRace(k.updateIfChanged(ctx, pod))
	}
	if missing, err := k.missingSecret(ctx, pod); err != nil || missing != "" {
		if missing != "" {
			k.event(pod, corev1.EventTypeWarning, "FailedMount", "MountVolume.SetUp failed for volume %q: secret %q not found", "seed", missing)
			k.containers(pod, corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ContainerCreating"}}, false)
			err = ignoreRace(k.updateIfChanged(ctx, pod))
		}
		return ctrl.Result{RequeueAfter: time.Second}, err
	}
	if left := k.clock.left(pod.UID, "start", k.options.PodTime); left > 0 {
		return ctrl.Result{RequeueAfter: left}, nil
	}
	return ctrl.Result{}, k.run(ctx, pod, node)
}

// stuck says why a pod's containers do not start on a broken node, in the node's words.
func (k *kubelet) stuck(pod *corev1.Pod, node *corev1.Node) (reason, words string) {
	switch {
	case k.faults.has(fault.StuckScheduling, node.Name):
		return "FailedCreatePodSandBox", "Failed to create pod sandbox: plugin type=\"multus\" name=\"multus-cni-network\" failed (add) (simulated)"
	case k.faults.has(fault.VFIOMissing, node.Name) && usesGPU(pod):
		return "CreateContainerError", "Error: failed to generate spec: lstat /dev/vfio/42: no such file or directory (simulated)"
	}
	return "", ""
}

// usesGPU says whether a pod asks for a device of a pool.
func usesGPU(pod *corev1.Pod) bool {
	for _, c := range pod.Spec.Containers {
		for name := range c.Resources.Requests {
			if strings.HasPrefix(string(name), "nvidia.com/") {
				return true
			}
		}
	}
	return false
}

// missingSecret names a secret volume of the pod that does not exist yet; a real kubelet waits for it.
func (k *kubelet) missingSecret(ctx context.Context, pod *corev1.Pod) (string, error) {
	for _, v := range pod.Spec.Volumes {
		if v.Secret == nil || ptr.Deref(v.Secret.Optional, false) {
			continue
		}
		err := k.live.Get(ctx, types.NamespacedName{Namespace: pod.Namespace, Name: v.Secret.SecretName}, &corev1.Secret{})
		if client.IgnoreNotFound(err) != nil {
			return "", err
		}
		if err != nil {
			return v.Secret.SecretName, nil
		}
	}
	return "", nil
}

func (k *kubelet) run(ctx context.Context, pod *corev1.Pod, node *corev1.Node) error {
	pod.Status.Phase = corev1.PodRunning
	if pod.Status.StartTime == nil {
		pod.Status.StartTime = ptr.To(now())
	}
	pod.Status.HostIP = address("172.20", node.Name)
	pod.Status.HostIPs = []corev1.HostIP{{IP: pod.Status.HostIP}}
	pod.Status.PodIP = address("10.244", string(pod.UID))
	pod.Status.PodIPs = []corev1.PodIP{{IP: pod.Status.PodIP}}
	k.containers(pod, corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: *pod.Status.StartTime}}, true)
	for _, t := range []corev1.PodConditionType{corev1.PodReadyToStartContainers, corev1.PodInitialized, corev1.ContainersReady, corev1.PodReady} {
		setPodCondition(pod, t, corev1.ConditionTrue, "")
	}
	return ignoreRace(k.updateIfChanged(ctx, pod))
}

// unready is what the node controller does to pods of a node that it no longer hears of.
func (k *kubelet) unready(ctx context.Context, pod *corev1.Pod) error {
	if podReady(pod) {
		setPodCondition(pod, corev1.PodReady, corev1.ConditionFalse, "NodeNotReady")
		return ignoreRace(k.Status().Update(ctx, pod))
	}
	return nil
}

// terminate ends a deleted pod once its machine is down, and only then: until that the GPU stays taken.
func (k *kubelet) terminate(ctx context.Context, pod *corev1.Pod, vm types.UID) (ctrl.Result, error) {
	code := 0
	if vm != "" {
		st := k.machines.State(string(vm))
		if st.Running {
			return ctrl.Result{RequeueAfter: time.Second}, nil // the VM's reconciler presses the button
		}
		code = st.Code
	}
	if pod.Status.Phase == corev1.PodRunning {
		if err := k.finish(ctx, pod, code, "Error"); err != nil {
			return ctrl.Result{}, err
		}
		return ctrl.Result{RequeueAfter: 50 * time.Millisecond}, nil
	}
	if k.faults.has(fault.StuckTerminating, pod.Spec.NodeName) {
		return ctrl.Result{}, nil
	}
	k.clock.forget(pod.UID)
	err := k.Delete(ctx, pod, client.GracePeriodSeconds(0), client.Preconditions{UID: &pod.UID})
	return ctrl.Result{}, ignoreRace(err)
}

func (k *kubelet) finish(ctx context.Context, pod *corev1.Pod, code int, reason string) error {
	pod.Status.Phase = corev1.PodFailed
	if code == 0 {
		pod.Status.Phase, reason = corev1.PodSucceeded, "Completed"
	}
	if code < 0 {
		code = 137
	}
	k.containers(pod, corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{
		ExitCode: int32(code), Reason: reason, FinishedAt: now(), StartedAt: ptr.Deref(pod.Status.StartTime, now()),
	}}, false)
	setPodCondition(pod, corev1.ContainersReady, corev1.ConditionFalse, "PodCompleted")
	setPodCondition(pod, corev1.PodReady, corev1.ConditionFalse, "PodCompleted")
	return ignoreRace(k.Status().Update(ctx, pod))
}

func (k *kubelet) containers(pod *corev1.Pod, state corev1.ContainerState, ready bool) {
	pod.Status.ContainerStatuses = nil
	for _, c := range pod.Spec.Containers {
		pod.Status.ContainerStatuses = append(pod.Status.ContainerStatuses, corev1.ContainerStatus{
			Name: c.Name, Image: c.Image, ImageID: c.Image, ContainerID: "simulated://" + string(pod.UID) + "/" + c.Name,
			Ready: ready, Started: ptr.To(ready), State: state,
		})
	}
}

func (k *kubelet) updateIfChanged(ctx context.Context, pod *corev1.Pod) error {
	old := &corev1.Pod{}
	if err := k.Get(ctx, client.ObjectKeyFromObject(pod), old); err != nil {
		return err
	}
	if reflect.DeepEqual(old.Status, pod.Status) {
		return nil
	}
	return k.Status().Update(ctx, pod)
}

func podReady(pod *corev1.Pod) bool {
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

func setPodCondition(pod *corev1.Pod, t corev1.PodConditionType, s corev1.ConditionStatus, reason string) {
	for i := range pod.Status.Conditions {
		c := &pod.Status.Conditions[i]
		if c.Type == t {
			if c.Status != s {
				c.LastTransitionTime = now()
			}
			c.Status, c.Reason = s, reason
			return
		}
	}
	pod.Status.Conditions = append(pod.Status.Conditions, corev1.PodCondition{Type: t, Status: s, Reason: reason, LastTransitionTime: now()})
}

// event tells people; nothing may depend on it.
func (w *world) event(o client.Object, kind, reason, format string, args ...any) {
	w.events.Eventf(o, nil, kind, reason, reason, format, args...)
}
