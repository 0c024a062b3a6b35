// Package keys decides whether an API key is good and holds its limits.
//
// The table comes from app-node as a whole and is swapped, never edited. While
// app-node is away the last one stays in force; before the first one came every
// key is refused. The table and the HMAC key live in memory only, and no key's
// text is kept or printed here.
//
// Limits count in this process alone: with N proxies a key gets up to N times
// its limit. The package does not know projects' endpoints and does not speak HTTP.
package keys

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cosmicac/cosmicac/pkg/apikey"
	appv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/app/v1"
)

// Key is who a good key stands for.
type Key struct {
	ID        string
	ProjectID string
	UserID    string

	requestsPerMinute uint32
	concurrent        uint32
}

// Verdict is the outcome of a check. Closed list.
type Verdict int

const (
	// Good: the key may be used now.
	Good Verdict = iota
	// Malformed: the text cannot be a key; it was cut, changed or is of another product.
	Malformed
	// Unknown: no such key.
	Unknown
	// Revoked and Expired are told only to who holds the secret.
	Revoked
	Expired
	// NoTable: app-node has not yet said which keys are good.
	NoTable
)

// Table is the newest set of keys and what they use at the moment.
// It is safe for concurrent use; checks take no lock.
type Table struct {
	now     func() time.Time
	current atomic.Pointer[table]
	// waiting counts calls of CheckSoon that wait for a newer table.
	waiting atomic.Int32

	mu     sync.Mutex
	limits map[string]*limit // by key id
}

type table struct {
	// replaced is closed when a newer table is in force.
	replaced chan struct{}
	hmacKey  []byte
	keys     map[string]entry // by public id
	since    time.Time
}

type entry struct {
	key     Key
	mac     []byte
	expires time.Time // zero for never
	revoked bool
}

// New makes a table that refuses every key until the first Replace.
func New(now func() time.Time) *Table {
	return &Table{now: now, limits: map[string]*limit{}}
}

// Replace puts a new table in force at once. What keys use at the moment is kept.
func (t *Table) Replace(r *appv1.WatchApiKeysResponse) {
	next := &table{
		hmacKey:  append([]byte(nil), r.GetHmacKey()...),
		keys:     make(map[string]entry, len(r.GetKeys())),
		since:    t.now(),
		replaced: make(chan struct{}),
	}
	known := make(map[string]bool, len(r.GetKeys()))
	for _, k := range r.GetKeys() {
		e := entry{
			key: Key{ID: k.GetId(), ProjectID: k.GetProjectId(), UserID: k.GetUserId(),
				requestsPerMinute: k.GetRequestsPerMinute(), concurrent: k.GetConcurrentRequests()},
			mac:     append([]byte(nil), k.GetHmac()...),
			revoked: k.GetRevoked(),
		}
		if k.GetExpiresAt() != nil {
			e.expires = k.GetExpiresAt().AsTime()
		}
		next.keys[k.GetPublicId()] = e
		known[k.GetId()] = true
	}
	if old := t.current.Swap(next); old != nil {
		close(old.replaced)
	}

	t.mu.Lock()
	defer t.mu.Unlock()
	for id, l := range t.limits {
		if !known[id] && l.running == 0 {
			delete(t.limits, id)
		}
	}
}

// Status tells how many keys are in force and since when; zero time for never.
func (t *Table) Status() (keys int, since time.Time) {
	c := t.current.Load()
	if c == nil {
		return 0, time.Time{}
	}
	return len(c.keys), c.since
}

// Check decides about the full text of a key. The time it takes tells nothing
// about stored secrets, and an unknown key costs the same as a wrong one.
func (t *Table) Check(full string) (Key, Verdict) {
	c := t.current.Load()
	if c == nil || len(c.hmacKey) == 0 {
		return Key{}, NoTable
	}
	publicID, err := apikey.Parse(full)
	if err != nil {
		return Key{}, Malformed
	}
	e := c.keys[publicID]
	if !apikey.Equal(e.mac, apikey.MAC(c.hmacKey, full)) {
		return Key{}, Unknown
	}
	switch {
	case e.revoked:
		return Key{}, Revoked
	case !e.expires.IsZero() && !t.now().Before(e.expires):
		return Key{}, Expired
	}
	return e.key, Good
}

// A key that was made a moment ago may be used before the table with it is here.
const (
	newKeyWait     = 250 * time.Millisecond
	maximumWaiting = 64
)

// CheckSoon is Check, but gives a key that is not known (yet) the time of one new
// table, at most a quarter of a second. Beyond 64 waiting calls it does not wait.
func (t *Table) CheckSoon(ctx context.Context, full string) (Key, Verdict) {
	deadline := time.NewTimer(newKeyWait)
	defer deadline.Stop()
	for {
		c := t.current.Load()
		key, verdict := t.Check(full)
		if verdict != Unknown || c == nil {
			return key, verdict
		}
		if t.waiting.Add(1) > maximumWaiting {
			t.waiting.Add(-1)
			return key, verdict
		}
		var over bool
		select {
		case <-c.replaced:
		case <-deadline.C:
			over = true
		case <-ctx.Done():
			over = true
		}
		t.waiting.Add(-1)
		if over {
			return key, verdict
		}
	}
}

// Watch feeds the table from a stream of whole tables until the stream ends.
func (t *Table) Watch(ctx context.Context, client appv1.ApiKeysClient, received func()) error {
	stream, err := client.WatchApiKeys(ctx, &appv1.WatchApiKeysRequest{})
	if err != nil {
		return err
	}
	for {
		r, err := stream.Recv()
		if err != nil {
			return err
		}
		t.Replace(r)
		received()
	}
}
