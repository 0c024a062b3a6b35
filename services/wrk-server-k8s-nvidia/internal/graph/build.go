package graph

import (
	"context"
	"errors"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kubevirt "kubevirt.io/api/core/v1"
	cdi "kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/capacity"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/claim"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/cluster"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/label"
)

// pass is one look at an attempt that is to exist.
type pass struct {
	e     *Engine
	a     *attempt
	now   time.Time
	fail  *claim.Outcome
	err   error // of a call; the next pass tries again
	disks []*cdi.DataVolume
	vmis  []*kubevirt.VirtualMachineInstance
	found struct{ disks, vmis []finding }
	// since when the nodes of running machines are not heard of
	unreachable time.Time
	// since when the root disk of a machine is known to be deleted
	diskLost time.Time
	draining string
}

// build makes what is missing and judges what is there.
func (e *Engine) build(ctx context.Context, a *attempt) (time.Duration, error) {
	n := len(a.rec.Nodes)
	p := &pass{e: e, a: a, now: e.o.Now(), disks: make([]*cdi.DataVolume, n), vmis: make([]*kubevirt.VirtualMachineInstance, n)}
	p.found.disks, p.found.vmis = make([]finding, n), make([]finding, n)
	making := a.outcome == nil
	p.look(ctx, making)
	if p.fail != nil && making && p.err == nil {
		e.conclude(a, p.fail)
	}
	if err := e.save(ctx, a); err != nil && p.err == nil {
		p.err = err
	}
	e.publish(a, p)
	after := pace
	if p.settled() || a.outcome != nil {
		after = calm
	}
	if p.err != nil {
		return after, p.err
	}
	return after, nil
}

// conclude writes down how an attempt failed or ended. It is done once.
func (e *Engine) conclude(a *attempt, o *claim.Outcome) {
	o.At, o.Message = e.o.Now(), cluster.Wordsf("%s", o.Message)
	a.outcome, a.unsaved = o, true
	e.o.Log.Info("an attempt is over", "attempt", a.rec.AttemptID, "phase", o.Phase, "reason", o.Reason, "message", o.Message)
}

func (p *pass) failed(o *claim.Outcome) {
	if p.fail == nil {
		p.fail = o
	}
}

// did takes the error of an ensure step and says whether its object is there.
func (p *pass) did(key string, err error, waits time.Duration) bool {
	var refused *refusal
	switch {
	case err == nil:
		p.a.see(p.now, key, finding{state: stateReady, stage: "ready"})
		return true
	case errors.As(err, &refused):
		p.a.see(p.now, key, finding{state: stateFailed, stage: "failed", words: refused.outcome.Message})
		p.failed(refused.outcome)
	case errors.Is(err, errWaiting):
		t := p.a.see(p.now, key, finding{state: stateWaiting, stage: "waiting", deadline: waits, words: "the orchestrator has to send the seed again"})
		if p.now.Sub(t.since) > waits {
			p.failed(failure(orkv1.Reason_REASON_DEADLINE, "the worker was restarted before the seed was written and it was not sent again within %s", waits))
		}
	default:
		p.a.see(p.now, key, finding{state: stateCreating, stage: "creating", words: cluster.Words(err)})
		if p.err == nil {
			p.err = err
		}
	}
	return false
}

