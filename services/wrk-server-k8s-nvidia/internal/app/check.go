package app

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/cosmicac/cosmicac/pkg/daemon"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/cluster"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/preflight"
)

// Exit codes of the check.
const (
	checkGood    = 0
	checkBlocked = 1
	checkUsage   = 2
)

// Check is the program's other mode, `check --kubeconfig FILE`: it looks at any
// cluster that the file leads to, prints a table with remedies, and exits with 1
// when no job could run there. It takes no Lease and writes nothing.
func Check(args []string, out, errOut io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	quietKubernetes(hclog.NewNullLogger())
	return check(ctx, args, out, errOut)
}

func check(ctx context.Context, args []string, out, errOut io.Writer) int {
	d := Defaults()
	flags := flag.NewFlagSet("cosmicac-wrk-server-k8s-nvidia check", flag.ContinueOnError)
	flags.SetOutput(errOut)
	file := flags.String("kubeconfig", "", "the way to the cluster, a `FILE`; required")
	namespace := flags.String("namespace", d.Namespace, "the network's namespace")
	selector := flags.String("node-selector", d.NodeSelector, "label selector of the rack's nodes")
	class := flags.String("storage-class", d.StorageClass, "storage class of root disks; empty for the default")
	var fabric []string
	flags.Func("fabric-device", "resource of InfiniBand adapters for replicas over several nodes, a `NAME`; may be repeated", func(v string) error {
		fabric = append(fabric, v)
		return nil
	})
	bridge := flags.String("overlay-bridge", "", "Open vSwitch bridge that joins machines of several nodes; empty for none")
	form := flags.String("output", "table", "table or json")
	if err := flags.Parse(args); err != nil {
		return checkUsage
	}
	if *bridge != "" && !bridgeName.MatchString(*bridge) {
		fmt.Fprintln(errOut, "check: --overlay-bridge is at most 15 of a-z, 0-9 and hyphens")
		return checkUsage
	}
	if *file == "" || flags.NArg() > 0 || *form != "table" && *form != "json" {
		fmt.Fprintln(errOut, "check: --kubeconfig is required, --output is table or json, and there are no arguments")
		return checkUsage
	}
	conn, err := cluster.NewConnection(cluster.ConnectionOptions{Kubeconfig: *file, Now: time.Now})
	if err != nil {
		fmt.Fprintln(errOut, "check:", err)
		return checkUsage
	}
	client, err := cluster.NewClient(conn, *namespace, "cosmicac-rack-check/"+daemon.Version)
	if err != nil {
		fmt.Fprintln(errOut, "check:", err)
		return checkUsage
	}
	ctx, cancel := context.WithTimeout(ctx, checkTime)
	defer cancel()
	over := d.Overlay
	if *bridge != "" {
		over.Driver, over.Bridge = driverOVS, *bridge
	}
	findings := preflight.Check(ctx, preflight.Target{Client: client, NodeSelector: *selector, StorageClass: *class, Fabric: fabric, Skew: conn.Skew,
		Overlay: over.driver(client, time.Now), OverlayResource: over.resource()})
	if err := printFindings(out, *form, findings); err != nil {
		fmt.Fprintln(errOut, "check:", err)
		return checkBlocked
	}
	if preflight.Blocked(findings) {
		return checkBlocked
	}
	return checkGood
}

func printFindings(out io.Writer, form string, findings []*workerv1.CheckFinding) error {
	type row struct {
		Row     string `json:"row"`
		Verdict string `json:"verdict"`
		Message string `json:"message"`
		Remedy  string `json:"remedy"`
	}
	rows := []row{}
	for _, f := range findings {
		rows = append(rows, row{f.Row, strings.ToLower(strings.TrimPrefix(f.Verdict.String(), "CHECK_VERDICT_")), f.Message, f.Remedy})
	}
	if form == "json" {
		e := json.NewEncoder(out)
		e.SetIndent("", "  ")
		return e.Encode(map[string]any{"findings": rows})
	}
	t := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "ROW\tVERDICT\tWHAT\tREMEDY")
	for _, r := range rows {
		if r.Remedy == "" {
			r.Remedy = "-"
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\n", r.Row, r.Verdict, r.Message, r.Remedy)
	}
	return t.Flush()
}
