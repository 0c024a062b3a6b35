// Package report makes the rack's whole report and hands the newest to whoever
// watches. Changes within a fifth of a second are merged; a report that says
// the same as the one before is sent only every ten seconds. A slow watcher
// misses reports in between and never the newest.
//
// It decides nothing and changes nothing: the count is package capacity's, the
// attempts are package graph's.
package report

import (
	"context"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/capacity"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/cluster"
)

// Times of a Hub.
const (
	mergeTime = 200 * time.Millisecond
	idleTime  = 10 * time.Second
)

// Sources are where a report comes from.
type Sources struct {
	RackID, Version string
	// Synced says whether absence in the report means anything.
	Synced   func() bool
	Rack     func() *capacity.Rack
	Statuses func() []*workerv1.AttemptStatus
	DiskJobs func() []string
	Volumes  func() []*workerv1.VolumeStatus
	Fault    func() cluster.Fault
}

// Hub holds the newest report. Safe for concurrent use.
type Hub struct {
	s     Sources
	dirty chan struct{}

	mu       sync.Mutex
	sequence uint64
	latest   *workerv1.WatchRackResponse
	rack     *capacity.Rack
	watchers map[chan struct{}]bool
}

// NewHub makes a hub. Run keeps it going.
func NewHub(s Sources) *Hub {
	return &Hub{s: s, dirty: make(chan struct{}, 1), watchers: map[chan struct{}]bool{}}
}

// Changed says that a new report may say something new. It never blocks.
func (h *Hub) Changed() {
	select {
	case h.dirty <- struct{}{}:
	default:
	}
}

// Run makes reports until ctx ends.
func (h *Hub) Run(ctx context.Context) error {
	idle := time.NewTimer(0)
	defer idle.Stop()
	for {
		always := false
		select {
		case <-ctx.Done():
			return nil
		case <-h.dirty:
		case <-idle.C:
			always = true
		}
		h.make(always)
		if always {
			idle.Reset(idleTime)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(mergeTime):
		}
	}
}

// make builds a report and wakes the watchers if it is news.
func (h *Hub) make(always bool) {
	next := &workerv1.WatchRackResponse{RackId: h.s.RackID, Version: h.s.Version}
	if f := h.s.Fault(); f.Code != cluster.FaultNone {
		next.ClusterFault, next.ClusterFaultSince = f.Words, timestamppb.New(f.Since)
	}
	// Whether it is complete is asked before the list: the other way round, the
	// first list could be taken too early and called complete.
	next.Synced = h.s.Synced()
	next.Attempts, next.DiskJobIds, next.Volumes = h.s.Statuses(), h.s.DiskJobs(), h.s.Volumes()
	rack := h.s.Rack()
	next.Nodes, next.Simulated, next.Fabric = rack.Report(), rack.Simulated, len(rack.Fabrics) > 0

	h.mu.Lock()
	defer h.mu.Unlock()
	h.rack = rack
	if h.latest != nil && !always {
		next.Sequence = h.latest.Sequence
		if proto.Equal(next, h.latest) {
			return
		}
	}
	h.sequence++
	next.Sequence = h.sequence
	h.latest = next
	for w := range h.watchers {
		select {
		case w <- struct{}{}:
		default:
		}
	}
}

// Latest is the newest report and the count in it; nil before the first.
func (h *Hub) Latest() (*workerv1.WatchRackResponse, *capacity.Rack) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.latest, h.rack
}

// Watch sends the newest report at once and again when there is a newer one,
// until ctx ends or send fails. Reports are shared: send must not change them.
func (h *Hub) Watch(ctx context.Context, send func(*workerv1.WatchRackResponse) error) error {
	news := make(chan struct{}, 1)
	h.mu.Lock()
	h.watchers[news] = true
	h.mu.Unlock()
	defer func() {
		h.mu.Lock()
		delete(h.watchers, news)
		h.mu.Unlock()
	}()
	h.make(true) // with what the watcher brought
	var sent uint64
	for {
		if r, _ := h.Latest(); r != nil && r.Sequence != sent {
			sent = r.Sequence
			if err := send(r); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-news:
		}
	}
}
