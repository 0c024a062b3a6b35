package record

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/id"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/life"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/notice"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func open(t *testing.T, dir string) *Store {
	t.Helper()
	s, err := Open(t.Context(), filepath.Join(dir, "ork.db"), &notice.Hub{}, time.Now)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func made(t *testing.T, s *Store, name string) *job.Job {
	t.Helper()
	j, events := life.New(&orkv1.JobSpec{Kind: orkv1.JobKind_JOB_KIND_GPU_CONTAINER, Name: name, Location: "us", Gpu: &orkv1.GpuRequest{Model: "m", Count: 1}},
		&orkv1.Owner{ProjectId: "p-1", UserId: "u-1"}, time.Now(), id.New)
	j, _, err := s.Create(t.Context(), j, events, "", nil)
	if err != nil {
		t.Fatal(err)
	}
	return j
}

// full sets every field of an attempt.
func full(j *job.Job) (*job.Job, []job.Event, error) {
	now := time.Now()
	a := j.Replicas[0].Newest()
	life.Placed(a, "rk", "M", []*orkv1.AttemptNode{{NodeName: "n", GpuCount: 1, Graph: []*orkv1.GraphNode{{Kind: "Secret", Since: timestamppb.New(now)}}}})
	a.State, a.Sent, a.Seen, a.Anchored, a.Simulated, a.AgentReady, a.Fenced = orkv1.State_STATE_RUNNING, true, true, true, true, true, false
	a.ClaimedAt, a.UpAt, a.HelloAt, a.RunningAt, a.NotBefore = now, now, now, now, now
	a.AgentKey, a.NodeKeys, a.AgentAddresses, a.SSHHostKey, a.DefaultUser = "k", map[uint32]string{0: "k"}, []string{"/ip4/1.2.3.4/tcp/1"}, "ssh-ed25519 A", "ubuntu"
	a.Unreachable = job.Mark{Since: now, Message: "away"}
	a.RefusedNodes = []string{"rk/x"}
	j.Touch("rk")
	j.State, j.Conditions = a.State, []job.Condition{{Kind: "unreachable", Message: "away", Since: now}}
	return j, nil, nil
}

