package rpc

import (
	"context"
	"errors"
	"testing"
	"time"
)

func TestACallsContextEndsLikeAnyOther(t *testing.T) {
	t.Parallel()
	type key struct{}
	stream, cut := context.WithCancel(context.WithValue(context.Background(), key{}, "peer"))
	t.Cleanup(cut)

	for name, c := range map[string]struct {
		deadline time.Time
		end      func(*callContext)
		want     error
	}{
		"by its deadline": {deadline: time.Now().Add(-time.Second), end: func(*callContext) {}, want: context.DeadlineExceeded},
		"by its caller":   {deadline: time.Now().Add(time.Hour), end: (*callContext).end, want: context.Canceled},
		"without a time":  {end: (*callContext).end, want: context.Canceled},
		"twice":           {end: func(c *callContext) { c.end(); c.end() }, want: context.Canceled},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			unasked := &callContext{stream: stream, deadline: c.deadline}
			c.end(unasked)
			if err := unasked.Err(); !errors.Is(err, c.want) {
				t.Errorf("nobody had asked for Done, and Err is %v, want %v", err, c.want)
			}
			if cause := context.Cause(unasked); !errors.Is(cause, c.want) {
				t.Errorf("its cause is %v, want %v", cause, c.want)
			}

			asked := &callContext{stream: stream, deadline: c.deadline}
			done := asked.Done()
			child, cancel := context.WithCancel(asked)
			defer cancel()
			c.end(asked)
			for _, ctx := range []context.Context{asked, child} {
				<-ctx.Done()
				if !errors.Is(ctx.Err(), c.want) {
					t.Errorf("Err is %v, want %v", ctx.Err(), c.want)
				}
			}
			<-done

			late := &callContext{stream: stream, deadline: c.deadline}
			c.end(late)
			<-late.Done()
			if late.Value(key{}) != "peer" {
				t.Error("it lost what the stream's context says")
			}
		})
	}
}

func TestACallsContextEndsWithItsStream(t *testing.T) {
	t.Parallel()
	stream, cut := context.WithCancel(context.Background())
	unasked, asked := &callContext{stream: stream}, &callContext{stream: stream, deadline: time.Now().Add(time.Hour)}
	done := asked.Done()
	if unasked.Err() != nil || asked.Err() != nil {
		t.Fatal("it ended before its stream")
	}
	if d, ok := asked.Deadline(); !ok || !d.Equal(asked.deadline) {
		t.Errorf("its deadline is %v %v", d, ok)
	}
	if _, ok := unasked.Deadline(); ok {
		t.Error("a call without a deadline has one")
	}
	cut()
	<-done
	if !errors.Is(unasked.Err(), context.Canceled) || !errors.Is(asked.Err(), context.Canceled) {
		t.Errorf("the stream ended, and the contexts say %v and %v", unasked.Err(), asked.Err())
	}
}
