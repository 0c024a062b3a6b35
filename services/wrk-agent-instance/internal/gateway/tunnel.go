package gateway

import (
	"context"
	"io"
	"net"
	"net/netip"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.zx2c4.com/wireguard/tun"
	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/link/channel"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/icmp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
	"gvisor.dev/gvisor/pkg/waiter"

	"github.com/cosmicac/cosmicac/pkg/fault"
)

const (
	nic = 1
	// queued is how many packets wait for WireGuard; more are lost, as on a wire.
	queued = 1024
	// opening is how many TCP connections of all peers may be half made at once.
	opening = 256
	// mostFlows is how many TCP connections and UDP flows there may be in all.
	mostFlows = 1024
	dialTime  = 10 * time.Second
	// udpIdle ends a UDP flow in which neither side says anything.
	udpIdle  = 2 * time.Minute
	datagram = 64 << 10
)

// tunnel is the far end of WireGuard: an IP stack of our own, in this process, that
// has the VM's address inside the tunnel. What a peer sends there, to whatever port,
// goes on to the same port of the VM's loopback. It routes nothing: no packet leaves
// for any other place, and the VM's own kernel, firewall and routes stay untouched.
type tunnel struct {
	stack  *stack.Stack
	link   *channel.Endpoint
	events chan tun.Event
	dial   func(ctx context.Context, network, address string) (net.Conn, error)

	ctx   context.Context
	stop  context.CancelFunc
	close sync.Once

	mu     sync.Mutex
	closed bool
	flows  map[*flow]struct{}
	tasks  sync.WaitGroup
}

// flow is one TCP connection or one UDP conversation of a peer.
type flow struct {
	peer netip.Addr
	cut  context.CancelFunc
}

func newTunnel(address netip.Addr, dial func(ctx context.Context, network, address string) (net.Conn, error)) (*tunnel, error) {
	t := &tunnel{
		stack: stack.New(stack.Options{
			NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol},
			TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol, udp.NewProtocol, icmp.NewProtocol4},
		}),
		link: channel.New(queued, MTU, ""), events: make(chan tun.Event, 1), dial: dial, flows: make(map[*flow]struct{}),
	}
	t.ctx, t.stop = context.WithCancel(context.Background())
	sack := tcpip.TCPSACKEnabled(true)
	if err := t.stack.SetTransportProtocolOption(tcp.ProtocolNumber, &sack); err != nil {
		return nil, fault.New(fault.Internal, "set up the gateway's TCP: %v", err)
	}
	if err := t.stack.CreateNIC(nic, t.link); err != nil {
		return nil, fault.New(fault.Internal, "set up the gateway's interface: %v", err)
	}
	own := tcpip.ProtocolAddress{Protocol: ipv4.ProtocolNumber, AddressWithPrefix: tcpip.AddrFrom4(address.As4()).WithPrefix()}
	if err := t.stack.AddProtocolAddress(nic, own, stack.AddressProperties{}); err != nil {
		return nil, fault.New(fault.Internal, "give the gateway's interface %s: %v", address, err)
	}
	t.stack.SetRouteTable([]tcpip.Route{{Destination: header.IPv4EmptySubnet, NIC: nic}})
	t.stack.SetTransportProtocolHandler(tcp.ProtocolNumber, tcp.NewForwarder(t.stack, 0, opening, t.forwardTCP).HandlePacket)
	t.stack.SetTransportProtocolHandler(udp.ProtocolNumber, udp.NewForwarder(t.stack, t.forwardUDP).HandlePacket)
	t.events <- tun.EventUp
	return t, nil
}

// begin counts a flow in, false when there are too many or the tunnel closes. The
// context ends when the peer is cut.
func (t *tunnel) begin(from tcpip.Address) (context.Context, func(), bool) {
	ctx, cancel := context.WithCancel(t.ctx)
	f := &flow{peer: netip.AddrFrom4(from.As4()), cut: cancel}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed || len(t.flows) >= mostFlows {
		cancel()
		return nil, nil, false
	}
	t.flows[f] = struct{}{}
	t.tasks.Add(1)
	return ctx, func() {
		cancel()
		t.mu.Lock()
		delete(t.flows, f)
		t.mu.Unlock()
		t.tasks.Done()
	}, true
}

// cut ends every flow of a peer's address.
func (t *tunnel) cut(peer netip.Addr) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for f := range t.flows {
		if f.peer == peer {
			f.cut()
		}
	}
}

