#!/usr/bin/env bash
# Build every binary into build/bin and the web interface into build/ui.
. "$(dirname "$0")/lib.sh"

services=(app-node wrk-ork wrk-server-k8s-nvidia proxy-inference wrk-monitor mesh-bootstrap wrk-agent-instance wrk-agent-inference)
version=$(git describe --tags --always --dirty 2>/dev/null || echo dev)
# No -trimpath: the linters and tests then share what was compiled.
flags=(-ldflags "-s -w -X github.com/cosmicac/cosmicac/pkg/daemon.Version=$version")

# The embedded cluster: Kubernetes itself, so its key is its own sources only.
devcluster_key=$(find deploy/devcluster -type f \( -name '*.go' -o -name '*.mod' -o -name '*.sum' -o -name '*.yaml' -o -name '*.sh' \) -not -name '*_test.go' -print0 | sort -z | xargs -0 sha256sum | sha256sum | cut -c1-16)
devcluster_build() { CGO_ENABLED=1 deploy/devcluster/build.sh "$out"; }
cached cosmicac-devcluster "$devcluster_key" devcluster_build
tool caddy github.com/caddyserver/caddy/v2/cmd/caddy

say "building the daemons, the agents and the CLI"
for s in "${services[@]}"; do
  go build "${flags[@]}" -o "$bin/cosmicac-$s" "./services/$s"
done
go build "${flags[@]}" -o "$bin/cosmicac" ./services/cosmicac-cli

ui_key=$(cd services/app-ui && find . -path ./node_modules -prune -o -path ./dist -prune -o -type f -print0 | sort -z | xargs -0 sha256sum | sha256sum | cut -c1-16)
if [ "$(cat build/ui/.key 2>/dev/null)" != "$ui_key" ]; then
  say "building the web interface"
  (cd services/app-ui && npm ci --no-audit --no-fund --loglevel=error && npm run --silent build)
  rm -rf build/ui
  cp -r services/app-ui/dist build/ui
  echo "$ui_key" >build/ui/.key
fi
say "built into build/bin and build/ui"
