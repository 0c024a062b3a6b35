// Command cosmicac-mesh-bootstrap is where a network is found: DHT server, relay,
// card registry and the desk for join requests.
package main

import (
	"github.com/cosmicac/cosmicac/pkg/daemon"
	"github.com/cosmicac/cosmicac/services/mesh-bootstrap/internal/app"
)

func main() { daemon.Main("mesh-bootstrap", app.Defaults, app.Base, app.Run) }
