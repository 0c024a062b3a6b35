package cli

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"strings"

	"github.com/spf13/cobra"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/services/cosmicac-cli/internal/client"
)

func (e *environment) jobsUpdateCommand() *cobra.Command {
	var strategy, key string
	var arguments []string
	var replicas uint32
	var expect uint64
	var useOwn, wait bool
	var c *cobra.Command
	c = e.jobCommand("update", "Change a running Managed Inference Job, replica by replica", func(ctx context.Context, api *client.Client, id string) error {
		body := map[string]any{"strategy": strings.ReplaceAll(strategy, "-", "_")}
		given := c.Flags().Changed
		switch {
		case strategy != "stop-first" && strategy != "surge-first":
			return usageError{fmt.Errorf("--strategy %q: must be stop-first or surge-first", strategy)}
		case useOwn && given("engine-argument"):
			return usageError{fmt.Errorf("--engine-argument and --default-engine-arguments: one of the two")}
		case !useOwn && !given("engine-argument") && !given("replicas"):
			return usageError{fmt.Errorf("nothing is to change: add --engine-argument, --default-engine-arguments or --replicas")}
		case useOwn:
			body["engine_arguments"] = []string{}
		case given("engine-argument"):
			body["engine_arguments"] = arguments
		}
		if given("replicas") {
			body["replicas"] = replicas
		}
		if expect != 0 {
			body["expected_spec_revision"] = expect
		}
		headers := http.Header{}
		if key != "" {
			headers.Set("Idempotency-Key", key)
		}
		var job client.Job
		if err := api.Call(ctx, "POST", "/api/v1/jobs/"+url.PathEscape(id)+"/update", nil, headers, body, &job); err != nil {
			return err
		}
		if !wait {
			return e.printJob(&job)
		}
		revision := job.SpecRevision
		last, err := e.await(ctx, api, id, func(j *client.Job) bool { return j.SpecRevision != revision || j.Condition("updating") == nil })
		if err != nil {
			return err
		}
		if err := e.printJob(last); err != nil {
			return err
		}
		if stopped := last.Condition("update_stopped"); stopped != nil {
			return fault.New(fault.FailedPrecondition, "job %s: %s", id, stopped.Message)
		}
		if last.SpecRevision != revision {
			return fault.New(fault.Conflict, "job %s was updated again by somebody: its specification is number %d", id, last.SpecRevision)
		}
		return nil
	})
	c.Long = `Change a running Managed Inference Job, replica by replica.

stop-first takes a replica down, then starts the new one in its place: it needs no more
GPUs, and one replica fewer serves meanwhile. surge-first starts the new one beside the
others, then takes an old one down: it needs the GPUs of one replica more, and is refused
before anything changes when they cannot be had now. Requests go to the other replicas,
and what a leaving one has is finished. A new replica that does not come up ends the
update there; the others serve on with what was before.`
	c.Example = `  cosmicac jobs update chat --engine-argument=--max-num-seqs --engine-argument=64 --strategy stop-first --wait
  cosmicac jobs update chat --replicas 3 --strategy surge-first`
	f := c.Flags()
	f.StringVar(&strategy, "strategy", "", "stop-first or surge-first")
	f.StringArrayVar(&arguments, "engine-argument", nil, "engine argument, repeated; all that there are to be")
	f.BoolVar(&useOwn, "default-engine-arguments", false, "the engine arguments of the model's own")
	f.Uint32Var(&replicas, "replicas", 0, "number of replicas")
	f.Uint64Var(&expect, "expect", 0, "the specification's number that you saw; another is a conflict")
	f.StringVar(&key, "idempotency-key", "", "the same key updates the job once")
	f.BoolVar(&wait, "wait", false, "wait until it is done, or stopped")
	return c
}
