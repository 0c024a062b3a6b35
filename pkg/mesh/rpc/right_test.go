package rpc

import (
	"strings"
	"testing"

	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	_ "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
	_ "github.com/cosmicac/cosmicac/proto/gen/cosmicac/app/v1"
	_ "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	_ "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	_ "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
)

func TestEveryMethodNamesItsRight(t *testing.T) {
	t.Parallel()
	methods := 0
	protoregistry.GlobalFiles.RangeFiles(func(f protoreflect.FileDescriptor) bool {
		if !strings.HasPrefix(string(f.Package()), "cosmicac.") {
			return true
		}
		for i := range f.Services().Len() {
			s := f.Services().Get(i)
			for j := range s.Methods().Len() {
				methods++
				name := "/" + string(s.FullName()) + "/" + string(s.Methods().Get(j).Name())
				if RightOf(name) == nil {
					t.Errorf("%s names no right, so nobody may call it", name)
				}
			}
		}
		return true
	})
	if methods < 30 {
		t.Errorf("only %d methods were found", methods)
	}
	for _, name := range []string{"", "x", "/no.Such/Method", "/cosmicac.mesh.v1.Node/NoSuch", "/cosmicac.mesh.v1.Right/Ping"} {
		if RightOf(name) != nil {
			t.Errorf("%q has a right", name)
		}
	}
}
