package gateway_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ecdh"
	"crypto/rand"
	"encoding/base64"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"go.uber.org/goleak"
	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/tun/netstack"

	"github.com/cosmicac/cosmicac/pkg/fault"
	agentv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
	"github.com/cosmicac/cosmicac/services/wrk-agent-instance/internal/gateway"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	patience = 90 * time.Second
	// silence is how long nothing must come: longer than a handshake and its first retry.
	silence = 7 * time.Second
)

// vm is a gateway with an echo service behind it, which says who it is by prefix.
type vm struct {
	t         *testing.T
	file      string
	port      uint32
	tcpPort   int
	udpPort   int
	gateway   *gateway.Gateway
	publicKey string
	revoked   sync.Map // by user, the lowest epoch that counts
}

func newVM(t *testing.T) *vm {
	t.Helper()
	free, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	v := &vm{t: t, file: filepath.Join(t.TempDir(), "gateway.json"), port: uint32(free.LocalAddr().(*net.UDPAddr).Port)}
	free.Close()
	v.serve()
	v.start()
	is, err := v.gateway.Open(v.port)
	if err != nil {
		t.Fatal(err)
	}
	v.publicKey = is.GetPublicKey()
	t.Cleanup(func() { v.gateway.Close() })
	return v
}

func (v *vm) start() {
	v.t.Helper()
	v.gateway = gateway.New(gateway.Options{File: v.file, JobID: "j-0000000000001", Random: rand.Reader, Void: v.void, Log: hclog.NewNullLogger()})
}

func (v *vm) void(user string, epoch uint64) error {
	if lowest, ok := v.revoked.Load(user); ok && epoch < lowest.(uint64) {
		return fault.New(fault.Denied, "revoked")
	}
	return nil
}

// serve answers every line and every datagram with itself.
func (v *vm) serve() {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		v.t.Fatal(err)
	}
	p, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		v.t.Fatal(err)
	}
	v.tcpPort, v.udpPort = l.Addr().(*net.TCPAddr).Port, p.LocalAddr().(*net.UDPAddr).Port
	v.t.Cleanup(func() { l.Close(); p.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() { defer c.Close(); _, _ = io.Copy(c, c) }()
		}
	}()
	go func() {
		b := make([]byte, 2048)
		for {
			n, from, err := p.ReadFrom(b)
			if err != nil {
				return
			}
			_, _ = p.WriteTo(b[:n], from)
		}
	}()
}

func (v *vm) add(name string, key *ecdh.PrivateKey) *agentv1.GatewayPeer {
	v.t.Helper()
	return v.addBy("u-1", 1, name, key)
}

func (v *vm) addBy(user string, epoch uint64, name string, key *ecdh.PrivateKey) *agentv1.GatewayPeer {
	v.t.Helper()
	is, err := v.gateway.Add(gateway.Peer{Name: name, PublicKey: public(key), UserID: user, Epoch: epoch})
	if err != nil {
		v.t.Fatal(err)
	}
	for _, p := range is.GetPeers() {
		if p.GetName() == name {
			return p
		}
	}
	v.t.Fatalf("no peer %s in %v", name, is)
	return nil
}

func newKey(t *testing.T) *ecdh.PrivateKey {
	t.Helper()
	k, err := ecdh.X25519().GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func public(k *ecdh.PrivateKey) string {
	return base64.StdEncoding.EncodeToString(k.PublicKey().Bytes())
}

// laptop is a user's WireGuard: wireguard-go with a stack of its own.
type laptop struct {
	net  *netstack.Net
	to   netip.Addr
	shut func()
}

// connect brings up a client at an address, as the configuration file says it.
func (v *vm) connect(key *ecdh.PrivateKey, address string) *laptop {
	v.t.Helper()
	is, err := v.gateway.Show()
	if err != nil {
		v.t.Fatal(err)
	}
	own := netip.MustParseAddr(address)
	tun, network, err := netstack.CreateNetTUN([]netip.Addr{own}, nil, int(is.GetMtu()))
	if err != nil {
		v.t.Fatal(err)
	}
	gatewayKey, err := base64.StdEncoding.DecodeString(is.GetPublicKey())
	if err != nil {
		v.t.Fatal(err)
	}
	d := device.NewDevice(tun, conn.NewDefaultBind(), &device.Logger{Verbosef: device.DiscardLogf, Errorf: device.DiscardLogf})
	if err := d.IpcSet(fmt.Sprintf("private_key=%x\npublic_key=%x\nendpoint=127.0.0.1:%d\nallowed_ip=%s/32\n", key.Bytes(), gatewayKey, v.port, is.GetAddress())); err != nil {
		v.t.Fatal(err)
	}
	if err := d.Up(); err != nil {
		v.t.Fatal(err)
	}
	l := &laptop{net: network, to: netip.MustParseAddr(is.GetAddress()), shut: d.Close}
	v.t.Cleanup(l.shut)
	return l
}

func (l *laptop) dial(within time.Duration, port int) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	return l.net.DialContextTCPAddrPort(ctx, netip.AddrPortFrom(l.to, uint16(port)))
}

