// Package lexicon is the words for what a job can be: its states, the reasons for
// them, and the conditions that stand beside; and for the states of a volume. They are
// written once, on the wire's enums in proto/cosmicac/ork/v1; the orchestrator's README, the enums of
// the HTTP API and the labels of the web interface are made from them here, and a
// test says when one is stale.
//
// It decides no state and translates no message that a daemon wrote.
package lexicon

import (
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

// Entry is one word with what people read of it.
type Entry struct {
	// Name is how users write it: "never_fits".
	Name string
	// Label is one to five words for a list: "never fits".
	Label string
	// Means and Remedy are sentences without a full stop: what it is, and what moves
	// it on or would have to change.
	Means, Remedy string
}

// States lists every state in the order of a life.
func States() []Entry { return entries(orkv1.State(0).Descriptor()) }

// Reasons lists every reason, in the wire's order.
func Reasons() []Entry { return entries(orkv1.Reason(0).Descriptor()) }

// Conditions lists every kind of condition.
func Conditions() []Entry { return entries(orkv1.ConditionKind(0).Descriptor()) }

// VolumeStates lists every state of a volume in the order of a life.
func VolumeStates() []Entry { return entries(orkv1.VolumeState(0).Descriptor()) }

// entries reads an enum's words; the unspecified value has none and is left out.
func entries(d protoreflect.EnumDescriptor) []Entry {
	var out []Entry
	values := d.Values()
	for i := range values.Len() {
		v := values.Get(i)
		w, _ := proto.GetExtension(v.Options(), orkv1.E_Words).(*orkv1.Words)
		if v.Number() == 0 {
			continue
		}
		out = append(out, Entry{Name: name(v), Label: w.GetLabel(), Means: w.GetMeans(), Remedy: w.GetRemedy()})
	}
	return out
}

// Name is a value as users write it; empty for the unspecified one, and "unknown"
// for one that only a newer version knows.
func Name(e protoreflect.Enum) string {
	if e.Number() == 0 {
		return ""
	}
	v := e.Descriptor().Values().ByNumber(e.Number())
	if v == nil {
		return "unknown"
	}
	return name(v)
}

// name drops the prefix that all values of an enum share: CONDITION_KIND_IDLE is "idle".
func name(v protoreflect.EnumValueDescriptor) string {
	zero := string(v.Parent().(protoreflect.EnumDescriptor).Values().ByNumber(0).Name())
	return strings.ToLower(strings.TrimPrefix(string(v.Name()), strings.TrimSuffix(zero, "UNSPECIFIED")))
}
