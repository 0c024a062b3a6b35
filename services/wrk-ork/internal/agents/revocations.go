package agents

import (
	"context"
	"fmt"
	"math"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cosmicac/cosmicac/pkg/fault"
	agentv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/record"
)

// Bounds of what app-node and bootstraps may ask.
const (
	floorsAtOnce = 1000
	voidsAtOnce  = 1000
	idBytes      = 64
	// floorLife is how far ahead a floor may end: longer than any grant lasts.
	floorLife = 31 * 24 * time.Hour
)

// standing is what is recorded of certificates and floors, in memory, since it
// is asked at every admission.
type standing struct {
	// reading lets one reading of the record in at a time: an older one never
	// lands on a newer.
	reading sync.Mutex

	mu sync.Mutex
	// jobs is, by id and for jobs that are not settled, why the certificates of
	// an attempt are void; nil while they are good.
	jobs   map[string]map[string]error
	floors []record.Floor
	// floorsRaised and voided are closed and replaced at each change.
	floorsRaised, voided chan struct{}
}

// verdict says why the certificates of an attempt are void, nil while they stand.
func verdict(j *job.Job, a *job.Attempt) error {
	switch {
	case a.Fenced:
		return fault.New(fault.Denied, "attempt %s is fenced: its join token was redeemed by two keys", a.ID)
	case !j.Certified(a):
		return over(a.ID)
	}
	return nil
}

// over is the one refusal that tells an agent that its time has come.
func over(attemptID string) error {
	return fault.New(fault.FailedPrecondition, "attempt %s is over; its certificate is void", attemptID)
}

// check is the verdict on a certificate. What is not known is void.
func (s *standing) check(jobID, attemptID string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	err, known := s.jobs[jobID][attemptID]
	if !known {
		return fault.New(fault.Denied, "wrk-ork knows no live attempt %.64q of job %.64q; its certificate is void", attemptID, jobID)
	}
	return err
}

// load takes what is recorded of a job and tells whether an attempt lost its
// certificates by it.
func (s *standing) load(j *job.Job) (lost bool) {
	attempts := make(map[string]error)
	for _, r := range j.Replicas {
		for _, a := range r.Attempts {
			attempts[a.ID] = verdict(j, a)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, was := range s.jobs[j.ID] {
		if now, still := attempts[id]; was == nil && (!still || now != nil) {
			lost = true
		}
	}
	if j.Settled() {
		delete(s.jobs, j.ID)
	} else {
		s.jobs[j.ID] = attempts
	}
	return lost
}

func (s *standing) forget(jobID string) (lost bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, err := range s.jobs[jobID] {
		lost = lost || err == nil
	}
	delete(s.jobs, jobID)
	return lost
}

func (s *standing) raise(floors []record.Floor) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.floors = floors
	close(s.floorsRaised)
	s.floorsRaised = make(chan struct{})
}

func (s *standing) tellVoided() {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.voided)
	s.voided = make(chan struct{})
}

// of returns the floors that concern a project's agents, by user, and what is
// closed when they change.
func (s *standing) of(projectID string) (floors map[string]record.Floor, raised <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	floors = make(map[string]record.Floor)
	for _, f := range s.floors {
		if f.ProjectID != "" && f.ProjectID != projectID {
			continue
		}
		if have, ok := floors[f.UserID]; ok {
			f.Epoch = max(f.Epoch, have.Epoch)
			if have.Until.After(f.Until) {
				f.Until = have.Until
			}
		}
		floors[f.UserID] = f
	}
	return floors, s.floorsRaised
}

// refresh reads a job again. Who lost its certificate is cut when it returns.
func (d *Desk) refresh(ctx context.Context, jobID string) error {
	d.standing.reading.Lock()
	defer d.standing.reading.Unlock()
	j, err := d.o.Store.Job(ctx, jobID)
	lost := false
	switch {
	case err == nil:
		lost = d.standing.load(j)
	case fault.KindOf(err) == fault.NotFound:
		lost = d.standing.forget(jobID)
	default:
		return err
	}
	if lost {
		d.standing.tellVoided()
		d.o.Revet()
	}
	return nil
}

// Run follows the record until ctx ends: a certificate is void from the moment
// at which its attempt is recorded as over.
func (d *Desk) Run(ctx context.Context) error {
	defer d.changes.Close()
	pending := make(map[string]bool)
	for {
		var again <-chan time.Time
		if len(pending) > 0 {
			again = time.After(time.Second)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-d.changes.Ready():
			for _, id := range d.changes.Take() {
				pending[id] = true
			}
		case <-again:
		}
		for id := range pending {
			if err := d.refresh(ctx, id); err == nil {
				delete(pending, id)
			} else if ctx.Err() == nil {
				d.o.Log.Warn("nothing was concluded of certificates, tried again", "job", id, "error", err)
			}
		}
	}
}

