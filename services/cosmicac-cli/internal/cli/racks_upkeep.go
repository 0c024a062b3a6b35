package cli

import (
	"fmt"
	"net/url"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/cosmicac/cosmicac/services/cosmicac-cli/internal/client"
)

func (e *environment) racksDrainCommand() *cobra.Command {
	var within time.Duration
	c := &cobra.Command{
		Use: "drain ID", Short: "Close a rack, tell its jobs' owners, and stop what runs at a deadline", Args: cobra.ExactArgs(1),
		Long: `Close a rack, tell its jobs' owners, and stop what runs at a deadline.

Their jobs show the condition "draining" with the time. At the deadline containers are
stopped, which keeps their disks, and inference replicas move to other racks.
"cosmicac racks uncordon" takes it back.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if within < 0 || within%time.Second != 0 {
				return usageError{fmt.Errorf("--deadline %s: must be whole seconds, 0 for at once", within)}
			}
			api, err := e.client()
			if err != nil {
				return err
			}
			var out struct {
				DrainDeadline time.Time `json:"drain_deadline"`
				Jobs          uint32    `json:"jobs"`
			}
			if err := api.Call(cmd.Context(), "POST", "/api/v1/racks/"+url.PathEscape(args[0])+"/drain", nil, nil,
				map[string]int64{"deadline_seconds": int64(within.Seconds())}, &out); err != nil {
				return err
			}
			fmt.Fprintf(e.out, "draining rack %s: %d jobs are told; what runs there is stopped at %s\n", args[0], out.Jobs, out.DrainDeadline.Local().Format(time.DateTime))
			return nil
		},
	}
	c.Flags().DurationVar(&within, "deadline", time.Hour, "from now, at most 720h")
	return c
}

func (e *environment) racksForgetCommand() *cobra.Command {
	var force bool
	var confirm string
	c := &cobra.Command{
		Use: "forget ID", Short: "Remove a rack's entry; refused while it has live jobs or kept disks", Args: cobra.ExactArgs(1),
		Long: `Remove a rack's entry; refused while it has live jobs or kept disks.

With --force and --confirm ID it goes all the same. Nothing is stopped by that: what runs
there is abandoned, and listed by "cosmicac racks forgotten" until the rack is registered
again and somebody decides with "cosmicac racks adopt" or "cosmicac racks clear".
What a rack holds and no record knows is cleared with it.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if force && confirm != args[0] {
				return usageError{fmt.Errorf("forget %s by force: it is not confirmed; what runs there is abandoned, not stopped: add --confirm %s", args[0], args[0])}
			}
			api, err := e.client()
			if err != nil {
				return err
			}
			q := url.Values{}
			if force {
				q.Set("force", "true")
				q.Set("confirm", confirm)
			}
			var out struct {
				Abandoned *client.ForgottenRack `json:"abandoned"`
			}
			if err := api.Call(cmd.Context(), "DELETE", "/api/v1/racks/"+url.PathEscape(args[0]), q, nil, nil, &out); err != nil {
				return err
			}
			fmt.Fprintf(e.out, "forgot rack %s\n", args[0])
			if out.Abandoned == nil {
				return nil
			}
			fmt.Fprintf(e.out, "abandoned there, and not stopped:\n")
			return e.printForgotten([]client.ForgottenRack{*out.Abandoned})
		},
	}
	c.Flags().BoolVar(&force, "force", false, "also with live jobs and kept disks: they are abandoned")
	c.Flags().StringVar(&confirm, "confirm", "", "the rack's id again, with --force")
	return c
}

func (e *environment) printForgotten(racks []client.ForgottenRack) error {
	return e.print(map[string]any{"racks": racks}, func(t *tableWriter) {
		t.row("RACK", "FORGOTTEN", "BY", "BACK", "ATTEMPT", "JOB", "NODES", "GPUS", "THERE")
		for _, r := range racks {
			for _, a := range r.Attempts {
				there := "unknown"
				if r.Returned {
					there = map[bool]string{true: "yes", false: "no"}[a.Present]
				}
				t.row(r.ID, r.ForgottenAt.Local().Format(time.DateTime), orDash(r.Actor), r.Returned, a.AttemptID, a.JobID+" "+a.JobName, strings.Join(a.NodeNames, ","), a.GPUCount, there)
			}
			if len(r.Attempts) == 0 {
				t.row(r.ID, r.ForgottenAt.Local().Format(time.DateTime), orDash(r.Actor), r.Returned, "-", fmt.Sprintf("%d jobs may have root disks there", len(r.DiskJobIDs)), "-", 0, "-")
			}
		}
	})
}