// says sends a line and reads it back.
func says(c net.Conn, line string) error {
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	if _, err := io.WriteString(c, line+"\n"); err != nil {
		return err
	}
	got, err := bufio.NewReader(c).ReadString('\n')
	if err == nil && got != line+"\n" {
		err = fmt.Errorf("read %q", got)
	}
	return err
}

// talk opens a connection through the tunnel that works.
func (v *vm) talk(l *laptop) net.Conn {
	v.t.Helper()
	c, err := l.dial(patience, v.tcpPort)
	if err == nil {
		err = says(c, "hello")
	}
	if err != nil {
		v.t.Fatalf("through the gateway: %v", err)
	}
	v.t.Cleanup(func() { c.Close() })
	return c
}

func TestPeerReachesTCPAndUDPInTheVMAndItsHandshakeShows(t *testing.T) {
	t.Parallel()
	v := newVM(t)
	key := newKey(t)
	p := v.add("laptop", key)
	if p.GetLastHandshake() != nil {
		t.Fatalf("a handshake before any: %v", p)
	}
	began := time.Now()
	l := v.connect(key, p.GetAddress())
	v.talk(l)

	// Half closed: all of a megabyte comes back after the end was sent.
	c, err := l.dial(patience, v.tcpPort)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	bulk := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	go func() {
		_, _ = c.Write(bulk)
		_ = c.(interface{ CloseWrite() error }).CloseWrite()
	}()
	_ = c.SetReadDeadline(time.Now().Add(patience))
	if back, err := io.ReadAll(c); err != nil || !bytes.Equal(back, bulk) {
		t.Fatalf("%d of %d bytes came back: %v", len(back), len(bulk), err)
	}

	u, err := l.net.DialUDPAddrPort(netip.AddrPort{}, netip.AddrPortFrom(l.to, uint16(v.udpPort)))
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	if err := says(u, "datagram"); err != nil {
		t.Fatalf("udp: %v", err)
	}
	is, err := v.gateway.Show()
	if err != nil {
		t.Fatal(err)
	}
	seen := is.GetPeers()[0]
	if at := seen.GetLastHandshake().AsTime(); at.Before(began.Add(-time.Minute)) || at.After(time.Now().Add(time.Minute)) || seen.GetReceivedBytes() < uint64(len(bulk)) || seen.GetSentBytes() < uint64(len(bulk)) {
		t.Fatalf("what is shown of the peer: %v", seen)
	}
	if c, err := l.dial(patience, 1); err == nil {
		c.Close()
		t.Fatal("a port on which nothing listens took a connection")
	} else if !strings.Contains(err.Error(), "refused") {
		t.Fatalf("a port on which nothing listens: %v", err)
	}
}

func TestRemovedPeerIsCutMidStreamAndCannotComeBack(t *testing.T) {
	t.Parallel()
	v := newVM(t)
	key, otherKey := newKey(t), newKey(t)
	l := v.connect(key, v.add("laptop", key).GetAddress())
	other := v.connect(otherKey, v.add("desk", otherKey).GetAddress())
	c, stays := v.talk(l), v.talk(other)
	is, err := v.gateway.Remove("laptop")
	if err != nil || len(is.GetPeers()) != 1 || is.GetPeers()[0].GetName() != "desk" {
		t.Fatalf("remove: %v, %v", is, err)
	}
	_ = c.SetDeadline(time.Now().Add(silence))
	_, _ = io.WriteString(c, "still there?\n")
	if n, err := c.Read(make([]byte, 64)); n > 0 || err == nil {
		t.Fatalf("the removed peer read %d bytes, %v", n, err)
	}
	if err := says(stays, "and I"); err != nil {
		t.Fatalf("another peer's connection: %v", err)
	}
	again := v.connect(key, "10.200.0.9")
	if _, err := again.dial(silence, v.tcpPort); err == nil {
		t.Fatal("the removed key was let in")
	}
	// Nor after a restart.
	v.gateway.Close()
	v.start()
	if _, err := v.connect(key, "10.200.0.9").dial(silence, v.tcpPort); err == nil {
		t.Fatal("the removed key was let in after a restart")
	}
	if is, err := v.gateway.Show(); err != nil || len(is.GetPeers()) != 1 {
		t.Fatalf("after a restart: %v, %v", is, err)
	}
	if _, err := v.gateway.Remove("laptop"); fault.KindOf(err) != fault.NotFound {
		t.Fatalf("remove again: %v", err)
	}
}

