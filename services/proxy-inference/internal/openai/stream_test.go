package openai

import (
	"strings"
	"testing"

	"pgregory.net/rapid"
)

const (
	firstChunk = `data: {"choices":[{"delta":{"content":"the \"usage\" of"}}],"usage":null}`
	usageChunk = `data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2}}`
	doneChunk  = `data: [DONE]`
)

// pass sends events through a Stream in pieces cut at the given places.
func pass(s *Stream, text string, cuts []int) string {
	var out []byte
	for _, n := range cuts {
		n = min(n, len(text))
		out = s.Feed(out, []byte(text[:n]))
		text = text[n:]
	}
	out = s.Feed(out, []byte(text))
	return string(s.End(out))
}

func TestStreamPassesByteForByteHoweverItIsCut(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		eol := rapid.SampledFrom([]string{"\n", "\r\n", "\r"}).Draw(t, "line end")
		hide := rapid.Bool().Draw(t, "hide")
		cuts := rapid.SliceOfN(rapid.IntRange(0, 30), 0, 40).Draw(t, "cuts")
		comment := rapid.SampledFrom([]string{"", ": ping" + eol + eol, eol, "event: x" + eol + "id:3" + eol + "data:{}" + eol + eol}).Draw(t, "between")
		all := []string{firstChunk, usageChunk, doneChunk}
		shown := all
		if hide {
			shown = []string{firstChunk, doneChunk}
		}
		join := func(events []string) string {
			var b strings.Builder
			for _, e := range events {
				if e != usageChunk {
					b.WriteString(comment)
				}
				b.WriteString(e + eol + eol)
			}
			return b.String()
		}
		s := Stream{HideUsage: hide}
		if got, want := pass(&s, join(all), cuts), join(shown); got != want {
			t.Fatalf("got %q\nwant %q", got, want)
		}
		if u, ok := s.Usage(); !ok || u != (Usage{5, 2}) {
			t.Fatalf("usage %+v %v", u, ok)
		}
		if !s.Done() || s.Failed() {
			t.Fatalf("done %v failed %v", s.Done(), s.Failed())
		}
	})
}

func TestUsageBesideTheLastWordsIsNotHidden(t *testing.T) {
	t.Parallel()
	event := `data: {"choices":[{"delta":{},"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":1}}` + "\n\n"
	s := Stream{HideUsage: true}
	if got := pass(&s, event, nil); got != event {
		t.Errorf("got %q", got)
	}
	if _, ok := s.Usage(); !ok {
		t.Error("usage not seen")
	}
}

func TestHalfAnEventIsHeldBack(t *testing.T) {
	t.Parallel()
	var s Stream
	out := s.Feed(nil, []byte(firstChunk+"\n\n"+firstChunk[:20]))
	if string(out) != firstChunk+"\n\n" {
		t.Errorf("got %q", out)
	}
}

func TestHugeEventPassesInPartsAndUnchanged(t *testing.T) {
	t.Parallel()
	event := "data: " + strings.Repeat("x", 3*maximumEvent) + "\n\n" + doneChunk + "\n\n"
	var s Stream
	var out []byte
	for rest := event; rest != ""; {
		n := min(len(rest), 32<<10)
		out = s.Feed(out, []byte(rest[:n]))
		rest = rest[n:]
		if len(s.pending) > maximumEvent {
			t.Fatal("holds more than its bound")
		}
	}
	if string(out) != event || !s.Done() {
		t.Error("changed or end not seen")
	}
}

func TestLastEventWithoutItsEmptyLineCounts(t *testing.T) {
	t.Parallel()
	var s Stream
	if got := pass(&s, doneChunk, nil); got != doneChunk || !s.Done() {
		t.Errorf("%q, done %v", got, s.Done())
	}
	s = Stream{}
	if pass(&s, `data: {"error":{"message":"x"}}`+"\n\n", nil); !s.Failed() {
		t.Error("error event not seen")
	}
}
