#!/usr/bin/env bash
# Measure one part of the product beside what others build on: mesh, placement, scale.
. "$(dirname "$0")/lib.sh"

case "${1:-}" in
mesh)
  say "building bench-mesh"
  (cd scripts/bench/mesh && GOWORK=off go build -buildvcs=false -ldflags '-s' -o "$bin/bench-mesh" .)
  flags=()
  [ -z "${SHORT:-}" ] || flags+=(-short)
  [ -z "${FIGURES:-}" ] || flags+=(-figures "$FIGURES")
  [ -z "${ROUNDS:-}" ] || flags+=(-rounds "$ROUNDS")
  [ -z "${ROUND_SECONDS:-}" ] || flags+=(-seconds "$ROUND_SECONDS")
  [ -z "${SUBJECTS:-}" ] || flags+=(-subjects "$SUBJECTS")
  [ -z "${DHT:-}" ] || flags+=(-dht "$DHT")
  [ -z "${JSON:-}" ] || flags+=(-json "$JSON")
  [ -z "${CPUPROFILE:-}" ] || flags+=(-cpuprofile "$CPUPROFILE")
  exec "$bin/bench-mesh" "${flags[@]}"
  ;;
placement)
  say "building bench-placement"
  CGO_ENABLED=0 go build -o "$bin/bench-placement" ./services/wrk-ork/internal/placement/bench
  flags=()
  [ -z "${SEED:-}" ] || flags+=(-seed "$SEED")
  [ -z "${JSON:-}" ] || flags+=(-json "$JSON")
  exec "$bin/bench-placement" "${flags[@]}"
  ;;
scale)
  say "building bench-scale"
  CGO_ENABLED=0 go build -o "$bin/bench-scale" ./services/wrk-server-k8s-nvidia/internal/bench
  flags=(-bin "$bin" -repository "$root")
  [ -z "${SHORT:-}" ] || flags+=(-short)
  [ -z "${DIR:-}" ] || flags+=(-dir "$DIR" -keep)
  [ -z "${JSON:-}" ] || flags+=(-json "$JSON")
  exec "$bin/bench-scale" "${flags[@]}"
  ;;
*)
  echo "bench: unknown part ${1:-} (mesh, placement, scale)" >&2
  exit 2
  ;;
esac
