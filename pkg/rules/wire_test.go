package rules

import (
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	_ "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
	_ "github.com/cosmicac/cosmicac/proto/gen/cosmicac/app/v1"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	_ "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	_ "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
)

// Without a right a method is refused to all; with a wrong one, a stranger calls it.
func TestEveryMethodOfTheWireNamesWhoMayCallIt(t *testing.T) {
	t.Parallel()
	methods := 0
	protoregistry.GlobalFiles.RangeFiles(func(f protoreflect.FileDescriptor) bool {
		if !strings.HasPrefix(string(f.Package()), "cosmicac.") {
			return true
		}
		for i := range f.Services().Len() {
			ms := f.Services().Get(i).Methods()
			for j := range ms.Len() {
				methods++
				checkRight(t, ms.Get(j))
			}
		}
		return true
	})
	if methods == 0 {
		t.Error("no method was found at all")
	}
}

func checkRight(t *testing.T, m protoreflect.MethodDescriptor) {
	t.Helper()
	if !proto.HasExtension(m.Options(), meshv1.E_Right) {
		t.Errorf("%s names no right", m.FullName())
		return
	}
	right := proto.GetExtension(m.Options(), meshv1.E_Right).(*meshv1.Right)
	if len(right.GetRoles()) == 0 && !right.GetMembers() && !right.GetAgents() && !right.GetJoining() && !right.GetClients() && !right.GetGuests() {
		t.Errorf("%s lets nobody call it", m.FullName())
	}
	for _, r := range right.GetRoles() {
		if _, known := meshv1.Role_name[int32(r)]; !known || r == meshv1.Role_ROLE_UNSPECIFIED {
			t.Errorf("%s names role %d, which is none", m.FullName(), r)
		}
	}
	if right.GetMembers() && len(right.GetRoles()) > 0 {
		t.Errorf("%s names roles and all members: one of them is a mistake", m.FullName())
	}
	if right.GetGuests() && m.FullName() != "cosmicac.mesh.v1.Joining.RequestJoin" {
		t.Errorf("%s lets in keys that nobody admitted; only the join request may", m.FullName())
	}
}

// A package of the wire that this test does not link would escape the rule above.
func TestEveryPackageOfTheWireIsChecked(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob(filepath.Join(root(), "proto", "cosmicac", "*", "v*", "*.proto"))
	if err != nil || len(files) == 0 {
		t.Fatal("no wire files found", err)
	}
	for _, f := range files {
		rel, err := filepath.Rel(filepath.Join(root(), "proto"), f)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := protoregistry.GlobalFiles.FindFileByPath(filepath.ToSlash(rel)); err != nil {
			t.Errorf("%s is not linked into this test: import its package here", rel)
		}
	}
}