// look goes through the graph in the order of making.
func (p *pass) look(ctx context.Context, making bool) {
	e, a, d := p.e, p.a, p.e.s.Deadlines
	for k := range a.rec.Nodes {
		vmi, err := e.machine(ctx, a, k)
		if !p.did2(keyVMI(k), err) {
			continue
		}
		p.vmis[k] = vmi
		if vmi != nil {
			p.remember(vmi)
		}
	}
	ready := p.fail == nil && p.err == nil
	if making && ready {
		ready = p.did(keyPolicy, e.ensurePolicy(ctx, a), 0) && p.join(ctx)
	}
	for k := range a.rec.Nodes {
		switch {
		case p.vmis[k] != nil:
			a.see(p.now, keySecret(k), finding{state: stateReady, stage: "ready"})
		case making && p.fail == nil:
			ready = p.did(keySecret(k), e.ensureSecret(ctx, a, k), d.Seed) && ready
		}
	}
	for k := range a.rec.Nodes {
		if making && p.fail == nil {
			ready = p.open(ctx, k) && ready
		}
	}
	for k := range a.rec.Nodes {
		dv, err := e.disk(ctx, a, k, making && p.fail == nil && p.vmis[k] == nil)
		if !p.did2(keyDisk(k), err) {
			ready = false
			continue
		}
		p.disks[k] = dv
		if p.vmis[k] != nil && p.lostDisk(ctx, k, dv) {
			continue
		}
		if dv == nil {
			ready = false
			continue
		}
		f := p.judgeDisk(ctx, k, dv)
		p.found.disks[k] = f
		ready = ready && f.usable
	}
	ready = p.volumes(ctx) && ready
	for k := range a.rec.Nodes {
		vmi := p.vmis[k]
		if vmi == nil {
			name := VMIName(a.rec.AttemptID, k)
			if _, seen := a.vmis[name]; seen && p.err == nil {
				p.failed(failure(orkv1.Reason_REASON_VM_REMOVED, "virtual machine %s was removed from the cluster by somebody else", name))
				a.see(p.now, keyVMI(k), finding{state: stateGone, stage: "gone"})
				continue
			}
			if !making || !ready || p.fail != nil {
				a.see(p.now, keyVMI(k), finding{state: statePending, stage: "pending"})
				continue
			}
			made, err := e.createMachine(ctx, a, k)
			if !p.did(keyVMI(k), err, 0) {
				continue
			}
			vmi = made
			p.vmis[k] = made
			p.remember(made)
		}
		p.judgeMachine(ctx, k, vmi)
	}
}

// did2 is did for a look that makes nothing: it says nothing of a good one.
func (p *pass) did2(key string, err error) bool {
	return err == nil || p.did(key, err, 0)
}

// remember records a machine's uid; another uid under the same name is another
// machine.
func (p *pass) remember(vmi *kubevirt.VirtualMachineInstance) {
	known, ok := p.a.vmis[vmi.Name]
	switch {
	case !ok:
		p.a.vmis[vmi.Name] = vmi.UID
		p.a.unsaved = true
	case known != vmi.UID:
		p.failed(failure(orkv1.Reason_REASON_VM_REMOVED, "virtual machine %s was replaced by somebody else", vmi.Name))
	}
}

// diskLostWords tell who reads them while there is still something to save.
const diskLostWords = "somebody else deleted the root disk: what is on it is lost when the VM stops, copy it away before that"

// lostDisk notices that the root disk under a machine was deleted by somebody
// else. The machine keeps it until it stops, so a running one goes on and its
// users are told; one that has not begun cannot begin.
func (p *pass) lostDisk(ctx context.Context, k int, dv *cdi.DataVolume) bool {
	key, name := keyDisk(k), DiskName(p.a.rec.JobID, p.a.rec.ReplicaIndex, k)
	if t := p.a.tracks[key]; dv == nil && (t == nil || t.stage != stageLost) {
		callCtx, cancel := context.WithTimeout(ctx, callTimeout)
		defer cancel()
		_, err := p.e.o.Client.CDI.DataVolumes(p.e.o.Client.Namespace).Get(callCtx, name, metav1.GetOptions{})
		if !apierrors.IsNotFound(err) {
			if err != nil {
				p.err = errors.Join(p.err, fmt.Errorf("read DataVolume %s: %w", name, err))
			}
			return false // the view is behind, or nothing is known
		}
	}
	// The volume holds what is on it: a DataVolume may be taken from over it.
	pvc, ok := p.e.o.View.Volume(name)
	if ok && pvc.DeletionTimestamp == nil || !ok && dv != nil && dv.DeletionTimestamp == nil {
		return false
	}
	p.found.disks[k] = finding{state: stateGone, stage: stageLost, words: diskLostWords}
	t := p.a.see(p.now, key, p.found.disks[k])
	switch p.vmis[k].Status.Phase {
	case kubevirt.Scheduled, kubevirt.Running:
		if p.diskLost.IsZero() || t.since.Before(p.diskLost) {
			p.diskLost = t.since
		}
	case kubevirt.Succeeded, kubevirt.Failed: // how it ended says more
	default:
		p.failed(p.on(k, failure(orkv1.Reason_REASON_VM_REMOVED, "somebody else deleted the root disk %s before its VM had started", name)))
	}
	return true
}

