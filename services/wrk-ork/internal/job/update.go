package job

import (
	"time"

	"google.golang.org/protobuf/proto"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

// Former is a specification of before.
type Former struct {
	Revision uint64
	Spec     *orkv1.JobSpec
}

// Update is a change of a job's specification on its way from replica to replica.
type Update struct {
	Strategy  orkv1.UpdateStrategy `json:"strategy"`
	StartedAt time.Time            `json:"started_at"`
	// StoppedBy is the attempt that did not come up: the update goes no further, and
	// that attempt is not tried again by itself. Message says so.
	StoppedBy string    `json:"stopped_by,omitempty"`
	StoppedAt time.Time `json:"stopped_at,omitzero"`
	Message   string    `json:"message,omitempty"`
}

// UnderWay reports whether replicas are still to be replaced or waited for.
func (u *Update) UnderWay() bool { return u != nil && u.StoppedBy == "" }

// SpecOf is the specification that an attempt is made of.
func (j *Job) SpecOf(a *Attempt) *orkv1.JobSpec {
	for _, f := range j.Former {
		if f.Revision == max(a.SpecRevision, 1) {
			return f.Spec
		}
	}
	return j.Spec
}

// Current reports whether an attempt runs what the newest specification says. That
// of an older one does where the two differ in the number of replicas alone.
func (j *Job) Current(a *Attempt) bool {
	is := j.SpecOf(a)
	if is == j.Spec {
		return true
	}
	alike := proto.Clone(is).(*orkv1.JobSpec)
	alike.GetInference().Replicas = j.Spec.GetInference().GetReplicas()
	return proto.Equal(alike, j.Spec)
}

// Wanted is how many replicas the job is to have.
func (j *Job) Wanted() int {
	if n := j.Spec.GetInference().GetReplicas(); n > 0 {
		return int(n)
	}
	return len(j.Staying())
}

// Staying are the replicas that are not on their way out.
func (j *Job) Staying() []*Replica {
	var out []*Replica
	for _, r := range j.Replicas {
		if !r.Newest().Retire {
			out = append(out, r)
		}
	}
	return out
}
