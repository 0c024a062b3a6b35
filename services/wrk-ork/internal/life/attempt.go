package life

import (
	"fmt"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	agentv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
)

// Short names for the states and reasons used below.
const (
	queued       = orkv1.State_STATE_QUEUED
	reserving    = orkv1.State_STATE_RESERVING
	provisioning = orkv1.State_STATE_PROVISIONING
	starting     = orkv1.State_STATE_STARTING
	running      = orkv1.State_STATE_RUNNING
	stopping     = orkv1.State_STATE_STOPPING
	stopped      = orkv1.State_STATE_STOPPED
	succeeded    = orkv1.State_STATE_SUCCEEDED
	failed       = orkv1.State_STATE_FAILED
	cancelled    = orkv1.State_STATE_CANCELLED
)

// advance moves one attempt as far as what is seen allows. It changes a.
func advance(l Limits, j *job.Job, a *job.Attempt, s Sight) {
	seen := s.Attempts[a.ID]
	rack, known := s.Racks[a.RackID]
	if a.Abandoned.Set() && known && j.Intent != job.IntentRun {
		// Its rack is back and its end was asked for: taken down like any other.
		a.Abandoned = job.Mark{}
	}
	if a.Abandoned.Set() {
		// Nothing can be asked of its cluster, and nothing is judged of it.
		if j.Intent != job.IntentRun {
			finish(j, a, s.Now)
		}
		readiness(l, a, seen, s)
		return
	}
	observe(a, seen, rack, s.Now)
	// Each round is one transition; a life has fewer than ten.
	for range 10 {
		was := a.State
		step(l, j, a, seen, rack, s)
		if a.State == was {
			break
		}
	}
	readiness(l, a, seen, s)
	marks(l, j, a, seen, rack, s)
}

// observe copies the worker's and the agent's words, without a decision.
func observe(a *job.Attempt, seen Attempt, rack Rack, now time.Time) {
	if st := seen.Status; st != nil {
		a.Seen, a.Sent = true, true
		a.Simulated = rack.Simulated
		a.Stage = furthest(a.Stage, st.Phase)
		mergeNodes(a, st.Nodes)
		switch st.Phase {
		case workerv1.AttemptPhase_ATTEMPT_PHASE_UP:
			a.Anchored = true
			if a.UpAt.IsZero() {
				a.UpAt = now
			}
		case workerv1.AttemptPhase_ATTEMPT_PHASE_IMPORTING,
			workerv1.AttemptPhase_ATTEMPT_PHASE_SCHEDULING,
			workerv1.AttemptPhase_ATTEMPT_PHASE_BOOTING,
			workerv1.AttemptPhase_ATTEMPT_PHASE_ENDED,
			workerv1.AttemptPhase_ATTEMPT_PHASE_FAILED:
			a.Anchored = true
		}
		if at := st.DiskLostSince; at.IsValid() && !a.DiskLost.Set() {
			a.DiskLost = job.Mark{Since: at.AsTime(), Message: diskLost}
		}
		if job.Ended(a.State) {
			// Something of it is there, whatever was thought before.
			a.Gone, a.GoneAt = false, time.Time{}
		}
	}
	if gpus := seen.Agent.Report.GetGpus(); len(gpus) > 0 && len(a.GPUUUIDs) != len(gpus) {
		a.GPUUUIDs = nil
		for _, g := range gpus {
			a.GPUUUIDs = append(a.GPUUUIDs, bound(g.Uuid))
		}
	}
	if len(seen.Agent.Addresses) > 0 {
		a.AgentAddresses = seen.Agent.Addresses
	}
	if seen.Agent.SSHHostKey != "" {
		a.SSHHostKey = seen.Agent.SSHHostKey
	}
	if seen.Agent.DefaultUser != "" {
		a.DefaultUser = seen.Agent.DefaultUser
	}
}

// furthest is the later of two phases of a start; ends count for nothing.
func furthest(have, now workerv1.AttemptPhase) workerv1.AttemptPhase {
	if now > workerv1.AttemptPhase_ATTEMPT_PHASE_UP {
		return have
	}
	return max(have, now)
}

// mergeNodes takes the cluster's words on the plan's nodes.
func mergeNodes(a *job.Attempt, nodes []*orkv1.AttemptNode) {
	for _, n := range nodes {
		for i, have := range a.Nodes {
			if have.NodeName == n.NodeName {
				c := proto.Clone(n).(*orkv1.AttemptNode)
				if c.GpuCount == 0 {
					c.GpuCount = have.GpuCount
				}
				a.Nodes[i] = c
			}
		}
	}
}

