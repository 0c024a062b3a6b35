package fault

import (
	"os"
	"strings"
	"testing"
)

func TestEverySwitchIsDocumented(t *testing.T) {
	t.Parallel()
	raw, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range Switches {
		if !strings.Contains(string(raw), "| `"+s.Name+"` | "+string(s.Kind)+" | "+s.Says+" |") {
			t.Errorf("README.md does not have the row of %s", s.Name)
		}
	}
}

func TestAValueThatWouldDoNothingIsRefused(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ name, value, want string }{
		{NodeLost, " , ", "node names"},
		{WebhookDown, "us-gpu-00", "only value is *"},
		{APIAnswer, "verb", "key=value"},
		{APIAnswer, "code=99", "from 400 to 599"},
		{APISlow, "delay=never", "duration"},
		{APICut, "colour=red", "known are"},
		{APICut, "verb=get;", "empty"},
	} {
		s, ok := Find(c.name)
		if !ok {
			t.Fatalf("no switch %s", c.name)
		}
		if err := s.Check(c.value); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s %q: %v", c.name, c.value, err)
		}
	}
}

func TestDisksAreFoundByAPartOfTheirNameAndNodesByTheWhole(t *testing.T) {
	t.Parallel()
	disk, _ := Find(ImportStalled)
	node, _ := Find(NodeLost)
	for _, c := range []struct {
		s             Switch
		value, target string
		want          bool
	}{
		{disk, "j-1", "j-1-r0-n0-root", true}, {disk, "j-2,j-3", "j-1-r0-n0-root", false},
		{node, "us-gpu-0", "us-gpu-00", false}, {node, "in-gpu-00 us-gpu-00", "us-gpu-00", true}, {node, "*", "us-gpu-00", true}, {node, "", "us-gpu-00", false},
	} {
		if got := c.s.Matches(c.value, c.target); got != c.want {
			t.Errorf("%s %q meets %s: %v", c.s.Name, c.value, c.target, got)
		}
	}
}
