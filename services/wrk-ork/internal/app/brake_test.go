package app

import (
	"fmt"
	"strings"
	"testing"

	"github.com/cosmicac/cosmicac/pkg/health"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

// TestAClusterThatFailsAsAWholeClosesOneNodeAndFailsNoJob: one cause on every
// node must not empty the rack nor end what waits for it.
func TestAClusterThatFailsAsAWholeClosesOneNodeAndFailsNoJob(t *testing.T) {
	t.Parallel()
	nodes := []*orkv1.RackNode{gpuNode("n1", 4), gpuNode("n2", 4), gpuNode("n3", 4), gpuNode("n4", 4)}
	l := newLab(t, nodes...)
	reject := map[string]int{}
	for _, n := range nodes {
		reject[n.Name] = 1000
	}
	l.worker.change(func() { l.worker.reject = reject })
	var ids []string
	for i := range 6 {
		ids = append(ids, l.create(containerSpec(fmt.Sprintf("j%d", i), 1)).Id)
	}
	l.eventually("the operator is told that the rack fails as a whole", func() bool {
		for _, w := range l.health.List() {
			if w.Code == string(health.RackFailing) && strings.Contains(w.Text, "rk-test") && strings.Contains(w.Text, "UnexpectedAdmissionError") {
				return true
			}
		}
		return false
	})
	// Every job would have used up its tries by then, were they counted.
	l.eventually("all were tried more often than a job may fail", func() bool {
		for _, id := range ids {
			if newest(l.get(id)).Number <= l.config.Retries.StartCount+2 {
				return false
			}
		}
		return true
	})
	closed := 0
	for _, q := range l.quarantines() {
		if q.Active {
			closed++
		} else if len(q.Evidence) == 0 {
			t.Errorf("no evidence: %v", q)
		}
	}
	if closed != 1 {
		t.Errorf("%d of 4 nodes are closed, want 1", closed)
	}
	for _, id := range ids {
		if j := l.get(id); j.State == orkv1.State_STATE_FAILED {
			t.Errorf("failed by its cluster: %v", j)
		}
	}
	// It heals, and everything runs without anybody's hand.
	l.worker.change(func() { l.worker.reject = nil })
	for _, id := range ids {
		l.awaitThat(id, "up", func(j *orkv1.Job) bool {
			return j.Reason == orkv1.Reason_REASON_WAITING_FOR_AGENT
		})
	}
}
