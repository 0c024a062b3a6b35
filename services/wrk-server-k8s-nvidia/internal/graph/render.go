package graph

import (
	"fmt"
	"maps"
	"net/netip"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	kubevirt "kubevirt.io/api/core/v1"
	cdi "kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1"

	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/capacity"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/claim"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/label"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/seed"
)

// grace is how long a guest has to shut down before it is cut off.
const grace = int64(60)

// VMIName is the name of an attempt's k-th virtual machine and of its guest.
func VMIName(attempt string, k int) string { return attempt + "-n" + strconv.Itoa(k) }

// SecretName is the name of its seed.
func SecretName(attempt string, k int) string { return VMIName(attempt, k) + "-seed" }

// DiskName is the name of a job's root disk, the same in every attempt.
func DiskName(job string, replica uint32, k int) string {
	return fmt.Sprintf("%s-r%d-n%d-root", job, replica, k)
}

// jobLabels are on everything of a job.
func (s *Settings) jobLabels(rec *claim.Record) map[string]string {
	l := map[string]string{
		label.ManagedBy: label.Manager, label.Network: s.Network, label.Rack: s.Rack, label.Job: rec.JobID,
	}
	if rec.Probe {
		l[label.Probe] = "true"
	}
	if rec.ProjectID != "" {
		l[label.Project] = label.Safe(rec.ProjectID)
	}
	return l
}

// attemptLabels are on everything of an attempt, and KubeVirt copies them to
// the launcher pod.
func (s *Settings) attemptLabels(rec *claim.Record) map[string]string {
	l := s.jobLabels(rec)
	l[label.Attempt], l[label.Replica] = rec.AttemptID, rec.ReplicaID
	return l
}

func annotations(rec *claim.Record) map[string]string {
	if rec.JobName == "" {
		return nil
	}
	return map[string]string{label.JobName: rec.JobName}
}

func owner(rec *claim.Record, anchor types.UID) []metav1.OwnerReference {
	return []metav1.OwnerReference{{APIVersion: "v1", Kind: "ConfigMap", Name: rec.AttemptID, UID: anchor}}
}

// Anchor is the attempt's own ConfigMap.
func (s *Settings) Anchor(rec *claim.Record) (*corev1.ConfigMap, error) {
	data, err := rec.Data()
	if err != nil {
		return nil, err
	}
	a := annotations(rec)
	if a == nil {
		a = map[string]string{}
	}
	a[label.SpecHash] = rec.SpecHash
	return &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: rec.AttemptID, Labels: s.attemptLabels(rec), Annotations: a},
		Data:       data,
	}, nil
}

// Secret holds the k-th machine's cloud-init.
func (s *Settings) Secret(rec *claim.Record, anchor types.UID, k int, data map[string][]byte) *corev1.Secret {
	immutable := true
	return &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{
			Name: SecretName(rec.AttemptID, k), Labels: s.attemptLabels(rec), OwnerReferences: owner(rec, anchor),
		},
		Immutable: &immutable, Type: corev1.SecretTypeOpaque, Data: data,
	}
}

