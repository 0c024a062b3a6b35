#!/usr/bin/env bash
# Everything that can be said of the sources without running them.
. "$(dirname "$0")/lib.sh"

say "gofmt"
unformatted=$(git ls-files -z '*.go' | grep -zv '^proto/gen/' | xargs -0 gofmt -l)
[ -z "$unformatted" ] || { echo "not gofmt-clean:"; echo "$unformatted"; exit 1; }

say "wire: lint, stale code, breaking changes"
rm -rf build/gen && scripts/generate.sh build/gen >/dev/null
diff -rq build/gen proto/gen || { echo "proto/gen is stale: run make generate"; exit 1; }
(cd proto && PATH="$bin:$PATH" buf lint)
if base=$(git rev-parse -q --verify origin/main 2>/dev/null || git rev-parse -q --verify HEAD~1); then
  if git cat-file -e "$base:proto/buf.yaml" 2>/dev/null; then
    rm -rf build/proto-base && mkdir -p build/proto-base
    git archive "$base" proto | tar -x -C build/proto-base
    (cd proto && PATH="$bin:$PATH" buf breaking --against ../build/proto-base/proto)
  fi
fi

say "go vet"
go vet ./proto/... ./pkg/... ./services/...
say "staticcheck"
tool staticcheck honnef.co/go/tools/cmd/staticcheck
"$bin/staticcheck" ./pkg/... ./services/...
