package api

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/cosmicac/cosmicac/pkg/fault"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	"github.com/cosmicac/cosmicac/services/app-node/internal/catalogue"
	"github.com/cosmicac/cosmicac/services/app-node/internal/grants"
	"github.com/cosmicac/cosmicac/services/app-node/internal/quotas"
)

// JobRequest is what a user asks for. The orchestrator checks it and answers with
// every problem at once.
type JobRequest struct {
	Kind                 string            `json:"kind" enum:"gpu_container,managed_inference"`
	Name                 string            `json:"name" doc:"1 to 63 characters"`
	Tags                 []string          `json:"tags,omitempty"`
	Location             string            `json:"location,omitempty" doc:"A location's code, like us"`
	GPU                  GPU               `json:"gpu,omitempty"`
	CPUCoresPerGPU       uint32            `json:"cpu_cores_per_gpu,omitempty" maximum:"4294967295" doc:"0 for the default"`
	MemoryGiBPerGPU      uint32            `json:"memory_gib_per_gpu,omitempty" maximum:"4294967295" doc:"0 for the default"`
	DiskGiB              uint32            `json:"disk_gib,omitempty" maximum:"4294967295"`
	Image                string            `json:"image,omitempty" doc:"A name of GET /images"`
	Model                string            `json:"model,omitempty" doc:"An id of GET /models; for managed inference"`
	Runtime              string            `json:"runtime,omitempty" doc:"The model's own when empty; for managed inference"`
	Replicas             *uint32           `json:"replicas,omitempty" maximum:"4294967295" doc:"1 when left out; for managed inference"`
	EngineArguments      []string          `json:"engine_arguments,omitempty" doc:"The model's own when empty; for managed inference"`
	RequireAuthorization *bool             `json:"require_authorization,omitempty" doc:"Whether requests need an API key: true when left out; for managed inference"`
	Environment          map[string]string `json:"environment,omitempty"`
	StartScript          string            `json:"start_script,omitempty"`
	SSHAuthorizedKeys    []string          `json:"ssh_authorized_keys,omitempty"`
	Placement            string            `json:"placement,omitempty" enum:"pack,spread" doc:"pack (when left out) fills nodes up, spread keeps replicas apart"`
	Priority             int32             `json:"priority,omitempty" minimum:"-100" maximum:"100" doc:"Higher goes first in the queue; above 0 for administrators"`
	MaxDurationSeconds   int64             `json:"max_duration_seconds,omitempty" minimum:"0" maximum:"315360000" doc:"0 for none"`
	CostLimitCents       uint64            `json:"cost_limit_cents,omitempty" maximum:"9007199254740991" doc:"0 for none; needs a price of the GPU model"`
	IdleStopSeconds      int64             `json:"idle_stop_seconds,omitempty" minimum:"0" maximum:"315360000" doc:"Stop after so long without GPU use and without a shell; 0 for never; for GPU containers"`
	CUDA                 string            `json:"cuda,omitempty" maxLength:"64" doc:"CUDA release that the image must have, like CUDA 12.8"`
	Alerts               Alerts            `json:"alerts,omitempty"`
	Ports                []Port            `json:"ports,omitempty" doc:"Ports of the VM to open to the outside; none when left out; for GPU containers"`
	Volumes              []VolumeMount     `json:"volumes,omitempty" doc:"Volumes of the project to attach; for GPU containers"`
}

// Alerts say what is worth a condition and an event of its own.
type Alerts struct {
	CostPercent             uint32 `json:"cost_percent,omitempty" maximum:"4294967295" doc:"The cost reached this share of the cost limit, 1 to 100"`
	QueuedAfterSeconds      int64  `json:"queued_after_seconds,omitempty" minimum:"0" maximum:"315360000" doc:"It has waited for placement this long"`
	UnreachableAfterSeconds int64  `json:"unreachable_after_seconds,omitempty" minimum:"0" maximum:"315360000" doc:"It has not been heard of for this long"`
}

type createJobInput struct {
	IdempotencyKey string `header:"Idempotency-Key" doc:"1 to 128 printable ASCII characters. The same key gives the same job."`
	Body           JobRequest
}

type jobOutput struct {
	Replayed string `header:"Idempotency-Replayed" doc:"true when the job existed already under this key"`
	Body     Job
}

func (s *Server) createJob(ctx context.Context, in *createJobInput) (*jobOutput, error) {
	key := in.IdempotencyKey
	if key == "" {
		key = rand.Text()
	}
	if err := checkIdempotencyKey(key); err != nil {
		return nil, err
	}
	request, err := s.request(ctx, in.Body)
	if err != nil {
		return nil, err
	}
	request.IdempotencyKey = key
	answer, err := s.Ork.CreateJob(ctx, request)
	if err != nil {
		return nil, err
	}
	job := answer.GetJob()
	target(ctx, job.GetId())
	out := &jobOutput{Body: s.job(job)}
	if answer.GetExisted() {
		out.Replayed = "true"
	}
	return out, nil
}

