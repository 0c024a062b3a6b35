package journal

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"
)

func lines(from, to int) []Line {
	var all []Line
	for i := from; i <= to; i++ {
		all = append(all, Line{Time: time.Unix(int64(i), 0), Source: "console", Text: fmt.Sprintf("line %d", i)})
	}
	return all
}

func TestLastLinesOfAStoppedJobAreReadAfterARestart(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	j, err := Open(dir, 1<<20, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	if err := j.Append("a-1", Owner{ProjectID: "p", JobID: "j-1"}, "pos-100", lines(1, 100)); err != nil {
		t.Fatal(err)
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	if j, err = Open(dir, 1<<20, time.Hour); err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	if p := j.Position("a-1"); p != "pos-100" {
		t.Errorf("the stream would go on at %q", p)
	}
	if err := j.Append("a-1", Owner{ProjectID: "p", JobID: "j-1"}, "pos-101", lines(101, 101)); err != nil {
		t.Fatal(err)
	}
	got, err := j.Tail(Filter{JobID: "j-1", Projects: []string{"p"}}, 3)
	if err != nil || len(got) != 3 || got[2].Text != "line 101" || got[0].Text != "line 99" {
		t.Errorf("the last lines are %v, %v", got, err)
	}
}

func TestOldestLinesGoFirstAndSpaceIsBounded(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	const bound = 64 << 10
	j, err := Open(dir, bound, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	for i := 0; i < 200; i++ {
		if err := j.Append("a-1", Owner{}, "p", lines(i*20, i*20+19)); err != nil {
			t.Fatal(err)
		}
	}
	var size int64
	for _, name := range []string{"lines", "lines.old"} {
		if info, err := os.Stat(filepath.Join(dir, "a-1", name)); err == nil {
			size += info.Size()
		}
	}
	if size > 2*bound {
		t.Errorf("%d bytes are kept, the bound is %d", size, bound)
	}
	got, err := j.Tail(Filter{Everything: true}, 1)
	if err != nil || len(got) != 1 || got[0].Text != "line 3999" {
		t.Errorf("the last line is %v, %v", got, err)
	}
}

func TestASourceCannotLeaveTheFolder(t *testing.T) {
	t.Parallel()
	j, err := Open(t.TempDir(), 1<<20, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	for _, name := range []string{"../x", "a/b", "", "..", "A"} {
		if err := j.Append(name, Owner{}, "p", lines(1, 1)); err == nil {
			t.Errorf("source %q was taken", name)
		}
	}
}

func TestASourceThatWritesNoMoreIsRemovedAfterItsTime(t *testing.T) {
	t.Parallel()
	j, err := Open(t.TempDir(), 1<<20, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	if err := j.Append("a-1", Owner{}, "p", lines(1, 1)); err != nil {
		t.Fatal(err)
	}
	if err := j.Prune(time.Now()); err != nil {
		t.Fatal(err)
	}
	if got, _ := j.Tail(Filter{Everything: true}, 10); len(got) != 1 {
		t.Errorf("a fresh source was removed: %v", got)
	}
	if err := j.Prune(time.Now().Add(2 * time.Hour)); err != nil {
		t.Fatal(err)
	}
	if got, _ := j.Tail(Filter{Everything: true}, 10); len(got) != 0 {
		t.Errorf("an old source is still there: %v", got)
	}
}
