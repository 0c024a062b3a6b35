package daemon

import (
	"context"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/health"
	"github.com/cosmicac/cosmicac/pkg/mesh"
)

const (
	// checkEvery is the period of looking at the network around this daemon.
	checkEvery = 5 * time.Minute
	// skewMost is the difference of clocks that is warned of.
	skewMost = 5 * time.Minute
)

// subjects are those of one code whose warning holds. One goroutine uses them.
type subjects map[string]bool

// raiseEach makes exactly these subjects of a code have a warning, each with its
// arguments.
func (e *Env) raiseEach(code health.Code, held *subjects, holds map[string][]any) {
	next := make(subjects, len(holds))
	for subject, args := range holds {
		next[subject] = true
		e.Health.RaiseFor(code, subject, args...)
	}
	for subject := range *held {
		if !next[subject] {
			e.Health.ClearFor(code, subject)
		}
	}
	*held = next
}

// watchPeers looks at what the node knows without asking anybody: kept peers that
// are relayed or refuse this node, and whom it refuses itself.
func (e *Env) watchPeers(n *mesh.Node, now time.Time) {
	relayed, refusing := make(map[string][]any), make(map[string][]any)
	for _, k := range n.Kept() {
		name := k.Name
		if name == "" {
			name = k.ID.String()
		}
		switch {
		case k.Path.GetRelayed() && now.Sub(k.Path.GetConnectedAt().AsTime()) > settling:
			// A new connection may yet become direct.
			relayed[k.ID.String()] = []any{name, name}
		case fault.Is(k.Err, fault.Denied):
			refusing[k.ID.String()] = []any{name, k.Err}
		}
	}
	e.raiseEach(health.RelayedOnly, &e.relayed, relayed)
	e.raiseEach(health.RefusedByPeer, &e.refusing, refusing)
	if r := n.Refusals(); r.Count > 0 && now.Sub(r.Last) < mesh.RefusalPause {
		e.Health.Raise(health.PeersRefused, r.Count, r.Key, r.Reason)
	} else {
		e.Health.Clear(health.PeersRefused)
	}
}

// checkNetworkLoop looks at the network around this daemon, first when it has had
// time to settle.
func (e *Env) checkNetworkLoop(ctx context.Context) error {
	for wait := settling; ; wait = checkEvery {
		t := time.NewTimer(wait)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return nil
		}
		e.checkNetwork(ctx)
	}
}

// checkNetwork raises and clears what only asking tells: UDP, and the clocks of
// bootstraps. Skew is shown, never acted on.
func (e *Env) checkNetwork(ctx context.Context) {
	n := e.meshNode()
	if n == nil {
		return
	}
	found := n.CheckNetwork(ctx)
	if ctx.Err() != nil {
		return
	}
	switch found.GetUdp() {
	case "blocked":
		e.Health.Raise(health.UDPBlocked, e.Name)
	case "works":
		e.Health.Clear(health.UDPBlocked)
	}
	skewed := make(map[string][]any)
	for _, b := range found.GetBootstraps() {
		ahead := time.Duration(b.GetClockAheadMicroseconds()) * time.Microsecond
		if b.GetAnswers() && ahead.Abs() > skewMost {
			name := b.GetName()
			if name == "" {
				name = b.GetKey()
			}
			skewed[b.GetKey()] = []any{name, ahead.Abs().Round(time.Second)}
		}
	}
	e.raiseEach(health.ClockSkew, &e.skewed, skewed)
}
