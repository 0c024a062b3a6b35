package record

import (
	"fmt"
	"path/filepath"
	"testing"
	"time"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/notice"
)

func TestAFloorNeverFallsAndIsForgottenWhenItsTimeIsOver(t *testing.T) {
	t.Parallel()
	now := time.Now().Truncate(time.Second)
	s, err := Open(t.Context(), filepath.Join(t.TempDir(), "ork.db"), &notice.Hub{}, func() time.Time { return now })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	floor := func(epoch uint64, until time.Duration) Floor {
		return Floor{ProjectID: "p", UserID: "u", Epoch: epoch, Until: now.Add(until)}
	}
	if err := s.RaiseFloors(t.Context(), []Floor{floor(5, time.Hour), floor(3, 2*time.Hour), floor(4, time.Minute)}); err != nil {
		t.Fatal(err)
	}
	all, err := s.Floors(t.Context())
	if err != nil || len(all) != 1 || all[0].Epoch != 5 || !all[0].Until.Equal(now.Add(2*time.Hour)) {
		t.Fatalf("%v, %v", all, err)
	}
	for _, c := range []struct {
		after time.Duration
		left  int
	}{{2 * time.Hour, 1}, {2*time.Hour + time.Second, 0}} {
		was := now
		now = now.Add(c.after)
		if err := s.Prune(t.Context()); err != nil {
			t.Fatal(err)
		}
		if all, err = s.Floors(t.Context()); err != nil || len(all) != c.left {
			t.Errorf("after %s: %v, %v", c.after, all, err)
		}
		now = was
	}
}

func TestTooManyFloorsBecomeOneForEverybody(t *testing.T) {
	t.Parallel()
	s := open(t, t.TempDir())
	var floors []Floor
	for i := range floorsKept + 1 {
		floors = append(floors, Floor{ProjectID: "p", UserID: fmt.Sprintf("u-%d", i), Epoch: uint64(i + 1), Until: time.Now().Add(time.Hour)})
	}
	if err := s.RaiseFloors(t.Context(), floors[:floorsKept]); err != nil {
		t.Fatal(err)
	}
	if all, err := s.Floors(t.Context()); err != nil || len(all) != floorsKept {
		t.Fatalf("%d floors, %v", len(all), err)
	}
	if err := s.RaiseFloors(t.Context(), floors[floorsKept:]); err != nil {
		t.Fatal(err)
	}
	all, err := s.Floors(t.Context())
	if err != nil || len(all) != 1 || all[0].UserID != "" || all[0].ProjectID != "" || all[0].Epoch != floorsKept+1 {
		t.Fatalf("%v, %v", all, err)
	}
}

func TestAnAttemptThatEndsIsFiledAsVoidWithItsEnd(t *testing.T) {
	t.Parallel()
	s := open(t, t.TempDir())
	j := made(t, s, "x")
	is, err := s.Update(t.Context(), j.ID, full)
	if err != nil {
		t.Fatal(err)
	}
	if void, err := s.VoidCertificates(t.Context()); err != nil || len(void) != 0 {
		t.Fatalf("while it runs: %v, %v", void, err)
	}
	end := func(j *job.Job) (*job.Job, []job.Event, error) {
		a := j.Replicas[0].Newest()
		a.State, a.EndedAt = orkv1.State_STATE_FAILED, time.Now()
		return j, nil, nil
	}
	if _, err := s.Update(t.Context(), j.ID, end); err != nil {
		t.Fatal(err)
	}
	attempt := is.Replicas[0].Newest().ID
	if void, err := s.VoidCertificates(t.Context()); err != nil || len(void) != 1 || void[attempt].Before(time.Now().Add(LongestCertificate)) {
		t.Fatalf("once it has ended: %v, %v", void, err)
	}
}
