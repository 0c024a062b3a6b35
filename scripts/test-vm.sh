#!/usr/bin/env bash
# The agent's way in, in a real virtual machine: a Debian root boots under qemu
# with the seed and the agent disk that the worker makes, joins a mesh, gives a
# shell, and comes back: by itself after a reboot, and in a new attempt with a
# new seed on the same disk. By hand, not part of `make test`: the machine is
# emulated, which takes some 4 minutes, and the first run's root image takes 5 to
# 10 more. COSMICAC_VM_ACCEL=kvm is faster where KVM works; a nested one may hang
# or abort. Needs root (apt, debootstrap, a network namespace). Run
# after build.sh and images.sh.
. "$(dirname "$0")/lib.sh"

skip() { say "skipped: $*"; echo "test-vm: skipped, nothing was proved: $*"; exit 0; }
[ "$(id -u)" = 0 ] || skip "it must run as root"
[ "$(uname -m)" = x86_64 ] || skip "the machine is amd64"
PATH="$PATH:/usr/sbin:/sbin"

vm="$root/build/vm"
suite=bookworm
# debootstrap does not see what packages provide, so python3-cffi-backend is named.
packages=systemd,systemd-sysv,systemd-resolved,udev,dbus,cloud-init,python3-cffi-backend,sudo,linux-image-cloud-amd64,initramfs-tools,zstd
mkdir -p "$vm"

need=()
for c in qemu-system-x86_64:qemu-system-x86 debootstrap:debootstrap genisoimage:genisoimage mke2fs:e2fsprogs ip:iproute2; do
  command -v "${c%%:*}" >/dev/null || need+=("${c##*:}")
done
if [ ${#need[@]} -gt 0 ]; then
  command -v apt-get >/dev/null || skip "no ${need[*]} here, and no apt to install them"
  say "installing with apt: ${need[*]}"
  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${need[@]}" >/dev/null ||
    skip "apt does not give ${need[*]}"
fi

# The root image is kept; it holds nothing of ours.
key=$({ echo "$suite $packages"; sed -n '/^# The root image is kept/,/^# End of the root image/p' "$root/scripts/test-vm.sh"; } | sha256sum | cut -c1-16)
if [ "$(cat "$vm/root.key" 2>/dev/null)" != "$key" ]; then
  mirror=$(apt-get indextargets --format '$(CODENAME) $(COMPONENT) $(REPO_URI)' "Identifier: Packages" | awk -v s=$suite '$1 == s && $2 == "main" { print $3; exit }')
  [ -n "$mirror" ] || skip "apt has no source for Debian $suite"
  say "making a Debian $suite root by debootstrap (once; minutes)"
  # A run that was cut short may have left the root's own /proc and /sys mounted.
  umount -q "$vm/tree/proc" "$vm/tree/sys" 2>/dev/null || true
  rm -rf --one-file-system "$vm/tree"
  rm -f "$vm/root.key"
  if ! debootstrap --variant=minbase --include="$packages" "$suite" "$vm/tree" "$mirror" >"$vm/debootstrap.log" 2>&1; then
    ! grep -qE "^E: (Failed getting|Invalid Release|Couldn.t download)" "$vm/debootstrap.log" || skip "the apt mirror does not give the packages, see build/vm/debootstrap.log"
    tail -5 "$vm/debootstrap.log" >&2
    echo "test-vm: debootstrap failed, see build/vm/debootstrap.log" >&2
    exit 1
  fi
  umount -q "$vm/tree/proc" "$vm/tree/sys" 2>/dev/null || true
  rm -rf "$vm"/tree/var/cache/apt/archives/*.deb "$vm"/tree/var/lib/apt/lists/* "$vm/tree/etc/machine-id"
  : >"$vm/tree/etc/machine-id"
  # As cloud images have it: networkd, which cloud-init configures.
  chroot "$vm/tree" systemctl -q enable systemd-networkd
  # The seed's disk is all that cloud-init asks; a serial console shows the boot.
  echo 'datasource_list: [NoCloud, None]' >"$vm/tree/etc/cloud/cloud.cfg.d/99-seed.cfg"
  echo '/dev/vda / ext4 defaults 0 1' >"$vm/tree/etc/fstab"
  rm -rf "$vm/tree/etc/hostname"
  cp "$vm"/tree/boot/vmlinuz-* "$vm/vmlinuz"
  cp "$vm"/tree/boot/initrd.img-* "$vm/initrd"
  rm -f "$vm/root.img"
  mke2fs -q -t ext4 -d "$vm/tree" "$vm/root.img" 2G
  rm -rf "$vm/tree"
  echo "$key" >"$vm/root.key"
fi
# End of the root image.

"$bin/cosmicac-images" disk --out build/images

say "compiling the test"
go test -c -o "$vm/vm.test" ./services/wrk-server-k8s-nvidia/internal/vmtest

# A namespace of its own: the mesh listens on an address that the machine can
# reach through qemu, and nothing else is there to be reached.
say "booting (the console is in build/vm/console.log)"
COSMICAC_VM="$vm" COSMICAC_AGENT_DISK="$root/build/images/agents.img" COSMICAC_AGENT_VERSION="$("$bin/cosmicac-wrk-agent-instance" --version | cut -d' ' -f2)" \
  unshare --net sh -c 'ip link set lo up && ip address add 192.0.2.1/32 dev lo && exec "$0" "$@"' \
  "$vm/vm.test" -test.v -test.timeout 90m -test.run VM
say "the virtual machine came in, gave a shell, and came back after a reboot and in a new attempt"
