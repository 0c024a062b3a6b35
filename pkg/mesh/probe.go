package mesh

import (
	"context"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/mesh/internal/frame"
	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/libp2p/go-libp2p/p2p/net/swarm"
	"github.com/libp2p/go-libp2p/p2p/protocol/identify"
	identifypb "github.com/libp2p/go-libp2p/p2p/protocol/identify/pb"
	ma "github.com/multiformats/go-multiaddr"
	madns "github.com/multiformats/go-multiaddr-dns"
	"github.com/multiformats/go-multistream"
)

// probeLimit bounds one probe of one address.
const probeLimit = 4 * time.Second

// probed is what one address answered.
type probed struct {
	connect   time.Duration // to a secured connection with the right key
	roundTrip time.Duration
	local     ma.Multiaddr
	observed  ma.Multiaddr // where the other side sees this node come from; may be nil
}

// probe dials one address of p past the connections that stand, by the same
// transport as every dial, reads the other side's identify, and closes. The other
// side sees a connection that never introduces itself and ends.
func (n *Node) probe(ctx context.Context, p peer.ID, a ma.Multiaddr) (r probed, err error) {
	ctx, cancel := context.WithTimeout(ctx, probeLimit)
	defer cancel()
	t := n.swarm().TransportForDialing(a)
	if t == nil {
		return r, swarm.ErrNoTransport
	}
	if w, ok := t.(*watchedTransport); ok {
		t = w.Transport // no part of any search
	}
	began := time.Now()
	c, err := t.Dial(ctx, a, p)
	if err != nil {
		return r, err
	}
	defer c.Close()
	r.connect, r.local = time.Since(began), c.LocalMultiaddr()
	stream, err := c.OpenStream(ctx)
	if err != nil {
		return r, fault.Wrap(fault.Unreachable, err, "open a stream")
	}
	defer func() { _ = stream.Reset() }()
	stop := context.AfterFunc(ctx, func() { _ = stream.Reset() })
	defer stop()
	began = time.Now()
	if err := multistream.SelectProtoOrFail(protocolID(identify.ID), stream); err != nil {
		return r, fault.Wrap(fault.Unreachable, err, "ask who it is")
	}
	r.roundTrip = time.Since(began)
	var who identifypb.Identify
	if err := frame.Read(stream, frame.Guest, &who); err != nil {
		return r, fault.Wrap(fault.Unreachable, err, "read who it is")
	}
	if observed, err := ma.NewMultiaddrBytes(who.GetObservedAddr()); err == nil {
		r.observed = observed
	}
	return r, nil
}

// resolved are the addresses with names replaced by what they stand for.
func resolved(ctx context.Context, addrs []ma.Multiaddr, most int) (list []ma.Multiaddr, failed map[string]error) {
	failed = make(map[string]error)
	for _, a := range addrs {
		if len(list) >= most {
			break
		}
		if !has(a, ma.P_DNS) && !has(a, ma.P_DNS4) && !has(a, ma.P_DNS6) {
			list = append(list, a)
			continue
		}
		found, err := madns.DefaultResolver.Resolve(ctx, a)
		if err == nil && len(found) == 0 {
			err = fault.New(fault.NotFound, "the name stands for no address")
		}
		if err != nil {
			failed[a.String()] = err
			continue
		}
		list = append(list, found[:min(len(found), most-len(list))]...)
	}
	return list, failed
}
