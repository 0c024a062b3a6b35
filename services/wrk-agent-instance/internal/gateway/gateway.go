// Package gateway lets holders of a WireGuard key into one VM: WireGuard and the IP
// stack behind it run in the agent's own process, and what a peer sends to the VM's
// address inside the tunnel reaches the same port of the VM's loopback, TCP and UDP.
//
// Why no TUN device with forwarding rules: it would need root, a kernel module and
// nftables in every image, and what it leaves in the kernel outlives a crash. Here
// nothing is left, and a peer reaches nothing but this VM.
//
// The file is the only record: key, port and peers. What a call returned without
// error is on disk. A peer's private key is never here.
package gateway

import (
	"bytes"
	"context"
	"crypto/ecdh"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/google/renameio/v2"
	"github.com/hashicorp/go-hclog"
	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cosmicac/cosmicac/pkg/fault"
	agentv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
)

const (
	// MTU of the tunnel, in bytes: 1,280 pass every network, WireGuard's own 80 and
	// the cluster's encapsulation included.
	MTU = 1280
	// MostPeers is how many keys are let in at once.
	MostPeers = 64
	// fileBytes bounds what is read of the file.
	fileBytes = 64 << 10
)

var nameForm = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$`)

// Options make a Gateway. All but Dial are required.
type Options struct {
	// File is where it keeps its key and peers, mode 0600. No file is no gateway.
	File string
	// JobID decides the addresses inside the tunnel, so that one peer may use the
	// gateways of several jobs at once.
	JobID string
	// Random makes the key.
	Random io.Reader
	// Dial reaches what listens in the VM, "tcp" or "udp" at 127.0.0.1; a net.Dialer when nil.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// Void says why what a user was given under an epoch counts no more, nil while it
	// does.
	Void func(userID string, epoch uint64) error
	Log  hclog.Logger
}

// kept is the file.
type kept struct {
	Port       uint16 `json:"port"`
	PrivateKey []byte `json:"private_key"`
	Peers      []peer `json:"peers"`
}

type peer struct {
	Name      string     `json:"name"`
	PublicKey []byte     `json:"public_key"`
	Address   netip.Addr `json:"address"`
	// Who let it in, and the grant epoch of that user's right. A peer of before these
	// were written down has neither, and stays until it is removed.
	UserID string `json:"user_id,omitempty"`
	Epoch  uint64 `json:"epoch,omitempty"`
}

// Peer is who is to be let in, and by whom.
type Peer struct {
	Name      string // 1 to 32 of a-z, 0-9 and hyphens
	PublicKey string // WireGuard's form: 32 bytes in base64
	UserID    string
	// Epoch is the grant epoch that was read together with the user's right.
	Epoch uint64
}

// Gateway is one VM's. It is safe for concurrent use; calls are serial.
type Gateway struct {
	o       Options
	network netip.Prefix

	mu     sync.Mutex
	closed bool
	damage error // the file is there and says nothing usable; only Delete helps
	kept   *kept // nil while none is open
	device *device.Device
	tunnel *tunnel
}

// New reads what was kept and listens, if there is anything. Where that fails, on a
// damaged file or on a port that somebody else has now, nobody is let in, and each
// later call says why.
func New(o Options) *Gateway {
	if o.Dial == nil {
		o.Dial = (&net.Dialer{}).DialContext
	}
	g := &Gateway{o: o, network: networkOf(o.JobID)}
	k, err := g.load()
	if err != nil {
		g.damage = fault.Wrap(fault.Internal, err, "the gateway's file %s is damaged, nobody is let in: %v; delete the gateway and create it anew", o.File, err)
		err = g.damage
	} else if k != nil {
		g.kept = k
		g.expel()
		err = g.listen()
	}
	if err != nil {
		o.Log.Error("the gateway does not listen", "error", err)
	}
	return g
}

// load is nil without an error when there is no file.
func (g *Gateway) load() (*kept, error) {
	f, err := os.Open(g.o.File)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	raw, err := io.ReadAll(io.LimitReader(f, fileBytes+1))
	if err != nil {
		return nil, err
	}
	if len(raw) > fileBytes {
		return nil, fmt.Errorf("it has more than %d bytes", fileBytes)
	}
	k := &kept{}
	if err := json.Unmarshal(raw, k); err != nil {
		return nil, err
	}
	return k, g.check(k)
}

// networkOf is the /24 of a job's tunnel: the VM is .1, peers follow.
func networkOf(jobID string) netip.Prefix {
	sum := sha256.Sum256([]byte("cosmicac gateway " + jobID))
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 128 | sum[0], sum[1], 0}), 24)
}

func (g *Gateway) address() netip.Addr { return g.network.Addr().Next() }

// check refuses a file that was not written here.
func (g *Gateway) check(k *kept) error {
	if _, err := ecdh.X25519().NewPrivateKey(k.PrivateKey); err != nil {
		return errors.New("it holds no private key")
	}
	if k.Port == 0 || len(k.Peers) > MostPeers {
		return fmt.Errorf("it names port %d and %d peers", k.Port, len(k.Peers))
	}
	for i, p := range k.Peers {
		others := slices.ContainsFunc(k.Peers[:i], func(o peer) bool {
			return o.Name == p.Name || o.Address == p.Address || bytes.Equal(o.PublicKey, p.PublicKey)
		})
		if others || !nameForm.MatchString(p.Name) || len(p.PublicKey) != 32 || !g.network.Contains(p.Address) || p.Address == g.address() {
			return fmt.Errorf("its peer %d is not one", i)
		}
	}
	return nil
}

func (g *Gateway) save(k *kept) error {
	raw, err := json.Marshal(k)
	if err == nil {
		err = renameio.WriteFile(g.o.File, raw, 0o600, renameio.IgnoreUmask())
	}
	if err != nil {
		return fault.Wrap(fault.Internal, err, "write the gateway's file %s: %v", g.o.File, err)
	}
	return nil
}

// listen brings the tunnel up with all that is kept; it changes nothing when it is up.
func (g *Gateway) listen() error {
	if g.device != nil {
		return nil
	}
	t, err := newTunnel(g.address(), g.o.Dial)
	if err != nil {
		return err
	}
	log := g.o.Log
	d := device.NewDevice(t, conn.NewDefaultBind(), &device.Logger{
		Verbosef: func(format string, a ...any) { log.Trace(fmt.Sprintf(format, a...)) },
		Errorf:   func(format string, a ...any) { log.Debug(fmt.Sprintf(format, a...)) },
	})
	var set strings.Builder
	fmt.Fprintf(&set, "private_key=%x\nlisten_port=%d\n", g.kept.PrivateKey, g.kept.Port)
	for _, p := range g.kept.Peers {
		set.WriteString(p.allow())
	}
	if err = d.IpcSet(set.String()); err == nil {
		err = d.Up()
	}
	if err != nil {
		d.Close()
		return fault.Wrap(fault.FailedPrecondition, err, "the gateway cannot listen on UDP port %d of the VM: %v; end what has the port, or close the gateway and open it on another", g.kept.Port, err)
	}
	g.device, g.tunnel = d, t
	return nil
}

// allow is WireGuard's configuration of a peer: it may send from its one address.
func (p peer) allow() string {
	return fmt.Sprintf("public_key=%x\nreplace_allowed_ips=true\nallowed_ip=%s/32\n", p.PublicKey, p.Address)
}

// alive says why nothing can be asked.
func (g *Gateway) alive() error {
	if g.closed {
		return fault.New(fault.Unavailable, "the agent is stopping")
	}
	return g.damage
}

// usable checks that there is a gateway and that it listens.
func (g *Gateway) usable() error {
	if err := g.alive(); err != nil {
		return err
	}
	if g.kept == nil {
		return fault.New(fault.FailedPrecondition, "this VM has no gateway; create one first")
	}
	return g.listen()
}

// Open makes the key, once, and listens on a UDP port of the VM. Again for the same
// port changes nothing.
func (g *Gateway) Open(port uint32) (*agentv1.Gateway, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if port < 1 || port > 65535 {
		return nil, fault.New(fault.Invalid, "port is %d; 1 to 65535 are allowed", port).With(fault.Detail{Field: "port", Rule: "must be 1 to 65535"})
	}
	if err := g.alive(); err != nil {
		return nil, err
	}
	if g.kept != nil {
		if uint32(g.kept.Port) != port {
			return nil, fault.New(fault.FailedPrecondition, "the gateway listens on port %d; delete it before you open one on port %d", g.kept.Port, port).
				With(fault.Detail{Field: "port", Rule: "is " + strconv.Itoa(int(g.kept.Port)) + " for the gateway that there is"})
		}
		if err := g.listen(); err != nil {
			return nil, err
		}
		return g.show()
	}
	key, err := ecdh.X25519().GenerateKey(g.o.Random)
	if err != nil {
		return nil, fault.Wrap(fault.Internal, err, "make the gateway's key")
	}
	g.kept = &kept{Port: uint16(port), PrivateKey: key.Bytes()}
	if err = g.listen(); err == nil {
		err = g.save(g.kept)
	}
	if err != nil {
		g.down()
		g.kept = nil
		return nil, err
	}
	g.o.Log.Info("gateway opened", "port", port)
	return g.show()
}

// Delete cuts every peer and forgets all. Where none is open it changes nothing.
func (g *Gateway) Delete() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.down()
	if err := os.Remove(g.o.File); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fault.Wrap(fault.Internal, err, "every peer is cut, but the gateway's file %s stays: %v; try again, or it is back after a restart", g.o.File, err)
	}
	if g.kept != nil {
		g.o.Log.Info("gateway deleted", "peers", len(g.kept.Peers))
	}
	g.kept, g.damage = nil, nil
	return nil
}

// Add lets a key in under a name. The same again changes nothing but who vouches for it.
func (g *Gateway) Add(asked Peer) (*agentv1.Gateway, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.usable(); err != nil {
		return nil, err
	}
	name := asked.Name
	if !nameForm.MatchString(name) {
		return nil, fault.New(fault.Invalid, "name is not 1 to 32 of a-z, 0-9 and hyphens").With(fault.Detail{Field: "name", Rule: "must be 1 to 32 of a-z, 0-9 and hyphens"})
	}
	key, err := g.readKey(asked.PublicKey)
	if err != nil {
		return nil, err
	}
	if err := g.o.Void(asked.UserID, asked.Epoch); err != nil {
		return nil, err
	}
	taken := map[netip.Addr]bool{g.address(): true}
	p := peer{Name: name, PublicKey: key, Address: g.address(), UserID: asked.UserID, Epoch: asked.Epoch}
	for i, have := range g.kept.Peers {
		same := bytes.Equal(have.PublicKey, key)
		switch {
		case have.Name == name && same:
			p.Address = have.Address
			return g.put(slices.Concat(g.kept.Peers[:i], g.kept.Peers[i+1:], []peer{p}), p)
		case have.Name == name:
			return nil, fault.New(fault.Conflict, "peer %s has another public key; remove it first, or use another name", name).With(fault.Detail{Field: "name", Rule: "is the name of another peer"})
		case same:
			return nil, fault.New(fault.Conflict, "this public key is that of peer %s", have.Name).With(fault.Detail{Field: "public_key", Rule: "is the key of another peer"})
		}
		taken[have.Address] = true
	}
	if len(g.kept.Peers) >= MostPeers {
		return nil, fault.New(fault.FailedPrecondition, "the gateway has %d peers, and at most %d are allowed; remove one first", len(g.kept.Peers), MostPeers)
	}
	for taken[p.Address] {
		p.Address = p.Address.Next()
	}
	g.o.Log.Info("gateway peer added", "peer", name, "address", p.Address, "user", p.UserID)
	return g.put(append(slices.Clone(g.kept.Peers), p), p)
}

// put writes the peers down and lets one of them in.
func (g *Gateway) put(peers []peer, p peer) (*agentv1.Gateway, error) {
	slices.SortFunc(peers, func(a, b peer) int { return strings.Compare(a.Name, b.Name) })
	next := *g.kept
	next.Peers = peers
	if err := g.save(&next); err != nil {
		return nil, err
	}
	g.kept = &next
	if err := g.device.IpcSet(p.allow()); err != nil {
		return nil, fault.Wrap(fault.Internal, err, "let peer %s in: %v", p.Name, err)
	}
	return g.show()
}

// readKey reads a public key in WireGuard's form.
func (g *Gateway) readKey(text string) ([]byte, error) {
	key, err := base64.StdEncoding.Strict().DecodeString(text)
	if err != nil || len(key) != 32 || len(text) != 44 {
		return nil, fault.New(fault.Invalid, "public_key is no WireGuard public key").With(fault.Detail{Field: "public_key", Rule: "must be 32 bytes in base64, as wg pubkey prints them"})
	}
	own, err := ecdh.X25519().NewPrivateKey(g.kept.PrivateKey)
	if err != nil {
		return nil, fault.Wrap(fault.Internal, err, "read the gateway's own key")
	}
	public, err := ecdh.X25519().NewPublicKey(key)
	if err == nil {
		_, err = own.ECDH(public) // refuses the few keys that share no secret with anybody
	}
	if err != nil || bytes.Equal(key, own.PublicKey().Bytes()) {
		return nil, fault.New(fault.Invalid, "public_key cannot be a peer's").With(fault.Detail{Field: "public_key", Rule: "must be your own WireGuard public key"})
	}
	return key, nil
}

// Remove cuts a peer: what it has open is closed and nothing more of it gets through
// when this returns, and it is on disk no more.
func (g *Gateway) Remove(name string) (*agentv1.Gateway, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.usable(); err != nil {
		return nil, err
	}
	i := slices.IndexFunc(g.kept.Peers, func(p peer) bool { return p.Name == name })
	if i < 0 {
		return nil, fault.New(fault.NotFound, "the gateway has no peer %.64q", name)
	}
	if err := g.remove(i); err != nil {
		return nil, err
	}
	g.o.Log.Info("gateway peer removed", "peer", name)
	return g.show()
}

// remove cuts the i-th peer. While nothing listens it is written down alone.
func (g *Gateway) remove(i int) error {
	p := g.kept.Peers[i]
	// Cut first: a full disk must not keep a peer in.
	if g.device != nil {
		if err := g.device.IpcSet(fmt.Sprintf("public_key=%x\nremove=true\n", p.PublicKey)); err != nil {
			return fault.Wrap(fault.Internal, err, "cut peer %s: %v", p.Name, err)
		}
		g.tunnel.cut(p.Address)
	}
	next := g.without(i)
	if err := g.save(next); err != nil {
		return fault.Wrap(fault.KindOf(err), err, "peer %s is cut, and would be back after a restart: %v; try again", p.Name, err)
	}
	g.kept = next
	return nil
}

func (g *Gateway) without(i int) *kept {
	next := *g.kept
	next.Peers = slices.Delete(slices.Clone(next.Peers), i, i+1)
	return &next
}

// Expel removes, as Remove does, every peer whose user's right was revoked.
func (g *Gateway) Expel() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.closed && g.kept != nil {
		g.expel()
	}
}

func (g *Gateway) expel() {
	for i := len(g.kept.Peers) - 1; i >= 0; i-- {
		p := g.kept.Peers[i]
		why := g.o.Void(p.UserID, p.Epoch)
		if p.UserID == "" || why == nil {
			continue
		}
		if err := g.remove(i); err != nil {
			// The file may hold it still; the next start expels it again.
			g.kept = g.without(i)
			g.o.Log.Error("a peer whose user lost the right to this job", "peer", p.Name, "user", p.UserID, "error", err)
			continue
		}
		g.o.Log.Info("gateway peer removed: the right of the user who let it in was revoked", "peer", p.Name, "user", p.UserID)
	}
}

// Show says what there is, with each peer's last handshake as WireGuard counts it.
func (g *Gateway) Show() (*agentv1.Gateway, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.alive(); err != nil {
		return nil, err
	}
	if g.kept == nil {
		return &agentv1.Gateway{}, nil
	}
	if err := g.listen(); err != nil {
		return nil, err
	}
	return g.show()
}

func (g *Gateway) show() (*agentv1.Gateway, error) {
	own, err := ecdh.X25519().NewPrivateKey(g.kept.PrivateKey)
	if err != nil {
		return nil, fault.Wrap(fault.Internal, err, "read the gateway's own key")
	}
	text, err := g.device.IpcGet()
	if err != nil {
		return nil, fault.Wrap(fault.Internal, err, "read the gateway's peers: %v", err)
	}
	counts := readCounts(text)
	out := &agentv1.Gateway{
		Open: true, Port: uint32(g.kept.Port), PublicKey: base64.StdEncoding.EncodeToString(own.PublicKey().Bytes()), Address: g.address().String(), Mtu: MTU,
	}
	for _, p := range g.kept.Peers {
		c := counts[hex.EncodeToString(p.PublicKey)]
		shown := &agentv1.GatewayPeer{
			Name: p.Name, PublicKey: base64.StdEncoding.EncodeToString(p.PublicKey), Address: p.Address.String(),
			ReceivedBytes: c["rx_bytes"], SentBytes: c["tx_bytes"], UserId: p.UserID,
		}
		if at := c["last_handshake_time_sec"]; at > 0 {
			shown.LastHandshake = timestamppb.New(time.Unix(int64(at), int64(c["last_handshake_time_nsec"])))
		}
		out.Peers = append(out.Peers, shown)
	}
	return out, nil
}

// readCounts reads the numbers of WireGuard's cross-platform text, by peer's key in hex.
func readCounts(text string) map[string]map[string]uint64 {
	out := make(map[string]map[string]uint64)
	var of map[string]uint64
	for line := range strings.Lines(text) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		if name == "public_key" {
			of = make(map[string]uint64)
			out[value] = of
		} else if n, err := strconv.ParseUint(value, 10, 64); err == nil && of != nil {
			of[name] = n
		}
	}
	return out
}

func (g *Gateway) down() {
	if g.device != nil {
		g.device.Close()
		g.device, g.tunnel = nil, nil
	}
}

// Close cuts every connection and keeps the file; calls after it fail.
func (g *Gateway) Close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = true
	g.down()
}
