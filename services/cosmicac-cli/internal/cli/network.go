package cli

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/google/renameio/v2"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	"github.com/cosmicac/cosmicac/pkg/trust"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

// rosterLife is how long a roster is good; daemons warn 30 days before.
const rosterLife = 90 * 24 * time.Hour

func (e *environment) networkCommand() *cobra.Command {
	var operator string
	c := &cobra.Command{Use: "network", Short: "Who belongs to the network: found it, admit, revoke", Args: cobra.NoArgs, RunE: helpOnly}
	c.PersistentFlags().StringVar(&operator, "operator", "", "operator folder (default: COSMICAC_OPERATOR_DIR, /etc/cosmicac/operator)")
	c.AddCommand(e.networkInitCommand(&operator), e.networkRosterCommand(&operator), e.networkInfoCommand(&operator), e.networkTokenCommand(&operator),
		e.networkRequestsCommand(&operator), e.networkAdmitCommand(&operator), e.networkRevokeCommand(&operator))
	return c
}

func (e *environment) networkInitCommand(operator *string) *cobra.Command {
	var bootstraps []string
	c := &cobra.Command{
		Use:   "init NAME",
		Short: "Found a network: root keys, operator key, first roster",
		Example: `  cosmicac network init lab --bootstrap 12D3KooW...=/dns/boot1.example/tcp/4801,/dns/boot1.example/udp/4801/quic-v1
The key of a bootstrap stands in its status file after its first start.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			dir, err := operatorDirectory(*operator)
			if err != nil {
				return err
			}
			if _, err := os.Stat(filepath.Join(dir, "network")); err == nil {
				return fault.New(fault.Conflict, "%s already holds a network; name another folder with --operator", dir)
			}
			var members []*meshv1.Member
			var addresses []*meshv1.BootstrapAddress
			for i, b := range bootstraps {
				k, list, ok := strings.Cut(b, "=")
				if !ok {
					return usageError{fmt.Errorf("--bootstrap %q: must be KEY=ADDRESS[,ADDRESS]", b)}
				}
				id, err := identity.ParseID(k)
				if err != nil {
					return err
				}
				addresses = append(addresses, &meshv1.BootstrapAddress{Key: id.String(), Addresses: strings.Split(list, ",")})
				members = append(members, &meshv1.Member{Key: id.String(), Name: fmt.Sprintf("bootstrap-%d", i+1), Roles: []meshv1.Role{meshv1.Role_ROLE_BOOTSTRAP}, AdmittedAt: timestamppb.Now()})
			}
			if err := os.MkdirAll(dir, 0o700); err != nil {
				return fault.Wrap(fault.Invalid, err, "make operator folder %s", dir)
			}
			keys := map[string]*identity.Key{}
			for _, name := range []string{"root", "second-root", "operator"} {
				if keys[name], err = identity.LoadOrCreate(filepath.Join(dir, name+".key")); err != nil {
					return err
				}
			}
			members = append(members, &meshv1.Member{Key: keys["operator"].ID().String(), Name: "operator", Roles: []meshv1.Role{meshv1.Role_ROLE_OPERATOR}, AdmittedAt: timestamppb.Now()})
			network, err := trust.Create(filepath.Join(dir, "network"), args[0], keys["root"], keys["second-root"], members, addresses)
			if err != nil {
				return err
			}
			fmt.Fprintf(e.out, "founded network %s (%s) in %s\n", args[0], network.ID(), dir)
			fmt.Fprintf(e.out, "move %s to a safe place: it is the only way back if root.key is lost\n", filepath.Join(dir, "second-root.key"))
			return nil
		},
	}
	c.Flags().StringArrayVar(&bootstraps, "bootstrap", nil, "KEY=ADDRESS[,ADDRESS] of a mesh-bootstrap; may be repeated")
	return c
}

func (e *environment) networkRosterCommand(operator *string) *cobra.Command {
	return &cobra.Command{
		Use: "roster", Short: "Show who belongs to the network", Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			network, _, err := openNetwork(*operator)
			if err != nil {
				return err
			}
			r := network.Roster()
			return e.print(r, func(t *tableWriter) {
				t.row(fmt.Sprintf("version %d, good until %s", r.GetVersion(), r.GetNotAfter().AsTime().Local().Format(time.DateOnly)))
				t.row("NAME", "ROLES", "KEY", "ADMITTED", "SIGNS")
				for _, m := range r.GetMembers() {
					var roles, signs []string
					for _, x := range m.GetRoles() {
						roles = append(roles, roleText(x))
					}
					for _, s := range []struct {
						set  bool
						name string
					}{{m.GetSignsCertificates(), "certificates"}, {m.GetSignsGrants(), "grants"}, {m.GetSignsRosters(), "rosters"}} {
						if s.set {
							signs = append(signs, s.name)
						}
					}
					t.row(m.GetName(), strings.Join(roles, ","), m.GetKey(), m.GetAdmittedAt().AsTime().Local().Format(time.DateOnly), orDash(strings.Join(signs, ",")))
				}
			})
		},
	}
}

func openNetwork(flag string) (*trust.Network, string, error) {
	dir, err := operatorDirectory(flag)
	if err != nil {
		return nil, "", err
	}
	network, err := trust.OpenDirectory(filepath.Join(dir, "network"))
	return network, dir, err
}

func (e *environment) networkInfoCommand(operator *string) *cobra.Command {
	return &cobra.Command{
		Use: "info", Short: "Show where the network is found", Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			network, _, err := openNetwork(*operator)
			if err != nil {
				return err
			}
			info := network.Info()
			return e.print(info, func(t *tableWriter) {
				t.row("network", network.ID().String())
				t.row("sequence", info.GetSequence())
				for _, k := range network.RootKeys() {
					t.row("root key", k)
				}
				for _, b := range info.GetBootstraps() {
					t.row("bootstrap", b.GetKey()+" "+strings.Join(b.GetAddresses(), " "))
				}
			})
		},
	}
}

// tokenFile remembers the secrets of tokens made here, so that requests can be
// told to hold one.
const tokenFile = "join-tokens"

func (e *environment) networkTokenCommand(operator *string) *cobra.Command {
	return &cobra.Command{
		Use: "token", Short: "Make a token for `cosmicac join` on a new host", Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			network, dir, err := openNetwork(*operator)
			if err != nil {
				return err
			}
			secret := make([]byte, 32)
			if _, err := rand.Read(secret); err != nil {
				return err
			}
			token := trust.EncodeJoinToken(&meshv1.JoinToken{NetworkId: network.Info().GetNetworkId(), RootKeys: network.RootKeys(),
				Bootstraps: network.Info().GetBootstraps(), MinimumRosterVersion: network.Roster().GetVersion(), Secret: secret})
			path := filepath.Join(dir, tokenFile)
			old, err := os.ReadFile(path)
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				return fault.Wrap(fault.Invalid, err, "read %s", path)
			}
			if err := renameio.WriteFile(path, append(old, []byte(token+"\n")...), 0o600); err != nil {
				return fault.Wrap(fault.Invalid, err, "write %s", path)
			}
			fmt.Fprintln(e.out, token)
			return nil
		},
	}
}

// tokens reads the tokens made here.
func tokens(dir string) ([]*meshv1.JoinToken, error) {
	raw, err := os.ReadFile(filepath.Join(dir, tokenFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fault.Wrap(fault.Invalid, err, "read %s", tokenFile)
	}
	var out []*meshv1.JoinToken
	for _, line := range strings.Fields(string(raw)) {
		t, err := trust.DecodeJoinToken(line)
		if err != nil {
			return nil, err
		}
		out = append(out, t)
	}
	return out, nil
}

// eachBootstrap calls every bootstrap and returns the last error if none answered.
func eachBootstrap(ctx context.Context, node *mesh.Node, f func(ctx context.Context, name string, conn *bootstrapClient) error) error {
	var last error
	answered := 0
	for _, m := range node.Network().ByRole(meshv1.Role_ROLE_BOOTSTRAP) {
		p, err := peerOf(m)
		if err != nil {
			return err
		}
		call, cancel := context.WithTimeout(ctx, 15*time.Second)
		err = f(call, m.GetName(), &bootstrapClient{meshv1.NewNodeClient(node.Client(p)), meshv1.NewJoiningClient(node.Client(p))})
		cancel()
		if err != nil {
			last = fault.Wrap(fault.KindOf(err), err, "bootstrap %s", m.GetName())
			continue
		}
		answered++
	}
	if answered == 0 && last == nil {
		last = fault.New(fault.FailedPrecondition, "the roster has no bootstrap")
	}
	if answered > 0 {
		return nil
	}
	return last
}

type bootstrapClient struct {
	node    meshv1.NodeClient
	joining meshv1.JoiningClient
}

func (e *environment) networkRequestsCommand(operator *string) *cobra.Command {
	return &cobra.Command{
		Use: "requests", Short: "Hosts that ask to join", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return withOperator(cmd.Context(), *operator, func(node *mesh.Node, dir string) error {
				known, err := tokens(dir)
				if err != nil {
					return err
				}
				type request struct {
					Key       string    `json:"key"`
					Name      string    `json:"name"`
					Roles     []string  `json:"roles"`
					Since     time.Time `json:"since"`
					Address   string    `json:"address"`
					KnowToken bool      `json:"knows_a_token"`
				}
				seen := map[string]bool{}
				var all []request
				err = eachBootstrap(cmd.Context(), node, func(ctx context.Context, _ string, b *bootstrapClient) error {
					r, err := b.joining.ListJoinRequests(ctx, &meshv1.ListJoinRequestsRequest{})
					if err != nil {
						return err
					}
					for _, q := range r.GetRequests() {
						if seen[q.GetKey()] {
							continue
						}
						seen[q.GetKey()] = true
						item := request{Key: q.GetKey(), Name: q.GetName(), Since: q.GetFirstSeenAt().AsTime(), Address: q.GetRemoteAddress()}
						for _, role := range q.GetRoles() {
							item.Roles = append(item.Roles, roleText(role))
						}
						if id, err := identity.ParseID(q.GetKey()); err == nil {
							item.KnowToken = slices.ContainsFunc(known, func(t *meshv1.JoinToken) bool { return trust.CheckJoinProof(t.GetSecret(), id, q.GetProof()) })
						}
						all = append(all, item)
					}
					return nil
				})
				if err != nil {
					return err
				}
				return e.print(map[string]any{"requests": all}, func(t *tableWriter) {
					t.row("NAME", "ROLES", "KEY", "FROM", "SINCE", "HOLDS A TOKEN OF YOURS")
					for _, q := range all {
						t.row(q.Name, strings.Join(q.Roles, ","), q.Key, q.Address, age(q.Since, time.Now()), q.KnowToken)
					}
				})
			})
		},
	}
}

func (e *environment) networkAdmitCommand(operator *string) *cobra.Command {
	var name, rootKey string
	var roles []string
	c := &cobra.Command{
		Use: "admit KEY", Short: "Put a key into the roster", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			id, err := identity.ParseID(args[0])
			if err != nil {
				return err
			}
			m := &meshv1.Member{Key: id.String(), Name: name, AdmittedAt: timestamppb.Now()}
			for _, r := range roles {
				role, err := parseRole(r)
				if err != nil {
					return err
				}
				m.Roles = append(m.Roles, role)
				m.SignsCertificates = m.SignsCertificates || role == meshv1.Role_ROLE_ORK
				m.SignsGrants = m.SignsGrants || role == meshv1.Role_ROLE_APP_NODE
			}
			return e.changeRoster(cmd.Context(), *operator, rootKey, func(r *meshv1.Roster) error {
				for _, old := range r.GetMembers() {
					if old.GetKey() == m.GetKey() {
						return fault.New(fault.Conflict, "this key is in the roster already, as %s", old.GetName())
					}
				}
				r.Members = append(r.Members, m)
				return nil
			}, "admitted "+name)
		},
	}
	c.Flags().StringVar(&name, "name", "", "a unique name, DNS label")
	c.Flags().StringSliceVar(&roles, "roles", nil, "what it may be: bootstrap, app-node, ork, worker, proxy, monitor, operator")
	c.Flags().StringVar(&rootKey, "root-key", "", "root key file (default: root.key of the operator folder)")
	return c
}

func (e *environment) networkRevokeCommand(operator *string) *cobra.Command {
	var rootKey string
	c := &cobra.Command{
		Use: "revoke NAME|KEY", Short: "Take a key out of the roster; its links are closed at once", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return e.changeRoster(cmd.Context(), *operator, rootKey, func(r *meshv1.Roster) error {
				before := len(r.Members)
				r.Members = slices.DeleteFunc(r.Members, func(m *meshv1.Member) bool { return m.GetName() == args[0] || m.GetKey() == args[0] })
				if len(r.Members) == before {
					return fault.New(fault.NotFound, "no member is called %q; see cosmicac network roster", args[0])
				}
				return nil
			}, "revoked "+args[0])
		},
	}
	c.Flags().StringVar(&rootKey, "root-key", "", "root key file (default: root.key of the operator folder)")
	return c
}

// changeRoster signs the next version with a root key, keeps it, and hands it
// to the bootstraps, which spread it.
func (e *environment) changeRoster(ctx context.Context, flag, rootKey string, change func(*meshv1.Roster) error, done string) error {
	return withOperator(ctx, flag, func(node *mesh.Node, dir string) error {
		if rootKey == "" {
			rootKey = filepath.Join(dir, "root.key")
		}
		root, err := identity.Load(rootKey)
		if err != nil {
			return err
		}
		network := node.Network()
		// The newest version may have been made on another machine.
		_ = eachBootstrap(ctx, node, func(ctx context.Context, _ string, b *bootstrapClient) error {
			r, err := b.node.GetNetwork(ctx, &meshv1.GetNetworkRequest{})
			if err != nil {
				return err
			}
			_, err = network.Adopt(r.GetRosterEnvelope(), r.GetNetworkInfoEnvelope())
			return err
		})
		roster := proto.CloneOf(network.Roster())
		if err := change(roster); err != nil {
			return err
		}
		now := time.Now()
		roster.Version++
		roster.IssuedAt, roster.NotAfter = timestamppb.New(now), timestamppb.New(now.Add(rosterLife))
		envelope, err := trust.SealRoster(root, roster)
		if err != nil {
			return err
		}
		if _, err := network.Adopt(envelope, nil); err != nil {
			return err
		}
		fmt.Fprintf(e.out, "%s: roster version %d\n", done, roster.GetVersion())
		return eachBootstrap(ctx, node, func(ctx context.Context, name string, b *bootstrapClient) error {
			r, err := b.node.PutNetwork(ctx, &meshv1.PutNetworkRequest{RosterEnvelope: envelope})
			if err != nil {
				fmt.Fprintf(e.err, "%s did not take it yet: %v\n", name, err)
				return err
			}
			fmt.Fprintf(e.out, "%s holds version %d\n", name, r.GetRosterVersion())
			return nil
		})
	})
}

func (e *environment) joinCommand() *cobra.Command {
	var state, name string
	var roles []string
	var wait time.Duration
	c := &cobra.Command{
		Use:     "join TOKEN|-",
		Short:   "On a new host: ask the network to admit a daemon's key, and wait for it",
		Example: "  cosmicac join - --state /var/lib/cosmicac/wrk-ork --name ork-2 --roles ork < token",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			text := args[0]
			if text == "-" {
				var err error
				if text, err = e.readSecret("token"); err != nil {
					return err
				}
			}
			token, err := trust.DecodeJoinToken(text)
			if err != nil {
				return err
			}
			var wanted []meshv1.Role
			for _, r := range roles {
				role, err := parseRole(r)
				if err != nil {
					return err
				}
				wanted = append(wanted, role)
			}
			if err := os.MkdirAll(state, 0o700); err != nil {
				return fault.Wrap(fault.Invalid, err, "make state folder %s", state)
			}
			key, err := identity.LoadOrCreate(filepath.Join(state, "identity.key"))
			if err != nil {
				return err
			}
			network, err := trust.Join(filepath.Join(state, "network"), token)
			if err != nil {
				return err
			}
			fmt.Fprintf(e.out, "this host's key is %s\nadmit it with: cosmicac network admit %s --name %s --roles %s\n", key.ID(), key.ID(), name, strings.Join(roles, ","))
			ctx, cancel := context.WithTimeout(cmd.Context(), wait)
			defer cancel()
			node, err := mesh.New(ctx, mesh.Options{Key: key, Network: network, Credential: mesh.Guest(), Bootstraps: token.GetBootstraps()})
			if err != nil {
				return err
			}
			if err := node.Start(ctx); err != nil {
				return err
			}
			defer func() { _ = node.Close(context.WithoutCancel(ctx)) }()
			request := &meshv1.RequestJoinRequest{Name: name, Roles: wanted, Proof: trust.JoinProof(token.GetSecret(), key.ID())}
			var last error
			for {
				for _, b := range token.GetBootstraps() {
					p, err := identity.ParseID(b.GetKey())
					if err != nil {
						return err
					}
					r, err := meshv1.NewJoiningClient(node.Client(p, b.GetAddresses()...)).RequestJoin(ctx, request)
					if err != nil {
						last = err
						continue
					}
					last = nil
					if r.GetAdmitted() {
						if err := network.AdoptGenesis(r.GetGenesisEnvelope()); err != nil {
							return err
						}
						if _, err := network.Adopt(r.GetRosterEnvelope(), r.GetNetworkInfoEnvelope()); err != nil {
							return err
						}
						fmt.Fprintf(e.out, "admitted by roster version %d; the daemon can start\n", network.Roster().GetVersion())
						return nil
					}
				}
				select {
				case <-ctx.Done():
					if last != nil {
						return fault.Wrap(fault.KindOf(last), last, "no bootstrap took the request")
					}
					return fault.New(fault.Timeout, "not admitted within %s; the request stands, run join again later", wait)
				case <-time.After(2 * time.Second):
				}
			}
		},
	}
	f := c.Flags()
	f.StringVar(&state, "state", "", "the daemon's state folder")
	f.StringVar(&name, "name", "", "a unique name for it, DNS label")
	f.StringSliceVar(&roles, "roles", nil, "the roles it asks for")
	f.DurationVar(&wait, "wait", 30*time.Minute, "how long to wait for admission")
	_ = c.MarkFlagRequired("state")
	_ = c.MarkFlagRequired("name")
	_ = c.MarkFlagRequired("roles")
	return c
}
