package mesh

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/trust"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	"github.com/libp2p/go-libp2p/core/event"
	"github.com/libp2p/go-libp2p/core/peer"
)

const (
	// cardLife is the TTL of a card; it is put again well before.
	cardLife = 90 * time.Second
	// announceRest gathers reasons to announce.
	announceRest = 200 * time.Millisecond
	// farewellLimit bounds taking the card back at Close.
	farewellLimit = time.Second
)

// Announce puts the node's card to the registries soon, because something in it
// changed. It returns at once; calls are merged.
func (n *Node) Announce() { poke(n.announceNow) }

// announces tells whether this node has anything to announce.
func (n *Node) announces() bool {
	kind := n.credential().kind
	return (kind == showsRoster && n.o.Role != meshv1.Role_ROLE_UNSPECIFIED && n.o.Role != meshv1.Role_ROLE_OPERATOR) || kind == showsCertificate
}

// Card signs a new card of this node, with a sequence above every earlier one.
func (n *Node) Card() (*meshv1.Card, []byte, error) { return n.sealCard(false) }

func (n *Node) sealCard(tombstone bool) (*meshv1.Card, []byte, error) {
	card := &meshv1.Card{
		NetworkId: n.networkID(), Key: n.id.String(), Role: n.o.Role, Addresses: n.Addresses(), Features: n.o.Features,
		Version: n.o.Version, TtlSeconds: uint32(cardLife / time.Second), Name: n.o.Name,
	}
	if n.o.Card != nil {
		n.o.Card(card)
	}
	if tombstone {
		card.Tombstone, card.Addresses = true, nil
	}
	n.mu.Lock()
	// Microseconds of the clock, so that it grows across restarts as well.
	n.sequence = max(n.sequence+1, uint64(n.now().UnixMicro()))
	card.Sequence = n.sequence
	n.mu.Unlock()
	envelope, err := trust.SealCard(n.o.Key, card)
	if err != nil {
		return nil, nil, err
	}
	return card, envelope, nil
}

// announceLoop puts the card every 20 to 30 s, and at once when addresses, links
// or the credential change; and the role record with it.
func (n *Node) announceLoop() {
	events, err := n.host.EventBus().Subscribe(new(event.EvtLocalAddressesUpdated))
	if err != nil {
		n.log.Error("changes of addresses will be announced late", "reason", err)
	} else {
		defer events.Close()
	}
	var changes <-chan any
	if events != nil {
		changes = events.Out()
	}
	provides := n.turn(firstProvide)
	for {
		if n.announces() {
			if err := n.PutCard(n.ctx); err != nil && n.ctx.Err() == nil {
				n.log.Debug("the card was not put everywhere", "reason", err)
			}
			if !time.Now().Before(provides) {
				n.provide()
			}
		}
		pause := 20*time.Second + rand.N(10*time.Second)
		if first := time.Until(provides); first > 0 {
			pause = min(pause, first)
		}
		t := time.NewTimer(pause)
		select {
		case <-t.C:
		case <-n.announceNow:
		case _, ok := <-changes:
			if !ok {
				changes = nil
			}
		case <-n.ctx.Done():
		}
		t.Stop()
		if !sleep(n.ctx, announceRest) {
			return
		}
	}
}

// PutCard puts the node's card to every registry now: the bootstraps, and for an
// agent every ork that it is connected to. The error is of the last that failed.
func (n *Node) PutCard(ctx context.Context) error {
	_, envelope, err := n.sealCard(false)
	if err != nil {
		return err
	}
	return n.put(ctx, envelope)
}

func (n *Node) put(ctx context.Context, envelope []byte) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	var (
		mu      sync.Mutex
		last    error
		putting sync.WaitGroup
	)
	for _, p := range n.registries() {
		putting.Add(1)
		go func() {
			defer putting.Done()
			_, err := meshv1.NewCardsClient(n.Client(p)).PutCard(ctx, &meshv1.PutCardRequest{CardEnvelope: envelope})
			if err != nil && !fault.Is(err, fault.Unsupported) {
				mu.Lock()
				last = err
				mu.Unlock()
			}
		}()
	}
	putting.Wait()
	return last
}

// registries are the connected ones: whoever is away is told when the link stands.
func (n *Node) registries() []peer.ID {
	var list []peer.ID
	for _, b := range n.bootstraps() {
		if b.ID == n.id || n.sessions.best(b.ID) != nil {
			list = append(list, b.ID)
		}
	}
	if n.credential().kind == showsCertificate {
		for _, m := range n.network.ByRole(meshv1.Role_ROLE_ORK) {
			if p, err := peer.Decode(m.GetKey()); err == nil && n.sessions.best(p) != nil {
				list = append(list, p)
			}
		}
	}
	return list
}

// provide renews the DHT record that says who has this node's role.
func (n *Node) provide() {
	key, ok := n.roleKey(n.o.Role)
	if !ok || n.kad == nil || n.credential().kind != showsRoster {
		return
	}
	if n.kad.RoutingTable().Size() == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(n.ctx, 5*time.Second)
	defer cancel()
	if err := n.kad.Provide(ctx, key, true); err != nil && n.ctx.Err() == nil {
		n.log.Debug("the role was not provided", "reason", flat(err))
	}
}

// farewell puts a tombstone, so that others forget this node at once.
func (n *Node) farewell(ctx context.Context) {
	n.mu.Lock()
	started := n.started
	n.mu.Unlock()
	if !started || !n.announces() {
		return
	}
	if _, envelope, err := n.sealCard(true); err == nil {
		ctx, cancel := context.WithTimeout(ctx, farewellLimit)
		defer cancel()
		_ = n.put(ctx, envelope)
	}
}
