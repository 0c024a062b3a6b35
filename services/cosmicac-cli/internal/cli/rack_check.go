package cli

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
)

// workerBinary is the only program here that speaks to a cluster.
const workerBinary = "cosmicac-wrk-server-k8s-nvidia"

// checkedRow is one row of a readiness check.
type checkedRow struct {
	Row     string `json:"row"`
	Verdict string `json:"verdict"`
	Message string `json:"message"`
	Remedy  string `json:"remedy"`
}

func (e *environment) rackCheckCommand() *cobra.Command {
	var operator, kubeconfig, namespace, selector, class, bridge string
	var fabric []string
	c := &cobra.Command{
		Use: "check [RACK]", Short: "Look whether a cluster has what a rack needs; exits with an error when no job could run",
		Long: `Looks whether a cluster has what a rack needs and says what to do about what is missing.
It reads only and starts no probe machine.

With RACK the rack's worker looks, with its own rights. With --kubeconfig any
cluster is looked at from here, before it has a worker; that needs the worker's
program, ` + workerBinary + `, beside this one or in PATH.`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			switch {
			case (kubeconfig == "") == (len(args) == 0):
				return usageError{errors.New("racks check: name a rack, or give --kubeconfig")}
			case kubeconfig != "":
				look := []string{"--kubeconfig", kubeconfig, "--namespace", namespace, "--node-selector", selector, "--storage-class", class, "--overlay-bridge", bridge}
				for _, name := range fabric {
					look = append(look, "--fabric-device", name)
				}
				return e.checkCluster(cmd.Context(), look...)
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), 90*time.Second)
			defer cancel()
			return withOperator(ctx, operator, func(node *mesh.Node, _ string) error {
				answer, err := checkedBy(ctx, node, args[0])
				if err != nil {
					return err
				}
				return e.printCheck(args[0], answer.GetFindings())
			})
		},
	}
	c.Flags().StringVar(&operator, "operator", "", "operator folder (default: COSMICAC_OPERATOR_DIR, /etc/cosmicac/operator)")
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
	racks, err := rackEntries(ctx, node)
	if err != nil {
		return nil, err
	}
	var ids []string
	for _, r := range racks {
		if r.GetEntry().GetId() != rack {
			ids = append(ids, r.GetEntry().GetId())
			continue
		}
		p, name, err := onePeer(node.Network(), r.GetEntry().GetKey())
		if err != nil {
			return nil, err
		}
		answer, err := workerv1.NewRackClient(node.Client(p)).CheckRack(ctx, &workerv1.CheckRackRequest{})
		if err = fault.FromGRPC(err); err != nil {
			return nil, fault.Wrap(fault.KindOf(err), err, "ask %s, the worker of rack %s", name, rack)
		}
		return answer, nil
	}
	return nil, fault.New(fault.NotFound, "no rack is called %q; there are: %s", rack, orDash(strings.Join(ids, ", ")))
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
	rows, gates := []checkedRow{}, []string{}
	for _, f := range findings {
		if f.GetVerdict() == workerv1.CheckVerdict_CHECK_VERDICT_GATE {
			gates = append(gates, f.GetRow())
		}
		rows = append(rows, checkedRow{f.GetRow(), strings.ToLower(strings.TrimPrefix(f.GetVerdict().String(), "CHECK_VERDICT_")), f.GetMessage(), f.GetRemedy()})
	}
	if err := e.print(map[string]any{"findings": rows}, func(t *tableWriter) {
		t.row("ROW", "VERDICT", "WHAT", "REMEDY")
		for _, r := range rows {
			t.row(r.Row, r.Verdict, r.Message, orDash(r.Remedy))
		}
	}); err != nil {
		return err
	}
	if len(gates) > 0 {
		return fault.New(fault.FailedPrecondition, "no job can run on rack %s before this is mended: %s", rack, strings.Join(gates, ", "))
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
