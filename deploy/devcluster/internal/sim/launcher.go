package sim

import (
	"fmt"
	"hash/fnv"
	"maps"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	kubevirtv1 "kubevirt.io/api/core/v1"
)

// devicesOf counts the extended resources a VMI asks for: one for each GPU or host device entry.
func devicesOf(vmi *kubevirtv1.VirtualMachineInstance) map[string]int64 {
	out := map[string]int64{}
	for _, g := range vmi.Spec.Domain.Devices.GPUs {
		if g.DeviceName != "" {
			out[g.DeviceName]++
		}
	}
	for _, d := range vmi.Spec.Domain.Devices.HostDevices {
		if d.DeviceName != "" {
			out[d.DeviceName]++
		}
	}
	return out
}

// notPermitted returns KubeVirt's words for the first device that the KubeVirt resource does not list. No list at all
// means no check.
func notPermitted(vmi *kubevirtv1.VirtualMachineInstance, kv *kubevirtv1.KubeVirt) string {
	p := kv.Spec.Configuration.PermittedHostDevices
	if p == nil {
		return ""
	}
	known := map[string]bool{}
	for _, d := range p.PciHostDevices {
		known[d.ResourceName] = true
	}
	for _, d := range p.MediatedDevices {
		known[d.ResourceName] = true
	}
	for _, g := range vmi.Spec.Domain.Devices.GPUs {
		if g.DeviceName != "" && !known[g.DeviceName] {
			return fmt.Sprintf("GPU %s is not permitted in permittedHostDevices configuration", g.DeviceName)
		}
	}
	for _, d := range vmi.Spec.Domain.Devices.HostDevices {
		if d.DeviceName != "" && !known[d.DeviceName] {
			return fmt.Sprintf("HostDevice %s is not permitted in permittedHostDevices configuration", d.DeviceName)
		}
	}
	return ""
}

// temporary says whether a pod is only there to choose a node for disks that wait for their consumer.
func temporary(pod *corev1.Pod) bool {
	return pod.Annotations[kubevirtv1.EphemeralProvisioningObject] != ""
}

func launcherName(vmi *kubevirtv1.VirtualMachineInstance) string {
	// KubeVirt lets the server choose the last part. A fixed one, from the uid, makes creation idempotent.
	name := vmi.Name
	if len(name) > 200 {
		name = name[:200]
	}
	return "virt-launcher-" + name + "-" + strings.ReplaceAll(string(vmi.UID), "-", "")[:5]
}

// chooserName is the name of the temporary pod of a VMI whose disks wait for their consumer.
func chooserName(vmi *kubevirtv1.VirtualMachineInstance) string {
	name := launcherName(vmi)
	return name[:len(name)-5] + strings.ReplaceAll(string(vmi.UID), "-", "")[5:10]
}

// hostname is the guest's name: the first part of what is asked for, or of the VMI's name.
func hostname(vmi *kubevirtv1.VirtualMachineInstance) string {
	name := vmi.Spec.Hostname
	if name == "" {
		name = vmi.Name
	}
	if len(name) > 63 {
		name = name[:63]
	}
	name, _, _ = strings.Cut(name, ".")
	return name
}

// machineID is the name of a VMI as the value of a label: a long one is cut and ends in a hash of the whole.
func machineID(name string) string {
	if len(name) <= 63 {
		return name
	}
	h := fnv.New32a()
	h.Write([]byte(name))
	return fmt.Sprintf("%s-%08x", name[:54], h.Sum32())
}

func vcpus(vmi *kubevirtv1.VirtualMachineInstance) int64 {
	c := vmi.Spec.Domain.CPU
	if c == nil {
		return 1
	}
	one := func(n uint32) int64 { return max(1, int64(n)) }
	return one(c.Cores) * one(c.Sockets) * one(c.Threads)
}

// overhead is what KubeVirt adds to the guest's memory for its own processes: see its hypervisor backend. VFIO devices
// add one flat GiB, not one each.
func overhead(vmi *kubevirtv1.VirtualMachineInstance, guest resource.Quantity, devices int) resource.Quantity {
	const mib = 1 << 20
	n := guest.Value()/512 + 220*mib + 8*mib*vcpus(vmi) + 8*mib
	if ptr.Deref(vmi.Spec.Domain.Devices.AutoattachGraphicsDevice, true) {
		n += 32 * mib
	}
	if devices > 0 {
		n += 1 << 30
	}
	return *resource.NewQuantity(n, resource.BinarySI)
}

