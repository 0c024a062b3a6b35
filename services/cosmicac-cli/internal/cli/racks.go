package cli

import (
	"fmt"
	"net/url"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/cosmicac/cosmicac/services/cosmicac-cli/internal/client"
)

func (e *environment) racksCommand() *cobra.Command {
	c := &cobra.Command{Use: "racks", Aliases: []string{"rack"}, Short: "The GPU capacity behind each worker", Args: cobra.NoArgs, RunE: helpOnly}
	filter := url.Values{}
	var listLocation, listType string
	var keys bool
	list := &cobra.Command{
		Use: "list", Short: "List racks", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			for k, v := range map[string]string{"location": listLocation, "type": listType} {
				if v != "" {
					filter.Set(k, v)
				}
			}
			if keys {
				filter.Set("keys", "true")
			}
			racks, err := e.racksOf(cmd, filter)
			if err != nil {
				return err
			}
			return e.print(map[string]any{"racks": racks}, func(t *tableWriter) {
				if keys {
					t.row("ID", "TYPE", "LOCATION", "KEY")
					for _, r := range racks {
						t.row(r.ID, r.Type, r.Location, r.Key)
					}
					return
				}
				t.row("ID", "LOCATION", "CONNECTED", "CORDONED", "NODES", "GPUS", "HELD", "OFFERABLE", "SEEN", "MESSAGE")
				for _, r := range racks {
					var total, held, offerable uint32
					for _, n := range r.Nodes {
						for _, g := range n.GPUs {
							total, held = total+g.Total, held+g.Held
							if r.Connected {
								offerable += g.Offerable
							}
						}
					}
					message := r.Message
					if r.Simulated {
						message = strings.TrimPrefix(message+"; simulated", "; ")
					}
					t.row(r.ID, r.Location, r.Connected, r.Cordoned, len(r.Nodes), total, held, offerable, age(r.LastSeenAt, time.Now()), orDash(message))
				}
			})
		},
	}
	list.Flags().StringVar(&listLocation, "location", "", "only this location")
	list.Flags().StringVar(&listType, "type", "", "only racks whose type begins so")
	list.Flags().BoolVar(&keys, "keys", false, "show the workers' keys (administrators)")
	var location, key, kind string
	var models []string
	var maximum uint32
	boards := []uint{}
	put := &cobra.Command{
		Use: "register ID", Short: "Make or change a rack's entry", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := e.client()
			if err != nil {
				return err
			}
			body := map[string]any{"location": location, "key": key, "allowed_models": models, "maximum_gpus": maximum, "board_gpu_counts": boards}
			if kind != "" {
				body["type"] = kind
			}
			if models == nil {
				body["allowed_models"] = []string{}
			}
			if err := api.Call(cmd.Context(), "PUT", "/api/v1/racks/"+url.PathEscape(args[0]), nil, nil, body, nil); err != nil {
				return err
			}
			fmt.Fprintf(e.out, "registered rack %s in %s\n", args[0], location)
			return nil
		},
	}
	put.Flags().StringVar(&location, "location", "", "location code, as us")
	put.Flags().StringVar(&key, "key", "", "the worker's key, as its log and status file show it")
	put.Flags().StringVar(&kind, "type", "", "what kind of worker it has (default server-k8s-nvidia)")
	put.Flags().StringSliceVar(&models, "allowed-models", nil, "only these GPU models (default: all)")
	put.Flags().UintSliceVar(&boards, "board-gpus", nil, "GPUs that a VM may take of an NVSwitch board, as its partitions are known, like 1,2,4,8 (default: 1 or all)")
	put.Flags().Uint32Var(&maximum, "maximum-gpus", 0, "never hold more than this (0: no bound)")
	act := func(use, short, method, suffix string, body any, done string) *cobra.Command {
		return &cobra.Command{Use: use + " ID", Short: short, Args: cobra.ExactArgs(1), RunE: func(cmd *cobra.Command, args []string) error {
			api, err := e.client()
			if err != nil {
				return err
			}
			if err := api.Call(cmd.Context(), method, "/api/v1/racks/"+url.PathEscape(args[0])+suffix, nil, nil, body, nil); err != nil {
				return err
			}
			fmt.Fprintf(e.out, "%s rack %s\n", done, args[0])
			return nil
		}}
	}
	c.AddCommand(list, put, e.rackCheckCommand(),
		act("cordon", "Give no new GPUs of a rack", "POST", "/cordon", map[string]bool{"cordoned": true}, "cordoned"),
		act("uncordon", "Give its GPUs again; ends a drain", "POST", "/cordon", map[string]bool{"cordoned": false}, "uncordoned"),
		e.racksDrainCommand(), e.racksForgetCommand(), e.racksForgottenCommand(),
		e.racksResolveCommand("adopt", "adopt", "Take back what was abandoned on a rack that is back; it goes on as it was", "adopted"),
		e.racksResolveCommand("clear", "delete", "Stop and take down what was abandoned on a rack that is back", "takes down"),
		e.racksQuarantineCommand())
	return c
}

