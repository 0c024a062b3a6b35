package fault

import (
	"errors"
	"strings"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Domain stands in the ErrorInfo of every status that this package makes.
const Domain = "cosmicac"

// Bounds on what crosses the wire; longer text is cut, further details are dropped.
const (
	maxMessageBytes = 4 << 10
	maxDetails      = 64
	maxDetailBytes  = 1 << 10
)

// ToGRPC turns err into a gRPC status error that carries kind, message and
// details. The text of the cause is part of the message for every kind but
// Internal, whose cause may hold what the caller must not see. Nil stays nil, and
// a status error of elsewhere is classified first.
func ToGRPC(err error) error {
	if err == nil {
		return nil
	}
	kind := KindOf(err)
	message := err.Error()
	var e *Error
	switch {
	case errors.As(err, &e):
		if kind == Internal {
			message = e.Message
		}
	case kind == Internal:
		message = "internal error"
	default:
		if st, ok := statusOf(err); ok {
			message = st.Message()
		}
	}
	st := status.New(kind.GRPC(), cut(message, maxMessageBytes))
	info := &errdetails.ErrorInfo{Reason: string(kind), Domain: Domain}
	details := DetailsOf(err)
	if len(details) == 0 {
		if with, err := st.WithDetails(info); err == nil {
			st = with
		}
		return st.Err()
	}
	bad := &errdetails.BadRequest{}
	for i, d := range details {
		if i == maxDetails {
			break
		}
		bad.FieldViolations = append(bad.FieldViolations, &errdetails.BadRequest_FieldViolation{
			Field: cut(d.Field, maxDetailBytes), Description: cut(d.Rule, maxDetailBytes),
		})
	}
	if with, err := st.WithDetails(info, bad); err == nil {
		st = with
	}
	return st.Err()
}

// FromGRPC turns a gRPC status error back into an *Error. An *Error, an error
// without a status and nil come back as they are.
func FromGRPC(err error) error {
	if err == nil {
		return nil
	}
	var e *Error
	if errors.As(err, &e) {
		return err
	}
	st, ok := statusOf(err)
	if !ok {
		return err
	}
	return fromStatus(st)
}

// fromStatus reads kind and details from a status. A status that was not made
// here is classified by its code.
func fromStatus(st *status.Status) *Error {
	e := &Error{Kind: kindOfCode(st.Code()), Message: cut(st.Message(), maxMessageBytes)}
	for _, d := range st.Details() {
		switch d := d.(type) {
		case *errdetails.ErrorInfo:
			// A kind of a newer version is unknown here: the code decides.
			if k := Kind(d.GetReason()); d.GetDomain() == Domain && k.Known() {
				e.Kind = k
			}
		case *errdetails.BadRequest:
			for _, v := range d.GetFieldViolations() {
				if len(e.Details) == maxDetails {
					break
				}
				e.Details = append(e.Details, Detail{
					Field: cut(v.GetField(), maxDetailBytes), Rule: cut(v.GetDescription(), maxDetailBytes),
				})
			}
		}
	}
	return e
}

// kindOfCode is the first kind of the table with that code; codes that no kind
// uses are folded into the nearest.
func kindOfCode(c codes.Code) Kind {
	switch c {
	case codes.Aborted:
		return Conflict
	case codes.Unknown, codes.DataLoss:
		return Internal
	}
	for _, r := range table {
		if r.code == c {
			return r.kind
		}
	}
	return Internal
}

// cut shortens s to n bytes and repairs what is not UTF-8, which protobuf refuses.
func cut(s string, n int) string {
	if len(s) > n {
		s = s[:n]
	}
	return strings.ToValidUTF8(s, "?")
}
