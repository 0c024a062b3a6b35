package trust

import (
	"bytes"
	"cmp"
	"slices"
	"sync"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"

	"github.com/cosmicac/cosmicac/pkg/fault"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

// Network is what a node holds of its network. It is safe for concurrent use.
// Messages it returns are shared and must not be changed.
type Network struct {
	id  NetworkID
	dir string // "" keeps nothing on disk

	mu         sync.RWMutex
	now        func() time.Time
	genesis    []byte
	networkKey []byte
	floor      uint64 // rosters below are refused, from the join token
	state      state
	unsaved    bool
	expired    bool // expiry was signalled
	watchers   map[chan struct{}]struct{}
}

// state is replaced whole, never changed in place.
type state struct {
	roots     []string // the root keys in force
	roster    *meshv1.Roster
	rosterEnv []byte
	baseEnv   []byte // the newest root-signed roster: rosterEnv itself or its base
	base      uint64 // and its version
	members   map[peer.ID]*meshv1.Member
	info      *meshv1.NetworkInfo
	infoEnv   []byte
}

// NewMemory makes a Network that lives in memory, as agents and the command line
// use it. Trust is anchored on the root keys given, peer ids or hex.
func NewMemory(networkID []byte, rootKeys []string) (*Network, error) {
	id, err := ParseNetworkID(networkID)
	if err != nil {
		return nil, err
	}
	f := &form{record: "root keys"}
	f.keys("root_keys", rootKeys, 1, maxRootKeys)
	if err := f.err(); err != nil {
		return nil, err
	}
	return newNetwork(id, "", rootKeys), nil
}

func newNetwork(id NetworkID, dir string, roots []string) *Network {
	return &Network{
		id: id, dir: dir, now: time.Now,
		state:    state{roots: slices.Clone(roots)},
		watchers: make(map[chan struct{}]struct{}),
	}
}

// SetClock replaces the clock by which a roster expires.
func (n *Network) SetClock(now func() time.Time) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.now = now
}

// ID is the network's id.
func (n *Network) ID() NetworkID { return n.id }

// Genesis is the genesis envelope, or nil in a network that knows only root keys.
func (n *Network) Genesis() []byte { n.mu.RLock(); defer n.mu.RUnlock(); return n.genesis }

// RosterEnvelope is the newest roster as signed, or nil.
func (n *Network) RosterEnvelope() []byte { return n.snapshot().rosterEnv }

// InfoEnvelope is the newest NetworkInfo as signed, or nil.
func (n *Network) InfoEnvelope() []byte { return n.snapshot().infoEnv }

// Roster is the newest roster, or nil. It may have expired.
func (n *Network) Roster() *meshv1.Roster { return n.snapshot().roster }

// Info is the newest NetworkInfo, or nil.
func (n *Network) Info() *meshv1.NetworkInfo { return n.snapshot().info }

// RootKeys are the root keys in force.
func (n *Network) RootKeys() []string { return slices.Clone(n.snapshot().roots) }

// IsRoot tells whether p is a root key in force. A root key is no member by that.
func (n *Network) IsRoot(p peer.ID) bool { return slices.Contains(n.snapshot().roots, p.String()) }

// NetworkKey is the daemons' shared key for role records, or nil.
func (n *Network) NetworkKey() []byte { n.mu.RLock(); defer n.mu.RUnlock(); return n.networkKey }

