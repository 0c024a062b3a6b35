// Package job is the orchestrator's package of nouns: jobs, their replicas and
// attempts, and what is remembered of each. It holds facts and their one
// projection to the wire; it decides nothing (package life does), stores
// nothing (package record does) and asks nobody.
package job

import (
	"encoding/json"
	"slices"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
)

// Intent is what the user wants of a job. It only ever grows from run or stop
// to delete; run and stop alternate.
type Intent int

// The intents. The numbers are stored: append only.
const (
	IntentRun    Intent = 0
	IntentStop   Intent = 1
	IntentDelete Intent = 2
)

// Job is one job with everything below it.
type Job struct {
	ID    string
	Spec  *orkv1.JobSpec
	Owner *orkv1.Owner
	// SpecRevision counts the specifications that the job was given, from 1. Former
	// are those of before that a replica is still made of.
	SpecRevision uint64
	Former       []Former
	// Update carries Spec from replica to replica; nil when none is under way and
	// none was stopped.
	Update *Update

	Intent Intent
	// IntentReason is what the attempts end with: stop_requested,
	// delete_requested, max_duration; IntentMessage says more, if there is more.
	IntentReason  orkv1.Reason
	IntentMessage string
	// Actor set the intent.
	Actor string
	// Price is what a GPU costs, nil when that was not known at create.
	Price *orkv1.Price
	// FormerGPUTime is the GPU time of attempts that are no longer kept.
	FormerGPUTime time.Duration
	// EndpointID is "ep-..." for a Managed Inference Job, empty otherwise.
	EndpointID string

	// State, Reason, Message and Conditions are derived from the replicas;
	// they are stored so that lists can filter by them.
	State      orkv1.State
	Reason     orkv1.Reason
	Message    string
	Conditions []Condition

	Replicas []*Replica
	// Volumes are attached to it, by name. They change only while the cluster holds
	// nothing of it.
	Volumes []Volume
	// Touched lists, sorted, the racks that may hold something of the job,
	// disks included.
	Touched []string

	CreatedAt         time.Time
	UpdatedAt         time.Time
	DeleteRequestedAt time.Time
	// Revision grows with every stored change.
	Revision uint64
}

// Volume is a volume as the job has it.
type Volume struct {
	ID       string
	Name     string
	RackID   string
	ReadOnly bool
}

// Condition stands beside the state.
type Condition struct {
	Kind    string
	Message string
	Since   time.Time
}

// The kinds of conditions.
const (
	ConditionUnreachable    = "unreachable"
	ConditionDegraded       = "degraded"
	ConditionCleanupPending = "cleanup_pending"
	ConditionDraining       = "draining"
	ConditionIdle           = "idle"
	ConditionAlert          = "alert"
	ConditionAbandoned      = "abandoned"
	ConditionDiskLost       = "disk_lost"
	ConditionUpdating       = "updating"
	ConditionUpdateStopped  = "update_stopped"
)

// Replica is one copy of the workload.
type Replica struct {
	ID    string
	Index uint32
	// Failures counts attempts that failed in a row; a long healthy run
	// resets it.
	Failures uint32
	// StartFailures counts attempts in a row that a node failed to start.
	StartFailures uint32
	// Attempts are oldest first; there is at least one.
	Attempts []*Attempt
}

// Newest returns the attempt that counts.
func (r *Replica) Newest() *Attempt { return r.Attempts[len(r.Attempts)-1] }

