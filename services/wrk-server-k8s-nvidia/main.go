// Command cosmicac-wrk-server-k8s-nvidia is one rack's worker: it grants the
// rack's GPUs and keeps the cluster objects of attempts. With `check` as its first
// argument it only looks whether a cluster is ready for a rack, and exits.
package main

import (
	"os"

	"github.com/cosmicac/cosmicac/pkg/daemon"

	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/app"
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == "check" {
		os.Exit(app.Check(os.Args[2:], os.Stdout, os.Stderr))
	}
	daemon.Main("wrk-server-k8s-nvidia", app.Defaults, func(c *app.Config) *daemon.Base { return &c.Base }, app.Run)
}
