// Command cosmicac is the command line of a CosmicAC network: jobs and shells
// for users, racks and the network itself for operators.
package main

import (
	"os"

	"github.com/cosmicac/cosmicac/services/cosmicac-cli/internal/cli"
)

func main() { os.Exit(cli.Main(os.Args[1:], os.Stdin, os.Stdout, os.Stderr)) }
