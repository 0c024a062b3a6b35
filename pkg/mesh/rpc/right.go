package rpc

import (
	"strings"
	"sync"

	"github.com/cosmicac/cosmicac/pkg/fault"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"
)

var rights sync.Map // full method -> *meshv1.Right, nil when it has none

// RightOf reads the right that a method's proto option names. It is nil when
// the method is unknown here or names none: such a method is refused to all.
// The method is written as gRPC does, "/package.Service/Method".
func RightOf(fullMethod string) *meshv1.Right {
	if r, ok := rights.Load(fullMethod); ok {
		return r.(*meshv1.Right)
	}
	method := findMethod(fullMethod)
	if method == nil {
		return nil // not remembered: a caller chooses the name
	}
	var right *meshv1.Right
	if options, ok := method.Options().(*descriptorpb.MethodOptions); ok && proto.HasExtension(options, meshv1.E_Right) {
		right, _ = proto.GetExtension(options, meshv1.E_Right).(*meshv1.Right)
	}
	rights.Store(fullMethod, right)
	return right
}

func findMethod(fullMethod string) protoreflect.MethodDescriptor {
	service, name, ok := strings.Cut(strings.TrimPrefix(fullMethod, "/"), "/")
	if !ok {
		return nil
	}
	d, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(service))
	if err != nil {
		return nil
	}
	s, ok := d.(protoreflect.ServiceDescriptor)
	if !ok {
		return nil
	}
	return s.Methods().ByName(protoreflect.Name(name))
}

// turns counts the running calls of methods whose right bounds them, by caller.
type turns struct {
	mu      sync.Mutex
	running map[turn]uint32
}

type turn struct{ caller, method string }

func noTurn() {}

// take counts one call of a method of which a caller may have most at a time.
func (t *turns) take(caller, method string, most uint32) (end func(), err error) {
	k := turn{caller, method}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.running[k] >= most {
		return nil, fault.New(fault.Exhausted, "call %s: %d run for this caller, and no more may at a time; wait for one to end", method, most)
	}
	if t.running == nil {
		t.running = make(map[turn]uint32)
	}
	t.running[k]++
	return func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		if t.running[k]--; t.running[k] == 0 {
			delete(t.running, k)
		}
	}, nil
}
