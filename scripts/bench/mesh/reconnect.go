package main

import (
	"context"
	"encoding/json"
	"time"

	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	"github.com/libp2p/go-libp2p/core/peer"
)

// FollowRequest is a node that keeps a link to a peer, as daemons do.
type FollowRequest struct {
	Node *NodeSpec
	To   MeshEndpoint
}

// Follow starts the node, keeps the peer and makes one call to it.
func (p *Program) Follow(r *FollowRequest, _ *None) error {
	n, err := r.Node.start()
	if err != nil {
		return err
	}
	p.nodes = append(p.nodes, n)
	to, err := peer.Decode(r.To.Key)
	if err != nil {
		return err
	}
	n.Keep(to, r.To.Addresses...)
	return callUntil(n, to, callLimit)
}

// Back is when a peer answered again.
type Back struct {
	Answered int64 // Unix nanoseconds
	Failed   int   // calls before
}

// AwaitBack calls a peer that is away until it answers. Each call has a deadline of
// two seconds; the next one follows 10 ms later.
func (p *Program) AwaitBack(key *string, b *Back) error {
	to, err := peer.Decode(*key)
	if err != nil {
		return err
	}
	c := ping(meshv1.NewNodeClient(p.nodes[0].Client(to)))
	for end := time.Now().Add(answerLimit / 2); ; time.Sleep(10 * time.Millisecond) {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		err := c(ctx, []byte("hello"))
		cancel()
		if err == nil {
			b.Answered = time.Now().UnixNano()
			return nil
		}
		if b.Failed++; time.Now().After(end) {
			return err
		}
	}
}

const (
	backGroup = "client back after kill -9 and restart on another port"
	// away is how long the server is dead before it starts again.
	away = 3 * time.Second
)

func (b *bench) measureReconnect() error {
	for round := range b.backRounds {
		for _, transport := range []string{"TCP", "QUIC"} {
			b.say("round %d of %d: %s, %s", round+1, b.backRounds, backGroup, transport)
			seconds, err := b.reconnect(transport)
			if err != nil {
				return err
			}
			b.results.add(backGroup, "back", "ours "+transport, "s", seconds, 1)
		}
	}
	return nil
}

// reconnect kills a server under a client that keeps calling. The times of both
// processes are of the one clock of this machine.
func (b *bench) reconnect(transport string) (seconds float64, err error) {
	f, err := found(meshv1.Role_ROLE_BOOTSTRAP, meshv1.Role_ROLE_ORK, meshv1.Role_ROLE_WORKER)
	if err != nil {
		return 0, err
	}
	var running []*process
	defer func() {
		for _, p := range running {
			p.kill()
		}
	}()
	serve := func(member int) (e MeshEndpoint, p *process, err error) {
		if p, err = startProgram(f.roles[member].String()); err != nil {
			return e, nil, err
		}
		running = append(running, p)
		spec, err := f.member(member, listenOn[transport])
		if err != nil {
			return e, nil, err
		}
		var endpoint json.RawMessage
		if err := p.call(answerLimit, "Serve", &ServeRequest{"mesh", spec}, &endpoint); err != nil {
			return e, nil, err
		}
		return e, p, json.Unmarshal(endpoint, &e)
	}
	boot, _, err := serve(0)
	if err != nil {
		return 0, err
	}
	// The bootstrap itself needs no list of bootstraps.
	if err := f.bootstrapsAt([]*meshv1.BootstrapAddress{{Key: boot.Key, Addresses: boot.Addresses}}); err != nil {
		return 0, err
	}
	server, old, err := serve(1)
	if err != nil {
		return 0, err
	}
	client, err := startProgram("a client")
	if err != nil {
		return 0, err
	}
	running = append(running, client)
	spec, err := f.member(2, listenOn[transport])
	if err != nil {
		return 0, err
	}
	if err := client.call(answerLimit, "Follow", &FollowRequest{spec, server}, &None{}); err != nil {
		return 0, err
	}
	time.Sleep(2 * time.Second)
	old.kill()
	type result struct {
		back Back
		err  error
	}
	done := make(chan result, 1)
	go func() {
		var r result
		r.err = client.call(answerLimit, "AwaitBack", &server.Key, &r.back)
		done <- r
	}()
	time.Sleep(away)
	again, _, err := serve(1)
	r := <-done
	if err != nil {
		return 0, err
	}
	if r.err != nil {
		return 0, r.err
	}
	return float64(r.back.Answered-again.Listening) / 1e9, nil
}
