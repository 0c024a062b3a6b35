package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/goccy/go-yaml"
	"github.com/spf13/cobra"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/services/cosmicac-cli/internal/client"
)

func (e *environment) jobsCommand() *cobra.Command {
	c := &cobra.Command{Use: "jobs", Short: "Create, watch and end jobs; shells into them", Args: cobra.NoArgs, RunE: helpOnly}
	c.AddCommand(e.jobsCreateCommand(), e.jobsListCommand(), e.jobsGetCommand(), e.jobsWaitCommand(), e.jobsHistoryCommand(), e.jobsLogsCommand(),
		e.jobsActCommand("stop", "End the job's VMs; gives up its GPUs, keeps its disks"),
		e.jobsActCommand("start", "Start a stopped or failed job again"),
		e.jobsActCommand("restart", "End the job's VMs and have new ones follow; keeps its disks"), e.jobsUpdateCommand(), e.jobsDeleteCommand(), e.jobsFenceCommand(),
		e.jobsShellCommand(), e.jobsExecCommand(), e.sshProxyCommand())
	return c
}

func helpOnly(cmd *cobra.Command, _ []string) error { return cmd.Help() }

func (e *environment) jobsCreateCommand() *cobra.Command {
	var f struct {
		file, kind, name, location, gpu, image, model, runtime, script, key string
		tags, env, engineArgs, ports, volumes                               []string
		gpus, cpus, memory, disk, replicas                                  int
		cuda, placement                                                     string
		priority                                                            int
		maxDuration, idleStop, alertQueued, alertUnreachable                time.Duration
		costLimit                                                           uint64
		alertCost                                                           uint32
		anonymous, wait, dryRun                                             bool
	}
	c := &cobra.Command{
		Use:   "create",
		Short: "Create a GPU Container Job or a Managed Inference Job",
		Example: `  cosmicac jobs create --kind gpu-container --name lab --location us --gpu GH100_H100_SXM5_80GB --gpus 2 --image Ubuntu22.04/CUDA12.8.1 --wait
  cosmicac jobs create --kind managed-inference --name chat --location us --model Qwen/Qwen3-32B --gpu GH100_H100_SXM5_80GB --gpus 2
  cosmicac jobs create --file job.yaml`,
		Args: cobra.NoArgs,
	}
	fl := c.Flags()
	fl.StringVar(&f.file, "file", "", "job as YAML or JSON, fields as the API names them; flags override it (- for standard input)")
	fl.StringVar(&f.kind, "kind", "", "gpu-container or managed-inference")
	fl.StringVar(&f.name, "name", "", "a name for people, 1 to 63 characters")
	fl.StringSliceVar(&f.tags, "tags", nil, "labels for people, comma-separated")
	fl.StringVar(&f.location, "location", "", "location code, as us")
	fl.StringVar(&f.gpu, "gpu", "", "GPU model, as GH100_H100_SXM5_80GB")
	fl.IntVar(&f.gpus, "gpus", 0, "whole GPUs (per replica)")
	fl.IntVar(&f.cpus, "cpus-per-gpu", 0, "CPU cores per GPU")
	fl.IntVar(&f.memory, "memory-per-gpu", 0, "memory per GPU, GiB")
	fl.IntVar(&f.disk, "disk", 0, "root disk, GiB")
	fl.StringVar(&f.image, "image", "", "base image of a GPU Container Job, as Ubuntu22.04/CUDA12.8.1")
	fl.StringVar(&f.model, "model", "", "model of a Managed Inference Job")
	fl.StringVar(&f.runtime, "runtime", "", "vllm, parakeet, embedded or command (default: the model's)")
	fl.IntVar(&f.replicas, "replicas", 0, "replicas of a Managed Inference Job")
	fl.StringArrayVar(&f.engineArgs, "engine-argument", nil, "an argument for the engine; may be repeated")
	fl.BoolVar(&f.anonymous, "no-authorization", false, "serve this endpoint's exact URL without an API key")
	fl.StringArrayVar(&f.env, "env", nil, "NAME=VALUE for the start-up script; may be repeated")
	fl.StringArrayVar(&f.ports, "port", nil, "a port to open to the outside, as 8080/tcp, 53/udp or web=443/tcp; may be repeated (GPU Container Jobs)")
	fl.StringArrayVar(&f.volumes, "volume", nil, "a volume to attach, as data or data:ro to read only; may be repeated (GPU Container Jobs)")
	fl.StringVar(&f.script, "start-script", "", "file with a start-up script")
	fl.DurationVar(&f.maxDuration, "max-duration", 0, "stop after running this long")
	fl.Uint64Var(&f.costLimit, "cost-limit-cents", 0, "stop when its GPUs have cost this much, in hundredths of the price list's currency")
	fl.DurationVar(&f.idleStop, "idle-stop", 0, "stop after this long without GPU use and without a shell, at least 1m (GPU Container Jobs)")
	fl.StringVar(&f.cuda, "cuda", "", "CUDA release that the image must have, as \"CUDA 12.8\"")
	fl.Uint32Var(&f.alertCost, "alert-cost", 0, "alert when the cost reaches this share of the cost limit, 1 to 100")
	fl.DurationVar(&f.alertQueued, "alert-queued", 0, "alert when it has waited for placement this long")
	fl.DurationVar(&f.alertUnreachable, "alert-unreachable", 0, "alert when it has not been heard of for this long")
	fl.StringVar(&f.key, "idempotency-key", "", "the same key gives the same job")
	fl.StringVar(&f.placement, "placement", "", "pack fills nodes up (the default), spread keeps replicas apart")
	fl.IntVar(&f.priority, "priority", 0, "-100 to 100, higher goes first in the queue; above 0 for administrators")
	fl.BoolVar(&f.dryRun, "dry-run", false, "say where it would run now, or every reason why not; records nothing")
	fl.BoolVar(&f.wait, "wait", false, "wait until it runs, or ended")
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		body, err := e.readSpec(f.file)
		if err != nil {
			return err
		}
		set := func(flag, field string, v any) {
			if fl.Changed(flag) {
				body[field] = v
			}
		}
		set("kind", "kind", strings.ReplaceAll(f.kind, "-", "_"))
		set("name", "name", f.name)
		set("tags", "tags", f.tags)
		set("location", "location", f.location)
		gpu, _ := body["gpu"].(map[string]any)
		if gpu == nil {
			gpu = map[string]any{}
		}
		if fl.Changed("gpu") {
			gpu["model"] = f.gpu
		}
		if fl.Changed("gpus") {
			gpu["count"] = f.gpus
		}
		if len(gpu) > 0 {
			body["gpu"] = gpu
		}
		set("cpus-per-gpu", "cpu_cores_per_gpu", f.cpus)
		set("memory-per-gpu", "memory_gib_per_gpu", f.memory)
		set("disk", "disk_gib", f.disk)
		set("image", "image", f.image)
		set("model", "model", f.model)
		set("runtime", "runtime", f.runtime)
		set("replicas", "replicas", f.replicas)
		set("engine-argument", "engine_arguments", f.engineArgs)
		set("no-authorization", "require_authorization", !f.anonymous)
		set("max-duration", "max_duration_seconds", int64(f.maxDuration.Seconds()))
		set("cost-limit-cents", "cost_limit_cents", f.costLimit)
		set("idle-stop", "idle_stop_seconds", int64(f.idleStop.Seconds()))
		set("cuda", "cuda", f.cuda)
		set("placement", "placement", f.placement)
		set("priority", "priority", f.priority)
		alerts, _ := body["alerts"].(map[string]any)
		if alerts == nil {
			alerts = map[string]any{}
		}
		for flag, v := range map[string]any{"alert-cost": f.alertCost, "alert-queued": int64(f.alertQueued.Seconds()), "alert-unreachable": int64(f.alertUnreachable.Seconds())} {
			if fl.Changed(flag) {
				alerts[map[string]string{"alert-cost": "cost_percent", "alert-queued": "queued_after_seconds", "alert-unreachable": "unreachable_after_seconds"}[flag]] = v
			}
		}
		if len(alerts) > 0 {
			body["alerts"] = alerts
		}
		if fl.Changed("port") {
			if body["ports"], err = readPorts(f.ports); err != nil {
				return err
			}
		}
		if fl.Changed("volume") {
			if body["volumes"], err = readMounts(f.volumes); err != nil {
				return err
			}
		}
		if fl.Changed("env") {
			env := map[string]string{}
			for _, kv := range f.env {
				k, v, ok := strings.Cut(kv, "=")
				if !ok {
					return usageError{fmt.Errorf("--env %q: must be NAME=VALUE", kv)}
				}
				env[k] = v
			}
			body["environment"] = env
		}
		for flag, d := range map[string]time.Duration{"max-duration": f.maxDuration, "idle-stop": f.idleStop, "alert-queued": f.alertQueued, "alert-unreachable": f.alertUnreachable} {
			if fl.Changed(flag) && (d < time.Second || d%time.Second != 0) {
				return usageError{fmt.Errorf("--%s %s: must be whole seconds, at least 1s", flag, d)}
			}
		}
		if f.script != "" {
			raw, err := os.ReadFile(f.script)
			if err != nil {
				return fault.Wrap(fault.Invalid, err, "read --start-script %s", f.script)
			}
			body["start_script"] = string(raw)
		}
		headers := http.Header{}
		if f.key != "" {
			headers.Set("Idempotency-Key", f.key)
		}
		api, err := e.client()
		if err != nil {
			return err
		}
		if f.dryRun {
			var plan client.Plan
			if err := api.Call(cmd.Context(), "POST", "/api/v1/jobs/plan", nil, nil, body, &plan); err != nil {
				return err
			}
			if err := e.printPlan(&plan); err != nil || plan.Fits {
				return err
			}
			return fault.New(fault.FailedPrecondition, "it would be %s (%s): %s", plan.State, orDash(plan.Reason), plan.Message)
		}
		var job client.Job
		if err := api.Call(cmd.Context(), "POST", "/api/v1/jobs", nil, headers, body, &job); err != nil {
			return err
		}
		if !f.wait {
			return e.printJob(&job)
		}
		fmt.Fprintf(e.err, "created %s\n", job.ID)
		last, err := e.await(cmd.Context(), api, job.ID, func(j *client.Job) bool { return j.State == "running" || j.Ended() })
		if err != nil {
			return err
		}
		if err := e.printJob(last); err != nil {
			return err
		}
		if last.State != "running" && last.State != "succeeded" {
			return fault.New(fault.FailedPrecondition, "job %s is %s (%s): %s", last.ID, last.State, orDash(last.Reason), last.Message)
		}
		return nil
	}
	return c
}

