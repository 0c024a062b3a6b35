package life

import (
	"strings"
	"time"

	agentv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
)

// Limits are the orchestrator's deadlines and bounds.
type Limits struct {
	// AgentHello: from every VM up to the agent's first word.
	AgentHello time.Duration
	// ContainerReady and EngineReady: from the agent's first word to ready,
	// counted only while the agent is heard.
	ContainerReady time.Duration
	EngineReady    time.Duration
	// AgentSilence: after its stream ended, how long until an agent counts as lost.
	AgentSilence time.Duration
	// RackSilence: after its stream ended, how long until a rack's attempts
	// are shown unreachable.
	RackSilence time.Duration
	// AbsenceGrace: how much later than a claim or a delete a report must be
	// before it may say that an attempt it never listed is absent.
	AbsenceGrace time.Duration
	// Drain: how long a stopped inference replica may finish its requests.
	Drain time.Duration
	// Refused claims are planned again after RefusalFirst, doubling to RefusalMost.
	RefusalFirst time.Duration
	RefusalMost  time.Duration
	// RefusalsFinal ends an attempt that the cluster itself refuses.
	RefusalsFinal uint32
	// Failed inference replicas restart after RestartFirst, doubling to
	// RestartMost, RestartCount times; HealthyAfter of running starts the count anew.
	RestartFirst time.Duration
	RestartMost  time.Duration
	RestartCount uint32
	HealthyAfter time.Duration
	// StartCount is how many more starts an attempt gets that a node failed to
	// start, with the same pauses.
	StartCount uint32
}

// DefaultLimits are the documented defaults.
func DefaultLimits() Limits {
	return Limits{
		AgentHello: 15 * time.Minute, ContainerReady: 10 * time.Minute, EngineReady: 2 * time.Hour,
		AgentSilence: 20 * time.Second, RackSilence: 15 * time.Second, AbsenceGrace: 15 * time.Second,
		Drain:        30 * time.Second,
		RefusalFirst: 2 * time.Second, RefusalMost: time.Minute, RefusalsFinal: 5,
		RestartFirst: 10 * time.Second, RestartMost: 5 * time.Minute, RestartCount: 5,
		HealthyAfter: 10 * time.Minute, StartCount: 4,
	}
}

// Sight is everything seen of one job at one moment. A missing entry means
// "not seen", which is never read as "absent".
type Sight struct {
	Now time.Time
	// Started is when this process began to listen, or went on after it had stood
	// still. Silence is counted from here at the earliest, and nothing older is
	// held against anybody.
	Started  time.Time
	Racks    map[string]Rack
	Attempts map[string]Attempt
}

// Rack is what is seen of a rack.
type Rack struct {
	// Connected: the worker's stream is open and has sent something.
	Connected bool
	// Since is when Connected last changed; zero when it never did.
	Since time.Time
	// Synced: the newest report lists everything the cluster holds.
	Synced bool
	// ReportedAt is when the newest report arrived.
	ReportedAt time.Time
	Simulated  bool
	// Fault is why the cluster cannot be asked, in its words.
	Fault      string
	FaultSince time.Time
	// Disk: the newest report lists root disks of this job.
	Disk bool
	// DisksDeletedAt is when the worker took the order to remove this job's
	// disks, in this process's life.
	DisksDeletedAt time.Time
	// DrainDeadline is when what runs there is stopped, zero when it is not drained.
	DrainSince    time.Time
	DrainDeadline time.Time
	DrainActor    string
	// Failing says that its nodes fail together to start anything, "" when not.
	Failing string
	// Quarantined are its nodes and models that are left out of placement.
	Quarantined []*orkv1.Quarantine
}

// quarantined says why a node of an attempt's plan is left out of placement, ""
// when none is.
func (r Rack) quarantined(a *job.Attempt) string { return Closed(a, r.Quarantined) }

// Closed says which of these quarantines leaves a node of an attempt's plan out of
// placement, "" when none does.
func Closed(a *job.Attempt, all []*orkv1.Quarantine) string {
	for _, q := range all {
		for _, n := range a.Nodes {
			if q.NodeName == n.NodeName && (q.GpuModel == "" || strings.EqualFold(q.GpuModel, a.Model)) {
				return "node " + n.NodeName + " is quarantined: " + q.Message
			}
		}
	}
	return ""
}

// complete reports whether the newest report can be trusted for absence.
func (r Rack) complete() bool { return r.Connected && r.Synced && r.Fault == "" }

// Attempt is what is seen of one attempt.
type Attempt struct {
	// Status is the worker's newest word, nil when its report does not list it.
	Status *workerv1.AttemptStatus
	// Answer is the worker's answer to a proposal that has not been taken in yet.
	Answer *Answer
	// Proposing: a proposal is on its way, so absence means nothing.
	Proposing bool
	// DeletedAt is when the worker took the order to delete it, in this
	// process's life.
	DeletedAt time.Time
	Agent     Agent
}

// Answer is a worker's word on a plan.
type Answer struct {
	// Plan is the number of the plan that was answered.
	Plan    uint32
	Claimed bool
	Reason  orkv1.Reason
	Message string
}

// Agent is what is heard of the agent on node 0.
type Agent struct {
	Attending bool
	// Since is when Attending last became true.
	Since time.Time
	// HeardAt is when its last report came; zero for none in this process's life.
	HeardAt time.Time
	Report  *agentv1.Report
	// ShellAt is when a shell was last seen open, GPUUsedAt when a GPU last worked
	// as its samples say; zero for not in this process's life.
	ShellAt, GPUUsedAt time.Time
	// NodesReady: every node's agent says ready.
	NodesReady bool
	// Addresses, SSHHostKey and DefaultUser come from its signed card.
	Addresses   []string
	SSHHostKey  string
	DefaultUser string
}

// lost reports silence beyond the limit, on the listener's clock.
func (a Agent) lost(l Limits, s Sight, hello time.Time) bool {
	if a.Attending {
		return false
	}
	return s.Now.Sub(latest(a.HeardAt, s.Started, hello)) > l.AgentSilence
}

func latest(ts ...time.Time) time.Time {
	var t time.Time
	for _, x := range ts {
		if x.After(t) {
			t = x
		}
	}
	return t
}
