package vmtest

import (
	"bytes"
	"cmp"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"
	kubevirt "kubevirt.io/api/core/v1"

	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/seed"
)

// memory of a machine in MiB, whatever its VMI says: hosts of this test are small.
const memory = 1024

// machine is one virtual machine under qemu.
type machine struct {
	console string
	ended   chan struct{}
	off     atomic.Bool // it is meant to end
}

// rootDisk plays CDI: a disk with Debian on it.
func rootDisk(t *testing.T, folder string) string {
	t.Helper()
	disk := filepath.Join(t.TempDir(), "root.img")
	if out, err := exec.Command("cp", "--sparse=always", filepath.Join(folder, "root.img"), disk).CombinedOutput(); err != nil {
		t.Fatalf("make the root disk: %v: %s", err, out)
	}
	return disk
}

// emptyDisk is a new volume; a folder's files are on it if one is given.
func emptyDisk(t *testing.T, files string) string {
	t.Helper()
	disk := filepath.Join(t.TempDir(), "volume.img")
	if err := os.WriteFile(disk, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(disk, 64<<20); err != nil {
		t.Fatal(err)
	}
	if files == "" {
		return disk
	}
	if out, err := exec.Command("mke2fs", "-q", "-t", "ext4", "-d", files, disk).CombinedOutput(); err != nil {
		t.Fatalf("make a volume: %v: %s", err, out)
	}
	return disk
}

// boot plays virt-launcher: it turns the volumes and disks of a VMI into those of
// qemu, in their order and with their serials. Volumes are files by their ids.
func boot(t *testing.T, folder, root string, volumes map[string]string, vmi *kubevirt.VirtualMachineInstance, secret *corev1.Secret, agentDisk string) *machine {
	t.Helper()
	m := &machine{console: filepath.Join(folder, "console.log"), ended: make(chan struct{})}
	iso := seedDisk(t, vmi, secret)
	accel := cmp.Or(os.Getenv("COSMICAC_VM_ACCEL"), "tcg,thread=multi")
	args := []string{
		"-machine", vmi.Spec.Domain.Machine.Type, "-accel", accel, "-cpu", "max", "-smp", "2", "-m", fmt.Sprint(memory),
		"-nodefaults", "-no-user-config", "-display", "none", "-serial", "file:" + m.console,
		// KubeVirt boots the disk's own loader; to start its kernel directly spares minutes of emulation.
		"-kernel", filepath.Join(folder, "vmlinuz"), "-initrd", filepath.Join(folder, "initrd"),
		"-append", "root=/dev/vda rw console=ttyS0 systemd.show_status=1",
		"-device", "virtio-rng-pci", "-netdev", "user,id=default,ipv6=off", "-device", "virtio-net-pci,netdev=default",
	}
	for _, d := range vmi.Spec.Domain.Devices.Disks {
		if d.Disk == nil || d.Disk.Bus != kubevirt.DiskBusVirtio {
			t.Fatalf("disk %s is not on virtio", d.Name)
		}
		var drive string
		switch v := volume(t, vmi, d.Name); {
		case v.DataVolume != nil:
			drive = "format=raw,file=" + root
			if file := volumes[v.DataVolume.Name]; file != "" {
				drive = "format=raw,file=" + file
			}
			if d.Disk.ReadOnly {
				drive += ",readonly=on"
			}
		case v.CloudInitNoCloud != nil:
			drive = "format=raw,readonly=on,file=" + iso
		case v.ContainerDisk != nil:
			if !d.Disk.ReadOnly {
				t.Fatalf("the agent disk %s can be written", d.Name)
			}
			drive = "format=raw,readonly=on,file=" + agentDisk
		default:
			t.Fatalf("disk %s: volume %+v is not played", d.Name, v)
		}
		device := "virtio-blk-pci,drive=" + d.Name
		if d.Serial != "" {
			device += ",serial=" + d.Serial
		}
		args = append(args, "-drive", "if=none,id="+d.Name+","+drive, "-device", device)
	}
	qemu := exec.Command("qemu-system-x86_64", args...)
	var said bytes.Buffer
	qemu.Stderr = &said
	qemu.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := qemu.Start(); err != nil {
		t.Fatalf("start qemu: %v", err)
	}
	var how error
	go func() {
		how = qemu.Wait()
		close(m.ended)
	}()
	t.Cleanup(func() {
		select {
		case <-m.ended:
			if how != nil || !m.off.Load() {
				t.Errorf("qemu ended: %v: %s", how, said.String())
			}
		default:
			_ = qemu.Process.Kill()
			<-m.ended
		}
	})
	return m
}

func volume(t *testing.T, vmi *kubevirt.VirtualMachineInstance, name string) kubevirt.VolumeSource {
	t.Helper()
	for _, v := range vmi.Spec.Volumes {
		if v.Name == name {
			return v.VolumeSource
		}
	}
	t.Fatalf("disk %s has no volume", name)
	return kubevirt.VolumeSource{}
}

// seedDisk makes the NoCloud disk as KubeVirt does: files of the Secret, metadata
// made of the VMI's name, in an ISO named cidata. Empty network data is no file.
func seedDisk(t *testing.T, vmi *kubevirt.VirtualMachineInstance, secret *corev1.Secret) string {
	t.Helper()
	for _, v := range vmi.Spec.Volumes {
		if c := v.CloudInitNoCloud; c != nil && (c.UserDataSecretRef.Name != secret.Name || c.NetworkDataSecretRef.Name != secret.Name) {
			t.Fatalf("the machine reads %+v, the Secret is %s", c, secret.Name)
		}
	}
	dir := t.TempDir()
	files := map[string][]byte{
		"meta-data":      fmt.Appendf(nil, `{"instance-id":"%s.cosmicac","local-hostname":"%s"}`, vmi.Name, vmi.Name),
		"user-data":      secret.Data[seed.KeyUserData],
		"network-config": secret.Data[seed.KeyNetworkData],
	}
	iso := filepath.Join(dir, "seed.iso")
	args := []string{"-quiet", "-output", iso, "-volid", "cidata", "-joliet", "-rock"}
	for name, content := range files {
		if len(content) == 0 {
			continue
		}
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		args = append(args, path)
	}
	if out, err := exec.Command("genisoimage", args...).CombinedOutput(); err != nil {
		t.Fatalf("make the seed's disk: %v: %s", err, out)
	}
	return iso
}

// tail is the end of the console.
func (m *machine) tail() string {
	raw, err := os.ReadFile(m.console)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(string(raw), "\n")
	return strings.Join(lines[max(0, len(lines)-60):], "\n")
}
