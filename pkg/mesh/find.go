package mesh

import (
	"bytes"
	"cmp"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	"github.com/ipfs/go-cid"
	dht "github.com/libp2p/go-libp2p-kad-dht"
	"github.com/libp2p/go-libp2p-kad-dht/records"
	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/libp2p/go-libp2p/core/peerstore"
	ma "github.com/multiformats/go-multiaddr"
	mh "github.com/multiformats/go-multihash"
	"google.golang.org/protobuf/proto"
)

const (
	// providerLife is how long a role record counts without a new one.
	providerLife = 70 * time.Second
	// findLimit bounds one FindRole when its context does not.
	findLimit = 5 * time.Second
	// cardPages bounds what one registry may answer: 3 MiB each.
	cardPages = 16
)

// makeDHT makes this node's part of the network's own Kademlia DHT: no filters, so
// that loopback and LAN addresses count; members only; the mode forced.
func (n *Node) makeDHT() error {
	if n.o.DHT == DHTOff {
		return nil
	}
	mode := dht.ModeServer
	if n.o.DHT == DHTClient {
		mode = dht.ModeClient
	}
	kad, err := dht.New(n.host,
		dht.ProtocolPrefix(protocolID(n.prefix+"/kad")), // streams are refused to all but members, see allowStream
		dht.Mode(mode),
		dht.BootstrapPeersFunc(func() []peer.AddrInfo {
			// A link begun before this node listens leaves by another port than it
			// listens on: its peer then sees an address that no hole leads to.
			if !closed(n.listening) {
				return nil
			}
			return n.bootstraps()
		}),
		// Half of the library's own table, and three questions at a time: daemons are
		// hundreds, cards and the disk stand beside the DHT, and a whole network that
		// starts at once must not connect everybody to everybody.
		// When each looks around is this package's to say: see bootstrapLoop.
		dht.BucketSize(10), dht.Concurrency(3), dht.DisableAutoRefresh(),
		dht.RoutingTableFilter(func(_ any, p peer.ID) bool {
			_, ok := n.network.Member(p)
			return ok
		}),
		dht.DisableValues(),
		dht.ProviderManagerOpts(records.ProvideValidity(providerLife), records.CleanupInterval(providerLife/2), records.ProviderAddrTTL(providerLife)),
	)
	if err != nil {
		return fault.Wrap(fault.Internal, flat(err), "make the dht")
	}
	n.kad = kad
	return nil
}

// What a member does in the DHT when it came, each at a moment of its own within this
// time for each member that there is: every step makes a dozen connections or more,
// and two hundred members that start at once must not all make theirs at once.
const (
	// lookNear: it looks for its neighbours, so that they know it; and once more when
	// all have done so, since those who looked first found but few.
	lookNear = 150 * time.Millisecond
	// firstProvide: it puts its role record, see announceLoop. Cards say the same
	// meanwhile.
	firstProvide = 300 * time.Millisecond
	// lookAround: it fills its routing table. Nobody waits for that: to find a key, a
	// few acquaintances are enough.
	lookAround = 2 * time.Second
	// lookAgain is when it does so again.
	lookAgain = 10 * time.Minute
)

// turns is the time in which all members have their turn.
func (n *Node) turns(perMember time.Duration) time.Duration {
	return time.Duration(len(n.network.Roster().GetMembers())+1) * perMember
}

// turn is a moment of this member's own.
func (n *Node) turn(perMember time.Duration) time.Time {
	return time.Now().Add(rand.N(n.turns(perMember)))
}

// bootstrapLoop fills an empty routing table, since the library itself looks again
// only every two minutes, and has it refreshed. Waits grow and are jittered, so that a
// network that starts all at once does not drown its bootstraps.
func (n *Node) bootstrapLoop() {
	wait := 250 * time.Millisecond
	var near, again, around time.Time // when due; zero while there is nobody to ask, and when done
	for sleep(n.ctx, wait/2+rand.N(wait)) {
		if n.kad.RoutingTable().Size() > 0 {
			if around.IsZero() {
				near, around = n.turn(lookNear), n.turn(lookAround)
				again = n.turn(lookNear).Add(n.turns(lookNear))
			}
			now := time.Now()
			if !near.IsZero() && now.After(near) && n.lookNear() {
				near, again = again, time.Time{}
			}
			if now.After(around) {
				around = now.Add(lookAgain/2 + rand.N(lookAgain))
				// Asks without waiting. RefreshRoutingTable starts a goroutine, which may
				// not be done beside Close; a refresh that runs already is as good.
				_ = n.kad.Bootstrap(n.ctx)
			}
			wait = time.Until(around)
			if !near.IsZero() {
				wait = min(wait, max(time.Until(near), time.Second))
			}
			wait = max(min(10*time.Second, wait), 250*time.Millisecond)
			continue
		}
		near, again, around = time.Time{}, time.Time{}, time.Time{}
		if wait = wait * 2; wait > 30*time.Second {
			wait = 250 * time.Millisecond * 64
		}
		for _, s := range n.sessions.all() {
			if c, ok := s.caller(); ok && s.ready() && c.Class == meshv1.Class_CLASS_MEMBER {
				_, _ = n.kad.RoutingTable().TryAddPeer(s.peer, true, false)
			}
		}
		if n.kad.RoutingTable().Size() == 0 && wait > 2*time.Second {
			n.dialOldFriend()
		}
	}
}

