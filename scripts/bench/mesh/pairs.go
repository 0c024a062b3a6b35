package main

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

// subject is one of those that are compared.
type subject struct {
	name        string
	stack       string // of stacks, or "holepunch"
	transport   string // of the mesh
	grpcOnly    bool
	calls, bulk bool
}

const (
	oursTCP   = "ours TCP"
	oursQUIC  = "ours QUIC"
	grpcTLS   = "gRPC over TLS"
	natsTLS   = "NATS over TLS"
	holepunch = "Holepunch"
	tlsTCP    = "TLS over TCP"
	rawTCP    = "raw TCP"
)

var subjects = []subject{
	{name: oursTCP, stack: "mesh", transport: "TCP", calls: true, bulk: true},
	{name: oursQUIC, stack: "mesh", transport: "QUIC", calls: true, bulk: true},
	{name: "ours TCP, gRPC only", stack: "mesh", transport: "TCP", grpcOnly: true, calls: true},
	{name: grpcTLS, stack: "grpc", calls: true},
	{name: natsTLS, stack: "nats", calls: true},
	{name: holepunch, stack: "holepunch", calls: true, bulk: true},
	{name: tlsTCP, stack: "tls", bulk: true},
	{name: rawTCP, stack: "raw", calls: true, bulk: true},
}

// pair is a subject's server and client, a process each.
type pair struct {
	subject
	server, client *process
	endpoint       MeshEndpoint // of the mesh
}

// answerLimit bounds every question to a process, however busy the machine is.
const answerLimit = 10 * time.Minute

// openPairs starts the wanted subjects, as far as they are installed.
func (b *bench) openPairs(wanted func(subject) bool) (pairs []*pair, err error) {
	for _, s := range subjects {
		if !wanted(s) || (len(b.only) > 0 && !slices.Contains(b.only, s.name)) || (s.stack == "holepunch" && b.holepunch == "") {
			continue
		}
		b.say("starting %s", s.name)
		p, err := b.openPair(s)
		pairs = append(pairs, p)
		if err != nil {
			return pairs, fmt.Errorf("start %s: %w", s.name, err)
		}
	}
	return pairs, nil
}

func closePairs(pairs []*pair) {
	for _, p := range pairs {
		if p == nil {
			continue
		}
		for _, process := range []*process{p.client, p.server} {
			if process != nil {
				process.kill()
			}
		}
	}
}

func (b *bench) openPair(s subject) (*pair, error) {
	if s.stack != "mesh" {
		return b.open(s, &ServeRequest{Stack: s.stack}, &OpenRequest{Stack: s.stack})
	}
	f, err := found(meshv1.Role_ROLE_WORKER, meshv1.Role_ROLE_APP_NODE)
	if err != nil {
		return nil, err
	}
	return b.openMeshPair(s, f)
}

// openMeshPair is for the first two members of a network.
func (b *bench) openMeshPair(s subject, f *founding) (*pair, error) {
	serve, err := f.member(0, listenOn[s.transport])
	if err != nil {
		return nil, err
	}
	open, err := f.member(1, listenOn[s.transport])
	if err != nil {
		return nil, err
	}
	serve.GRPCOnly, open.GRPCOnly = s.grpcOnly, s.grpcOnly
	return b.open(s, &ServeRequest{s.stack, serve}, &OpenRequest{Stack: s.stack, Node: open})
}

// open starts both processes; a pair that comes with an error has to be closed too.
func (b *bench) open(s subject, serve *ServeRequest, open *OpenRequest) (p *pair, err error) {
	start := startProgram
	if s.stack == "holepunch" {
		start = b.startHolepunch
	}
	p = &pair{subject: s}
	if p.server, err = start(s.name + ", server"); err != nil {
		return p, err
	}
	if p.client, err = start(s.name + ", client"); err != nil {
		return p, err
	}
	if err := p.server.call(answerLimit, "Serve", serve, &open.Endpoint); err != nil {
		return p, err
	}
	if s.stack == "mesh" {
		if err := json.Unmarshal(open.Endpoint, &p.endpoint); err != nil {
			return p, err
		}
	}
	return p, p.client.call(answerLimit, "Open", open, &None{})
}

// profilePair begins processor profiles of both processes of ours when asked for;
// stop ends them.
func (b *bench) profilePair(p *pair, now bool, figure string) (stop func() error, err error) {
	if b.profiles == "" || !now || p.stack == "holepunch" {
		return func() error { return nil }, nil
	}
	name := filepath.Join(b.profiles, figure+"-"+strings.NewReplacer(" ", "-", ",", "").Replace(strings.ToLower(p.name)))
	both := map[string]*process{"server": p.server, "client": p.client}
	for end, process := range both {
		if err := process.call(answerLimit, "Profile", &ProfileRequest{name + "-" + end + ".pprof"}, &None{}); err != nil {
			return nil, err
		}
	}
	return func() error {
		for _, process := range both {
			if err := process.call(answerLimit, "Profile", &ProfileRequest{}, &None{}); err != nil {
				return err
			}
		}
		return nil
	}, nil
}
