// Package cards is the in-memory registry of signed cards that bootstraps and ork
// answer: who is where and what it can do, as the holders themselves say.
//
// A key may put its own card only. A card counts for its TTL from receipt, so
// clocks do not matter; of two, the higher sequence counts, and a tombstone
// forgets the key at once and keeps older cards from coming back. Everything is
// bounded: a card's size, cards in all, the pace of one key.
//
// It does not store anything on disk, does not tell other registries and does not
// believe what a card says. The methods' rights decide who may ask; of those, agents
// are told of wrk-ork alone.
package cards

import (
	"bytes"
	"context"
	"slices"
	"sync"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	"github.com/cosmicac/cosmicac/pkg/trust"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	"golang.org/x/time/rate"
)

// Bounds of a registry.
const (
	// MaxCardBytes bounds one envelope.
	MaxCardBytes = 8 << 10
	// MaxCards bounds all keys together; the last memberReserve places are for
	// members, so that agents cannot crowd daemons out.
	MaxCards      = 20000
	memberReserve = 1000
	// MinTTL and MaxTTL bound what a card asks for.
	MinTTL, MaxTTL = 10 * time.Second, 5 * time.Minute
	// maxAnswerBytes keeps a list under the limit of one message.
	maxAnswerBytes = 3 << 20
	// putsPerSecond and putBurst pace one key.
	putsPerSecond, putBurst = 2, 20
)

// Registry answers mesh.v1.Cards. It is safe for concurrent use.
type Registry struct {
	meshv1.UnimplementedCardsServer
	network *trust.Network
	clock   func() time.Time

	mu      sync.Mutex
	entries map[string]*entry
	places  int // MaxCards, smaller in tests
	page    int // maxAnswerBytes, smaller in tests
	reserve int
	swept   time.Time
	watch   map[chan struct{}]struct{}
}

type entry struct {
	card     *meshv1.Card
	envelope []byte
	until    time.Time
	pace     *rate.Limiter
}

// New makes an empty registry. The clock's monotonic part times the cards; nil is
// time.Now.
func New(network *trust.Network, clock func() time.Time) *Registry {
	if clock == nil {
		clock = time.Now
	}
	return &Registry{network: network, clock: clock, entries: make(map[string]*entry), places: MaxCards, page: maxAnswerBytes, reserve: memberReserve,
		watch: make(map[chan struct{}]struct{})}
}

// PutCard takes the caller's own card.
func (r *Registry) PutCard(ctx context.Context, request *meshv1.PutCardRequest) (*meshv1.PutCardResponse, error) {
	caller, ok := mesh.CallerFrom(ctx)
	if !ok {
		return nil, fault.New(fault.Denied, "put a card: the caller is not known")
	}
	if err := r.Put(caller, request.GetCardEnvelope()); err != nil {
		return nil, err
	}
	return &meshv1.PutCardResponse{}, nil
}

