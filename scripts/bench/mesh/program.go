package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/rpc"
	"net/rpc/jsonrpc"
	"os"
	"runtime/pprof"
	"sync"
	"syscall"
	"time"

	"github.com/cosmicac/cosmicac/pkg/daemon"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	"github.com/libp2p/go-libp2p/core/peer"
)

// Program is what a process of the bench does when asked. Its methods are in the
// files of the figures that they measure.
type Program struct {
	mu      sync.Mutex
	client  *client
	callers []call
	nodes   []*mesh.Node
	profile *os.File
}

// serveProgram answers until the standard input ends.
func serveProgram() error {
	daemon.KeepHeapRoom() // as a daemon does; so have all stacks but Holepunch's
	s := rpc.NewServer()
	if err := s.Register(&Program{}); err != nil {
		return err
	}
	s.ServeCodec(jsonrpc.NewServerCodec(pipes{os.Stdin, os.Stdout}))
	return nil
}

// broke ends the process of a subject that cannot go on; the bench then says so.
func broke(what string, err error) {
	fmt.Fprintf(os.Stderr, "bench-mesh: %s: %v\n", what, err)
	os.Exit(1)
}

// None is an empty answer.
type None struct{}

// ServeRequest says what to serve.
type ServeRequest struct {
	Stack string
	Node  *NodeSpec // of the mesh
}

// Serve serves a subject and answers with its endpoint.
func (p *Program) Serve(r *ServeRequest, endpoint *json.RawMessage) error {
	e, err := stacks[r.Stack].serve(r.Node)
	if err != nil {
		return err
	}
	*endpoint, err = json.Marshal(e)
	return err
}

// OpenRequest says what to call.
type OpenRequest struct {
	Stack    string
	Node     *NodeSpec // of the mesh
	Endpoint json.RawMessage
}

// Open connects to a served subject and makes one call if it has calls.
func (p *Program) Open(r *OpenRequest, _ *None) error {
	c, err := stacks[r.Stack].open(r.Node, r.Endpoint)
	if err != nil {
		return err
	}
	p.client = c
	if c.caller == nil {
		return nil
	}
	return p.load(&Load{Payload: 5, Callers: 1}, nil)
}

// ProfileRequest names a file; empty ends the profile that runs.
type ProfileRequest struct{ File string }

// Profile begins or ends a processor profile of this process.
func (p *Program) Profile(r *ProfileRequest, _ *None) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if r.File == "" {
		pprof.StopCPUProfile()
		return p.profile.Close()
	}
	f, err := os.Create(r.File)
	if err != nil {
		return err
	}
	p.profile = f
	return pprof.StartCPUProfile(f)
}

// usage is the processor time that this process has used so far.
func usage() (time.Duration, error) {
	var u syscall.Rusage
	err := syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()), err
}

// keys decodes peer ids.
func keys(texts []string) ([]peer.ID, error) {
	var list []peer.ID
	var all error
	for _, t := range texts {
		k, err := peer.Decode(t)
		all = errors.Join(all, err)
		list = append(list, k)
	}
	return list, all
}