// told is what one agent has heard on its stream.
type told struct {
	any          bool
	drain        bool
	grants       map[string]uint64
	certificates map[string]uint64
}

// news is the order that brings an agent up to date, nil when it is.
func (t *told) news(drain time.Time, floors map[string]record.Floor, certificates map[string]uint64) *orkv1.AttendResponse {
	order := &orkv1.AttendResponse{MinimumEpoch: floors[""].Epoch}
	revocations := &agentv1.Revocations{Certificates: make(map[string]uint64)}
	for user, f := range floors {
		if f.Epoch > t.grants[user] {
			revocations.Grants = append(revocations.Grants, &agentv1.GrantFloor{UserId: user, MinimumEpoch: f.Epoch, Until: timestamppb.New(f.Until)})
		}
	}
	for replica, epoch := range certificates {
		if epoch > t.certificates[replica] {
			revocations.Certificates[replica] = epoch
		}
	}
	if len(revocations.Grants)+len(revocations.Certificates) > 0 {
		order.Revocations = revocations
	}
	if !drain.IsZero() && !t.drain {
		order.Drain, order.DrainDeadline = true, timestamppb.New(drain)
	}
	if t.any && order.Revocations == nil && !order.Drain {
		return nil
	}
	t.any, t.drain, t.certificates = true, t.drain || order.Drain, certificates
	t.grants = make(map[string]uint64, len(floors))
	for user, f := range floors {
		t.grants[user] = f.Epoch
	}
	return order
}

// PutGrantFloors implements orkv1.RevocationsServer.
func (d *Desk) PutGrantFloors(ctx context.Context, r *orkv1.PutGrantFloorsRequest) (*orkv1.PutGrantFloorsResponse, error) {
	if len(r.GetFloors()) > floorsAtOnce {
		return nil, fault.New(fault.TooLarge, "%d floors; at most %d are taken at once", len(r.GetFloors()), floorsAtOnce).
			With(fault.Detail{Field: "floors", Rule: fmt.Sprintf("must be at most %d", floorsAtOnce)})
	}
	now := d.o.Clock()
	floors := make([]record.Floor, 0, len(r.GetFloors()))
	for i, p := range r.GetFloors() {
		f := p.GetFloor()
		wrong := func(field, rule string) error {
			path := fmt.Sprintf("floors[%d].%s", i, field)
			return fault.New(fault.Invalid, "%s %s", path, rule).With(fault.Detail{Field: path, Rule: rule})
		}
		switch {
		case len(p.GetProjectId()) > idBytes:
			return nil, wrong("project_id", "must have at most 64 bytes")
		case len(f.GetUserId()) > idBytes:
			return nil, wrong("floor.user_id", "must have at most 64 bytes")
		case f.GetMinimumEpoch() == 0 || f.GetMinimumEpoch() > math.MaxInt64/2:
			return nil, wrong("floor.minimum_epoch", "must be from 1 to 2^62")
		case !f.GetUntil().IsValid() || f.GetUntil().AsTime().After(now.Add(floorLife)):
			return nil, wrong("floor.until", "must be within 31 days")
		}
		floors = append(floors, record.Floor{ProjectID: p.GetProjectId(), UserID: f.GetUserId(), Epoch: f.GetMinimumEpoch(), Until: f.GetUntil().AsTime()})
	}
	d.standing.reading.Lock()
	defer d.standing.reading.Unlock()
	if err := d.o.Store.RaiseFloors(ctx, floors); err != nil {
		return nil, err
	}
	all, err := d.o.Store.Floors(ctx)
	if err != nil {
		return nil, err
	}
	d.standing.raise(all)
	highest := uint64(0)
	for _, f := range all {
		highest = max(highest, f.Epoch)
	}
	return &orkv1.PutGrantFloorsResponse{HighestEpoch: highest}, nil
}

// WatchVoidCertificates implements orkv1.RevocationsServer.
func (d *Desk) WatchVoidCertificates(_ *orkv1.WatchVoidCertificatesRequest, stream orkv1.Revocations_WatchVoidCertificatesServer) error {
	ctx := stream.Context()
	var sent map[string]time.Time
	for {
		d.standing.mu.Lock()
		voided := d.standing.voided
		d.standing.mu.Unlock()
		all, err := d.o.Store.VoidCertificates(ctx)
		if err != nil {
			return err
		}
		m := &orkv1.WatchVoidCertificatesResponse{}
		for id, until := range all {
			if _, ok := sent[id]; ok {
				continue
			}
			if m.Certificates = append(m.Certificates, &orkv1.VoidCertificate{AttemptId: id, Until: timestamppb.New(until)}); len(m.Certificates) == voidsAtOnce {
				if err := stream.Send(m); err != nil {
					return err
				}
				m = &orkv1.WatchVoidCertificatesResponse{}
			}
		}
		if sent == nil || len(m.Certificates) > 0 {
			if err := stream.Send(m); err != nil {
				return err
			}
		}
		sent = all
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-voided:
		}
	}
}
