package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/spf13/cobra"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
)

// workerBinary is the only program here that speaks to a cluster.
const workerBinary = "cosmicac-wrk-server-k8s-nvidia"

// How long a check may take, and one with probes: each has the deadlines of a job.
const (
	checkLimit = 90 * time.Second
	probeLimit = 6 * time.Hour
)

// checkedRow is one row of a readiness check.
type checkedRow struct {
	Row     string `json:"row"`
	Verdict string `json:"verdict"`
	Message string `json:"message"`
	Remedy  string `json:"remedy"`
}

func (e *environment) rackCheckCommand() *cobra.Command {
	var operator, kubeconfig, namespace, selector, class, bridge, image string
	var fabric []string
	var probe bool
	c := &cobra.Command{
		Use: "check [RACK]", Short: "Look whether a cluster has what a rack needs; exits with an error when no job could run",
		Long: `Looks whether a cluster has what a rack needs and says what to do about what is missing.
It reads only.

With RACK the rack's worker looks, with its own rights. With --kubeconfig any
cluster is looked at from here, before it has a worker; that needs the worker's
program, ` + workerBinary + `, beside this one or in PATH.

With --probe the rack's worker then makes for real what jobs are made of, one after
another: a VM without a GPU on a root disk of an image, and one with one GPU of each model
that is free. It claims the GPUs as jobs do, says what failed in the cluster's own words,
and removes everything, also after Ctrl-C. This may take as long as a job's start does.`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			switch {
			case (kubeconfig == "") == (len(args) == 0):
				return usageError{errors.New("racks check: name a rack, or give --kubeconfig")}
			case probe && kubeconfig != "":
				return usageError{errors.New("racks check: --probe needs a rack, not --kubeconfig: only a rack's worker gives out its GPUs")}
			case image != "" && !probe:
				return usageError{errors.New("racks check: --probe-image goes with --probe")}
			case kubeconfig != "":
				look := []string{"--kubeconfig", kubeconfig, "--namespace", namespace, "--node-selector", selector, "--storage-class", class, "--overlay-bridge", bridge}
				for _, name := range fabric {
					look = append(look, "--fabric-device", name)
				}
				return e.checkCluster(cmd.Context(), look...)
			}
			limit := checkLimit
			if probe {
				limit = probeLimit
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), limit)
			defer cancel()
			return withOperator(ctx, operator, func(node *mesh.Node, _ string) error {
				answer, err := checkedBy(ctx, node, args[0])
				if err != nil {
					return err
				}
				findings := answer.GetFindings()
				if probe {
					rows, err := e.probedBy(ctx, node, args[0], image, findings)
					if err != nil {
						return err
					}
					findings = append(findings, rows...)
				}
				return e.printCheck(args[0], findings)
			})
		},
	}
	c.Flags().StringVar(&operator, "operator", "", "operator folder (default: COSMICAC_OPERATOR_DIR, /etc/cosmicac/operator)")
	c.Flags().BoolVar(&probe, "probe", false, "start small VMs, with and without a GPU, and remove them again")
	c.Flags().StringVar(&image, "probe-image", "", "image of the probes' root disks (default: the rack's own for the runtime command)")
	c.Flags().StringVar(&kubeconfig, "kubeconfig", "", "look at the cluster of this file")
	c.Flags().StringVar(&namespace, "namespace", "cosmicac", "with --kubeconfig: the network's namespace")
	c.Flags().StringVar(&selector, "node-selector", "", "with --kubeconfig: label selector of the rack's nodes")
	c.Flags().StringVar(&class, "storage-class", "", "with --kubeconfig: storage class of root disks (default: the cluster's)")
	c.Flags().StringArrayVar(&fabric, "fabric-device", nil, "with --kubeconfig: resource of InfiniBand adapters for replicas over several nodes; may be repeated")
	c.Flags().StringVar(&bridge, "overlay-bridge", "", "with --kubeconfig: Open vSwitch bridge of the overlay")
	return c
}

// checkedBy asks a rack's worker.
func checkedBy(ctx context.Context, node *mesh.Node, rack string) (*workerv1.CheckRackResponse, error) {
	p, name, err := rackWorker(ctx, node, rack)
	if err != nil {
		return nil, err
	}
	answer, err := workerv1.NewRackClient(node.Client(p)).CheckRack(ctx, &workerv1.CheckRackRequest{})
	if err = fault.FromGRPC(err); err != nil {
		return nil, fault.Wrap(fault.KindOf(err), err, "ask %s, the worker of rack %s", name, rack)
	}
	return answer, nil
}

// rackWorker finds the worker of a rack, and its name in the roster.
func rackWorker(ctx context.Context, node *mesh.Node, rack string) (peer.ID, string, error) {
	racks, err := rackEntries(ctx, node)
	if err != nil {
		return "", "", err
	}
	var ids []string
	for _, r := range racks {
		if r.GetEntry().GetId() != rack {
			ids = append(ids, r.GetEntry().GetId())
			continue
		}
		return onePeer(node.Network(), r.GetEntry().GetKey())
	}
	return "", "", fault.New(fault.NotFound, "no rack is called %q; there are: %s", rack, orDash(strings.Join(ids, ", ")))
}

