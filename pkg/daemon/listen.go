package daemon

import (
	"context"
	"errors"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"

	"github.com/cosmicac/cosmicac/pkg/daemon/node"
)

func inUse(err error) bool {
	return errors.Is(err, unix.EADDRINUSE) || err != nil && strings.Contains(err.Error(), unix.EADDRINUSE.Error())
}

// Listen opens a listener for a configuration key: "127.0.0.1:8081" or
// "unix:/run/x.sock" (mode 0660; a socket that a dead process left is removed). An
// error names the key. The address goes into the status file.
func (e *Env) Listen(key, address string) (net.Listener, error) {
	if path, ok := strings.CutPrefix(address, "unix:"); ok {
		return e.listenUnix(key, path)
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, listenFault(key, address, err)
	}
	e.AddHTTPAddress(l.Addr().String())
	return l, nil
}

func (e *Env) listenUnix(key, path string) (net.Listener, error) {
	if c, err := net.DialTimeout("unix", path, time.Second); err == nil {
		_ = c.Close()
		return nil, listenFault(key, "unix:"+path, unix.EADDRINUSE)
	}
	if info, err := os.Lstat(path); err == nil && info.Mode()&os.ModeSocket != 0 {
		_ = os.Remove(path)
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, listenFault(key, "unix:"+path, err)
	}
	if err := os.Chmod(path, 0o660); err != nil {
		_ = l.Close()
		return nil, fault.Wrap(fault.Invalid, err, "%s: listen on unix:%s", key, path)
	}
	e.AddHTTPAddress("unix:" + path)
	return l, nil
}

// ServeHTTP listens for a key and serves until the stop comes to it; then open
// requests may end, within the stop's time.
func (e *Env) ServeHTTP(key, address string, server *http.Server) error {
	l, err := e.Listen(key, address)
	if err != nil {
		return err
	}
	e.Go(key, func(context.Context) error {
		if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	})
	e.OnStop(key, func(ctx context.Context) error {
		// Streams that never end by themselves are cut after a while.
		grace, cancel := context.WithTimeout(ctx, 3*time.Second)
		defer cancel()
		if err := server.Shutdown(grace); err != nil {
			return server.Close()
		}
		return nil
	})
	return nil
}

// Mesh makes the daemon's node in the mesh from the configuration and registers
// mesh.v1.Node on it. The caller sets the role and what else it wants, registers
// its own services on the node, then calls StartMesh. The stop closes it.
func (e *Env) Mesh(ctx context.Context, set func(*mesh.Options)) (*mesh.Node, error) {
	o := mesh.Options{
		Key: e.Key, Network: e.Network, Credential: mesh.Membership(),
		Listen: e.base.Mesh.Listen, Announce: e.base.Mesh.Announce, Private: e.base.Mesh.Private,
		Name: e.Name, Version: e.Version, StateDirectory: e.StateDirectory, DHT: mesh.DHTServer,
		Log: e.Log.Named("mesh"), Metrics: e.Metrics, Clock: e.clock,
	}
	if set != nil {
		set(&o)
	}
	n, err := mesh.New(ctx, o)
	if err != nil {
		return nil, err
	}
	e.OnStop("mesh", n.Close)
	meshv1.RegisterNodeServer(n, &node.Service{
		Key: e.Key, Network: e.Network, Mesh: n, Name: o.Name, Version: e.Version, Features: o.Features,
		StartedAt: e.StartedAt, LogFile: e.log.File(), Ring: e.log.Ring(), Health: e.Health,
		Metrics: e.Metrics, Ready: e.IsReady, Clock: e.clock,
	})
	e.mu.Lock()
	e.node = n
	e.mu.Unlock()
	return n, nil
}

// StartMesh starts the node that Mesh made: it listens when StartMesh returns.
func (e *Env) StartMesh(ctx context.Context) error {
	e.mu.Lock()
	n := e.node
	e.mu.Unlock()
	if n == nil {
		return fault.New(fault.Internal, "start the mesh before it was made")
	}
	if err := n.Start(ctx); err != nil {
		if inUse(err) {
			return listenFault("mesh.listen", strings.Join(e.base.Mesh.Listen, " or "), unix.EADDRINUSE)
		}
		return err
	}
	e.mu.Lock()
	e.started = true
	e.mu.Unlock()
	e.Go("network check", e.checkNetworkLoop)
	e.touch()
	return nil
}

// meshNode is the node once it was started, or nil.
func (e *Env) meshNode() *mesh.Node {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.started {
		return nil
	}
	return e.node
}