// step makes at most one transition.
func step(l Limits, j *job.Job, a *job.Attempt, seen Attempt, rack Rack, s Sight) {
	wanted := j.Intent == job.IntentRun && a.Recycle == orkv1.Reason_REASON_UNSPECIFIED
	gone := absent(l, a, seen, rack, s.Started)
	switch a.State {
	case queued:
		if !wanted {
			finish(j, a, s.Now)
			a.Leave(s.Now)
		}
	case reserving:
		stepReserving(l, j, a, seen, rack, s, wanted)
	case provisioning, starting, running:
		stepLive(l, j, a, seen, rack, s, wanted, gone)
	case stopping:
		if gone {
			finish(j, a, s.Now)
			a.Leave(s.Now)
		}
	default:
		if !a.Gone && gone {
			a.Leave(s.Now)
		}
	}
}

func stepReserving(l Limits, j *job.Job, a *job.Attempt, seen Attempt, rack Rack, s Sight, wanted bool) {
	ans := seen.Answer
	if ans != nil && ans.Plan != a.Plan {
		ans = nil
	}
	switch {
	case ans != nil && !ans.Claimed && seen.Status == nil:
		refused(l, a, ans, s.Now)
	case !wanted && !a.Sent && !seen.Proposing:
		finish(j, a, s.Now)
		a.Leave(s.Now)
	case !wanted:
		stop(j, a, s.Now)
	case !a.Sent && !seen.Proposing && rack.quarantined(a) != "":
		// The worker never heard of this plan.
		why := rack.quarantined(a)
		replan(a)
		a.State, a.Reason, a.Message = queued, orkv1.Reason_REASON_QUARANTINED, bound("another plan is made: "+why)
	case seen.Status != nil || (ans != nil && ans.Claimed):
		a.State, a.Reason = provisioning, orkv1.Reason_REASON_UNSPECIFIED
		a.Message = "the rack's worker claimed its GPUs"
		if a.GPUs() == 0 {
			a.Message = "the rack's worker took it on"
		}
		a.ClaimedAt = s.Now
		a.Refusals = 0
		a.RefusedNodes = nil
	}
}

// refused puts the attempt back in the queue, or ends it when the cluster
// itself says again and again that it cannot be.
func refused(l Limits, a *job.Attempt, ans *Answer, now time.Time) {
	a.Refusals++
	a.Sent, a.Seen = false, false
	for _, n := range a.Nodes {
		key := a.RackID + "/" + n.NodeName
		if len(a.RefusedNodes) >= 16 {
			a.RefusedNodes = a.RefusedNodes[1:]
		}
		a.RefusedNodes = append(a.RefusedNodes, key)
	}
	switch ans.Reason {
	case orkv1.Reason_REASON_NEVER_FITS, orkv1.Reason_REASON_NO_FABRIC, orkv1.Reason_REASON_FABRIC_COUNT,
		orkv1.Reason_REASON_IMAGE_UNAVAILABLE, orkv1.Reason_REASON_UNKNOWN_MODEL,
		orkv1.Reason_REASON_CLUSTER_REFUSED:
		if a.Refusals >= l.RefusalsFinal {
			end(a, failed, ans.Reason, fmt.Sprintf("rack %s refused it %d times: %s", a.RackID, a.Refusals, ans.Message), now)
			a.Leave(now)
			return
		}
	}
	text := ans.Message
	if text == "" {
		text = job.ReasonName(ans.Reason)
	}
	a.State, a.Reason = queued, orkv1.Reason_REASON_CLAIM_REFUSED
	a.Message = bound(fmt.Sprintf("rack %s refused the plan (%s); another is made", a.RackID, text))
	a.NotBefore = now.Add(backoff(l.RefusalFirst, l.RefusalMost, a.Refusals))
	replan(a)
}

// replan forgets a plan that no worker holds.
func replan(a *job.Attempt) { a.RackID, a.Nodes, a.ClaimedAt = "", nil, time.Time{} }

