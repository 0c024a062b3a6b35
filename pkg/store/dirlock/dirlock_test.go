package dirlock

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/cosmicac/cosmicac/pkg/fault"
)

func TestAFolderIsFreeAtOnceThoughAProgramBeingStartedStillHoldsTheFile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	first, err := Take(dir, "lock")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Take(dir, "lock"); fault.KindOf(err) != fault.Conflict {
		t.Errorf("a second one takes it: %v", err)
	}
	// What a fork does to every open file, until the new program runs.
	inherited, err := unix.Dup(int(first.f.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(inherited)
	if err := first.Unlock(); err != nil {
		t.Fatal(err)
	}
	second, err := Take(dir, "lock")
	if err != nil {
		t.Fatalf("the folder was let go: %v", err)
	}
	if err := second.Unlock(); err != nil {
		t.Error(err)
	}
}