// Attempt is one try to run a replica.
type Attempt struct {
	ID      string       `json:"id"`
	Number  uint32       `json:"number"`
	State   orkv1.State  `json:"state"`
	Reason  orkv1.Reason `json:"reason"`
	Message string       `json:"message,omitempty"`

	// RackID and Nodes are the plan; Nodes later carry the cluster's words.
	RackID string `json:"rack_id,omitempty"`
	Nodes  Nodes  `json:"nodes,omitempty"`
	// Model is the GPU model as the rack spells it.
	Model string `json:"model,omitempty"`
	// Plan counts the plans that were made; each has join tokens of its own.
	Plan uint32 `json:"plan,omitempty"`
	// SpecRevision is the specification that it is made of; 0 stands for 1.
	SpecRevision uint64 `json:"spec_revision,omitempty"`
	// Judged is set once placement looked at it with every rack reporting.
	Judged bool `json:"judged,omitempty"`
	// Sent: a proposal may have reached the worker, so it may hold something.
	Sent bool `json:"sent,omitempty"`
	// Seen: a worker's report listed it since the last proposal.
	Seen bool `json:"seen,omitempty"`
	// Anchored: the cluster was further than a claim with it.
	Anchored bool `json:"anchored,omitempty"`
	// NotBefore holds back the next plan.
	NotBefore time.Time `json:"not_before,omitzero"`
	// Refusals counts claims refused in a row.
	Refusals uint32 `json:"refusals,omitempty"`
	// RefusedNodes were refused lately; another node is tried first.
	RefusedNodes []string `json:"refused_nodes,omitempty"`

	CreatedAt  time.Time `json:"created_at"`
	ClaimedAt  time.Time `json:"claimed_at,omitzero"`
	UpAt       time.Time `json:"up_at,omitzero"`
	HelloAt    time.Time `json:"hello_at,omitzero"`
	RunningAt  time.Time `json:"running_at,omitzero"`
	StoppingAt time.Time `json:"stopping_at,omitzero"`
	EndedAt    time.Time `json:"ended_at,omitzero"`

	// AgentKey is node 0's; the others are in NodeKeys by node index.
	AgentKey       string            `json:"agent_key,omitempty"`
	NodeKeys       map[uint32]string `json:"node_keys,omitempty"`
	AgentAddresses []string          `json:"agent_addresses,omitempty"`
	SSHHostKey     string            `json:"ssh_host_key,omitempty"`
	DefaultUser    string            `json:"default_user,omitempty"`
	// Fenced: a second key redeemed one of its tokens.
	Fenced bool `json:"fenced,omitempty"`
	// FencedByOperator: somebody who knows gave it up, so that another attempt may
	// follow although the cluster has not said that it is gone.
	FencedByOperator bool `json:"fenced_by_operator,omitempty"`

	// Recycle: it is to end, for this reason, and another attempt follows.
	Recycle orkv1.Reason `json:"recycle,omitempty"`
	// Final: its agent said that another attempt would fail alike.
	Final bool `json:"final,omitempty"`
	// Retire: it is to end, and its replica goes with it.
	Retire bool `json:"retire,omitempty"`
	// Stage is the furthest that the cluster came with starting it.
	Stage workerv1.AttemptPhase `json:"stage,omitempty"`
	// StartFailed: the cluster could not start it on its node, and neither image
	// nor user had a part in that. GPUUUIDs are what its agent said, if it spoke.
	StartFailed bool     `json:"start_failed,omitempty"`
	GPUUUIDs    []string `json:"gpu_uuids,omitempty"`

	Gone       bool      `json:"gone,omitempty"`
	GoneAt     time.Time `json:"gone_at,omitzero"`
	Simulated  bool      `json:"simulated,omitempty"`
	AgentReady bool      `json:"agent_ready,omitempty"`

	Unreachable Mark `json:"unreachable,omitzero"`
	Draining    Mark `json:"draining,omitzero"`
	Idle        Mark `json:"idle,omitzero"`
	// Abandoned: an operator removed its rack by force.
	Abandoned Mark `json:"abandoned,omitzero"`
	// DiskLost: somebody else deleted a root disk under it. It is never taken back.
	DiskLost Mark `json:"disk_lost,omitzero"`
}

// Mark is a condition of an attempt: empty, or since when and why.
type Mark struct {
	Since   time.Time `json:"since,omitzero"`
	Message string    `json:"message,omitempty"`
}

// Set reports whether the mark stands.
func (m Mark) Set() bool { return !m.Since.IsZero() }

// Nodes are an attempt's VMs; in JSON they are written by protobuf's rules.
type Nodes []*orkv1.AttemptNode

// MarshalJSON writes the nodes as the wire names them.
func (n Nodes) MarshalJSON() ([]byte, error) {
	return protojson.Marshal(&orkv1.Attempt{Nodes: n})
}

// UnmarshalJSON reads what MarshalJSON wrote. Fields of a newer version are ignored.
func (n *Nodes) UnmarshalJSON(data []byte) error {
	var a orkv1.Attempt
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(data, &a); err != nil {
		return err
	}
	*n = a.Nodes
	return nil
}

var _ json.Marshaler = Nodes(nil)

// GPUs is how many GPUs the attempt's plan takes on all nodes.
func (a *Attempt) GPUs() uint32 {
	var n uint32
	for _, node := range a.Nodes {
		n += node.GpuCount
	}
	return n
}

// Ended reports whether a state is an end.
func Ended(s orkv1.State) bool {
	switch s {
	case orkv1.State_STATE_STOPPED, orkv1.State_STATE_SUCCEEDED,
		orkv1.State_STATE_FAILED, orkv1.State_STATE_CANCELLED:
		return true
	}
	return false
}

// Settled reports whether nothing of the attempt is left to do: it ended, and
// the cluster holds nothing of it or cannot be asked any more.
func (a *Attempt) Settled() bool { return Ended(a.State) && (a.Gone || a.Abandoned.Set()) }

// Leave notes that the cluster holds nothing of the attempt.
func (a *Attempt) Leave(now time.Time) { a.Gone, a.GoneAt = true, now }

