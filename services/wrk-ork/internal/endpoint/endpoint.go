// Package endpoint keeps the table of Managed Inference endpoints that proxies
// route by: one endpoint a job, for as long as its record lasts.
//
// Guarantees: a watcher gets the whole table at once and again after changes,
// which are merged to a few a second; the newest always arrives. A replica is
// ready only when its attempt runs, its agent said ready and has not been lost
// since; one that is ending is never ready. The table is derived: it stores
// nothing and survives a restart by being built again.
package endpoint

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cosmicac/cosmicac/pkg/fault"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/notice"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/record"
)

// spacing is the least time between two tables to one watcher.
const spacing = 200 * time.Millisecond

// Of is the endpoint of an inference job.
func Of(j *job.Job) *orkv1.Endpoint {
	inf := j.Spec.GetInference()
	e := &orkv1.Endpoint{
		Id: j.EndpointID, JobId: j.ID, ProjectId: j.Owner.GetProjectId(),
		ModelNames: inf.GetServedNames(), RequireAuthorization: inf.GetRequireAuthorization(),
		JobState: j.State, Message: j.Message, CreatedAt: timestamppb.New(j.CreatedAt),
	}
	if len(e.ModelNames) == 0 {
		e.ModelNames = []string{inf.GetModel()}
	}
	for _, r := range j.Replicas {
		a := r.Newest()
		e.Replicas = append(e.Replicas, &orkv1.EndpointReplica{
			ReplicaId: r.ID, AttemptId: a.ID, AgentKey: a.AgentKey, AgentAddresses: a.AgentAddresses, State: a.State,
			Ready:    a.State == orkv1.State_STATE_RUNNING && a.AgentReady && !a.Fenced && !a.Draining.Set(),
			Draining: a.State == orkv1.State_STATE_STOPPING || a.Draining.Set(),
		})
	}
	return e
}

// Board is the table. It answers orkv1.Endpoints.
type Board struct {
	orkv1.UnimplementedEndpointsServer
	store *record.Store
	hub   *notice.Hub

	mu    sync.Mutex
	table map[string]*orkv1.Endpoint // by job id
	wake  chan struct{}              // closed and replaced at each change
	ready chan struct{}              // closed once the table is whole
}

// New makes an empty board; Run fills it.
func New(store *record.Store, hub *notice.Hub) *Board {
	return &Board{store: store, hub: hub, table: make(map[string]*orkv1.Endpoint), wake: make(chan struct{}), ready: make(chan struct{})}
}

// Run builds the table and follows changes until ctx ends. A record that cannot
// be read leaves the table as it was, and is read again.
func (b *Board) Run(ctx context.Context) error {
	sub := b.hub.Subscribe()
	defer sub.Close()
	var pending []string
	whole := false
	for {
		if !whole {
			whole = b.fill(ctx)
		} else {
			pending = b.update(ctx, pending)
		}
		pause := time.Hour
		if len(pending) > 0 || !whole {
			pause = time.Second
		}
		again := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			again.Stop()
			return nil
		case <-again.C:
		case <-sub.Ready():
			for _, id := range sub.Take() {
				if !slices.Contains(pending, id) {
					pending = append(pending, id)
				}
			}
		}
		again.Stop()
	}
}

func (b *Board) fill(ctx context.Context) bool {
	jobs, err := b.store.All(ctx, nil)
	if err != nil {
		return false
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, j := range jobs {
		if j.Inference() {
			b.table[j.ID] = Of(j)
		}
	}
	close(b.ready)
	b.changed()
	return true
}

// update reads the jobs and returns those that could not be read.
func (b *Board) update(ctx context.Context, ids []string) (left []string) {
	for _, id := range ids {
		j, err := b.store.Job(ctx, id)
		switch {
		case fault.KindOf(err) == fault.NotFound:
			b.set(id, nil)
		case err != nil:
			left = append(left, id)
		case j.Inference():
			b.set(id, Of(j))
		}
	}
	return left
}

func (b *Board) set(id string, e *orkv1.Endpoint) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if e == nil {
		if b.table[id] != nil {
			delete(b.table, id)
			b.changed()
		}
		return
	}
	if !proto.Equal(e, b.table[id]) {
		b.table[id] = e
		b.changed()
	}
}

// changed wakes watchers; the caller holds the lock.
func (b *Board) changed() {
	close(b.wake)
	b.wake = make(chan struct{})
}

// snapshot is the table now, by endpoint id, and what tells of the next change.
func (b *Board) snapshot() ([]*orkv1.Endpoint, <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	list := make([]*orkv1.Endpoint, 0, len(b.table))
	for _, e := range b.table {
		list = append(list, e)
	}
	slices.SortFunc(list, func(a, b *orkv1.Endpoint) int { return cmp.Compare(a.Id, b.Id) })
	return list, b.wake
}

// WatchEndpoints implements orkv1.EndpointsServer. It sends nothing before the
// table is whole: an empty table would mean "no such model" to a proxy.
func (b *Board) WatchEndpoints(_ *orkv1.WatchEndpointsRequest, stream orkv1.Endpoints_WatchEndpointsServer) error {
	ctx := stream.Context()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-b.ready:
	}
	for {
		list, wake := b.snapshot()
		if err := stream.Send(&orkv1.WatchEndpointsResponse{Endpoints: list}); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-wake:
		}
		timer := time.NewTimer(spacing)
		select {
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		case <-timer.C:
		}
	}
}