func (t *tunnel) forwardTCP(r *tcp.ForwarderRequest) {
	id := r.ID()
	ctx, end, ok := t.begin(id.RemoteAddress)
	if !ok {
		r.Complete(true)
		return
	}
	defer end()
	// The VM's side first: where nothing listens, the peer is refused as it would be there.
	call, cancel := context.WithTimeout(ctx, dialTime)
	far, err := t.dial(call, "tcp", loopback(id.LocalPort))
	cancel()
	if err != nil {
		r.Complete(true)
		return
	}
	defer far.Close()
	var queue waiter.Queue
	endpoint, refused := r.CreateEndpoint(&queue)
	if refused != nil {
		r.Complete(true)
		return
	}
	r.Complete(false)
	near := gonet.NewTCPConn(&queue, endpoint)
	defer near.Close()
	stop := context.AfterFunc(ctx, func() {
		endpoint.Abort() // a Close would linger for a peer that is cut
		far.Close()
	})
	defer stop()
	var out sync.WaitGroup
	out.Go(func() { pipe(far, near) })
	pipe(near, far)
	out.Wait()
}

// pipe copies one way and passes the end on.
func pipe(to, from net.Conn) {
	if _, err := io.Copy(to, from); err != nil {
		to.Close() // broken, not ended: the other way ends with it
		from.Close()
		return
	}
	if half, ok := to.(interface{ CloseWrite() error }); ok {
		_ = half.CloseWrite() // it may be closed both ways by now
	}
}

func (t *tunnel) forwardUDP(r *udp.ForwarderRequest) {
	id := r.ID()
	ctx, end, ok := t.begin(id.RemoteAddress)
	if !ok {
		return
	}
	var queue waiter.Queue
	endpoint, refused := r.CreateEndpoint(&queue)
	if refused != nil {
		end()
		return
	}
	near := gonet.NewUDPConn(&queue, endpoint)
	go func() { // this handler is called on the packet's own way; end lets close wait for it
		defer end()
		defer near.Close()
		call, cancel := context.WithTimeout(ctx, dialTime)
		far, err := t.dial(call, "udp", loopback(id.LocalPort))
		cancel()
		if err != nil {
			return
		}
		defer far.Close()
		stop := context.AfterFunc(ctx, func() {
			near.Close()
			far.Close()
		})
		defer stop()
		var out sync.WaitGroup
		out.Go(func() { relay(far, near) })
		relay(near, far)
		out.Wait()
	}()
}

// relay passes datagrams one way until a side closes or is silent for long.
func relay(to, from net.Conn) {
	defer to.Close()
	defer from.Close()
	b := make([]byte, datagram)
	for {
		if err := from.SetReadDeadline(time.Now().Add(udpIdle)); err != nil {
			return
		}
		n, err := from.Read(b)
		if err != nil {
			return
		}
		if _, err := to.Write(b[:n]); err != nil {
			return
		}
	}
}

func loopback(port uint16) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(int(port))) }

// The rest is tun.Device, which WireGuard reads packets from and writes them to.

func (t *tunnel) File() *os.File           { return nil }
func (t *tunnel) MTU() (int, error)        { return MTU, nil }
func (t *tunnel) Name() (string, error)    { return "cosmicac-gateway", nil }
func (t *tunnel) Events() <-chan tun.Event { return t.events }
func (t *tunnel) BatchSize() int           { return 1 }

// Read gives one packet of the stack, for a peer.
func (t *tunnel) Read(buffers [][]byte, sizes []int, offset int) (int, error) {
	packet := t.link.ReadContext(t.ctx)
	if packet == nil {
		return 0, os.ErrClosed
	}
	defer packet.DecRef()
	view := packet.ToView()
	defer view.Release()
	n, err := view.Read(buffers[0][offset:])
	if err != nil {
		return 0, err
	}
	sizes[0] = n
	return 1, nil
}

// Write takes packets that WireGuard has opened and whose source it has checked.
func (t *tunnel) Write(buffers [][]byte, offset int) (int, error) {
	for i, b := range buffers {
		packet := b[offset:]
		if len(packet) == 0 {
			continue
		}
		if packet[0]>>4 != 4 {
			return i, syscall.EAFNOSUPPORT
		}
		buf := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithData(packet)})
		t.link.InjectInbound(header.IPv4ProtocolNumber, buf)
		buf.DecRef()
	}
	return len(buffers), nil
}

// Close ends every flow and waits for it.
func (t *tunnel) Close() error {
	t.close.Do(func() {
		t.mu.Lock()
		t.closed = true
		t.mu.Unlock()
		t.stop()
		t.stack.Close() // also what is half made, which no context ends
		t.tasks.Wait()
		close(t.events)
		t.stack.Destroy()
		t.link.Close()
	})
	return nil
}
