// Package joining is the desk where keys that are not in the roster ask to be let
// in, and where the operator reads who asked. Requests lie in one JSON file.
//
// Everything is bounded: requests in all and from one address, one of each key,
// their pace and their life. It does not admit anybody: that is a roster signed
// elsewhere. It does not check proofs, since it does not know tokens.
package joining

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"sync"
	"time"

	"github.com/google/renameio/v2"
	"github.com/hashicorp/go-hclog"
	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/multiformats/go-multiaddr"
	manet "github.com/multiformats/go-multiaddr/net"
	"golang.org/x/time/rate"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	"github.com/cosmicac/cosmicac/pkg/trust"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

// Bounds of the desk.
const (
	// MaxRequests bounds the open requests, MaxPerPrefix those from one IPv4
	// address or IPv6 /56.
	MaxRequests, MaxPerPrefix = 256, 64
	// Life is how long a request stays open after it was last repeated.
	Life = 7 * 24 * time.Hour

	perSecond, burst = 1, 64 // calls from one prefix
	maxPrefixes      = 1024
	maxRoles         = 8
	maxProofBytes    = 64
	maxFileBytes     = 1 << 20
)

var label = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)

// Desk answers mesh.v1.Joining. It is safe for concurrent use.
type Desk struct {
	meshv1.UnimplementedJoiningServer
	path    string // "" keeps nothing
	network *trust.Network
	log     hclog.Logger
	clock   func() time.Time

	mu       sync.Mutex
	requests map[string]*request
	paces    map[netip.Prefix]*rate.Limiter
}

// request is one open request as it lies in the file.
type request struct {
	Name    string    `json:"name"`
	Roles   []int32   `json:"roles"`
	Proof   string    `json:"proof,omitempty"` // base64
	Address string    `json:"address"`
	First   time.Time `json:"first_seen_at"`
	Last    time.Time `json:"last_seen_at"`
}

// Open reads the file, if there is one. Clock is time.Now if nil.
func Open(path string, network *trust.Network, log hclog.Logger, clock func() time.Time) (*Desk, error) {
	if clock == nil {
		clock = time.Now
	}
	d := &Desk{path: path, network: network, log: log, clock: clock, requests: make(map[string]*request), paces: make(map[netip.Prefix]*rate.Limiter)}
	if path == "" {
		return d, nil
	}
	data, err := os.ReadFile(path)
	switch {
	case os.IsNotExist(err):
		return d, nil
	case err != nil:
		return nil, fault.Wrap(fault.Unavailable, err, "read the join requests")
	case len(data) > maxFileBytes:
		return nil, fault.New(fault.TooLarge, "read the join requests: %s has %d bytes; remove it, those who ask will ask again", path, len(data))
	}
	if err := json.Unmarshal(data, &d.requests); err != nil || d.requests == nil {
		return nil, fault.Wrap(fault.Invalid, err, "read the join requests: %s is damaged; remove it, those who ask will ask again", path)
	}
	for key, r := range d.requests {
		if r == nil || len(d.requests) > MaxRequests {
			delete(d.requests, key)
		}
	}
	return d, nil
}

// RequestJoin files or repeats the caller's request, or hands it what a member
// needs once the roster lists its key.
func (d *Desk) RequestJoin(ctx context.Context, in *meshv1.RequestJoinRequest) (*meshv1.RequestJoinResponse, error) {
	caller, ok := mesh.CallerFrom(ctx)
	if !ok {
		return nil, fault.New(fault.Denied, "ask to join: the caller is not known")
	}
	first, err := d.file(caller, in)
	if err != nil {
		return nil, err
	}
	if _, ok := d.network.Member(caller.ID); !ok {
		return &meshv1.RequestJoinResponse{FirstSeenAt: timestamppb.New(first)}, nil
	}
	return &meshv1.RequestJoinResponse{
		Admitted: true, RosterEnvelope: d.network.RosterEnvelope(), NetworkInfoEnvelope: d.network.InfoEnvelope(), GenesisEnvelope: d.network.Genesis(),
	}, nil
}

