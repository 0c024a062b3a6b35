package nettest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/rpc"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	"github.com/cosmicac/cosmicac/pkg/mesh/cards"
	"github.com/cosmicac/cosmicac/pkg/trust"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	"github.com/hashicorp/go-hclog"
	"github.com/libp2p/go-libp2p/core/peer"
)

// Program is what a host's process does for the test, over its standard input and
// output. It ends with its input.
type Program struct {
	mu    sync.Mutex
	nodes map[string]*mesh.Node
	nets  map[string]*trust.Network
	held  map[int]*echoing
}

// Spec is one node to start; a process may hold several.
type Spec struct {
	Key, NetworkID        []byte
	Roots                 []string
	Genesis, Roster, Info []byte // daemons
	Certificate           []byte // agents
	Bootstraps            map[string][]string
	Role                  meshv1.Role
	Listen                []string
	Private               bool
}

// Outcome is an error in two words, or none.
type Outcome struct{ Kind, Text string }

func outcome(err error) Outcome {
	if err == nil {
		return Outcome{}
	}
	return Outcome{string(fault.KindOf(err)), err.Error()}
}

func serveProgram() error {
	server := rpc.NewServer()
	if err := server.Register(&Program{nodes: map[string]*mesh.Node{}, nets: map[string]*trust.Network{}, held: map[int]*echoing{}}); err != nil {
		return err
	}
	server.ServeConn(struct {
		io.Reader
		io.WriteCloser
	}{os.Stdin, os.Stdout})
	return nil
}

// Start runs a node.
func (p *Program) Start(s *Spec, _ *struct{}) error {
	key, err := identity.Unmarshal(s.Key)
	if err != nil {
		return err
	}
	network, err := trust.NewMemory(s.NetworkID, s.Roots)
	if err != nil {
		return err
	}
	o := mesh.Options{Key: key, Network: network, Role: s.Role, Listen: s.Listen, Private: s.Private,
		Log: hclog.New(&hclog.LoggerOptions{Name: key.ID().String()[46:], Output: os.Stderr, Level: hclog.Debug})}
	if s.Certificate != nil {
		o.Credential = mesh.Certificate(s.Certificate)
		o.Card = func(c *meshv1.Card) { c.JobId, c.AttemptId = job, attempt }
	} else {
		o.DHT = mesh.DHTServer
		if err := network.AdoptGenesis(s.Genesis); err != nil {
			return err
		}
		if _, err := network.Adopt(s.Roster, s.Info); err != nil {
			return err
		}
	}
	for k, addresses := range s.Bootstraps {
		o.Bootstraps = append(o.Bootstraps, &meshv1.BootstrapAddress{Key: k, Addresses: addresses})
	}
	bootstrap := s.Role == meshv1.Role_ROLE_BOOTSTRAP
	o.Relay, o.AllowGuests = bootstrap, bootstrap
	n, err := mesh.New(context.Background(), o)
	if err != nil {
		return err
	}
	meshv1.RegisterNodeServer(n, &nodeService{network: network})
	if bootstrap {
		meshv1.RegisterCardsServer(n, cards.New(network, nil))
	}
	everybody := &meshv1.Right{Members: true, Agents: true}
	n.Handle("echo", everybody, func(_ context.Context, st *mesh.Stream) { _, _ = io.Copy(st, st) })
	n.Handle("sink", everybody, sink)
	p.mu.Lock()
	p.nodes[n.ID().String()], p.nets[n.ID().String()] = n, network
	p.mu.Unlock()
	return n.Start(context.Background())
}

// sink reads to the end and answers with the sum of what it read.
func sink(_ context.Context, st *mesh.Stream) {
	sum := sha256.New()
	if _, err := io.Copy(sum, st); err == nil {
		_, _ = st.Write(sum.Sum(nil))
	}
}

type nodeService struct {
	meshv1.UnimplementedNodeServer
	network *trust.Network
}

func (s *nodeService) Ping(_ context.Context, r *meshv1.PingRequest) (*meshv1.PingResponse, error) {
	return &meshv1.PingResponse{Payload: r.GetPayload()}, nil
}

func (s *nodeService) PutNetwork(_ context.Context, r *meshv1.PutNetworkRequest) (*meshv1.PutNetworkResponse, error) {
	if _, err := s.network.Adopt(r.GetRosterEnvelope(), r.GetNetworkInfoEnvelope()); err != nil {
		return nil, err
	}
	return &meshv1.PutNetworkResponse{RosterVersion: s.network.Roster().GetVersion(), NetworkInfoSequence: s.network.Info().GetSequence()}, nil
}

func (p *Program) node(id string) *mesh.Node {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.nodes[id]
}

// Ask is one thing that a node does to another, whose addresses it may be given.
type Ask struct {
	Node, To string
	At       []string
	Stream   string
	Bytes    int
	Limit    time.Duration
}

// Call pings the peer with so many bytes, which come back.
func (p *Program) Call(a *Ask, o *Outcome) error {
	to, err := peer.Decode(a.To)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), a.Limit)
	defer cancel()
	payload := make([]byte, a.Bytes)
	rand.NewChaCha8([32]byte{}).Read(payload)
	answer, err := meshv1.NewNodeClient(p.node(a.Node).Client(to, a.At...)).Ping(ctx, &meshv1.PingRequest{Payload: payload})
	if err == nil && !bytes.Equal(answer.GetPayload(), payload) {
		err = fault.New(fault.Internal, "the answer is not what was sent")
	}
	*o = outcome(err)
	return nil
}

