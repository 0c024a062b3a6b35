// Package links keeps this proxy's links in the mesh: to wrk-ork and app-node,
// whose tables it follows, and to the agents of replicas in use, which are asked
// for a sign of life each second.
//
// It does not route, and remembers nothing of a link but whether it is alive now.
package links

import (
	"context"
	"math/rand/v2"
	"net"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"
	"google.golang.org/grpc"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/trust"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	"github.com/cosmicac/cosmicac/services/proxy-inference/internal/proxy"
	"github.com/cosmicac/cosmicac/services/proxy-inference/internal/route"
)

// Stream is the name of the streams that carry HTTP/1.1 to an agent's engine.
const Stream = "http"

// Mesh is what is asked of the node.
type Mesh interface {
	Client(p peer.ID, addresses ...string) grpc.ClientConnInterface
	OpenStream(ctx context.Context, p peer.ID, name string, addresses ...string) (net.Conn, error)
	Keep(p peer.ID, addresses ...string) (release func())
	Connected(p peer.ID) bool
}

// Links are the links of one proxy.
type Links struct {
	Mesh    Mesh
	Network *trust.Network
}

// Dial opens a stream to a replica's engine.
func (l *Links) Dial(ctx context.Context, r route.Replica) (net.Conn, error) {
	key, err := identity.ParseID(r.AgentKey)
	if err != nil {
		return nil, fault.Wrap(fault.Invalid, err, "open a stream to attempt %s: its agent's key", r.AttemptID)
	}
	return l.Mesh.OpenStream(ctx, key, Stream, r.Addresses...)
}

var _ proxy.Dial = (&Links{}).Dial

// Members are the keys of the roster that hold a role.
func (l *Links) Members(role meshv1.Role) []peer.ID {
	var keys []peer.ID
	for _, m := range l.Network.ByRole(role) {
		if key, err := identity.ParseID(m.GetKey()); err == nil {
			keys = append(keys, key)
		}
	}
	return keys
}

// Call calls f with each member that holds a role until one answers without
// error. With several, one is enough.
func (l *Links) Call(role meshv1.Role, f func(grpc.ClientConnInterface) error) error {
	err := error(fault.New(fault.Unavailable, "the roster names no %s", roleName(role)))
	for _, key := range l.Members(role) {
		if err = f(l.Mesh.Client(key)); err == nil {
			return nil
		}
	}
	return err
}

func roleName(role meshv1.Role) string {
	switch role {
	case meshv1.Role_ROLE_ORK:
		return "wrk-ork"
	case meshv1.Role_ROLE_APP_NODE:
		return "app-node"
	}
	return role.String()
}

// longestPause bounds the pause between two tries to follow a table.
const longestPause = 5 * time.Second

// Follow runs a watch at the members of a role, one after the other, again and
// again until ctx ends. The watch calls received with each table; Follow calls
// lost with the reason each time a watch ended.
func (l *Links) Follow(ctx context.Context, role meshv1.Role, watch func(ctx context.Context, c grpc.ClientConnInterface, received func()) error, lost func(error)) error {
	pause := 100 * time.Millisecond
	for ctx.Err() == nil {
		err := l.Call(role, func(c grpc.ClientConnInterface) error {
			return watch(ctx, c, func() { pause = 100 * time.Millisecond })
		})
		if ctx.Err() != nil {
			break
		}
		if err == nil {
			err = fault.New(fault.Unavailable, "%s ended its table without a reason", roleName(role))
		}
		lost(err)
		if !sleep(ctx, pause/2+rand.N(pause)) {
			break
		}
		pause = min(2*pause, longestPause)
	}
	return nil
}

// KeepRole keeps a link to every member that holds a role, as the roster changes,
// so that silence is noticed and a watch breaks instead of hanging.
func (l *Links) KeepRole(ctx context.Context, role meshv1.Role) error {
	changed, cancel := l.Network.Subscribe()
	defer cancel()
	kept := keeper{mesh: l.Mesh}
	defer kept.release()
	for {
		wanted := map[string][]string{}
		for _, key := range l.Members(role) {
			wanted[key.String()] = nil
		}
		kept.keep(wanted)
		select {
		case <-changed:
		case <-ctx.Done():
			return nil
		}
	}
}

// look is the pause between two looks at the links to agents.
const look = 250 * time.Millisecond

// KeepReplicas keeps a link to the agent of every replica that serves or is on
// its way to, and tells the table which of them are silent.
func (l *Links) KeepReplicas(ctx context.Context, table *route.Table) error {
	kept := keeper{mesh: l.Mesh}
	defer kept.release()
	tick := time.NewTicker(look)
	defer tick.Stop()
	for {
		changed := table.Changed()
		agents := table.Agents()
		kept.keep(agents)
		for again := true; again; {
			silent := map[string]bool{}
			for key := range agents {
				if id, err := identity.ParseID(key); err == nil && !l.Mesh.Connected(id) {
					silent[key] = true
				}
			}
			table.Silent(silent)
			select {
			case <-tick.C:
			case <-changed:
				again = false
			case <-ctx.Done():
				return nil
			}
		}
	}
}

// keeper holds links by key.
type keeper struct {
	mesh Mesh
	held map[string]func()
}

// keep takes links to new keys and releases those no longer wanted.
func (k *keeper) keep(wanted map[string][]string) {
	if k.held == nil {
		k.held = map[string]func(){}
	}
	for key, addresses := range wanted {
		if k.held[key] != nil {
			continue
		}
		if id, err := identity.ParseID(key); err == nil {
			k.held[key] = k.mesh.Keep(id, addresses...)
		}
	}
	for key, release := range k.held {
		if _, ok := wanted[key]; !ok {
			release()
			delete(k.held, key)
		}
	}
}

func (k *keeper) release() {
	for _, release := range k.held {
		release()
	}
}

func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
