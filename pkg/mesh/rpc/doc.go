// Package rpc carries the standard gRPC stubs over connections that somebody
// else opened: a server that authorises each call, and a client that makes its
// connection when it needs one and classifies what goes wrong.
//
// Guarantees. A call ends exactly once. A call whose connection dies ends with
// kind unreachable and is never sent a second time by this package. Calls of
// one client may run at the same time, in no order. A unary call without a
// deadline gets DefaultDeadline; a stream has none of its own.
//
// It does not dial, does not know peers or keys, does not encrypt, and does not
// decide who may call: the owner of the connections passes that in.
package rpc
