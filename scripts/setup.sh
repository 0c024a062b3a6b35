#!/usr/bin/env bash
# Install what a fresh Debian machine lacks. Go and Node are expected.
. "$(dirname "$0")/lib.sh"

for c in git go node npm; do
  command -v "$c" >/dev/null || { echo "setup: $c is missing: install git, Go 1.26 and Node 20 first (see README.md)" >&2; exit 1; }
done

missing=()
need() { command -v "$1" >/dev/null || missing+=("$2"); }
need gcc gcc            # the race detector links with it
need chromium chromium  # browser tests
need ip iproute2        # network namespaces of the simulated machines
need nft nftables       # routers of the mesh's simulated sites
need systemd-analyze systemd # checks the shipped units
need ssh openssh-client # tests with the real client
need mkfs.ext4 e2fsprogs # a volume's first file system, and what is on the agent disk
if command -v gcc >/dev/null && ! echo '#include <stdlib.h>' | gcc -E - >/dev/null 2>&1; then missing+=(libc6-dev); fi
if [ ${#missing[@]} -gt 0 ]; then
  as_root=()
  [ "$(id -u)" = 0 ] || as_root=(sudo)
  say "installing with apt: ${missing[*]}"
  "${as_root[@]}" apt-get update -qq
  [[ " ${missing[*]} " == *" gcc "* ]] && missing+=(libc6-dev)
  DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi
