package mesh

import (
	"context"
	"sync"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

const (
	// spreadRest gathers changes before peers are told.
	spreadRest = 100 * time.Millisecond
	// spreadRetry is when a peer that could not be told is told again.
	spreadRetry = 10 * time.Second
	// spreadWidth peers are told at a time, each for spreadTurn; one that takes
	// longer, on a slow link, goes on beside them.
	spreadWidth = 16
	spreadTurn  = 3 * time.Second
	spreadLimit = time.Minute
)

// followRoster acts on each change of the network's records: peers that are no
// longer good are cut at once, then the others are told.
func (n *Node) followRoster() {
	changes, cancel := n.network.Subscribe()
	defer cancel()
	retry := time.NewTicker(spreadRetry)
	defer retry.Stop()
	for {
		select {
		case <-changes:
			n.gate.pardon()
			n.Recheck()
			n.wakeKeepers()
		case <-n.spreadNow:
		case <-retry.C:
		case <-n.ctx.Done():
			return
		}
		if !sleep(n.ctx, spreadRest) {
			return
		}
		n.spread()
	}
}

// spread offers the records held here to every peer known to hold older ones.
// It is a hint on top of admission, which compares versions too: a peer that
// misses it learns with its next connection.
func (n *Node) spread() {
	if n.credential().kind == showsGrant || n.credential().kind == showsGuest || n.credential().kind == showsToken {
		return // has no right to, and nothing that others lack
	}
	roster, info := n.rosterVersion(), n.network.Info().GetSequence()
	told := make(map[string]bool)
	for _, s := range n.sessions.all() {
		c, ok := s.caller()
		if !ok || !s.ready() || told[s.peer.String()] || (c.Class != meshv1.Class_CLASS_MEMBER && c.Class != meshv1.Class_CLASS_AGENT) {
			continue
		}
		if heldRoster, heldInfo := s.held(); heldRoster >= roster && heldInfo >= info {
			continue
		}
		told[s.peer.String()] = true
		if s.told.CompareAndSwap(false, true) {
			n.spawn(func() { n.tell(s, roster, info) })
		}
	}
}

// tell offers the records to one peer. It waits for a turn, which a slow peer
// gives up while it is still being told.
func (n *Node) tell(s *session, roster, info uint64) {
	defer func() {
		s.told.Store(false)
		if n.rosterVersion() > roster || n.network.Info().GetSequence() > info {
			poke(n.spreadNow)
		}
	}()
	select {
	case n.spreading <- struct{}{}:
	case <-n.ctx.Done():
		return
	}
	leave := sync.OnceFunc(func() { <-n.spreading })
	defer leave()
	turn := time.AfterFunc(spreadTurn, leave)
	defer turn.Stop()

	request := &meshv1.PutNetworkRequest{}
	heldRoster, heldInfo := s.held()
	if heldRoster < roster {
		request.RosterEnvelope = n.network.RosterEnvelope()
	}
	if heldInfo < info {
		request.NetworkInfoEnvelope = n.network.InfoEnvelope()
	}
	ctx, cancel := context.WithTimeout(n.ctx, spreadLimit)
	defer cancel()
	answer, err := meshv1.NewNodeClient(n.Client(s.peer)).PutNetwork(ctx, request)
	switch {
	case err == nil:
		n.holdsAll(s, answer.GetRosterVersion(), answer.GetNetworkInfoSequence())
	case fault.Is(err, fault.Unsupported), fault.Is(err, fault.Denied):
		n.holdsAll(s, roster, info) // it does not want to know
	}
}

func (n *Node) holdsAll(s *session, roster, info uint64) {
	for _, o := range n.sessions.to(s.peer) {
		o.holds(roster, info)
	}
}