// Send streams bytes to the peer, who answers with their sum.
func (p *Program) Send(a *Ask, o *Outcome) error {
	to, err := peer.Decode(a.To)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), a.Limit)
	defer cancel()
	*o = outcome(func() error {
		c, err := p.node(a.Node).OpenStream(ctx, to, "sink", a.At...)
		if err != nil {
			return err
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(a.Limit))
		sum := sha256.New()
		if _, err := io.CopyN(io.MultiWriter(c, sum), rand.NewChaCha8([32]byte{}), int64(a.Bytes)); err != nil {
			return err
		}
		if err := c.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
			return err
		}
		back, err := io.ReadAll(c)
		if err == nil && !bytes.Equal(back, sum.Sum(nil)) {
			err = fault.New(fault.Internal, "what arrived is not what was sent")
		}
		return err
	}())
	return nil
}

// echoing is a stream that sends and checks without end.
type echoing struct {
	conn   net.Conn
	oneWay bool
	bytes  atomic.Int64
	done   chan struct{}
	err    error
}

// Held is how a stream fares.
type Held struct {
	ID, Bytes int
	Outcome   Outcome // why it ended; none while it runs
}

// Hold opens a stream and keeps bytes coming back on it, checking each; for "sink"
// bytes go without coming back.
func (p *Program) Hold(a *Ask, h *Held) error {
	to, err := peer.Decode(a.To)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), a.Limit)
	defer cancel()
	c, err := p.node(a.Node).OpenStream(ctx, to, a.Stream, a.At...)
	if err != nil {
		h.Outcome = outcome(err)
		return nil
	}
	e := &echoing{conn: c, oneWay: a.Stream == "sink", done: make(chan struct{})}
	p.mu.Lock()
	h.ID = len(p.held)
	p.held[h.ID] = e
	p.mu.Unlock()
	go e.run()
	return nil
}

func (e *echoing) run() {
	defer close(e.done)
	defer e.conn.Close()
	var seed [32]byte
	binary.LittleEndian.PutUint64(seed[:], rand.Uint64())
	source := rand.NewChaCha8(seed)
	sent, back := make([]byte, 1000), make([]byte, 1000)
	for {
		source.Read(sent)
		if _, e.err = e.conn.Write(sent); e.err != nil {
			return
		}
		if e.oneWay {
			copy(back, sent)
		} else if _, e.err = io.ReadFull(e.conn, back); e.err != nil {
			return
		}
		if !bytes.Equal(sent, back) {
			e.err = fmt.Errorf("what came back after %d bytes is not what was sent", e.bytes.Load())
			return
		}
		e.bytes.Add(int64(len(back)))
		time.Sleep(20 * time.Millisecond)
	}
}

// Look tells how a held stream fares.
func (p *Program) Look(id int, h *Held) error {
	p.mu.Lock()
	e := p.held[id]
	p.mu.Unlock()
	h.ID, h.Bytes = id, int(e.bytes.Load())
	select {
	case <-e.done:
		h.Outcome = outcome(e.err)
	default:
	}
	return nil
}

// Drop ends a held stream.
func (p *Program) Drop(id int, _ *struct{}) error {
	p.mu.Lock()
	e := p.held[id]
	p.mu.Unlock()
	_ = e.conn.Close()
	<-e.done
	return nil
}

// Keep supervises the peer.
func (p *Program) Keep(a *Ask, _ *struct{}) error {
	to, err := peer.Decode(a.To)
	if err == nil {
		p.node(a.Node).Keep(to, a.At...)
	}
	return err
}

// Link is one connection of a node.
type Link struct {
	Key, Address                    string
	QUIC, Relayed, Inbound, Suspect bool
	Since                           time.Time
}

// Links lists the node's connections.
func (p *Program) Links(id string, links *[]Link) error {
	for _, l := range p.node(id).Peers() {
		*links = append(*links, Link{Key: l.GetKey(), Address: l.GetAddress(), QUIC: l.GetTransport() == "quic",
			Relayed: l.GetRelayed(), Inbound: l.GetInbound(), Suspect: l.GetSuspect(), Since: l.GetConnectedAt().AsTime()})
	}
	return nil
}

// Find lists the keys of a role that have an address.
func (p *Program) Find(a *Ask, keys *[]string) error {
	ctx, cancel := context.WithTimeout(context.Background(), a.Limit)
	defer cancel()
	list, err := p.node(a.Node).FindRole(ctx, meshv1.Role(a.Bytes))
	for _, card := range list {
		if len(card.GetAddresses()) > 0 {
			*keys = append(*keys, card.GetKey())
		}
	}
	return err
}

// Records are the signed words that a node holds or gets.
type Records struct {
	Node         string
	Roster, Info []byte
	Versions     [2]uint64 // of the roster and the network info
}

// Adopt gives a node newer records, as an operator does, and tells what it holds.
func (p *Program) Adopt(r *Records, held *Records) error {
	p.mu.Lock()
	network := p.nets[r.Node]
	p.mu.Unlock()
	if _, err := network.Adopt(r.Roster, r.Info); err != nil {
		return err
	}
	held.Versions = [2]uint64{network.Roster().GetVersion(), network.Info().GetSequence()}
	return nil
}
