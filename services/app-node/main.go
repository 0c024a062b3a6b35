// Command cosmicac-app-node serves the HTTP API, signs people in and keeps what
// they own. `cosmicac-app-node create-administrator` makes the first of them.
package main

import (
	"os"

	"github.com/cosmicac/cosmicac/pkg/daemon"
	"github.com/cosmicac/cosmicac/services/app-node/internal/app"
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == app.CreateAdministratorCommand {
		os.Exit(app.CreateAdministrator(os.Args[2:], os.Environ(), os.Stdin, os.Stdout, os.Stderr))
	}
	daemon.Main("app-node", app.Defaults, app.Base, app.Run)
}
