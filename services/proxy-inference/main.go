// Command cosmicac-proxy-inference is the way in to models: it checks API keys,
// picks a replica, streams its answer and counts what was used.
package main

import (
	"github.com/cosmicac/cosmicac/pkg/daemon"

	"github.com/cosmicac/cosmicac/services/proxy-inference/internal/app"
)

func main() { daemon.Main("proxy-inference", app.Defaults, app.Base, app.Run) }