// diskDone says that no import keeps the k-th machine waiting.
func (p *pass) diskDone(k int) bool {
	f := p.found.disks[k]
	return p.disks[k] == nil || f.state == stateReady || f.stage == stageLost
}

// judgeDisk judges what the view shows; a verdict that only time led to is
// confirmed by a live read first, since the view may lag behind.
func (p *pass) judgeDisk(ctx context.Context, k int, dv *cdi.DataVolume) finding {
	key := keyDisk(k)
	for live := false; ; live = true {
		f := judgeDisk(dv, p.a.clock(p.now, key), p.e.s.Deadlines, p.vmis[k] != nil)
		t := p.a.see(p.now, key, f)
		f = judgeDisk(dv, t.clock(p.now), p.e.s.Deadlines, p.vmis[k] != nil)
		if n := p.a.rec.AttemptNumber; n > 1 && dv.Annotations[label.MadeFor] == fmt.Sprint(n) {
			f.words = joinWords(f.words, "a new disk: none of an earlier attempt was here")
			p.a.see(p.now, key, f)
		}
		if f.fail == nil {
			return f
		}
		if !f.timed || live {
			p.failed(p.on(k, f.fail))
			p.a.see(p.now, key, f)
			return f
		}
		callCtx, cancel := context.WithTimeout(ctx, callTimeout)
		fresh, err := p.e.o.Client.CDI.DataVolumes(p.e.o.Client.Namespace).Get(callCtx, dv.Name, metav1.GetOptions{})
		cancel()
		if err != nil {
			p.err = errors.Join(p.err, fmt.Errorf("read DataVolume %s: %w", dv.Name, err))
			f.fail, f.state = nil, stateWaiting
			return f
		}
		dv = fresh
	}
}

func (p *pass) judgeMachine(ctx context.Context, k int, vmi *kubevirt.VirtualMachineInstance) {
	key, gpus := keyVMI(k), p.a.rec.Nodes[k].GPUs
	diskReady := p.diskDone(k)
	for live := false; ; live = true {
		if o := ended(vmi); o != nil {
			t := p.a.see(p.now, key, finding{state: stateWaiting, words: string(vmi.Status.Phase), stage: "ended"})
			told, err := p.explainEnd(ctx, vmi, o, p.now.Sub(t.since))
			if err != nil || !told {
				// An end is written once: not before the cluster was asked for its cause.
				p.err = errors.Join(p.err, err)
				p.found.vmis[k] = finding{state: stateWaiting, words: string(vmi.Status.Phase), stage: "ended"}
				return
			}
			p.found.vmis[k] = finding{state: stateFailed, words: joinWords(string(vmi.Status.Phase), lastWords(vmi)), stage: "ended"}
			if o.GuestSucceeded {
				p.found.vmis[k].state = stateGone
			}
			p.a.see(p.now, key, p.found.vmis[k])
			// One machine that fails fails its gang; the first one ends it.
			if k == 0 || !o.GuestSucceeded {
				p.failed(p.on(k, o))
			}
			return
		}
		pod, err := p.startWords(ctx, key, vmi)
		p.err = errors.Join(p.err, err)
		f := judgeVMI(vmi, p.a.clock(p.now, key), p.e.s.Deadlines, gpus, diskReady, pod)
		t := p.a.see(p.now, key, f)
		f = judgeVMI(vmi, t.clock(p.now), p.e.s.Deadlines, gpus, diskReady, pod)
		p.found.vmis[k] = f
		if f.fail != nil && f.timed && !live {
			fresh, err := p.e.liveMachine(ctx, p.a, vmi.Name)
			if err != nil || fresh == nil {
				p.err = errors.Join(p.err, err)
				f.fail, f.state = nil, stateWaiting
				p.found.vmis[k] = f
				return
			}
			vmi = fresh
			continue
		}
		if f.fail != nil {
			p.failed(p.on(k, f.fail))
			p.a.see(p.now, key, f)
		}
		break
	}
	p.watchNode(k, vmi)
}

