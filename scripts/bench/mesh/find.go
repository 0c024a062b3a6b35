package main

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"github.com/cosmicac/cosmicac/pkg/mesh"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	"github.com/libp2p/go-libp2p/core/peer"
)

// Connections counts the admitted connections of the process's nodes.
func (p *Program) Connections(_ *None, count *int) error {
	for _, n := range p.nodes {
		*count += admitted(n.Peers())
	}
	return nil
}

// ColdRequest is a node to start and a key to call.
type ColdRequest struct {
	Node *NodeSpec
	Key  string
}

// Cold starts a node and returns with the first answered call to a key.
func (p *Program) Cold(r *ColdRequest, _ *None) error {
	n, err := r.Node.start()
	if err != nil {
		return err
	}
	p.nodes = append(p.nodes, n)
	key, err := peer.Decode(r.Key)
	if err != nil {
		return err
	}
	return callUntil(n, key, time.Minute)
}

// callUntil calls until a call is answered.
func callUntil(n *mesh.Node, key peer.ID, limit time.Duration) error {
	c := ping(meshv1.NewNodeClient(n.Client(key)))
	for end := time.Now().Add(limit); ; time.Sleep(10 * time.Millisecond) {
		ctx, cancel := context.WithTimeout(context.Background(), callLimit)
		err := c(ctx, []byte("hello"))
		cancel()
		if err == nil || time.Now().After(end) {
			return err
		}
	}
}

// WarmRequest is keys to call from the node of Cold.
type WarmRequest struct{ Keys []string }

// WarmTimes are the times to the first answered call.
type WarmTimes struct{ Nanoseconds []int64 }

// Warm calls keys that the node has no connection to.
func (p *Program) Warm(r *WarmRequest, t *WarmTimes) error {
	list, err := keys(r.Keys)
	if err != nil {
		return err
	}
	n := p.nodes[0]
	for _, key := range list {
		n.Disconnect(key, "to find it again")
		began := time.Now()
		if err := callUntil(n, key, callLimit); err != nil {
			return err
		}
		t.Nanoseconds = append(t.Nanoseconds, int64(time.Since(began)))
	}
	return nil
}

// dht is one size of the network and how many processes look for a key in it.
type dht struct{ nodes, probes int }

const (
	bootstraps = 2
	warmKeys   = 20
	// comparedSize is where hyperdht is measured too.
	comparedSize = 50
	formedGroup  = "DHT formed, all nodes from nothing"
	// idleLook is how long a formed DHT is watched doing nothing.
	idleLook = 3 * time.Second
)

func coldGroup(nodes int) string {
	return fmt.Sprintf("cold process to first answered call by key, DHT of %d", nodes)
}
func warmGroup(nodes int) string {
	return fmt.Sprintf("warm find by key to first answered call, DHT of %d", nodes)
}

func (b *bench) measureFind() error {
	for _, size := range b.dhts {
		if err := b.findOurs(size); err != nil {
			return err
		}
		if size.nodes == comparedSize && b.holepunch != "" {
			if err := b.findHolepunch(size); err != nil {
				return err
			}
		}
	}
	return nil
}

func (b *bench) findOurs(size dht) error {
	b.say("find by key: a DHT of %d nodes forms", size.nodes)
	roles := slices.Repeat([]meshv1.Role{meshv1.Role_ROLE_WORKER}, size.nodes+size.probes)
	for i := range bootstraps {
		roles[i] = meshv1.Role_ROLE_BOOTSTRAP
	}
	f, err := found(roles...)
	if err != nil {
		return err
	}
	var crowds []*process
	defer func() {
		for _, c := range crowds {
			c.kill()
		}
	}()
	// crowd runs the members [from, to) in a process of their own.
	crowd := func(from, to int) (endpoints []*MeshEndpoint, err error) {
		r := &NodesRequest{}
		for i := from; i < to; i++ {
			s, err := f.member(i, listenOn["TCP"])
			if err != nil {
				return nil, err
			}
			r.Nodes = append(r.Nodes, s)
		}
		for _, boot := range f.founder.Info().GetBootstraps() {
			r.To = append(r.To, MeshEndpoint{Key: boot.GetKey(), Addresses: boot.GetAddresses()})
		}
		c, err := startProgram(fmt.Sprintf("members %d to %d", from, to-1))
		if err != nil {
			return nil, err
		}
		crowds = append(crowds, c)
		if b.profiles != "" && len(crowds) == 2 {
			file := filepath.Join(b.profiles, fmt.Sprintf("dht-%d-formation.pprof", size.nodes))
			if err := c.call(answerLimit, "Profile", &ProfileRequest{file}, &None{}); err != nil {
				return nil, err
			}
		}
		return endpoints, c.call(answerLimit, "Nodes", r, &endpoints)
	}
	began := time.Now()
	at, err := crowd(0, bootstraps)
	if err != nil {
		return err
	}
	var list []*meshv1.BootstrapAddress
	for _, e := range at {
		list = append(list, &meshv1.BootstrapAddress{Key: e.Key, Addresses: e.Addresses})
	}
	if err := f.bootstrapsAt(list); err != nil {
		return err
	}
	if err := b.tellBootstraps(f, crowds[0]); err != nil {
		return err
	}
	const perProcess = 50
	var members []string
	for from := bootstraps; from < size.nodes; from += perProcess {
		more, err := crowd(from, min(from+perProcess, size.nodes))
		if err != nil {
			return err
		}
		for _, e := range more {
			members = append(members, e.Key)
		}
	}
	if err := settle(crowds); err != nil {
		return err
	}
	took := time.Since(began)
	if b.profiles != "" {
		if err := crowds[1].call(answerLimit, "Profile", &ProfileRequest{}, &None{}); err != nil {
			return err
		}
	}
	used, links, err := weigh(crowds)
	if err != nil {
		return err
	}
	time.Sleep(idleLook)
	later, _, err := weigh(crowds)
	if err != nil {
		return err
	}
	name := fmt.Sprintf("%d nodes", size.nodes)
	b.results.add(formedGroup, "time", name, "s", took.Seconds(), 1)
	b.results.add(formedGroup, "CPU", name, "s", used.Seconds(), 1)
	b.results.add(formedGroup, "connections a node", name, "", float64(links)/float64(size.nodes), 1)
	b.results.add(formedGroup, "CPU of an idle node", name, "ms/s", (later-used).Seconds()*1e3/idleLook.Seconds()/float64(size.nodes), 1)

	b.say("find by key: %d cold processes, DHT of %d", size.probes, size.nodes)
	for i := range size.probes {
		spec, err := f.member(size.nodes+i, listenOn["TCP"])
		if err != nil {
			return err
		}
		start := time.Now()
		c, err := startProgram("a cold process")
		if err != nil {
			return err
		}
		r := &ColdRequest{spec, members[i*7%len(members)]}
		err = c.call(answerLimit, "Cold", r, &None{})
		b.results.add(coldGroup(size.nodes), "p50", oursTCP, "ms", float64(time.Since(start))/1e6, 1)
		if err == nil && i == size.probes-1 {
			time.Sleep(2 * time.Second)
			err = b.warm(c, size.nodes, oursTCP, members)
		}
		c.kill()
		if err != nil {
			return err
		}
	}
	b.results.worst(coldGroup(size.nodes), "p50", "p95", 0.95)
	return nil
}

