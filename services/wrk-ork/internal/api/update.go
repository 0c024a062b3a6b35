package api

import (
	"context"
	"crypto/sha256"
	"fmt"
	"strconv"

	"google.golang.org/protobuf/proto"

	"github.com/cosmicac/cosmicac/pkg/fault"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/life"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/spec"
)

// UpdateJob implements orkv1.JobsServer. The place of a surge is looked for before
// anything is recorded; it is not kept, so what others take in between is waited for.
func (s *Jobs) UpdateJob(ctx context.Context, req *orkv1.UpdateJobRequest) (*orkv1.UpdateJobResponse, error) {
	if err := checkID(req.Id); err != nil {
		return nil, err
	}
	if err := checkUpdate(req); err != nil {
		return nil, err
	}
	who, err := actor(ctx, req.Actor)
	if err != nil {
		return nil, err
	}
	asked := proto.Clone(req).(*orkv1.UpdateJobRequest)
	asked.Actor, asked.IdempotencyKey = "", ""
	text, err := proto.MarshalOptions{Deterministic: true}.Marshal(asked)
	if err != nil {
		return nil, fault.Wrap(fault.Internal, err, "encode the update of job %s", req.Id)
	}
	hash := sha256.Sum256(text)
	change := func(j *job.Job) (*job.Job, []job.Event, error) {
		to, err := updatedSpec(j, req)
		if err != nil {
			return nil, nil, err
		}
		return life.Update(j, to, req.Strategy, who, s.Clock(), s.NewID)
	}
	now, seen, err := s.Store.Updated(ctx, req.Id, req.IdempotencyKey, hash[:])
	if err != nil {
		return nil, err
	}
	if !seen {
		trial, _, err := change(now)
		if err != nil {
			return nil, err
		}
		if err := s.placeSurge(ctx, trial); err != nil {
			return nil, err
		}
	}
	j, existed, err := s.Store.UpdateOnce(ctx, req.Id, req.IdempotencyKey, hash[:], change)
	if err != nil {
		return nil, err
	}
	return &orkv1.UpdateJobResponse{Job: s.view(j), Existed: existed}, nil
}

func checkUpdate(req *orkv1.UpdateJobRequest) error {
	var details []fault.Detail
	add := func(field, rule string) { details = append(details, fault.Detail{Field: field, Rule: rule}) }
	switch req.Strategy {
	case orkv1.UpdateStrategy_UPDATE_STRATEGY_STOP_FIRST, orkv1.UpdateStrategy_UPDATE_STRATEGY_SURGE_FIRST:
	default:
		add("strategy", "is stop_first or surge_first")
	}
	if req.Arguments == nil && req.Replicas == 0 {
		add("engine_arguments", "or replicas are to be given: nothing else of a running job can change")
	}
	if err := spec.IdempotencyKey(req.IdempotencyKey); err != nil {
		details = append(details, fault.DetailsOf(err)...)
	}
	if len(details) == 0 {
		return nil
	}
	return fault.New(fault.Invalid, "job %s cannot be updated: %s %s", req.Id, details[0].Field, details[0].Rule).With(details...)
}

// updatedSpec is a job's specification with what the request changes.
func updatedSpec(j *job.Job, req *orkv1.UpdateJobRequest) (*orkv1.JobSpec, error) {
	if want := req.ExpectedSpecRevision; want != 0 && want != j.SpecRevision {
		return nil, fault.New(fault.Conflict, "job %s cannot be updated: its specification is number %d by now, and the caller saw number %d; look at it and update it again", j.ID, j.SpecRevision, want).
			With(fault.Detail{Field: "expected_spec_revision", Rule: fmt.Sprintf("is %d", j.SpecRevision)})
	}
	to := proto.Clone(j.Spec).(*orkv1.JobSpec)
	if to.Inference == nil {
		return to, nil // refused in words by life
	}
	if req.Arguments != nil {
		to.Inference.Arguments = req.Arguments.Values
	}
	if req.Replicas != 0 {
		to.Inference.Replicas = req.Replicas
	}
	checked, err := spec.Check(to)
	if err != nil {
		return nil, fault.InvalidFields(fmt.Sprintf("job %s cannot be updated", j.ID), fault.DetailsOf(err))
	}
	return checked, nil
}

// placeSurge refuses an update whose first replica has no place now.
func (s *Jobs) placeSurge(ctx context.Context, trial *job.Job) error {
	if !life.Surges(trial) {
		return nil
	}
	queue, err := s.Queue(ctx)
	if err != nil {
		return err
	}
	// Ids that no record has.
	n := 0
	more := life.AddReplica(trial, s.Clock(), func(string) string { n++; return "dry-" + strconv.Itoa(n) })
	alone := trial.Clone()
	alone.Replicas = []*job.Replica{more}
	if err := queue.Join(ctx, s.Store, alone); err != nil {
		return err
	}
	for _, d := range queue.Decide() {
		if d.Waiting.ID == more.Newest().ID && d.Refusal != nil {
			return fault.New(fault.FailedPrecondition, "job %s is not updated, and nothing is changed: one replica more has no place now: %s: %s; update it with the strategy stop_first, which needs none",
				trial.ID, job.ReasonName(d.Refusal.Reason), d.Refusal.Message).With(fault.Detail{Field: "strategy", Rule: "is stop_first while there is no room for one replica more"})
		}
	}
	return nil
}
