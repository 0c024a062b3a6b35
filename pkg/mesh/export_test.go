package mesh

import meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"

import "github.com/libp2p/go-libp2p/core/host"

// Host lets tests misbehave as an admitted peer.
func (n *Node) Host() host.Host { return n.host }

// SetRightOf replaces where the node looks up rights: gRPC's own test service
// names none.
func (n *Node) SetRightOf(f func(fullMethod string) *meshv1.Right) { n.rightOf = f }
