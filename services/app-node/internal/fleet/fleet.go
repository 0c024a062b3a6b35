// Package fleet asks the daemons of the network how they are.
//
// Each is asked beside the others and waited for a short time; one that does not
// answer is a warning, not an error. Answers are kept for two seconds so that many
// viewers do not become many questions. It repairs nothing and stores nothing.
package fleet

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/libp2p/go-libp2p/core/peer"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/identity"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

// Node is what is needed of the own mesh node.
type Node interface {
	ID() peer.ID
	Client(p peer.ID, addrs ...string) grpc.ClientConnInterface
	Peers() []*meshv1.Peer
}

// Options are the parts of a Fleet.
type Options struct {
	Node Node
	// Members lists the roster; nil for none held.
	Members func() []*meshv1.Member
	// Own lists this daemon's warnings.
	Own func() []*meshv1.Warning
	Now func() time.Time
	// Timeout bounds the whole question.
	Timeout time.Duration
}

// Fleet is safe for concurrent use.
type Fleet struct {
	Options

	mu      sync.Mutex
	last    Health
	asked   time.Time
	running chan struct{}
}

// New makes a Fleet.
func New(o Options) *Fleet { return &Fleet{Options: o} }

// Warning is a health warning with the daemon that has it.
type Warning struct {
	Daemon string
	*meshv1.Warning
}

// Health is how the network is.
type Health struct {
	// Status is "ok", "warning" or "error": the worst of the warnings.
	Status   string
	Warnings []Warning
}

// daemonRoles are the roles of keys that answer when asked; an operator's key is
// a person's command line.
var daemonRoles = []meshv1.Role{
	meshv1.Role_ROLE_BOOTSTRAP, meshv1.Role_ROLE_APP_NODE, meshv1.Role_ROLE_ORK,
	meshv1.Role_ROLE_WORKER, meshv1.Role_ROLE_PROXY, meshv1.Role_ROLE_MONITOR,
}

const (
	atOnce = 16
	keep   = 2 * time.Second
)

// Health asks every daemon of the roster, or answers what was just heard.
func (f *Fleet) Health(ctx context.Context) (Health, error) {
	for {
		f.mu.Lock()
		if age := f.Now().Sub(f.asked); !f.asked.IsZero() && age >= 0 && age < keep {
			defer f.mu.Unlock()
			return f.last, nil
		}
		if running := f.running; running != nil {
			f.mu.Unlock()
			select {
			case <-running:
				continue
			case <-ctx.Done():
				return Health{}, ctx.Err()
			}
		}
		done := make(chan struct{})
		f.running = done
		f.mu.Unlock()

		// Not the caller's context: others wait for the same answer.
		health := f.ask(context.WithoutCancel(ctx))
		f.mu.Lock()
		f.last, f.asked, f.running = health, f.Now(), nil
		f.mu.Unlock()
		close(done)
		return health, nil
	}
}

func (f *Fleet) ask(ctx context.Context) Health {
	ctx, cancel := context.WithTimeout(ctx, f.Timeout)
	defer cancel()
	var (
		mu       sync.Mutex
		warnings []Warning
		group    sync.WaitGroup
		slots    = make(chan struct{}, atOnce)
		own      = "app-node"
	)
	for _, member := range f.Members() {
		key, err := identity.ParseID(member.GetKey())
		if err != nil || !slices.ContainsFunc(member.GetRoles(), func(r meshv1.Role) bool { return slices.Contains(daemonRoles, r) }) {
			continue
		}
		if key == f.Node.ID() {
			own = member.GetName()
			continue
		}
		group.Go(func() {
			heard := f.askOne(ctx, slots, key)
			mu.Lock()
			defer mu.Unlock()
			for _, w := range heard {
				warnings = append(warnings, Warning{Daemon: member.GetName(), Warning: w})
			}
		})
	}
	group.Wait()
	for _, w := range f.Own() {
		warnings = append(warnings, Warning{Daemon: own, Warning: w})
	}
	slices.SortFunc(warnings, func(a, b Warning) int {
		return cmp.Or(cmp.Compare(rank(b), rank(a)), cmp.Compare(a.Daemon, b.Daemon), cmp.Compare(a.GetCode(), b.GetCode()))
	})
	status := "ok"
	if len(warnings) > 0 {
		switch rank(warnings[0]) {
		case 2:
			status = "error"
		case 1:
			status = "warning"
		}
	}
	return Health{Status: status, Warnings: warnings}
}

func rank(w Warning) int {
	switch w.GetSeverity() {
	case "error":
		return 2
	case "warning":
		return 1
	}
	return 0
}

func (f *Fleet) askOne(ctx context.Context, slots chan struct{}, key peer.ID) []*meshv1.Warning {
	select {
	case slots <- struct{}{}:
		defer func() { <-slots }()
	case <-ctx.Done():
		return f.silent(ctx.Err())
	}
	info, err := meshv1.NewNodeClient(f.Node.Client(key)).GetInfo(ctx, &meshv1.GetInfoRequest{})
	if err != nil {
		return f.silent(err)
	}
	warnings := info.GetWarnings()
	const most = 50
	return warnings[:min(len(warnings), most)]
}

func (f *Fleet) silent(err error) []*meshv1.Warning {
	return []*meshv1.Warning{{
		Code: "daemon_unreachable", Severity: "error",
		Text:   "the daemon does not answer (" + string(fault.KindOf(fault.FromGRPC(err))) + ")",
		Remedy: "see whether it runs and whether its mesh port can be reached from app-node; its log says more",
		Since:  timestamppb.New(f.Now()),
	}}
}

// Peers lists the connections of the own node.
func (f *Fleet) Peers() []*meshv1.Peer { return f.Node.Peers() }
