package mesh

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/libp2p/go-libp2p/core/network"
	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/libp2p/go-libp2p/core/sec"
	"github.com/libp2p/go-libp2p/core/transport"
	"github.com/libp2p/go-libp2p/p2p/net/swarm"
	ma "github.com/multiformats/go-multiaddr"
	manet "github.com/multiformats/go-multiaddr/net"
)

// dialing tells the metrics and every running search of p that an address is
// dialed; the returned function says how it ended, once.
func (n *Node) dialing(p peer.ID, a ma.Multiaddr) (ended func(error)) {
	n.dials.mu.Lock()
	searches := append([]*search(nil), n.dials.searches[p]...)
	n.dials.mu.Unlock()
	d := &dialRecord{address: a, began: time.Now()}
	records := make([]*dialRecord, len(searches))
	for i, s := range searches {
		own := *d
		records[i] = &own
		s.mu.Lock()
		if !s.ended {
			s.add(&own)
		}
		s.mu.Unlock()
	}
	return func(err error) {
		n.metrics.dial(transportOf(a), dialResult(err))
		for i, s := range searches {
			s.mu.Lock()
			if !s.ended {
				records[i].took, records[i].ended, records[i].err = time.Since(d.began), true, err
			}
			s.mu.Unlock()
		}
	}
}

// watchedTransport tells of each dial. The library's own report names neither the
// addresses that failed before another won, nor how long any of them took.
type watchedTransport struct {
	transport.Transport
	n *Node
}

func (t *watchedTransport) Dial(ctx context.Context, a ma.Multiaddr, p peer.ID) (transport.CapableConn, error) {
	return t.DialWithUpdates(ctx, a, p, nil)
}

// DialWithUpdates implements transport.DialUpdater, which TCP has.
func (t *watchedTransport) DialWithUpdates(ctx context.Context, a ma.Multiaddr, p peer.ID, updates chan<- transport.DialUpdate) (c transport.CapableConn, err error) {
	quic, thin := transportOf(a) == "quic", t.n.dials.thinBy(p)
	if quic && (t.n.seeksTCP(p) || thin == "tcp") {
		return nil, errNothing
	}
	ended := t.n.dialing(p, a)
	defer func() { ended(err) }()
	switch {
	case thin != "":
		late, cancel := t.n.patient(ctx)
		defer cancel()
		ctx = late
	case !quic:
		defer func() {
			if answeredLate(err) {
				t.n.dials.setThin(p, "tcp")
			}
		}()
	}
	if u, ok := t.Transport.(transport.DialUpdater); ok && updates != nil {
		return u.DialWithUpdates(ctx, a, p, updates)
	}
	c, err = t.Transport.Dial(ctx, a, p)
	if err == nil && quic {
		c = &aside{CapableConn: c}
	}
	return c, err
}

// Listen guards what it accepts, and makes QUIC able to stand aside as Dial does.
func (t *watchedTransport) Listen(a ma.Multiaddr) (transport.Listener, error) {
	l, err := t.Transport.Listen(a)
	if err != nil {
		return nil, err
	}
	return guardedListener{l, transportOf(a) == "quic"}, nil
}

func (t *watchedTransport) Close() error {
	if c, ok := t.Transport.(io.Closer); ok {
		return c.Close()
	}
	return nil
}

// watchedCircuit tells of a dial through a relay, whose transport the library
// makes itself: it opens a resource scope first, gives it back when it fails, and
// leaves it with the connection when it does not.
type watchedCircuit struct {
	network.ConnManagementScope
	n       *Node
	address ma.Multiaddr

	mu    sync.Mutex
	ended func(error)
}

var errCircuit = errors.New("the relay made no connection")

func (c *watchedCircuit) SetPeer(p peer.ID) error {
	c.mu.Lock()
	c.ended = c.n.dialing(p, c.address)
	c.mu.Unlock()
	return c.ConnManagementScope.SetPeer(p)
}

func (c *watchedCircuit) Done() {
	c.end(errCircuit)
	c.ConnManagementScope.Done()
}

// end says once how the dial ended.
func (c *watchedCircuit) end(err error) {
	c.mu.Lock()
	ended := c.ended
	c.ended = nil
	c.mu.Unlock()
	if ended != nil {
		ended(err)
	}
}

