package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	"github.com/libp2p/go-libp2p"
	"github.com/libp2p/go-libp2p/core/host"
	"github.com/libp2p/go-libp2p/core/network"
	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/libp2p/go-libp2p/core/peerstore"
	"github.com/libp2p/go-libp2p/core/protocol"
	libp2ptls "github.com/libp2p/go-libp2p/p2p/security/tls"
	quic "github.com/libp2p/go-libp2p/p2p/transport/quic"
	"github.com/libp2p/go-libp2p/p2p/transport/tcp"
	ma "github.com/multiformats/go-multiaddr"
	"google.golang.org/protobuf/proto"
)

// AttackRequest says whom strangers are to bother, how often and for how long.
type AttackRequest struct {
	NetworkID   []byte
	To          MeshEndpoint
	PerSecond   int
	Nanoseconds int64
}

// AttackResult counts the attempts of strangers.
type AttackResult struct {
	Refused     int // the node said no, in words
	Failed      int // it ended otherwise
	Nanoseconds int64
	LastFailure string
}

const (
	strangers = 32
	// attemptsPerKey stays below where a node shuts a key out before it may speak.
	attemptsPerKey = 15
)

// Attack lets strangers connect and introduce themselves, each time on a connection
// of its own, with new keys all the time.
func (p *Program) Attack(r *AttackRequest, res *AttackResult) error {
	to, err := peer.Decode(r.To.Key)
	if err != nil {
		return err
	}
	var at []ma.Multiaddr
	for _, text := range r.To.Addresses {
		a, err := ma.NewMultiaddr(text)
		if err != nil {
			return err
		}
		bare, _ := peer.SplitAddr(a)
		at = append(at, bare)
	}
	admit := protocol.ID("/cosmicac/" + hex.EncodeToString(r.NetworkID) + "/admit/1")
	began := time.Now()
	var turn atomic.Int64
	// next waits for the next attempt's time; false when the attack is over.
	next := func() bool {
		due := began.Add(time.Duration(turn.Add(1)) * time.Second / time.Duration(r.PerSecond))
		time.Sleep(time.Until(due))
		return int64(time.Since(began)) < r.Nanoseconds
	}
	var mu sync.Mutex
	var broken error
	var attacking sync.WaitGroup
	for range strangers {
		attacking.Go(func() {
			for more := true; more; {
				h, err := stranger()
				if err != nil {
					mu.Lock()
					broken = err
					mu.Unlock()
					return
				}
				h.Peerstore().AddAddrs(to, at, peerstore.PermanentAddrTTL)
				for range attemptsPerKey {
					if more = next(); !more {
						break
					}
					err := attempt(h, to, admit)
					mu.Lock()
					if err == nil {
						res.Refused++
					} else {
						res.Failed++
						res.LastFailure = err.Error()
					}
					mu.Unlock()
				}
				_ = h.Close()
			}
		})
	}
	attacking.Wait()
	res.Nanoseconds = int64(time.Since(began))
	return broken
}

// stranger is a libp2p host with a new key.
func stranger() (host.Host, error) {
	return libp2p.New(libp2p.NoListenAddrs, libp2p.DisableMetrics(), libp2p.DisableRelay(), libp2p.Ping(false),
		libp2p.ResourceManager(&network.NullResourceManager{}), libp2p.Security(libp2ptls.ID, libp2ptls.New),
		libp2p.Transport(tcp.NewTCPTransport, tcp.DisableReuseport()), libp2p.Transport(quic.NewTransport))
}

// attempt connects, says that its key is in the roster, and reads that it is not.
func attempt(h host.Host, to peer.ID, admit protocol.ID) error {
	ctx, cancel := context.WithTimeout(network.WithForceDirectDial(context.Background(), "bench"), callLimit)
	defer cancel()
	conn, err := h.Network().DialPeer(ctx, to)
	if err != nil {
		return err
	}
	defer conn.Close()
	s, err := h.NewStream(ctx, to, admit)
	if err != nil {
		return err
	}
	defer s.Reset()
	_ = s.SetDeadline(time.Now().Add(callLimit))
	shown, err := proto.Marshal(&meshv1.Credential{Kind: &meshv1.Credential_RosterEnvelope{}})
	if err != nil {
		return err
	}
	if _, err := s.Write(append(binary.AppendUvarint(nil, uint64(len(shown))), shown...)); err != nil {
		return err
	}
	answer, err := io.ReadAll(s)
	if err != nil && len(answer) == 0 {
		return err
	}
	r := bytes.NewReader(answer)
	size, err := binary.ReadUvarint(r)
	if err != nil || uint64(r.Len()) < size {
		return fmt.Errorf("the verdict is cut short after %d bytes", len(answer))
	}
	var verdict meshv1.Verdict
	if err := proto.Unmarshal(answer[len(answer)-r.Len():][:size], &verdict); err != nil {
		return err
	}
	if verdict.GetOk() || verdict.GetFaultKind() != string(fault.Denied) {
		return fmt.Errorf("a stranger was not refused: %s", &verdict)
	}
	return nil
}

