package capacity

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"

	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/label"
)

// schedulable says whether a node takes new virtual machines, and why not.
// Whether virt-handler still beats is virt-controller's word in a label: our
// own clock is not compared with the cluster's.
func schedulable(node *corev1.Node, tolerations []corev1.Toleration) (why []string, ok bool) {
	if node.DeletionTimestamp != nil {
		why = append(why, "the node is being removed")
	}
	if node.Spec.Unschedulable {
		why = append(why, "cordoned")
	}
	if ready, c := Ready(node); !ready {
		note := "not ready"
		if c != nil && !c.LastTransitionTime.IsZero() {
			note = fmt.Sprintf("not ready since %s", c.LastTransitionTime.UTC().Format("2006-01-02 15:04:05Z"))
			if c.Reason != "" {
				note += " (" + c.Reason + ")"
			}
		}
		why = append(why, note)
	}
	for _, c := range node.Status.Conditions {
		switch c.Type {
		case corev1.NodeMemoryPressure, corev1.NodeDiskPressure, corev1.NodePIDPressure:
			if c.Status == corev1.ConditionTrue {
				why = append(why, string(c.Type))
			}
		}
	}
	for _, t := range node.Spec.Taints {
		if t.Effect == corev1.TaintEffectPreferNoSchedule || tolerated(t, tolerations) || t.Key == corev1.TaintNodeUnschedulable {
			continue
		}
		why = append(why, fmt.Sprintf("taint %s", t.ToString()))
	}
	if node.Labels[label.KubeVirtSchedulable] != "true" {
		why = append(why, fmt.Sprintf("KubeVirt does not run on it (label %s)", label.KubeVirtSchedulable))
	}
	return why, len(why) == 0
}

// Ready is the node's Ready condition; the condition is nil when it has none.
func Ready(node *corev1.Node) (bool, *corev1.NodeCondition) {
	for i := range node.Status.Conditions {
		if c := &node.Status.Conditions[i]; c.Type == corev1.NodeReady {
			return c.Status == corev1.ConditionTrue, c
		}
	}
	return false, nil
}

func tolerated(t corev1.Taint, tolerations []corev1.Toleration) bool {
	for _, tol := range tolerations {
		if tol.Effect != "" && tol.Effect != t.Effect {
			continue
		}
		if tol.Key == "" && tol.Operator == corev1.TolerationOpExists {
			return true
		}
		if tol.Key != t.Key {
			continue
		}
		if tol.Operator == corev1.TolerationOpExists || tol.Value == t.Value {
			return true
		}
	}
	return false
}

// requestOf is a pod's effective request: the greater of what its containers
// ask for together and what its start-up needs at any moment, with sidecars.
func requestOf(p *corev1.Pod) map[corev1.ResourceName]int64 {
	amount := func(l corev1.ResourceList, name corev1.ResourceName) int64 {
		q, ok := l[name]
		switch {
		case !ok:
			return 0
		case name == corev1.ResourceCPU:
			return q.MilliValue()
		default:
			return q.Value()
		}
	}
	names := map[corev1.ResourceName]bool{}
	for _, list := range [][]corev1.Container{p.Spec.Containers, p.Spec.InitContainers} {
		for i := range list {
			for name := range list[i].Resources.Requests {
				names[name] = true
			}
		}
	}
	for name := range p.Spec.Overhead {
		names[name] = true
	}
	out := make(map[corev1.ResourceName]int64, len(names))
	for name := range names {
		var running, sidecars, peak int64
		for i := range p.Spec.Containers {
			running += amount(p.Spec.Containers[i].Resources.Requests, name)
		}
		for i := range p.Spec.InitContainers {
			c := &p.Spec.InitContainers[i]
			want := amount(c.Resources.Requests, name)
			if c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways {
				sidecars += want
				peak = max(peak, sidecars)
				continue
			}
			peak = max(peak, sidecars+want)
		}
		out[name] = max(running+sidecars, peak) + amount(p.Spec.Overhead, name)
	}
	return out
}
