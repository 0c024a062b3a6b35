package fault

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func TestEveryKindMapsOnceAndSurvivesTheWire(t *testing.T) {
	t.Parallel()
	exits, sentences := map[int]Kind{}, map[string]Kind{}
	for _, k := range Kinds() {
		if k.GRPC() == codes.OK || k.HTTP() < 400 || k.HTTP() > 599 || k.Exit() < 3 || k.Exit() > 125 {
			t.Errorf("%s: code %v, status %d, exit %d out of range", k, k.GRPC(), k.HTTP(), k.Exit())
		}
		if other, ok := exits[k.Exit()]; ok {
			t.Errorf("%s and %s share exit code %d", k, other, k.Exit())
		}
		exits[k.Exit()] = k
		if other, ok := sentences[k.Sentence()]; ok || !strings.HasSuffix(k.Sentence(), ".") {
			t.Errorf("%s: sentence %q is not one of its own (%s)", k, k.Sentence(), other)
		}
		sentences[k.Sentence()] = k

		sent := New(k, "reserve gpu on node-1").With(Detail{"gpu.count", "at most 8"}, Detail{"reason", "never_fits"})
		back := FromGRPC(ToGRPC(fmt.Errorf("ork: %w", sent)))
		if KindOf(back) != k || !reflect.DeepEqual(DetailsOf(back), sent.Details) || Reason(back) != "never_fits" {
			t.Errorf("%s came back as %s with %v", k, KindOf(back), DetailsOf(back))
		}
		if got := status.Code(ToGRPC(sent)); got != k.GRPC() {
			t.Errorf("%s: status code %v, want %v", k, got, k.GRPC())
		}
	}
	if len(byKind) != len(table) {
		t.Errorf("a kind stands twice in the table")
	}
}

// The wire form of the list. A line may only be added at the end.
func TestKindsAreAppendOnly(t *testing.T) {
	t.Parallel()
	want := []Kind{"invalid", "unauthenticated", "denied", "not_found", "conflict", "exhausted", "unavailable",
		"unreachable", "timeout", "canceled", "unsupported", "too_large", "failed_precondition", "internal"}
	if got := Kinds(); !reflect.DeepEqual(got[:len(want)], want) {
		t.Errorf("kinds are %v", got)
	}
}

func TestForeignErrorsAreClassified(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		err  error
		want Kind
	}{
		{nil, ""},
		{context.Canceled, Canceled},
		{fmt.Errorf("call: %w", context.DeadlineExceeded), Timeout},
		{status.Error(codes.NotFound, "x"), NotFound},
		{status.Error(codes.Aborted, "x"), Conflict},
		{status.Error(codes.Unavailable, "x"), Unavailable},
		{status.Error(codes.Unknown, "x"), Internal},
		{errors.New("x"), Internal},
		{&Error{Kind: "made_up"}, Internal},
	} {
		if got := KindOf(c.err); got != c.want {
			t.Errorf("KindOf(%v) = %q, want %q", c.err, got, c.want)
		}
	}
}

func TestInternalCausesDoNotLeaveTheProcess(t *testing.T) {
	t.Parallel()
	err := ToGRPC(Wrap(Internal, errors.New("password=hunter2"), "open ledger"))
	if strings.Contains(err.Error(), "hunter2") || !strings.Contains(err.Error(), "open ledger") {
		t.Errorf("sent %q", err)
	}
	if err := ToGRPC(errors.New("password=hunter2")); strings.Contains(err.Error(), "hunter2") {
		t.Errorf("sent %q", err)
	}
}

func TestHugeAndBrokenTextIsBounded(t *testing.T) {
	t.Parallel()
	e := New(Invalid, "%s", strings.Repeat("x", 1<<20)+"\xff")
	for range 1000 {
		e = e.With(Detail{"f\xff", strings.Repeat("y", 1<<16)})
	}
	st, _ := status.FromError(ToGRPC(e))
	if len(st.Message()) > maxMessageBytes {
		t.Errorf("message of %d bytes", len(st.Message()))
	}
	if got := DetailsOf(ToGRPC(e)); len(got) != maxDetails || len(got[0].Rule) > maxDetailBytes {
		t.Errorf("%d details", len(got))
	}
}

func TestErrorText(t *testing.T) {
	t.Parallel()
	e := Wrap(Unreachable, errors.New("connection refused"), "dial ork")
	if e.Error() != "dial ork: connection refused" || !errors.Is(e, &Error{Kind: Unreachable}) || errors.Is(e, &Error{Kind: Denied}) {
		t.Errorf("%q", e)
	}
	if a, b := e.With(Detail{"a", "1"}), e.With(Detail{"b", "2"}); len(e.Details) != 0 || a.Details[0].Field != "a" || b.Details[0].Field != "b" {
		t.Error("With changed its receiver")
	}
}

func TestFieldsThatBreakARuleAreCountedAndNamed(t *testing.T) {
	t.Parallel()
	name, size := Detail{Field: "name", Rule: "is needed"}, Detail{Field: "disk_gib", Rule: "is at least 10"}
	for want, fields := range map[string][]Detail{
		"the job cannot be created: name is needed":         {name},
		"the job cannot be created: 2 fields are not valid": {name, size},
	} {
		err := InvalidFields("the job cannot be created", fields)
		if err.Kind != Invalid || !strings.HasPrefix(err.Error(), want) || len(DetailsOf(err)) != len(fields) {
			t.Errorf("%v, %v", err, DetailsOf(err))
		}
	}
}
