#!/usr/bin/env bash
# Make proto/gen anew. An argument names another folder to write to.
. "$(dirname "$0")/lib.sh"
out_dir=${1:-proto/gen}
tool buf github.com/bufbuild/buf/cmd/buf
tool protoc-gen-go google.golang.org/protobuf/cmd/protoc-gen-go
tool protoc-gen-go-grpc google.golang.org/grpc/cmd/protoc-gen-go-grpc
out_dir=$(mkdir -p "$out_dir" && cd "$out_dir" && pwd)
(cd proto && sed "s|out: gen|out: $out_dir|" buf.gen.yaml >"$root/build/buf.gen.yaml" && PATH="$bin:$PATH" buf generate --template "$root/build/buf.gen.yaml")
# Documents and labels from the words on the wire's enums.
[ $# -gt 0 ] || CGO_ENABLED=0 go test -count=1 -run Fresh ./pkg/lexicon -update
