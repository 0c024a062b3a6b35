package app

import (
	"strings"
	"testing"

	agentv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

func TestAGangFailsWholeWhenTheAgentOfOneNodeGivesUp(t *testing.T) {
	t.Parallel()
	l := newFabricLab(t, gpuNode("n1", 4), gpuNode("n2", 4))
	s := inferenceSpec("gang", 1)
	s.Gpu.Count = 8
	gang := l.create(s).Id
	first := newest(l.await(gang, orkv1.State_STATE_PROVISIONING))
	head, err := l.redeem(seedOf(l, first.Id), newKey(t))
	if err != nil {
		t.Fatal(err)
	}
	l.attend(head, agentv1.Phase_PHASE_READY)
	l.await(gang, orkv1.State_STATE_STARTING) // the head alone is not enough
	other, err := l.redeem(l.worker.plan(first.Id).Nodes[1].Seed, newKey(t))
	if err != nil {
		t.Fatal(err)
	}
	l.attend(other, agentv1.Phase_PHASE_FAILED)
	l.awaitThat(gang, "the whole attempt has failed and is taken down", func(j *orkv1.Job) bool {
		for _, a := range j.Replicas[0].Attempts {
			if a.Id == first.Id {
				return a.State == orkv1.State_STATE_FAILED && a.Reason == orkv1.Reason_REASON_ENGINE_FAILED && a.Gone &&
					strings.Contains(a.Message, "node 1 (n2): as told")
			}
		}
		return false
	})
	l.delete(gang)
	if !l.worker.empty() {
		t.Error("something of the gang is left")
	}
}
