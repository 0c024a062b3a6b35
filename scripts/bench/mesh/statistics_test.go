package main

import (
	"math"
	"slices"
	"testing"
)

func TestMedianIsTheMiddle(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		values []float64
		want   float64
	}{
		{[]float64{7}, 7},
		{[]float64{9, 1, 5}, 5},
		{[]float64{4, 1, 3, 2}, 2.5},
		{[]float64{1, 1, 1, 1000}, 1},
	} {
		if got := median(c.values); got != c.want {
			t.Errorf("median of %v is %v, want %v", c.values, got, c.want)
		}
	}
	if got := median(nil); !math.IsNaN(got) {
		t.Errorf("median of nothing is %v", got)
	}
	values := []float64{3, 1, 2}
	if median(values); values[0] != 3 || values[1] != 1 {
		t.Errorf("median changed what it was given: %v", values)
	}
}

func TestPercentileIsTheNearestRank(t *testing.T) {
	t.Parallel()
	hundred := make([]int, 100)
	for i := range hundred {
		hundred[i] = i + 1
	}
	for _, c := range []struct {
		sorted []int
		p      float64
		want   int
	}{
		{hundred, 0.5, 50}, {hundred, 0.99, 99}, {hundred, 0.991, 100}, {hundred, 1, 100}, {hundred, 0, 1},
		{[]int{1, 2, 3}, 0.5, 2}, {[]int{1, 2, 3}, 0.99, 3}, {[]int{8}, 0.99, 8}, {nil, 0.99, 0},
	} {
		if got := percentile(c.sorted, c.p); got != c.want {
			t.Errorf("percentile %v of %d values is %v, want %v", c.p, len(c.sorted), got, c.want)
		}
	}
}

func TestRatioComparesTheSameRounds(t *testing.T) {
	t.Parallel()
	// The second round ran on a machine ten times slower; the ratio does not notice.
	if got := ratio([]float64{10, 100, 11}, []float64{20, 200, 22}); got != 0.5 {
		t.Errorf("ratio %v, want 0.5", got)
	}
	if got := ratio([]float64{1, 3}, []float64{4}); got != 0.5 {
		t.Errorf("ratio of medians %v, want 0.5", got)
	}
}

func TestVerdictKnowsWhichWayIsBetter(t *testing.T) {
	t.Parallel()
	more := goal{must: 2, aim: 3, more: true}
	less := goal{must: 10, aim: 5}
	noAim := goal{must: 0, aim: none}
	for _, c := range []struct {
		goal  goal
		value float64
		want  string
	}{
		{more, 3, "met aim"}, {more, 2.5, "met must"}, {more, 1.9, "missed"},
		{less, 5, "met aim"}, {less, 7, "met must"}, {less, 10.1, "missed"},
		{noAim, 0, "met must"}, {noAim, 1, "missed"},
	} {
		if got := c.goal.verdict(c.value); got != c.want {
			t.Errorf("%v with must %v and aim %v: %s, want %s", c.value, c.goal.must, c.goal.aim, got, c.want)
		}
	}
}

func TestGoalWithoutItsPartnerIsNotMeasured(t *testing.T) {
	t.Parallel()
	g := goal{group: "g", metric: "m", subject: oursTCP, other: holepunch}
	var r results
	r.add("g", "m", oursTCP, "us", 6, 1)
	if v, ok := g.measured(&r); ok {
		t.Errorf("measured %v against nobody", v)
	}
	r.add("g", "m", holepunch, "us", 12, 1)
	if v, ok := g.measured(&r); !ok || v != 0.5 {
		t.Errorf("measured %v, %v, want 0.5", v, ok)
	}
}

func TestEveryGoalNamesWhatIsMeasured(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for _, g := range goals() {
		if name := g.name(); seen[name] {
			t.Errorf("two goals are called %q", name)
		} else {
			seen[name] = true
		}
		if !slices.ContainsFunc(figures, func(f figure) bool { return f.name == g.figure }) {
			t.Errorf("%s is of no figure: %q", g.name(), g.figure)
		}
		if (g.more && g.aim < g.must) || (!g.more && g.aim > g.must) {
			t.Errorf("%s: the aim %v is less than the must %v", g.name(), g.aim, g.must)
		}
	}
}
