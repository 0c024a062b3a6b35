package job

import (
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

// View is the job as the wire shows it, without its cost, which moves on by
// itself.
func (j *Job) View() *orkv1.Job {
	v := &orkv1.Job{
		Id: j.ID, Spec: j.Spec, Owner: j.Owner,
		State: j.State, Reason: j.Reason, Message: j.Message,
		CreatedAt: stamp(j.CreatedAt), UpdatedAt: stamp(j.UpdatedAt),
		DeleteRequestedAt: stamp(j.DeleteRequestedAt),
		Revision:          j.Revision,
		Price:             j.Price,
		SpecRevision:      j.SpecRevision,
	}
	for _, c := range j.Conditions {
		v.Conditions = append(v.Conditions, &orkv1.Condition{Kind: c.Kind, Message: c.Message, Since: stamp(c.Since)})
	}
	v.Volumes = j.AttachedVolumes()
	for _, r := range j.Replicas {
		n := r.Newest()
		rv := &orkv1.Replica{Id: r.ID, Index: r.Index, State: n.State, Reason: n.Reason, Message: n.Message}
		for _, a := range r.Attempts {
			rv.Attempts = append(rv.Attempts, a.View())
		}
		v.Replicas = append(v.Replicas, rv)
	}
	return v
}

// AttachedVolumes are the job's volumes as the wire shows them.
func (j *Job) AttachedVolumes() []*orkv1.AttachedVolume {
	var out []*orkv1.AttachedVolume
	for _, v := range j.Volumes {
		out = append(out, &orkv1.AttachedVolume{Id: v.ID, Name: v.Name, ReadOnly: v.ReadOnly, Path: "/volumes/" + v.Name})
	}
	return out
}

// View is the attempt as the wire shows it.
func (a *Attempt) View() *orkv1.Attempt {
	return &orkv1.Attempt{
		Id: a.ID, Number: a.Number, State: a.State, Reason: a.Reason, Message: a.Message,
		RackId: a.RackID, Nodes: a.Nodes,
		CreatedAt: stamp(a.CreatedAt), RunningAt: stamp(a.RunningAt), EndedAt: stamp(a.EndedAt),
		AgentKey: a.AgentKey, AgentAddresses: a.AgentAddresses,
		SshHostKey: a.SSHHostKey, DefaultUser: a.DefaultUser,
		Gone: a.Gone, Simulated: a.Simulated, AgentReady: a.AgentReady,
		ClaimedAt: stamp(a.ClaimedAt), GoneAt: stamp(a.GoneAt), Abandoned: a.Abandoned.Set(),
		SpecRevision: max(a.SpecRevision, 1),
	}
}

func stamp(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}

// StateName is the state as users write it: "running".
func StateName(s orkv1.State) string {
	return strings.ToLower(strings.TrimPrefix(s.String(), "STATE_"))
}

// ReasonName is the reason as users write it: "never_fits"; empty for none.
func ReasonName(r orkv1.Reason) string {
	if r == orkv1.Reason_REASON_UNSPECIFIED {
		return ""
	}
	return strings.ToLower(strings.TrimPrefix(r.String(), "REASON_"))
}

// States lists every state in the order of a life.
func States() []orkv1.State {
	return []orkv1.State{
		orkv1.State_STATE_QUEUED, orkv1.State_STATE_RESERVING, orkv1.State_STATE_PROVISIONING,
		orkv1.State_STATE_STARTING, orkv1.State_STATE_RUNNING, orkv1.State_STATE_STOPPING,
		orkv1.State_STATE_STOPPED, orkv1.State_STATE_SUCCEEDED, orkv1.State_STATE_FAILED,
		orkv1.State_STATE_CANCELLED,
	}
}
