package cli

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/google/renameio/v2"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/trust"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

func (e *environment) networkCommand() *cobra.Command {
	var operator string
	c := &cobra.Command{Use: "network", Short: "Who belongs to the network: found it, admit, revoke, renew", Args: cobra.NoArgs, RunE: helpOnly}
	c.PersistentFlags().StringVar(&operator, "operator", "", "operator folder (default: COSMICAC_OPERATOR_DIR, /etc/cosmicac/operator)")
	c.AddCommand(e.networkInitCommand(&operator), e.networkRosterCommand(&operator), e.networkInfoCommand(&operator),
		e.networkTokenCommand(&operator), e.networkRequestsCommand(&operator),
		e.networkAdmitCommand(&operator), e.networkRevokeCommand(&operator), e.networkRenewCommand(&operator), e.networkDelegateCommand(&operator),
		e.networkRotateRootCommand(&operator), e.networkBootstrapsCommand(&operator),
		e.networkSignCommand(&operator), e.networkApplyCommand(&operator), e.networkExportCommand(&operator), e.networkRestoreCommand(&operator))
	return c
}

func (e *environment) networkInitCommand(operator *string) *cobra.Command {
	var bootstraps []string
	c := &cobra.Command{
		Use:   "init NAME",
		Short: "Found a network: root keys, operator key, first roster",
		Example: `  cosmicac network init lab --bootstrap 12D3KooW...=/dns/boot1.example/tcp/4801,/dns/boot1.example/udp/4801/quic-v1
A mesh-bootstrap without a network prints its key when it is started.`,
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
				t.row(fmt.Sprintf("version %d, %s", r.GetVersion(), goodUntil(r.GetNotAfter().AsTime(), time.Now())))
				t.row("NAME", "ROLES", "KEY", "ADMITTED", "SIGNS")
				for _, m := range r.GetMembers() {
					t.row(m.GetName(), rolesText(m.GetRoles()), m.GetKey(), m.GetAdmittedAt().AsTime().Local().Format(time.DateOnly), orDash(strings.Join(powersOf(m), ",")))
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
	if err == nil && (network.Roster() == nil || network.Info() == nil) {
		err = fault.New(fault.FailedPrecondition, "%s holds no roster or no network info: restore it with `cosmicac network restore`", filepath.Join(dir, "network"))
	}
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

// tokenFile remembers the tokens made here, so that requests can be told to hold
// one; the newest maxTokens of them.
const (
	tokenFile = "join-tokens"
	maxTokens = 256
)

func (e *environment) networkTokenCommand(operator *string) *cobra.Command {
	var name, rootKey string
	var roles []string
	var approve bool
	var wait time.Duration
	c := &cobra.Command{
		Use:   "token",
		Short: "Make a token for `cosmicac join` on a new host",
		Long: `Make a token for "cosmicac join" on a new host. With --name and --roles the host need
not name them. A token asks; it admits nobody, unless --approve is given: then the
command stays and admits the first host that shows the token.`,
		Example: "  cosmicac network token --name worker-in --roles worker",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if approve && (name == "" || len(roles) == 0) {
				return usageError{errors.New("--approve admits without asking, so --name and --roles must say what")}
			}
			network, dir, err := openNetwork(*operator)
			if err != nil {
				return err
			}
			wanted, err := parseRoles(roles)
			if err != nil {
				return err
			}
			secret := make([]byte, 32)
			if _, err := rand.Read(secret); err != nil {
				return fault.Wrap(fault.Internal, err, "make a token")
			}
			token := &meshv1.JoinToken{NetworkId: network.Info().GetNetworkId(), RootKeys: network.RootKeys(), Bootstraps: network.Info().GetBootstraps(),
				MinimumRosterVersion: network.Roster().GetVersion(), Secret: secret, Name: name, Roles: wanted, Approved: approve}
			text := trust.EncodeJoinToken(token)
			if _, err := trust.DecodeJoinToken(text); err != nil {
				return err
			}
			if err := keepToken(dir, text); err != nil {
				return err
			}
			fmt.Fprintln(e.out, text)
			if len(token.GetBootstraps()) == 0 {
				fmt.Fprintln(e.err, "the network info names no bootstrap, so nobody can join with it: cosmicac network bootstraps set")
			}
			if !approve {
				return nil
			}
			fmt.Fprintf(e.err, "the first host that shows this token within %s is admitted as %s (%s); end this to end that\n", wait, name, strings.Join(roles, ","))
			return e.approve(cmd.Context(), *operator, rootKey, token, wait)
		},
	}
	f := c.Flags()
	f.StringVar(&name, "name", "", "the name that the host is to have, DNS label")
	f.StringSliceVar(&roles, "roles", nil, "what the host is to be")
	f.BoolVar(&approve, "approve", false, "stay, and admit the first host that shows the token")
	f.DurationVar(&wait, "wait", 30*time.Minute, "how long to stay with --approve")
	rootKeyFlag(c, &rootKey)
	return c
}

func keepToken(dir, text string) error {
	path := filepath.Join(dir, tokenFile)
	old, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fault.Wrap(fault.Unavailable, err, "read the tokens made here")
	}
	lines := append(strings.Fields(string(old)), text)
	lines = lines[max(0, len(lines)-maxTokens):]
	if err := renameio.WriteFile(path, []byte(strings.Join(lines, "\n")+"\n"), 0o600); err != nil {
		return fault.Wrap(fault.Unavailable, err, "keep the token in %s", path)
	}
	return nil
}

// tokens reads the tokens made here.
func tokens(dir string) ([]*meshv1.JoinToken, error) {
	raw, err := os.ReadFile(filepath.Join(dir, tokenFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fault.Wrap(fault.Unavailable, err, "read the tokens made here")
	}
	var out []*meshv1.JoinToken
	for i, line := range strings.Fields(string(raw)) {
		t, err := trust.DecodeJoinToken(line)
		if err != nil {
			return nil, fault.Wrap(fault.Invalid, err, "line %d of %s is damaged: remove it, that token is worth nothing then", i+1, filepath.Join(dir, tokenFile))
		}
		out = append(out, t)
	}
	return out, nil
}
