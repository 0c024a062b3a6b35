package api

import (
	"context"
	"math"

	"github.com/cosmicac/cosmicac/pkg/fault"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	"github.com/cosmicac/cosmicac/services/app-node/internal/catalogue"
)

var updateStrategies = map[string]orkv1.UpdateStrategy{
	"stop_first":  orkv1.UpdateStrategy_UPDATE_STRATEGY_STOP_FIRST,
	"surge_first": orkv1.UpdateStrategy_UPDATE_STRATEGY_SURGE_FIRST,
}

type updateJobInput struct {
	JobPath
	IdempotencyKey string `header:"Idempotency-Key" doc:"1 to 128 printable ASCII characters. The same key updates the job once."`
	Body           struct {
		Strategy             string   `json:"strategy" enum:"stop_first,surge_first" doc:"stop_first needs no more GPUs, and one replica fewer serves meanwhile; surge_first needs those of one replica more, and none is missing"`
		EngineArguments      []string `json:"engine_arguments,omitempty" doc:"Left as they are when left out; the model's own when empty"`
		Replicas             *uint32  `json:"replicas,omitempty" maximum:"4294967295" doc:"Left as it is when left out"`
		ExpectedSpecRevision uint64   `json:"expected_spec_revision,omitempty" maximum:"9007199254740991" doc:"The spec_revision that the caller saw: another one is a conflict; whatever it is when left out"`
	}
}

func (s *Server) updateJob(ctx context.Context, in *updateJobInput) (*jobOutput, error) {
	target(ctx, in.ID)
	job, err := s.owned(ctx, in.ID)
	if err != nil {
		return nil, err
	}
	if err := checkIdempotencyKey(in.IdempotencyKey); err != nil {
		return nil, err
	}
	b := in.Body
	request := &orkv1.UpdateJobRequest{
		Id: job.GetId(), Actor: caller(ctx).User.ID, IdempotencyKey: in.IdempotencyKey, Strategy: updateStrategies[b.Strategy], ExpectedSpecRevision: b.ExpectedSpecRevision,
	}
	if b.Replicas != nil {
		if *b.Replicas == 0 || *b.Replicas > math.MaxInt32 {
			return nil, fault.New(fault.Invalid, "the job cannot be updated: there is no such number of replicas").
				With(fault.Detail{Field: "replicas", Rule: "is at least 1; cosmicac jobs stop gives up all"})
		}
		request.Replicas = *b.Replicas
	}
	if b.EngineArguments != nil {
		request.Arguments = &orkv1.EngineArguments{Values: b.EngineArguments}
	}
	if inference := job.GetSpec().GetInference(); b.EngineArguments != nil && len(b.EngineArguments) == 0 && inference != nil {
		known, unknown, err := s.Catalogue.Resolve(ctx, catalogue.Choice{Model: inference.GetModel(), Runtime: inference.GetRuntime(), Inference: true})
		if err != nil {
			return nil, err
		}
		if len(unknown) > 0 {
			return nil, fault.New(fault.FailedPrecondition, "the job cannot be updated to its model's own engine arguments: the catalogue has model %s no more; give them", inference.GetModel()).With(unknown...)
		}
		request.Arguments.Values = known.Arguments
	}
	answer, err := s.Ork.UpdateJob(ctx, request)
	if err != nil {
		return nil, err
	}
	out := &jobOutput{Body: s.job(answer.GetJob())}
	if answer.GetExisted() {
		out.Replayed = "true"
	}
	return out, nil
}
