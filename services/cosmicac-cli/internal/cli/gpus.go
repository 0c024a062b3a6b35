package cli

import (
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/cosmicac/cosmicac/services/cosmicac-cli/internal/client"
)

func (e *environment) gpusCommand() *cobra.Command {
	c := &cobra.Command{Use: "gpus", Short: "What GPUs one could get now, and a project's quota", Args: cobra.NoArgs, RunE: helpOnly}
	var location, model string
	available := &cobra.Command{
		Use: "available", Short: "What one could get now, where, and how long others wait", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			api, err := e.client()
			if err != nil {
				return err
			}
			q := url.Values{}
			for k, v := range map[string]string{"location": strings.ToLower(location), "model": model} {
				if v != "" {
					q.Set(k, v)
				}
			}
			var list struct {
				GPUs []client.AvailableGPU `json:"gpus"`
			}
			if err := api.Call(cmd.Context(), "GET", "/api/v1/gpus", q, nil, nil, &list); err != nil {
				return err
			}
			return e.print(list, func(t *tableWriter) {
				t.row("GPU", "LOCATION", "RACK", "TOTAL", "HELD", "AVAILABLE", "LARGEST VM", "WAITING", "LONGEST WAIT", "WHY NOT")
				for _, g := range list.GPUs {
					waiting, longest := "-", "-"
					if g.Waiting > 0 {
						waiting = fmt.Sprintf("%d for %d GPUs", g.Waiting, g.WaitingGPUs)
						longest = (time.Duration(g.LongestWaitSeconds) * time.Second).String()
					}
					t.row(g.Model, g.Location, "all", g.Total, g.Held, g.Offerable, g.LargestNodeOfferable, waiting, longest, "-")
					for _, r := range g.Racks {
						why := orDash(r.Message)
						if r.Reason != "" {
							why = r.Reason + ": " + r.Message
						}
						t.row("", "", r.ID, "", "", r.Offerable, r.LargestNodeOfferable, "", "", why)
					}
				}
			})
		},
	}
	available.Flags().StringVar(&location, "location", "", "only this location's code, as us")
	available.Flags().StringVar(&model, "model", "", "only this GPU model, as GH100_H100_SXM5_80GB")
	c.AddCommand(available, e.quotaCommand())
	return c
}

// quota is a project's quota as the API shows it.
type quota struct {
	ProjectID        string  `json:"project_id"`
	MaximumGPUs      *uint32 `json:"maximum_gpus"`
	HeldGPUs         *uint32 `json:"held_gpus"`
	MaximumVolumeGiB *uint64 `json:"maximum_volume_gib"`
	HeldVolumeGiB    *uint64 `json:"held_volume_gib"`
	Admitted         bool    `json:"admitted"`
}

func (e *environment) quotaCommand() *cobra.Command {
	var set, volumes string
	c := &cobra.Command{
		Use: "quota [PROJECT]", Short: "How many GPUs a project may hold at once, and how much of volumes; administrators set it", Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := e.client()
			if err != nil {
				return err
			}
			projects := args
			if len(args) == 0 {
				var me struct {
					Projects []struct {
						ID string `json:"id"`
					} `json:"projects"`
				}
				if err := api.Call(cmd.Context(), "GET", "/api/v1/me", nil, nil, nil, &me); err != nil {
					return err
				}
				for _, p := range me.Projects {
					projects = append(projects, p.ID)
				}
			}
			change := map[string]any{}
			for field, flag := range map[string]struct{ name, value, unit string }{
				"maximum_gpus": {"--set", set, "a number of GPUs"}, "maximum_volume_gib": {"--volume-gib", volumes, "a number of GiB"},
			} {
				if flag.value == "" {
					continue
				}
				if len(args) == 0 {
					return usageError{fmt.Errorf("%s needs the project that it is for", flag.name)}
				}
				change[field] = nil
				if flag.value != "none" {
					n, err := strconv.ParseUint(flag.value, 10, 32)
					if err != nil {
						return usageError{fmt.Errorf("%s %q: must be %s, or none for no bound", flag.name, flag.value, flag.unit)}
					}
					change[field] = n
				}
			}
			method, body := "GET", any(nil)
			if len(change) > 0 {
				if set == "" {
					var is quota
					if err := api.Call(cmd.Context(), "GET", "/api/v1/projects/"+url.PathEscape(args[0])+"/quota", nil, nil, nil, &is); err != nil {
						return err
					}
					change["maximum_gpus"] = is.MaximumGPUs
				}
				method, body = "PUT", change
			}
			list := []quota{}
			for _, id := range projects {
				var q quota
				if err := api.Call(cmd.Context(), method, "/api/v1/projects/"+url.PathEscape(id)+"/quota", nil, nil, body, &q); err != nil {
					return err
				}
				list = append(list, q)
			}
			return e.print(map[string]any{"quotas": list}, func(t *tableWriter) {
				t.row("PROJECT", "GPUS", "HELD", "VOLUME GIB", "HELD", "NOTE")
				for _, q := range list {
					note := "-"
					if !q.Admitted {
						note = "the orchestrator has not been told yet"
					}
					t.row(q.ProjectID, orWord(q.MaximumGPUs, "none"), orWord(q.HeldGPUs, "-"), orWord(q.MaximumVolumeGiB, "none"), orWord(q.HeldVolumeGiB, "-"), note)
				}
			})
		},
	}
	c.Flags().StringVar(&set, "set", "", "a number of GPUs, or none for no bound")
	c.Flags().StringVar(&volumes, "volume-gib", "", "how much its volumes may hold together, GiB, or none for no bound")
	return c
}

// orWord is a number as text, or a word where there is none.
func orWord[N uint32 | uint64](n *N, word string) string {
	if n == nil {
		return word
	}
	return strconv.FormatUint(uint64(*n), 10)
}

// printPlan prints where a job would run, or every reason why it would not.
func (e *environment) printPlan(p *client.Plan) error {
	return e.print(p, func(t *tableWriter) {
		t.row("REPLICA", "RACK", "NODE", "GPUS", "WHY NOT")
		for _, r := range p.Replicas {
			for _, n := range r.Nodes {
				t.row(r.Index, r.RackID, n.Name, fmt.Sprintf("%d x %s", n.GPUCount, orDash(r.GPUModel)), "-")
			}
			for _, why := range r.Refusals {
				t.row(r.Index, orDash(why.RackID), "-", "-", why.Reason+": "+why.Message)
			}
		}
	})
}