// tellBootstraps gives the bootstraps the network's first NetworkInfo with addresses.
func (b *bench) tellBootstraps(f *founding, boots *process) error {
	return boots.call(answerLimit, "Adopt", &AdoptRequest{f.founder.InfoEnvelope()}, &None{})
}

// AdoptRequest is a NetworkInfo.
type AdoptRequest struct{ Info []byte }

// Adopt gives every node of the process a newer NetworkInfo, as an operator does.
func (p *Program) Adopt(r *AdoptRequest, _ *None) error {
	for _, n := range p.nodes {
		if _, err := n.Network().Adopt(nil, r.Info); err != nil {
			return err
		}
	}
	return nil
}

// settle waits until the number of connections stands still for three seconds, or a
// minute: the nodes have found their neighbours by then.
func settle(crowds []*process) error {
	last, since := -1, time.Now()
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(500 * time.Millisecond) {
		_, all, err := weigh(crowds)
		if err != nil {
			return err
		}
		if all > last+last/50 || all < last-last/50 {
			last, since = all, time.Now()
		}
		if time.Since(since) > 3*time.Second {
			return nil
		}
	}
	return nil
}

// weigh tells what processor time processes have used and how many connections their
// nodes hold.
func weigh(crowds []*process) (used time.Duration, connections int, err error) {
	for _, c := range crowds {
		u, err := c.usage()
		if err != nil {
			return 0, 0, err
		}
		var count int
		if err := c.call(answerLimit, "Connections", &None{}, &count); err != nil {
			return 0, 0, err
		}
		used, connections = used+u, connections+count
	}
	return used, connections, nil
}

func (b *bench) warm(c *process, nodes int, name string, members []string) error {
	var t WarmTimes
	if err := c.call(answerLimit, "Warm", &WarmRequest{members[:min(warmKeys, len(members))]}, &t); err != nil {
		return err
	}
	for _, ns := range t.Nanoseconds {
		b.results.add(warmGroup(nodes), "p50", name, "ms", float64(ns)/1e6, 1)
	}
	b.results.worst(warmGroup(nodes), "p50", "p95", 0.95)
	return nil
}

func (b *bench) findHolepunch(size dht) error {
	b.say("find by key: hyperdht, DHT of %d", size.nodes)
	net, err := b.startHolepunch("a hyperdht net")
	if err != nil {
		return err
	}
	defer net.kill()
	var at struct {
		Bootstrap json.RawMessage
		Keys      []string
	}
	if err := net.call(answerLimit, "Crowd", map[string]int{"Nodes": size.nodes, "Answering": warmKeys + 1}, &at); err != nil {
		return err
	}
	for i := range size.probes {
		start := time.Now()
		c, err := b.startHolepunch("a cold hyperdht process")
		if err != nil {
			return err
		}
		err = c.call(answerLimit, "Cold", map[string]any{"Bootstrap": at.Bootstrap, "Key": at.Keys[0]}, &None{})
		b.results.add(coldGroup(size.nodes), "p50", holepunch, "ms", float64(time.Since(start))/1e6, 1)
		if err == nil && i == size.probes-1 {
			time.Sleep(2 * time.Second)
			err = b.warm(c, size.nodes, holepunch, at.Keys[1:])
		}
		c.kill()
		if err != nil {
			return err
		}
	}
	b.results.worst(coldGroup(size.nodes), "p50", "p95", 0.95)
	return nil
}
