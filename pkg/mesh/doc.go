// Package mesh connects a network's daemons, agents and clients: peers are
// found by key or by role, admitted by what they can show, and talked to in
// calls and byte streams over encrypted libp2p connections.
//
// A connection begins with the admit dialogue (proto/cosmicac/mesh/v1/admit.proto).
// Until its peer is admitted every other stream is refused, except libp2p's own
// identify, which holds nothing but addresses. A refusal comes in words: kind
// denied is told apart from unreachable on every transport. Each call and each
// stream is checked against the right that it names.
//
// Guarantees. A call or stream ends with an error of pkg/fault, once. Nothing is
// sent twice by this package. Bytes of one stream arrive in order or the stream
// breaks. A peer that the roster no longer lists, or whose certificate or grant
// has ended, is cut off at once. A peer whose bytes arrive, however slowly, is not
// taken for dead. When a better connection to a peer comes to stand, new calls and
// streams take it and what runs on the old one goes on there. Close waits for every
// goroutine.
//
// What it does to reach a peer is written down as it happens: Trace tells every way
// and address, and the error of a call says it in short. CheckNetwork, SpeedTest,
// Kept, Refusals and the metrics (cosmicac_mesh_..., labels from closed lists) tell
// the rest. None of them changes what the node does.
//
// It does not queue messages, does not store cards (see pkg/mesh/cards), does
// not sign or check records (see pkg/trust), does not decide about jobs, and
// never uses a public bootstrap node.
package mesh
