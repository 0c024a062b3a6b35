// Command cosmicac-images builds the agent disk as a container image, pushes it to a registry and checks one that is
// there, without a container engine. See README.md.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/cosmicac/cosmicac/deploy/images/internal/agentdisk"
)

const usage = `usage:
  cosmicac-images build --agents DIR --out DIR            writes the image as the OCI layout DIR/agents
  cosmicac-images push  --out DIR --registry R [--replace] pushes it to R/agents:VERSION
  cosmicac-images check REFERENCE                         checks an image in a registry
  cosmicac-images disk  --out DIR                         takes the disk out of the layout, to DIR/agents.img
Credentials are those of the docker configuration ($DOCKER_CONFIG/config.json, credential helpers included).
`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	err := run(ctx, os.Args[1:], os.Stdout)
	switch {
	case err == nil:
	case errors.Is(err, errUsage):
		fmt.Fprint(os.Stderr, usage)
		os.Exit(2)
	default:
		fmt.Fprintf(os.Stderr, "cosmicac-images: %v\n", err)
		os.Exit(1)
	}
}

var errUsage = errors.New("wrong usage")

func run(ctx context.Context, args []string, stdout io.Writer) error {
	if len(args) == 0 {
		return errUsage
	}
	flags := flag.NewFlagSet(args[0], flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	agents := flags.String("agents", "", "")
	out := flags.String("out", "", "")
	registry := flags.String("registry", "", "")
	replace := flags.Bool("replace", false, "")
	if err := flags.Parse(args[1:]); err != nil {
		return errUsage
	}
	layout := filepath.Join(*out, agentdisk.Name)
	switch {
	case args[0] == "build" && *agents != "" && *out != "" && flags.NArg() == 0:
		built, err := agentdisk.Build(ctx, *agents, layout)
		if err != nil {
			return err
		}
		return say(stdout, "built %s: version %s, %s, disk of %d bytes\n", layout, built.Version, built.Digest, built.DiskBytes)
	case args[0] == "push" && *out != "" && *registry != "" && flags.NArg() == 0:
		where, built, err := agentdisk.Push(ctx, layout, *registry, *replace)
		if err != nil {
			return err
		}
		return say(stdout, "pushed %s@%s\nin the workers' configuration:\n  agent_image: %s/%s:{version}\n", where, built.Digest, *registry, agentdisk.Name)
	case args[0] == "check" && flags.NArg() == 1:
		found, err := agentdisk.CheckRemote(ctx, flags.Arg(0))
		if err != nil {
			return err
		}
		return say(stdout, "good: version %s, %s, disk of %d bytes\n", found.Version, found.Digest, found.DiskBytes)
	case args[0] == "disk" && *out != "" && flags.NArg() == 0:
		return agentdisk.Unpack(layout, layout+".img")
	}
	return errUsage
}

func say(w io.Writer, format string, a ...any) error {
	_, err := fmt.Fprintf(w, format, a...)
	return err
}
