// Command cosmicac-wrk-monitor collects metrics and logs over the mesh and
// answers Prometheus queries.
package main

import (
	"github.com/cosmicac/cosmicac/pkg/daemon"
	"github.com/cosmicac/cosmicac/services/wrk-monitor/internal/app"
)

func main() { daemon.Main("wrk-monitor", app.Defaults, app.Base, app.Run) }
