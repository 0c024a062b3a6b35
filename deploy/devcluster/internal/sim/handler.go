package sim

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"hash/fnv"
	"path/filepath"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	kubevirtv1 "kubevirt.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/cosmicac/cosmicac/deploy/devcluster/internal/cloudinit"
	"github.com/cosmicac/cosmicac/deploy/devcluster/internal/fault"
	"github.com/cosmicac/cosmicac/deploy/devcluster/internal/guest"
)

const (
	agentUnit   = "/etc/systemd/system/cosmicac-agent.service"
	agentVolume = "agent"
	defaultUser = "ubuntu"
)

// handle is virt-handler: it starts the machine of a scheduled VMI, watches it, presses its power button, and says how
// it ended. On a node that is down it does nothing, as no virt-handler runs there.
func (v *vmis) handle(ctx context.Context, vmi *kubevirtv1.VirtualMachineInstance, pod *corev1.Pod) (time.Duration, error) {
	if v.faults.dead(vmi.Status.NodeName) {
		if pod == nil {
			// The pod went by force, since an operator says that the power is off: so is the VM, and virt-controller fails it.
			v.machines.Shutdown(string(vmi.UID), 0)
			setPhase(vmi, kubevirtv1.Failed)
			vmi.Status.Reason = "NodeUnresponsive"
			return 0, nil
		}
		if pod.DeletionTimestamp == nil {
			setVMICondition(vmi, kubevirtv1.VirtualMachineInstanceReady, corev1.ConditionFalse, "PodConditionMissing", "virt-launcher pod is not ready on a node that does not answer")
			return 0, nil
		}
		setVMICondition(vmi, kubevirtv1.VirtualMachineInstanceReady, corev1.ConditionFalse, kubevirtv1.PodTerminatingReason, "virt-launcher pod is not ready on a node that does not answer")
		return 0, nil
	}
	id := string(vmi.UID)
	st := v.machines.State(id)
	stopping := vmi.DeletionTimestamp != nil || pod == nil || pod.DeletionTimestamp != nil
	switch {
	case st.Exists && !st.Running:
		v.ended(vmi, st)
		return 0, nil
	case stopping && !st.Exists:
		setPhase(vmi, kubevirtv1.Failed) // never ran, or lost with its folder
		return 0, nil
	case stopping && pod == nil:
		// Somebody forced the pod away: nothing holds the VM any more, so it goes at once.
		v.machines.Shutdown(id, 0)
		setVMICondition(vmi, kubevirtv1.VirtualMachineInstanceReady, corev1.ConditionFalse, kubevirtv1.PodNotExistsReason, "virt-launcher pod does not exist")
		return time.Second, nil
	case stopping:
		if c := condition(vmi, kubevirtv1.VirtualMachineInstanceReady); c == nil || c.Reason != kubevirtv1.PodTerminatingReason {
			v.event(vmi, corev1.EventTypeNormal, "ShuttingDown", "Signaled Graceful Shutdown (simulated)")
		}
		v.machines.Shutdown(id, time.Duration(grace(vmi))*time.Second)
		setVMICondition(vmi, kubevirtv1.VirtualMachineInstanceReady, corev1.ConditionFalse, kubevirtv1.PodTerminatingReason, "virt-launcher pod is terminating")
		return time.Second, nil
	case !st.Exists && vmi.Status.Phase == kubevirtv1.Running:
		setPhase(vmi, kubevirtv1.Failed)
		vmi.Status.Reason = "the VirtualMachineInstance was Running but its domain disappeared"
		return 0, nil
	case !st.Exists && pod.Status.Phase == corev1.PodFailed:
		setPhase(vmi, kubevirtv1.Failed)
		setVMICondition(vmi, kubevirtv1.VirtualMachineInstanceReady, corev1.ConditionFalse, kubevirtv1.PodNotExistsReason, "virt-launcher pod failed before the guest ran")
		v.event(vmi, corev1.EventTypeWarning, "Stopped", "The virt-launcher pod failed while the guest started (simulated)")
		return 0, nil
	case !st.Exists && (v.faults.has(fault.StuckScheduled, vmi.Status.NodeName) || v.faults.has(fault.OOMKilled, vmi.Status.NodeName)):
		return time.Second, nil
	case !st.Exists:
		err := v.busy(vmi)
		if err == nil {
			err = v.boot(ctx, vmi)
		}
		if err != nil {
			v.log.Warn("simulated vm does not start", "vmi", vmi.Namespace+"/"+vmi.Name, "error", err)
			v.event(vmi, corev1.EventTypeWarning, "SyncFailed", "%v", err)
			setVMICondition(vmi, kubevirtv1.VirtualMachineInstanceSynchronized, corev1.ConditionFalse, "Synchronizing with the Domain failed.", err.Error())
			return 2 * time.Second, nil
		}
		dropVMICondition(vmi, kubevirtv1.VirtualMachineInstanceSynchronized)
		v.clock.passed(vmi.UID, "boot")
		return max(v.options.BootTime, time.Millisecond), nil
	case vmi.Status.Phase == kubevirtv1.Scheduled:
		if left := v.clock.left(vmi.UID, "boot", v.options.BootTime); left > 0 {
			return left, nil
		}
		v.event(vmi, corev1.EventTypeNormal, "Started", "VirtualMachineInstance started. (simulated)")
		setPhase(vmi, kubevirtv1.Running)
	}
	running(vmi, pod)
	return 0, nil
}

