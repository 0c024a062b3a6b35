package graph

import (
	"strconv"
	"time"
)

// Keys of tracks.
const keyPolicy = "policy"

func keySecret(k int) string { return "secret/" + strconv.Itoa(k) }
func keyDisk(k int) string   { return "disk/" + strconv.Itoa(k) }
func keyVMI(k int) string    { return "vmi/" + strconv.Itoa(k) }

// see enters what was found of an object and gives its track. Time counts from
// the first look at a stage.
func (a *attempt) see(now time.Time, key string, f finding) *track {
	t := a.tracks[key]
	if t == nil {
		t = &track{stage: f.stage, since: now, moved: now}
		a.tracks[key] = t
	}
	if t.stage != f.stage {
		t.stage, t.since, t.moved = f.stage, now, now
	}
	if f.percent > t.percent {
		t.percent, t.moved = f.percent, now
	}
	switch {
	case !f.trouble:
		t.troubled = time.Time{}
	case t.troubled.IsZero():
		t.troubled = now
	}
	t.state, t.words, t.deadline = f.state, f.words, f.deadline
	return t
}

// clock is what is known of an object's time before this look.
func (a *attempt) clock(now time.Time, key string) clock {
	if t := a.tracks[key]; t != nil {
		return t.clock(now)
	}
	return clock{}
}

func (t *track) clock(now time.Time) clock {
	c := clock{inStage: now.Sub(t.since), idle: now.Sub(t.moved)}
	if !t.troubled.IsZero() {
		c.troubled = now.Sub(t.troubled)
	}
	return c
}
