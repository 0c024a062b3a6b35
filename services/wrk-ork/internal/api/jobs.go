// Package api answers the orchestrator's gRPC services Jobs and Racks. It
// checks input, asks the record and the fleet, and shapes answers. Who may call
// is decided before it, by the right that each method names on the wire; that a
// user may see a project is app-node's to check.
//
// It decides no state and holds none.
package api

import (
	"context"
	"crypto/sha256"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/id"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/life"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/notice"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/reconcile"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/record"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/spec"
)

const (
	defaultPage = 100
	mostPage    = 500
	// answerBytes keeps a page under the bound of one message.
	answerBytes = 3 << 20
)

// Jobs answers orkv1.Jobs.
type Jobs struct {
	orkv1.UnimplementedJobsServer
	Store *record.Store
	Hub   *notice.Hub
	NewID life.NewID
	Clock func() time.Time
	// Queue reads who waits and what there is.
	Queue func(context.Context) (*reconcile.Queue, error)
}

// CreateJob implements orkv1.JobsServer.
func (s *Jobs) CreateJob(ctx context.Context, req *orkv1.CreateJobRequest) (*orkv1.CreateJobResponse, error) {
	checked, err := spec.Check(req.Spec)
	if err := together(err, priced(req.Spec, req.Price), spec.Owner(req.Owner), spec.IdempotencyKey(req.IdempotencyKey)); err != nil {
		return nil, err
	}
	if err := keepQuota(ctx, s.Store, req.Quota, req.Owner); err != nil {
		return nil, err
	}
	if req.DryRun {
		return s.dryRun(ctx, checked, req.Owner)
	}
	var hash []byte
	if req.IdempotencyKey != "" {
		text, err := proto.MarshalOptions{Deterministic: true}.Marshal(checked)
		if err != nil {
			return nil, fault.Wrap(fault.Internal, err, "encode the job's specification")
		}
		sum := sha256.Sum256(text)
		hash = sum[:]
	}
	owner := &orkv1.Owner{ProjectId: req.Owner.GetProjectId(), UserId: req.Owner.GetUserId()}
	made, events := life.New(checked, owner, s.Clock(), s.NewID)
	made.Price = req.Price
	j, existed, err := s.Store.Create(ctx, made, events, req.IdempotencyKey, hash)
	if err != nil {
		return nil, err
	}
	return &orkv1.CreateJobResponse{Job: s.view(j), Existed: existed}, nil
}

// together is one refusal with every problem of several, nil when there is none.
func together(errs ...error) error {
	var first error
	var details []fault.Detail
	for _, err := range errs {
		if err == nil {
			continue
		}
		if first == nil {
			first = err
		}
		details = append(details, fault.DetailsOf(err)...)
	}
	if first == nil || len(details) == len(fault.DetailsOf(first)) {
		return first
	}
	return fault.InvalidFields("the job cannot be created", details)
}

// checkID refuses what cannot be a job's id before the record is asked.
func checkID(jobID string) error {
	if !id.Valid(id.Job, jobID) {
		return fault.New(fault.NotFound, "no job has the id %.64q", jobID)
	}
	return nil
}

// GetJob implements orkv1.JobsServer.
func (s *Jobs) GetJob(ctx context.Context, req *orkv1.GetJobRequest) (*orkv1.GetJobResponse, error) {
	if err := checkID(req.Id); err != nil {
		return nil, err
	}
	j, err := s.Store.Job(ctx, req.Id)
	if err != nil {
		return nil, err
	}
	return &orkv1.GetJobResponse{Job: s.view(j)}, nil
}

// ListJobs implements orkv1.JobsServer. A page ends early when it grows large.
func (s *Jobs) ListJobs(ctx context.Context, req *orkv1.ListJobsRequest) (*orkv1.ListJobsResponse, error) {
	if len(req.ProjectIds) > 1000 || len(req.States) > 32 {
		return nil, fault.New(fault.TooLarge, "list jobs: at most 1000 projects and 32 states")
	}
	q := record.Query{
		ProjectIDs: req.ProjectIds, States: req.States, Kind: req.Kind, Name: req.Name,
		Limit: defaultPage, Before: req.PageToken,
	}
	if req.PageSize > 0 {
		q.Limit = int(min(req.PageSize, mostPage))
	}
	if req.PageToken != "" && !id.Valid(id.Job, req.PageToken) {
		return nil, fault.New(fault.Invalid, "list jobs: the page token is not one of ours").
			With(fault.Detail{Field: "page_token", Rule: "is the next_page_token of the page before"})
	}
	jobs, more, err := s.Store.List(ctx, q)
	if err != nil {
		return nil, err
	}
	resp := &orkv1.ListJobsResponse{}
	size := 0
	for _, j := range jobs {
		v := s.view(j)
		size += proto.Size(v)
		if size > answerBytes && len(resp.Jobs) > 0 {
			more = true
			break
		}
		resp.Jobs = append(resp.Jobs, v)
	}
	if more {
		resp.NextPageToken = resp.Jobs[len(resp.Jobs)-1].Id
	}
	return resp, nil
}

