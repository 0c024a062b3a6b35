// Package fault is the closed list of ways in which something can go wrong,
// and the one error type that carries a kind across processes.
//
// A kind is part of the wire: a caller decides by it what to do next, also when
// the error was born in another daemon. The list is append-only; a kind is
// never renamed, reused or removed. Each kind maps once, in one table, to a gRPC
// code, an HTTP status, an exit code of the command line and a sentence.
//
// It does not log, does not translate, does not keep stack traces, and does not
// decide whether to retry. Text of a cause stays in the process where it was
// born unless it was written into the message.
package fault

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Kind says what sort of failure an error is. The text is the wire form.
type Kind string

// The kinds. Add only at the end.
const (
	// Invalid: the request itself is malformed; sending it again cannot help.
	Invalid Kind = "invalid"
	// Unauthenticated: the caller did not prove who it is.
	Unauthenticated Kind = "unauthenticated"
	// Denied: the caller is known and may not do this.
	Denied Kind = "denied"
	// NotFound: the thing named does not exist, or not for this caller.
	NotFound Kind = "not_found"
	// Conflict: it exists already, or changed under the caller.
	Conflict Kind = "conflict"
	// Exhausted: a quota, a rate or a capacity is used up.
	Exhausted Kind = "exhausted"
	// Unavailable: the service answered that it cannot serve now.
	Unavailable Kind = "unavailable"
	// Unreachable: the peer could not be reached at all.
	Unreachable Kind = "unreachable"
	// Timeout: no answer in time; whether it was done is not known.
	Timeout Kind = "timeout"
	// Canceled: the caller gave up.
	Canceled Kind = "canceled"
	// Unsupported: this version or this set-up cannot do it.
	Unsupported Kind = "unsupported"
	// TooLarge: the request or the answer is over a stated bound.
	TooLarge Kind = "too_large"
	// FailedPrecondition: correct request, wrong state of the thing.
	FailedPrecondition Kind = "failed_precondition"
	// Internal: a defect, or an error that nobody classified.
	Internal Kind = "internal"
)

// row is what one kind means outside.
type row struct {
	kind     Kind
	code     codes.Code
	status   int
	exit     int
	sentence string
}

// table is the only place where kinds are mapped. Exit codes 0, 1 and 2 are left
// to success, to daemons that die, and to wrong usage.
var table = []row{
	{Invalid, codes.InvalidArgument, 400, 3, "The request is not valid."},
	{Unauthenticated, codes.Unauthenticated, 401, 4, "You are not signed in, or the sign-in is no longer good."},
	{Denied, codes.PermissionDenied, 403, 5, "You may not do this."},
	{NotFound, codes.NotFound, 404, 6, "There is no such thing."},
	{Conflict, codes.AlreadyExists, 409, 7, "It exists already, or it changed in the meantime."},
	{Exhausted, codes.ResourceExhausted, 429, 8, "A limit is reached."},
	{Unavailable, codes.Unavailable, 503, 9, "The service cannot serve this now."},
	{Unreachable, codes.Unavailable, 502, 10, "The peer cannot be reached."},
	{Timeout, codes.DeadlineExceeded, 504, 11, "There was no answer in time."},
	{Canceled, codes.Canceled, 499, 12, "The request was canceled."},
	{Unsupported, codes.Unimplemented, 501, 13, "This version or set-up does not support it."},
	{TooLarge, codes.OutOfRange, 413, 14, "It is too large."},
	{FailedPrecondition, codes.FailedPrecondition, 412, 15, "It is not in a state that allows this."},
	{Internal, codes.Internal, 500, 16, "Something went wrong inside."},
}

var byKind = func() map[Kind]row {
	m := make(map[Kind]row, len(table))
	for _, r := range table {
		m[r.kind] = r
	}
	return m
}()

// Kinds lists every kind in the order in which they were added.
func Kinds() []Kind {
	ks := make([]Kind, len(table))
	for i, r := range table {
		ks[i] = r.kind
	}
	return ks
}

// Known tells whether k is in the list.
func (k Kind) Known() bool { _, ok := byKind[k]; return ok }

func (k Kind) row() row {
	if r, ok := byKind[k]; ok {
		return r
	}
	return byKind[Internal]
}

// GRPC is the gRPC code for k. Unavailable and Unreachable share one; the kind
// itself travels in the status details.
func (k Kind) GRPC() codes.Code { return k.row().code }