// SetNetworkKey takes the shared key that a member told at admission. The first
// one stays; later ones are ignored.
func (n *Network) SetNetworkKey(key []byte) error {
	if len(key) != networkKeyBytes {
		return fault.New(fault.Invalid, "a network key of %d bytes, want %d", len(key), networkKeyBytes)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.networkKey != nil {
		return nil
	}
	n.networkKey = bytes.Clone(key)
	n.signal()
	return n.save()
}

func (n *Network) snapshot() state {
	n.mu.RLock()
	defer n.mu.RUnlock()
	return n.state
}

// live is the state and whether its roster is in force now.
func (n *Network) live() (state, bool) {
	n.mu.RLock()
	defer n.mu.RUnlock()
	return n.state, n.state.inForce(n.now())
}

func (s *state) inForce(now time.Time) bool {
	return s.roster != nil && !now.After(s.roster.GetNotAfter().AsTime().Add(Skew))
}

// Member returns p's entry if p belongs to the network now. Without a roster, or
// past its not_after and Skew, nobody does.
func (n *Network) Member(p peer.ID) (*meshv1.Member, bool) {
	s, ok := n.live()
	if !ok {
		return nil, false
	}
	m, ok := s.members[p]
	return m, ok
}

// Known returns p's entry also when the roster has expired. It is for names in
// logs and lists; it admits nobody.
func (n *Network) Known(p peer.ID) (*meshv1.Member, bool) {
	m, ok := n.snapshot().members[p]
	return m, ok
}

// HasRole tells whether p is a member with this role now.
func (n *Network) HasRole(p peer.ID, role meshv1.Role) bool {
	m, ok := n.Member(p)
	return ok && role != meshv1.Role_ROLE_UNSPECIFIED && slices.Contains(m.GetRoles(), role)
}

// ByRole lists the members with a role, by name. Empty once the roster expired.
func (n *Network) ByRole(role meshv1.Role) []*meshv1.Member {
	s, ok := n.live()
	if !ok || role == meshv1.Role_ROLE_UNSPECIFIED {
		return nil
	}
	var found []*meshv1.Member
	for _, m := range s.roster.GetMembers() {
		if slices.Contains(m.GetRoles(), role) {
			found = append(found, m)
		}
	}
	slices.SortFunc(found, func(a, b *meshv1.Member) int { return cmp.Compare(a.GetName(), b.GetName()) })
	return found
}

// Expired tells whether a roster is held that is no longer in force.
func (n *Network) Expired() bool {
	s, ok := n.live()
	return s.roster != nil && !ok
}

// RosterNotAfter is when the roster expires, without Skew; zero without one.
func (n *Network) RosterNotAfter() time.Time {
	if r := n.Roster(); r != nil {
		return r.GetNotAfter().AsTime()
	}
	return time.Time{}
}

// Tick sends the change signal once when the roster passes its expiry, so that
// links get closed, and tries again to save what could not be saved. Call it
// every few seconds. The error is about saving only.
func (n *Network) Tick() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	expired := n.state.roster != nil && !n.state.inForce(n.now())
	if expired != n.expired {
		n.expired = expired
		n.signal()
	}
	if n.unsaved {
		return n.save()
	}
	return nil
}

// Subscribe returns a channel that gets a signal after each change of roster,
// NetworkInfo, network key or expiry. Signals are coalesced: one may stand for
// several changes, and none is lost. Cancel ends it; the channel is not closed.
func (n *Network) Subscribe() (changes <-chan struct{}, cancel func()) {
	ch := make(chan struct{}, 1)
	n.mu.Lock()
	n.watchers[ch] = struct{}{}
	n.mu.Unlock()
	return ch, func() {
		n.mu.Lock()
		delete(n.watchers, ch)
		n.mu.Unlock()
	}
}

// signal is called with mu held.
func (n *Network) signal() {
	for ch := range n.watchers {
		select {
		case ch <- struct{}{}:
		default:
		}
	}
}

// SetMinimumRosterVersion refuses rosters below a version, as a join token says.
// It only grows.
func (n *Network) SetMinimumRosterVersion(v uint64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.floor = max(n.floor, v)
}

// Adopt takes a roster and a NetworkInfo that someone offered; either may be
// empty. They are judged by their signatures alone, whoever brought them. Older
// ones and ones held already are ignored without error. If one is refused,
// neither is taken. A change is in force when Adopt returns, also when the error
// says that it could not be saved; saving is tried again by Tick.
func (n *Network) Adopt(rosterEnv, infoEnv []byte) (changed bool, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	next, changed, err := n.state.advance(n.id, n.floor, rosterEnv, infoEnv, n.now(), false)
	if err != nil || !changed {
		return false, err
	}
	n.state = next
	n.expired = !n.state.inForce(n.now()) && n.state.roster != nil
	n.signal()
	return true, n.save()
}

// AdoptEach is Adopt for records that need not have come together, as kept ones
// and those of a peer: what is good of the two is taken, and the error is about
// the other.
func (n *Network) AdoptEach(rosterEnv, infoEnv []byte) (changed bool, err error) {
	// Together first: each may hold the signer of the other.
	if changed, err = n.Adopt(rosterEnv, infoEnv); err == nil || changed || len(rosterEnv) == 0 || len(infoEnv) == 0 {
		return changed, err
	}
	tookInfo, infoErr := n.Adopt(nil, infoEnv)
	tookRoster, rosterErr := n.Adopt(rosterEnv, nil)
	return tookInfo || tookRoster, cmp.Or(rosterErr, infoErr)
}

// AdoptGenesis takes the genesis envelope of a network that so far knew only
// root keys. It must lead to the root keys in force.
func (n *Network) AdoptGenesis(env []byte) error {
	g, err := OpenGenesis(env)
	if err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.genesis != nil {
		return nil
	}
	if !bytes.Equal(g.GetNetworkId(), n.id[:]) {
		return otherNetwork("genesis", g.GetNetworkId(), n.id)
	}
	roots, err := follow(n.id, g.GetRootKeys(), n.state.info.GetRotationEnvelopes())
	if err != nil {
		return err
	}
	if !slices.Equal(roots, n.state.roots) {
		return fault.New(fault.Denied, "genesis does not lead to the root keys in force: another network of the same id")
	}
	n.genesis = bytes.Clone(env)
	return n.save()
}

func otherNetwork(record string, got []byte, want NetworkID) error {
	return fault.New(fault.Denied, "%s is of network %x, this is network %s", record, got, want)
}