// Put is PutCard for a caller known in another way, such as a card that came
// with a report.
func (r *Registry) Put(caller mesh.Caller, envelope []byte) error {
	if len(envelope) > MaxCardBytes {
		return fault.New(fault.TooLarge, "put a card: %d bytes, at most %d", len(envelope), MaxCardBytes)
	}
	card, err := r.network.CheckCard(envelope, r.clock())
	if err != nil {
		return fault.Wrap(fault.KindOf(err), err, "put a card")
	}
	if card.GetKey() != caller.ID.String() {
		return fault.New(fault.Denied, "put a card: it is of %s, put by %s", card.GetKey(), caller.ID)
	}
	if c := caller.Certificate; caller.Class == meshv1.Class_CLASS_AGENT &&
		(card.GetRole() != meshv1.Role_ROLE_UNSPECIFIED || card.GetJobId() != c.GetJobId() || card.GetAttemptId() != c.GetAttemptId()) {
		return fault.New(fault.Denied, "put a card: it names another job, attempt or role than the certificate of %s", caller.ID)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.clock()
	r.sweep(now)
	e := r.entries[card.GetKey()]
	if e == nil {
		places := r.places
		if caller.Class != meshv1.Class_CLASS_MEMBER {
			places -= r.reserve
		}
		if len(r.entries) >= places {
			return fault.New(fault.Exhausted, "put a card: the registry holds %d, its bound", len(r.entries))
		}
		e = &entry{pace: rate.NewLimiter(putsPerSecond, putBurst)}
	}
	if !e.pace.AllowN(now, 1) {
		return fault.New(fault.Exhausted, "put a card: at most %d a second of one key", putsPerSecond)
	}
	if e.card != nil && now.Before(e.until) {
		switch {
		case card.GetSequence() < e.card.GetSequence():
			return fault.New(fault.Conflict, "put a card: sequence %d, a newer one with %d is held", card.GetSequence(), e.card.GetSequence())
		case card.GetSequence() == e.card.GetSequence() && !bytes.Equal(envelope, e.envelope):
			return fault.New(fault.Conflict, "put a card: another one with sequence %d is held", card.GetSequence())
		}
	}
	e.card, e.envelope = card, bytes.Clone(envelope)
	e.until = now.Add(min(max(time.Duration(card.GetTtlSeconds())*time.Second, MinTTL), MaxTTL))
	r.entries[card.GetKey()] = e
	for c := range r.watch {
		select {
		case c <- struct{}{}:
		default:
		}
	}
	return nil
}

// ListCards returns the live cards that match every filter that is set, by key,
// as many as fit one message. Cards put between two pages may be missed. An agent is
// a tenant's: it learns where wrk-ork is, and of nobody else.
func (r *Registry) ListCards(ctx context.Context, request *meshv1.ListCardsRequest) (*meshv1.ListCardsResponse, error) {
	if c, ok := mesh.CallerFrom(ctx); ok && c.Class != meshv1.Class_CLASS_MEMBER && request.GetRole() != meshv1.Role_ROLE_ORK {
		return nil, fault.New(fault.Denied, "list cards: an agent may ask for role ork alone").
			With(fault.Detail{Field: "role", Rule: "must be ork when an agent asks"})
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.clock()
	matches := func(key string, e *entry) bool {
		return e.live(now) && key > request.GetAfterKey() &&
			(request.GetKey() == "" || request.GetKey() == key) &&
			(request.GetRole() == meshv1.Role_ROLE_UNSPECIFIED || request.GetRole() == e.card.GetRole()) &&
			(request.GetJobId() == "" || request.GetJobId() == e.card.GetJobId())
	}
	var keys []string
	if key := request.GetKey(); key != "" {
		if e := r.entries[key]; e != nil && matches(key, e) {
			keys = []string{key}
		}
	} else {
		for key, e := range r.entries {
			if matches(key, e) {
				keys = append(keys, key)
			}
		}
		slices.Sort(keys)
	}
	answer := &meshv1.ListCardsResponse{}
	size := 0
	for i, key := range keys {
		envelope := r.entries[key].envelope
		if size += len(envelope) + 8; size > r.page {
			answer.LastKey = keys[i-1]
			break
		}
		answer.CardEnvelopes = append(answer.CardEnvelopes, envelope)
	}
	return answer, nil
}

// Get returns a key's live card and its envelope. They must not be changed.
func (r *Registry) Get(key string) (*meshv1.Card, []byte, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.entries[key]
	if e == nil || !e.live(r.clock()) {
		return nil, nil, false
	}
	return e.card, e.envelope, true
}

// Len is how many live cards are held.
func (r *Registry) Len() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	now, n := r.clock(), 0
	for _, e := range r.entries {
		if e.live(now) {
			n++
		}
	}
	return n
}

// Subscribe returns a channel that gets a signal after each card taken; signals
// are coalesced. Expiry gives none. Cancel ends it.
func (r *Registry) Subscribe() (changes <-chan struct{}, cancel func()) {
	c := make(chan struct{}, 1)
	r.mu.Lock()
	r.watch[c] = struct{}{}
	r.mu.Unlock()
	return c, func() {
		r.mu.Lock()
		delete(r.watch, c)
		r.mu.Unlock()
	}
}

func (e *entry) live(now time.Time) bool { return now.Before(e.until) && !e.card.GetTombstone() }

// sweep drops what has run out, once a second at most.
func (r *Registry) sweep(now time.Time) {
	if now.Sub(r.swept) < time.Second && len(r.entries) < r.places {
		return
	}
	r.swept = now
	for k, e := range r.entries {
		if !now.Before(e.until) {
			delete(r.entries, k)
		}
	}
}