func stepLive(l Limits, j *job.Job, a *job.Attempt, seen Attempt, rack Rack, s Sight, wanted, gone bool) {
	st := seen.Status
	phase := st.GetPhase()
	switch {
	case a.Fenced:
		end(a, failed, orkv1.Reason_REASON_FENCED, "a second key redeemed its join token; both keys are refused", s.Now)
		return
	case !wanted:
		stop(j, a, s.Now)
		return
	case phase == workerv1.AttemptPhase_ATTEMPT_PHASE_FAILED:
		end(a, failed, or(st.Reason, orkv1.Reason_REASON_VM_FAILED), orText(st.Message, "the cluster gave it up"), s.Now)
		a.StartFailed = neverStarted(a)
		return
	case phase == workerv1.AttemptPhase_ATTEMPT_PHASE_ENDED:
		guestEnded(j, a, st, s.Now)
		return
	case gone && !a.Anchored && a.State == provisioning:
		// The claim lapsed before anything was made: same plan, proposed again.
		a.State, a.Reason = reserving, orkv1.Reason_REASON_UNSPECIFIED
		a.Message = "the claim lapsed before anything was made; proposed again"
		a.Seen, a.ClaimedAt = false, time.Time{}
		return
	case gone:
		end(a, failed, orkv1.Reason_REASON_VM_REMOVED, "its VM was removed from the cluster by somebody else", s.Now)
		a.Leave(s.Now)
		return
	}
	switch a.State {
	case provisioning:
		stepProvisioning(l, a, seen, rack, s)
	case starting:
		stepStarting(l, j, a, seen, s)
	case running:
		if r := seen.Agent.Report; r.GetPhase() == agentv1.Phase_PHASE_FAILED {
			a.Final = r.Final
			end(a, failed, orkv1.Reason_REASON_ENGINE_FAILED, orText(r.Message, "the agent reported a failure"), s.Now)
		} else if r != nil {
			a.Message = bound(r.Message)
		}
	}
}

func guestEnded(j *job.Job, a *job.Attempt, st *workerv1.AttemptStatus, now time.Time) {
	reason := or(st.Reason, orkv1.Reason_REASON_VM_FAILED)
	switch {
	case st.GuestSucceeded && j.Inference():
		end(a, failed, orkv1.Reason_REASON_GUEST_SHUTDOWN, orText(st.Message, "the VM shut itself down"), now)
	case st.GuestSucceeded:
		end(a, succeeded, orkv1.Reason_REASON_GUEST_SHUTDOWN, orText(st.Message, "the VM shut itself down"), now)
	default:
		end(a, failed, reason, orText(st.Message, "the VM ended by itself"), now)
		a.StartFailed = neverStarted(a)
	}
}

// neverStarted reports whether a failed attempt's VM never ran, and the cluster
// blames neither the image nor the storage nor somebody's hand: its node could not
// start it. What an agent says counts for nothing here: it is its tenant's word,
// and a tenant must not close a node to others.
func neverStarted(a *job.Attempt) bool {
	if !a.UpAt.IsZero() || a.AgentKey != "" {
		return false
	}
	switch a.Reason {
	case orkv1.Reason_REASON_VM_FAILED, orkv1.Reason_REASON_NODE_LOST:
		return true
	case orkv1.Reason_REASON_DEADLINE:
		return a.Stage == workerv1.AttemptPhase_ATTEMPT_PHASE_BOOTING
	}
	return false
}

func stepProvisioning(l Limits, a *job.Attempt, seen Attempt, rack Rack, s Sight) {
	if a.AgentKey != "" {
		a.State, a.Reason, a.Message = starting, orkv1.Reason_REASON_UNSPECIFIED, "the agent said hello"
		a.HelloAt = s.Now
		return
	}
	st := seen.Status
	if st == nil {
		return
	}
	switch st.Phase {
	case workerv1.AttemptPhase_ATTEMPT_PHASE_CREATING:
		a.Reason = st.Reason
	case workerv1.AttemptPhase_ATTEMPT_PHASE_IMPORTING:
		a.Reason = or(st.Reason, orkv1.Reason_REASON_IMPORTING_IMAGE)
	case workerv1.AttemptPhase_ATTEMPT_PHASE_SCHEDULING:
		a.Reason = or(st.Reason, orkv1.Reason_REASON_SCHEDULING)
	case workerv1.AttemptPhase_ATTEMPT_PHASE_BOOTING:
		a.Reason = or(st.Reason, orkv1.Reason_REASON_BOOTING)
	case workerv1.AttemptPhase_ATTEMPT_PHASE_UP:
		a.Reason, a.Message = orkv1.Reason_REASON_WAITING_FOR_AGENT, "its VM runs; waits for the agent in it"
		// Only time in which the agent could have been heard counts.
		from := latest(a.UpAt, s.Started, rack.Since)
		if rack.Connected && s.Now.Sub(from) > l.AgentHello {
			end(a, failed, orkv1.Reason_REASON_AGENT_TIMEOUT,
				fmt.Sprintf("its VM runs and no agent called within %s; the image may lack cloud-init, or the VM cannot reach the network", l.AgentHello), s.Now)
		}
		return
	case workerv1.AttemptPhase_ATTEMPT_PHASE_DELETING:
		a.Reason = st.Reason
	}
	a.Message = orText(bound(st.Message), "the cluster makes what it needs")
	if st.Phase == workerv1.AttemptPhase_ATTEMPT_PHASE_IMPORTING && st.ImportPercent > 0 && st.ImportPercent <= 100 {
		a.Message = bound(strings.TrimSpace(fmt.Sprintf("%d %% %s", st.ImportPercent, st.Message)))
	}
}

