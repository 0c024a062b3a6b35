package cli

import (
	"context"
	"fmt"
	"net/url"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/services/cosmicac-cli/internal/client"
)

func (e *environment) volumesCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "volumes", Short: "Disks that outlive jobs", Args: cobra.NoArgs, RunE: helpOnly,
		Long: `Disks that outlive jobs.

A volume belongs to a project and is in one rack; jobs that have it run there. A VM
finds it mounted at /volumes/NAME. It serves one job at a time; a shared one, of a
storage class that offers ReadWriteMany, may be read by several jobs at once (:ro).
Only cosmicac volumes delete removes one.`,
	}
	c.AddCommand(e.volumesCreateCommand(), e.volumesListCommand(), e.volumesShowCommand(), e.volumesAttachCommand(), e.volumesDetachCommand(), e.volumesDeleteCommand())
	return c
}

// readMounts reads --volume values: NAME or NAME:ro.
func readMounts(values []string) ([]map[string]any, error) {
	var out []map[string]any
	for _, v := range values {
		name, mode, given := strings.Cut(v, ":")
		if name == "" || given && mode != "ro" {
			return nil, usageError{fmt.Errorf("--volume %q: must be like data, or data:ro to read only", v)}
		}
		out = append(out, map[string]any{"volume": name, "read_only": given})
	}
	return out, nil
}

func readOnlyWords(readOnly bool) string {
	if readOnly {
		return ", read-only"
	}
	return ""
}

func (e *environment) volumesCreateCommand() *cobra.Command {
	var size uint32
	var class, rack, location string
	var shared, wait bool
	c := &cobra.Command{
		Use: "create NAME", Short: "Make a volume", Args: cobra.ExactArgs(1),
		Example: `  cosmicac volumes create data --size 200 --location us --wait
  cosmicac jobs create --kind gpu-container --name lab --location us --gpu GH100_H100_SXM5_80GB --gpus 1 --image Ubuntu22.04/CUDA12.8.1 --volume data`,
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := e.client()
			if err != nil {
				return err
			}
			body := map[string]any{"name": args[0], "size_gib": size}
			for field, v := range map[string]string{"storage_class": class, "rack_id": rack, "location": location} {
				if v != "" {
					body[field] = v
				}
			}
			if shared {
				body["shared"] = true
			}
			var v client.Volume
			if err := api.Call(cmd.Context(), "POST", "/api/v1/volumes", nil, nil, body, &v); err != nil {
				return err
			}
			if wait {
				if err := e.awaitVolume(cmd.Context(), api, &v, func() bool { return v.State != "creating" }); err != nil {
					return err
				}
			}
			if err := e.printVolume(&v); err != nil || !wait || v.State == "ready" {
				return err
			}
			return fault.New(fault.FailedPrecondition, "volume %s is %s: %s", v.Name, v.State, v.Message)
		},
	}
	f := c.Flags()
	f.Uint32Var(&size, "size", 0, "size, GiB")
	f.StringVar(&class, "storage-class", "", "storage class of the rack's cluster (default: the rack's own)")
	f.StringVar(&rack, "rack", "", "the rack (default: the one of the location with the most GPUs)")
	f.StringVar(&location, "location", "", "location code, as us")
	f.BoolVar(&shared, "shared", false, "several jobs may read it at once; the class must offer ReadWriteMany")
	f.BoolVar(&wait, "wait", false, "wait until it is ready, or failed")
	return c
}

// awaitVolume reads a volume again until done says so.
func (e *environment) awaitVolume(ctx context.Context, api *client.Client, v *client.Volume, done func() bool) error {
	for !done() {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(500 * time.Millisecond):
		}
		*v = client.Volume{ID: v.ID}
		if err := api.Call(ctx, "GET", "/api/v1/volumes/"+url.PathEscape(v.ID), nil, nil, nil, v); err != nil {
			return err
		}
	}
	return nil
}

// findVolume turns a name or an id into a volume; an ambiguous name lists the ids.
func (e *environment) findVolume(ctx context.Context, api *client.Client, nameOrID string) (*client.Volume, error) {
	if strings.HasPrefix(nameOrID, "v-") {
		v := &client.Volume{}
		err := api.Call(ctx, "GET", "/api/v1/volumes/"+url.PathEscape(nameOrID), nil, nil, nil, v)
		if err == nil || fault.KindOf(err) != fault.NotFound {
			return v, err
		}
	}
	var list struct {
		Volumes []client.Volume `json:"volumes"`
	}
	if err := api.Call(ctx, "GET", "/api/v1/volumes", url.Values{"name": {nameOrID}}, nil, nil, &list); err != nil {
		return nil, err
	}
	switch len(list.Volumes) {
	case 0:
		return nil, fault.New(fault.NotFound, "no volume is named %q; cosmicac volumes list shows yours", nameOrID)
	case 1:
		return &list.Volumes[0], nil
	}
	var ids []string
	for _, v := range list.Volumes {
		ids = append(ids, v.ID+" (project "+v.ProjectID+")")
	}
	return nil, fault.New(fault.Invalid, "%d volumes are named %q, use an id: %s", len(ids), nameOrID, strings.Join(ids, ", "))
}

