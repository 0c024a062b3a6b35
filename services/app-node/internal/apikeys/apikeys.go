// Package apikeys makes, lists and ends the API keys of inference requests, and
// keeps the ledger of what was used under them.
//
// A key is shown to its user once. What is kept is HMAC-SHA256 of it, under a key
// of this installation. The table that proxies get holds only keys that work.
//
// The package does not check who is asking beyond a user id, does not serve the
// mesh (package peers does), and does not judge inference requests (proxies do).
package apikeys

import (
	"context"
	"io"
	"sync"
	"time"

	"github.com/cosmicac/cosmicac/pkg/apikey"
	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/id"
	"github.com/cosmicac/cosmicac/services/app-node/internal/account"
	"github.com/cosmicac/cosmicac/services/app-node/internal/store"
)

// MaximumActive is the most keys that work at a time for one user.
const MaximumActive = 100

// MaximumBuckets bounds one answer about usage.
const MaximumBuckets = 10_000

// Options are the parts of Keys.
type Options struct {
	Store   *store.Store
	HMACKey []byte
	IDs     *id.Source
	Random  io.Reader
	Now     func() time.Time
}

// Keys is safe for concurrent use.
type Keys struct {
	Options

	mu      sync.Mutex
	watches map[chan struct{}]struct{}
}

// New makes Keys.
func New(o Options) *Keys {
	return &Keys{Options: o, watches: map[chan struct{}]struct{}{}}
}

// Create makes a key for a user's project. The full key is returned here and
// nowhere else again. A zero expiry is none.
func (k *Keys) Create(ctx context.Context, userID, projectID, name string, expires time.Time) (row store.APIKey, full string, err error) {
	if err := account.CheckName("name", name); err != nil {
		return row, "", err
	}
	now := k.Now().UTC().Truncate(time.Millisecond)
	if !expires.IsZero() && !expires.After(now) {
		return row, "", fault.New(fault.Invalid, "expires_at is in the past").
			With(fault.Detail{Field: "expires_at", Rule: "must be in the future"})
	}
	if expires.After(now.AddDate(100, 0, 0)) {
		return row, "", fault.New(fault.Invalid, "expires_at is too far away").
			With(fault.Detail{Field: "expires_at", Rule: "must be within 100 years; leave it out for a key that does not expire"})
	}
	full, publicID, err := apikey.New(k.Random)
	if err != nil {
		return row, "", err
	}
	row = store.APIKey{ID: k.IDs.New(id.APIKey), PublicID: publicID, HMAC: apikey.MAC(k.HMACKey, full), Name: name,
		UserID: userID, ProjectID: projectID, CreatedAt: now, UpdatedAt: now}
	if !expires.IsZero() {
		row.ExpiresAt = expires.UTC().Truncate(time.Millisecond)
	}
	if err := k.Store.AddAPIKey(ctx, row, MaximumActive); err != nil {
		return store.APIKey{}, "", err
	}
	k.Changed()
	return row, full, nil
}

// Get finds a user's key.
func (k *Keys) Get(ctx context.Context, userID, keyID string) (store.APIKey, error) {
	return k.Store.APIKey(ctx, userID, keyID)
}

// List lists a page of a user's keys and how many match in all.
func (k *Keys) List(ctx context.Context, q store.KeyQuery) ([]store.APIKey, int, error) {
	q.Now = k.Now()
	return k.Store.APIKeys(ctx, q)
}

// Rename gives an active key another name.
func (k *Keys) Rename(ctx context.Context, userID, keyID, name string) (store.APIKey, error) {
	if err := account.CheckName("name", name); err != nil {
		return store.APIKey{}, err
	}
	return k.Store.RenameAPIKey(ctx, userID, keyID, name, k.Now())
}

// Revoke ends a key; connected proxies hear of it at once.
func (k *Keys) Revoke(ctx context.Context, userID, keyID string) (store.APIKey, error) {
	row, err := k.Store.RevokeAPIKey(ctx, userID, keyID, k.Now())
	if err == nil {
		k.Changed()
	}
	return row, err
}

// Status is what a key is at an instant.
func Status(row store.APIKey, now time.Time) store.KeyStatus {
	switch {
	case !row.RevokedAt.IsZero():
		return store.KeyRevoked
	case !row.ExpiresAt.IsZero() && !row.ExpiresAt.After(now):
		return store.KeyExpired
	}
	return store.KeyActive
}

// defaultRange is how far back usage goes when no start is given.
var defaultRange = map[store.Granularity]time.Duration{
	store.Hour: 24 * time.Hour, store.Day: 30 * 24 * time.Hour, store.Week: 12 * 7 * 24 * time.Hour, store.Month: 365 * 24 * time.Hour,
}

// Usage sums what a user's keys used. No ids means every active key. Another
// user's key is not found. Zero times mean now and a range that fits the granularity.
func (k *Keys) Usage(ctx context.Context, userID string, q store.UsageQuery) ([]store.UsageBucket, error) {
	if q.End.IsZero() {
		q.End = k.Now()
	}
	if q.Start.IsZero() {
		q.Start = q.End.Add(-defaultRange[q.Granularity])
	}
	if !q.Start.Before(q.End) {
		return nil, fault.New(fault.Invalid, "ts_start is not before ts_end").
			With(fault.Detail{Field: "ts_start", Rule: "must be before ts_end"})
	}
	if len(q.APIKeyIDs) == 0 {
		rows, _, err := k.List(ctx, store.KeyQuery{UserID: userID, Status: store.KeyActive, SortBy: "created_at", Limit: MaximumActive})
		if err != nil {
			return nil, err
		}
		for _, row := range rows {
			q.APIKeyIDs = append(q.APIKeyIDs, row.ID)
		}
	} else {
		for _, keyID := range q.APIKeyIDs {
			if _, err := k.Store.APIKey(ctx, userID, keyID); err != nil {
				return nil, err
			}
		}
	}
	q.Limit = MaximumBuckets
	return k.Store.Usage(ctx, q)
}

// Record adds records of a proxy to the ledger, each once, and says how many were new.
func (k *Keys) Record(ctx context.Context, records []store.UsageRecord) (int, error) {
	return k.Store.RecordUsage(ctx, records, k.Now())
}

// Table lists every key that works now.
func (k *Keys) Table(ctx context.Context) ([]store.APIKey, error) {
	return k.Store.AllAPIKeys(ctx, k.Now())
}

// Changed tells every watch that the table may be another one. It never blocks.
func (k *Keys) Changed() {
	k.mu.Lock()
	defer k.mu.Unlock()
	for ch := range k.watches {
		select {
		case ch <- struct{}{}:
		default: // one signal waits already; it covers this change too
		}
	}
}

// Watch returns a channel that gets one signal after one or more changes of the
// table. Signals are merged, none is lost. The caller calls stop when done.
func (k *Keys) Watch() (signal <-chan struct{}, stop func()) {
	ch := make(chan struct{}, 1)
	k.mu.Lock()
	k.watches[ch] = struct{}{}
	k.mu.Unlock()
	return ch, func() {
		k.mu.Lock()
		delete(k.watches, ch)
		k.mu.Unlock()
	}
}