func stepStarting(l Limits, j *job.Job, a *job.Attempt, seen Attempt, s Sight) {
	limit, reason := l.ContainerReady, orkv1.Reason_REASON_CHECKING_GPUS
	if j.Inference() {
		limit, reason = l.EngineReady, orkv1.Reason_REASON_LOADING_MODEL
	}
	r := seen.Agent.Report
	switch r.GetPhase() {
	case agentv1.Phase_PHASE_READY:
		if seen.Agent.NodesReady {
			a.State, a.Reason, a.Message = running, orkv1.Reason_REASON_UNSPECIFIED, bound(r.Message)
			a.RunningAt = s.Now
			return
		}
	case agentv1.Phase_PHASE_FAILED:
		a.Final = r.Final
		end(a, failed, orkv1.Reason_REASON_ENGINE_FAILED, orText(r.Message, "the agent reported a failure"), s.Now)
		return
	}
	a.Reason = reason
	if r != nil {
		a.Message = bound(r.Message)
	}
	from := latest(a.HelloAt, s.Started, seen.Agent.Since)
	if seen.Agent.Attending && s.Now.Sub(from) > limit {
		end(a, failed, orkv1.Reason_REASON_AGENT_TIMEOUT,
			fmt.Sprintf("not ready within %s; the agent's last word: %s", limit, orText(a.Message, "none")), s.Now)
	}
}

// readiness copies the agent's own claim while it is heard, and drops it when
// the agent is lost. It never ends an attempt.
func readiness(l Limits, a *job.Attempt, seen Attempt, s Sight) {
	switch {
	case a.State != running || a.Fenced || seen.Agent.lost(l, s, a.HelloAt):
		a.AgentReady = false
	case seen.Agent.Report != nil:
		a.AgentReady = seen.Agent.Report.Phase == agentv1.Phase_PHASE_READY && seen.Agent.NodesReady
	}
}

// marks sets the conditions that stand beside the state.
func marks(l Limits, j *job.Job, a *job.Attempt, seen Attempt, rack Rack, s Sight) {
	since, why := time.Time{}, ""
	switch {
	case a.Settled() || a.State == queued || a.RackID == "":
	case !rack.Connected:
		if from := latest(rack.Since, s.Started); s.Now.Sub(from) > l.RackSilence {
			since, why = from, fmt.Sprintf("the worker of rack %s cannot be reached; nothing is assumed of this attempt", a.RackID)
		}
	case rack.Fault != "":
		since = orTime(rack.FaultSince, s.Now)
		why = bound(fmt.Sprintf("the cluster of rack %s cannot be asked: %s", a.RackID, rack.Fault))
	case seen.Status.GetUnreachableSince() != nil:
		since = seen.Status.UnreachableSince.AsTime()
		why = "its node is not heard of; it may still run there"
	case (a.State == starting || a.State == running) && seen.Agent.lost(l, s, a.HelloAt):
		since, why = latest(seen.Agent.HeardAt, s.Started, a.HelloAt), "its agent is not heard of; the cluster says that the VM runs"
	}
	mark(&a.Unreachable, since, why)

	since, why = time.Time{}, ""
	switch {
	case a.State == stopping && j.Inference() && !drained(l, a, seen, s.Now):
		since, why = a.StoppingAt, "finishes the requests it has"
	case a.State == running && seen.Agent.Report.GetPhase() == agentv1.Phase_PHASE_DRAINING:
		since, why = s.Now, "its agent takes nothing new"
	case !rack.DrainDeadline.IsZero() && (a.State == reserving || a.State == provisioning || a.State == starting || a.State == running):
		since = rack.DrainSince
		why = fmt.Sprintf("rack %s is being drained; what runs there is stopped at %s", a.RackID, rack.DrainDeadline.UTC().Format(time.RFC3339))
	case a.State == running && seen.Status.GetReason() == orkv1.Reason_REASON_DRAINED:
		since, why = s.Now, orText(seen.Status.Message, "its node is being drained")
	}
	mark(&a.Draining, since, why)

	since, why = idleMark(j, a, s)
	mark(&a.Idle, since, why)
}

// mark keeps the first moment of a condition while it lasts.
func mark(m *job.Mark, since time.Time, why string) {
	if why == "" {
		*m = job.Mark{}
		return
	}
	if !m.Set() {
		m.Since = since
	}
	m.Message = why
}