// probedBy has a rack's worker start machines, unless what was found says already that
// they cannot run. Rows are told as they come: each may take minutes.
func (e *environment) probedBy(ctx context.Context, node *mesh.Node, rack, image string, findings []*workerv1.CheckFinding) ([]*workerv1.CheckFinding, error) {
	if gates := gatesOf(findings); len(gates) > 0 {
		return []*workerv1.CheckFinding{{
			Row: "probe", Verdict: workerv1.CheckVerdict_CHECK_VERDICT_UNKNOWN, Message: "not tried: something else stands in the way", Remedy: "mend " + strings.Join(gates, ", ") + " first",
		}}, nil
	}
	p, name, err := rackWorker(ctx, node, rack)
	if err != nil {
		return nil, err
	}
	stream, err := workerv1.NewRackClient(node.Client(p)).ProbeRack(ctx, &workerv1.ProbeRackRequest{Image: image})
	var rows []*workerv1.CheckFinding
	for err == nil {
		var next *workerv1.ProbeRackResponse
		if next, err = stream.Recv(); err == nil {
			rows = append(rows, next.GetFinding())
			fmt.Fprintf(e.err, "%s: %s: %s\n", next.GetFinding().GetRow(), verdictWord(next.GetFinding()), next.GetFinding().GetMessage())
		}
	}
	if errors.Is(err, io.EOF) {
		return rows, nil
	}
	err = fault.FromGRPC(err)
	rest := ""
	switch fault.KindOf(err) {
	case fault.Unavailable, fault.Unreachable, fault.Timeout, fault.Canceled:
		rest = "; the worker takes down what there is of the probe, at its next start at the latest"
	}
	return nil, fault.Wrap(fault.KindOf(err), err, "probe rack %s by %s%s", rack, name, rest)
}

// gatesOf names the rows that stand in the way of every job.
func gatesOf(findings []*workerv1.CheckFinding) (gates []string) {
	for _, f := range findings {
		if f.GetVerdict() == workerv1.CheckVerdict_CHECK_VERDICT_GATE {
			gates = append(gates, f.GetRow())
		}
	}
	return gates
}

func verdictWord(f *workerv1.CheckFinding) string {
	return strings.ToLower(strings.TrimPrefix(f.GetVerdict().String(), "CHECK_VERDICT_"))
}

// rackEntries asks the orchestrator for every rack, with the workers' keys.
func rackEntries(ctx context.Context, node *mesh.Node) ([]*orkv1.Rack, error) {
	p, _, err := onePeer(node.Network(), "ork")
	if err != nil {
		return nil, err
	}
	list, err := orkv1.NewRacksClient(node.Client(p)).ListRacks(ctx, &orkv1.ListRacksRequest{Keys: true})
	if err = fault.FromGRPC(err); err != nil {
		return nil, fault.Wrap(fault.KindOf(err), err, "ask the orchestrator for its racks")
	}
	return list.GetRacks(), nil
}

func (e *environment) printCheck(rack string, findings []*workerv1.CheckFinding) error {
	rows := []checkedRow{}
	for _, f := range findings {
		rows = append(rows, checkedRow{f.GetRow(), verdictWord(f), f.GetMessage(), f.GetRemedy()})
	}
	if err := e.print(map[string]any{"findings": rows}, func(t *tableWriter) {
		t.row("ROW", "VERDICT", "WHAT", "REMEDY")
		for _, r := range rows {
			t.row(r.Row, r.Verdict, r.Message, orDash(r.Remedy))
		}
	}); err != nil {
		return err
	}
	if gates := gatesOf(findings); len(gates) > 0 {
		return fault.New(fault.FailedPrecondition, "jobs cannot run on rack %s before this is mended: %s", rack, strings.Join(gates, ", "))
	}
	return nil
}

// checkCluster runs the worker's program in its looking mode.
func (e *environment) checkCluster(ctx context.Context, args ...string) error {
	program := workerBinary
	if self, err := os.Executable(); err == nil {
		if beside := filepath.Join(filepath.Dir(self), workerBinary); runnable(beside) {
			program = beside
		}
	}
	form := "table"
	if e.output != "table" {
		form = "json"
	}
	cmd := exec.CommandContext(ctx, program, append([]string{"check", "--output", form}, args...)...)
	cmd.Stdout, cmd.Stderr = e.out, e.err
	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit) && exit.ExitCode() > 0:
		return exitStatus(exit.ExitCode())
	case err != nil:
		return fault.Wrap(fault.FailedPrecondition, err, "run %s, which looks at clusters; install it beside cosmicac", workerBinary)
	}
	return nil
}

func runnable(file string) bool {
	info, err := os.Stat(file)
	return err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0
}
