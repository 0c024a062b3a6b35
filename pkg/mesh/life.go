package mesh

import (
	"sync"
	"syscall"
	"time"

	"github.com/libp2p/go-libp2p/core/network"
	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/quic-go/quic-go"
	"golang.org/x/sys/unix"
)

// pulse looks for life below the streams of one connection. A frame of the
// multiplexer or a record of TLS counts only once it is whole, and takes longer to
// arrive on a slow link than silence is borne; and a ping waits behind all that was
// sent before it. Relayed connections show nothing of it: the relay's life is not
// the peer's.
type pulse struct {
	socket syscall.RawConn // of TCP
	quic   *quic.Conn

	at        time.Time // of the last look
	received  uint64    // bytes in order, and of TCP segments out of order, as of then
	delivered uint64    // segments that the peer has said it has, as of then
	acked     uint64    // bytes of them without a gap, as of then
	queued    uint64    // bytes sent and not acknowledged, as of then
}

// look tells whether the peer has shown life since the last look, at most within
// ago: bytes of it came in, or it is still taking in what was sent before the last
// look. Of what was sent since that says nothing: its kernel would take that in
// for a process that hangs.
func (p *pulse) look(within time.Duration) bool {
	now, was := time.Now(), *p
	switch {
	case p.quic != nil:
		// Acknowledgements are the peer's own packets.
		p.received = p.quic.ConnectionStats().BytesReceived
	case p.socket != nil:
		if err := p.socket.Control(func(fd uintptr) {
			if info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
				// Behind a lost segment bytes count only once it came again, on a
				// slow link after longer than silence is borne; segments count at once.
				// What is sent again because our answers are lost is neither.
				p.received, p.delivered, p.acked = info.Bytes_received+uint64(info.Rcv_ooopack), uint64(info.Delivered), info.Bytes_acked
			}
			if queued, err := unix.IoctlGetInt(int(fd), unix.SIOCOUTQ); err == nil {
				p.queued = uint64(queued)
			}
		}); err != nil {
			return false // it is closed
		}
	default:
		return false
	}
	p.at = now
	if now.Sub(was.at) > within {
		return false
	}
	return p.received != was.received || p.delivered != was.delivered && p.acked-was.acked < was.queued
}

// shut ends a TCP connection beneath everything, writes that hang included.
func (p *pulse) shut() {
	if p.socket != nil {
		_ = p.socket.Control(func(fd uintptr) { _ = unix.Shutdown(int(fd), unix.SHUT_RDWR) })
	}
}

// sockets is the gate, and hands the sockets of new TCP connections, which the
// library shows to no one else, to the connections' sessions.
type sockets struct {
	*gate
	mu sync.Mutex
	by map[string]socket
}

// InterceptSecured is the gate's.
func (s *sockets) InterceptSecured(d network.Direction, p peer.ID, c network.ConnMultiaddrs) bool {
	if !s.gate.InterceptSecured(d, p, c) {
		return false
	}
	s.put(c)
	return true
}

type socket struct {
	conn syscall.RawConn
	seen time.Time
}

// socketsMost bounds those whose connection failed after the gate; they are dropped
// when they are a minute old.
const socketsMost = 1024

func ends(c network.ConnMultiaddrs) string {
	return c.LocalMultiaddr().String() + " " + c.RemoteMultiaddr().String()
}

func (s *sockets) put(c network.ConnMultiaddrs) {
	sc, ok := c.(syscall.Conn)
	if !ok {
		return
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.by) >= socketsMost {
		for k, old := range s.by {
			if time.Since(old.seen) > time.Minute {
				delete(s.by, k)
			}
		}
	}
	s.by[ends(c)] = socket{raw, time.Now()}
}

// take returns the pulse of a new connection.
func (s *sockets) take(c network.Conn) *pulse {
	p := &pulse{}
	if c.As(&p.quic) {
		return p
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	k := ends(c)
	if found, ok := s.by[k]; ok {
		p.socket = found.conn
		delete(s.by, k)
	}
	return p
}