func TestRestartKeepsKeyPortAndPeers(t *testing.T) {
	t.Parallel()
	v := newVM(t)
	key := newKey(t)
	address := v.add("laptop", key).GetAddress()
	v.gateway.Close()
	if info, err := os.Stat(v.file); err != nil || info.Mode().Perm() != 0o600 {
		t.Fatalf("the file with the key: %v, %v", info, err)
	}
	v.start()
	is, err := v.gateway.Show()
	if err != nil || is.GetPublicKey() != v.publicKey || is.GetPort() != v.port || len(is.GetPeers()) != 1 || is.GetPeers()[0].GetAddress() != address {
		t.Fatalf("%v, %v", is, err)
	}
	v.talk(v.connect(key, address))
}

func TestUnknownKeyAndForeignAddressNeverGetThrough(t *testing.T) {
	t.Parallel()
	v := newVM(t)
	key := newKey(t)
	address := v.add("laptop", key).GetAddress()
	stranger := v.connect(newKey(t), address)
	if _, err := stranger.dial(silence, v.tcpPort); err == nil {
		t.Fatal("an unknown key got through")
	}
	// A peer that sends from another address than its own is not heard.
	if _, err := v.connect(key, "10.200.0.9").dial(silence, v.tcpPort); err == nil {
		t.Fatal("a foreign source address got through")
	}
}

func TestPeerGoesWithTheRightOfWhoLetItIn(t *testing.T) {
	t.Parallel()
	v := newVM(t)
	leaver, stayer, again := newKey(t), newKey(t), newKey(t)
	gone := v.talk(v.connect(leaver, v.addBy("u-leaver", 4, "leaver", leaver).GetAddress()))
	stays := v.talk(v.connect(stayer, v.addBy("u-stayer", 4, "stayer", stayer).GetAddress()))

	v.revoked.Store("u-leaver", uint64(5))
	v.gateway.Expel()
	_ = gone.SetDeadline(time.Now().Add(silence))
	if n, err := gone.Read(make([]byte, 64)); n > 0 || err == nil {
		t.Fatalf("the peer of a user without the right read %d bytes, %v", n, err)
	}
	if err := says(stays, "still here"); err != nil {
		t.Fatalf("another user's peer: %v", err)
	}
	if _, err := v.gateway.Add(gateway.Peer{Name: "leaver", PublicKey: public(leaver), UserID: "u-leaver", Epoch: 4}); fault.KindOf(err) != fault.Denied {
		t.Fatalf("let in again by the right that was revoked: %v", err)
	}
	if p := v.addBy("u-leaver", 5, "again", again); p.GetUserId() != "u-leaver" {
		t.Fatalf("let in by a new right: %v", p)
	}

	// What is revoked while the agent is down counts at its start.
	v.gateway.Close()
	v.revoked.Store("u-stayer", uint64(9))
	for range 2 {
		v.start()
		is, err := v.gateway.Show()
		if err != nil || len(is.GetPeers()) != 1 || is.GetPeers()[0].GetName() != "again" {
			t.Fatalf("after a start: %v, %v", is, err)
		}
		v.gateway.Close()
	}
}

func TestGatewayThatIsDeletedForgetsItsKeyAndPeers(t *testing.T) {
	t.Parallel()
	v := newVM(t)
	key := newKey(t)
	c := v.talk(v.connect(key, v.add("laptop", key).GetAddress()))
	if err := v.gateway.Delete(); err != nil {
		t.Fatal(err)
	}
	_ = c.SetDeadline(time.Now().Add(silence))
	if n, err := c.Read(make([]byte, 64)); n > 0 || err == nil {
		t.Fatalf("a peer of a deleted gateway read %d bytes, %v", n, err)
	}
	if _, err := os.Stat(v.file); !os.IsNotExist(err) {
		t.Fatalf("its file: %v", err)
	}
	if is, err := v.gateway.Show(); err != nil || is.GetOpen() {
		t.Fatalf("%v, %v", is, err)
	}
	if _, err := v.gateway.Add(gateway.Peer{Name: "laptop", PublicKey: public(key)}); fault.KindOf(err) != fault.FailedPrecondition {
		t.Fatalf("add to a deleted gateway: %v", err)
	}
	is, err := v.gateway.Open(v.port)
	if err != nil || is.GetPublicKey() == v.publicKey || len(is.GetPeers()) != 0 {
		t.Fatalf("opened anew: %v, %v", is, err)
	}
}