// busy is what libvirt says while somebody else still has the card.
func (v *vmis) busy(vmi *kubevirtv1.VirtualMachineInstance) error {
	if len(devicesOf(vmi)) > 0 && v.faults.has(fault.VFIOBusy, vmi.Status.NodeName) {
		return errors.New("server error. command SyncVMI failed: \"LibvirtError(Code=1, Domain=10, Message='internal error: " +
			"vfio 0000:3b:00.0: failed to open /dev/vfio/42: Device or resource busy')\" (simulated)")
	}
	return nil
}

// ended says how the machine went down: a power-off in time is success, whatever ran in it; anything else is not.
func (v *vmis) ended(vmi *kubevirtv1.VirtualMachineInstance, st guest.State) {
	phase := kubevirtv1.Succeeded
	if st.Code != 0 {
		phase = kubevirtv1.Failed
		v.event(vmi, corev1.EventTypeWarning, "Stopped", "The VirtualMachineInstance crashed or was killed: %s (simulated)", st.Reason)
	} else {
		v.event(vmi, corev1.EventTypeNormal, "Stopped", "The VirtualMachineInstance was shut down. (simulated)")
	}
	setPhase(vmi, phase)
	vmi.Status.ActivePods = nil
	setVMICondition(vmi, kubevirtv1.VirtualMachineInstanceReady, corev1.ConditionFalse, kubevirtv1.GuestNotRunningReason, "Guest VM is not reported as running")
}

