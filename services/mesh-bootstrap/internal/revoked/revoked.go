// Package revoked knows the attempts whose job certificates are void before their
// time, as wrk-ork tells them, and refuses them.
//
// The list is on disk, so that it holds when wrk-ork is away at the next start. It
// lags behind wrk-ork by the time of one message, and by as long as wrk-ork cannot
// be reached. It does not check signatures, which the mesh does, and revokes
// nothing by itself.
package revoked

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"math/rand/v2"
	"os"
	"sync"
	"time"

	"github.com/google/renameio/v2"
	"github.com/hashicorp/go-hclog"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

const (
	// attemptsKept bounds the list. wrk-ork forgets after a week too; beyond this
	// many, those that run out first are forgotten.
	attemptsKept = 100_000
	firstPause   = 200 * time.Millisecond
	longPause    = 5 * time.Second
)

// List refuses void certificates. It is safe for concurrent use.
type List struct {
	path  string
	log   hclog.Logger
	clock func() time.Time

	mu    sync.Mutex
	until map[string]time.Time // by attempt: when its certificates have run out by themselves
}

// Open reads the file, if there is one. Clock is time.Now if nil.
func Open(path string, log hclog.Logger, clock func() time.Time) (*List, error) {
	if clock == nil {
		clock = time.Now
	}
	l := &List{path: path, log: log, clock: clock, until: make(map[string]time.Time)}
	raw, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return l, nil
	case err != nil:
		return nil, fault.Wrap(fault.Unavailable, err, "read the list of void certificates %s", path)
	}
	if err := json.Unmarshal(raw, &l.until); err != nil {
		return nil, fault.Wrap(fault.Invalid, err, "the list of void certificates %s is damaged; without it, start again: wrk-ork tells it anew", path)
	}
	return l, nil
}

// Vet is the mesh's question about a caller.
func (l *List) Vet(c mesh.Caller) error {
	if c.Certificate == nil {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, void := l.until[c.Certificate.GetAttemptId()]; void {
		return fault.New(fault.Denied, "attempt %s is over; its certificate is void", c.Certificate.GetAttemptId())
	}
	return nil
}

// add takes what is void and says whether any of it was news.
func (l *List) add(certificates []*orkv1.VoidCertificate) (news bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := l.clock()
	for id, until := range l.until {
		if now.After(until) {
			delete(l.until, id)
		}
	}
	for _, c := range certificates {
		if _, known := l.until[c.GetAttemptId()]; known || now.After(c.GetUntil().AsTime()) {
			continue
		}
		l.until[c.GetAttemptId()], news = c.GetUntil().AsTime(), true
	}
	for len(l.until) > attemptsKept {
		first := ""
		for id, until := range l.until {
			if first == "" || until.Before(l.until[first]) {
				first = id
			}
		}
		delete(l.until, first)
	}
	return news
}

func (l *List) save() error {
	l.mu.Lock()
	raw, err := json.Marshal(l.until)
	l.mu.Unlock()
	if err == nil {
		err = renameio.WriteFile(l.path, raw, 0o600)
	}
	if err != nil {
		return fault.Wrap(fault.Unavailable, err, "write the list of void certificates %s", l.path)
	}
	return nil
}

// Follow listens to wrk-ork until ctx ends, and returns nil then. revet is
// called after news: whoever lost its certificate is cut there. A broken watch is
// opened again after 0.2 to 5 s; it begins with the whole list, so nothing is lost.
func (l *List) Follow(ctx context.Context, ork func() (orkv1.RevocationsClient, error), revet func()) error {
	for pause := firstPause; ; {
		heard, err := l.follow(ctx, ork, revet)
		if ctx.Err() != nil {
			return nil
		}
		if heard {
			pause = firstPause
		}
		l.log.Debug("wrk-ork's list of void certificates is not heard", "error", err)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause/2 + rand.N(pause/2+1)):
		}
		pause = min(2*pause, longPause)
	}
}

func (l *List) follow(ctx context.Context, ork func() (orkv1.RevocationsClient, error), revet func()) (heard bool, err error) {
	client, err := ork()
	if err != nil {
		return false, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := client.WatchVoidCertificates(ctx, &orkv1.WatchVoidCertificatesRequest{})
	if err != nil {
		return false, err
	}
	for {
		m, err := stream.Recv()
		if err != nil {
			return heard, err
		}
		heard = true
		if !l.add(m.GetCertificates()) {
			continue
		}
		revet()
		if err := l.save(); err != nil {
			l.log.Error("void certificates could not be kept for the next start", "error", err)
		}
	}
}