// HTTP is the HTTP status for k.
func (k Kind) HTTP() int { return k.row().status }

// Exit is the exit code of the command line for k, 3 and up.
func (k Kind) Exit() int { return k.row().exit }

// Sentence says in one plain sentence what k means to a person.
func (k Kind) Sentence() string { return k.row().sentence }

// Detail names one offending part and the rule it broke. Field "reason" holds a
// machine-readable reason inside a kind, such as "storage" or "never_fits".
type Detail struct {
	Field string
	Rule  string
}

// Error is a failure with a kind. Message is lower case and says what was tried
// on what; it may be shown to the caller. Cause is for this process alone.
type Error struct {
	Kind    Kind
	Message string
	Details []Detail
	Cause   error
}

// InvalidFields is an Invalid error of fields that broke a rule, one detail each. After
// what ("the job cannot be created") its text says the rule of one, or the number of many.
func InvalidFields(what string, fields []Detail) *Error {
	if len(fields) == 1 {
		return New(Invalid, "%s: %s %s", what, fields[0].Field, fields[0].Rule).With(fields...)
	}
	return New(Invalid, "%s: %d fields are not valid", what, len(fields)).With(fields...)
}

// New makes an error of a kind.
func New(k Kind, format string, a ...any) *Error {
	return &Error{Kind: k, Message: fmt.Sprintf(format, a...)}
}

// Wrap makes an error of a kind around a cause. A nil cause is allowed.
func Wrap(k Kind, cause error, format string, a ...any) *Error {
	return &Error{Kind: k, Message: fmt.Sprintf(format, a...), Cause: cause}
}

// With returns a copy of e with more details.
func (e *Error) With(details ...Detail) *Error {
	c := *e
	c.Details = append(append([]Detail(nil), e.Details...), details...)
	return &c
}

// Error is the message, then the cause.
func (e *Error) Error() string {
	if e.Cause == nil {
		return e.Message
	}
	cause := e.Cause.Error()
	if e.Message == "" {
		return cause
	}
	if strings.HasSuffix(e.Message, cause) {
		return e.Message
	}
	return e.Message + ": " + cause
}

// Unwrap gives the cause.
func (e *Error) Unwrap() error { return e.Cause }

// Is matches another *Error of the same kind with an empty message, so that
// errors.Is(err, &fault.Error{Kind: fault.NotFound}) works.
func (e *Error) Is(target error) bool {
	t, ok := target.(*Error)
	return ok && t.Message == "" && t.Cause == nil && t.Kind == e.Kind
}

// KindOf classifies any error. Errors of this package, of contexts and gRPC
// statuses are understood; anything else is Internal. It is "" for nil.
func KindOf(err error) Kind {
	if err == nil {
		return ""
	}
	var e *Error
	if errors.As(err, &e) {
		if e.Kind.Known() {
			return e.Kind
		}
		return Internal
	}
	if st, ok := statusOf(err); ok {
		return fromStatus(st).Kind
	}
	switch {
	case errors.Is(err, context.Canceled):
		return Canceled
	case errors.Is(err, context.DeadlineExceeded):
		return Timeout
	}
	var t interface{ Timeout() bool }
	if errors.As(err, &t) && t.Timeout() {
		return Timeout
	}
	return Internal
}

// Is tells whether err is of kind k.
func Is(err error, k Kind) bool { return err != nil && KindOf(err) == k }

// DetailsOf returns the details of the outermost error that has any.
func DetailsOf(err error) []Detail {
	for err != nil {
		var e *Error
		if !errors.As(err, &e) {
			break
		}
		if len(e.Details) > 0 {
			return e.Details
		}
		err = e.Cause
	}
	if st, ok := statusOf(err); ok {
		return fromStatus(st).Details
	}
	return nil
}

// Reason returns the machine-readable reason inside the kind: the rule of the
// detail whose field is "reason", or "".
func Reason(err error) string {
	for _, d := range DetailsOf(err) {
		if d.Field == "reason" {
			return d.Rule
		}
	}
	return ""
}

// statusOf finds a non-OK gRPC status in the chain of err.
func statusOf(err error) (*status.Status, bool) {
	var g interface{ GRPCStatus() *status.Status }
	if err == nil || !errors.As(err, &g) {
		return nil, false
	}
	st := g.GRPCStatus()
	if st == nil || st.Code() == codes.OK {
		return nil, false
	}
	return st, true
}
