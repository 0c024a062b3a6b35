// Package trust holds what a node believes about its network and why: the signed
// records (genesis, roster, NetworkInfo, job certificates, grants, cards), who may
// sign each, and the newest of them that this node has seen.
//
// Everything is denied unless a signature that leads back to a root key allows it:
//
//	root key  --signs-->  genesis, rosters, NetworkInfo, rotations of root keys
//	root key  --delegates in a roster-->  signs_rosters, signs_certificates, signs_grants
//	signs_rosters       --signs-->  rosters (within their base) and NetworkInfo
//	signs_certificates  --signs-->  job certificates
//	signs_grants        --signs-->  grants
//	any key             --signs-->  its own card
//
// A record is a libp2p envelope with a domain string of its own, so that a
// signature over one kind of record is worth nothing as another. Every record
// names the network. Expiries allow Skew of clock difference.
//
// Rosters and NetworkInfo only move forward: an older one never replaces a newer
// one, however well it is signed. Changes are told by Subscribe, coalesced: one
// signal may stand for many changes, and the reader looks at the state itself.
//
// It does not speak to peers, does not dial, does not keep private keys of root
// or signer, does not hold sessions or revocation epochs, and does not decide what
// a role may do: the wire files do.
package trust
