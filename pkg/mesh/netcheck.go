package mesh

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	"github.com/libp2p/go-libp2p/core/peer"
	ma "github.com/multiformats/go-multiaddr"
	manet "github.com/multiformats/go-multiaddr/net"
	"google.golang.org/protobuf/types/known/timestamppb"
)

const (
	// checkLimit bounds one check of the network.
	checkLimit = 12 * time.Second
	// Bounds of what is checked, and at a time of one bootstrap: a bootstrap takes
	// eight connections of a key.
	checkedBootstraps, checkedAddresses, checkedAtOnce = 16, 16, 4
)

// CheckNetwork looks at the network that this node stands in: what it listens on
// and announces, which bootstraps answer at which address, where they see it come
// from, and what follows of that for UDP, IPv6 and NAT. It dials every address of
// every bootstrap past the connections that stand, needs no internet, and takes at
// most 12 s however many are down. Nothing is changed by what it finds.
func (n *Node) CheckNetwork(ctx context.Context) *meshv1.CheckNetworkResponse {
	began := time.Now()
	ctx, cancel := context.WithTimeout(ctx, checkLimit)
	defer cancel()
	r := &meshv1.CheckNetworkResponse{CheckedAt: timestamppb.New(n.now()), Private: n.o.Private, AnnouncedAddresses: n.Addresses(), Reservations: n.reservations()}
	for _, a := range n.host.Network().ListenAddresses() {
		if !isRelayed(a) {
			r.ListenAddresses = append(r.ListenAddresses, a.String())
		}
	}
	var others []peer.AddrInfo
	for _, b := range n.bootstraps() {
		if b.ID != n.id && len(others) < checkedBootstraps {
			others = append(others, b)
		}
	}
	r.Bootstraps = make([]*meshv1.BootstrapCheck, len(others))
	seen := make([][]observation, len(others))
	var checking sync.WaitGroup
	for i, b := range others {
		checking.Go(func() { r.Bootstraps[i], seen[i] = n.checkBootstrap(ctx, b) })
	}
	checking.Wait()

	all := slices.Concat(seen...)
	var listening []ma.Multiaddr
	for _, o := range all {
		r.ObservedAddresses = append(r.ObservedAddresses, &meshv1.ObservedAddress{
			Address: o.address.String(), LocalAddress: o.local.String(), Transport: transportOf(o.address), Observer: o.observer.String()})
		if n.listensAt(o.local) && !ma.Contains(listening, o.address) {
			listening = append(listening, o.address)
		}
	}
	n.dialBacks.saw(listening)
	r.DialBacks = n.dialBacks.list()
	own := ownAddresses()
	r.Nat, r.NatReason = natOf(all, own)
	r.Udp, r.Ipv6 = udpOf(r.Bootstraps), ipv6Of(r.Bootstraps, own)
	r.TookMicroseconds = micro(time.Since(began))
	return r
}

// checkBootstrap dials each address of one bootstrap and calls it.
func (n *Node) checkBootstrap(ctx context.Context, b peer.AddrInfo) (*meshv1.BootstrapCheck, []observation) {
	check := &meshv1.BootstrapCheck{Key: b.ID.String()}
	if m, ok := n.network.Known(b.ID); ok {
		check.Name = m.GetName()
	}
	var calling sync.WaitGroup
	calling.Go(func() { n.callBootstrap(ctx, b.ID, check) })
	addrs, failed := resolved(ctx, b.Addrs, checkedAddresses)
	for a, err := range failed {
		check.Addresses = append(check.Addresses, &meshv1.AddressCheck{Address: a, Transport: "other", Reason: shortError(err)})
	}
	var seen []observation
	var mu sync.Mutex
	var probing sync.WaitGroup
	slots := make(chan struct{}, checkedAtOnce)
	for _, a := range addrs {
		probing.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			began := time.Now()
			p, err := n.probe(ctx, b.ID, a)
			one := &meshv1.AddressCheck{Address: a.String(), Transport: transportOf(a), Answers: err == nil,
				ConnectMicroseconds: micro(p.connect), RoundTripMicroseconds: micro(p.roundTrip)}
			if err != nil {
				one.Reason = shortError(err)
				if dialResult(err) == "timeout" {
					one.Reason = fmt.Sprintf("no answer in %s", time.Since(began).Round(100*time.Millisecond))
				}
			}
			mu.Lock()
			defer mu.Unlock()
			check.Addresses = append(check.Addresses, one)
			if p.observed != nil {
				seen = append(seen, observation{p.observed, p.local, b.ID})
			}
		})
	}
	probing.Wait()
	calling.Wait()
	slices.SortFunc(check.Addresses, func(a, b *meshv1.AddressCheck) int { return cmp.Compare(a.Address, b.Address) })
	slices.SortFunc(seen, func(a, b observation) int { return a.address.Compare(b.address) })
	return check, seen
}

// callBootstrap says whether calls to it work, and how far its clock is off.
func (n *Node) callBootstrap(ctx context.Context, p peer.ID, check *meshv1.BootstrapCheck) {
	client := meshv1.NewNodeClient(n.Client(p))
	began, at := time.Now(), n.now()
	var err error
	if n.credential().kind == showsRoster {
		var info *meshv1.GetInfoResponse
		if info, err = client.GetInfo(ctx, &meshv1.GetInfoRequest{}); err == nil && info.GetNow().IsValid() {
			// It answered half a round trip after it was asked.
			check.ClockAheadMicroseconds = micro(info.GetNow().AsTime().Sub(at.Add(time.Since(began) / 2)))
		}
	} else {
		_, err = client.Ping(ctx, &meshv1.PingRequest{})
	}
	check.Answers = err == nil
	if err != nil {
		check.Reason = cutLine(withoutLines(err), 300)
	}
}