// watchNode notes what is wrong with the node under a machine. Nothing is
// replaced and nothing is judged dead: two copies are worse than none.
func (p *pass) watchNode(k int, vmi *kubevirt.VirtualMachineInstance) {
	name := p.a.rec.Nodes[k].Node
	if draining(vmi) {
		t := p.a.see(p.now, fmt.Sprintf("drain/%d", k), finding{stage: "draining"})
		p.draining = fmt.Sprintf("node %s is being drained since %s", name, t.since.UTC().Format("15:04:05Z"))
		if d := p.e.s.Deadlines.Eviction; d > 0 {
			p.draining += fmt.Sprintf("; the VM is stopped at %s so that the drain can go on, its root disk stays", t.since.Add(d).UTC().Format("15:04:05Z"))
		}
		if d := p.e.s.Deadlines.Eviction; d > 0 && p.now.Sub(t.since) > d {
			p.failed(failure(orkv1.Reason_REASON_DRAINED, "node %s was drained and the time for it, %s, is over", name, d))
		}
	} else {
		delete(p.a.tracks, fmt.Sprintf("drain/%d", k))
	}
	if vmi.Status.Phase != kubevirt.Running {
		return
	}
	var since time.Time
	node, ok := p.e.o.View.Node(name)
	switch {
	case !ok:
		since = p.a.see(p.now, fmt.Sprintf("lost/%d", k), finding{stage: "lost"}).since
	default:
		delete(p.a.tracks, fmt.Sprintf("lost/%d", k))
		if ready, c := capacity.Ready(node); !ready {
			since = p.now
			if c != nil && !c.LastTransitionTime.IsZero() {
				since = c.LastTransitionTime.Time
			}
		}
	}
	if since.IsZero() {
		if c := condition(vmi, kubevirt.VirtualMachineInstanceReady); c != nil && c.Status != "True" && c.Reason == kubevirt.PodTerminatingReason && vmi.DeletionTimestamp == nil {
			since = c.LastTransitionTime.Time
		}
	}
	if !since.IsZero() && (p.unreachable.IsZero() || since.Before(p.unreachable)) {
		p.unreachable = since
	}
}

// on says on which node of several something happened.
func (p *pass) on(k int, o *claim.Outcome) *claim.Outcome {
	if len(p.a.rec.Nodes) > 1 {
		c := *o
		c.Message = fmt.Sprintf("node %d (%s): %s", k, p.a.rec.Nodes[k].Node, o.Message)
		return &c
	}
	return o
}

// settled says that every machine runs on a node that is heard of.
func (p *pass) settled() bool {
	for _, f := range p.found.vmis {
		if f.state != stateReady {
			return false
		}
	}
	return p.unreachable.IsZero() && p.draining == ""
}

// phase says how far the attempt is.
func (p *pass) phase() workerv1.AttemptPhase {
	ready, booting, scheduling := 0, 0, 0
	for k := range p.a.rec.Nodes {
		if !p.diskDone(k) && p.found.vmis[k].state != stateReady {
			return workerv1.AttemptPhase_ATTEMPT_PHASE_IMPORTING
		}
		vmi := p.vmis[k]
		if vmi == nil {
			continue
		}
		switch vmi.Status.Phase {
		case kubevirt.Running:
			ready++
		case kubevirt.Scheduled:
			booting++
		default:
			scheduling++
		}
	}
	switch n := len(p.a.rec.Nodes); {
	case n > 0 && ready == n:
		return workerv1.AttemptPhase_ATTEMPT_PHASE_UP
	case scheduling > 0:
		return workerv1.AttemptPhase_ATTEMPT_PHASE_SCHEDULING
	case booting+ready > 0:
		return workerv1.AttemptPhase_ATTEMPT_PHASE_BOOTING
	default:
		return workerv1.AttemptPhase_ATTEMPT_PHASE_CREATING
	}
}
