#!/bin/sh
# Builds cosmicac-devcluster. Usage: build.sh OUT
# The version goes in by hand: without it the server calls itself v0.0.0-master and kubectl refuses to compare.
set -eu
out=$(realpath -m "${1:?usage: build.sh OUT}")
cd "$(dirname "$0")"
v=1.37.2
p=k8s.io/component-base/version
GOWORK=off GOGC="${GOGC:-400}" exec go build -trimpath -ldflags "-s -w \
	-X $p.gitVersion=v$v -X $p.gitMajor=1 -X $p.gitMinor=37 -X $p.gitTreeState=clean \
	-X k8s.io/client-go/pkg/version.gitVersion=v$v" -o "$out" .
