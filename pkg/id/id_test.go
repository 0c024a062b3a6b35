package id

import (
	"bytes"
	"regexp"
	"slices"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func TestIdsAreDNSLabelsThatSortByTime(t *testing.T) {
	t.Parallel()
	label := regexp.MustCompile(`^[a-z][a-z0-9-]{0,61}[a-z0-9]$`)
	rapid.Check(t, func(t *rapid.T) {
		now := time.UnixMilli(epochMilliseconds + rapid.Int64Range(0, 1<<41+1<<40).Draw(t, "ms"))
		later := now.Add(time.Duration(rapid.IntRange(1, 1e6).Draw(t, "step")) * time.Millisecond)
		first := NewSource(func() time.Time { return now }, nil).New(Job)
		second := NewSource(func() time.Time { return later }, nil).New(Job)
		if first >= second || !label.MatchString(first) || !Valid(Job, first) {
			t.Fatalf("%s, then %s", first, second)
		}
		if !Time(first).Equal(now) {
			t.Fatalf("%s says %v, made at %v", first, Time(first), now)
		}
	})
}

func TestOneSourceNeverRepeatsEvenIfClockStandsOrRandomnessIsBroken(t *testing.T) {
	t.Parallel()
	now := time.UnixMilli(epochMilliseconds + 5000)
	s := NewSource(func() time.Time { now = now.Add(-time.Millisecond); return now }, bytes.NewReader(nil))
	last := ""
	for range 5000 {
		got := s.New(Rack)
		if got <= last {
			t.Fatalf("%s after %s", got, last)
		}
		last = got
	}
}

func TestConcurrentIdsAreUnique(t *testing.T) {
	t.Parallel()
	var wg sync.WaitGroup
	var mu sync.Mutex
	var all []string
	for range 4 {
		wg.Go(func() {
			var mine []string
			for range 2000 {
				mine = append(mine, New(Attempt))
			}
			mu.Lock()
			all = append(all, mine...)
			mu.Unlock()
		})
	}
	wg.Wait()
	slices.Sort(all)
	if n := len(slices.Compact(all)); n != 8000 {
		t.Fatalf("%d of 8000 are unique", n)
	}
}

func TestValidRefusesOtherThings(t *testing.T) {
	t.Parallel()
	for _, s := range []string{"", "j-", "j", "r-0000000000000", "j-000000000000", "j-00000000000000", "j-000000000000I",
		"j-000000000000i", "J-0000000000000", "j-0000000000/00", "jj-0000000000000"} {
		if Valid(Job, s) {
			t.Errorf("%q passes", s)
		}
		if s != "r-0000000000000" && s != "jj-0000000000000" && s != "J-0000000000000" && !Time(s).IsZero() {
			t.Errorf("%q has a time", s)
		}
	}
	if !Valid(Job, "j-0000000000000") {
		t.Error("refused a good one")
	}
}