// readSpec reads a job file, or gives an empty spec.
func (e *environment) readSpec(file string) (map[string]any, error) {
	body := map[string]any{}
	if file == "" {
		return body, nil
	}
	var raw []byte
	var err error
	if file == "-" {
		raw, err = io.ReadAll(io.LimitReader(e.in, 1<<20))
	} else {
		raw, err = os.ReadFile(file)
	}
	if err != nil {
		return nil, fault.Wrap(fault.Invalid, err, "read --file %s", file)
	}
	if err := yaml.Unmarshal(raw, &body); err != nil {
		return nil, fault.Wrap(fault.Invalid, err, "--file %s is not valid YAML", file)
	}
	return body, nil
}

// resolve turns a name into an id; an ambiguous name lists the ids.
func (e *environment) resolve(ctx context.Context, api *client.Client, nameOrID string) (string, error) {
	if strings.HasPrefix(nameOrID, "j-") {
		return nameOrID, nil
	}
	var list struct {
		Jobs []client.Job `json:"jobs"`
	}
	if err := api.Call(ctx, "GET", "/api/v1/jobs", url.Values{"name": {nameOrID}}, nil, nil, &list); err != nil {
		return "", err
	}
	switch len(list.Jobs) {
	case 0:
		return "", fault.New(fault.NotFound, "no job is named %q; cosmicac jobs list shows yours", nameOrID)
	case 1:
		return list.Jobs[0].ID, nil
	}
	var ids []string
	for _, j := range list.Jobs {
		ids = append(ids, j.ID+" ("+j.State+")")
	}
	return "", fault.New(fault.Invalid, "%d jobs are named %q, use an id: %s", len(ids), nameOrID, strings.Join(ids, ", "))
}

