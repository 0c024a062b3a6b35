#!/usr/bin/env bash
# Build the container image of the agent disk into build/images, and push it
# where REGISTRY says (a host and a path). It needs no container engine. Run
# after build.sh: the image's version is that of the agents in build/bin.
. "$(dirname "$0")/lib.sh"

say "building cosmicac-images"
(cd deploy/images && GOWORK=off go build -buildvcs=false -ldflags '-s -w' -o "$bin/cosmicac-images" .)
"$bin/cosmicac-images" build --agents "$bin" --out build/images
if [ -n "${REGISTRY:-}" ]; then
  replace=()
  [ -z "${REPLACE:-}" ] || replace=(--replace)
  "$bin/cosmicac-images" push --out build/images --registry "$REGISTRY" "${replace[@]}"
fi