// SteadyRequest is calls at a steady pace.
type SteadyRequest struct{ EveryNanoseconds, Nanoseconds int64 }

// SteadyResult is how they fared.
type SteadyResult struct {
	CallTimes
	Failed      int
	LastFailure string
}

// Steady makes a call at each tick, one at a time.
func (p *Program) Steady(r *SteadyRequest, res *SteadyResult) error {
	c, err := p.client.caller()
	if err != nil {
		return err
	}
	var times []int64
	tick := time.NewTicker(time.Duration(r.EveryNanoseconds))
	defer tick.Stop()
	payload := make([]byte, 128)
	for end := time.Now().Add(time.Duration(r.Nanoseconds)); time.Now().Before(end); <-tick.C {
		ctx, cancel := context.WithTimeout(context.Background(), callLimit)
		began := time.Now()
		if err := c(ctx, payload); err != nil {
			res.Failed++
			res.LastFailure = err.Error()
		} else {
			times = append(times, int64(time.Since(began)))
		}
		cancel()
	}
	res.CallTimes = summarise(times)
	return nil
}

const (
	strangerGroup = "a stranger's attempt"
	strangerRate  = 500 // a second
)

func (b *bench) measureStranger() error {
	for _, transport := range []string{"TCP", "QUIC"} {
		b.say("%s, %s", strangerGroup, transport)
		if err := b.strangers("ours "+transport, transport); err != nil {
			return err
		}
	}
	return nil
}

// strangers measures a server under a listed peer's steady calls, first alone and
// then beside an attack. What the attack added is the attempts'.
func (b *bench) strangers(name, transport string) error {
	f, err := found(meshv1.Role_ROLE_WORKER, meshv1.Role_ROLE_APP_NODE)
	if err != nil {
		return err
	}
	p, err := b.openMeshPair(subject{name: name, stack: "mesh", transport: transport}, f)
	defer closePairs([]*pair{p})
	if err != nil {
		return err
	}
	attacker, err := startProgram("strangers")
	if err != nil {
		return err
	}
	defer attacker.kill()

	calls := &SteadyRequest{int64(5 * time.Millisecond), int64(b.strangerSlice)}
	var alone, beside SteadyResult
	before, err := p.server.usage()
	if err != nil {
		return err
	}
	began := time.Now()
	if err := p.client.call(answerLimit, "Steady", calls, &alone); err != nil {
		return err
	}
	middle, err := p.server.usage()
	if err != nil {
		return err
	}
	perSecond := (middle - before).Seconds() / time.Since(began).Seconds()

	id := f.founder.ID()
	attack := &AttackRequest{NetworkID: id[:], To: p.endpoint, PerSecond: strangerRate, Nanoseconds: int64(b.strangerSlice)}
	var res AttackResult
	steady := make(chan error, 1)
	stop, err := b.profilePair(p, true, "stranger")
	if err != nil {
		return err
	}
	began = time.Now()
	go func() { steady <- p.client.call(answerLimit, "Steady", calls, &beside) }()
	err = attacker.call(answerLimit, "Attack", attack, &res)
	if err := errors.Join(err, <-steady); err != nil {
		return err
	}
	after, err := p.server.usage()
	if err != nil {
		return err
	}
	took := time.Since(began).Seconds()
	if err := stop(); err != nil {
		return err
	}
	if res.Refused == 0 || res.Failed > res.Refused/10 {
		return fmt.Errorf("of the strangers' attempts %d were refused and %d ended otherwise, the last so: %s", res.Refused, res.Failed, res.LastFailure)
	}
	if beside.LastFailure != "" {
		b.say("a listed peer's call failed: %s", beside.LastFailure)
	}
	attempts := res.Refused + res.Failed
	added := (after - middle).Seconds() - perSecond*took
	b.results.add(strangerGroup, "CPU", name, "ms", added*1e3/float64(attempts), attempts)
	b.results.add(strangerGroup, "attempts/s", name, "1/s", float64(attempts)/(float64(res.Nanoseconds)/1e9), attempts)
	b.results.add(strangerGroup, "a listed peer's failed calls", name, "", float64(beside.Failed), beside.Calls+beside.Failed)
	b.results.add(strangerGroup, "a listed peer's p99 alone", name, "ms", float64(alone.P99)/1e6, alone.Calls)
	b.results.add(strangerGroup, "a listed peer's p99", name, "ms", float64(beside.P99)/1e6, beside.Calls)
	return nil
}
