// Command cosmicac-wrk-agent-inference is the agent in the VM of a Managed
// Inference Job: it keeps the engine running and passes proxies' requests to it.
package main

import (
	"os"

	"github.com/cosmicac/cosmicac/pkg/agent"
	"github.com/cosmicac/cosmicac/pkg/daemon"
	"github.com/cosmicac/cosmicac/services/wrk-agent-inference/internal/app"
	"github.com/cosmicac/cosmicac/services/wrk-agent-inference/internal/engine"
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == engine.Command {
		os.Exit(engine.Main(os.Args[2:], daemon.Version, os.Stderr)) // this binary again, as the embedded engine
	}
	os.Exit(agent.Command("wrk-agent-inference", daemon.Version, os.Args[1:], os.Stderr, app.New))
}
