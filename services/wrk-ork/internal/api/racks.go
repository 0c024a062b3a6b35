package api

import (
	"context"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	"google.golang.org/protobuf/proto"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	"github.com/cosmicac/cosmicac/pkg/trust"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/rack"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/reconcile"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/record"
)

// Racks answers orkv1.Racks.
type Racks struct {
	orkv1.UnimplementedRacksServer
	Store   *record.Store
	Fleet   *rack.Fleet
	Network *trust.Network
	Log     hclog.Logger
	// Queue reads who waits and what there is.
	Queue func(context.Context) (*reconcile.Queue, error)
	// Unrecorded are the jobs that racks report and no record knows.
	Unrecorded func() map[string]bool
	// Changed is told when capacity may have changed, and of jobs that are concerned.
	// It must not block.
	Changed func(jobIDs ...string)
	Clock   func() time.Time

	// mu keeps record and fleet in step: entries change in both, in one order.
	mu sync.Mutex
}

// PutRack implements orkv1.RacksServer.
func (s *Racks) PutRack(ctx context.Context, req *orkv1.PutRackRequest) (*orkv1.PutRackResponse, error) {
	e, err := rack.CheckEntry(req.Entry, func(key string) (*meshv1.Member, bool) {
		p, err := identity.ParseID(key)
		if err != nil {
			return nil, false
		}
		return s.Network.Member(p)
	})
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if e, err = s.Store.PutRack(ctx, e); err != nil {
		return nil, err
	}
	s.Log.Info("rack entry put", "rack", e.Id, "location", e.Location, "key", e.Key)
	s.Fleet.Put(e)
	s.Changed()
	return &orkv1.PutRackResponse{Entry: e}, nil
}

// RegisterRack implements orkv1.RacksServer.
func (s *Racks) RegisterRack(ctx context.Context, req *orkv1.RegisterRackRequest) (*orkv1.RegisterRackResponse, error) {
	caller, ok := mesh.CallerFrom(ctx)
	if !ok {
		return nil, fault.New(fault.Denied, "register a rack: the caller is not known")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	e, err := s.Store.Rack(ctx, req.RackId)
	if fault.KindOf(err) == fault.NotFound {
		return nil, fault.New(fault.NotFound, "no entry has the rack id %.64q; an operator has to put one with this worker's key %s", req.RackId, caller.ID).
			With(fault.Detail{Field: "rack_id", Rule: rack.RuleID})
	}
	if err != nil {
		return nil, err
	}
	if e.Key != caller.ID.String() {
		s.Log.Warn("a worker called for a rack of another key", "rack", e.Id, "key", caller.ID)
		return nil, fault.New(fault.Conflict, "rack %s belongs to another worker's key; this worker is %s", e.Id, caller.ID).
			With(fault.Detail{Field: "rack_id", Rule: rack.RuleKey})
	}
	s.Fleet.Put(e)
	s.Fleet.Kick(e.Id)
	return &orkv1.RegisterRackResponse{Entry: e}, nil
}

// ListRacks implements orkv1.RacksServer. Keys come only when they are asked for.
func (s *Racks) ListRacks(_ context.Context, req *orkv1.ListRacksRequest) (*orkv1.ListRacksResponse, error) {
	resp := &orkv1.ListRacksResponse{}
	for _, v := range s.Fleet.Views() {
		if (req.Location != "" && !strings.EqualFold(req.Location, v.Entry.Location)) || !strings.HasPrefix(v.Entry.Type, req.TypePrefix) {
			continue
		}
		w := v.Wire()
		if !req.Keys {
			w.Entry = proto.Clone(w.Entry).(*orkv1.RackEntry)
			w.Entry.Key = ""
		}
		resp.Racks = append(resp.Racks, w)
	}
	return resp, nil
}

// CordonRack implements orkv1.RacksServer.
func (s *Racks) CordonRack(ctx context.Context, req *orkv1.CordonRackRequest) (*orkv1.CordonRackResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e, err := s.Store.CordonRack(ctx, req.Id, req.Cordoned)
	if err != nil {
		return nil, err
	}
	s.Log.Info("rack cordoned or opened", "rack", e.Id, "cordoned", e.Cordoned)
	s.Fleet.Put(e)
	s.Changed()
	return &orkv1.CordonRackResponse{Entry: e}, nil
}
