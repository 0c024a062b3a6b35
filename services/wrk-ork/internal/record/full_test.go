package record

import (
	"strings"
	"testing"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/id"
	"github.com/cosmicac/cosmicac/pkg/store/storetest"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/life"
)

func TestAFullDiskRefusesNewJobsLosesNoneAndHeals(t *testing.T) {
	t.Parallel()
	disk := storetest.SmallDisk(t, 4<<20)
	s := open(t, disk.Folder)
	old := made(t, s, "old")
	is, err := s.Update(t.Context(), old.ID, full)
	if err != nil {
		t.Fatal(err)
	}

	// Until there is no room, jobs are created; then one is refused in clear words.
	disk.Fill(t)
	recorded := 1
	for err == nil {
		j, events := life.New(&orkv1.JobSpec{Kind: orkv1.JobKind_JOB_KIND_GPU_CONTAINER, Name: strings.Repeat("n", 60), Location: "us"},
			&orkv1.Owner{ProjectId: "p-1", UserId: "u-1"}, time.Now(), id.New)
		if _, _, err = s.Create(t.Context(), j, events, "", nil); err == nil {
			recorded++
		}
		if recorded > 10000 {
			t.Fatal("the small disk is never full")
		}
	}
	if fault.KindOf(err) != fault.Unavailable || fault.Reason(err) != "storage" || !strings.Contains(err.Error(), "disk is full") || strings.Contains(err.Error(), disk.Folder) {
		t.Fatalf("no room for a job: %v", err)
	}
	// Nor is a change taken, neither on disk nor in memory.
	_, err = s.Update(t.Context(), old.ID, func(j *job.Job) (*job.Job, []job.Event, error) {
		j.Message = strings.Repeat("changed ", 2000)
		return j, nil, nil
	})
	if fault.Reason(err) != "storage" {
		t.Fatalf("no room for a change: %v", err)
	}
	for range 2 {
		live, err := s.Live(t.Context())
		if err != nil || len(live) != recorded {
			t.Fatalf("%d jobs are read while the disk is full, %d were recorded: %v", len(live), recorded, err)
		}
		if j, err := s.Job(t.Context(), old.ID); err != nil || !Same(j, is) || j.Revision != is.Revision {
			t.Fatalf("the job of before is read as %+v: %v", j, err)
		}
	}

	// With room again it goes on, and a restart finds all.
	disk.Free(t)
	made(t, s, "new")
	if _, err := s.Update(t.Context(), old.ID, func(j *job.Job) (*job.Job, []job.Event, error) {
		j.Message = "changed"
		return j, nil, nil
	}); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	again := open(t, disk.Folder)
	live, err := again.Live(t.Context())
	if err != nil || len(live) != recorded+1 {
		t.Fatalf("%d jobs after a restart, %d were recorded: %v", len(live), recorded+1, err)
	}
	if j, err := again.Job(t.Context(), old.ID); err != nil || j.Message != "changed" {
		t.Fatalf("the job of before is read as %+v: %v", j, err)
	}
}
