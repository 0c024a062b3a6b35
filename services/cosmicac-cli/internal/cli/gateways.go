package cli

import (
	"context"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/services/cosmicac-cli/internal/client"
)

// pasteKey stands where the user's private key belongs. wg-quick refuses it as it is.
const pasteKey = "PASTE-YOUR-PRIVATE-KEY-HERE"

func (e *environment) gatewaysCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "gateways", Short: "WireGuard into a job's VM", Args: cobra.NoArgs, RunE: helpOnly,
		Long: `WireGuard into a job's VM.

A gateway runs in the VM of a GPU Container Job, on a UDP port that the job declared
public (jobs create --port 51820/udp). Whoever has a key that was let in reaches every
TCP and UDP service of the VM, also those that listen on its loopback alone, at one
address inside the tunnel, and nothing else. Your private key stays with you. Gateway
and peers are kept on the job's root disk and end with the job. A peer also goes when
whoever let it in loses the right to the job or changes the password.`,
		Example: `  wg genkey | (umask 077; tee laptop.key) | wg pubkey
  cosmicac gateways create lab
  cosmicac gateways add-peer lab --name laptop --public-key KEY > lab.conf`,
	}
	c.AddCommand(e.gatewaysCreateCommand(), e.gatewaysListCommand(), e.gatewaysGetCommand(), e.gatewaysAddPeerCommand(), e.gatewaysRemovePeerCommand(), e.gatewaysDeleteCommand())
	return c
}

// gateway makes one call about a job's gateway, given the job's id or name.
func (e *environment) gateway(ctx context.Context, method, job, below string, body any) (*client.Gateway, error) {
	api, err := e.client()
	if err != nil {
		return nil, err
	}
	id, err := e.resolve(ctx, api, job)
	if err != nil {
		return nil, err
	}
	var g client.Gateway
	err = api.Call(ctx, method, "/api/v1/jobs/"+url.PathEscape(id)+"/gateway"+below, nil, nil, body, &g)
	return &g, err
}

func (e *environment) printGateway(g *client.Gateway) error {
	return e.print(g, func(t *tableWriter) {
		t.row("job", g.JobID)
		t.row("listens on", fmt.Sprintf("UDP port %d of the VM", g.Port))
		t.row("reached at", orDash(strings.Join(endpointsOf(g), ", ")))
		if g.Simulated {
			t.row("", "simulated: the VM is a process, reached on the simulator's own host alone")
		}
		t.row("public key", g.PublicKey)
		t.row("the VM's address", g.Address)
		t.row("MTU", fmt.Sprintf("%d bytes", g.MTU))
		if len(g.Peers) == 0 {
			t.row("peers", "none; cosmicac gateways add-peer lets one in")
			return
		}
		t.row("PEER", "ADDRESS", "LAST HANDSHAKE", "RECEIVED", "SENT", "PUBLIC KEY")
		for _, p := range g.Peers {
			seen := "never"
			if !p.LastHandshake.IsZero() {
				seen = age(p.LastHandshake, time.Now()) + " ago"
			}
			t.row(p.Name, p.Address, seen, p.ReceivedBytes, p.SentBytes, p.PublicKey)
		}
	})
}

func (e *environment) gatewaysCreateCommand() *cobra.Command {
	var port uint16
	c := &cobra.Command{
		Use: "create JOB", Short: "Open a gateway in a running job's VM", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			body := map[string]any{}
			if cmd.Flags().Changed("port") {
				if port == 0 {
					return fault.New(fault.Invalid, "--port is 0; it is one of the job's declared UDP ports, 1 to 65535").With(fault.Detail{Field: "port", Rule: "is 1 to 65535"})
				}
				body["port"] = port
			}
			g, err := e.gateway(cmd.Context(), "POST", args[0], "", body)
			if err != nil {
				return err
			}
			return e.printGateway(g)
		},
	}
	c.Flags().Uint16Var(&port, "port", 0, "which of the job's declared UDP ports (default: the only one)")
	return c
}

func (e *environment) gatewaysGetCommand() *cobra.Command {
	return &cobra.Command{
		Use: "get JOB", Aliases: []string{"show"}, Short: "Show a job's gateway, its peers and their last handshakes", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			g, err := e.gateway(cmd.Context(), "GET", args[0], "", nil)
			if err != nil {
				return err
			}
			if !g.Open {
				return noGateway(g, args[0])
			}
			return e.printGateway(g)
		},
	}
}

func noGateway(g *client.Gateway, job string) error {
	return fault.New(fault.NotFound, "job %s has no gateway; cosmicac gateways create %s opens one", g.JobID, job)
}

// gatewayOf is a row of the list.
type gatewayOf struct {
	Job string `json:"job"`
	*client.Gateway
	// Error is why the job's agent could not be asked.
	Error string `json:"error,omitempty"`
}

// gatewaysAtOnce bounds how many agents are asked at the same time.
const gatewaysAtOnce = 8

