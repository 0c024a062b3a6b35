package mesh

import (
	"strconv"
	"testing"

	"github.com/libp2p/go-libp2p/core/network"
	ma "github.com/multiformats/go-multiaddr"
)

// accepted is a connection as the library shows it on accept.
type accepted struct {
	remote ma.Multiaddr
	closed bool
}

func (a *accepted) LocalMultiaddr() ma.Multiaddr  { return ma.StringCast("/ip4/203.0.113.1/tcp/4810") }
func (a *accepted) RemoteMultiaddr() ma.Multiaddr { return a.remote }
func (a *accepted) Close() error                  { a.closed = true; return nil }

func TestTheOldestMuteConnectionGoesFirst(t *testing.T) {
	t.Parallel()
	g := newGate()
	from := func(address string, port int) *accepted {
		c := &accepted{remote: ma.StringCast("/ip4/" + address + "/tcp/" + strconv.Itoa(port))}
		if !g.InterceptAccept(c) {
			t.Fatal("a newcomer was refused")
		}
		return c
	}
	open := func(list []*accepted) (n int) {
		for _, c := range list {
			if !c.closed {
				n++
			}
		}
		return n
	}
	other := from("198.51.100.7", 1000) // mute too, but of another address
	var crowd []*accepted
	for port := range 10000 {
		crowd = append(crowd, from("198.51.100.8", 1024+port))
	}
	if n := open(crowd); n != mutePerPrefix {
		t.Errorf("%d of one address are open, want %d", n, mutePerPrefix)
	}
	if open(crowd[:10000-mutePerPrefix]) != 0 {
		t.Error("an older one outlived a newer one")
	}
	if other.closed {
		t.Error("the crowd of one address cost another its place")
	}
	speaks := from("198.51.100.8", 900)
	g.InterceptSecured(network.DirInbound, "key", speaks)
	var others []*accepted
	for host := range 200 {
		for port := range 50 {
			others = append(others, from("192.0.2."+strconv.Itoa(host), 2000+port))
		}
	}
	if n := open(others) + open(crowd); n > muteTotal {
		t.Errorf("%d are open in all, at most %d may be", n, muteTotal)
	}
	if speaks.closed {
		t.Error("one that had finished its handshake was closed")
	}
	quic := &accepted{remote: ma.StringCast("/ip4/198.51.100.8/udp/4810/quic-v1")}
	if !g.InterceptAccept(quic) || quic.closed || g.mute.Len() > muteTotal {
		t.Error("quic connections count")
	}
}