// WatchJobs implements orkv1.JobsServer.
func (s *Jobs) WatchJobs(req *orkv1.WatchJobsRequest, stream orkv1.Jobs_WatchJobsServer) error {
	ctx := stream.Context()
	wants := func(project string) bool {
		return len(req.ProjectIds) == 0 || slices.Contains(req.ProjectIds, project)
	}
	// Subscribed before the first read, so that no change falls between.
	sub := s.Hub.SubscribeTo(req.JobId) // empty: to all
	defer sub.Close()
	send := func(j *job.Job) error {
		return stream.Send(&orkv1.WatchJobsResponse{Change: &orkv1.WatchJobsResponse_Job{Job: s.view(j)}})
	}
	if req.JobId != "" {
		if err := checkID(req.JobId); err != nil {
			return err
		}
		j, err := s.Store.Job(ctx, req.JobId)
		if err != nil {
			return err
		}
		if !wants(j.Owner.GetProjectId()) {
			return fault.New(fault.NotFound, "no job has the id %q", req.JobId)
		}
		if err := send(j); err != nil {
			return err
		}
	} else {
		jobs, err := s.Store.All(ctx, req.ProjectIds)
		if err != nil {
			return err
		}
		for _, j := range jobs {
			if err := send(j); err != nil {
				return err
			}
		}
	}
	if err := stream.Send(&orkv1.WatchJobsResponse{Change: &orkv1.WatchJobsResponse_Synced{Synced: true}}); err != nil {
		return err
	}
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-sub.Ready():
		}
		for _, changed := range sub.Take() {
			if req.JobId != "" && changed != req.JobId {
				continue
			}
			j, err := s.Store.Job(ctx, changed)
			if fault.KindOf(err) == fault.NotFound {
				project, known, err := s.Store.DeletedProject(ctx, changed)
				if err != nil {
					return err
				}
				if known && wants(project) {
					if err := stream.Send(&orkv1.WatchJobsResponse{Change: &orkv1.WatchJobsResponse_DeletedJobId{DeletedJobId: changed}}); err != nil {
						return err
					}
				}
				continue
			}
			if err != nil {
				return err // the watcher asks again and gets everything
			}
			if !wants(j.Owner.GetProjectId()) {
				continue
			}
			if err := send(j); err != nil {
				return err
			}
		}
	}
}

// actor is who asked, as the request says or as the mesh knows the caller.
func actor(ctx context.Context, said string) (string, error) {
	if len(said) > 128 || strings.ContainsFunc(said, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return "", fault.New(fault.Invalid, "the actor is not an id").With(fault.Detail{Field: "actor", Rule: "is at most 128 visible ASCII characters"})
	}
	if said != "" {
		return said, nil
	}
	if c, ok := mesh.CallerFrom(ctx); ok && c.Name() != "" {
		return c.Name(), nil
	}
	return "unknown", nil
}

// change applies what a user asked for to a job.
func (s *Jobs) change(ctx context.Context, jobID, said string, f func(j *job.Job, actor string) (*job.Job, []job.Event, error)) (*orkv1.Job, error) {
	if err := checkID(jobID); err != nil {
		return nil, err
	}
	who, err := actor(ctx, said)
	if err != nil {
		return nil, err
	}
	j, err := s.Store.Update(ctx, jobID, func(j *job.Job) (*job.Job, []job.Event, error) { return f(j, who) })
	if err != nil {
		return nil, err
	}
	return s.view(j), nil
}

// StopJob implements orkv1.JobsServer.
func (s *Jobs) StopJob(ctx context.Context, req *orkv1.StopJobRequest) (*orkv1.StopJobResponse, error) {
	j, err := s.change(ctx, req.Id, req.Actor, func(j *job.Job, actor string) (*job.Job, []job.Event, error) {
		next, events := life.Stop(j, actor)
		return next, events, nil
	})
	return &orkv1.StopJobResponse{Job: j}, err
}

// StartJob implements orkv1.JobsServer.
func (s *Jobs) StartJob(ctx context.Context, req *orkv1.StartJobRequest) (*orkv1.StartJobResponse, error) {
	j, err := s.change(ctx, req.Id, req.Actor, func(j *job.Job, actor string) (*job.Job, []job.Event, error) {
		return life.Start(j, actor, s.Clock(), s.NewID)
	})
	return &orkv1.StartJobResponse{Job: j}, err
}

// DeleteJob implements orkv1.JobsServer.
func (s *Jobs) DeleteJob(ctx context.Context, req *orkv1.DeleteJobRequest) (*orkv1.DeleteJobResponse, error) {
	j, err := s.change(ctx, req.Id, req.Actor, func(j *job.Job, actor string) (*job.Job, []job.Event, error) {
		next, events := life.AskDelete(j, actor, s.Clock())
		return next, events, nil
	})
	return &orkv1.DeleteJobResponse{Job: j}, err
}

// ListEvents implements orkv1.JobsServer.
func (s *Jobs) ListEvents(ctx context.Context, req *orkv1.ListEventsRequest) (*orkv1.ListEventsResponse, error) {
	if err := checkID(req.JobId); err != nil {
		return nil, err
	}
	events, err := s.Store.Events(ctx, req.JobId, req.AfterSequence)
	if err != nil {
		return nil, err
	}
	return &orkv1.ListEventsResponse{Events: events}, nil
}