// lookNear connects to the members nearest to this one; false when it could not.
func (n *Node) lookNear() bool {
	ctx, cancel := context.WithTimeout(n.ctx, 30*time.Second)
	defer cancel()
	if _, err := n.kad.GetClosestPeers(ctx, string(n.id)); err != nil {
		n.log.Debug("the nearest members were not found", "reason", flat(err))
		return false
	}
	return true
}

// dialOldFriend tries one member that was good before: with every bootstrap down,
// any member is a way back in.
func (n *Node) dialOldFriend() {
	known := n.book.known()
	if len(known) == 0 {
		return
	}
	p := known[rand.IntN(len(known))]
	if _, ok := n.network.Member(p); ok && p != n.id {
		ctx, cancel := context.WithTimeout(n.ctx, 10*time.Second)
		defer cancel()
		_, _ = n.connect(ctx, p)
	}
}

// roleKey is the DHT key of a role: only holders of the network key can name it.
func (n *Node) roleKey(role meshv1.Role) (cid.Cid, bool) {
	secret := n.network.NetworkKey()
	if len(secret) == 0 {
		return cid.Undef, false
	}
	mac := hmac.New(sha256.New, secret)
	mac.Write([]byte("cosmicac role "))
	_ = binary.Write(mac, binary.BigEndian, uint32(role))
	hash, err := mh.Encode(mac.Sum(nil), mh.SHA2_256)
	if err != nil {
		return cid.Undef, false
	}
	return cid.NewCidV1(cid.Raw, hash), true
}

// FindRole lists who has a role: the roster's members of that role, each with its
// newest card where one is held by a bootstrap, else with the addresses that the
// DHT or the address book knows. It asks all at once and returns what came in
// time; an empty answer is no error. Cards of members are hints about addresses
// and features, the roster alone says who has the role.
func (n *Node) FindRole(ctx context.Context, role meshv1.Role) ([]*meshv1.Card, error) {
	ctx, cancel := context.WithTimeout(ctx, findLimit)
	defer cancel()
	members := n.network.ByRole(role)
	if len(members) == 0 {
		return nil, nil
	}
	byKey := make(map[string]*meshv1.Card, len(members))
	for _, m := range members {
		byKey[m.GetKey()] = &meshv1.Card{NetworkId: n.networkID(), Key: m.GetKey(), Name: m.GetName(), Role: role}
	}
	var asking sync.WaitGroup
	asking.Add(1)
	go func() {
		defer asking.Done()
		n.findProviders(ctx, role, len(members))
	}()
	held, _ := n.cards(ctx, &meshv1.ListCardsRequest{Role: role})
	for _, card := range held {
		if old, ok := byKey[card.GetKey()]; ok && card.GetSequence() > old.GetSequence() {
			byKey[card.GetKey()] = card
		}
	}
	asking.Wait()
	list := make([]*meshv1.Card, 0, len(byKey))
	for key, card := range byKey {
		p, err := peer.Decode(key)
		if err != nil {
			continue
		}
		n.learn(p, card.GetAddresses())
		if len(card.GetAddresses()) == 0 {
			n.recall(p)
			for _, a := range n.host.Peerstore().Addrs(p) {
				card.Addresses = append(card.Addresses, a.String())
			}
			if p == n.id {
				card.Addresses = n.Addresses()
			}
		}
		list = append(list, card)
	}
	slices.SortFunc(list, func(a, b *meshv1.Card) int {
		return cmp.Or(cmp.Compare(a.GetName(), b.GetName()), cmp.Compare(a.GetKey(), b.GetKey()))
	})
	return list, nil
}

