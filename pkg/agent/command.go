package agent

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/hashicorp/go-hclog"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/log"
)

// Command is the program of an agent: it reads the flags and the seed, makes the
// work and runs it until SIGTERM or SIGINT. It returns the exit code: 0 after an
// orderly stop, 1 when the agent failed, 2 for flags or a seed that cannot be used.
func Command(name, version string, arguments []string, stderr io.Writer, work func(*Agent) (Work, error)) int {
	flags := flag.NewFlagSet("cosmicac-"+name, flag.ContinueOnError)
	flags.SetOutput(stderr)
	seedPath := flags.String("seed", "/etc/cosmicac/seed.json", "the seed `file`")
	stateDirectory := flags.String("state", "", "the state `directory`; "+DefaultStateDirectory+", or a folder beside the seed")
	level := flags.String("log-level", "info", "trace, debug, info, warn or error")
	showVersion := flags.Bool("version", false, "print the version and exit")
	if err := flags.Parse(arguments); err != nil {
		return 2
	}
	if *showVersion {
		fmt.Println("cosmicac-"+name, version)
		return 0
	}
	fail := func(code int, err error) int {
		fmt.Fprintf(stderr, "cosmicac-%s: %v\n", name, err)
		return code
	}
	if flags.NArg() > 0 {
		return fail(2, fault.New(fault.Invalid, "no argument %q is known", flags.Arg(0)))
	}
	seed, err := LoadSeed(*seedPath)
	if err != nil {
		return fail(2, err)
	}
	directory, err := StateDirectory(*stateDirectory, *seedPath)
	if err != nil {
		return fail(1, err)
	}
	a, err := New(Options{
		Name: name, Version: version, Seed: seed, StateDirectory: directory, Output: stderr, Level: hclog.LevelFromString(*level),
	})
	if err != nil {
		return fail(1, err)
	}
	log.TakeGlobals(a.Log())
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	// A console that went away must not end the agent. Ignoring the signal would be handed down to every child.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	w, err := work(a)
	if err == nil {
		err = a.Run(ctx, w)
	}
	if err != nil {
		a.Log().Error("the agent ends", "error", err)
		return 1
	}
	a.Log().Info("the agent stopped")
	return 0
}

// SelfPath is this process's binary, also when its path is closed to the user
// that starts it.
func SelfPath() string {
	if _, err := os.Stat("/proc/self/exe"); err == nil {
		return "/proc/self/exe"
	}
	path, _ := os.Executable()
	return path
}