// await follows a job's event stream, prints each new state and how far an update is, and returns the
// job when done says so. A broken stream is taken up again.
func (e *environment) await(ctx context.Context, api *client.Client, id string, done func(*client.Job) bool) (*client.Job, error) {
	var last *client.Job
	var shown string
	start := time.Now()
	for failures := 0; ; {
		deleted := false
		err := api.Events(ctx, "/api/v1/jobs/"+url.PathEscape(id)+"/events", func(ev client.Event) bool {
			failures = 0
			if ev.Name == "deleted" {
				deleted = true
				return false
			}
			if ev.Name != "job" {
				return true
			}
			var j client.Job
			if json.Unmarshal(ev.Data, &j) != nil {
				return true
			}
			last = &j
			line := j.State
			if j.Reason != "" {
				line += " (" + j.Reason + ")"
			}
			if j.Message != "" {
				line += ": " + j.Message
			}
			if c := j.Condition("updating"); c != nil {
				line += ": updating, " + c.Message
			}
			if line != shown {
				shown = line
				fmt.Fprintf(e.err, "  %6.1fs  %s\n", time.Since(start).Seconds(), printable(line))
			}
			return !done(&j)
		})
		switch {
		case deleted:
			return nil, fault.New(fault.NotFound, "job %s was deleted", id)
		case err == nil:
			return last, nil
		case ctx.Err() != nil:
			return nil, ctx.Err()
		}
		if k := fault.KindOf(err); k == fault.NotFound || k == fault.Unauthenticated || k == fault.Denied || k == fault.Invalid {
			return nil, err
		}
		if failures++; failures > 20 {
			return nil, err
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(500 * time.Millisecond):
		}
	}
}

