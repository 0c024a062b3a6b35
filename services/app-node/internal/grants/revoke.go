package grants

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/hashicorp/go-hclog"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cosmicac/cosmicac/pkg/trust"
	agentv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	"github.com/cosmicac/cosmicac/services/app-node/internal/store"
)

const (
	// Longest is the longest that a grant may be good, whatever is configured.
	Longest = 7 * 24 * time.Hour
	// Remembered is how long after a revocation the last grant before it has run out.
	Remembered = Longest + 2*trust.Skew

	floorsAtOnce = 1000
	// retellEvery is how often all is told again, to an orchestrator that may have
	// been restored from an older backup.
	retellEvery = 10 * time.Minute
	firstPause  = 200 * time.Millisecond
	longPause   = 5 * time.Second
)

// Revocations tells wrk-ork, which tells the agents, what became void in the
// store. It repeats until wrk-ork has taken it, after 0.2 to 5 s, over restarts
// of either: nothing is lost, and what is told twice changes nothing.
type Revocations struct {
	store *store.Store
	put   func(context.Context, []*orkv1.ProjectGrantFloor) (highest uint64, err error)
	log   hclog.Logger
	wake  chan struct{}
}

// NewRevocations makes one; Run keeps it going. put hands floors to wrk-ork and
// returns the highest epoch that it holds.
func NewRevocations(s *store.Store, put func(context.Context, []*orkv1.ProjectGrantFloor) (uint64, error), log hclog.Logger) *Revocations {
	return &Revocations{store: s, put: put, log: log, wake: make(chan struct{}, 1)}
}

// Changed says that something may have been revoked. It does not block.
func (r *Revocations) Changed() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// Run tells until ctx ends. It returns nil then.
func (r *Revocations) Run(ctx context.Context) error {
	again := time.NewTicker(retellEvery)
	defer again.Stop()
	told, pause := uint64(0), firstPause
	for all := true; ; {
		epoch, err := r.tell(ctx, told, all)
		if ctx.Err() != nil {
			return nil
		}
		var wait <-chan time.Time
		if err == nil {
			told, pause, all = epoch, firstPause, false
		} else {
			if pause == firstPause {
				r.log.Warn("wrk-ork could not be told what was revoked; open shells of revoked users go on until it is", "error", err)
			}
			wait = time.After(pause/2 + rand.N(pause/2+1))
			pause = min(2*pause, longPause)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-r.wake:
		case <-wait:
		case <-again.C:
			told, all = 0, true
		}
	}
}

// tell hands over what was revoked above an epoch. always makes a call even
// when there is nothing, to hear what wrk-ork holds.
func (r *Revocations) tell(ctx context.Context, above uint64, always bool) (epoch uint64, err error) {
	floors, epoch, err := r.store.GrantFloors(ctx, above)
	if err != nil {
		return 0, err
	}
	for always || len(floors) > 0 {
		always = false
		part := floors[:min(len(floors), floorsAtOnce)]
		floors = floors[len(part):]
		request := make([]*orkv1.ProjectGrantFloor, 0, len(part))
		for _, f := range part {
			request = append(request, &orkv1.ProjectGrantFloor{ProjectId: f.ProjectID, Floor: &agentv1.GrantFloor{
				UserId: f.UserID, MinimumEpoch: f.Epoch, Until: timestamppb.New(f.RaisedAt.Add(Remembered)),
			}})
		}
		highest, err := r.put(ctx, request)
		if err != nil {
			return 0, err
		}
		if highest > epoch {
			r.log.Warn("wrk-ork knows of later revocations: this app-node was restored from an older backup and counts on from there", "epoch", highest)
			if err := r.store.LiftGrantEpoch(ctx, highest); err != nil {
				return 0, err
			}
			epoch = highest
		}
	}
	return epoch, nil
}
