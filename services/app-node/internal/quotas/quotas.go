// Package quotas tells the orchestrator how many GPUs and how much of volumes each project may hold. The
// setting is in package store; the orchestrator admits by it. It counts nothing
// and refuses nothing.
package quotas

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/hashicorp/go-hclog"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	"github.com/cosmicac/cosmicac/services/app-node/internal/store"
)

const (
	atOnce     = 1000
	firstPause = 200 * time.Millisecond
	longPause  = 5 * time.Second
	// retellEvery is how often all is told again, to an orchestrator that may have
	// been restored from an older backup.
	retellEvery = 10 * time.Minute
)

// Teller tells every quota at its start, after a change and every ten minutes. It
// repeats until the orchestrator has taken it, after 0.2 to 5 s: nothing is lost,
// and what is told twice changes nothing.
type Teller struct {
	store *store.Store
	put   func(context.Context, []*orkv1.ProjectQuota) error
	log   hclog.Logger
	wake  chan struct{}
}

// NewTeller makes one; Run keeps it going. put hands quotas to the orchestrator.
func NewTeller(s *store.Store, put func(context.Context, []*orkv1.ProjectQuota) error, log hclog.Logger) *Teller {
	return &Teller{store: s, put: put, log: log, wake: make(chan struct{}, 1)}
}

// Changed says that a quota may have changed. It does not block.
func (t *Teller) Changed() {
	select {
	case t.wake <- struct{}{}:
	default:
	}
}

// Tell tells one quota now. When that fails it is told later, like every other.
func (t *Teller) Tell(ctx context.Context, q store.Quota) error {
	err := t.put(ctx, []*orkv1.ProjectQuota{Wire(q)})
	if err != nil {
		t.Changed()
	}
	return err
}

// Run tells until ctx ends. It returns nil then.
func (t *Teller) Run(ctx context.Context) error {
	again := time.NewTicker(retellEvery)
	defer again.Stop()
	pause := firstPause
	for {
		err := t.tell(ctx)
		if ctx.Err() != nil {
			return nil
		}
		var wait <-chan time.Time
		if err == nil {
			pause = firstPause
		} else {
			if pause == firstPause {
				t.log.Warn("wrk-ork could not be told the projects' quotas; it goes on with those that it knows", "error", err)
			}
			wait = time.After(pause/2 + rand.N(pause/2+1))
			pause = min(2*pause, longPause)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-t.wake:
		case <-wait:
		case <-again.C:
		}
	}
}

func (t *Teller) tell(ctx context.Context) error {
	all, err := t.store.Quotas(ctx)
	for err == nil && len(all) > 0 {
		part := make([]*orkv1.ProjectQuota, min(len(all), atOnce))
		for i := range part {
			part[i] = Wire(all[i])
		}
		all = all[len(part):]
		err = t.put(ctx, part)
	}
	return err
}

// Wire is a quota in the orchestrator's words.
func Wire(q store.Quota) *orkv1.ProjectQuota {
	return &orkv1.ProjectQuota{ProjectId: q.ProjectID, Revision: q.Revision, Unlimited: q.Unlimited, MaximumGpus: q.MaximumGPUs, MaximumVolumeGib: q.MaximumVolumeGiB}
}
