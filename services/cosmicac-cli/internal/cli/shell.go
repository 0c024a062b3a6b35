package cli

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/cosmicac/cosmicac/pkg/daemon"
	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	"github.com/cosmicac/cosmicac/pkg/ssh"
	"github.com/cosmicac/cosmicac/pkg/trust"
	"github.com/cosmicac/cosmicac/services/cosmicac-cli/internal/client"
)

// agentLink is a raw stream to one agent's SSH server, straight over the mesh.
type agentLink struct {
	conn  net.Conn
	grant client.Grant
	node  *mesh.Node
}

func (l *agentLink) close(ctx context.Context) {
	l.conn.Close()
	_ = l.node.Close(context.WithoutCancel(ctx))
}

// reach asks the control plane for a grant and then dials the agent itself;
// from there on the control plane is not in the path and may go down.
func (e *environment) reach(ctx context.Context, nameOrID string, rights ...ssh.Right) (*agentLink, error) {
	s, err := e.settings()
	if err != nil {
		return nil, err
	}
	api, err := client.New(s.URL, s.Token)
	if err != nil {
		return nil, err
	}
	id, err := e.resolve(ctx, api, nameOrID)
	if err != nil {
		return nil, err
	}
	// A key of its own for each connection: many sessions from one workstation
	// are many clients to the agent, and nothing lasting lies on its disk.
	key, err := identity.New(rand.Reader)
	if err != nil {
		return nil, err
	}
	network, err := fetchNetwork(ctx, api)
	if err != nil {
		return nil, err
	}
	l := &agentLink{}
	body := map[string]any{"client_key": key.ID().String(), "rights": rights}
	if err := api.Call(ctx, "POST", "/api/v1/jobs/"+url.PathEscape(id)+"/grants", nil, nil, body, &l.grant); err != nil {
		return nil, err
	}
	envelope, err := base64.StdEncoding.DecodeString(l.grant.Grant)
	if err != nil {
		return nil, fault.Wrap(fault.Internal, err, "the control plane's grant is not base64")
	}
	agent, err := identity.ParseID(l.grant.AgentKey)
	if err != nil {
		return nil, err
	}
	l.node, err = mesh.New(ctx, mesh.Options{Key: key, Network: network, Credential: mesh.Grant(envelope), Version: daemon.Version})
	if err != nil {
		return nil, err
	}
	if err := l.node.Start(ctx); err != nil {
		return nil, err
	}
	l.conn, err = l.node.OpenStream(ctx, agent, "ssh", l.grant.AgentAddresses...)
	if err != nil {
		_ = l.node.Close(context.WithoutCancel(ctx))
		return nil, err
	}
	return l, nil
}

// fetchNetwork learns the network from the control plane that the user trusts.
func fetchNetwork(ctx context.Context, api *client.Client) (*trust.Network, error) {
	var n client.Network
	if err := api.Call(ctx, "GET", "/api/v1/network", nil, nil, nil, &n); err != nil {
		return nil, err
	}
	raw, err := hex.DecodeString(n.NetworkID)
	if err != nil {
		return nil, fault.Wrap(fault.Internal, err, "the control plane's network id is not hex")
	}
	network, err := trust.NewMemory(raw, n.RootKeys)
	if err != nil {
		return nil, err
	}
	roster, err := base64.StdEncoding.DecodeString(n.Roster)
	if err != nil {
		return nil, fault.Wrap(fault.Internal, err, "the control plane's roster is not base64")
	}
	info, err := base64.StdEncoding.DecodeString(n.NetworkInfo)
	if err != nil {
		return nil, fault.Wrap(fault.Internal, err, "the control plane's network info is not base64")
	}
	_, err = network.Adopt(roster, info)
	return network, err
}

func (e *environment) openSSH(ctx context.Context, nameOrID, user string, rights ...ssh.Right) (*ssh.Client, func(), error) {
	l, err := e.reach(ctx, nameOrID, rights...)
	if err != nil {
		return nil, nil, err
	}
	c, err := ssh.Dial(ctx, l.conn, l.grant.SSHHostKey, user)
	if err != nil {
		l.close(ctx)
		return nil, nil, err
	}
	return c, func() {
		c.Close()
		l.close(ctx)
	}, nil
}

func (e *environment) jobsShellCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "shell JOB",
		Short: "A shell in a job's VM, straight to its agent, end to end encrypted",
		Long: "A shell in a job's VM, straight to its agent over the mesh, end to end encrypted.\n" +
			"The control plane only gives the grant. At the start of a line, ~. gives up a dead session.",
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, done, err := e.openSSH(cmd.Context(), args[0], "", ssh.RightShell)
			if err != nil {
				return err
			}
			defer done()
			input, ok := e.in.(*os.File)
			if !ok {
				return fault.New(fault.Invalid, "jobs shell reads a terminal or a pipe")
			}
			status, err := c.Attach(cmd.Context(), ssh.Terminal{Input: input, Output: e.out, Term: os.Getenv("TERM"), Environment: locale()})
			return ended(status, err)
		},
	}
}

func locale() map[string]string {
	env := map[string]string{}
	for _, kv := range os.Environ() {
		if k, v, _ := strings.Cut(kv, "="); k == "LANG" || strings.HasPrefix(k, "LC_") {
			env[k] = v
		}
	}
	return env
}

// ended turns a remote status into this process's own.
func ended(status int, err error) error {
	if err != nil && (status == 0 || status == 255) {
		return err
	}
	if status != 0 {
		return exitStatus(status)
	}
	return nil
}

func (e *environment) jobsExecCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "exec JOB -- COMMAND [ARGUMENT...]",
		Short: "Run a command in a job's VM; its exit status is this one's",
		Args:  cobra.MinimumNArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, done, err := e.openSSH(cmd.Context(), args[0], "", ssh.RightExec)
			if err != nil {
				return err
			}
			defer done()
			line := make([]string, 0, len(args)-1)
			for _, a := range args[1:] {
				line = append(line, shellQuote(a))
			}
			status, err := c.Exec(cmd.Context(), ssh.Command{Line: strings.Join(line, " "), Environment: locale(), Input: e.in, Output: e.out, Errors: e.err})
			return ended(status, err)
		},
	}
}

func shellQuote(s string) string {
	if s != "" && strings.IndexFunc(s, func(r rune) bool {
		return !(r == '-' || r == '_' || r == '.' || r == '/' || r == ':' || r == '=' || r == ',' || r == '@' || r == '+' ||
			r >= '0' && r <= '9' || r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z')
	}) < 0 {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

// sshProxyCommand joins standard input and output with the agent's SSH server,
// for OpenSSH's ProxyCommand; rsync, scp and editors work through it.
func (e *environment) sshProxyCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "ssh-proxy JOB",
		Short:   "Join standard input and output with a job's SSH server (for OpenSSH's ProxyCommand)",
		Example: "  ssh -o ProxyCommand='cosmicac jobs ssh-proxy lab' lab",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			l, err := e.reach(cmd.Context(), args[0], ssh.Rights()...)
			if err != nil {
				return err
			}
			defer l.close(cmd.Context())
			fmt.Fprintf(e.err, "cosmicac: host key %s\r\n", l.grant.SSHHostKey)
			// Ends with the process, or at the first byte after the stream ended.
			go func() {
				_, _ = io.Copy(l.conn, e.in)
				if half, ok := l.conn.(interface{ CloseWrite() error }); ok {
					_ = half.CloseWrite()
				}
			}()
			_, err = io.Copy(e.out, l.conn)
			return err
		},
	}
}
