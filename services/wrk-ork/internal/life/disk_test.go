package life

import (
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
)

// TestALostRootDiskIsSaidAndNoStopOrStartPromisesIt: somebody deletes the disk
// under a running VM.
func TestALostRootDiskIsSaidAndNoStopOrStartPromisesIt(t *testing.T) {
	t.Parallel()
	j, a := runningJob(orkv1.JobKind_JOB_KIND_GPU_CONTAINER)
	seen := up(a)
	seen.Status.DiskLostSince = timestamppb.New(t0.Add(time.Minute))
	lost, told := Advance(DefaultLimits(), j, at(2*time.Minute, open, a, seen), newID())
	if lost.State != running || !strings.Contains(conditions(lost)[job.ConditionDiskLost], "copy it away") {
		t.Fatalf("%s %v", lost.State, lost.Conditions)
	}
	if len(told) != 1 || !strings.Contains(told[0].Message, "deleted the root disk") || told[0].Actor != "rk" {
		t.Errorf("events %v", told)
	}
	// It is said once, and stays said over a report that knows nothing of it.
	again, told := Advance(DefaultLimits(), lost, at(3*time.Minute, open, a, up(a)), newID())
	if len(told) != 0 || conditions(again)[job.ConditionDiskLost] == "" {
		t.Errorf("%v %v", told, again.Conditions)
	}

	stopping, asked := Stop(again, "u")
	if text := asked[0].Message; strings.Contains(text, "keeps") || !strings.Contains(text, "loses its root disk") {
		t.Errorf("stop says %q", text)
	}
	stopping, _ = Advance(DefaultLimits(), stopping, at(4*time.Minute, open, a, seen), newID())
	if text := stopping.Message; strings.Contains(text, "keeps") || !strings.Contains(text, "loses its root disk") {
		t.Errorf("while it stops: %q", text)
	}
	ended, _ := Advance(DefaultLimits(), stopping, at(5*time.Minute, open, a, Attempt{}), newID())
	if text := ended.Message; ended.State != stopped || strings.Contains(text, "kept") || !strings.Contains(text, "lost") {
		t.Errorf("stopped: %s %q", ended.State, text)
	}
	if text := conditions(ended)[job.ConditionDiskLost]; !strings.Contains(text, "a start begins with a new one") {
		t.Errorf("stopped, with condition %q", text)
	}

	next, asked, err := Start(ended, "u", t0.Add(6*time.Minute), newID())
	if err != nil || !strings.Contains(asked[0].Message, "with a new root disk") {
		t.Errorf("start says %v, %v", asked, err)
	}
	if conditions(next)[job.ConditionDiskLost] != "" {
		t.Errorf("the new attempt has a new disk: %v", next.Conditions)
	}
	if _, asked, err = Restart(again, "u", t0.Add(6*time.Minute), newID()); err != nil || strings.Contains(asked[0].Message, "keeps") {
		t.Errorf("restart says %v, %v", asked, err)
	}
}
