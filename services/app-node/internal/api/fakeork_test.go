package api_test

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/id"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

// fakeOrk answers the orchestrator's services out of memory.
type fakeOrk struct {
	orkv1.UnimplementedJobsServer
	orkv1.UnimplementedRacksServer
	orkv1.UnimplementedEndpointsServer
	orkv1.UnimplementedRevocationsServer
	orkv1.UnimplementedQuotasServer

	mu       sync.Mutex
	jobs     map[string]*orkv1.Job
	order    []string
	byKey    map[string]string
	racks    map[string]*orkv1.Rack
	watchers map[chan *orkv1.WatchJobsResponse]struct{}
	// hang holds every call until it is given up.
	hang bool
	// watches counts WatchJobs streams that were opened.
	watches int
	// floors are by user and project; highest is at least the highest of them.
	floors  map[[2]string]uint64
	highest uint64
	// quotas are by project; plan is the answer to dry runs.
	quotas map[string]*orkv1.ProjectQuota
	plan   *orkv1.JobPlan
}

func newFakeOrk() *fakeOrk {
	return &fakeOrk{jobs: map[string]*orkv1.Job{}, byKey: map[string]string{}, racks: map[string]*orkv1.Rack{},
		watchers: map[chan *orkv1.WatchJobsResponse]struct{}{}, floors: map[[2]string]uint64{}, quotas: map[string]*orkv1.ProjectQuota{}}
}

func (f *fakeOrk) register(to grpc.ServiceRegistrar) {
	orkv1.RegisterJobsServer(to, f)
	orkv1.RegisterRacksServer(to, f)
	orkv1.RegisterEndpointsServer(to, f)
	orkv1.RegisterRevocationsServer(to, f)
	orkv1.RegisterQuotasServer(to, f)
	orkv1.RegisterVolumesServer(to, &fakeVolumes{ork: f})
}

func (f *fakeOrk) PutGrantFloors(_ context.Context, r *orkv1.PutGrantFloorsRequest) (*orkv1.PutGrantFloorsResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, p := range r.GetFloors() {
		key := [2]string{p.GetFloor().GetUserId(), p.GetProjectId()}
		f.floors[key] = max(f.floors[key], p.GetFloor().GetMinimumEpoch())
		f.highest = max(f.highest, f.floors[key])
	}
	return &orkv1.PutGrantFloorsResponse{HighestEpoch: f.highest}, nil
}

// floor is the lowest epoch that a user's grants for a project's jobs may have.
func (f *fakeOrk) floor(userID, projectID string) uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return max(f.floors[[2]string{userID, projectID}], f.floors[[2]string{userID, ""}])
}

func (f *fakeOrk) wait(ctx context.Context) error {
	f.mu.Lock()
	hang := f.hang
	f.mu.Unlock()
	if hang {
		<-ctx.Done()
		return ctx.Err()
	}
	return nil
}

func (f *fakeOrk) CreateJob(ctx context.Context, r *orkv1.CreateJobRequest) (*orkv1.CreateJobResponse, error) {
	if err := f.wait(ctx); err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	var details []fault.Detail
	if r.GetSpec().GetName() == "" || len([]rune(r.GetSpec().GetName())) > 63 {
		details = append(details, fault.Detail{Field: "name", Rule: "1 to 63 are allowed"})
	}
	if r.GetSpec().GetGpu().GetCount() > 4096 {
		details = append(details, fault.Detail{Field: "gpu.count", Rule: "1 to 4096 are allowed"})
	}
	if details != nil {
		return nil, fault.ToGRPC(fault.New(fault.Invalid, "the job cannot be created").With(details...))
	}
	if r.GetDryRun() {
		return &orkv1.CreateJobResponse{Job: &orkv1.Job{Spec: r.GetSpec()}, Plan: f.plan}, nil
	}
	f.keep(r.GetQuota())
	key := r.GetOwner().GetProjectId() + "/" + r.GetIdempotencyKey()
	if known := f.byKey[key]; known != "" {
		return &orkv1.CreateJobResponse{Job: proto.Clone(f.jobs[known]).(*orkv1.Job), Existed: true}, nil
	}
	job := &orkv1.Job{Id: id.New(id.Job), Spec: r.GetSpec(), Owner: r.GetOwner(), State: orkv1.State_STATE_QUEUED, Reason: orkv1.Reason_REASON_BUSY,
		Message: "waits", CreatedAt: timestamppb.Now(), UpdatedAt: timestamppb.Now(), Revision: 1, Price: r.GetPrice(),
		Replicas: []*orkv1.Replica{{Id: id.New(id.Replica), State: orkv1.State_STATE_QUEUED}}}
	f.jobs[job.Id], f.byKey[key] = job, job.Id
	f.order = append(f.order, job.Id)
	f.tell(&orkv1.WatchJobsResponse{Change: &orkv1.WatchJobsResponse_Job{Job: proto.Clone(job).(*orkv1.Job)}})
	return &orkv1.CreateJobResponse{Job: proto.Clone(job).(*orkv1.Job)}, nil
}

