package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"time"

	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	"github.com/libp2p/go-libp2p/core/peer"
)

// MemoryState is what a process holds after a garbage collection that gave all
// free memory back. Sizes are in bytes.
type MemoryState struct {
	Resident, Anonymous int64
	Goroutines          int
	Admitted            int // peers
}

// Memory collects garbage and tells what is left.
func (p *Program) Memory(_ *None, s *MemoryState) error {
	debug.FreeOSMemory()
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return err
	}
	for name, into := range map[string]*int64{"VmRSS:": &s.Resident, "RssAnon:": &s.Anonymous} {
		_, rest, ok := strings.Cut(string(status), name)
		if !ok {
			return fmt.Errorf("read /proc/self/status: it has no %s", name)
		}
		kib, err := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
		if err != nil {
			return err
		}
		*into = kib << 10
	}
	s.Goroutines = runtime.NumGoroutine()
	for _, n := range p.nodes {
		s.Admitted += admitted(n.Peers())
	}
	return nil
}

func admitted(peers []*meshv1.Peer) (count int) {
	for _, p := range peers {
		if p.GetClass() != meshv1.Class_CLASS_UNSPECIFIED {
			count++
		}
	}
	return count
}

// NodesRequest is nodes to run in one process, and whom each is to connect to.
type NodesRequest struct {
	Nodes []*NodeSpec
	To    []MeshEndpoint
}

// Nodes starts nodes, a few at a time, and returns when each is connected and
// admitted. What it opened for that it lets go of again.
func (p *Program) Nodes(r *NodesRequest, endpoints *[]*MeshEndpoint) error {
	*endpoints = make([]*MeshEndpoint, len(r.Nodes))
	errs := make([]error, len(r.Nodes))
	turns := make(chan struct{}, 4)
	var starting sync.WaitGroup
	for i, s := range r.Nodes {
		starting.Go(func() {
			turns <- struct{}{}
			defer func() { <-turns }()
			n, err := s.start()
			if err != nil {
				errs[i] = err
				return
			}
			p.mu.Lock()
			p.nodes = append(p.nodes, n)
			p.mu.Unlock()
			(*endpoints)[i] = &MeshEndpoint{n.ID().String(), n.Addresses(), time.Now().UnixNano()}
			for _, e := range r.To {
				to, err := peer.Decode(e.Key)
				if err != nil {
					errs[i] = err
					return
				}
				release := n.Keep(to, e.Addresses...)
				for end := time.Now().Add(2 * time.Minute); !n.Connected(to); time.Sleep(2 * time.Millisecond) {
					if time.Now().After(end) {
						errs[i] = fmt.Errorf("%s is not connected to %s after 2 min", n.ID(), to)
						break
					}
				}
				release()
			}
		})
	}
	starting.Wait()
	return errors.Join(errs...)
}

// CallEach makes one call from every node to a peer.
func (p *Program) CallEach(to *MeshEndpoint, _ *None) error {
	key, err := peer.Decode(to.Key)
	if err != nil {
		return err
	}
	for _, n := range p.nodes {
		ctx, cancel := context.WithTimeout(context.Background(), callLimit)
		err := ping(meshv1.NewNodeClient(n.Client(key)))(ctx, []byte("hello"))
		cancel()
		if err != nil {
			return err
		}
	}
	return nil
}

const memoryGroup = "memory"

// idleAfter is how long a connection takes to give back what identify and the first
// calls opened: streams of calls go after 3 to 6 s.
const idleAfter = 12 * time.Second

func (b *bench) measureMemory() error {
	b.say("memory: one idle node")
	f, err := found(meshv1.Role_ROLE_ORK)
	if err != nil {
		return err
	}
	node, empty, _, err := b.alone(f, listenOn["TCP"], listenOn["QUIC"])
	if node != nil {
		node.kill()
	}
	if err != nil {
		return err
	}
	b.results.add(memoryGroup, "one idle node, resident", "ours", "MB", float64(empty.Resident)/1e6, 1)
	b.results.add(memoryGroup, "one idle node, anonymous", "ours", "MB", float64(empty.Anonymous)/1e6, 1)
	for _, transport := range []string{"TCP", "QUIC"} {
		if err := b.measureConnections(transport); err != nil {
			return err
		}
	}
	return nil
}

// alone runs the first member, which knows nobody, and weighs it.
func (b *bench) alone(f *founding, listen ...string) (node *process, s MemoryState, at *MeshEndpoint, err error) {
	if node, err = startProgram("a node with many connections"); err != nil {
		return nil, s, nil, err
	}
	spec, err := f.member(0, listen...)
	if err != nil {
		return node, s, nil, err
	}
	var started []*MeshEndpoint
	if err := node.call(answerLimit, "Nodes", &NodesRequest{Nodes: []*NodeSpec{spec}}, &started); err != nil {
		return node, s, nil, err
	}
	time.Sleep(2 * time.Second)
	err = node.call(answerLimit, "Memory", &None{}, &s)
	return node, s, started[0], err
}

// measureConnections connects many agents to one ork, as in a rack, and divides what
// ork's process grew by. It listens on one transport, since agents that learn of
// both use both.
func (b *bench) measureConnections(transport string) error {
	b.say("memory: %d connections, %s", b.connections, transport)
	f, err := found(meshv1.Role_ROLE_ORK)
	if err != nil {
		return err
	}
	server, empty, to, err := b.alone(f, listenOn[transport])
	if server != nil {
		defer server.kill()
	}
	if err != nil {
		return err
	}
	const perProcess = 250
	var crowds []*process
	defer func() {
		for _, c := range crowds {
			c.kill()
		}
	}()
	for from := 0; from < b.connections; from += perProcess {
		r := &NodesRequest{To: []MeshEndpoint{*to}}
		for i := from; i < min(from+perProcess, b.connections); i++ {
			a, err := f.agent(f.members[0], i)
			if err != nil {
				return err
			}
			r.Nodes = append(r.Nodes, a)
		}
		c, err := startProgram("agents")
		if err != nil {
			return err
		}
		crowds = append(crowds, c)
		if err := c.call(answerLimit, "Nodes", r, &[]*MeshEndpoint{}); err != nil {
			return err
		}
	}
	time.Sleep(idleAfter)
	idle, err := b.full(server)
	if err != nil {
		return err
	}
	for _, c := range crowds {
		if err := c.call(answerLimit, "CallEach", to, &None{}); err != nil {
			return err
		}
	}
	time.Sleep(time.Second)
	called, err := b.full(server)
	if err != nil {
		return err
	}
	each := func(s MemoryState) float64 {
		return float64(s.Resident-empty.Resident) / float64(b.connections) / 1e3
	}
	b.results.add(memoryGroup, "idle connection", "ours "+transport, "KB", each(idle), b.connections)
	b.results.add(memoryGroup, "connection after one call", "ours "+transport, "KB", each(called), b.connections)
	b.results.add(memoryGroup, "goroutines a connection", "ours "+transport, "", float64(idle.Goroutines-empty.Goroutines)/float64(b.connections), b.connections)
	return nil
}

// full tells the server's memory and checks that nobody is missing.
func (b *bench) full(server *process) (s MemoryState, err error) {
	if err := server.call(answerLimit, "Memory", &None{}, &s); err != nil {
		return s, err
	}
	if s.Admitted != b.connections {
		return s, fmt.Errorf("%d of %d connections stand", s.Admitted, b.connections)
	}
	return s, nil
}