func (e *environment) racks(cmd *cobra.Command) ([]client.Rack, error) {
	return e.racksOf(cmd, nil)
}

func (e *environment) racksOf(cmd *cobra.Command, filter url.Values) ([]client.Rack, error) {
	api, err := e.client()
	if err != nil {
		return nil, err
	}
	var list struct {
		Racks []client.Rack `json:"racks"`
	}
	err = api.Call(cmd.Context(), "GET", "/api/v1/racks", filter, nil, nil, &list)
	return list.Racks, err
}

func quarantineWords(g client.NodeGPU) string {
	if g.Quarantine == "" {
		return ""
	}
	return "quarantined: " + g.Quarantine
}

func (e *environment) nodesCommand() *cobra.Command {
	c := &cobra.Command{Use: "nodes", Short: "The machines of the racks and their GPUs", Args: cobra.NoArgs, RunE: helpOnly}
	c.AddCommand(&cobra.Command{
		Use: "list", Short: "List nodes", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			racks, err := e.racks(cmd)
			if err != nil {
				return err
			}
			var nodes []client.Node
			for _, r := range racks {
				for _, n := range r.Nodes {
					n.RackID, n.Location = r.ID, r.Location
					if !r.Connected {
						// What was last heard is no fact any more.
						n.Message = strings.TrimPrefix(n.Message+"; as seen "+age(r.LastSeenAt, time.Now())+" ago, its worker is not connected", "; ")
						for i := range n.GPUs {
							n.GPUs[i].Offerable = 0
						}
					}
					nodes = append(nodes, n)
				}
			}
			return e.print(map[string]any{"nodes": nodes}, func(t *tableWriter) {
				t.row("NODE", "RACK", "LOCATION", "SCHEDULABLE", "GPU", "TOTAL", "HEALTHY", "HELD", "OFFERABLE", "MESSAGE")
				for _, n := range nodes {
					for _, g := range n.GPUs {
						message := n.Message
						for _, more := range []string{g.Message, quarantineWords(g)} {
							if more != "" {
								message = strings.TrimPrefix(message+"; "+more, "; ")
							}
						}
						t.row(n.Name, n.RackID, n.Location, n.Schedulable, g.Model, g.Total, g.Healthy, g.Held, g.Offerable, orDash(message))
					}
				}
			})
		},
	})
	return c
}

// catalogueCommand lists one of the catalogues.
func (e *environment) catalogueCommand(what string) *cobra.Command {
	c := &cobra.Command{Use: what, Short: "The catalogue of " + what, Args: cobra.NoArgs, RunE: helpOnly}
	c.AddCommand(&cobra.Command{
		Use: "list", Short: "List " + what, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			api, err := e.client()
			if err != nil {
				return err
			}
			var list map[string][]map[string]any
			if err := api.Call(cmd.Context(), "GET", "/api/v1/"+what, nil, nil, nil, &list); err != nil {
				return err
			}
			columns := map[string][]string{"models": {"id", "runtime", "description"}, "images": {"name", "default_user", "description"}, "locations": {"code", "name"}}[what]
			return e.print(list, func(t *tableWriter) {
				var head []any
				for _, k := range columns {
					head = append(head, strings.ToUpper(strings.ReplaceAll(k, "_", " ")))
				}
				t.row(head...)
				for _, item := range list[what] {
					var cells []any
					for _, k := range columns {
						cells = append(cells, orDash(fmt.Sprint(item[k])))
					}
					t.row(cells...)
				}
			})
		},
	})
	return c
}