// launcher renders the virt-launcher pod of a VMI: what the scheduler and quotas see of a VM.
func launcher(vmi *kubevirtv1.VirtualMachineInstance) *corev1.Pod {
	devices := devicesOf(vmi)
	requests, limits := corev1.ResourceList{}, corev1.ResourceList{}
	maps.Copy(requests, vmi.Spec.Domain.Resources.Requests)
	maps.Copy(limits, vmi.Spec.Domain.Resources.Limits)
	guest := requests[corev1.ResourceMemory]
	if m := vmi.Spec.Domain.Memory; m != nil && m.Guest != nil && guest.IsZero() {
		guest = *m.Guest
	}
	if guest.IsZero() {
		guest = limits[corev1.ResourceMemory]
	}
	extra := overhead(vmi, guest, len(devices))
	total := guest.DeepCopy()
	total.Add(extra)
	requests[corev1.ResourceMemory] = total
	if l, ok := limits[corev1.ResourceMemory]; ok {
		l = l.DeepCopy()
		l.Add(extra)
		limits[corev1.ResourceMemory] = l
	}
	if _, ok := requests[corev1.ResourceCPU]; !ok {
		requests[corev1.ResourceCPU] = *resource.NewMilliQuantity(100*vcpus(vmi), resource.DecimalSI) // KubeVirt's cpuAllocationRatio of 10
	}
	extended := map[string]int64{"devices.kubevirt.io/kvm": 1, "devices.kubevirt.io/tun": 1, "devices.kubevirt.io/vhost-net": 1}
	maps.Copy(extended, devices)
	for name, n := range extended {
		q := *resource.NewQuantity(n, resource.DecimalSI)
		requests[corev1.ResourceName(name)], limits[corev1.ResourceName(name)] = q, q
	}

	labels := map[string]string{}
	maps.Copy(labels, vmi.Labels)
	labels[kubevirtv1.AppLabel] = "virt-launcher"
	labels[kubevirtv1.CreatedByLabel] = string(vmi.UID)
	labels[kubevirtv1.DeprecatedVirtualMachineNameLabel] = hostname(vmi)
	labels[kubevirtv1.VirtualMachineInstanceIDLabel] = machineID(vmi.Name)
	delete(labels, kubevirtv1.NodeNameLabel)
	annotations := map[string]string{
		kubevirtv1.DomainAnnotation: vmi.Name, Simulated: "true", "kubectl.kubernetes.io/default-container": "compute",
		"kubevirt.io/memory-overhead-bytes": fmt.Sprint(extra.Value()),
	}
	if nads := networksOf(vmi); len(nads) > 0 {
		annotations["k8s.v1.cni.cncf.io/networks"] = strings.Join(nads, ",")
	}
	selector := map[string]string{kubevirtv1.NodeSchedulable: "true"}
	maps.Copy(selector, vmi.Spec.NodeSelector)
	user := int64(107)
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: launcherName(vmi), Namespace: vmi.Namespace, Labels: labels, Annotations: annotations,
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(vmi, kubevirtv1.VirtualMachineInstanceGroupVersionKind)},
		},
		Spec: corev1.PodSpec{
			RestartPolicy: corev1.RestartPolicyNever, Hostname: vmi.Spec.Hostname, Subdomain: vmi.Spec.Subdomain,
			TerminationGracePeriodSeconds: ptr.To(grace(vmi) + 30), AutomountServiceAccountToken: ptr.To(false), EnableServiceLinks: ptr.To(false),
			NodeSelector: selector, Affinity: vmi.Spec.Affinity, Tolerations: vmi.Spec.Tolerations,
			TopologySpreadConstraints: vmi.Spec.TopologySpreadConstraints, PriorityClassName: vmi.Spec.PriorityClassName,
			SchedulerName:   vmi.Spec.SchedulerName,
			SecurityContext: &corev1.PodSecurityContext{RunAsUser: &user, RunAsGroup: &user, RunAsNonRoot: ptr.To(true), FSGroup: &user},
			Containers: []corev1.Container{{
				Name: "compute", Image: "simulated/virt-launcher:v1.7.0",
				Resources: corev1.ResourceRequirements{Requests: requests, Limits: limits},
				SecurityContext: &corev1.SecurityContext{
					AllowPrivilegeEscalation: ptr.To(false), RunAsUser: &user, RunAsNonRoot: ptr.To(true),
					Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}, Add: []corev1.Capability{"NET_BIND_SERVICE"}},
				},
			}},
		},
	}
	for _, v := range vmi.Spec.Volumes {
		switch claim := claimOf(v); {
		case claim != "":
			pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{Name: v.Name, VolumeSource: corev1.VolumeSource{
				PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claim},
			}})
		case v.CloudInitNoCloud != nil:
			for suffix, ref := range map[string]*corev1.LocalObjectReference{
				"-udata": v.CloudInitNoCloud.UserDataSecretRef, "-ndata": v.CloudInitNoCloud.NetworkDataSecretRef,
			} {
				if ref != nil {
					pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{Name: v.Name + suffix, VolumeSource: corev1.VolumeSource{
						Secret: &corev1.SecretVolumeSource{SecretName: ref.Name},
					}})
				}
			}
		}
	}
	return pod
}

// claimOf names the claim behind a volume, if there is one. CDI's claims bear the name of their DataVolume.
func claimOf(v kubevirtv1.Volume) string {
	switch {
	case v.DataVolume != nil:
		return v.DataVolume.Name
	case v.PersistentVolumeClaim != nil:
		return v.PersistentVolumeClaim.ClaimName
	}
	return ""
}

// networksOf lists the network attachment definitions as namespace/name.
func networksOf(vmi *kubevirtv1.VirtualMachineInstance) []string {
	var out []string
	for _, n := range vmi.Spec.Networks {
		if n.Multus == nil {
			continue
		}
		name := n.Multus.NetworkName
		if !strings.Contains(name, "/") {
			name = vmi.Namespace + "/" + name
		}
		out = append(out, name)
	}
	return out
}

// grace is how long a VM may take to power off, in seconds.
func grace(vmi *kubevirtv1.VirtualMachineInstance) int64 {
	return ptr.Deref(vmi.Spec.TerminationGracePeriodSeconds, kubevirtv1.DefaultGracePeriodSeconds)
}