// running fills in what virt-handler reports of a running domain.
func running(vmi *kubevirtv1.VirtualMachineInstance, pod *corev1.Pod) {
	vmi.Status.Interfaces = nil
	for i, n := range vmi.Spec.Networks {
		face := kubevirtv1.VirtualMachineInstanceNetworkInterface{
			Name: n.Name, MAC: mac(vmi.UID, i), InfoSource: "domain", QueueCount: 1, PodInterfaceName: fmt.Sprintf("pod%08x", i), LinkState: "up",
		}
		if n.Pod != nil {
			face.IP, face.PodInterfaceName = pod.Status.PodIP, "eth0"
			face.IPs = []string{pod.Status.PodIP}
		}
		vmi.Status.Interfaces = append(vmi.Status.Interfaces, face)
	}
	vmi.Status.VolumeStatus = nil
	for i, vol := range vmi.Spec.Volumes {
		s := kubevirtv1.VolumeStatus{Name: vol.Name, Target: "vd" + string(rune('a'+i%26))}
		if claim := claimOf(vol); claim != "" {
			s.PersistentVolumeClaimInfo = &kubevirtv1.PersistentVolumeClaimInfo{ClaimName: claim}
		}
		vmi.Status.VolumeStatus = append(vmi.Status.VolumeStatus, s)
	}
	if m := vmi.Spec.Domain.Machine; m != nil {
		vmi.Status.Machine = m.DeepCopy()
	}
	if podReady(pod) {
		setVMICondition(vmi, kubevirtv1.VirtualMachineInstanceReady, corev1.ConditionTrue, "", "")
	} else {
		setVMICondition(vmi, kubevirtv1.VirtualMachineInstanceReady, corev1.ConditionFalse, "PodConditionMissing", "virt-launcher pod is not ready")
	}
	if len(devicesOf(vmi)) > 0 {
		setVMICondition(vmi, kubevirtv1.VirtualMachineInstanceIsMigratable, corev1.ConditionFalse,
			kubevirtv1.VirtualMachineInstanceReasonHostDeviceNotMigratable, "VMI uses a PCI host devices")
	} else {
		setVMICondition(vmi, kubevirtv1.VirtualMachineInstanceIsMigratable, corev1.ConditionFalse,
			kubevirtv1.VirtualMachineInstanceReasonDisksNotMigratable, "cannot migrate VMI: simulated disks are not shared")
	}
}

func mac(uid types.UID, i int) string {
	h := fnv.New32a()
	fmt.Fprintf(h, "%s/%d", uid, i)
	s := h.Sum32()
	return fmt.Sprintf("02:00:%02x:%02x:%02x:%02x", byte(s>>24), byte(s>>16), byte(s>>8), byte(s))
}

// boot reads the seed and starts the machine.
func (v *vmis) boot(ctx context.Context, vmi *kubevirtv1.VirtualMachineInstance) error {
	m := guest.Machine{ID: string(vmi.UID), Name: vmi.Namespace + "/" + vmi.Name, Hostname: vmi.Spec.Hostname, User: defaultUser}
	userData, err := v.userData(ctx, vmi)
	if err != nil {
		return err
	}
	seed, err := cloudinit.Parse(userData)
	if errors.Is(err, cloudinit.ErrNotCloudConfig) {
		v.log.Warn("simulated vm does not play its user data", "vmi", m.Name, "why", err)
	} else if err != nil {
		return err
	}
	if m.Hostname == "" {
		m.Hostname = seed.Hostname
	}
	if m.Hostname == "" {
		m.Hostname = vmi.Name
	}
	if len(m.Hostname) > 63 {
		m.Hostname = m.Hostname[:63]
	}
	if seed.DefaultUser != "" && seed.DefaultUser != "root" {
		m.User = seed.DefaultUser
	}
	m.Files = seed.Files
	for _, f := range seed.Files {
		if f.Path != agentUnit {
			continue
		}
		u, err := cloudinit.ParseUnit(f.Content)
		if err != nil {
			return fmt.Errorf("read %s of the seed: %w", agentUnit, err)
		}
		m.Unit = &u
	}
	disks := map[string]kubevirtv1.Disk{}
	for _, d := range vmi.Spec.Domain.Devices.Disks {
		disks[d.Name] = d
	}
	for _, vol := range vmi.Spec.Volumes {
		if vol.Name == agentVolume && vol.ContainerDisk != nil {
			if v.options.AgentDir == "" {
				v.log.Warn("simulated vm has an agent disk, but --agent-dir is not given: it is empty", "vmi", m.Name)
			}
			m.AgentDir = v.options.AgentDir
		}
		// The first disk is the root disk; another is seen by its serial.
		if claim := claimOf(vol); claim != "" && (m.Disk == "" || disks[vol.Name].Serial != "") {
			pvc := &corev1.PersistentVolumeClaim{}
			if err := v.Get(ctx, types.NamespacedName{Namespace: vmi.Namespace, Name: claim}, pvc); err != nil {
				return fmt.Errorf("find the disk %s: %w", vol.Name, err)
			}
			if m.Disk == "" {
				m.Disk = filepath.Base(string(pvc.UID))
				continue
			}
			d := disks[vol.Name]
			m.Volumes = append(m.Volumes, guest.Volume{Disk: filepath.Base(string(pvc.UID)), Name: d.Serial, ReadOnly: d.Disk != nil && d.Disk.ReadOnly})
		}
	}
	return v.machines.Start(m)
}

