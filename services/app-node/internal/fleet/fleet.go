// Package fleet asks the daemons of the network how they are and whom they are
// connected to.
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
	health kept[Health]
	mesh   kept[Mesh]
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

// daemon is the key of a member that answers when asked.
func daemon(m *meshv1.Member) (peer.ID, bool) {
	key, err := identity.ParseID(m.GetKey())
	return key, err == nil && slices.ContainsFunc(m.GetRoles(), func(r meshv1.Role) bool { return slices.Contains(daemonRoles, r) })
}

const (
	atOnce = 16
	keep   = 2 * time.Second
	// Bounds of what one daemon is believed to say.
	mostWarnings, mostPeers = 50, 8192
)

// Health asks every daemon of the roster, or answers what was just heard.
func (f *Fleet) Health(ctx context.Context) (Health, error) { return f.health.get(ctx, f.Now, f.ask) }

// kept is an answer that many ask for: one question at a time, its answer good for
// a moment.
type kept[T any] struct {
	mu      sync.Mutex
	last    T
	asked   time.Time
	running chan struct{}
}

func (k *kept[T]) get(ctx context.Context, now func() time.Time, ask func(context.Context) T) (T, error) {
	for {
		k.mu.Lock()
		if age := now().Sub(k.asked); !k.asked.IsZero() && age >= 0 && age < keep {
			defer k.mu.Unlock()
			return k.last, nil
		}
		if running := k.running; running != nil {
			k.mu.Unlock()
			select {
			case <-running:
				continue
			case <-ctx.Done():
				var none T
				return none, ctx.Err()
			}
		}
		done := make(chan struct{})
		k.running = done
		k.mu.Unlock()

		// Not the caller's context: others wait for the same answer.
		answer := ask(context.WithoutCancel(ctx))
		k.mu.Lock()
		k.last, k.asked, k.running = answer, now(), nil
		k.mu.Unlock()
		close(done)
		return answer, nil
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
		key, ok := daemon(member)
		if !ok {
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
	return warnings[:min(len(warnings), mostWarnings)]
}

func (f *Fleet) silent(err error) []*meshv1.Warning {
	return []*meshv1.Warning{{
		Code: "daemon_unreachable", Severity: "error",
		Text:   "the daemon does not answer (" + string(fault.KindOf(fault.FromGRPC(err))) + ")",
		Remedy: "see whether it runs and whether its mesh port can be reached from app-node; its log says more",
		Since:  timestamppb.New(f.Now()),
	}}
}
