package main

import (
	"math"
	"slices"
)

// median is the middle value, or the mean of the two in the middle; NaN of none.
func median(values []float64) float64 {
	if len(values) == 0 {
		return math.NaN()
	}
	s := slices.Sorted(slices.Values(values))
	if m := len(s) / 2; len(s)%2 == 1 {
		return s[m]
	} else {
		return (s[m-1] + s[m]) / 2
	}
}

// percentile is the smallest value that at least the fraction p (0 to 1) of sorted
// are not above (nearest rank); zero of none.
func percentile[T any](sorted []T, p float64) (v T) {
	if len(sorted) == 0 {
		return v
	}
	rank := int(math.Ceil(p * float64(len(sorted))))
	return sorted[min(max(rank, 1), len(sorted))-1]
}

// ratio is the median over rounds of ours to theirs in the same round: the rounds
// of a run alternate, so what slowed one down slowed the other too. Where the
// rounds do not match, it is the ratio of the medians.
func ratio(ours, theirs []float64) float64 {
	if len(ours) != len(theirs) {
		return median(ours) / median(theirs)
	}
	each := make([]float64, len(ours))
	for i := range ours {
		each[i] = ours[i] / theirs[i]
	}
	return median(each)
}