// transportOf names the way of an address for people and metrics.
func transportOf(a ma.Multiaddr) string {
	switch {
	case isRelayed(a):
		return "relay"
	case has(a, ma.P_QUIC_V1):
		return "quic"
	case has(a, ma.P_TCP):
		return "tcp"
	}
	return "other"
}

func has(a ma.Multiaddr, protocol int) bool {
	_, err := a.ValueForProtocol(protocol)
	return err == nil
}

// relayOf is the relay of a relayed address, or "".
func relayOf(a ma.Multiaddr) peer.ID {
	var relay peer.ID
	for _, c := range a {
		if c.Protocol().Code == ma.P_CIRCUIT {
			return relay
		}
		if c.Protocol().Code == ma.P_P2P {
			relay, _ = peer.IDFromBytes(c.RawValue())
		}
	}
	return ""
}

// hostPort is the "10.0.0.1:4811" of an address, or the whole of it.
func hostPort(a ma.Multiaddr) string {
	if _, at, err := manet.DialArgs(a); err == nil {
		return at
	}
	for _, name := range []int{ma.P_DNS, ma.P_DNS4, ma.P_DNS6} {
		host, err := a.ValueForProtocol(name)
		if err != nil {
			continue
		}
		for _, layer := range []int{ma.P_TCP, ma.P_UDP} {
			if port, err := a.ValueForProtocol(layer); err == nil {
				return net.JoinHostPort(host, port)
			}
		}
	}
	return a.String()
}

// dialResults is the closed list of how a dial can end, for metrics.
var dialResults = []string{"ok", "refused", "no_route", "timeout", "wrong_key", "canceled", "failed"}

func dialResult(err error) string {
	var timeout net.Error
	var mismatch sec.ErrPeerIDMismatch
	switch {
	case err == nil:
		return "ok"
	case errors.Is(err, syscall.ECONNREFUSED):
		return "refused"
	case errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH), errors.Is(err, syscall.EADDRNOTAVAIL),
		// QUIC keeps the words of the kernel alone.
		strings.Contains(err.Error(), syscall.ENETUNREACH.Error()), strings.Contains(err.Error(), syscall.EHOSTUNREACH.Error()):
		return "no_route"
	case errors.As(err, &mismatch):
		return "wrong_key"
	case isCanceled(err):
		return "canceled"
	case errors.Is(err, context.DeadlineExceeded), errors.As(err, &timeout) && timeout.Timeout():
		return "timeout"
	}
	return "failed"
}

// isCanceled tells whether a dial ended because it was no longer needed; the
// library has a word of its own for another address having won.
func isCanceled(err error) bool {
	return errors.Is(err, context.Canceled) || err != nil && strings.Contains(err.Error(), "concurrent dial successful")
}

// relayWords are a relay's refusals in words.
var relayWords = map[string]string{
	"NO_RESERVATION": "the peer holds no reservation there", "PERMISSION_DENIED": "the relay does not allow it",
	"RESOURCE_LIMIT_EXCEEDED": "the relay is full", "CONNECTION_FAILED": "the relay does not reach the peer",
}

// shortError is an error as a part of a line: its first line, bounded, in words
// where they are known.
func shortError(err error) string {
	if err == nil {
		return ""
	}
	var mismatch sec.ErrPeerIDMismatch
	switch dialResult(err) {
	case "refused":
		return "refused"
	case "no_route":
		return "no route to it"
	case "wrong_key":
		errors.As(err, &mismatch)
		return fmt.Sprintf("another key answers there, %s", mismatch.Actual)
	case "timeout":
		return "no answer in time"
	}
	switch {
	case errors.Is(err, swarm.ErrDialToSelf):
		return "it is this node's own address"
	case errors.Is(err, swarm.ErrNoTransport):
		return "no transport for it"
	}
	text := withoutLines(err)
	for code, words := range relayWords {
		if strings.Contains(text, code) {
			return words
		}
	}
	return cutLine(text, 120)
}

// cutLine makes one line of text, at most so many runes.
func cutLine(text string, most int) string {
	text = strings.Join(strings.Fields(text), " ")
	if r := []rune(text); len(r) > most {
		return string(r[:most]) + "..."
	}
	return text
}