func TestWhatWasAcknowledgedSurvivesAKill(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := open(t, dir)
	j := made(t, s, "模型 🚀 e\u0301")
	is, err := s.Update(t.Context(), j.ID, full)
	if err != nil {
		t.Fatal(err)
	}
	// The files as a killed process leaves them: nothing was closed.
	after := t.TempDir()
	for _, suffix := range []string{"", "-wal"} {
		data, err := os.ReadFile(filepath.Join(dir, "ork.db"+suffix))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(after, "ork.db"+suffix), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	again, err := open(t, after).Job(t.Context(), j.ID)
	if err != nil {
		t.Fatal(err)
	}
	if !Same(is, again) || !proto.Equal(is.View().Replicas[0], again.View().Replicas[0]) || again.Spec.Name != j.Spec.Name || again.Revision != 2 {
		t.Errorf("was %v\nis  %v", is.View(), again.View())
	}
}

func TestAnOutcomeIsWrittenOnceWhateverTheCodeSays(t *testing.T) {
	t.Parallel()
	s := open(t, t.TempDir())
	j := made(t, s, "x")
	set := func(state orkv1.State) error {
		_, err := s.Update(t.Context(), j.ID, func(j *job.Job) (*job.Job, []job.Event, error) {
			j.Replicas[0].Newest().State = state
			return j, nil, nil
		})
		return err
	}
	if err := set(orkv1.State_STATE_FAILED); err != nil {
		t.Fatal(err)
	}
	for _, other := range []orkv1.State{orkv1.State_STATE_SUCCEEDED, orkv1.State_STATE_RUNNING} {
		if err := set(other); err == nil || !strings.Contains(errors.Unwrap(err).Error(), "written once") {
			t.Errorf("%s over failed: %v", other, err)
		}
	}
	if got, err := s.Job(t.Context(), j.ID); err != nil || got.Replicas[0].Newest().State != orkv1.State_STATE_FAILED {
		t.Errorf("%v %v", got, err)
	}
}

func TestAnErrorInAChangeLeavesEverythingAsItWas(t *testing.T) {
	t.Parallel()
	s := open(t, t.TempDir())
	j := made(t, s, "x")
	stop := fault.New(fault.Conflict, "no")
	_, err := s.Update(t.Context(), j.ID, func(j *job.Job) (*job.Job, []job.Event, error) {
		j.Message = "changed"
		return j, nil, stop
	})
	if !errors.Is(err, stop) {
		t.Errorf("%v", err)
	}
	got, err := s.Job(t.Context(), j.ID)
	if err != nil || got.Message == "changed" || got.Revision != 1 {
		t.Errorf("%v %v", got, err)
	}
}

func TestADeletedJobIsRememberedForThirtyDays(t *testing.T) {
	t.Parallel()
	now := time.Now()
	s, err := Open(t.Context(), filepath.Join(t.TempDir(), "ork.db"), &notice.Hub{}, func() time.Time { return now })
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	j := made(t, s, "x")
	if err := s.Remove(t.Context(), j.ID); fault.KindOf(err) != fault.FailedPrecondition {
		t.Errorf("removed without being asked: %v", err)
	}
	if _, err := s.Update(t.Context(), j.ID, func(j *job.Job) (*job.Job, []job.Event, error) {
		next, e := life.AskDelete(j, "u", now)
		return next, e, nil
	}); err != nil {
		t.Fatal(err)
	}
	if err := s.Remove(t.Context(), j.ID); err != nil {
		t.Fatal(err)
	}
	said := func() string { _, err := s.Job(t.Context(), j.ID); return err.Error() }
	if !strings.Contains(said(), "was deleted at") {
		t.Errorf("%s", said())
	}
	now = now.Add(DefaultPolicy().Tombstones + time.Hour)
	if err := s.Prune(t.Context()); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(said(), "no job has") {
		t.Errorf("%s", said())
	}
}

func TestEventsAreKeptForTheirTimeAndNumber(t *testing.T) {
	t.Parallel()
	now := time.Now()
	s, err := Open(t.Context(), filepath.Join(t.TempDir(), "ork.db"), &notice.Hub{}, func() time.Time { return now })
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	p := DefaultPolicy()
	p.Events, p.EventsPerJob = time.Hour, 3
	s.Keep(p)
	j := made(t, s, "x")
	say := func(words string) {
		if _, err := s.Update(t.Context(), j.ID, func(j *job.Job) (*job.Job, []job.Event, error) {
			return j, []job.Event{{Message: words, Actor: "u"}}, nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	said := func() (all []string) {
		if err := s.Prune(t.Context()); err != nil {
			t.Fatal(err)
		}
		events, err := s.Events(t.Context(), j.ID, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range events {
			all = append(all, e.Message)
		}
		return all
	}
	for _, w := range []string{"a", "b", "c", "d"} {
		say(w)
	}
	if got := said(); strings.Join(got, "") != "bcd" {
		t.Errorf("the newest three of a job: %v", got)
	}
	now = now.Add(50 * time.Minute)
	say("e")
	now = now.Add(20 * time.Minute)
	if got := said(); strings.Join(got, "") != "e" {
		t.Errorf("those of the last hour: %v", got)
	}
}

func TestLiveJobsAreReadOnceAndChangesAreSeen(t *testing.T) {
	t.Parallel()
	s := open(t, t.TempDir())
	j := made(t, s, "x")
	first, err := s.Live(t.Context())
	if err != nil || len(first) != 1 {
		t.Fatalf("%v %v", first, err)
	}
	again, err := s.Live(t.Context())
	if err != nil || again[0] != first[0] {
		t.Errorf("an unchanged job was read again: %v", err)
	}
	if _, err := s.Update(t.Context(), j.ID, full); err != nil {
		t.Fatal(err)
	}
	third, err := s.Live(t.Context())
	if err != nil || third[0] == first[0] || third[0].State != orkv1.State_STATE_RUNNING || first[0].State != orkv1.State_STATE_QUEUED {
		t.Errorf("%v %v", third, err)
	}
}

func TestSubscribersHearOfEveryChangeAfterItIsOnDisk(t *testing.T) {
	t.Parallel()
	hub := &notice.Hub{}
	s, err := Open(t.Context(), filepath.Join(t.TempDir(), "ork.db"), hub, time.Now)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	sub := hub.Subscribe()
	defer sub.Close()
	j := made(t, s, "x")
	select {
	case <-sub.Ready():
	case <-time.After(30 * time.Second):
		t.Fatal("not told")
	}
	if ids := sub.Take(); len(ids) != 1 || ids[0] != j.ID {
		t.Errorf("%v", ids)
	}
	if _, err := s.Update(context.Background(), j.ID, func(j *job.Job) (*job.Job, []job.Event, error) { return j, nil, nil }); err != nil {
		t.Fatal(err)
	}
	select {
	case <-sub.Ready():
		t.Errorf("told of nothing: %v", sub.Take())
	default:
	}
}