func (e *environment) printJob(j *client.Job) error {
	return e.print(j, func(t *tableWriter) {
		t.row("id", j.ID)
		t.row("name", j.Name)
		t.row("kind", j.Kind)
		state := j.State
		if j.Reason != "" {
			state += " (" + j.Reason + ")"
		}
		t.row("state", state)
		if j.Message != "" {
			t.row("", j.Message)
		}
		for _, c := range j.Conditions {
			t.row("condition", fmt.Sprintf("%s since %s: %s", c.Kind, c.Since.Local().Format(time.DateTime), c.Message))
		}
		t.row("location", j.Location)
		t.row("gpu", fmt.Sprintf("%d x %s", j.GPU.Count, orDash(j.GPU.Model)))
		if j.Image != "" {
			t.row("image", j.Image)
		}
		if j.Model != "" {
			t.row("model", fmt.Sprintf("%s (%s), %d replicas", j.Model, j.Runtime, j.Replicas))
			t.row("endpoint", orDash(j.EndpointID))
		}
		for _, r := range j.ReplicaList {
			for _, a := range r.Attempts {
				where := orDash(a.RackID)
				for _, n := range a.Nodes {
					where += " / " + n.NodeName
				}
				t.row("attempt "+strconv.Itoa(int(a.Number)), fmt.Sprintf("%s %s on %s", a.ID, a.State, where))
			}
		}
		portRows(t, j)
		for _, v := range j.Volumes {
			t.row("volume "+v.Name, v.ID+" at "+v.Path+readOnlyWords(v.ReadOnly))
		}
		if j.Price != nil {
			t.row("cost", fmt.Sprintf("%s so far, at %s for a GPU and hour%s", money(j.CostCents, j.Currency), money(*j.Price, j.Currency), limitWords(j)))
		}
		if j.Simulated {
			t.row("note", "simulated: this rack's GPUs and VMs are played by a simulator")
		}
	})
}

