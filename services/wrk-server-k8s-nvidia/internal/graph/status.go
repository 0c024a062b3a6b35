package graph

import (
	"fmt"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/cluster"
)

// firstStatus is an attempt's status before the first pass.
func (e *Engine) firstStatus(a *attempt) *workerv1.AttemptStatus {
	st := e.bareStatus(a)
	st.Phase = workerv1.AttemptPhase_ATTEMPT_PHASE_CREATING
	e.overlay(a, st)
	return st
}

// bareStatus holds ids and nodes.
func (e *Engine) bareStatus(a *attempt) *workerv1.AttemptStatus {
	st := &workerv1.AttemptStatus{AttemptId: a.rec.AttemptID, JobId: a.rec.JobID, ReplicaId: a.rec.ReplicaID}
	now := e.o.Now()
	for k, n := range a.rec.Nodes {
		name := VMIName(a.rec.AttemptID, k)
		node := &orkv1.AttemptNode{NodeName: n.Node, GpuCount: uint32(n.GPUs), VmiName: name, VmiUid: string(a.vmis[name])}
		if k == 0 {
			node.Graph = append(node.Graph,
				&orkv1.GraphNode{Kind: "ConfigMap", Name: a.rec.AttemptID, State: anchorState(a), Since: timestamppb.New(a.rec.ClaimedAt)},
				a.graphNode(now, "NetworkPolicy", a.rec.AttemptID, keyPolicy))
			if a.rec.Overlay != nil {
				node.Graph = append(node.Graph, a.graphNode(now, "NetworkAttachmentDefinition", a.rec.Overlay.Network, keyNetwork))
			}
		}
		node.Graph = append(node.Graph,
			a.graphNode(now, "Secret", SecretName(a.rec.AttemptID, k), keySecret(k)),
			a.graphNode(now, "DataVolume", DiskName(a.rec.JobID, a.rec.ReplicaIndex, k), keyDisk(k)),
			a.graphNode(now, "VirtualMachineInstance", name, keyVMI(k)))
		node.Graph = append(node.Graph, a.volumeNodes(e)...)
		if len(a.rec.Ports) > 0 {
			node.Graph = append(node.Graph, a.graphNode(now, "Service", ServiceName(a.rec.AttemptID, k), keyService(k)))
			node.Ports = e.portAddresses(a, k)
		}
		st.Nodes = append(st.Nodes, node)
	}
	return st
}

func anchorState(a *attempt) string {
	switch {
	case a.anchorGone:
		return stateGone
	case a.intent != nil && a.intent.Delete:
		return stateDeleting
	default:
		return stateReady
	}
}

func (a *attempt) graphNode(now time.Time, kind, name, key string) *orkv1.GraphNode {
	g := &orkv1.GraphNode{Kind: kind, Name: name, State: statePending}
	t := a.tracks[key]
	if t == nil {
		return g
	}
	if t.state != "" {
		g.State = t.state
	}
	g.Message, g.Since = cluster.Wordsf("%s", t.words), timestamppb.New(t.since)
	if t.deadline > 0 {
		g.Deadline = timestamppb.New(t.since.Add(t.deadline))
	}
	return g
}

// overlay puts intent and outcome over what was seen.
func (e *Engine) overlay(a *attempt, st *workerv1.AttemptStatus) {
	if a.outcome != nil {
		st.Phase, st.Reason, st.Message = a.outcome.Phase, a.outcome.Reason, a.outcome.Message
		st.GuestSucceeded = a.outcome.GuestSucceeded
	}
	if a.intent != nil && a.intent.Delete {
		switch {
		case !a.robbed:
			st.Phase, st.Reason, st.Message = workerv1.AttemptPhase_ATTEMPT_PHASE_DELETING, a.intent.Reason, "is being removed"
		case a.outcome == nil:
			// An end that nobody asked for: the orchestrator is to read why.
			st.Phase, st.Reason, st.Message = workerv1.AttemptPhase_ATTEMPT_PHASE_FAILED, a.intent.Reason, anchorRemoved(a)
		}
	}
}

func anchorRemoved(a *attempt) string {
	return fmt.Sprintf("somebody else removed the ConfigMap %s, which is its claim on GPUs: its VM is taken down", a.rec.AttemptID)
}

// publish stores the status of a pass.
func (e *Engine) publish(a *attempt, p *pass) {
	st := e.bareStatus(a)
	st.Phase = p.phase()
	var words string
	for k := range a.rec.Nodes {
		if w := p.found.vmis[k].words; words == "" && p.vmis[k] != nil && p.found.vmis[k].state != stateReady {
			words = w
		}
	}
	switch st.Phase {
	case workerv1.AttemptPhase_ATTEMPT_PHASE_IMPORTING:
		st.Reason = orkv1.Reason_REASON_IMPORTING_IMAGE
		words = ""
		least := uint32(100)
		for k := range a.rec.Nodes {
			if f := p.found.disks[k]; f.state != stateReady {
				least = min(least, f.percent)
				if words == "" {
					words = f.words
				}
			}
		}
		st.ImportPercent = least
	case workerv1.AttemptPhase_ATTEMPT_PHASE_SCHEDULING:
		st.Reason = orkv1.Reason_REASON_SCHEDULING
	case workerv1.AttemptPhase_ATTEMPT_PHASE_BOOTING:
		st.Reason = orkv1.Reason_REASON_BOOTING
	}
	if p.err != nil && words == "" {
		words = p.err.Error()
	}
	st.Message = cluster.Wordsf("%s", words)
	if p.draining != "" {
		st.Reason, st.Message = orkv1.Reason_REASON_DRAINED, p.draining
	}
	if !p.diskLost.IsZero() {
		st.DiskLostSince = timestamppb.New(p.diskLost)
		st.Message = cluster.Wordsf("%s", joinWords(diskLostWords, st.Message))
	}
	if !p.unreachable.IsZero() {
		st.UnreachableSince = timestamppb.New(p.unreachable)
		if st.Message == "" {
			st.Message = fmt.Sprintf("the node is not heard of since %s", p.unreachable.UTC().Format("15:04:05Z"))
		}
	}
	e.overlay(a, st)
	a.status.Store(st)
	e.o.Changed()
}

// publishDeleting stores the status of an attempt that is taken down.
func (e *Engine) publishDeleting(a *attempt, words string) {
	st := e.bareStatus(a)
	e.overlay(a, st)
	switch {
	case words != "" && a.robbed:
		st.Message = cluster.Wordsf("%s; waits for %s", st.Message, words)
	case words != "":
		st.Message = cluster.Wordsf("waits for %s", words)
	}
	a.status.Store(st)
	e.o.Changed()
}