func checkIdempotencyKey(key string) error {
	if len(key) > 128 || strings.ContainsFunc(key, func(r rune) bool { return r < ' ' || r > '~' }) {
		return fault.New(fault.Invalid, "the idempotency key is not valid").
			With(fault.Detail{Field: "header.Idempotency-Key", Rule: "must have 1 to 128 printable ASCII characters"})
	}
	return nil
}

// request is what the orchestrator is asked for: the job in its words, whose it is,
// and what app-node knows of price and quota.
func (s *Server) request(ctx context.Context, r JobRequest) (*orkv1.CreateJobRequest, error) {
	if err := mayQueue(ctx, r.Priority); err != nil {
		return nil, err
	}
	spec, problems, err := s.spec(ctx, r)
	if err != nil {
		return nil, err
	}
	p := caller(ctx)
	quota, err := s.Store.Quota(ctx, p.Personal())
	if err != nil {
		return nil, err
	}
	request := &orkv1.CreateJobRequest{Spec: spec, Owner: &orkv1.Owner{ProjectId: p.Personal(), UserId: p.User.ID}, Quota: quotas.Wire(quota)}
	if cents, currency, known := s.Catalogue.Price(spec.GetGpu().GetModel()); known {
		request.Price = &orkv1.Price{CentsPerGpuHour: cents, Currency: currency}
	}
	if problems != nil {
		return nil, s.everyProblem(ctx, request, problems)
	}
	return request, nil
}

// everyProblem is the refusal of a job with what is wrong by the catalogue and what
// is wrong by the orchestrator, as one list. It records nothing.
func (s *Server) everyProblem(ctx context.Context, request *orkv1.CreateJobRequest, problems []fault.Detail) error {
	trial := proto.Clone(request).(*orkv1.CreateJobRequest)
	trial.DryRun, trial.IdempotencyKey = true, ""
	_, err := s.Ork.CreateJob(ctx, trial)
	if fault.Is(err, fault.Invalid) {
		for _, d := range fault.DetailsOf(err) {
			if !slices.ContainsFunc(problems, func(p fault.Detail) bool { return p.Field == d.Field }) {
				problems = append(problems, d)
			}
		}
	}
	return fault.InvalidFields("the job cannot be created", problems)
}

// spec turns a request into the orchestrator's words. It resolves names of the
// catalogue and returns what is wrong with those; the rest is the orchestrator's to
// judge.
func (s *Server) spec(ctx context.Context, r JobRequest) (*orkv1.JobSpec, []fault.Detail, error) {
	inference := r.Kind == kindInference
	var problems []fault.Detail
	if !inference {
		problems = onlyInference(r)
	}
	resolved, unknown, err := s.Catalogue.Resolve(ctx, catalogue.Choice{Image: r.Image, Model: r.Model, Runtime: r.Runtime, CUDA: r.CUDA, Inference: inference})
	if err != nil {
		return nil, nil, err
	}
	problems = append(problems, unknown...)
	spec := &orkv1.JobSpec{
		Kind: jobKinds[r.Kind], Name: r.Name, Tags: r.Tags, Location: strings.ToLower(r.Location),
		Gpu:            &orkv1.GpuRequest{Model: r.GPU.Model, Count: r.GPU.Count},
		CpuCoresPerGpu: r.CPUCoresPerGPU, MemoryGibPerGpu: r.MemoryGiBPerGPU, DiskGib: r.DiskGiB,
		Image:       &orkv1.Image{Name: resolved.Image.Name, Reference: resolved.Image.Reference, DefaultUser: resolved.Image.DefaultUser},
		Environment: r.Environment, StartScript: r.StartScript, SshAuthorizedKeys: r.SSHAuthorizedKeys, CostLimitCents: r.CostLimitCents,
		MaxDuration: seconds(r.MaxDurationSeconds), IdleStop: seconds(r.IdleStopSeconds), Cuda: r.CUDA,
		Placement: placements[r.Placement], Priority: r.Priority, Ports: wirePorts(r.Ports), Volumes: wireMounts(r.Volumes),
	}
	if r.Alerts != (Alerts{}) {
		spec.Alerts = &orkv1.Alerts{CostPercent: r.Alerts.CostPercent, QueuedAfter: seconds(r.Alerts.QueuedAfterSeconds), UnreachableAfter: seconds(r.Alerts.UnreachableAfterSeconds)}
	}
	if !inference {
		return spec, problems, nil
	}
	spec.Inference = &orkv1.InferenceSpec{Model: r.Model, Runtime: resolved.Runtime, Replicas: 1, Arguments: r.EngineArguments, RequireAuthorization: true}
	if r.Replicas != nil {
		if *r.Replicas == 0 {
			problems = append(problems, fault.Detail{Field: "replicas", Rule: "is 0; at least 1 is needed"})
		}
		spec.Inference.Replicas = *r.Replicas
	}
	if r.RequireAuthorization != nil {
		spec.Inference.RequireAuthorization = *r.RequireAuthorization
	}
	if len(r.EngineArguments) == 0 {
		spec.Inference.Arguments = resolved.Arguments
	}
	return spec, problems, nil
}

