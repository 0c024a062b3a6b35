// Command cosmicac-wrk-server-k8s-nvidia is one rack's worker: it grants the
// rack's GPUs and keeps the cluster objects of attempts.
package main

import (
	"github.com/cosmicac/cosmicac/pkg/daemon"

	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/app"
)

func main() {
	daemon.Main("wrk-server-k8s-nvidia", app.Defaults, func(c *app.Config) *daemon.Base { return &c.Base }, app.Run)
}
