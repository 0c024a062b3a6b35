#!/usr/bin/env bash
# Put what was built where systemd and `cosmicac bootstrap` expect it.
# DESTDIR installs into another root, as packagers do.
. "$(dirname "$0")/lib.sh"
dest=${DESTDIR:-}
[ -n "$dest" ] || [ "$(id -u)" = 0 ] || { echo "install: run as root, or set DESTDIR" >&2; exit 1; }

install -d "$dest/usr/local/bin" "$dest/usr/local/share/cosmicac/agents" "$dest/etc/systemd/system" "$dest/usr/lib/sysusers.d" "$dest/etc/cosmicac" "$dest/usr/local/share/cosmicac/examples"
for b in "$bin"/cosmicac "$bin"/cosmicac-{app-node,wrk-ork,wrk-server-k8s-nvidia,proxy-inference,wrk-monitor,mesh-bootstrap}; do
  install -m 0755 "$b" "$dest/usr/local/bin/"
done
install -m 0755 "$bin/caddy" "$dest/usr/local/bin/cosmicac-caddy"
install -m 0755 "$bin"/cosmicac-wrk-agent-{instance,inference} "$dest/usr/local/share/cosmicac/agents/"
install -m 0644 deploy/systemd/*.service deploy/systemd/*.target "$dest/etc/systemd/system/"
install -m 0644 deploy/systemd/cosmicac.sysusers.conf "$dest/usr/lib/sysusers.d/cosmicac.conf"
[ -e "$dest/etc/cosmicac/Caddyfile" ] || install -m 0644 deploy/caddy/Caddyfile "$dest/etc/cosmicac/Caddyfile"
install -m 0644 services/*/*.example.yaml "$dest/usr/local/share/cosmicac/examples/"
rm -rf "$dest/usr/local/share/cosmicac/ui" "$dest/usr/local/share/cosmicac/kubernetes"
cp -r build/ui "$dest/usr/local/share/cosmicac/ui"
cp -r deploy/kubernetes "$dest/usr/local/share/cosmicac/kubernetes"
if [ -z "$dest" ]; then
  systemd-sysusers cosmicac.conf
  systemctl daemon-reload 2>/dev/null || echo "install: systemd does not run here; run systemctl daemon-reload on the real host"
fi
say "installed; next: cosmicac bootstrap --kubeconfig FILE --location CODE (see deploy/README.md)"
