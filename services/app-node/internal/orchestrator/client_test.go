package orchestrator

import (
	"strings"
	"testing"

	"github.com/cosmicac/cosmicac/pkg/fault"
)

// TestAFullDiskOfTheOrchestratorIsNotCalledAnAbsence: who reads it must look at the
// right place, and know that nothing was changed.
func TestAFullDiskOfTheOrchestratorIsNotCalledAnAbsence(t *testing.T) {
	t.Parallel()
	full := fault.New(fault.Unavailable, "write to ork.db: database or disk is full").With(fault.Detail{Field: "reason", Rule: "storage"})
	err := translate(fault.ToGRPC(full))
	text := err.Error()
	if fault.KindOf(err) != fault.Unavailable || strings.Contains(text, "cannot be reached") || !strings.Contains(text, "nothing was changed") || !strings.Contains(text, "disk is full") {
		t.Errorf("a full disk: %v", err)
	}
	if d := fault.DetailsOf(err); len(d) != 1 || d[0].Rule != "storage" {
		t.Errorf("its reason: %v", d)
	}
	if err := translate(fault.ToGRPC(fault.New(fault.Unreachable, "no route"))); !strings.Contains(err.Error(), "cannot be reached") {
		t.Errorf("an absence: %v", err)
	}
}