func (f *fakeOrk) GetJob(ctx context.Context, r *orkv1.GetJobRequest) (*orkv1.GetJobResponse, error) {
	if err := f.wait(ctx); err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	job := f.jobs[r.GetId()]
	if job == nil {
		return nil, fault.ToGRPC(fault.New(fault.NotFound, "no job %s", r.GetId()))
	}
	return &orkv1.GetJobResponse{Job: proto.Clone(job).(*orkv1.Job)}, nil
}

func (f *fakeOrk) ListJobs(ctx context.Context, r *orkv1.ListJobsRequest) (*orkv1.ListJobsResponse, error) {
	if err := f.wait(ctx); err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	out := &orkv1.ListJobsResponse{}
	for _, jobID := range slices.Backward(f.order) {
		job := f.jobs[jobID]
		if job == nil || len(r.GetProjectIds()) > 0 && !slices.Contains(r.GetProjectIds(), job.GetOwner().GetProjectId()) ||
			len(r.GetStates()) > 0 && !slices.Contains(r.GetStates(), job.GetState()) || r.GetName() != "" && r.GetName() != job.GetSpec().GetName() ||
			r.GetKind() != 0 && r.GetKind() != job.GetSpec().GetKind() {
			continue
		}
		if r.GetPageToken() != "" && job.GetId() >= r.GetPageToken() {
			continue
		}
		if len(out.Jobs) == int(r.GetPageSize()) {
			out.NextPageToken = out.Jobs[len(out.Jobs)-1].GetId()
			break
		}
		out.Jobs = append(out.Jobs, proto.Clone(job).(*orkv1.Job))
	}
	return out, nil
}

func (f *fakeOrk) WatchJobs(_ *orkv1.WatchJobsRequest, stream grpc.ServerStreamingServer[orkv1.WatchJobsResponse]) error {
	changes := make(chan *orkv1.WatchJobsResponse, 1000)
	f.mu.Lock()
	f.watches++
	for _, job := range f.jobs {
		changes <- &orkv1.WatchJobsResponse{Change: &orkv1.WatchJobsResponse_Job{Job: proto.Clone(job).(*orkv1.Job)}}
	}
	changes <- &orkv1.WatchJobsResponse{Change: &orkv1.WatchJobsResponse_Synced{Synced: true}}
	f.watchers[changes] = struct{}{}
	f.mu.Unlock()
	defer func() {
		f.mu.Lock()
		delete(f.watchers, changes)
		f.mu.Unlock()
	}()
	for {
		select {
		case c, ok := <-changes:
			if !ok {
				return fault.ToGRPC(fault.New(fault.Unavailable, "cut"))
			}
			if err := stream.Send(c); err != nil {
				return err
			}
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
	}
}

func (f *fakeOrk) WatchEndpoints(_ *orkv1.WatchEndpointsRequest, stream grpc.ServerStreamingServer[orkv1.WatchEndpointsResponse]) error {
	if err := stream.Send(&orkv1.WatchEndpointsResponse{}); err != nil {
		return err
	}
	<-stream.Context().Done()
	return stream.Context().Err()
}

func (f *fakeOrk) tell(c *orkv1.WatchJobsResponse) {
	for w := range f.watchers {
		w <- c
	}
}

// cut ends every watch; they come back by themselves.
func (f *fakeOrk) cut() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for w := range f.watchers {
		close(w)
		delete(f.watchers, w)
	}
}

// change edits a job and tells the watches.
func (f *fakeOrk) change(jobID string, edit func(*orkv1.Job)) *orkv1.Job {
	f.mu.Lock()
	defer f.mu.Unlock()
	job := f.jobs[jobID]
	edit(job)
	job.Revision++
	copied := proto.Clone(job).(*orkv1.Job)
	f.tell(&orkv1.WatchJobsResponse{Change: &orkv1.WatchJobsResponse_Job{Job: copied}})
	return copied
}

func (f *fakeOrk) remove(jobID string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.jobs, jobID)
	f.tell(&orkv1.WatchJobsResponse{Change: &orkv1.WatchJobsResponse_DeletedJobId{DeletedJobId: jobID}})
}

func (f *fakeOrk) StopJob(_ context.Context, r *orkv1.StopJobRequest) (*orkv1.StopJobResponse, error) {
	return &orkv1.StopJobResponse{Job: f.change(r.GetId(), func(j *orkv1.Job) {
		j.State, j.Reason = orkv1.State_STATE_STOPPING, orkv1.Reason_REASON_STOP_REQUESTED
	})}, nil
}

func (f *fakeOrk) StartJob(_ context.Context, r *orkv1.StartJobRequest) (*orkv1.StartJobResponse, error) {
	return nil, fault.ToGRPC(fault.New(fault.FailedPrecondition, "job %s has not ended", r.GetId()))
}

func (f *fakeOrk) DeleteJob(_ context.Context, r *orkv1.DeleteJobRequest) (*orkv1.DeleteJobResponse, error) {
	return &orkv1.DeleteJobResponse{Job: f.change(r.GetId(), func(j *orkv1.Job) {
		j.State, j.DeleteRequestedAt = orkv1.State_STATE_STOPPING, timestamppb.Now()
	})}, nil
}

