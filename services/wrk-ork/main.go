// Command cosmicac-wrk-ork is the orchestrator: it keeps jobs and racks, places
// replicas, and sees every attempt through to its end.
package main

import (
	"github.com/cosmicac/cosmicac/pkg/daemon"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/app"
)

func main() {
	daemon.Main("wrk-ork", app.Defaults, func(c *app.Config) *daemon.Base { return &c.Base }, app.Run)
}