// GPUTime is how long the attempt held its GPUs, times their number: from the
// claim until the cluster held nothing of it, or until it was given up by force.
func (a *Attempt) GPUTime(now time.Time) time.Duration {
	if a.ClaimedAt.IsZero() {
		return 0
	}
	end := now
	switch {
	case !a.GoneAt.IsZero():
		end = a.GoneAt
	case a.Abandoned.Set():
		end = a.Abandoned.Since
	case a.FencedByOperator:
		end = a.EndedAt
	}
	return max(end.Sub(a.ClaimedAt), 0) * time.Duration(a.GPUs())
}

// CostCents is what the job's GPUs have cost so far, in hundredths of the price's
// currency, rounded down; 0 without a price.
func (j *Job) CostCents(now time.Time) uint64 {
	if j.Price == nil {
		return 0
	}
	held := j.FormerGPUTime
	for _, r := range j.Replicas {
		for _, a := range r.Attempts {
			held += a.GPUTime(now)
		}
	}
	return uint64(held.Hours() * float64(j.Price.CentsPerGpuHour))
}

// Certified reports whether an attempt's agents may hold a certificate. They may
// not once it has ended or is fenced; and a container's not once it is told to
// stop, while a replica that serves a model still finishes what it has.
func (j *Job) Certified(a *Attempt) bool {
	switch {
	case a.Fenced, Ended(a.State), a.State == orkv1.State_STATE_QUEUED:
		return false
	case a.State == orkv1.State_STATE_STOPPING:
		return j.Inference()
	}
	return true
}

// CertificateEpoch is the epoch of an attempt's certificates: its number, which
// is recorded and only grows within a replica.
func (a *Attempt) CertificateEpoch() uint64 { return uint64(a.Number) }

// CertificateFloors is the lowest epoch that a certificate of each replica may
// have, by replica id.
func (j *Job) CertificateFloors() map[string]uint64 {
	floors := make(map[string]uint64, len(j.Replicas))
	for _, r := range j.Replicas {
		a := r.Newest()
		floors[r.ID] = a.CertificateEpoch()
		if a.State != orkv1.State_STATE_QUEUED && !j.Certified(a) {
			floors[r.ID]++
		}
	}
	return floors
}

// Settled reports whether the job needs no more work unless somebody asks.
func (j *Job) Settled() bool {
	if j.Intent == IntentDelete {
		return false
	}
	for _, r := range j.Replicas {
		for _, a := range r.Attempts {
			if !a.Settled() {
				return false
			}
		}
	}
	return true
}

// Attempt finds an attempt and its replica.
func (j *Job) Attempt(id string) (*Replica, *Attempt) {
	for _, r := range j.Replicas {
		for _, a := range r.Attempts {
			if a.ID == id {
				return r, a
			}
		}
	}
	return nil, nil
}

// Touch notes that a rack may hold something of the job.
func (j *Job) Touch(rackID string) {
	if i, found := slices.BinarySearch(j.Touched, rackID); !found {
		j.Touched = slices.Insert(j.Touched, i, rackID)
	}
}

// Clone copies the attempt so that one copy can change without the other.
func (a *Attempt) Clone() *Attempt {
	c := *a
	c.Nodes = nil
	for _, n := range a.Nodes {
		c.Nodes = append(c.Nodes, proto.Clone(n).(*orkv1.AttemptNode))
	}
	c.RefusedNodes = slices.Clone(a.RefusedNodes)
	c.AgentAddresses = slices.Clone(a.AgentAddresses)
	c.GPUUUIDs = slices.Clone(a.GPUUUIDs)
	if a.NodeKeys != nil {
		c.NodeKeys = make(map[uint32]string, len(a.NodeKeys))
		for k, v := range a.NodeKeys {
			c.NodeKeys[k] = v
		}
	}
	return &c
}

// Clone copies the job. Specifications, owner and price are never changed in place
// and are shared.
func (j *Job) Clone() *Job {
	c := *j
	c.Conditions = slices.Clone(j.Conditions)
	c.Touched = slices.Clone(j.Touched)
	c.Volumes = slices.Clone(j.Volumes)
	c.Former = slices.Clone(j.Former)
	if j.Update != nil {
		u := *j.Update
		c.Update = &u
	}
	c.Replicas = nil
	for _, r := range j.Replicas {
		rc := *r
		rc.Attempts = nil
		for _, a := range r.Attempts {
			rc.Attempts = append(rc.Attempts, a.Clone())
		}
		c.Replicas = append(c.Replicas, &rc)
	}
	return &c
}

// Event is one transition before it has a sequence number.
type Event struct {
	ReplicaID string
	AttemptID string
	State     orkv1.State
	Reason    orkv1.Reason
	Message   string
	// Actor is a user id, "ork" or a rack id.
	Actor string
}

// Inference reports whether the job is a Managed Inference Job.
func (j *Job) Inference() bool {
	return j.Spec.GetKind() == orkv1.JobKind_JOB_KIND_MANAGED_INFERENCE
}
