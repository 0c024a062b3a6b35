package api

import (
	"context"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

// AttemptPath names an attempt.
type AttemptPath struct {
	ID string `path:"id" maxLength:"64" doc:"a-..."`
}

type fenceInput struct {
	AttemptPath
	Body struct {
		Confirm string `json:"confirm" maxLength:"64" doc:"The attempt's id again: its machine is off"`
	}
}

func (s *Server) fenceAttempt(ctx context.Context, in *fenceInput) (*jobOutput, error) {
	target(ctx, in.ID)
	job, err := s.Ork.FenceAttempt(ctx, &orkv1.FenceAttemptRequest{AttemptId: in.ID, Confirm: in.Body.Confirm, Actor: caller(ctx).User.ID})
	if err != nil {
		return nil, err
	}
	return &jobOutput{Body: s.job(job)}, nil
}

type drainInput struct {
	RackOf
	Body struct {
		DeadlineSeconds int64 `json:"deadline_seconds" minimum:"0" maximum:"2592000" doc:"From now; 0 stops at once"`
	}
}

type drainOutput struct {
	Body struct {
		RackEntry
		Jobs uint32 `json:"jobs" doc:"Jobs that were told"`
	}
}

func (s *Server) drainRack(ctx context.Context, in *drainInput) (*drainOutput, error) {
	target(ctx, in.ID)
	answer, err := s.Ork.DrainRack(ctx, &orkv1.DrainRackRequest{Id: in.ID, Deadline: durationpb.New(time.Duration(in.Body.DeadlineSeconds) * time.Second), Actor: caller(ctx).User.ID})
	if err != nil {
		return nil, err
	}
	out := &drainOutput{}
	out.Body.RackEntry, out.Body.Jobs = entry(answer.GetEntry()), answer.GetJobs()
	return out, nil
}

// ForgottenRack is what stays of a rack that was removed by force.
type ForgottenRack struct {
	ID          string             `json:"id"`
	Location    string             `json:"location"`
	Key         string             `json:"key"`
	ForgottenAt *time.Time         `json:"forgotten_at,omitempty"`
	Actor       string             `json:"actor"`
	Returned    bool               `json:"returned" doc:"An entry has the id again"`
	Attempts    []AbandonedAttempt `json:"attempts"`
	DiskJobIDs  []string           `json:"disk_job_ids" doc:"Jobs whose root disks may be there"`
}

// AbandonedAttempt may still run on a rack that was removed by force.
type AbandonedAttempt struct {
	AttemptID string   `json:"attempt_id"`
	JobID     string   `json:"job_id"`
	JobName   string   `json:"job_name"`
	ProjectID string   `json:"project_id"`
	NodeNames []string `json:"node_names"`
	GPUCount  uint32   `json:"gpu_count"`
	Present   bool     `json:"present" doc:"The returned rack lists it"`
}

func forgotten(f *orkv1.ForgottenRack) ForgottenRack {
	out := ForgottenRack{ID: f.GetRackId(), Location: f.GetLocation(), Key: f.GetKey(), ForgottenAt: stamp(f.GetForgottenAt()), Actor: f.GetActor(),
		Returned: f.GetReturned(), Attempts: []AbandonedAttempt{}, DiskJobIDs: texts(f.GetDiskJobIds())}
	for _, a := range f.GetAttempts() {
		out.Attempts = append(out.Attempts, AbandonedAttempt{AttemptID: a.GetAttemptId(), JobID: a.GetJobId(), JobName: a.GetJobName(), ProjectID: a.GetProjectId(),
			NodeNames: texts(a.GetNodeNames()), GPUCount: a.GetGpuCount(), Present: a.GetPresent()})
	}
	return out
}

type forgetInput struct {
	RackOf
	Force   bool   `query:"force" doc:"Also with live attempts and kept disks: they are abandoned, not stopped"`
	Confirm string `query:"confirm" maxLength:"64" doc:"The rack's id again, with force"`
}

type forgetOutput struct {
	Body struct {
		Abandoned *ForgottenRack `json:"abandoned" doc:"null when nothing was left"`
	}
}

func (s *Server) forgetRack(ctx context.Context, in *forgetInput) (*forgetOutput, error) {
	target(ctx, in.ID)
	left, err := s.Ork.ForgetRack(ctx, &orkv1.ForgetRackRequest{Id: in.ID, Force: in.Force, Confirm: in.Confirm, Actor: caller(ctx).User.ID})
	if err != nil {
		return nil, err
	}
	out := &forgetOutput{}
	if left != nil {
		f := forgotten(left)
		out.Body.Abandoned = &f
	}
	return out, nil
}

type forgottenOutput struct {
	Body struct {
		Racks []ForgottenRack `json:"racks"`
	}
}

func (s *Server) listForgottenRacks(ctx context.Context, _ *struct{}) (*forgottenOutput, error) {
	all, err := s.Ork.ForgottenRacks(ctx)
	if err != nil {
		return nil, err
	}
	out := &forgottenOutput{}
	out.Body.Racks = []ForgottenRack{}
	for _, f := range all {
		out.Body.Racks = append(out.Body.Racks, forgotten(f))
	}
	return out, nil
}

type resolveInput struct {
	RackOf
	Body struct {
		Action  string `json:"action" enum:"adopt,delete"`
		Confirm string `json:"confirm,omitempty" maxLength:"64" doc:"The rack's id again, to delete"`
	}
}

type resolveOutput struct {
	Body struct {
		Attempts uint32 `json:"attempts"`
	}
}

func (s *Server) resolveAbandoned(ctx context.Context, in *resolveInput) (*resolveOutput, error) {
	target(ctx, in.ID)
	action := orkv1.AbandonedAction_ABANDONED_ACTION_ADOPT
	if in.Body.Action == "delete" {
		action = orkv1.AbandonedAction_ABANDONED_ACTION_DELETE
	}
	n, err := s.Ork.ResolveAbandoned(ctx, &orkv1.ResolveAbandonedRequest{RackId: in.ID, Action: action, Confirm: in.Body.Confirm, Actor: caller(ctx).User.ID})
	out := &resolveOutput{}
	out.Body.Attempts = n
	return out, err
}

// Quarantine is what is left out of placement, or suspect.
type Quarantine struct {
	RackID   string         `json:"rack_id"`
	NodeName string         `json:"node_name"`
	GPUModel string         `json:"gpu_model" doc:"Empty for the whole node"`
	Active   bool           `json:"active" doc:"false while it is suspect only"`
	Since    *time.Time     `json:"since,omitempty"`
	Actor    string         `json:"actor"`
	Message  string         `json:"message"`
	Evidence []StartFailure `json:"evidence" doc:"Newest first"`
}

// StartFailure is an attempt that could not be started on a node.
type StartFailure struct {
	AttemptID string     `json:"attempt_id"`
	JobID     string     `json:"job_id"`
	Time      *time.Time `json:"time,omitempty"`
	Reason    Reason     `json:"reason"`
	Message   string     `json:"message"`
	GPUUUIDs  []string   `json:"gpu_uuids" doc:"As the agent said, if one spoke"`
}

type quarantinesInput struct {
	RackID string `query:"rack_id" maxLength:"64"`
}

type quarantinesOutput struct {
	Body struct {
		Quarantines []Quarantine `json:"quarantines"`
	}
}

func (s *Server) listQuarantines(ctx context.Context, in *quarantinesInput) (*quarantinesOutput, error) {
	all, err := s.Ork.Quarantines(ctx, in.RackID)
	if err != nil {
		return nil, err
	}
	out := &quarantinesOutput{}
	out.Body.Quarantines = []Quarantine{}
	for _, q := range all {
		shown := Quarantine{RackID: q.GetRackId(), NodeName: q.GetNodeName(), GPUModel: q.GetGpuModel(), Active: q.GetActive(), Since: stamp(q.GetSince()),
			Actor: q.GetActor(), Message: q.GetMessage(), Evidence: []StartFailure{}}
		for _, f := range q.GetEvidence() {
			shown.Evidence = append(shown.Evidence, StartFailure{AttemptID: f.GetAttemptId(), JobID: f.GetJobId(), Time: stamp(f.GetTime()),
				Reason: reasonName(f.GetReason()), Message: f.GetMessage(), GPUUUIDs: texts(f.GetGpuUuids())})
		}
		out.Body.Quarantines = append(out.Body.Quarantines, shown)
	}
	return out, nil
}

type setQuarantineInput struct {
	Body struct {
		RackID   string `json:"rack_id" maxLength:"64"`
		NodeName string `json:"node_name" maxLength:"253"`
		GPUModel string `json:"gpu_model,omitempty" maxLength:"100" doc:"Empty for the whole node"`
		Message  string `json:"message" minLength:"1" maxLength:"1024" doc:"Why; users who wait read it"`
	}
}

func (s *Server) setQuarantine(ctx context.Context, in *setQuarantineInput) (*nothing, error) {
	target(ctx, in.Body.RackID+"/"+in.Body.NodeName)
	return nil, s.Ork.SetQuarantine(ctx, &orkv1.SetQuarantineRequest{RackId: in.Body.RackID, NodeName: in.Body.NodeName, GpuModel: in.Body.GPUModel,
		Message: in.Body.Message, Actor: caller(ctx).User.ID})
}

type liftQuarantineInput struct {
	Body struct {
		RackID   string `json:"rack_id" maxLength:"64"`
		NodeName string `json:"node_name" maxLength:"253"`
		GPUModel string `json:"gpu_model,omitempty" maxLength:"100" doc:"Empty for every model of the node"`
	}
}

func (s *Server) liftQuarantine(ctx context.Context, in *liftQuarantineInput) (*nothing, error) {
	target(ctx, in.Body.RackID+"/"+in.Body.NodeName)
	return nil, s.Ork.LiftQuarantine(ctx, &orkv1.LiftQuarantineRequest{RackId: in.Body.RackID, NodeName: in.Body.NodeName, GpuModel: in.Body.GPUModel, Actor: caller(ctx).User.ID})
}