// file returns when the request that stands now was first heard.
func (d *Desk) file(caller mesh.Caller, in *meshv1.RequestJoinRequest) (first time.Time, err error) {
	var wrong []fault.Detail
	if !label.MatchString(in.GetName()) {
		wrong = append(wrong, fault.Detail{Field: "name", Rule: "must be a DNS label: a-z, 0-9 and -, at most 63"})
	}
	if len(in.GetRoles()) > maxRoles {
		wrong = append(wrong, fault.Detail{Field: "roles", Rule: "at most 8"})
	}
	if len(in.GetProof()) > maxProofBytes {
		wrong = append(wrong, fault.Detail{Field: "proof", Rule: "at most 64 bytes"})
	}
	if len(wrong) > 0 {
		return first, fault.New(fault.Invalid, "ask to join: the request is malformed").With(wrong...)
	}
	from := prefixOf(caller.Address)
	d.mu.Lock()
	defer d.mu.Unlock()
	now := d.clock()
	if !d.pace(from).AllowN(now, 1) {
		return first, fault.New(fault.Exhausted, "ask to join: too many requests from this address, try again in a minute")
	}
	d.sweep(now)
	key := caller.ID.String()
	if _, ok := d.network.Member(caller.ID); ok {
		if _, open := d.requests[key]; open {
			delete(d.requests, key)
			return first, d.save()
		}
		return first, nil
	}
	r := d.requests[key]
	if r == nil {
		same := 0
		for _, o := range d.requests {
			if prefixOf(o.Address) == from {
				same++
			}
		}
		if len(d.requests) >= MaxRequests || same >= MaxPerPrefix {
			return first, fault.New(fault.Exhausted, "ask to join: too many requests are open; an operator must look at them")
		}
		r = &request{First: now}
		d.requests[key] = r
		d.log.Info("a key asks to join", "key", key, "name", in.GetName(), "address", caller.Address)
	}
	roles := make([]int32, 0, len(in.GetRoles()))
	for _, role := range in.GetRoles() {
		roles = append(roles, int32(role))
	}
	next := request{Name: in.GetName(), Roles: roles, Proof: base64.StdEncoding.EncodeToString(in.GetProof()), Address: caller.Address, First: r.First, Last: now}
	same := r.Name == next.Name && r.Proof == next.Proof && r.Address == next.Address && slices.Equal(r.Roles, next.Roles)
	fresh := now.Sub(r.Last) < time.Hour
	*r = next
	if same && fresh {
		return r.First, nil // asked again, nothing new worth a write
	}
	return r.First, d.save()
}

// ListJoinRequests lists the open requests, oldest first.
func (d *Desk) ListJoinRequests(context.Context, *meshv1.ListJoinRequestsRequest) (*meshv1.ListJoinRequestsResponse, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.sweep(d.clock())
	answer := &meshv1.ListJoinRequestsResponse{}
	for key, r := range d.requests {
		proof, err := base64.StdEncoding.DecodeString(r.Proof)
		if err != nil {
			proof = nil
		}
		open := &meshv1.JoinRequest{Key: key, Name: r.Name, FirstSeenAt: timestamppb.New(r.First), RemoteAddress: r.Address, Proof: proof}
		for _, role := range r.Roles {
			open.Roles = append(open.Roles, meshv1.Role(role))
		}
		answer.Requests = append(answer.Requests, open)
	}
	slices.SortFunc(answer.Requests, func(a, b *meshv1.JoinRequest) int {
		return cmp.Or(a.FirstSeenAt.AsTime().Compare(b.FirstSeenAt.AsTime()), cmp.Compare(a.Key, b.Key))
	})
	return answer, nil
}

// DropJoinRequest forgets one. Its key may ask again.
func (d *Desk) DropJoinRequest(_ context.Context, in *meshv1.DropJoinRequestRequest) (*meshv1.DropJoinRequestResponse, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.requests[in.GetKey()] == nil {
		return nil, fault.New(fault.NotFound, "drop the join request of %.128q: there is none", in.GetKey())
	}
	delete(d.requests, in.GetKey())
	return &meshv1.DropJoinRequestResponse{}, d.save()
}

// sweep forgets what is too old and whom the roster lists by now.
func (d *Desk) sweep(now time.Time) {
	for key, r := range d.requests {
		p, err := peer.Decode(key)
		if err != nil || now.Sub(r.Last) > Life {
			delete(d.requests, key)
			continue
		}
		if _, ok := d.network.Member(p); ok {
			delete(d.requests, key)
		}
	}
}

func (d *Desk) pace(from netip.Prefix) *rate.Limiter {
	l := d.paces[from]
	if l == nil {
		if len(d.paces) >= maxPrefixes {
			clear(d.paces)
		}
		l = rate.NewLimiter(perSecond, burst)
		d.paces[from] = l
	}
	return l
}

// save writes the file whole or not at all; mu is held.
func (d *Desk) save() error {
	if d.path == "" {
		return nil
	}
	data, err := json.MarshalIndent(d.requests, "", "  ")
	if err == nil {
		err = renameio.WriteFile(d.path, append(data, '\n'), 0o600)
	}
	if err != nil {
		d.log.Error("the join requests could not be saved", "file", d.path, "reason", err)
		return fault.New(fault.Unavailable, "ask to join: the request could not be saved here; try another bootstrap")
	}
	return nil
}

// prefixOf is the network that an address counts for.
func prefixOf(address string) netip.Prefix {
	a, err := multiaddr.NewMultiaddr(address)
	if err != nil {
		return netip.Prefix{}
	}
	ip, err := manet.ToIP(a)
	if err != nil {
		return netip.Prefix{}
	}
	at, ok := netip.AddrFromSlice(ip)
	if !ok {
		return netip.Prefix{}
	}
	at = at.Unmap()
	bits := 32
	if at.Is6() {
		bits = 56
	}
	p, _ := at.Prefix(bits)
	return p
}