// Policy closes the machines of an attempt: nothing comes in but from each
// other and at declared ports; what goes out reaches the world and the cluster's DNS, not the
// cluster's own networks nor link-local addresses (cloud metadata).
func (s *Settings) Policy(rec *claim.Record, anchor types.UID, podCIDRs []string) *networkingv1.NetworkPolicy {
	same := metav1.LabelSelector{MatchLabels: map[string]string{label.Attempt: rec.AttemptID, label.Network: s.Network}}
	everywhere4 := &networkingv1.IPBlock{CIDR: "0.0.0.0/0", Except: []string{"169.254.0.0/16"}}
	everywhere6 := &networkingv1.IPBlock{CIDR: "::/0", Except: []string{"fe80::/10"}}
	seen := map[netip.Prefix]bool{}
	for _, list := range [][]string{s.DeniedCIDRs, podCIDRs} {
		for _, text := range list {
			p, err := netip.ParsePrefix(text)
			if err != nil || seen[p.Masked()] {
				continue
			}
			p = p.Masked()
			seen[p] = true
			if p.Bits() == 0 {
				continue // would deny the world: not what an exception can say
			}
			if p.Addr().Is4() {
				everywhere4.Except = append(everywhere4.Except, p.String())
			} else {
				everywhere6.Except = append(everywhere6.Except, p.String())
			}
		}
	}
	udp, tcp, dns := corev1.ProtocolUDP, corev1.ProtocolTCP, intstr.FromInt32(53)
	egress := []networkingv1.NetworkPolicyEgressRule{
		{To: []networkingv1.NetworkPolicyPeer{{IPBlock: everywhere4}, {IPBlock: everywhere6}}},
		{
			To: []networkingv1.NetworkPolicyPeer{{
				NamespaceSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"kubernetes.io/metadata.name": "kube-system"}},
				PodSelector:       &metav1.LabelSelector{MatchLabels: map[string]string{"k8s-app": "kube-dns"}},
			}},
			Ports: []networkingv1.NetworkPolicyPort{{Protocol: &udp, Port: &dns}, {Protocol: &tcp, Port: &dns}},
		},
	}
	var reach []networkingv1.NetworkPolicyPeer
	for _, text := range rec.Reach {
		a, err := netip.ParseAddr(text)
		if err != nil || a.IsLoopback() || a.IsUnspecified() || a.IsLinkLocalUnicast() {
			continue
		}
		reach = append(reach, networkingv1.NetworkPolicyPeer{IPBlock: &networkingv1.IPBlock{CIDR: netip.PrefixFrom(a, a.BitLen()).String()}})
	}
	if len(reach) > 0 {
		egress = append(egress, networkingv1.NetworkPolicyEgressRule{To: reach})
	}
	var ingress []networkingv1.NetworkPolicyIngressRule
	if len(rec.Nodes) > 1 {
		peer := []networkingv1.NetworkPolicyPeer{{PodSelector: &same}}
		ingress = append(ingress, networkingv1.NetworkPolicyIngressRule{From: peer})
		egress = append(egress, networkingv1.NetworkPolicyEgressRule{To: peer})
	}
	ingress = append(ingress, openPorts(rec)...)
	return &networkingv1.NetworkPolicy{
		ObjectMeta: metav1.ObjectMeta{Name: rec.AttemptID, Labels: s.attemptLabels(rec), OwnerReferences: owner(rec, anchor)},
		Spec: networkingv1.NetworkPolicySpec{
			PodSelector: same, Ingress: ingress, Egress: egress,
			PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeIngress, networkingv1.PolicyTypeEgress},
		},
	}
}

// Disk is the k-th root disk of the record's replica. It has no owner: it
// belongs to the job and outlives its attempts.
func (s *Settings) Disk(rec *claim.Record, k int) *cdi.DataVolume {
	registry := &cdi.DataVolumeSourceRegistry{URL: &rec.Image}
	if s.RegistrySecret != "" {
		registry.SecretRef = &s.RegistrySecret
	}
	if s.RegistryCA != "" {
		registry.CertConfigMap = &s.RegistryCA
	}
	if s.PullMethod != "" {
		m := cdi.RegistryPullMethod(s.PullMethod)
		registry.PullMethod = &m
	}
	storage := &cdi.StorageSpec{
		AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
		Resources: corev1.VolumeResourceRequirements{
			Requests: corev1.ResourceList{corev1.ResourceStorage: *resource.NewQuantity(rec.DiskBytes, resource.BinarySI)},
		},
	}
	if s.StorageClass != "" {
		storage.StorageClassName = &s.StorageClass
	}
	if s.VolumeMode != "" {
		m := corev1.PersistentVolumeMode(s.VolumeMode)
		storage.VolumeMode = &m
	}
	a := map[string]string{label.Image: rec.Image, label.MadeFor: strconv.FormatUint(uint64(rec.AttemptNumber), 10)}
	maps.Copy(a, annotations(rec))
	return &cdi.DataVolume{
		ObjectMeta: metav1.ObjectMeta{Name: DiskName(rec.JobID, rec.ReplicaIndex, k), Labels: s.jobLabels(rec), Annotations: a},
		Spec:       cdi.DataVolumeSpec{Source: &cdi.DataVolumeSource{Registry: registry}, Storage: storage},
	}
}

