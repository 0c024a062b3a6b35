package series

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/store/storetest"
)

func TestADiskWithoutRoomIsNamedBeforeAnythingIsWrittenThere(t *testing.T) {
	t.Parallel()
	disk := storetest.SmallDisk(t, 4<<20)
	s, err := Open(filepath.Join(disk.Folder, "series"), time.Hour, nil)
	if err == nil {
		s.Close()
		t.Fatal("opened on a disk that is too small for the first file")
	}
	if fault.KindOf(err) != fault.Unavailable || !strings.Contains(err.Error(), disk.Folder) || !strings.Contains(err.Error(), "at least 160 are needed") {
		t.Errorf("%v", err)
	}
	if left, err := os.ReadDir(filepath.Join(disk.Folder, "series")); err != nil || len(left) != 0 {
		t.Errorf("left there: %v, %v", left, err)
	}
}

func count(t *testing.T, s *Store, everything bool, projects ...string) int {
	t.Helper()
	q, err := s.View(everything, projects).Querier(0, time.Now().Add(time.Hour).UnixMilli())
	if err != nil {
		t.Fatal(err)
	}
	defer q.Close()
	n := 0
	for set := q.Select(t.Context(), false, nil, labels.MustNewMatcher(labels.MatchRegexp, model.MetricNameLabel, ".+")); set.Next(); {
		n++
	}
	return n
}

func TestAFloodOfSeriesFromOneAgentIsCutAtItsBound(t *testing.T) {
	t.Parallel()
	s, err := Open(t.TempDir(), time.Hour, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	var flood strings.Builder
	for i := 0; i < 10*MaximumSeriesAgent; i++ {
		fmt.Fprintf(&flood, "cosmicac_flood{n=\"%d\"} 1\n", i)
	}
	if err := s.Append(t.Context(), Target{Instance: "a-1", Role: "agent", Agent: true, ProjectID: "p-1"}, []byte(flood.String()), time.Now(), 0); err != nil {
		t.Fatal(err)
	}
	if n := count(t, s, true); n != MaximumSeriesAgent+2 { // and up, and the pull's duration
		t.Errorf("%d series were kept, want %d", n, MaximumSeriesAgent+2)
	}
}

func TestATargetThatDoesNotAnswerIsSeenAsDown(t *testing.T) {
	t.Parallel()
	s, err := Open(t.TempDir(), time.Hour, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if err := s.Append(t.Context(), Target{Instance: "wrk-ork", Role: "ork"}, nil, time.Now(), time.Second); err != nil {
		t.Fatal(err)
	}
	if n := count(t, s, true); n != 2 {
		t.Errorf("%d series, want up and the pull's duration", n)
	}
	if err := s.Append(t.Context(), Target{Instance: "wrk-ork", Role: "ork"}, []byte("not { metrics"), time.Now(), 0); err == nil {
		t.Error("garbage was taken as metrics")
	}
}

func TestAViewOfNoProjectSeesNothing(t *testing.T) {
	t.Parallel()
	s, err := Open(t.TempDir(), time.Hour, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for _, p := range []string{"p-1", "p-2", ""} {
		if err := s.Append(t.Context(), Target{Instance: "x" + p, Role: "agent", Agent: true, ProjectID: p}, []byte("cosmicac_x 1\n"), time.Now(), 0); err != nil {
			t.Fatal(err)
		}
	}
	for want, projects := range map[int][]string{0: nil, 3: {"p-1"}, 6: {"p-1", "p-2"}} {
		if n := count(t, s, false, projects...); n != want {
			t.Errorf("a view of %v sees %d series, want %d", projects, n, want)
		}
	}
	if n := count(t, s, false, "p-.", ".*"); n != 0 {
		t.Errorf("a project id is read as an expression: %d series", n)
	}
}