func who(v *client.Volume) string {
	var out []string
	for _, a := range v.Attachments {
		words := a.JobID + " (" + a.JobName + ", " + a.JobState + ")"
		out = append(out, words+readOnlyWords(a.ReadOnly))
	}
	return orDash(strings.Join(out, "; "))
}

func (e *environment) printVolume(v *client.Volume) error {
	return e.print(v, func(t *tableWriter) {
		t.row("id", v.ID)
		t.row("name", v.Name)
		t.row("state", v.State)
		if v.Message != "" {
			t.row("", v.Message)
		}
		t.row("size", fmt.Sprintf("%d GiB", v.SizeGiB))
		t.row("rack", v.RackID+" in "+orDash(v.Location))
		t.row("class", orDash(v.StorageClass))
		if v.Shared {
			t.row("shared", "several jobs may read it at once, one that writes has it alone")
		}
		t.row("attached to", who(v))
		t.row("project", v.ProjectID)
	})
}

func (e *environment) volumesListCommand() *cobra.Command {
	return &cobra.Command{
		Use: "list", Short: "List your volumes, oldest first", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			api, err := e.client()
			if err != nil {
				return err
			}
			var list struct {
				Volumes []client.Volume `json:"volumes"`
			}
			if err := api.Call(cmd.Context(), "GET", "/api/v1/volumes", nil, nil, nil, &list); err != nil {
				return err
			}
			return e.print(list, func(t *tableWriter) {
				t.row("ID", "NAME", "STATE", "GIB", "RACK", "LOCATION", "CLASS", "SHARED", "ATTACHED TO", "AGE")
				for i := range list.Volumes {
					v := &list.Volumes[i]
					t.row(v.ID, v.Name, v.State, v.SizeGiB, v.RackID, orDash(v.Location), orDash(v.StorageClass), v.Shared, who(v), age(v.CreatedAt, time.Now()))
				}
			})
		},
	}
}

// volumeCommand is a command about one volume, given by id or name.
func (e *environment) volumeCommand(use, short string, more int, run func(ctx context.Context, api *client.Client, v *client.Volume, args []string) error) *cobra.Command {
	return &cobra.Command{
		Use: use, Short: short, Args: cobra.ExactArgs(1 + more),
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := e.client()
			if err != nil {
				return err
			}
			v, err := e.findVolume(cmd.Context(), api, args[0])
			if err != nil {
				return err
			}
			return run(cmd.Context(), api, v, args[1:])
		},
	}
}

func (e *environment) volumesShowCommand() *cobra.Command {
	c := e.volumeCommand("show VOLUME", "Show one volume, and who has it", 0, func(_ context.Context, _ *client.Client, v *client.Volume, _ []string) error {
		return e.printVolume(v)
	})
	c.Aliases = []string{"get"}
	return c
}

// change attaches a volume to a job or detaches it.
func (e *environment) change(ctx context.Context, api *client.Client, v *client.Volume, job, verb string, readOnly bool) error {
	id, err := e.resolve(ctx, api, job)
	if err != nil {
		return err
	}
	body := map[string]any{"job_id": id}
	if readOnly {
		body["read_only"] = true
	}
	var is client.Volume
	if err := api.Call(ctx, "POST", "/api/v1/volumes/"+url.PathEscape(v.ID)+"/"+verb, nil, nil, body, &is); err != nil {
		return err
	}
	return e.printVolume(&is)
}

func (e *environment) volumesAttachCommand() *cobra.Command {
	var readOnly bool
	c := e.volumeCommand("attach VOLUME JOB", "Give a stopped job a volume from its next start on", 1, func(ctx context.Context, api *client.Client, v *client.Volume, args []string) error {
		return e.change(ctx, api, v, args[0], "attach", readOnly)
	})
	c.Flags().BoolVar(&readOnly, "read-only", false, "to read only")
	return c
}

func (e *environment) volumesDetachCommand() *cobra.Command {
	return e.volumeCommand("detach VOLUME JOB", "Take a volume from a stopped job", 1, func(ctx context.Context, api *client.Client, v *client.Volume, args []string) error {
		return e.change(ctx, api, v, args[0], "detach", false)
	})
}

func (e *environment) volumesDeleteCommand() *cobra.Command {
	var confirm string
	var wait bool
	c := e.volumeCommand("delete VOLUME", "Remove a volume with all that is on it; refused while a job has it", 0, func(ctx context.Context, api *client.Client, v *client.Volume, _ []string) error {
		if confirm != v.Name {
			return usageError{fmt.Errorf("delete volume %s: it is not confirmed; all that is on it goes with it: add --confirm %s", v.Name, v.Name)}
		}
		if err := api.Call(ctx, "DELETE", "/api/v1/volumes/"+url.PathEscape(v.ID), url.Values{"confirm": {confirm}}, nil, nil, nil); err != nil {
			return err
		}
		if !wait {
			fmt.Fprintf(e.out, "deleting %s (%s)\n", v.Name, v.ID)
			return nil
		}
		if err := e.awaitVolume(ctx, api, v, func() bool { return false }); fault.KindOf(err) != fault.NotFound {
			return err
		}
		fmt.Fprintf(e.out, "deleted %s: nothing of it is left in the cluster\n", v.ID)
		return nil
	})
	c.Flags().StringVar(&confirm, "confirm", "", "the volume's name again")
	c.Flags().BoolVar(&wait, "wait", false, "wait until nothing is left in the cluster")
	return c
}
