package record

import (
	"path/filepath"
	"testing"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
)

// TestWhatIsReadInMemoryIsWhatIsOnDisk holds what the store answers after each kind
// of change against what another process would read.
func TestWhatIsReadInMemoryIsWhatIsOnDisk(t *testing.T) {
	t.Parallel()
	s := open(t, t.TempDir())
	check := func(after string, live int) {
		t.Helper()
		copied := t.TempDir()
		if err := s.Backup(t.Context(), filepath.Join(copied, "ork.db")); err != nil {
			t.Fatal(err)
		}
		want, err := open(t, copied).Live(t.Context())
		if err != nil || len(want) != live {
			t.Fatalf("after %s: %d live jobs on disk, want %d: %v", after, len(want), live, err)
		}
		have, err := s.Live(t.Context())
		if err != nil || len(have) != live {
			t.Fatalf("after %s: %d live jobs in memory, want %d: %v", after, len(have), live, err)
		}
		for i, j := range want {
			one, err := s.Job(t.Context(), j.ID)
			if err != nil || have[i] != one || one.ID != j.ID || one.Revision != j.Revision || !Same(one, j) || len(one.Volumes) != len(j.Volumes) {
				t.Errorf("after %s: job %s is read as %+v, on disk is %+v: %v", after, j.ID, one, j, err)
			}
		}
	}
	a, b := made(t, s, "a"), made(t, s, "b")
	check("two creations", 2)
	change := func(j *job.Job, f Change) error { _, err := s.Update(t.Context(), j.ID, f); return err }
	if err := change(a, full); err != nil {
		t.Fatal(err)
	}
	check("a change", 2)

	// One that is refused leaves no trace.
	refused := fault.New(fault.Conflict, "not now")
	if err := change(a, func(j *job.Job) (*job.Job, []job.Event, error) { j.Message = "never"; return j, nil, refused }); err != refused {
		t.Fatal(err)
	}
	if _, err := s.Place(t.Context(), a.ID, "rk-unknown", nil, full); fault.KindOf(err) != fault.Conflict {
		t.Fatalf("a plan for a rack that is not there: %v", err)
	}
	check("two refusals", 2)

	// What is settled is read from disk, and comes back when somebody asks.
	settle := func(j *job.Job) (*job.Job, []job.Event, error) {
		for _, r := range j.Replicas {
			at := r.Newest()
			at.State, at.EndedAt = orkv1.State_STATE_STOPPED, time.Now()
			at.Leave(time.Now())
		}
		return j, nil, nil
	}
	if err := change(b, settle); err != nil {
		t.Fatal(err)
	}
	check("one has settled", 1)
	if j, err := s.Job(t.Context(), b.ID); err != nil || !j.Settled() {
		t.Fatalf("a settled job: %+v %v", j, err)
	}
	deleted := func(j *job.Job) (*job.Job, []job.Event, error) { j.Intent = job.IntentDelete; return j, nil, nil }
	if err := change(b, deleted); err != nil {
		t.Fatal(err)
	}
	check("a deletion was asked", 2)
	if err := s.Remove(t.Context(), b.ID); err != nil {
		t.Fatal(err)
	}
	check("a removal", 1)
	if _, err := s.Job(t.Context(), b.ID); fault.KindOf(err) != fault.NotFound {
		t.Fatalf("a removed job: %v", err)
	}
}
