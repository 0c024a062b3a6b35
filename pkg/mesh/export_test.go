package mesh

import "github.com/libp2p/go-libp2p/core/host"

// Host lets tests misbehave as an admitted peer.
func (n *Node) Host() host.Host { return n.host }