// userData finds the NoCloud or ConfigDrive volume. A missing Secret cannot happen here: the pod waited for it.
func (v *vmis) userData(ctx context.Context, vmi *kubevirtv1.VirtualMachineInstance) ([]byte, error) {
	for _, vol := range vmi.Spec.Volumes {
		var ref *corev1.LocalObjectReference
		var plain, encoded string
		switch {
		case vol.CloudInitNoCloud != nil:
			ref, plain, encoded = vol.CloudInitNoCloud.UserDataSecretRef, vol.CloudInitNoCloud.UserData, vol.CloudInitNoCloud.UserDataBase64
		case vol.CloudInitConfigDrive != nil:
			ref, plain, encoded = vol.CloudInitConfigDrive.UserDataSecretRef, vol.CloudInitConfigDrive.UserData, vol.CloudInitConfigDrive.UserDataBase64
		default:
			continue
		}
		switch {
		case ref != nil:
			secret := &corev1.Secret{}
			if err := v.live.Get(ctx, types.NamespacedName{Namespace: vmi.Namespace, Name: ref.Name}, secret); err != nil {
				return nil, fmt.Errorf("read the seed: %w", err)
			}
			for _, key := range []string{"userdata", "userData"} {
				if raw, ok := secret.Data[key]; ok {
					return raw, nil
				}
			}
			return nil, fmt.Errorf("read the seed: no user-data found at key userdata of secret %s", ref.Name)
		case encoded != "":
			raw, err := base64.StdEncoding.DecodeString(encoded)
			if err != nil {
				return nil, fmt.Errorf("read the seed: %w", err)
			}
			return raw, nil
		default:
			return []byte(plain), nil
		}
	}
	return nil, nil
}

// sweep turns the machines' own news into reconciles, and removes machines whose VMI is gone for good.
func (v *vmis) sweep(ctx context.Context) {
	tick := time.NewTicker(10 * time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case id := <-v.machines.Changed():
			v.wake(ctx, types.UID(id))
		case <-tick.C:
			v.removeOrphans(ctx)
		}
	}
}

func (v *vmis) wake(ctx context.Context, id types.UID) {
	var pods corev1.PodList
	if v.List(ctx, &pods, client.MatchingLabels{kubevirtv1.CreatedByLabel: string(id)}) == nil {
		for i := range pods.Items {
			send(v.faults.pods, &pods.Items[i])
		}
	}
	if namespace, name, ok := strings.Cut(v.machines.Name(string(id)), "/"); ok {
		send(v.faults.vmis, &kubevirtv1.VirtualMachineInstance{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}})
	}
}

func (v *vmis) removeOrphans(ctx context.Context) {
	ids := v.machines.IDs() // read before the list, so that a machine younger than the list is not taken for an orphan
	if len(ids) == 0 {
		return
	}
	var all kubevirtv1.VirtualMachineInstanceList
	if err := v.live.List(ctx, &all); err != nil {
		return
	}
	known := map[string]bool{}
	for i := range all.Items {
		known[string(all.Items[i].UID)] = true
	}
	for _, id := range ids {
		if known[id] {
			continue
		}
		v.log.Info("simulated vm of a vmi that is gone is removed", "id", id)
		if err := v.machines.Remove(id); err != nil {
			v.log.Warn("simulated vm is not removed", "id", id, "error", err)
		}
	}
}
