package spec

import (
	"testing"

	"github.com/cosmicac/cosmicac/pkg/fault"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

func port(n uint32, protocol, name string) *orkv1.PublicPort {
	return &orkv1.PublicPort{Port: n, Protocol: protocol, Name: name}
}

func TestDeclaredPortsGetAProtocolAndAName(t *testing.T) {
	t.Parallel()
	in := container()
	in.Ports = []*orkv1.PublicPort{port(8080, "", ""), port(8080, "UDP", ""), port(443, "tcp", "web")}
	out, err := Check(in)
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []*orkv1.PublicPort{port(8080, "tcp", "tcp-8080"), port(8080, "udp", "udp-8080"), port(443, "tcp", "web")} {
		if got := out.Ports[i]; got.Port != want.Port || got.Protocol != want.Protocol || got.Name != want.Name {
			t.Errorf("port %d is recorded as %v, want %v", i, got, want)
		}
	}
	if in.Ports[0].Name != "" {
		t.Error("the request itself was changed")
	}
}

func TestPortsThatCannotBeOpenedAreRefusedByName(t *testing.T) {
	t.Parallel()
	var many []*orkv1.PublicPort
	for i := range uint32(Ports + 1) {
		many = append(many, port(8000+i, "tcp", ""))
	}
	for name, c := range map[string]struct {
		ports []*orkv1.PublicPort
		field string
	}{
		"zero":            {[]*orkv1.PublicPort{port(0, "tcp", "")}, "ports[0].port"},
		"too high":        {[]*orkv1.PublicPort{port(65536, "tcp", "")}, "ports[0].port"},
		"ssh":             {[]*orkv1.PublicPort{port(22, "tcp", "")}, "ports[0].port"},
		"other protocol":  {[]*orkv1.PublicPort{port(80, "sctp", "")}, "ports[0].protocol"},
		"twice":           {[]*orkv1.PublicPort{port(80, "tcp", ""), port(80, "", "web")}, "ports[1]"},
		"one name twice":  {[]*orkv1.PublicPort{port(80, "tcp", "web"), port(81, "tcp", "web")}, "ports[1].name"},
		"name of digits":  {[]*orkv1.PublicPort{port(80, "tcp", "80")}, "ports[0].name"},
		"name too long":   {[]*orkv1.PublicPort{port(80, "tcp", "a-name-that-is-long")}, "ports[0].name"},
		"too many":        {many, "ports"},
		"in capitals":     {[]*orkv1.PublicPort{port(80, "tcp", "Web")}, "ports[0].name"},
		"a name of blank": {[]*orkv1.PublicPort{port(80, "tcp", "a b")}, "ports[0].name"},
	} {
		in := container()
		in.Ports = c.ports
		_, err := Check(in)
		if d := fault.DetailsOf(err); len(d) != 1 || d[0].Field != c.field {
			t.Errorf("%s: %v, want one problem with %s", name, err, c.field)
		}
	}
	in := container()
	in.Kind, in.Image, in.Inference = orkv1.JobKind_JOB_KIND_MANAGED_INFERENCE, nil, &orkv1.InferenceSpec{Model: "m", Runtime: RuntimeVLLM}
	in.Ports = []*orkv1.PublicPort{port(80, "tcp", "")}
	if _, err := Check(in); len(fault.DetailsOf(err)) != 1 {
		t.Errorf("an inference job with a port of its own: %v", err)
	}
}