// money is an amount in hundredths of a currency.
func money(cents uint64, currency string) string {
	return strings.TrimSpace(fmt.Sprintf("%d.%02d %s", cents/100, cents%100, currency))
}

func limitWords(j *client.Job) string {
	if j.CostLimitCents == 0 {
		return ""
	}
	return "; stopped at " + money(j.CostLimitCents, j.Currency)
}

func (e *environment) jobsListCommand() *cobra.Command {
	var kind, state, name, token string
	var size int
	c := &cobra.Command{
		Use:   "list",
		Short: "List your jobs, newest first",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			api, err := e.client()
			if err != nil {
				return err
			}
			q := url.Values{}
			for k, v := range map[string]string{"kind": strings.ReplaceAll(kind, "-", "_"), "state": state, "name": name, "page_token": token} {
				if v != "" {
					q.Set(k, v)
				}
			}
			if cmd.Flags().Changed("page-size") {
				q.Set("page_size", strconv.Itoa(size))
			}
			var list struct {
				Jobs          []client.Job `json:"jobs"`
				NextPageToken string       `json:"next_page_token"`
			}
			if err := api.Call(cmd.Context(), "GET", "/api/v1/jobs", q, nil, nil, &list); err != nil {
				return err
			}
			return e.print(list, func(t *tableWriter) {
				t.row("ID", "NAME", "KIND", "STATE", "REASON", "LOCATION", "GPUS", "AGE")
				for _, j := range list.Jobs {
					t.row(j.ID, j.Name, j.Kind, j.State, orDash(j.Reason), j.Location, fmt.Sprintf("%d x %s", j.GPU.Count, orDash(j.GPU.Model)), age(j.CreatedAt, time.Now()))
				}
				if list.NextPageToken != "" {
					t.row("more: --page-token " + list.NextPageToken)
				}
			})
		},
	}
	c.Flags().StringVar(&kind, "kind", "", "only this kind")
	c.Flags().StringVar(&state, "state", "", "only this state")
	c.Flags().StringVar(&name, "name", "", "only this exact name")
	c.Flags().StringVar(&token, "page-token", "", "where the last page ended")
	c.Flags().IntVar(&size, "page-size", 100, "1 to 500")
	return c
}

// jobCommand is a command about one job, given by id or name.
func (e *environment) jobCommand(use, short string, run func(ctx context.Context, api *client.Client, id string) error) *cobra.Command {
	return &cobra.Command{
		Use:   use + " JOB",
		Short: short,
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := e.client()
			if err != nil {
				return err
			}
			id, err := e.resolve(cmd.Context(), api, args[0])
			if err != nil {
				return err
			}
			return run(cmd.Context(), api, id)
		},
	}
}

func (e *environment) jobsGetCommand() *cobra.Command {
	c := e.jobCommand("get", "Show one job", func(ctx context.Context, api *client.Client, id string) error {
		var job client.Job
		if err := api.Call(ctx, "GET", "/api/v1/jobs/"+url.PathEscape(id), nil, nil, nil, &job); err != nil {
			return err
		}
		return e.printJob(&job)
	})
	c.Aliases = []string{"show"}
	return c
}

func (e *environment) jobsWaitCommand() *cobra.Command {
	return e.jobCommand("wait", "Follow a job until it runs or ended", func(ctx context.Context, api *client.Client, id string) error {
		job, err := e.await(ctx, api, id, func(j *client.Job) bool { return j.State == "running" || j.Ended() })
		if err != nil {
			return err
		}
		return e.printJob(job)
	})
}