// VMI is the k-th virtual machine.
func (s *Settings) VMI(rec *claim.Record, anchor types.UID, k int) *kubevirt.VirtualMachineInstance {
	n := rec.Nodes[k]
	yes, no := true, false
	eviction, period := kubevirt.EvictionStrategyExternal, grace
	first := uint(1)
	memory := *resource.NewQuantity(n.MemoryBytes, resource.BinarySI)
	amounts := corev1.ResourceList{
		corev1.ResourceMemory: memory,
		corev1.ResourceCPU:    *resource.NewQuantity(n.CPUCores, resource.DecimalSI),
	}
	virtio := func(readOnly bool) kubevirt.DiskDevice {
		return kubevirt.DiskDevice{Disk: &kubevirt.DiskTarget{Bus: kubevirt.DiskBusVirtio, ReadOnly: readOnly}}
	}
	var gpus []kubevirt.GPU
	for i := range n.GPUs {
		gpus = append(gpus, kubevirt.GPU{Name: "gpu" + strconv.Itoa(i), DeviceName: capacity.Resource(rec.Model)})
	}
	secret := &corev1.LocalObjectReference{Name: SecretName(rec.AttemptID, k)}
	labels := s.attemptLabels(rec)
	labels[label.Node] = strconv.Itoa(k)
	vmi := &kubevirt.VirtualMachineInstance{
		TypeMeta: metav1.TypeMeta{APIVersion: kubevirt.GroupVersion.String(), Kind: "VirtualMachineInstance"},
		ObjectMeta: metav1.ObjectMeta{
			Name: VMIName(rec.AttemptID, k), Labels: labels, Annotations: annotations(rec), OwnerReferences: owner(rec, anchor),
		},
		Spec: kubevirt.VirtualMachineInstanceSpec{
			EvictionStrategy:              &eviction,
			TerminationGracePeriodSeconds: &period,
			Tolerations:                   s.Tolerations,
			// The claim made real. By the node's name: hostname labels may lie.
			Affinity: &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
				RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
					MatchFields: []corev1.NodeSelectorRequirement{{
						Key: metav1.ObjectNameField, Operator: corev1.NodeSelectorOpIn, Values: []string{n.Node},
					}},
				}}},
			}},
			Domain: kubevirt.DomainSpec{
				Machine:  &kubevirt.Machine{Type: "q35"},
				Firmware: &kubevirt.Firmware{Bootloader: &kubevirt.Bootloader{EFI: &kubevirt.EFI{SecureBoot: &no}}},
				Features: &kubevirt.Features{SMM: &kubevirt.FeatureState{Enabled: &yes}},
				// host-passthrough gives the guest the host's address width, which large GPU memory windows need.
				CPU:       &kubevirt.CPU{Sockets: 1, Cores: uint32(n.CPUCores), Threads: 1, Model: "host-passthrough"},
				Memory:    &kubevirt.Memory{Guest: &memory},
				Resources: kubevirt.ResourceRequirements{Requests: amounts, Limits: amounts},
				Devices: kubevirt.Devices{
					DisableHotplug:             true,
					AutoattachGraphicsDevice:   &no,
					AutoattachMemBalloon:       &no,
					LogSerialConsole:           &s.SerialLog,
					NetworkInterfaceMultiQueue: &yes,
					Rng:                        &kubevirt.Rng{},
					Disks: []kubevirt.Disk{
						{Name: "root", BootOrder: &first, DiskDevice: virtio(false)},
						{Name: "seed", DiskDevice: virtio(false)},
						{Name: "agent", Serial: seed.DiskSerial, DiskDevice: virtio(true)},
					},
					Interfaces: []kubevirt.Interface{{
						Name:                   "default",
						InterfaceBindingMethod: kubevirt.InterfaceBindingMethod{Masquerade: &kubevirt.InterfaceMasquerade{}},
					}},
					GPUs: gpus, HostDevices: hostDevices(rec, k),
				},
			},
			Networks: []kubevirt.Network{{Name: "default", NetworkSource: kubevirt.NetworkSource{Pod: &kubevirt.PodNetwork{}}}},
			Volumes: []kubevirt.Volume{
				{Name: "root", VolumeSource: kubevirt.VolumeSource{DataVolume: &kubevirt.DataVolumeSource{Name: DiskName(rec.JobID, rec.ReplicaIndex, k)}}},
				{Name: "seed", VolumeSource: kubevirt.VolumeSource{CloudInitNoCloud: &kubevirt.CloudInitNoCloudSource{
					UserDataSecretRef: secret, NetworkDataSecretRef: secret,
				}}},
				{Name: "agent", VolumeSource: kubevirt.VolumeSource{ContainerDisk: &kubevirt.ContainerDiskSource{
					Image: s.AgentImage, ImagePullSecret: s.ImagePullSecret, ImagePullPolicy: corev1.PullIfNotPresent,
				}}},
			},
		},
	}
	s.place(rec, k, &vmi.Spec)
	addVolumes(vmi, rec)
	return vmi
}
