#!/usr/bin/env bash
# Every test, or the parts named: lint go cluster ui end-to-end; crowd by name only.
. "$(dirname "$0")/lib.sh"
export COSMICAC_BIN="$bin" COSMICAC_UI="$root/build/ui" COSMICAC_DEVCLUSTER_BIN="$bin/cosmicac-devcluster" COSMICAC_CADDY_BIN="$bin/caddy" COSMICAC_REQUIRE_CLUSTER=1

if [ $# -eq 0 ]; then
  scripts/setup.sh
  scripts/build.sh
  # Each part runs, so that one run tells all that is broken.
  failed=()
  for part in lint go cluster ui end-to-end; do
    scripts/test.sh "$part" || failed+=("$part")
  done
  [ ${#failed[@]} -eq 0 ] || { echo "test: failed: ${failed[*]}" >&2; exit 1; }
  say "all tests passed"
  exit
fi

for part in "$@"; do
  case "$part" in
  lint) scripts/lint.sh ;;
  go)
    say "tests of proto, pkg and services, race detector on"
    CGO_ENABLED=1 GOGC=200 go test -race -count=1 -timeout 30m -p 2 ./proto/... ./pkg/... ./services/...
    (cd deploy/images && GOWORK=off go vet ./... && GOWORK=off go test -count=1 ./...)
    ;;
  cluster)
    say "tests of the embedded cluster"
    (cd deploy/devcluster && CGO_ENABLED=1 GOWORK=off GOFLAGS=-trimpath go test -vet=off -count=1 -timeout 20m ./...)
    ;;
  ui)
    say "tests of the web interface"
    (cd services/app-ui && npm ci --no-audit --no-fund --loglevel=error && npm test --silent)
    ;;
  end-to-end)
    say "the whole platform, end to end"
    COSMICAC_END_TO_END=1 go test -count=1 -timeout 30m -p 1 -v -run EndToEnd ./services/cosmicac-cli/internal/demo ./services/cosmicac-cli/internal/soak
    ;;
  crowd)
    say "crowds in one process: 200 nodes, 10,000 connections (minutes of both cores)"
    go test -count=1 -timeout 30m -v -run Crowd ./pkg/mesh
    ;;
  *) echo "test: unknown part $part (lint, go, cluster, ui, end-to-end, crowd)" >&2; exit 2 ;;
  esac
done
