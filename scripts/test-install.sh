#!/usr/bin/env bash
# `make install` and `cosmicac bootstrap` on a real systemd: a Debian root boots in
# a container of its own network, with the embedded cluster in it. By hand, not
# part of `make test`: it needs root, cgroups and some 3 minutes. Run after build.sh.
. "$(dirname "$0")/lib.sh"

skip() { say "skipped: $*"; echo "test-install: skipped, nothing was proved: $*"; exit 0; }
fail() { echo "test-install: $*" >&2; exit 1; }
[ "$(id -u)" = 0 ] || skip "it must run as root"
PATH="$PATH:/usr/sbin:/sbin"

need=()
for c in systemd-nspawn:systemd-container debootstrap:debootstrap nsenter:util-linux; do
  command -v "${c%%:*}" >/dev/null || need+=("${c##*:}")
done
if [ ${#need[@]} -gt 0 ]; then
  command -v apt-get >/dev/null || skip "no ${need[*]} here, and no apt to install them"
  say "installing with apt: ${need[*]}"
  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${need[@]}" >/dev/null ||
    skip "apt does not give ${need[*]}"
fi

place="$root/build/host"
tree="$place/tree"
mkdir -p "$place"
if [ ! -e "$place/clean/etc/os-release" ]; then
  mirror=$(apt-get indextargets --format '$(CODENAME) $(COMPONENT) $(REPO_URI)' "Identifier: Packages" | awk '$1 == "bookworm" && $2 == "main" { print $3; exit }')
  [ -n "$mirror" ] || skip "apt has no source for Debian bookworm"
  say "making a Debian root by debootstrap (once; minutes)"
  rm -rf --one-file-system "$place/making"
  debootstrap --variant=minbase --include=systemd,systemd-sysv,dbus,udev,procps,iproute2 bookworm "$place/making" "$mirror" >"$place/debootstrap.log" 2>&1 ||
    skip "debootstrap failed, see build/host/debootstrap.log"
  umount -q "$place/making/proc" "$place/making/sys" 2>/dev/null || true
  mv "$place/making" "$place/clean"
fi
rm -rf --one-file-system "$tree"
cp -a "$place/clean" "$tree"
say "installing into it"
DESTDIR="$tree" scripts/install.sh >/dev/null
cp "$bin/cosmicac-devcluster" "$tree/opt/"

nspawn=
end() {
  [ -z "$nspawn" ] || { kill "$nspawn" 2>/dev/null && wait "$nspawn" 2>/dev/null; } || true
}
trap end EXIT
systemd-nspawn -q -D "$tree" --boot --register=no --keep-unit --private-network --console=pipe </dev/null >"$place/console.log" 2>&1 &
nspawn=$!
inside() { nsenter -t "$(pgrep -P "$nspawn" | head -1)" -a env -i HOME=/root PATH=/usr/local/bin:/usr/bin:/usr/sbin:/bin:/sbin TERM=dumb "$@"; }
# until WHAT SECONDS COMMAND...
until_true() {
  local what=$1 limit=$((SECONDS + $2))
  shift 2
  until "$@" >/dev/null 2>&1; do
    kill -0 "$nspawn" 2>/dev/null || skip "systemd does not boot in a container here, see build/host/console.log"
    [ $SECONDS -lt $limit ] || fail "$what: not in time"
    sleep 1
  done
}
until_true "systemd boots" 120 inside systemctl is-active -q multi-user.target
inside systemd-sysusers cosmicac.conf
inside systemctl daemon-reload
say "the embedded cluster starts"
inside systemd-run -q --unit devcluster /opt/cosmicac-devcluster up --dir /var/lib/devcluster --agent-dir /usr/local/share/cosmicac/agents \
  --manifests /usr/local/share/cosmicac/kubernetes --kubeconfig-for cosmicac/cosmicac-worker=/root/worker.kubeconfig --plain-vms
until_true "the cluster is ready" 300 inside sh -c 'journalctl -u devcluster | grep -q "cluster is ready"'

say "cosmicac bootstrap"
inside cosmicac bootstrap --kubeconfig /root/worker.kubeconfig --location us --announce 127.0.0.1 --site http://127.0.0.1 >"$place/bootstrap.log" 2>&1 ||
  { sed 's/^Login .*/Login (not shown)/' "$place/bootstrap.log"; fail "bootstrap failed"; }
chmod 600 "$place/bootstrap.log"
units="app-node caddy mesh-bootstrap proxy-inference wrk-monitor wrk-ork wrk-server-k8s-nvidia@us"
all_active() { for u in $units; do inside systemctl is-active -q "cosmicac-$u" || return 1; done; }
until_true "every unit is active" 120 all_active
sed -n 's/^Login *[^ ]* *\([^ ]*\).*/\1/p' "$place/bootstrap.log" | inside cosmicac login http://127.0.0.1 --email admin@localhost >/dev/null
connected() { inside cosmicac racks list -o json | tr -d ' \n' | grep -q '"connected":true'; }
until_true "the rack is connected" 120 connected

say "a job, as a user would"
inside cosmicac jobs create --kind gpu-container --name lab --location us --gpu GH100_H100_SXM5_80GB --gpus 1 --image Ubuntu22.04/CUDA12.8.1 --wait >/dev/null

main_pid() { inside systemctl show -p MainPID --value "$1"; }
came_back() { local now; now=$(main_pid "$1"); [ "$now" != "$2" ] && [ "$now" != 0 ] && inside systemctl is-active -q "$1"; }
say "a killed daemon comes back"
was=$(main_pid cosmicac-wrk-ork)
inside kill -9 "$was"
until_true "the killed orchestrator comes back" 60 came_back cosmicac-wrk-ork "$was"
say "one that hangs is ended by the watchdog and comes back (a minute)"
was=$(main_pid cosmicac-proxy-inference)
inside kill -STOP "$was"
until_true "the hung proxy comes back" 240 came_back cosmicac-proxy-inference "$was"

say "everything stops within its 10 seconds, and starts again with the job still there"
inside systemctl stop 'cosmicac*'
! inside journalctl -u 'cosmicac*' --no-pager | grep -q "State 'stop-sigterm' timed out" || fail "a unit had to be killed to stop"
inside systemctl start cosmicac.target cosmicac-wrk-server-k8s-nvidia@us
until_true "every unit is active again" 120 all_active
job_runs() { inside cosmicac jobs list -o json | tr -d ' \n' | grep -q '"state":"running"'; }
until_true "the job runs still" 120 job_runs
say "passed: make install and cosmicac bootstrap on $(inside systemctl --version | head -1)"