// findProviders puts the addresses of a role's providers into the address book.
func (n *Node) findProviders(ctx context.Context, role meshv1.Role, want int) {
	key, ok := n.roleKey(role)
	if !ok || n.kad == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	for info := range n.kad.FindProvidersAsync(ctx, key, 0) {
		if n.network.HasRole(info.ID, role) && len(info.Addrs) > 0 && info.ID != n.id {
			n.host.Peerstore().AddAddrs(info.ID, info.Addrs[:min(len(info.Addrs), addressesPerPeer)], peerstore.TempAddrTTL)
			if want--; want == 0 {
				return
			}
		}
	}
}

// cards asks every registry at once and returns the newest good card of each key.
// The error is set when no registry answered, and says why.
func (n *Node) cards(caller context.Context, request *meshv1.ListCardsRequest) ([]*meshv1.Card, error) {
	ctx, cancel := context.WithTimeout(caller, 3*time.Second)
	defer cancel()
	registries := n.bootstraps()
	type answer struct {
		envelopes [][]byte
		fail      string // why there are no more
		any       bool
	}
	answers := make(chan answer, len(registries))
	for _, b := range registries {
		go func() {
			var a answer
			page := proto.Clone(request).(*meshv1.ListCardsRequest)
			for range cardPages {
				held, err := meshv1.NewCardsClient(n.Client(b.ID)).ListCards(ctx, page)
				if err != nil {
					n.log.Debug("a registry did not answer", "key", b.ID, "reason", err)
					a.fail = n.nameOf(b.ID) + ": " + shortError(err)
					break
				}
				a.any, a.envelopes = true, append(a.envelopes, held.GetCardEnvelopes()...)
				if page.AfterKey = held.GetLastKey(); page.AfterKey == "" {
					break
				}
			}
			answers <- a
		}()
	}
	newest := make(map[string]*meshv1.Card)
	var failures []string
	for range registries {
		a := <-answers
		if !a.any {
			failures = append(failures, a.fail)
		}
		for _, envelope := range a.envelopes {
			card, err := n.network.CheckCard(envelope, n.now())
			if err == nil && !card.GetTombstone() && (newest[card.GetKey()] == nil || newest[card.GetKey()].GetSequence() < card.GetSequence()) {
				newest[card.GetKey()] = card
			}
		}
	}
	list := make([]*meshv1.Card, 0, len(newest))
	for _, c := range newest {
		list = append(list, c)
	}
	if len(registries) > 0 && len(failures) == len(registries) {
		if caller.Err() != nil {
			return nil, fault.Wrap(fault.KindOf(caller.Err()), caller.Err(), "ask for cards")
		}
		return nil, fault.New(fault.Unreachable, "no bootstrap answers: %s", strings.Join(failures, ", "))
	}
	return list, nil
}

// FindCard returns the newest card of a key that a registry holds, kind not_found
// if none, unreachable if no registry answers.
func (n *Node) FindCard(ctx context.Context, p peer.ID) (*meshv1.Card, error) {
	request := &meshv1.ListCardsRequest{Key: p.String()}
	if n.credential().kind == showsCertificate {
		request.Role = meshv1.Role_ROLE_ORK // an agent may ask for no other
	}
	held, err := n.cards(ctx, request)
	if err != nil {
		return nil, fault.Wrap(fault.KindOf(err), err, "find the card of %s", p)
	}
	for _, c := range held {
		if c.GetKey() == p.String() {
			return c, nil
		}
	}
	return nil, fault.New(fault.NotFound, "find the card of %s: no bootstrap holds one", p)
}

// dialByCard dials the addresses of a key's card.
func (n *Node) dialByCard(ctx context.Context, w *wayRecord) (*session, error) {
	p := w.search.peer
	card, err := n.FindCard(ctx, p)
	if cause := errors.Unwrap(err); cause != nil {
		return nil, cause // a search names its peer itself
	}
	if err != nil {
		return nil, err
	}
	var addrs []ma.Multiaddr
	for _, text := range card.GetAddresses() {
		if a, err := ma.NewMultiaddr(text); err == nil {
			if at, id := peer.SplitAddr(a); at != nil && (id == "" || id == p) {
				addrs = append(addrs, at)
			}
		}
	}
	return n.dialAt(ctx, w, addrs)
}

func (n *Node) networkID() []byte {
	id := n.network.ID()
	return bytes.Clone(id[:])
}
