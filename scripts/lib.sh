# Sourced by the other scripts: folders, progress lines, and a cache for tools
# that take minutes to compile and change seldom.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
bin="$root/build/bin"
mkdir -p "$bin"
export PATH="$PATH:/usr/sbin:/sbin" # a user's may lack them: ip, nft, mkfs.ext4
# The go command and npm need a home; a machine without one gets it in build/.
if [ -z "${HOME:-}" ] || ! mkdir -p "$HOME" 2>/dev/null || [ ! -w "$HOME" ]; then
  export HOME="$root/build/home"
  mkdir -p "$HOME"
fi
cache="${XDG_CACHE_HOME:-$HOME/.cache}/cosmicac"
mkdir -p "$cache"

# Static binaries: agents run in any image. The race detector and the embedded
# cluster set it to 1 for themselves.
export CGO_ENABLED=0

# One clock for the scripts that call each other.
export STARTED="${STARTED:-$EPOCHSECONDS}"
say() { printf '\033[1m[%3dm%02ds]\033[0m %s\n' $(((EPOCHSECONDS - STARTED) / 60)) $(((EPOCHSECONDS - STARTED) % 60)) "$*"; }

# cached NAME KEY COMMAND...: run COMMAND (which must write $out) unless a
# binary of this NAME and KEY is in the cache; then link it into build/bin.
cached() {
  local name=$1 key=$2
  shift 2
  out="$cache/$name-$key"
  if [ ! -x "$out" ]; then
    say "building $name (once per version; minutes on a cold machine)"
    out="$cache/.$name-$key.$$" "$@"
    mv "$cache/.$name-$key.$$" "$out"
  fi
  if [ ! "$out" -ef "$bin/$name" ]; then
    rm -f "$bin/$name"
    ln "$out" "$bin/$name" 2>/dev/null || cp "$out" "$bin/$name"
  fi
}

# tool NAME PACKAGE: a tool pinned by scripts/tools/go.mod.
tool() {
  local key
  key=$(cat scripts/tools/go.mod scripts/tools/go.sum | sha256sum | cut -c1-16)
  cached "$1" "$key" tool_build "$2"
}
tool_build() { (cd scripts/tools && GOWORK=off GOFLAGS=-buildvcs=false CGO_ENABLED=0 GOGC=400 go build -trimpath -ldflags '-s -w' -o "$out" "$1"); }
