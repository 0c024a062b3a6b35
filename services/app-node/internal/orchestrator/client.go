// Package orchestrator is app-node's view of wrk-ork: calls with a deadline, one
// shared watch of every job, and which endpoint belongs to which job.
//
// It says in words when the orchestrator is away and never hangs longer than its
// timeout. It does not check who may see a job, and it keeps nothing: what it holds
// in memory is a copy that is rebuilt on every reconnect.
package orchestrator

import (
	"context"
	"errors"
	"slices"
	"time"

	"google.golang.org/grpc"

	"github.com/cosmicac/cosmicac/pkg/fault"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

// Timeout bounds every call, so that a user waits this long at most.
const Timeout = 5 * time.Second

// Connector finds the orchestrator as it is known now. It does not dial.
type Connector func() (grpc.ClientConnInterface, error)

// Client calls the orchestrator. Its errors are faults for the user: what ork
// said of the request passes through, all else is `unavailable` in words.
type Client struct {
	connect Connector
	timeout time.Duration
	observe func(method string, kind fault.Kind)
}

// NewClient makes a client. observe is told each call's method and kind ("" for
// success); nil for nobody.
func NewClient(connect Connector, timeout time.Duration, observe func(method string, kind fault.Kind)) *Client {
	if observe == nil {
		observe = func(string, fault.Kind) {}
	}
	return &Client{connect: connect, timeout: timeout, observe: observe}
}

func call[S, Q, A any](ctx context.Context, c *Client, method string, service func(grpc.ClientConnInterface) S,
	f func(S, context.Context, Q, ...grpc.CallOption) (A, error), request Q,
) (A, error) {
	var none A
	conn, err := c.connect()
	if err != nil {
		c.observe(method, fault.KindOf(err))
		return none, away(err)
	}
	inner, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	answer, err := f(service(conn), inner, request)
	c.observe(method, fault.KindOf(err))
	if err == nil {
		return answer, nil
	}
	if ctx.Err() != nil && errors.Is(ctx.Err(), context.Canceled) {
		return none, fault.Wrap(fault.Canceled, ctx.Err(), "the request was given up")
	}
	return none, translate(err)
}

// translate keeps what is about the request and turns the rest into `unavailable`.
// A refusal of this daemon by the mesh is not a refusal of the user.
func translate(err error) error {
	err = fault.FromGRPC(err)
	switch fault.KindOf(err) {
	case fault.Unavailable, fault.Unreachable, fault.Timeout, fault.Canceled:
		if slices.ContainsFunc(fault.DetailsOf(err), func(d fault.Detail) bool { return d.Rule == "storage" }) {
			// It answers, and what failed there changed nothing.
			return fault.Wrap(fault.Unavailable, err, "the orchestrator cannot write its record now, so nothing was changed; jobs that run keep running: try again, and have an administrator look at its disk (cosmicac doctor)")
		}
		return away(err)
	case fault.Denied, fault.Unauthenticated:
		return fault.Wrap(fault.Unavailable, err, "the orchestrator refuses this app-node: check that its key is in the roster with the role app-node")
	}
	return err
}

func away(cause error) error {
	return fault.Wrap(fault.Unavailable, cause, "the orchestrator cannot be reached now; jobs that run keep running, and whether a change was made is shown once it is back: try again")
}

// CreateJob records a job, or plans one in a dry run.
func (c *Client) CreateJob(ctx context.Context, request *orkv1.CreateJobRequest) (*orkv1.CreateJobResponse, error) {
	return call(ctx, c, "CreateJob", orkv1.NewJobsClient, orkv1.JobsClient.CreateJob, request)
}

// Job reads one job.
func (c *Client) Job(ctx context.Context, id string) (*orkv1.Job, error) {
	r, err := call(ctx, c, "GetJob", orkv1.NewJobsClient, orkv1.JobsClient.GetJob, &orkv1.GetJobRequest{Id: id})
	if err == nil && r.GetJob() == nil {
		return nil, fault.New(fault.NotFound, "there is no job %q", id)
	}
	return r.GetJob(), err
}

// Jobs lists a page of jobs, newest first.
func (c *Client) Jobs(ctx context.Context, request *orkv1.ListJobsRequest) (*orkv1.ListJobsResponse, error) {
	return call(ctx, c, "ListJobs", orkv1.NewJobsClient, orkv1.JobsClient.ListJobs, request)
}

// StopJob ends a job's attempts and gives up its GPUs.
func (c *Client) StopJob(ctx context.Context, id, actor string) (*orkv1.Job, error) {
	r, err := call(ctx, c, "StopJob", orkv1.NewJobsClient, orkv1.JobsClient.StopJob, &orkv1.StopJobRequest{Id: id, Actor: actor})
	return r.GetJob(), err
}

// StartJob makes new attempts for what has ended.
func (c *Client) StartJob(ctx context.Context, id, actor string) (*orkv1.Job, error) {
	r, err := call(ctx, c, "StartJob", orkv1.NewJobsClient, orkv1.JobsClient.StartJob, &orkv1.StartJobRequest{Id: id, Actor: actor})
	return r.GetJob(), err
}

// DeleteJob stops a job and removes its disks.
func (c *Client) DeleteJob(ctx context.Context, id, actor string) (*orkv1.Job, error) {
	r, err := call(ctx, c, "DeleteJob", orkv1.NewJobsClient, orkv1.JobsClient.DeleteJob, &orkv1.DeleteJobRequest{Id: id, Actor: actor})
	return r.GetJob(), err
}

// PutGrantFloors hands over which grants are void, and returns the highest epoch
// that the orchestrator holds.
func (c *Client) PutGrantFloors(ctx context.Context, floors []*orkv1.ProjectGrantFloor) (highest uint64, err error) {
	r, err := call(ctx, c, "PutGrantFloors", orkv1.NewRevocationsClient, orkv1.RevocationsClient.PutGrantFloors, &orkv1.PutGrantFloorsRequest{Floors: floors})
	return r.GetHighestEpoch(), err
}

// PutQuotas hands over how many GPUs projects may hold.
func (c *Client) PutQuotas(ctx context.Context, quotas []*orkv1.ProjectQuota) error {
	_, err := call(ctx, c, "PutQuotas", orkv1.NewQuotasClient, orkv1.QuotasClient.PutQuotas, &orkv1.PutQuotasRequest{Quotas: quotas})
	return err
}

// Quota reads what the orchestrator knows of a project's quota.
func (c *Client) Quota(ctx context.Context, projectID string) (*orkv1.GetQuotaResponse, error) {
	return call(ctx, c, "GetQuota", orkv1.NewQuotasClient, orkv1.QuotasClient.GetQuota, &orkv1.GetQuotaRequest{ProjectId: projectID})
}

// Availability lists what one could get now; empty for every location and model.
func (c *Client) Availability(ctx context.Context, location, model string) ([]*orkv1.GpuAvailability, error) {
	r, err := call(ctx, c, "GetAvailability", orkv1.NewRacksClient, orkv1.RacksClient.GetAvailability, &orkv1.GetAvailabilityRequest{Location: location, GpuModel: model})
	return r.GetGpus(), err
}

// Events lists a job's transitions after a sequence number, oldest first.
func (c *Client) Events(ctx context.Context, id string, after uint64) ([]*orkv1.Event, error) {
	r, err := call(ctx, c, "ListEvents", orkv1.NewJobsClient, orkv1.JobsClient.ListEvents, &orkv1.ListEventsRequest{JobId: id, AfterSequence: after})
	return r.GetEvents(), err
}

// Racks lists racks with their workers' reports, without keys.
func (c *Client) Racks(ctx context.Context) ([]*orkv1.Rack, error) {
	return c.ListRacks(ctx, &orkv1.ListRacksRequest{})
}

// ListRacks lists the racks that are asked for.
func (c *Client) ListRacks(ctx context.Context, request *orkv1.ListRacksRequest) ([]*orkv1.Rack, error) {
	r, err := call(ctx, c, "ListRacks", orkv1.NewRacksClient, orkv1.RacksClient.ListRacks, request)
	return r.GetRacks(), err
}

// PutRack makes or changes a rack's entry.
func (c *Client) PutRack(ctx context.Context, entry *orkv1.RackEntry) (*orkv1.RackEntry, error) {
	r, err := call(ctx, c, "PutRack", orkv1.NewRacksClient, orkv1.RacksClient.PutRack, &orkv1.PutRackRequest{Entry: entry})
	return r.GetEntry(), err
}

// CordonRack stops or resumes new grants on a rack.
func (c *Client) CordonRack(ctx context.Context, id string, cordoned bool) (*orkv1.RackEntry, error) {
	r, err := call(ctx, c, "CordonRack", orkv1.NewRacksClient, orkv1.RacksClient.CordonRack, &orkv1.CordonRackRequest{Id: id, Cordoned: cordoned})
	return r.GetEntry(), err
}

// ForgetRack removes a rack's entry; what a forced removal left comes back.
func (c *Client) ForgetRack(ctx context.Context, request *orkv1.ForgetRackRequest) (*orkv1.ForgottenRack, error) {
	r, err := call(ctx, c, "ForgetRack", orkv1.NewRacksClient, orkv1.RacksClient.ForgetRack, request)
	return r.GetAbandoned(), err
}

// UpdateJob gives a job another specification, replica by replica.
func (c *Client) UpdateJob(ctx context.Context, request *orkv1.UpdateJobRequest) (*orkv1.UpdateJobResponse, error) {
	return call(ctx, c, "UpdateJob", orkv1.NewJobsClient, orkv1.JobsClient.UpdateJob, request)
}

// RestartJob ends a job's attempts and has others follow.
func (c *Client) RestartJob(ctx context.Context, id, actor string) (*orkv1.Job, error) {
	r, err := call(ctx, c, "RestartJob", orkv1.NewJobsClient, orkv1.JobsClient.RestartJob, &orkv1.RestartJobRequest{Id: id, Actor: actor})
	return r.GetJob(), err
}

// FenceAttempt gives up a silent attempt on an operator's word.
func (c *Client) FenceAttempt(ctx context.Context, request *orkv1.FenceAttemptRequest) (*orkv1.Job, error) {
	r, err := call(ctx, c, "FenceAttempt", orkv1.NewJobsClient, orkv1.JobsClient.FenceAttempt, request)
	return r.GetJob(), err
}

// DrainRack closes a rack, and stops what runs there at a deadline.
func (c *Client) DrainRack(ctx context.Context, request *orkv1.DrainRackRequest) (*orkv1.DrainRackResponse, error) {
	return call(ctx, c, "DrainRack", orkv1.NewRacksClient, orkv1.RacksClient.DrainRack, request)
}

// ForgottenRacks lists racks that were removed by force, with what was left there.
func (c *Client) ForgottenRacks(ctx context.Context) ([]*orkv1.ForgottenRack, error) {
	r, err := call(ctx, c, "ListForgottenRacks", orkv1.NewRacksClient, orkv1.RacksClient.ListForgottenRacks, &orkv1.ListForgottenRacksRequest{})
	return r.GetRacks(), err
}

// ResolveAbandoned decides about what a forced removal left, and says of how many
// attempts.
func (c *Client) ResolveAbandoned(ctx context.Context, request *orkv1.ResolveAbandonedRequest) (uint32, error) {
	r, err := call(ctx, c, "ResolveAbandoned", orkv1.NewRacksClient, orkv1.RacksClient.ResolveAbandoned, request)
	return r.GetAttempts(), err
}

// Quarantines lists what is left out of placement or suspect; of one rack, or of all.
func (c *Client) Quarantines(ctx context.Context, rackID string) ([]*orkv1.Quarantine, error) {
	r, err := call(ctx, c, "ListQuarantines", orkv1.NewRacksClient, orkv1.RacksClient.ListQuarantines, &orkv1.ListQuarantinesRequest{RackId: rackID})
	return r.GetQuarantines(), err
}

// SetQuarantine leaves a node, or one GPU model of it, out of placement.
func (c *Client) SetQuarantine(ctx context.Context, request *orkv1.SetQuarantineRequest) error {
	_, err := call(ctx, c, "SetQuarantine", orkv1.NewRacksClient, orkv1.RacksClient.SetQuarantine, request)
	return err
}

// LiftQuarantine takes it back.
func (c *Client) LiftQuarantine(ctx context.Context, request *orkv1.LiftQuarantineRequest) error {
	_, err := call(ctx, c, "LiftQuarantine", orkv1.NewRacksClient, orkv1.RacksClient.LiftQuarantine, request)
	return err
}