func (e *environment) racksForgottenCommand() *cobra.Command {
	return &cobra.Command{
		Use: "forgotten", Short: "Racks that were removed by force, with what was abandoned there", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			api, err := e.client()
			if err != nil {
				return err
			}
			var list struct {
				Racks []client.ForgottenRack `json:"racks"`
			}
			if err := api.Call(cmd.Context(), "GET", "/api/v1/forgotten-racks", nil, nil, nil, &list); err != nil {
				return err
			}
			return e.printForgotten(list.Racks)
		},
	}
}

// racksResolveCommand decides about what was abandoned on a rack that is back.
func (e *environment) racksResolveCommand(use, action, short, done string) *cobra.Command {
	var confirm string
	c := &cobra.Command{
		Use: use + " ID", Short: short, Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if action == "delete" && confirm != args[0] {
				return usageError{fmt.Errorf("%s %s: it is not confirmed; its jobs are stopped: add --confirm %s", use, args[0], args[0])}
			}
			api, err := e.client()
			if err != nil {
				return err
			}
			var out struct {
				Attempts uint32 `json:"attempts"`
			}
			if err := api.Call(cmd.Context(), "POST", "/api/v1/forgotten-racks/"+url.PathEscape(args[0]), nil, nil,
				map[string]string{"action": action, "confirm": confirm}, &out); err != nil {
				return err
			}
			fmt.Fprintf(e.out, "%s %d attempts on rack %s\n", done, out.Attempts, args[0])
			return nil
		},
	}
	if action == "delete" {
		c.Flags().StringVar(&confirm, "confirm", "", "the rack's id again")
	}
	return c
}

func (e *environment) racksQuarantineCommand() *cobra.Command {
	c := &cobra.Command{Use: "quarantine", Short: "Nodes that are left out of placement, and why", Args: cobra.NoArgs, RunE: helpOnly}
	var rack string
	list := &cobra.Command{
		Use: "list", Short: "What is quarantined or suspect, with the evidence", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			api, err := e.client()
			if err != nil {
				return err
			}
			q := url.Values{}
			if rack != "" {
				q.Set("rack_id", rack)
			}
			var out struct {
				Quarantines []client.Quarantine `json:"quarantines"`
			}
			if err := api.Call(cmd.Context(), "GET", "/api/v1/quarantines", q, nil, nil, &out); err != nil {
				return err
			}
			return e.print(out, func(t *tableWriter) {
				t.row("RACK", "NODE", "GPU", "STATE", "SINCE", "BY", "WHY")
				for _, x := range out.Quarantines {
					t.row(x.RackID, x.NodeName, orDash(x.GPUModel), map[bool]string{true: "quarantined", false: "suspect"}[x.Active],
						x.Since.Local().Format(time.DateTime), x.Actor, x.Message)
					for _, f := range x.Evidence {
						words := f.Message
						if len(f.GPUUUIDs) > 0 {
							words += " [" + strings.Join(f.GPUUUIDs, ", ") + "]"
						}
						t.row("", "", "", "evidence", f.Time.Local().Format(time.DateTime), f.AttemptID, f.Reason+": "+words)
					}
				}
			})
		},
	}
	list.Flags().StringVar(&rack, "rack", "", "only this rack")
	change := func(use, short, path, done string) *cobra.Command {
		var model, message string
		c := &cobra.Command{
			Use: use + " RACK NODE", Short: short, Args: cobra.ExactArgs(2),
			RunE: func(cmd *cobra.Command, args []string) error {
				api, err := e.client()
				if err != nil {
					return err
				}
				body := map[string]string{"rack_id": args[0], "node_name": args[1], "gpu_model": model}
				if use == "set" {
					if message == "" {
						return usageError{fmt.Errorf("--message is needed: users who wait for the node read it")}
					}
					body["message"] = message
				}
				if err := api.Call(cmd.Context(), "POST", path, nil, nil, body, nil); err != nil {
					return err
				}
				fmt.Fprintf(e.out, "%s %s on rack %s\n", done, strings.TrimSpace(args[1]+" "+model), args[0])
				return nil
			},
		}
		c.Flags().StringVar(&model, "gpu", "", "only this GPU model of the node")
		if use == "set" {
			c.Flags().StringVar(&message, "message", "", "why, in a line")
		}
		return c
	}
	c.AddCommand(list, change("set", "Leave a node, or one GPU model of it, out of placement", "/api/v1/quarantines", "quarantined"),
		change("lift", "Open it again and forget the failures that led to it", "/api/v1/quarantines/lift", "lifted the quarantine of"))
	return c
}
