package usage

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"go.uber.org/goleak"

	"github.com/cosmicac/cosmicac/pkg/fault"
	appv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/app/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// ledger plays app-node: it counts each id once and can be away.
type ledger struct {
	mu    sync.Mutex
	away  bool
	drop  bool // take the records, then fail
	seen  map[string]int
	order []string
	calls int
	bad   string // an id that is refused for what it is
}

func (l *ledger) send(_ context.Context, records []*appv1.UsageRecord) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.away {
		return errors.New("away")
	}
	if len(records) > 1000 {
		return fmt.Errorf("%d records in a call", len(records))
	}
	l.calls++
	for _, r := range records {
		if r.GetId() == l.bad {
			return fault.New(fault.Invalid, "a bad record")
		}
	}
	for _, r := range records {
		if l.seen[r.GetId()]++; l.seen[r.GetId()] == 1 {
			l.order = append(l.order, r.GetId())
		}
	}
	if l.drop {
		l.drop = false
		return errors.New("the answer was lost")
	}
	return nil
}

func (l *ledger) set(f func(*ledger)) { l.mu.Lock(); defer l.mu.Unlock(); f(l) }

func (l *ledger) ids() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return append([]string(nil), l.order...)
}

// start runs a recorder on dir until the returned stop.
func start(t *testing.T, dir string, maximum int64, l *ledger) (*Recorder, func()) {
	t.Helper()
	r, err := Open(Options{Directory: dir, MaximumBytes: maximum, SyncInterval: time.Millisecond, SendInterval: time.Millisecond,
		Send: l.send, Log: hclog.NewNullLogger()})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- r.Run(ctx) }()
	var once sync.Once
	stop := func() {
		once.Do(func() {
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
	}
	t.Cleanup(stop)
	return r, stop
}

func until(t *testing.T, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !f(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("not within 20 s: " + what)
		}
	}
}

func record(r *Recorder, from, to int) {
	for i := from; i < to; i++ {
		r.Record(&appv1.UsageRecord{Id: fmt.Sprintf("us-%06d", i), ProjectId: "p-1", PromptTokens: uint64(i)})
	}
}

func TestRecordsReachTheLedgerOnceAndInOrder(t *testing.T) {
	t.Parallel()
	l := &ledger{seen: map[string]int{}, drop: true}
	r, _ := start(t, t.TempDir(), 1<<30, l)
	record(r, 0, 5000)
	until(t, "all records sent", func() bool { return len(l.ids()) == 5000 })
	for i, id := range l.ids() {
		if id != fmt.Sprintf("us-%06d", i) {
			t.Fatalf("place %d holds %s", i, id)
		}
	}
	until(t, "spool empty", func() bool { n := r.Status(); return n.Records == 0 && n.Bytes == 0 })
}

func TestRecordsSurviveARestartWhileTheLedgerIsAway(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	l := &ledger{seen: map[string]int{}, away: true}
	for i := range 4 {
		r, stop := start(t, dir, 1<<30, l)
		record(r, i*2000, (i+1)*2000)
		until(t, "written", func() bool { return r.Status().Records == int64((i+1)*2000) })
		stop()
	}
	l.set(func(l *ledger) { l.away = false })
	_, stop := start(t, dir, 1<<30, l)
	until(t, "all sent", func() bool { return len(l.ids()) == 8000 })
	stop()
	calls := l.calls
	r, stop := start(t, dir, 1<<30, l)
	if n := r.Status().Records; n > batch { // the last answer may have come while stopping
		t.Errorf("%d acknowledged records are back", n)
	}
	stop()
	if l.calls > calls+1 {
		t.Errorf("%d calls for nothing new", l.calls-calls)
	}
	files, _ := filepath.Glob(filepath.Join(dir, "*.usage"))
	if len(files) > 2 {
		t.Errorf("%d files for an empty spool", len(files))
	}
}

func TestHalfWrittenRecordIsCutOffAndTheRestKept(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	l := &ledger{seen: map[string]int{}, away: true}
	r, stop := start(t, dir, 1<<30, l)
	record(r, 0, 10)
	until(t, "written", func() bool { return r.Status().Records == 10 })
	stop()
	files, _ := filepath.Glob(filepath.Join(dir, "*.usage"))
	info, err := os.Stat(files[0])
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(files[0], info.Size()-3); err != nil {
		t.Fatal(err)
	}
	l.set(func(l *ledger) { l.away = false })
	r, _ = start(t, dir, 1<<30, l)
	record(r, 10, 12)
	until(t, "the whole ones sent", func() bool { return len(l.ids()) == 11 })
}

func TestFullSpoolKeepsWhatItHasAndSaysSo(t *testing.T) {
	t.Parallel()
	l := &ledger{seen: map[string]int{}, away: true}
	r, _ := start(t, t.TempDir(), 2000, l)
	for i := range 200 {
		record(r, i, i+1)
		until(t, "taken", func() bool { s := r.Status(); return s.Records+s.Lost == int64(i+1) })
	}
	s := r.Status()
	if !s.Full || s.Lost == 0 || s.Bytes > 2000 {
		t.Fatalf("%+v", s)
	}
	kept := s.Records
	l.set(func(l *ledger) { l.away = false })
	until(t, "kept ones sent", func() bool { return int64(len(l.ids())) == kept && r.Status().Records == 0 })
	record(r, 900, 901)
	until(t, "room again", func() bool { return !r.Status().Full && int64(len(l.ids())) == kept+1 })
}

func TestSpoolFilesAreForTheirOwnerOnly(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "usage")
	start(t, dir, 1<<20, &ledger{seen: map[string]int{}})
	files, _ := filepath.Glob(filepath.Join(dir, "*"))
	for _, f := range append(files, dir) {
		info, err := os.Stat(f)
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s has mode %v", f, info.Mode())
		}
	}
}

func TestOneBadRecordHoldsUpNoOther(t *testing.T) {
	t.Parallel()
	l := &ledger{seen: map[string]int{}, bad: "us-000777"}
	r, _ := start(t, t.TempDir(), 1<<30, l)
	record(r, 0, 3000)
	until(t, "the others sent", func() bool { return len(l.ids()) == 2999 && r.Status().Records == 0 })
	if s := r.Status(); s.Lost != 1 {
		t.Errorf("%+v", s)
	}
}