// absent reports whether the cluster said that it holds nothing of the attempt.
func absent(l Limits, a *job.Attempt, seen Attempt, rack Rack, started time.Time) bool {
	switch {
	case seen.Proposing:
		return false
	case !a.Sent:
		return true
	case !rack.complete() || seen.Status != nil:
		return false
	case a.Seen:
		return true
	case !seen.DeletedAt.IsZero():
		// After a stand-still reports of before may still come in.
		return rack.ReportedAt.Sub(latest(seen.DeletedAt, started)) > l.AbsenceGrace
	case a.State == provisioning && !a.ClaimedAt.IsZero():
		return rack.ReportedAt.Sub(latest(a.ClaimedAt, started)) > l.AbsenceGrace
	}
	return false
}

// drained reports whether an ending attempt may be taken down.
func drained(l Limits, a *job.Attempt, seen Attempt, now time.Time) bool {
	if a.RunningAt.IsZero() || !seen.Agent.Attending || now.Sub(a.StoppingAt) >= l.Drain {
		return true
	}
	r := seen.Agent.Report
	return r.GetPhase() == agentv1.Phase_PHASE_DRAINING && r.RequestsRunning == 0 && r.RequestsWaiting == 0
}

// stop begins the end that the user (or a limit) asked for.
func stop(j *job.Job, a *job.Attempt, now time.Time) {
	a.State, a.Reason = stopping, a.Recycle
	text := "gives up its GPUs and " + keepsDisk(a.DiskLost.Set())
	switch j.Intent {
	case job.IntentRun:
		text = "is stopped to make room for a new attempt; " + keepsDisk(a.DiskLost.Set())
		if a.Retire {
			text = "is stopped: its replica is no longer needed"
		}
	case job.IntentDelete:
		a.Reason, text = j.IntentReason, "gives up its GPUs and its disks"
	default:
		a.Reason = j.IntentReason
		if j.IntentMessage != "" {
			text = j.IntentMessage + "; " + text
		}
	}
	a.Message = bound(text + "; waits until the cluster says that nothing of it is left")
	a.StoppingAt = now
	a.AgentReady = false
}

// finish is the end of an attempt that somebody ended.
func finish(j *job.Job, a *job.Attempt, now time.Time) {
	switch j.Intent {
	case job.IntentDelete:
		end(a, cancelled, j.IntentReason, "ended because the job is deleted", now)
		return
	case job.IntentRun:
		text := "stopped; a new attempt follows"
		if a.Retire {
			text = "stopped: its replica is no longer needed"
		}
		end(a, stopped, a.Recycle, text, now)
		return
	}
	text := orText(j.IntentMessage, "stopped") + "; its root disk is kept and its GPUs are given up"
	if a.DiskLost.Set() {
		text = orText(j.IntentMessage, "stopped") + "; its GPUs are given up, and its root disk is lost: somebody else had deleted it"
	}
	if a.ClaimedAt.IsZero() {
		text = orText(j.IntentMessage, "stopped") + " before it held anything"
	}
	end(a, stopped, j.IntentReason, text, now)
}

// diskLost tells who reads it while there is still something to save.
const diskLost = "somebody else deleted the root disk; what is on it is lost when the VM stops, copy it away before that"

// keepsDisk says what becomes of a root disk when its VM is stopped.
func keepsDisk(lost bool) string {
	if lost {
		return "loses its root disk, which somebody else deleted"
	}
	return "keeps its root disk"
}

// end writes the outcome, once: an ended attempt stays as it ended.
func end(a *job.Attempt, state orkv1.State, reason orkv1.Reason, message string, now time.Time) {
	if job.Ended(a.State) {
		return
	}
	a.State, a.Reason, a.Message, a.EndedAt = state, reason, bound(message), now
	a.AgentReady = false
}

func backoff(first, most time.Duration, n uint32) time.Duration {
	d := first
	for ; n > 1 && d < most; n-- {
		d *= 2
	}
	return min(d, most)
}

// bound keeps the words of others short and on one line.
func bound(text string) string {
	const most = 1024
	if len(text) > most {
		text = text[:most] + "..."
	}
	return strings.ToValidUTF8(strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, text), "")
}

func or(a, b orkv1.Reason) orkv1.Reason {
	if a != orkv1.Reason_REASON_UNSPECIFIED {
		return a
	}
	return b
}

func orText(a, b string) string {
	if a != "" {
		return a
	}
	return b
}

func orTime(a, b time.Time) time.Time {
	if !a.IsZero() {
		return a
	}
	return b
}
