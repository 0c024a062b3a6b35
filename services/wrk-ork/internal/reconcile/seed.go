package reconcile

import (
	"fmt"

	agentv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
)

// seedVersion is the version of the seed document.
const seedVersion = 1

// Seeds is what the seeds of a network have in common at one moment.
type Seeds struct {
	NetworkID    []byte
	RootKeys     []string
	Bootstraps   []*meshv1.BootstrapAddress
	OrkKey       string
	OrkAddresses []string
}

// request is the proposal of an attempt's plan.
func (l *Loop) request(j *job.Job, r *job.Replica, a *job.Attempt) *workerv1.ApplyAttemptRequest {
	req := &workerv1.ApplyAttemptRequest{
		AttemptId: a.ID, JobId: j.ID, ReplicaId: r.ID, ReplicaIndex: r.Index, AttemptNumber: a.Number,
		Spec: j.SpecOf(a), ProjectId: j.Owner.GetProjectId(), Volumes: j.AttachedVolumes(),
	}
	common := l.o.Seeds()
	simulated := false
	for _, v := range l.o.Racks.Views() {
		if v.Entry.Id == a.RackID && v.Report != nil {
			simulated = v.Report.Simulated
		}
	}
	for i, n := range a.Nodes {
		seed := common.seed(j, r, a, uint32(i), n)
		seed.JoinToken = l.o.Agents.Token(a.ID, a.Plan, uint32(i))
		seed.Simulated = simulated
		req.Nodes = append(req.Nodes, &workerv1.PlanNode{NodeName: n.NodeName, GpuCount: n.GpuCount, Seed: seed})
	}
	return req
}

// seed is what one VM is born with, its token apart.
func (s Seeds) seed(j *job.Job, r *job.Replica, a *job.Attempt, node uint32, n *orkv1.AttemptNode) *agentv1.Seed {
	spec := j.SpecOf(a)
	seed := &agentv1.Seed{
		Version: seedVersion, NetworkId: s.NetworkID, RootKeys: s.RootKeys, Bootstraps: s.Bootstraps,
		OrkKey: s.OrkKey, OrkAddresses: s.OrkAddresses,
		JobId: j.ID, ReplicaId: r.ID, AttemptId: a.ID, RackId: a.RackID, NodeIndex: node,
		DefaultUser: spec.GetImage().GetDefaultUser(), GpuCount: n.GpuCount, GpuModel: a.Model,
		SshAuthorizedKeys: spec.SshAuthorizedKeys, Volumes: seedVolumes(j),
		Hostname: j.ID,
	}
	if len(j.Replicas) > 1 || len(a.Nodes) > 1 {
		seed.Hostname = fmt.Sprintf("%s-r%d-n%d", j.ID, r.Index, node)
	}
	if inf := spec.Inference; j.Inference() {
		seed.Engine = &agentv1.Engine{
			Runtime: inf.Runtime, Model: inf.Model, ServedNames: inf.ServedNames, Arguments: inf.Arguments,
			MaximumContextTokens: inf.MaximumContextTokens, Environment: spec.Environment,
		}
		if len(seed.Engine.ServedNames) == 0 {
			seed.Engine.ServedNames = []string{inf.Model}
		}
	} else {
		seed.Environment, seed.StartScript = spec.Environment, spec.StartScript
	}
	return seed
}
