package graph

import (
	"context"
	"errors"
	"fmt"
	"sort"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kubevirt "kubevirt.io/api/core/v1"
	cdi "kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1"

	"github.com/cosmicac/cosmicac/pkg/fault"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/claim"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/label"
)

// maximumVolumes bounds the volumes of a machine, serialBytes the serial of a disk as
// a guest sees it.
const (
	maximumVolumes = 8
	serialBytes    = 20
)

func keyVolume(id string) string { return "volume/" + id }

// recordVolumes turns attached volumes into what the anchor says of them.
func recordVolumes(all []*orkv1.AttachedVolume, machines int) (out []claim.RecordVolume, bad []fault.Detail) {
	switch {
	case len(all) == 0:
		return nil, nil
	case len(all) > maximumVolumes:
		return nil, []fault.Detail{{Field: "volumes", Rule: fmt.Sprintf("must be at most %d", maximumVolumes)}}
	case machines > 1:
		return nil, []fault.Detail{{Field: "volumes", Rule: "are for an attempt of one machine"}}
	}
	for i, v := range all {
		if !label.ID(v.GetId()) || !label.ID(v.GetName()) || len(v.GetName()) > serialBytes {
			bad = append(bad, fault.Detail{Field: fmt.Sprintf("volumes[%d]", i), Rule: fmt.Sprintf("must have an id, and as name a DNS label of at most %d characters", serialBytes)})
			continue
		}
		out = append(out, claim.RecordVolume{ID: v.GetId(), Name: v.GetName(), ReadOnly: v.GetReadOnly()})
	}
	return out, bad
}

// addVolumes gives a machine the attempt's volumes as disks that bear their names.
func addVolumes(vmi *kubevirt.VirtualMachineInstance, rec *claim.Record) {
	for _, v := range rec.Volumes {
		name := "volume-" + v.Name
		vmi.Spec.Domain.Devices.Disks = append(vmi.Spec.Domain.Devices.Disks, kubevirt.Disk{
			Name: name, Serial: v.Name, DiskDevice: kubevirt.DiskDevice{Disk: &kubevirt.DiskTarget{Bus: kubevirt.DiskBusVirtio, ReadOnly: v.ReadOnly}},
		})
		vmi.Spec.Volumes = append(vmi.Spec.Volumes, kubevirt.Volume{Name: name, VolumeSource: kubevirt.VolumeSource{DataVolume: &kubevirt.DataVolumeSource{Name: v.ID}}})
	}
}

// Writable says why nothing may be written now.
func (e *Engine) Writable() error { return e.writable() }

// VolumeUsers names the attempts that the cluster may hold a volume for, sorted.
func (e *Engine) VolumeUsers(id string) []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	var out []string
	for attempt, a := range e.attempts {
		for _, v := range a.rec.Volumes {
			if v.ID == id {
				out = append(out, attempt)
			}
		}
	}
	sort.Strings(out)
	return out
}

// volumesTaken refuses a second machine for a volume that one of the two writes. The
// orchestrator sees to that; this is for the day on which it has lost its memory. An
// attempt of the same job that is taken down was given up by an operator, who answers
// for its machine.
func (e *Engine) volumesTaken(rec *claim.Record) claim.Refusal {
	e.mu.Lock()
	defer e.mu.Unlock()
	for id, other := range e.attempts {
		if id == rec.AttemptID || other.rec.JobID == rec.JobID && other.status.Load().GetPhase() == workerv1.AttemptPhase_ATTEMPT_PHASE_DELETING {
			continue
		}
		for _, has := range other.rec.Volumes {
			for _, v := range rec.Volumes {
				if has.ID == v.ID && !(has.ReadOnly && v.ReadOnly) {
					return claim.Refusal{Reason: orkv1.Reason_REASON_CLAIM_REFUSED, Message: fmt.Sprintf("volume %s (%s) is still used by attempt %s of job %s", v.Name, v.ID, id, other.rec.JobID)}
				}
			}
		}
	}
	return claim.Refusal{}
}

// volumes looks at the attempt's volumes and says whether a machine can be made with
// them. They are made and removed elsewhere: one that is missing fails the attempt,
// since an empty one in its place would look like lost work.
func (p *pass) volumes(ctx context.Context) bool {
	ready := true
	for _, v := range p.a.rec.Volumes {
		dv, err := p.e.volume(ctx, v.ID)
		if err != nil {
			p.err = errors.Join(p.err, err)
			ready = false
			continue
		}
		f := judgeVolume(v, dv, p.e.s)
		if p.vmis[0] != nil {
			f.fail = nil // the machine has it until it stops
		}
		t := p.a.see(p.now, keyVolume(v.ID), f)
		if wait := p.e.s.Deadlines.Bound; f.fail == nil && !f.usable && p.vmis[0] == nil && wait > 0 && p.now.Sub(t.since) > wait {
			f.fail = failure(orkv1.Reason_REASON_DEADLINE, "volume %s (%s) cannot be used for longer than %s: %s", v.Name, v.ID, wait, f.words)
		}
		if f.fail != nil {
			f.state = stateFailed
			p.a.see(p.now, keyVolume(v.ID), f)
			p.failed(f.fail)
		}
		ready = ready && f.usable
	}
	return ready
}

// volume is a volume's DataVolume, nil when there is none; its absence is believed of
// a live read alone.
func (e *Engine) volume(ctx context.Context, id string) (*cdi.DataVolume, error) {
	if dv, ok := e.o.View.DataVolume(id); ok {
		return dv, nil
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	dv, err := e.o.Client.CDI.DataVolumes(e.o.Client.Namespace).Get(ctx, id, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("read DataVolume %s: %w", id, err)
	}
	return dv, nil
}

func judgeVolume(v claim.RecordVolume, dv *cdi.DataVolume, s *Settings) finding {
	gone := func(words string) finding {
		return finding{state: stateGone, stage: "gone", words: words,
			fail: failure(orkv1.Reason_REASON_CLUSTER_REFUSED, "volume %s (%s): %s", v.Name, v.ID, words)}
	}
	switch {
	case dv == nil:
		return gone("somebody else removed it from the cluster")
	case dv.Labels[label.Volume] != v.ID || dv.Labels[label.Network] != s.Network || dv.Labels[label.Rack] != s.Rack:
		return gone("the DataVolume of this name is not this rack's volume")
	case dv.DeletionTimestamp != nil:
		return gone("it is being deleted")
	}
	switch dv.Status.Phase {
	case cdi.Succeeded, cdi.WaitForFirstConsumer, cdi.PendingPopulation:
		return finding{state: stateReady, stage: "ready", words: string(dv.Status.Phase), usable: true}
	}
	return finding{state: stateWaiting, stage: "waiting", words: joinWords(string(dv.Status.Phase), "the volume cannot be used yet"), deadline: s.Deadlines.Bound}
}

// volumeNodes are the attempt's volumes as the graph shows them.
func (a *attempt) volumeNodes(e *Engine) []*orkv1.GraphNode {
	var out []*orkv1.GraphNode
	for _, v := range a.rec.Volumes {
		out = append(out, a.graphNode(e.o.Now(), "DataVolume", v.ID, keyVolume(v.ID)))
	}
	return out
}
