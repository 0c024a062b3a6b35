package app

import (
	"strings"
	"testing"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	agentv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
)

// refused is the end of a redemption: its kind and its words.
func refused(t *testing.T, err error, kind fault.Kind, words string) {
	t.Helper()
	if fault.KindOf(err) != kind || !strings.Contains(err.Error(), words) {
		t.Errorf("want %s %q, got %v", kind, words, err)
	}
}

func TestAReusedTokenFailsTheJobAndNeitherKeyIsBelieved(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 1))
	j := l.create(containerSpec("x", 1))
	attempt := newest(l.await(j.Id, orkv1.State_STATE_PROVISIONING))
	seed := seedOf(l, attempt.Id)
	first, err := l.redeem(seed, newKey(t))
	if err != nil {
		t.Fatal(err)
	}
	l.attend(first, agentv1.Phase_PHASE_READY)
	l.await(j.Id, orkv1.State_STATE_RUNNING)
	// The same key may say it again: its answer may have been lost.
	first.node.SetCredential(mesh.JoinToken(seed.JoinToken, l.orkKey.ID()))
	l.eventually("the same key redeems again", func() bool {
		_, err := first.client.RedeemToken(l.ctx, &orkv1.RedeemTokenRequest{JoinToken: seed.JoinToken})
		return err == nil
	})
	first.node.SetCredential(mesh.Certificate(first.certificate))
	_, err = l.redeem(seed, newKey(t))
	refused(t, err, fault.Denied, "was redeemed by another key before")
	fenced := l.await(j.Id, orkv1.State_STATE_FAILED)
	if fenced.Reason != orkv1.Reason_REASON_FENCED {
		t.Errorf("%v %q", fenced.Reason, fenced.Message)
	}
	l.closedTo(first)
	l.awaitThat(j.Id, "gone", func(j *orkv1.Job) bool { return newest(j).Gone })
}

func TestAStolenTokenThatWasUsedFirstFailsTheJob(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 1))
	j := l.create(containerSpec("x", 1))
	seed := seedOf(l, newest(l.await(j.Id, orkv1.State_STATE_PROVISIONING)).Id)
	thief, err := l.redeem(seed, newKey(t))
	if err != nil {
		t.Fatal(err)
	}
	l.attend(thief, agentv1.Phase_PHASE_STARTING)
	l.await(j.Id, orkv1.State_STATE_STARTING)
	_, err = l.redeem(seed, newKey(t)) // the agent in the VM
	refused(t, err, fault.Denied, "is fenced")
	failed := l.await(j.Id, orkv1.State_STATE_FAILED)
	if failed.Reason != orkv1.Reason_REASON_FENCED || !strings.Contains(failed.Message, "second key") {
		t.Errorf("%v %q", failed.Reason, failed.Message)
	}
	l.closedTo(thief)
	// And so it stays for both, over a restart too.
	l.stop()
	l.startOrk()
	l.closedTo(thief)
	_, err = l.redeem(seed, newKey(t))
	if err == nil {
		t.Error("the token is good again after a restart")
	}
}

func TestALateTokenIsRefusedInWordsAndTheJobFails(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 1))
	j := l.create(containerSpec("x", 1))
	up := newest(l.awaitThat(j.Id, "up", func(j *orkv1.Job) bool { return j.Reason == orkv1.Reason_REASON_WAITING_FOR_AGENT }))
	seed := seedOf(l, up.Id)
	// The VM came up, and the orchestrator was away for too long.
	l.stop()
	l.ahead.Store(int64(l.config.Agents.TokenLife + time.Minute))
	l.startOrk()
	_, err := l.redeem(seed, newKey(t))
	refused(t, err, fault.Unauthenticated, "older than 30m0s after the start of its VM; stop and start the job")
	l.stop()
	l.config.Deadlines.AgentHello = time.Second
	l.startOrk()
	late := l.await(j.Id, orkv1.State_STATE_FAILED)
	if late.Reason != orkv1.Reason_REASON_AGENT_TIMEOUT {
		t.Errorf("%v %q", late.Reason, late.Message)
	}
}

func TestATokenIsGoodInItsOwnVMAlone(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 1))
	l.worker.change(func() { l.worker.unnamed = true })
	j := l.create(containerSpec("x", 1))
	attempt := newest(l.await(j.Id, orkv1.State_STATE_PROVISIONING))
	seed := seedOf(l, attempt.Id)
	key := newKey(t)
	_, err := l.redeem(seed, key)
	refused(t, err, fault.Unreachable, "has not reported the VM")

	uid := func(id string) {
		l.worker.phase(attempt.Id, func(s *workerv1.AttemptStatus) { s.Nodes[0].VmiUid = id })
		l.awaitThat(j.Id, "seen", func(j *orkv1.Job) bool { return newest(j).Nodes[0].VmiUid == id })
	}
	uid("one")
	if _, err := l.redeem(seed, key); err != nil {
		t.Fatal(err)
	}
	// Somebody put another VM in its place.
	uid("two")
	_, err = l.redeem(seed, key)
	refused(t, err, fault.Denied, "the cluster runs another in its place; stop and start the job")
	uid("one")
	if _, err := l.redeem(seed, key); err != nil {
		t.Errorf("its own VM again: %v", err)
	}
}

func TestATokenOfAStoppedAttemptIsVoid(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 1))
	j := l.create(containerSpec("x", 1))
	first := seedOf(l, newest(l.await(j.Id, orkv1.State_STATE_PROVISIONING)).Id)
	if _, err := l.jobs.StopJob(l.ctx, &orkv1.StopJobRequest{Id: j.Id}); err != nil {
		t.Fatal(err)
	}
	l.await(j.Id, orkv1.State_STATE_STOPPED)
	if _, err := l.jobs.StartJob(l.ctx, &orkv1.StartJobRequest{Id: j.Id}); err != nil {
		t.Fatal(err)
	}
	second := seedOf(l, newest(l.await(j.Id, orkv1.State_STATE_PROVISIONING)).Id)
	_, err := l.redeem(first, newKey(t))
	refused(t, err, fault.Denied, "is over; its join token is void")
	if _, err := l.redeem(second, newKey(t)); err != nil {
		t.Errorf("the second attempt's own token: %v", err)
	}
}

func TestAMadeUpTokenIsRefused(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 1))
	seed := &agentv1.Seed{JoinToken: "cjt_made-up", OrkKey: l.orkKey.ID().String(), OrkAddresses: []string{l.address}}
	_, err := l.redeem(seed, newKey(t))
	refused(t, err, fault.Unauthenticated, "not known")
}