func (e *environment) gatewaysListCommand() *cobra.Command {
	return &cobra.Command{
		Use: "list", Short: "List the gateways of your running jobs, asking each job's agent", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			api, err := e.client()
			if err != nil {
				return err
			}
			rows := []*gatewayOf{}
			query := url.Values{"kind": {"gpu_container"}, "state": {"running"}}
			for {
				var page struct {
					Jobs          []client.Job `json:"jobs"`
					NextPageToken string       `json:"next_page_token"`
				}
				if err := api.Call(cmd.Context(), "GET", "/api/v1/jobs", query, nil, nil, &page); err != nil {
					return err
				}
				for _, j := range page.Jobs {
					if slices.ContainsFunc(j.Ports, func(p client.Port) bool { return p.Protocol == "udp" }) {
						rows = append(rows, &gatewayOf{Job: j.Name, Gateway: &client.Gateway{JobID: j.ID}})
					}
				}
				if page.NextPageToken == "" {
					break
				}
				query.Set("page_token", page.NextPageToken)
			}
			var asking errgroup.Group
			asking.SetLimit(gatewaysAtOnce)
			for _, r := range rows {
				asking.Go(func() error {
					if err := api.Call(cmd.Context(), "GET", "/api/v1/jobs/"+url.PathEscape(r.JobID)+"/gateway", nil, nil, nil, r.Gateway); err != nil {
						r.Error = err.Error()
					}
					return nil
				})
			}
			_ = asking.Wait() // each row holds its own error
			rows = slices.DeleteFunc(rows, func(r *gatewayOf) bool { return !r.Open && r.Error == "" })
			return e.print(map[string]any{"gateways": rows}, func(t *tableWriter) {
				t.row("JOB", "NAME", "PORT", "REACHED AT", "PEERS")
				for _, r := range rows {
					if r.Error != "" {
						t.row(r.JobID, r.Job, "-", r.Error, "-")
						continue
					}
					t.row(r.JobID, r.Job, r.Port, orDash(strings.Join(endpointsOf(r.Gateway), ", ")), len(r.Peers))
				}
			})
		},
	}
}

func (e *environment) gatewaysAddPeerCommand() *cobra.Command {
	var name, key string
	c := &cobra.Command{
		Use: "add-peer JOB", Short: "Let a public key in and print its WireGuard configuration file", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			g, err := e.gateway(cmd.Context(), "POST", args[0], "/peers", map[string]any{"name": name, "public_key": key})
			if err != nil {
				return err
			}
			for _, p := range g.Peers {
				if p.PublicKey == key {
					fmt.Fprint(e.out, wireGuardFile(g, p))
					return nil
				}
			}
			return fault.New(fault.Internal, "the gateway of job %s took peer %s and does not show it", g.JobID, name)
		},
	}
	c.Flags().StringVar(&key, "public-key", "", "the peer's WireGuard public key (wg pubkey)")
	c.Flags().StringVar(&name, "name", "laptop", "the peer's name: 1 to 32 of a-z, 0-9 and hyphens")
	return c
}

// endpointsOf are where a gateway is reached; a simulated cluster's own lead nowhere.
func endpointsOf(g *client.Gateway) []string {
	if g.Simulated {
		return []string{net.JoinHostPort("127.0.0.1", strconv.Itoa(int(g.Port)))}
	}
	return g.Endpoints
}

// wireGuardFile is what wg-quick and every WireGuard app read, but for the private key.
func wireGuardFile(g *client.Gateway, p client.GatewayPeer) string {
	var f strings.Builder
	fmt.Fprintf(&f, "# CosmicAC job %s, peer %s\n[Interface]\n# Yours; nobody else has it.\nPrivateKey = %s\nAddress = %s/32\nMTU = %d\n\n", g.JobID, p.Name, pasteKey, p.Address, g.MTU)
	fmt.Fprintf(&f, "[Peer]\nPublicKey = %s\n", g.PublicKey)
	if g.Simulated {
		f.WriteString("# Simulated: the VM is a process, reached on the simulator's own host alone.\n")
	}
	for i, at := range endpointsOf(g) {
		if i > 0 {
			f.WriteString("# or: ")
		}
		fmt.Fprintf(&f, "Endpoint = %s\n", at)
	}
	if len(endpointsOf(g)) == 0 {
		f.WriteString("# The cluster has not said yet where it is reached; cosmicac gateways get shows it later.\n# Endpoint = \n")
	}
	fmt.Fprintf(&f, "AllowedIPs = %s/32\nPersistentKeepalive = 25\n", g.Address)
	return f.String()
}

func (e *environment) gatewaysRemovePeerCommand() *cobra.Command {
	return &cobra.Command{
		Use: "remove-peer JOB NAME", Short: "Cut a peer, at once and for good", Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if _, err := e.gateway(cmd.Context(), "DELETE", args[0], "/peers/"+url.PathEscape(args[1]), nil); err != nil {
				return err
			}
			fmt.Fprintf(e.out, "removed %s: its connections are closed and its key is let in no more\n", args[1])
			return nil
		},
	}
}

func (e *environment) gatewaysDeleteCommand() *cobra.Command {
	return &cobra.Command{
		Use: "delete JOB", Short: "Cut every peer and forget the gateway, its key and its peers", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			g, err := e.gateway(cmd.Context(), "GET", args[0], "", nil)
			if err != nil {
				return err
			}
			if !g.Open {
				return noGateway(g, args[0])
			}
			if _, err := e.gateway(cmd.Context(), "DELETE", args[0], "", nil); err != nil {
				return err
			}
			fmt.Fprintf(e.out, "deleted the gateway of %s\n", args[0])
			return nil
		},
	}
}
