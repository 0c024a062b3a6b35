// Package cli is the command tree of cosmicac: it parses, calls and prints.
// It decides nothing that a daemon decides.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/cosmicac/cosmicac/pkg/daemon"
	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/services/cosmicac-cli/internal/client"
	"github.com/cosmicac/cosmicac/services/cosmicac-cli/internal/settings"
)

// exitStatus ends the process with a code and prints nothing: the exit status
// of a remote command.
type exitStatus int

func (e exitStatus) Error() string { return fmt.Sprintf("exit status %d", int(e)) }

// environment is what every command gets: streams and flags of the root.
type environment struct {
	in       io.Reader
	out, err io.Writer
	output   string
	url      string
}

// Main runs one command line and returns the process's exit status: 0, 2 for
// wrong usage, the code of the fault's kind, or a remote command's own.
func Main(args []string, in io.Reader, out, errOut io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	for i, a := range args {
		if !utf8.ValidString(a) {
			fmt.Fprintf(errOut, "cosmicac: argument %d is not UTF-8 text\n", i+1)
			return 2
		}
	}
	e := &environment{in: in, out: out, err: errOut}
	root := e.root()
	root.SetArgs(args)
	root.SetIn(in)
	root.SetOut(out)
	root.SetErr(errOut)
	err := root.ExecuteContext(ctx)
	var remote exitStatus
	var usage usageError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &remote):
		return int(remote)
	case errors.As(err, &usage):
		fmt.Fprintf(errOut, "cosmicac: %v\n", err)
		return 2
	}
	printFault(errOut, err)
	return fault.KindOf(err).Exit()
}

// usageError is a command line that cannot be understood.
type usageError struct{ error }

func printFault(w io.Writer, err error) {
	fmt.Fprintf(w, "cosmicac: %v\n", err)
	for _, d := range fault.DetailsOf(err) {
		fmt.Fprintf(w, "  %s: %s\n", d.Field, d.Rule)
	}
}

func (e *environment) root() *cobra.Command {
	root := &cobra.Command{
		Use:           "cosmicac",
		Short:         "GPU workloads on your own Kubernetes cluster",
		SilenceUsage:  true,
		SilenceErrors: true,
		Version:       daemon.Version,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usageError{fmt.Errorf("unknown command %q; see cosmicac --help", args[0])}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetVersionTemplate("cosmicac {{.Version}}\n")
	root.PersistentFlags().StringVarP(&e.output, "output", "o", "table", "output form: table, json or yaml")
	root.PersistentFlags().StringVar(&e.url, "url", "", "control plane URL (default: the one of the last login, or COSMICAC_URL)")
	root.PersistentPreRunE = func(*cobra.Command, []string) error {
		switch e.output {
		case "table", "json", "yaml":
			return nil
		}
		return usageError{fmt.Errorf("--output %q: must be table, json or yaml", e.output)}
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	root.AddGroup(&cobra.Group{ID: "user", Title: "For users:"}, &cobra.Group{ID: "operator", Title: "For operators:"})
	for _, c := range []*cobra.Command{e.loginCommand(), e.logoutCommand(), e.whoamiCommand(), e.jobsCommand(), e.volumesCommand(), e.gatewaysCommand(), e.gpusCommand(), e.keysCommand(),
		e.inferenceCommand(), e.catalogueCommand("models"), e.catalogueCommand("images"), e.catalogueCommand("locations")} {
		c.GroupID = "user"
		root.AddCommand(c)
	}
	for _, c := range []*cobra.Command{e.racksCommand(), e.nodesCommand(), e.networkCommand(), e.joinCommand(), e.meshCommand(), e.rpcCommand(),
		e.doctorCommand(), e.bootstrapCommand(), e.demoCommand()} {
		c.GroupID = "operator"
		root.AddCommand(c)
	}
	wrapArgs(root)
	return root
}

// wrapArgs makes wrong argument counts usage errors, in every command.
func wrapArgs(c *cobra.Command) {
	if check := c.Args; check != nil {
		c.Args = func(cmd *cobra.Command, args []string) error {
			err := check(cmd, args)
			var usage usageError
			if err != nil && !errors.As(err, &usage) {
				return usageError{fmt.Errorf("%s: %w", cmd.CommandPath(), err)}
			}
			return err
		}
	}
	for _, sub := range c.Commands() {
		wrapArgs(sub)
	}
}

func (e *environment) settings() (*settings.Settings, error) {
	d, err := settings.Directory()
	if err != nil {
		return nil, err
	}
	s, err := settings.Load(d)
	if err != nil {
		return nil, err
	}
	if e.url != "" {
		s.URL = e.url
	}
	return s, nil
}

// client is the HTTP client under the last login.
func (e *environment) client() (*client.Client, error) {
	s, err := e.settings()
	if err != nil {
		return nil, err
	}
	return client.New(s.URL, s.Token)
}