// reservations are the relays that hold one for this node. The library tells it
// by protecting their connections; of relays at private addresses it announces
// nothing.
func (n *Node) reservations() []*meshv1.RelayReservation {
	if !n.o.Private {
		return nil
	}
	var list []*meshv1.RelayReservation
	for _, b := range n.bootstraps() {
		if !n.host.ConnManager().IsProtected(b.ID, "autorelay") {
			continue
		}
		r := &meshv1.RelayReservation{RelayKey: b.ID.String(), Address: "/p2p/" + b.ID.String() + "/p2p-circuit"}
		if m, ok := n.network.Known(b.ID); ok {
			r.RelayName = m.GetName()
		}
		list = append(list, r)
	}
	return list
}

// listensAt tells whether the local end of a connection is one that this node
// listens on, so that others could dial where it was seen.
func (n *Node) listensAt(local ma.Multiaddr) bool {
	_, port, ok := endpoint(local)
	if !ok {
		return false
	}
	for _, a := range n.host.Network().ListenAddresses() {
		if _, p, ok := endpoint(a); ok && p == port && transportOf(a) == transportOf(local) {
			return true
		}
	}
	return false
}

// observation is where one bootstrap sees one connection of this node come from.
type observation struct {
	address, local ma.Multiaddr
	observer       peer.ID
}

// natOf concludes what stands between this node and its bootstraps. Ports of one
// local socket that two bootstraps see tell most: QUIC dials from the socket that
// it listens on, TCP only in private nodes.
func natOf(seen []observation, own []netip.Addr) (class, reason string) {
	if len(seen) == 0 {
		return "unknown", "no bootstrap says where it sees this node"
	}
	translated := slices.ContainsFunc(seen, func(o observation) bool {
		at, _, ok := endpoint(o.address)
		return ok && !slices.Contains(own, at)
	})
	if !translated {
		return "none", "every bootstrap sees an address of this host"
	}
	type socket struct {
		transport string
		port      uint16
		v6        bool
	}
	type sight struct {
		at       netip.AddrPort
		observer peer.ID
	}
	sights := make(map[socket][]sight)
	kept, ports := 0, 0
	for _, o := range seen {
		at, port, ok := endpoint(o.address)
		_, local, fine := endpoint(o.local)
		if !ok || !fine || slices.Contains(own, at) {
			continue
		}
		ports++
		if port == local {
			kept++
		}
		k := socket{transportOf(o.local), local, at.Is6()}
		sights[k] = append(sights[k], sight{netip.AddrPortFrom(at, port), o.observer})
	}
	compared := false
	for _, list := range sights {
		for _, s := range list[1:] {
			if s.observer == list[0].observer {
				continue
			}
			if s.at != list[0].at {
				return "symmetric", fmt.Sprintf("two bootstraps see one socket at %s and %s: no hole can be punched, traffic is relayed", list[0].at, s.at)
			}
			compared = true
		}
	}
	switch {
	case kept == ports:
		return "port_preserving", "the address is translated and the ports are kept"
	case compared:
		return "endpoint_independent", "two bootstraps see one socket at the same address and port"
	}
	return "unknown", "the address is translated; two bootstraps that answer on QUIC are needed to tell more"
}

// endpoint is the IP and port of an address.
func endpoint(a ma.Multiaddr) (netip.Addr, uint16, bool) {
	to, err := manet.ToNetAddr(a)
	if err != nil { // of QUIC it takes the part below
		if udp, _ := ma.SplitFunc(a, func(c ma.Component) bool { return c.Protocol().Code == ma.P_QUIC_V1 }); udp != nil {
			to, err = manet.ToNetAddr(udp)
		}
	}
	if err != nil {
		return netip.Addr{}, 0, false
	}
	at, err := netip.ParseAddrPort(to.String())
	if err != nil {
		return netip.Addr{}, 0, false
	}
	return at.Addr().Unmap().WithZone(""), at.Port(), true
}

// ownAddresses are those of this host's interfaces.
func ownAddresses() []netip.Addr {
	var list []netip.Addr
	found, err := net.InterfaceAddrs()
	if err != nil {
		return nil
	}
	for _, a := range found {
		if p, err := netip.ParsePrefix(a.String()); err == nil {
			list = append(list, p.Addr().Unmap())
		}
	}
	return list
}

// udpOf tells whether QUIC gets through.
func udpOf(checks []*meshv1.BootstrapCheck) string {
	blocked := false
	for _, b := range checks {
		tcp, quic, tried := false, false, false
		for _, a := range b.GetAddresses() {
			tried = tried || a.GetTransport() == "quic"
			quic = quic || a.GetTransport() == "quic" && a.GetAnswers()
			tcp = tcp || a.GetTransport() == "tcp" && a.GetAnswers()
		}
		if quic {
			return "works"
		}
		blocked = blocked || tried && tcp // it is there, and deaf to UDP
	}
	if blocked {
		return "blocked"
	}
	return "unknown"
}

// ipv6Of tells whether IPv6 gets through.
func ipv6Of(checks []*meshv1.BootstrapCheck, own []netip.Addr) string {
	tried := false
	for _, b := range checks {
		for _, c := range b.GetAddresses() {
			if a, err := ma.NewMultiaddr(c.GetAddress()); err == nil && has(a, ma.P_IP6) {
				tried = true
				if c.GetAnswers() {
					return "works"
				}
			}
		}
	}
	switch {
	case !slices.ContainsFunc(own, func(a netip.Addr) bool { return a.Is6() && a.IsGlobalUnicast() && !a.IsPrivate() }):
		return "none"
	case tried:
		return "fails"
	}
	return "unknown"
}