func TestWhatIsNoPeerIsRefusedAndNamed(t *testing.T) {
	t.Parallel()
	v := newVM(t)
	key := newKey(t)
	v.add("laptop", key)
	zero := base64.StdEncoding.EncodeToString(make([]byte, 32))
	fresh := public(newKey(t))
	for _, c := range []struct {
		name, key, field string
		kind             fault.Kind
	}{
		{"", fresh, "name", fault.Invalid},
		{"Laptop", fresh, "name", fault.Invalid},
		{"a\nremove=true", fresh, "name", fault.Invalid},
		{strings.Repeat("a", 33), fresh, "name", fault.Invalid},
		{"b", "", "public_key", fault.Invalid},
		{"b", "x", "public_key", fault.Invalid},
		{"b", fresh + "\n", "public_key", fault.Invalid},
		{"b", fresh[:40], "public_key", fault.Invalid},
		{"b", strings.Repeat("A", 1<<20), "public_key", fault.Invalid},
		{"b", zero, "public_key", fault.Invalid},
		{"b", v.publicKey, "public_key", fault.Invalid},
		{"b", public(key), "public_key", fault.Conflict},
		{"laptop", fresh, "name", fault.Conflict},
	} {
		_, err := v.gateway.Add(gateway.Peer{Name: c.name, PublicKey: c.key})
		if d := fault.DetailsOf(err); fault.KindOf(err) != c.kind || len(d) != 1 || d[0].Field != c.field {
			t.Errorf("name %.40q, key %.50q: %v, details %v", c.name, c.key, err, d)
		}
	}
	if is, err := v.gateway.Add(gateway.Peer{Name: "laptop", PublicKey: public(key)}); err != nil || len(is.GetPeers()) != 1 {
		t.Fatalf("the same again: %v, %v", is, err)
	}
	for i := 1; i < gateway.MostPeers; i++ {
		v.add(fmt.Sprintf("peer-%d", i), newKey(t))
	}
	if _, err := v.gateway.Add(gateway.Peer{Name: "one-more", PublicKey: fresh}); fault.KindOf(err) != fault.FailedPrecondition {
		t.Fatalf("one too many: %v", err)
	}
	seen := map[string]bool{}
	is, err := v.gateway.Show()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range is.GetPeers() {
		seen[p.GetAddress()] = true
	}
	if len(seen) != gateway.MostPeers || seen[is.GetAddress()] {
		t.Fatalf("%d addresses for %d peers", len(seen), gateway.MostPeers)
	}
}

func TestPortThatIsTakenOrADamagedFileIsSaid(t *testing.T) {
	t.Parallel()
	taken, err := net.ListenPacket("udp", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	o := gateway.Options{File: filepath.Join(t.TempDir(), "gateway.json"), JobID: "j-0000000000001", Random: rand.Reader, Log: hclog.NewNullLogger()}
	g := gateway.New(o)
	defer g.Close()
	if _, err := g.Open(uint32(taken.LocalAddr().(*net.UDPAddr).Port)); fault.KindOf(err) != fault.FailedPrecondition {
		t.Fatalf("a taken port: %v", err)
	}
	if _, err := os.Stat(o.File); !os.IsNotExist(err) {
		t.Fatalf("a gateway that never listened is on disk: %v", err)
	}
	for _, port := range []uint32{0, 65536} {
		if _, err := g.Open(port); fault.KindOf(err) != fault.Invalid {
			t.Fatalf("port %d: %v", port, err)
		}
	}
	for _, raw := range []string{"", "{}", `{"port":51820,"private_key":"AAAA"}`, strings.Repeat(" ", 1<<17)} {
		if err := os.WriteFile(o.File, []byte(raw), 0o600); err != nil {
			t.Fatal(err)
		}
		g := gateway.New(o)
		if _, err := g.Show(); err == nil || !strings.Contains(err.Error(), "damaged") {
			t.Errorf("a file of %d bytes, %.40q: %v", len(raw), raw, err)
		}
		if _, err := g.Open(1); err == nil {
			t.Errorf("a file of %d bytes was written over", len(raw))
		}
		if err := g.Delete(); err != nil {
			t.Error(err)
		}
		if is, err := g.Show(); err != nil || is.GetOpen() {
			t.Errorf("after delete: %v, %v", is, err)
		}
		g.Close()
	}
}
