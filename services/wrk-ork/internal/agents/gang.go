package agents

import (
	"fmt"

	"google.golang.org/protobuf/proto"

	agentv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
)

// report is what the agents of an attempt say together: the head's word, unless the
// agent of another node gave up. One member that fails fails its gang.
func (a *attempt) report(of *job.Attempt) *agentv1.Report {
	head := a.nodes[0].report
	if head.GetPhase() == agentv1.Phase_PHASE_FAILED {
		return head
	}
	for k := 1; k < len(of.Nodes); k++ {
		v := a.nodes[uint32(k)]
		if v == nil || v.report.GetPhase() != agentv1.Phase_PHASE_FAILED {
			continue
		}
		r := proto.CloneOf(v.report)
		r.Message = fmt.Sprintf("node %d (%s): %s", k, of.Nodes[k].NodeName, r.Message)
		return r
	}
	return head
}