// seconds is a duration of the wire, nil for none.
func seconds(n int64) *durationpb.Duration {
	if n <= 0 {
		return nil
	}
	return durationpb.New(time.Duration(n) * time.Second)
}

// onlyInference names what a GPU container would silently ignore.
func onlyInference(r JobRequest) (details []fault.Detail) {
	for _, f := range []struct {
		field string
		given bool
	}{
		{"model", r.Model != ""}, {"runtime", r.Runtime != ""}, {"replicas", r.Replicas != nil && *r.Replicas != 1},
		{"engine_arguments", len(r.EngineArguments) > 0},
	} {
		if f.given {
			details = append(details, fault.Detail{Field: f.field, Rule: "is for managed_inference only"})
		}
	}
	return details
}

// owned reads a job that the caller may see. Another's is not found, in the same
// words as one that does not exist.
func (s *Server) owned(ctx context.Context, jobID string) (*orkv1.Job, error) {
	missing := fault.New(fault.NotFound, "there is no job %q", jobID)
	if !plainID(jobID) {
		return nil, missing
	}
	job, err := s.Ork.Job(ctx, jobID)
	if fault.Is(err, fault.NotFound) || (fault.Is(err, fault.Invalid) && err != nil) {
		return nil, missing
	}
	if err != nil {
		return nil, err
	}
	if !caller(ctx).Sees(job.GetOwner().GetProjectId()) {
		return nil, missing
	}
	return job, nil
}

// plainID tells whether a text could be an id at all.
func plainID(text string) bool {
	return text != "" && len(text) <= 64 && !strings.ContainsFunc(text, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '-' && r != '_' && r != '.'
	})
}

// JobPath names a job.
type JobPath struct {
	ID string `path:"id" doc:"j-..."`
}

type listJobsInput struct {
	Kind      string `query:"kind" enum:"gpu_container,managed_inference"`
	State     string `query:"state" maxLength:"256" doc:"States with commas between"`
	Name      string `query:"name" maxLength:"256" doc:"Exactly this name"`
	PageSize  int    `query:"page_size" minimum:"1" maximum:"500" default:"100"`
	PageToken string `query:"page_token" maxLength:"1024"`
}

type listJobsOutput struct {
	Body struct {
		Jobs          []Job  `json:"jobs" doc:"Newest first"`
		NextPageToken string `json:"next_page_token" doc:"Empty on the last page"`
	}
}

func (s *Server) listJobs(ctx context.Context, in *listJobsInput) (*listJobsOutput, error) {
	p := caller(ctx)
	request := &orkv1.ListJobsRequest{Kind: jobKinds[in.Kind], Name: in.Name, PageSize: uint32(in.PageSize), PageToken: in.PageToken}
	if !p.User.Administrator {
		// No project would mean every project.
		if request.ProjectIds = p.ProjectIDs(); len(request.ProjectIds) == 0 {
			return nil, fault.New(fault.Internal, "user %s belongs to no project", p.User.ID)
		}
	}
	for _, name := range strings.Split(in.State, ",") {
		if name = strings.TrimSpace(name); name == "" {
			continue
		}
		state, ok := orkv1.State_value["STATE_"+strings.ToUpper(name)]
		if !ok || state == 0 {
			return nil, fault.New(fault.Invalid, "there is no such state").
				With(fault.Detail{Field: "query.state", Rule: "must be some of " + strings.Join(stateNames(), ", ")})
		}
		request.States = append(request.States, orkv1.State(state))
	}
	page, err := s.Ork.Jobs(ctx, request)
	if err != nil {
		return nil, err
	}
	out := &listJobsOutput{}
	out.Body.Jobs, out.Body.NextPageToken = []Job{}, page.GetNextPageToken()
	for _, j := range page.GetJobs() {
		if p.Sees(j.GetOwner().GetProjectId()) {
			out.Body.Jobs = append(out.Body.Jobs, s.job(j))
		}
	}
	return out, nil
}

