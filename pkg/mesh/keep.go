package mesh

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"
)

// keepPauses are the waits after each failed try; the last one stays.
var keepPauses = []time.Duration{0, time.Second, 5 * time.Second, 15 * time.Second, 30 * time.Second}

// keeping is one supervised peer.
type keeping struct {
	users  int
	cancel context.CancelFunc
	wake   chan struct{} // try now: addresses or the roster changed
}

// Keep holds a link to p until release: dialed at once, and again at once when it
// ends, then after 1, 5, 15 and each 30 s with jitter. Silence of p is noticed: it
// is suspect after 2 s (agents 4 s) and closed after 10 s. Several may keep the
// same peer. Release returns at once and leaves the connection to others.
func (n *Node) Keep(p peer.ID, addrs ...string) (release func()) {
	if p == n.id {
		return func() {}
	}
	n.learn(p, addrs)
	n.mu.Lock()
	k := n.keeping[p]
	if k != nil {
		k.users++
		n.mu.Unlock()
		poke(k.wake)
	} else {
		ctx, cancel := context.WithCancel(n.ctx)
		k = &keeping{users: 1, cancel: cancel, wake: make(chan struct{}, 1)}
		n.keeping[p] = k
		n.mu.Unlock()
		n.spawn(func() { n.supervise(ctx, p, k) })
	}
	var once sync.Once
	return func() {
		once.Do(func() {
			n.mu.Lock()
			defer n.mu.Unlock()
			if k.users--; k.users == 0 {
				k.cancel()
				delete(n.keeping, p)
			}
		})
	}
}

func (n *Node) keeps(p peer.ID) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.keeping[p] != nil
}

// wakeKeepers makes supervisors try now.
func (n *Node) wakeKeepers() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, k := range n.keeping {
		poke(k.wake)
	}
}

func (n *Node) supervise(ctx context.Context, p peer.ID, k *keeping) {
	protector := n.host.ConnManager()
	protector.Protect(p, "keep")
	defer protector.Unprotect(p, "keep")
	for failed := 0; ctx.Err() == nil; {
		s, err := n.connect(ctx, p)
		if err != nil {
			if ctx.Err() != nil {
				return
			}
			n.log.Debug("kept peer is away", "key", p, "tries", failed+1, "reason", err)
			pause := keepPauses[min(failed, len(keepPauses)-1)]
			failed++
			t := time.NewTimer(pause*9/10 + rand.N(pause/5+time.Millisecond))
			select {
			case <-t.C:
			case <-k.wake:
				failed = 0
			case <-ctx.Done():
			}
			t.Stop()
			continue
		}
		failed = 0
		release := n.watchSession(s)
		select {
		case <-s.gone:
		case <-k.wake: // a better connection may stand beside
		case <-ctx.Done():
		}
		release()
	}
}

// usesBootstraps tells whether this node keeps links to the bootstraps: daemons
// do, and agents once they have a certificate to show there.
func (n *Node) usesBootstraps() bool {
	kind := n.credential().kind
	return kind == showsCertificate || (kind == showsRoster && n.o.DHT != DHTOff)
}

// keepBootstraps keeps a link to every bootstrap of the network, as they move.
// Clients and guests keep none: they dial when they need one.
func (n *Node) keepBootstraps() {
	changes, cancel := n.network.Subscribe()
	defer cancel()
	held := make(map[peer.ID]func())
	defer func() {
		for _, release := range held {
			release()
		}
	}()
	for {
		wanted := make(map[peer.ID]bool)
		if n.usesBootstraps() {
			for _, b := range n.bootstraps() {
				wanted[b.ID] = true
				if held[b.ID] == nil {
					n.host.Peerstore().AddAddrs(b.ID, b.Addrs, learnedTTL)
					held[b.ID] = n.Keep(b.ID)
				}
			}
		}
		for id, release := range held {
			if !wanted[id] {
				release()
				delete(held, id)
			}
		}
		select {
		case <-changes:
		case <-n.bootstrapsNow:
		case <-n.ctx.Done():
			return
		}
	}
}
