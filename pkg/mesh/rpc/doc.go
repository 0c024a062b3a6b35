// Package rpc carries the standard gRPC stubs over connections that somebody
// else opened: a server that authorises each call, and a client that makes its
// connection when it needs one and classifies what goes wrong.
//
// A client has two channels to its peer, each made when first needed. The stream
// of calls (frame.go says its form) takes unary calls with requests up to
// FastBytes, many at a time, each with an id; gRPC in a connection of its own takes
// all else: streaming calls, larger requests, options that mean something to gRPC
// alone, and every call to a peer that serves no stream of calls. Handlers,
// authorisation, deadlines, metadata and kinds of errors are the same on both.
//
// Guarantees. A call ends exactly once. A call whose connection dies ends with
// kind unreachable and is never sent a second time by this package. Calls of
// one client may run at the same time, in no order. Above 256 at a time on one
// stream of calls the next waits for its turn, within its own deadline; one whose
// caller gave up counts until the peer has let go of it. A peer that
// reads nothing, or sends too much, holds a bounded share of memory. A unary call without a
// deadline gets DefaultDeadline; a stream has none of its own.
//
// It does not dial, does not know peers or keys, does not encrypt, and does not
// decide who may call: the owner of the connections passes that in.
package rpc
