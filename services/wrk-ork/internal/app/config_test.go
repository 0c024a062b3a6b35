package app

import (
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
)

func TestTheExampleHoldsEveryDefault(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../wrk-ork.example.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var c Config
	if err := yaml.UnmarshalWithOptions(text, &c, yaml.Strict()); err != nil {
		t.Fatal(err)
	}
	d := Defaults()
	c.Base = d.Base
	if !reflect.DeepEqual(c, d) {
		t.Errorf("the example says %+v, the code %+v", c, d)
	}
	if f := d.Validate(); len(f) > 0 {
		t.Errorf("the defaults are not valid: %v", f)
	}
	if f := (Config{}).Validate(); len(f) < 15 {
		t.Errorf("an empty configuration passes: %v", f)
	}
}

func TestTheReadmeNamesEveryStateAndTheReasonsOfPlacement(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	if len(job.States()) != len(orkv1.State_name)-1 {
		t.Errorf("job.States lists %d of %d", len(job.States()), len(orkv1.State_name)-1)
	}
	for _, s := range job.States() {
		if !strings.Contains(string(text), "| `"+job.StateName(s)+"` |") {
			t.Errorf("README.md has no row for state %s", job.StateName(s))
		}
	}
	for _, r := range []orkv1.Reason{
		orkv1.Reason_REASON_UNKNOWN_LOCATION, orkv1.Reason_REASON_UNKNOWN_MODEL, orkv1.Reason_REASON_NEVER_FITS,
		orkv1.Reason_REASON_NO_FABRIC, orkv1.Reason_REASON_RACK_FORGOTTEN, orkv1.Reason_REASON_BUSY,
		orkv1.Reason_REASON_CORDONED, orkv1.Reason_REASON_RACK_UNREACHABLE, orkv1.Reason_REASON_CLAIM_REFUSED,
	} {
		if !strings.Contains(string(text), "| `"+job.ReasonName(r)+"` |") {
			t.Errorf("README.md has no row for reason %s", job.ReasonName(r))
		}
	}
}