func stateNames() []string {
	var names []string
	for number := range orkv1.State_name {
		if number != 0 {
			names = append(names, string(stateName(orkv1.State(number))))
		}
	}
	slices.Sort(names)
	return names
}

func (s *Server) getJob(ctx context.Context, in *JobPath) (*jobOutput, error) {
	job, err := s.owned(ctx, in.ID)
	if err != nil {
		return nil, err
	}
	return &jobOutput{Body: s.job(job)}, nil
}

func (s *Server) stopJob(ctx context.Context, in *JobPath) (*jobOutput, error) {
	return s.act(ctx, in.ID, s.Ork.StopJob)
}

func (s *Server) startJob(ctx context.Context, in *JobPath) (*jobOutput, error) {
	return s.act(ctx, in.ID, s.Ork.StartJob)
}

func (s *Server) restartJob(ctx context.Context, in *JobPath) (*jobOutput, error) {
	return s.act(ctx, in.ID, s.Ork.RestartJob)
}

func (s *Server) deleteJob(ctx context.Context, in *JobPath) (*jobOutput, error) {
	return s.act(ctx, in.ID, s.Ork.DeleteJob)
}

func (s *Server) act(ctx context.Context, jobID string, do func(ctx context.Context, id, actor string) (*orkv1.Job, error)) (*jobOutput, error) {
	target(ctx, jobID)
	job, err := s.owned(ctx, jobID)
	if err != nil {
		return nil, err
	}
	if job, err = do(ctx, job.GetId(), caller(ctx).User.ID); err != nil {
		return nil, err
	}
	return &jobOutput{Body: s.job(job)}, nil
}

// JobEvent is one transition of a job.
type JobEvent struct {
	Sequence  uint64     `json:"sequence"`
	Time      *time.Time `json:"time,omitempty"`
	State     State      `json:"state"`
	Reason    Reason     `json:"reason"`
	Message   string     `json:"message"`
	Actor     string     `json:"actor" doc:"A user id, \"ork\" or a rack id"`
	AttemptID string     `json:"attempt_id"`
	ReplicaID string     `json:"replica_id"`
}

type historyOutput struct {
	Body struct {
		Events []JobEvent `json:"events" doc:"Oldest first"`
	}
}

func (s *Server) jobHistory(ctx context.Context, in *JobPath) (*historyOutput, error) {
	job, err := s.owned(ctx, in.ID)
	if err != nil {
		return nil, err
	}
	events, err := s.Ork.Events(ctx, job.GetId(), 0)
	if err != nil {
		return nil, err
	}
	out := &historyOutput{}
	out.Body.Events = []JobEvent{}
	for _, e := range events {
		out.Body.Events = append(out.Body.Events, JobEvent{Sequence: e.GetSequence(), Time: stamp(e.GetTime()), State: stateName(e.GetState()),
			Reason: reasonName(e.GetReason()), Message: e.GetMessage(), Actor: e.GetActor(), AttemptID: e.GetAttemptId(), ReplicaID: e.GetReplicaId()})
	}
	return out, nil
}

type grantInput struct {
	JobPath
	Body struct {
		ClientKey string   `json:"client_key" maxLength:"256" doc:"The peer id or 64 hex digits of the key that will connect"`
		Rights    []string `json:"rights,omitempty" maxItems:"16" doc:"Some of shell, exec, files, forward; all when empty"`
	}
}

type grantOutput struct {
	Body struct {
		Grant          string    `json:"grant" doc:"Base64 of the signed envelope"`
		AgentKey       string    `json:"agent_key"`
		AgentAddresses []string  `json:"agent_addresses"`
		SSHHostKey     string    `json:"ssh_host_key"`
		DefaultUser    string    `json:"default_user"`
		ExpiresAt      time.Time `json:"expires_at"`
	}
}

func (s *Server) createGrant(ctx context.Context, in *grantInput) (*grantOutput, error) {
	target(ctx, in.ID)
	job, err := s.owned(ctx, in.ID)
	if err != nil {
		return nil, err
	}
	granted, err := s.Grants.Sign(grants.Request{Job: job, ClientKey: in.Body.ClientKey, Rights: in.Body.Rights, UserID: caller(ctx).User.ID, Epoch: caller(ctx).GrantEpoch})
	if err != nil {
		return nil, err
	}
	g := granted.Grant
	out := &grantOutput{}
	out.Body.Grant = base64.StdEncoding.EncodeToString(granted.Envelope)
	out.Body.AgentKey, out.Body.AgentAddresses = g.GetAgentKey(), texts(g.GetAgentAddresses())
	out.Body.SSHHostKey, out.Body.DefaultUser = g.GetSshHostKey(), g.GetDefaultUser()
	out.Body.ExpiresAt = g.GetNotAfter().AsTime()
	return out, nil
}
