package api

import (
	"maps"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cosmicac/cosmicac/pkg/lexicon"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

// GPU asks for whole GPUs of one model.
type GPU struct {
	Model string `json:"model" doc:"Like GH100_H100_SXM5_80GB"`
	Count uint32 `json:"count" maximum:"4294967295"`
}

// Job is a job with everything that is known of it.
type Job struct {
	ID                   string            `json:"id"`
	Kind                 string            `json:"kind" enum:"gpu_container,managed_inference"`
	Name                 string            `json:"name"`
	Tags                 []string          `json:"tags"`
	Location             string            `json:"location"`
	GPU                  GPU               `json:"gpu"`
	CPUCoresPerGPU       uint32            `json:"cpu_cores_per_gpu"`
	MemoryGiBPerGPU      uint32            `json:"memory_gib_per_gpu"`
	DiskGiB              uint32            `json:"disk_gib"`
	Image                string            `json:"image"`
	Model                string            `json:"model"`
	Runtime              string            `json:"runtime"`
	Replicas             uint32            `json:"replicas"`
	EngineArguments      []string          `json:"engine_arguments"`
	RequireAuthorization bool              `json:"require_authorization"`
	Environment          map[string]string `json:"environment"`
	StartScript          string            `json:"start_script"`
	SSHAuthorizedKeys    []string          `json:"ssh_authorized_keys"`
	MaxDurationSeconds   int64             `json:"max_duration_seconds"`
	CostLimitCents       uint64            `json:"cost_limit_cents"`
	IdleStopSeconds      int64             `json:"idle_stop_seconds"`
	CUDA                 string            `json:"cuda"`
	Placement            string            `json:"placement" enum:"pack,spread"`
	Priority             int32             `json:"priority"`
	Alerts               Alerts            `json:"alerts"`
	Ports                []Port            `json:"ports" doc:"Declared; where they are reached stands with the nodes of the attempt"`
	Volumes              []AttachedVolume  `json:"volumes" doc:"What is attached now, by name"`
	PriceCents           *uint64           `json:"price_cents_per_gpu_hour" doc:"null when it was not known at create"`
	Currency             string            `json:"currency"`
	CostCents            uint64            `json:"cost_cents" doc:"What its GPUs have cost so far, from claim until the cluster held nothing of it"`
	ProjectID            string            `json:"project_id"`
	UserID               string            `json:"user_id"`
	State                State             `json:"state"`
	Reason               Reason            `json:"reason"`
	Message              string            `json:"message"`
	Conditions           []Condition       `json:"conditions"`
	EndpointID           string            `json:"endpoint_id"`
	Simulated            bool              `json:"simulated" doc:"GPUs are made up by a simulator"`
	CreatedAt            *time.Time        `json:"created_at,omitempty"`
	UpdatedAt            *time.Time        `json:"updated_at,omitempty"`
	DeleteRequestedAt    *time.Time        `json:"delete_requested_at,omitempty"`
	Revision             uint64            `json:"revision" doc:"Grows with every change"`
	SpecRevision         uint64            `json:"spec_revision" doc:"Of what was asked for: 1 at create, one more with each update"`
	ReplicaList          []Replica         `json:"replica_list"`
}

// Condition stands beside the state.
type Condition struct {
	Kind    ConditionKind `json:"kind"`
	Message string        `json:"message"`
	Since   *time.Time    `json:"since,omitempty"`
}

// Replica is one of a job's equal parts.
type Replica struct {
	ID       string    `json:"id"`
	Index    uint32    `json:"index"`
	State    State     `json:"state"`
	Reason   Reason    `json:"reason"`
	Message  string    `json:"message"`
	Attempts []Attempt `json:"attempts" doc:"Newest last"`
}

// Attempt is one try to run a replica.
type Attempt struct {
	ID           string        `json:"id"`
	Number       uint32        `json:"number"`
	State        State         `json:"state"`
	Reason       Reason        `json:"reason"`
	Message      string        `json:"message"`
	RackID       string        `json:"rack_id"`
	AgentKey     string        `json:"agent_key"`
	CreatedAt    *time.Time    `json:"created_at,omitempty"`
	RunningAt    *time.Time    `json:"running_at,omitempty"`
	EndedAt      *time.Time    `json:"ended_at,omitempty"`
	ClaimedAt    *time.Time    `json:"claimed_at,omitempty" doc:"GPUs are held from here"`
	GoneAt       *time.Time    `json:"gone_at,omitempty" doc:"to here"`
	SpecRevision uint64        `json:"spec_revision" doc:"What it was made of"`
	Abandoned    bool          `json:"abandoned" doc:"Its rack was removed by force; nobody can say whether it still runs"`
	Gone         bool          `json:"gone" doc:"The cluster says that nothing of it is left"`
	Nodes        []AttemptNode `json:"nodes"`
}

// AttemptNode is one VM of an attempt.
type AttemptNode struct {
	NodeName string      `json:"node_name"`
	GPUCount uint32      `json:"gpu_count"`
	VMIName  string      `json:"vmi_name"`
	VMIUID   string      `json:"vmi_uid"`
	Graph    []GraphNode `json:"graph"`
	// Ports is empty once the attempt is gone.
	Ports []PortAddress `json:"ports" doc:"Where the declared ports are reached"`
}

// GraphNode is one cluster object in the cluster's own words.
type GraphNode struct {
	Kind     string     `json:"kind"`
	Name     string     `json:"name"`
	State    string     `json:"state"`
	Message  string     `json:"message"`
	Since    *time.Time `json:"since,omitempty"`
	Deadline *time.Time `json:"deadline,omitempty" doc:"It fails then if it is not ready"`
}

const (
	kindContainer = "gpu_container"
	kindInference = "managed_inference"
)

var jobKinds = map[string]orkv1.JobKind{
	kindContainer: orkv1.JobKind_JOB_KIND_GPU_CONTAINER,
	kindInference: orkv1.JobKind_JOB_KIND_MANAGED_INFERENCE,
}

func kindName(k orkv1.JobKind) string {
	return strings.ToLower(strings.TrimPrefix(k.String(), "JOB_KIND_"))
}

func stateName(s orkv1.State) State { return State(lexicon.Name(s)) }

func reasonName(r orkv1.Reason) Reason { return Reason(lexicon.Name(r)) }

func stamp(t *timestamppb.Timestamp) *time.Time {
	if !t.IsValid() {
		return nil
	}
	v := t.AsTime()
	return &v
}

func texts(all []string) []string {
	if all == nil {
		return []string{}
	}
	return all
}

// job turns the orchestrator's record into the API's.
func (s *Server) job(j *orkv1.Job) Job {
	spec, inference := j.GetSpec(), j.GetSpec().GetInference()
	out := Job{
		ID: j.GetId(), Kind: kindName(spec.GetKind()), Name: spec.GetName(), Tags: texts(spec.GetTags()), Location: spec.GetLocation(),
		GPU:            GPU{Model: spec.GetGpu().GetModel(), Count: spec.GetGpu().GetCount()},
		CPUCoresPerGPU: spec.GetCpuCoresPerGpu(), MemoryGiBPerGPU: spec.GetMemoryGibPerGpu(), DiskGiB: spec.GetDiskGib(),
		Image: spec.GetImage().GetName(), Model: inference.GetModel(), Runtime: inference.GetRuntime(), Replicas: max(inference.GetReplicas(), 1),
		EngineArguments: texts(inference.GetArguments()), RequireAuthorization: inference.GetRequireAuthorization(),
		Environment: maps.Clone(spec.GetEnvironment()), StartScript: spec.GetStartScript(), SSHAuthorizedKeys: texts(spec.GetSshAuthorizedKeys()),
		MaxDurationSeconds: int64(spec.GetMaxDuration().AsDuration() / time.Second), CostLimitCents: spec.GetCostLimitCents(),
		IdleStopSeconds: int64(spec.GetIdleStop().AsDuration() / time.Second), CUDA: spec.GetCuda(),
		Placement: placementName(spec.GetPlacement()), Priority: spec.GetPriority(), Ports: ports(spec.GetPorts()), Volumes: attachedVolumes(j.GetVolumes()),
		Alerts: Alerts{CostPercent: spec.GetAlerts().GetCostPercent(), QueuedAfterSeconds: int64(spec.GetAlerts().GetQueuedAfter().AsDuration() / time.Second),
			UnreachableAfterSeconds: int64(spec.GetAlerts().GetUnreachableAfter().AsDuration() / time.Second)},
		Currency: j.GetPrice().GetCurrency(), CostCents: j.GetCostCents(),
		ProjectID: j.GetOwner().GetProjectId(), UserID: j.GetOwner().GetUserId(),
		State: stateName(j.GetState()), Reason: reasonName(j.GetReason()), Message: j.GetMessage(),
		Conditions: []Condition{}, EndpointID: s.Watch.EndpointID(j.GetId()),
		CreatedAt: stamp(j.GetCreatedAt()), UpdatedAt: stamp(j.GetUpdatedAt()), DeleteRequestedAt: stamp(j.GetDeleteRequestedAt()),
		Revision: j.GetRevision(), SpecRevision: j.GetSpecRevision(), ReplicaList: []Replica{},
	}
	if p := j.GetPrice(); p != nil {
		out.PriceCents = &p.CentsPerGpuHour
	}
	if out.Environment == nil {
		out.Environment = map[string]string{}
	}
	for _, c := range j.GetConditions() {
		out.Conditions = append(out.Conditions, Condition{Kind: ConditionKind(c.GetKind()), Message: c.GetMessage(), Since: stamp(c.GetSince())})
	}
	for _, r := range j.GetReplicas() {
		replica := Replica{ID: r.GetId(), Index: r.GetIndex(), State: stateName(r.GetState()), Reason: reasonName(r.GetReason()),
			Message: r.GetMessage(), Attempts: []Attempt{}}
		for _, a := range r.GetAttempts() {
			out.Simulated = out.Simulated || a.GetSimulated()
			replica.Attempts = append(replica.Attempts, attempt(a))
		}
		out.ReplicaList = append(out.ReplicaList, replica)
	}
	return out
}

func attempt(a *orkv1.Attempt) Attempt {
	out := Attempt{ID: a.GetId(), Number: a.GetNumber(), State: stateName(a.GetState()), Reason: reasonName(a.GetReason()), Message: a.GetMessage(),
		RackID: a.GetRackId(), AgentKey: a.GetAgentKey(), CreatedAt: stamp(a.GetCreatedAt()), RunningAt: stamp(a.GetRunningAt()),
		EndedAt: stamp(a.GetEndedAt()), Gone: a.GetGone(), Nodes: []AttemptNode{},
		ClaimedAt: stamp(a.GetClaimedAt()), GoneAt: stamp(a.GetGoneAt()), Abandoned: a.GetAbandoned(), SpecRevision: a.GetSpecRevision()}
	for _, n := range a.GetNodes() {
		node := AttemptNode{NodeName: n.GetNodeName(), GPUCount: n.GetGpuCount(), VMIName: n.GetVmiName(), VMIUID: n.GetVmiUid(), Graph: []GraphNode{}, Ports: portAddresses(a, n)}
		for _, g := range n.GetGraph() {
			node.Graph = append(node.Graph, GraphNode{Kind: g.GetKind(), Name: g.GetName(), State: g.GetState(), Message: g.GetMessage(), Since: stamp(g.GetSince()), Deadline: stamp(g.GetDeadline())})
		}
		out.Nodes = append(out.Nodes, node)
	}
	return out
}