func (f *fakeOrk) ListEvents(_ context.Context, r *orkv1.ListEventsRequest) (*orkv1.ListEventsResponse, error) {
	return &orkv1.ListEventsResponse{Events: []*orkv1.Event{
		{Sequence: 1, JobId: r.GetJobId(), Time: timestamppb.Now(), State: orkv1.State_STATE_QUEUED, Reason: orkv1.Reason_REASON_BUSY, Actor: "ork"},
	}}, nil
}

func (f *fakeOrk) ListRacks(ctx context.Context, q *orkv1.ListRacksRequest) (*orkv1.ListRacksResponse, error) {
	if err := f.wait(ctx); err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	out := &orkv1.ListRacksResponse{}
	for _, r := range f.racks {
		shown := proto.Clone(r).(*orkv1.Rack)
		if !q.GetKeys() {
			shown.Entry.Key = ""
		}
		out.Racks = append(out.Racks, shown)
	}
	return out, nil
}

func (f *fakeOrk) PutRack(_ context.Context, r *orkv1.PutRackRequest) (*orkv1.PutRackResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	known := f.racks[r.GetEntry().GetId()]
	if known != nil && known.GetEntry().GetKey() != r.GetEntry().GetKey() {
		return nil, fault.ToGRPC(fault.New(fault.Conflict, "the key of rack %s never changes", r.GetEntry().GetId()))
	}
	if known == nil {
		known = &orkv1.Rack{Connected: true}
		f.racks[r.GetEntry().GetId()] = known
	}
	known.Entry = r.GetEntry()
	return &orkv1.PutRackResponse{Entry: r.GetEntry()}, nil
}

func (f *fakeOrk) CordonRack(_ context.Context, r *orkv1.CordonRackRequest) (*orkv1.CordonRackResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	known := f.racks[r.GetId()]
	if known == nil {
		return nil, fault.ToGRPC(fault.New(fault.NotFound, "no rack %s", r.GetId()))
	}
	known.Entry.Cordoned = r.GetCordoned()
	return &orkv1.CordonRackResponse{Entry: known.GetEntry()}, nil
}

func (f *fakeOrk) ForgetRack(_ context.Context, r *orkv1.ForgetRackRequest) (*orkv1.ForgetRackResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.racks, r.GetId())
	return &orkv1.ForgetRackResponse{}, nil
}

// run makes a job running with an agent, as ork would once it said hello.
func (f *fakeOrk) run(jobID, agentKey string) {
	f.change(jobID, func(j *orkv1.Job) {
		j.State = orkv1.State_STATE_RUNNING
		j.Replicas[0].State = orkv1.State_STATE_RUNNING
		j.Replicas[0].Attempts = []*orkv1.Attempt{{Id: id.New(id.Attempt), Number: 1, State: orkv1.State_STATE_RUNNING, AgentKey: agentKey,
			AgentAddresses: []string{"/ip4/127.0.0.1/tcp/4900", "not an address"}, SshHostKey: "ssh-ed25519 AAAA host", DefaultUser: "ubuntu", AgentReady: true}}
	})
}

func (f *fakeOrk) spec(jobID string) *orkv1.JobSpec {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.jobs[jobID] == nil {
		panic(fmt.Sprintf("no job %s", jobID))
	}
	return proto.Clone(f.jobs[jobID].GetSpec()).(*orkv1.JobSpec)
}

// UpdateJob takes every update as a new specification.
func (f *fakeOrk) UpdateJob(_ context.Context, r *orkv1.UpdateJobRequest) (*orkv1.UpdateJobResponse, error) {
	return &orkv1.UpdateJobResponse{Existed: r.GetIdempotencyKey() == "seen", Job: f.change(r.GetId(), func(j *orkv1.Job) {
		j.SpecRevision++
		if r.GetArguments() != nil {
			j.Spec.Inference.Arguments = r.GetArguments().GetValues()
		}
		if r.GetReplicas() != 0 {
			j.Spec.Inference.Replicas = r.GetReplicas()
		}
	})}, nil
}

func (f *fakeOrk) RestartJob(_ context.Context, r *orkv1.RestartJobRequest) (*orkv1.RestartJobResponse, error) {
	return &orkv1.RestartJobResponse{Job: f.change(r.GetId(), func(j *orkv1.Job) {
		j.State, j.Reason = orkv1.State_STATE_STOPPING, orkv1.Reason_REASON_RESTART_REQUESTED
	})}, nil
}

func (f *fakeOrk) FenceAttempt(_ context.Context, r *orkv1.FenceAttemptRequest) (*orkv1.FenceAttemptResponse, error) {
	if r.GetConfirm() != r.GetAttemptId() {
		return nil, fault.ToGRPC(fault.New(fault.Invalid, "it is not confirmed").With(fault.Detail{Field: "confirm", Rule: "is the id again"}))
	}
	return &orkv1.FenceAttemptResponse{Job: &orkv1.Job{Id: id.New(id.Job), State: orkv1.State_STATE_QUEUED}}, nil
}
