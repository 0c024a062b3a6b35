package claim

import (
	"context"
	"errors"
	"sort"
	"sync"
	"time"

	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/capacity"
)

// Count gives the rack's count with these claims, from what the cluster shows now.
type Count func(claims []capacity.Claim) *capacity.Rack

// ErrNotWritten is joined to an error of a write that certainly left nothing in
// the cluster. Any other error leaves the question open.
var ErrNotWritten = errors.New("nothing was written")

// Book holds the claims of a rack and grants new ones, one at a time: each check
// sees every claim before it, also one whose anchor is still being written. Safe
// for concurrent use.
type Book struct {
	count Count
	now   func() time.Time

	grant sync.Mutex // the serial section: a check, and the entry of its claim

	mu     sync.Mutex
	claims map[string]*entry
}

type entry struct {
	claim capacity.Claim
	// open is since when it is not known whether the anchor was written; zero
	// once it was seen.
	open time.Time
	// writing is closed when the write under way has ended; nil for none.
	writing chan struct{}
}

// NewBook makes an empty book. Restore what the anchors say before granting.
func NewBook(count Count, now func() time.Time) *Book {
	return &Book{count: count, now: now, claims: map[string]*entry{}}
}

// Grant checks the record and has its anchor written. Checks wait for each other;
// writes do not, save those of one attempt. A write that fails without
// ErrNotWritten keeps the claim, open, until Restore or Release. An attempt that
// already holds a claim is written again without a check.
func (b *Book) Grant(ctx context.Context, rec *Record, write func(context.Context) error) (Refusal, error) {
	again, done, refusal, err := b.enter(ctx, rec)
	if err != nil || !refusal.OK() {
		return refusal, err
	}
	defer done()
	err = write(ctx)
	switch {
	case err == nil:
		b.mu.Lock()
		if e := b.claims[rec.AttemptID]; e != nil { // else it was seen absent meanwhile
			e.open = time.Time{}
		}
		b.mu.Unlock()
	case errors.Is(err, ErrNotWritten) && !again:
		b.Release(rec.AttemptID)
	}
	return Refusal{}, err
}

// enter books a claim whose anchor is to be written, once no write of the same
// attempt is under way. Done must be called after the write.
func (b *Book) enter(ctx context.Context, rec *Record) (again bool, done func(), refusal Refusal, err error) {
	b.grant.Lock()
	defer b.grant.Unlock()
	for {
		if err := ctx.Err(); err != nil {
			return false, nil, Refusal{}, errors.Join(err, ErrNotWritten)
		}
		b.mu.Lock()
		e := b.claims[rec.AttemptID]
		var busy chan struct{}
		if e != nil {
			busy = e.writing
		}
		b.mu.Unlock()
		again = e != nil
		if busy == nil {
			break
		}
		b.grant.Unlock()
		select {
		case <-busy:
		case <-ctx.Done():
		}
		b.grant.Lock()
	}
	if !again {
		if refusal := Check(b.count(b.Claims()), rec); !refusal.OK() {
			return false, nil, refusal, nil
		}
		b.put(rec.Claim(), b.now())
	}
	writing := make(chan struct{})
	b.mu.Lock()
	defer b.mu.Unlock()
	if e := b.claims[rec.AttemptID]; e != nil {
		e.writing = writing
	}
	return again, func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		if e := b.claims[rec.AttemptID]; e != nil && e.writing == writing {
			e.writing = nil
		}
		close(writing)
	}, Refusal{}, nil
}

// Restore enters a claim whose anchor exists.
func (b *Book) Restore(c capacity.Claim) { b.put(c, time.Time{}) }

// Release ends a claim. Only for one whose attempt was seen absent.
func (b *Book) Release(attempt string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.claims, attempt)
}

func (b *Book) put(c capacity.Claim, open time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	next := &entry{claim: c, open: open}
	if was := b.claims[c.AttemptID]; was != nil {
		next.writing = was.writing
	}
	b.claims[c.AttemptID] = next
}

// Holds says whether an attempt has a claim.
func (b *Book) Holds(attempt string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	_, ok := b.claims[attempt]
	return ok
}

// Open lists attempts of which it has not been known for this long whether
// their anchor was written.
func (b *Book) Open(longerThan time.Duration) []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	var out []string
	for id, e := range b.claims {
		if !e.open.IsZero() && b.now().Sub(e.open) >= longerThan {
			out = append(out, id)
		}
	}
	sort.Strings(out)
	return out
}

// Claims lists all claims, by attempt id.
func (b *Book) Claims() []capacity.Claim {
	b.mu.Lock()
	defer b.mu.Unlock()
	out := make([]capacity.Claim, 0, len(b.claims))
	for _, e := range b.claims {
		out = append(out, e.claim)
	}
	sort.Slice(out, func(i, j int) bool { return out[i].AttemptID < out[j].AttemptID })
	return out
}

// Rack is the count of the moment with the book's claims.
func (b *Book) Rack() *capacity.Rack { return b.count(b.Claims()) }
