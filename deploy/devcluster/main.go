// Command cosmicac-devcluster runs a small Kubernetes cluster with simulated GPU nodes on one host: the control plane is
// the real one, nodes, KubeVirt, CDI and virtual machines are simulated. See README.md.
package main

import (
	"os"

	"github.com/cosmicac/cosmicac/deploy/devcluster/internal/app"
)

func main() {
	os.Exit(app.Main(os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}