func (e *environment) jobsHistoryCommand() *cobra.Command {
	return e.jobCommand("history", "Show every transition of a job", func(ctx context.Context, api *client.Client, id string) error {
		var h struct {
			Events []client.HistoryEvent `json:"events"`
		}
		if err := api.Call(ctx, "GET", "/api/v1/jobs/"+url.PathEscape(id)+"/history", nil, nil, nil, &h); err != nil {
			return err
		}
		return e.print(h, func(t *tableWriter) {
			t.row("TIME", "ATTEMPT", "STATE", "REASON", "BY", "MESSAGE")
			for _, ev := range h.Events {
				t.row(ev.Time.Local().Format(time.DateTime), orDash(ev.AttemptID), ev.State, orDash(ev.Reason), orDash(ev.Actor), ev.Message)
			}
		})
	})
}

func (e *environment) jobsActCommand(verb, short string) *cobra.Command {
	var wait bool
	c := e.jobCommand(verb, short, func(ctx context.Context, api *client.Client, id string) error {
		var job client.Job
		if err := api.Call(ctx, "POST", "/api/v1/jobs/"+url.PathEscape(id)+"/"+verb, nil, nil, nil, &job); err != nil {
			return err
		}
		if !wait {
			return e.printJob(&job)
		}
		revision := job.Revision
		last, err := e.await(ctx, api, id, func(j *client.Job) bool {
			switch verb {
			case "start":
				return j.Ended() || j.State == "running"
			case "restart": // what runs at first is the attempt that is to end
				return j.Revision > revision && (j.State == "failed" || j.State == "running" && restarted(&job, j))
			}
			return j.Ended()
		})
		if err != nil {
			return err
		}
		return e.printJob(last)
	})
	c.Flags().BoolVar(&wait, "wait", false, "wait until done")
	return c
}

// restarted reports whether every replica runs another attempt than before, or the
// same one where it was queued.
func restarted(was, is *client.Job) bool {
	for i, r := range is.ReplicaList {
		if i >= len(was.ReplicaList) || len(r.Attempts) == 0 {
			return false
		}
		before := was.ReplicaList[i].Attempts
		if len(before) > 0 && before[len(before)-1].ID == r.Attempts[len(r.Attempts)-1].ID && before[len(before)-1].RackID != "" {
			return false
		}
	}
	return true
}

func (e *environment) jobsFenceCommand() *cobra.Command {
	var confirm string
	c := &cobra.Command{
		Use:   "fence ATTEMPT",
		Short: "Give up an attempt on a silent node, so that another may follow (administrators)",
		Long: `Give up an attempt on a silent node, so that another may follow.

Nothing replaces an attempt that is not heard of: it may still run, and a second copy
is worse than none. Make sure that its machine is off, or cut from network and disks;
then say so with --confirm and the attempt's id. Its GPUs stay held until the cluster
says that nothing of it is left.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if confirm != args[0] {
				return usageError{fmt.Errorf("fence %s: it is not confirmed; make sure that its machine is off, then add --confirm %s", args[0], args[0])}
			}
			api, err := e.client()
			if err != nil {
				return err
			}
			var job client.Job
			if err := api.Call(cmd.Context(), "POST", "/api/v1/attempts/"+url.PathEscape(args[0])+"/fence", nil, nil, map[string]string{"confirm": confirm}, &job); err != nil {
				return err
			}
			return e.printJob(&job)
		},
	}
	c.Flags().StringVar(&confirm, "confirm", "", "the attempt's id again")
	return c
}

func (e *environment) jobsDeleteCommand() *cobra.Command {
	var wait bool
	c := e.jobCommand("delete", "Stop a job and remove its disks and record", func(ctx context.Context, api *client.Client, id string) error {
		if err := api.Call(ctx, "DELETE", "/api/v1/jobs/"+url.PathEscape(id), nil, nil, nil, nil); err != nil {
			return err
		}
		if wait {
			_, err := e.await(ctx, api, id, func(*client.Job) bool { return false })
			if err != nil && fault.KindOf(err) != fault.NotFound {
				return err
			}
			fmt.Fprintf(e.out, "deleted %s: nothing of it is left in the cluster\n", id)
			return nil
		}
		fmt.Fprintf(e.out, "deleting %s\n", id)
		return nil
	})
	c.Flags().BoolVar(&wait, "wait", false, "wait until nothing is left in the cluster")
	return c
}
