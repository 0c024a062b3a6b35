// Command bench measures the rack's worker and the orchestrator at scale: an
// embedded cluster with hundreds of GPU nodes, the real daemons as processes,
// hundreds of jobs at once until all run and then until nothing is left, and
// beside it, in the same run, the same objects applied by bare client-go.
//
// What is simulated: nodes, GPUs, KubeVirt, CDI and the virtual machines, which
// have no process here (cosmicac-devcluster --play-vms). Their agents are stubs
// within this process: each has its own key, redeems the join token of its seed
// and reports to the orchestrator over the mesh, and does nothing else.
package main

import (
	"fmt"
	"os"
)

func main() {
	if err := measure(); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}
