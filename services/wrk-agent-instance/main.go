// Command cosmicac-wrk-agent-instance is the agent in the VM of a GPU Container
// Job: it opens shells for holders of a grant and runs the job's start script.
package main

import (
	"os"

	"github.com/cosmicac/cosmicac/pkg/agent"
	"github.com/cosmicac/cosmicac/pkg/daemon"
	"github.com/cosmicac/cosmicac/pkg/ssh"
	"github.com/cosmicac/cosmicac/services/wrk-agent-instance/internal/app"
)

func main() {
	if len(os.Args) == 2 && os.Args[1] == ssh.FilesCommand {
		os.Exit(ssh.ServeFiles()) // this binary again, as the login
	}
	os.Exit(agent.Command("wrk-agent-instance", daemon.Version, os.Args[1:], os.Stderr, app.New))
}
