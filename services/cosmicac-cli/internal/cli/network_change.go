package cli

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
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

// signing is how a command that changes the network gets its signature.
type signing struct{ operator, rootKey, request string }

func (e *environment) changing(c *cobra.Command, operator *string, plan func(s *session, cmd *cobra.Command, args []string, r *meshv1.ChangeRequest) error, rootOnly bool) *cobra.Command {
	var how signing
	rootKeyFlag(c, &how.rootKey)
	c.Flags().StringVar(&how.request, "request", "", "sign nothing: write what is asked for to this new file, for `cosmicac network sign`")
	c.RunE = func(cmd *cobra.Command, args []string) error {
		how.operator = *operator
		return e.session(cmd.Context(), how.operator, func(s *session) error {
			return s.change(cmd.Context(), how, rootOnly, func(r *meshv1.ChangeRequest) error { return plan(s, cmd, args, r) })
		})
	}
	return c
}

// change builds a request on the newest records, then signs, keeps and hands out
// what it asks for, or writes the request to a file.
func (s *session) change(ctx context.Context, how signing, rootOnly bool, plan func(*meshv1.ChangeRequest) error) error {
	s.catchUp(ctx)
	r := s.network.NewChangeRequest()
	if err := plan(r); err != nil {
		return err
	}
	now := time.Now()
	if how.request != "" {
		text, err := trust.EncodeFile(r)
		if err != nil {
			return err
		}
		if err := writeNew(how.request, text, 0o644); err != nil {
			return err
		}
		s.show(describe(r, s.network, now.Add(trust.RosterLife), now))
		fmt.Fprintf(s.out, "nothing is signed yet. Take %s to where a root key is, then: cosmicac network sign %s\n", how.request, filepath.Base(how.request))
		return nil
	}
	key, path, err := signer(s.dir, how.rootKey, s.network, rootOnly)
	if err != nil {
		return err
	}
	signed, err := s.sign(r, key, s.dir, now)
	if err != nil {
		if !s.network.IsRoot(key.ID()) {
			err = fault.Wrap(fault.KindOf(err), err, "%s is no root key and cannot sign this; name one with --root-key, or use --request FILE", path)
		}
		return err
	}
	until := s.network.RosterNotAfter()
	if len(signed.GetRosterEnvelope()) > 0 {
		roster, err := trust.OpenRoster(signed.GetRosterEnvelope())
		if err != nil {
			return err
		}
		until = roster.GetNotAfter().AsTime()
	}
	s.show(describe(r, s.network, until, now))
	fmt.Fprintf(s.out, "signed with %s\n", path)
	return s.apply(ctx, signed)
}

func (e *environment) show(lines []string) {
	for _, line := range lines {
		fmt.Fprintf(e.out, "  %s\n", line)
	}
}

// sign signs a request; the new root keys of a rotation are made and kept in dir
// before anything that names them leaves this process.
func (e *environment) sign(r *meshv1.ChangeRequest, key *identity.Key, dir string, now time.Time) (*meshv1.NetworkRecords, error) {
	if !r.GetRotateRootKeys() {
		return trust.SignChange(r, key, nil, now)
	}
	fresh := make([]*identity.Key, 2)
	for i := range fresh {
		var err error
		if fresh[i], err = identity.New(rand.Reader); err != nil {
			return nil, err
		}
	}
	signed, err := trust.SignChange(r, key, fresh, now)
	if err != nil {
		return nil, err
	}
	first, second := freeKeyFiles(dir)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fault.Wrap(fault.Unavailable, err, "make operator folder %s", dir)
	}
	for i, path := range []string{first, second} {
		if err := identity.Save(path, fresh[i]); err != nil {
			return nil, err
		}
	}
	fmt.Fprintf(e.out, "new root key %s in %s\nnew second root key %s\nmove %s to a safe place: it is the only way back if the first is lost\n", fresh[0], first, fresh[1], second)
	return signed, nil
}

// freeKeyFiles are the first names with a number that no file has, as root-2.key:
// keys in force are found by what they hold, so none is ever overwritten or moved.
func freeKeyFiles(dir string) (first, second string) {
	for n := 2; ; n++ {
		first, second = filepath.Join(dir, fmt.Sprintf("root-%d.key", n)), filepath.Join(dir, fmt.Sprintf("second-root-%d.key", n))
		_, err1 := os.Lstat(first)
		_, err2 := os.Lstat(second)
		if errors.Is(err1, os.ErrNotExist) && errors.Is(err2, os.ErrNotExist) {
			return first, second
		}
	}
}

// apply keeps a signed change and hands it out.
func (s *session) apply(ctx context.Context, signed *meshv1.NetworkRecords) error {
	places := contentOf(s.network).bootstraps
	changed, err := s.network.Apply(signed)
	if err != nil && !changed {
		return err
	}
	if err != nil {
		s.warn("it is in force here, but could not be kept: %v", err) // others keep it
	}
	fmt.Fprintf(s.out, "roster version %d, network info %d\n", s.network.Roster().GetVersion(), s.network.Info().GetSequence())
	moved := !slices.EqualFunc(places, s.network.Info().GetBootstraps(), func(a, b *meshv1.BootstrapAddress) bool {
		return a.GetKey() == b.GetKey() && slices.Equal(a.GetAddresses(), b.GetAddresses())
	})
	return s.handOut(ctx, moved)
}

// writeNew writes a file that was not there, whole or not at all.
func writeNew(path string, data []byte, mode os.FileMode) error {
	if _, err := os.Lstat(path); err == nil {
		return fault.New(fault.Conflict, "%s exists already and is not overwritten", path)
	}
	if err := renameio.WriteFile(path, data, mode, renameio.IgnoreUmask()); err != nil {
		return fault.Wrap(fault.Unavailable, err, "write %s", path)
	}
	return nil
}

func (e *environment) networkRenewCommand(operator *string) *cobra.Command {
	return e.changing(&cobra.Command{
		Use: "renew", Short: "Sign the roster anew for another 90 days", Args: cobra.NoArgs,
	}, operator, func(_ *session, _ *cobra.Command, _ []string, r *meshv1.ChangeRequest) error {
		r.SignRoster = true
		return nil
	}, true) // an online signer cannot outlive its base
}

func (e *environment) networkRevokeCommand(operator *string) *cobra.Command {
	return e.changing(&cobra.Command{
		Use: "revoke NAME|KEY", Short: "Take a key out of the roster; its links are closed at once", Args: cobra.ExactArgs(1),
	}, operator, func(_ *session, _ *cobra.Command, args []string, r *meshv1.ChangeRequest) error {
		m, err := memberOf(r, args[0])
		if err != nil {
			return err
		}
		r.SignRoster = true
		r.Members = slices.DeleteFunc(r.Members, func(o *meshv1.Member) bool { return o == m })
		// Nobody should look for the network at who was thrown out of it.
		before := len(r.Bootstraps)
		r.Bootstraps = slices.DeleteFunc(r.Bootstraps, func(b *meshv1.BootstrapAddress) bool { return b.GetKey() == m.GetKey() })
		r.SignNetworkInfo = len(r.Bootstraps) != before
		return nil
	}, false)
}

// memberOf finds a member of a request by name, peer id or hex key.
func memberOf(r *meshv1.ChangeRequest, what string) (*meshv1.Member, error) {
	key := what
	if p, err := identity.ParseID(what); err == nil {
		key = p.String()
	}
	for _, m := range r.GetMembers() {
		if m.GetName() == what || m.GetKey() == key {
			return m, nil
		}
	}
	return nil, fault.New(fault.NotFound, "no member is called %q; see cosmicac network roster", what)
}

func (e *environment) networkDelegateCommand(operator *string) *cobra.Command {
	var give, take []string
	c := &cobra.Command{
		Use:   "delegate NAME|KEY",
		Short: "Let a member sign rosters, certificates or grants, or take that back",
		Long: `Let a member sign rosters (admit and revoke, and move bootstraps, without a root key),
certificates (let agents in) or grants (let users reach agents), or take that back.
Only a root key signs this.`,
		Example: "  cosmicac network delegate operator --give rosters",
		Args:    cobra.ExactArgs(1),
	}
	c.Flags().StringSliceVar(&give, "give", nil, "what it may sign from now on: rosters, certificates, grants")
	c.Flags().StringSliceVar(&take, "take", nil, "what it may no longer sign")
	return e.changing(c, operator, func(_ *session, _ *cobra.Command, args []string, r *meshv1.ChangeRequest) error {
		if len(give)+len(take) == 0 {
			return usageError{errors.New("give or take what? name it with --give or --take")}
		}
		m, err := memberOf(r, args[0])
		if err != nil {
			return err
		}
		before := powersOf(m)
		for _, list := range []struct {
			names []string
			value bool
		}{{give, true}, {take, false}} {
			for _, name := range list.names {
				i := slices.IndexFunc(powers, func(p power) bool { return p.name == name })
				if i < 0 {
					return usageError{fmt.Errorf("%q is no power; those are rosters, certificates and grants", name)}
				}
				*powers[i].of(m) = list.value
			}
		}
		if slices.Equal(before, powersOf(m)) {
			return fault.New(fault.Conflict, "that changes nothing: %s may sign %s", m.GetName(), orDash(strings.Join(before, ", ")))
		}
		r.SignRoster = true
		return nil
	}, true)
}

func (e *environment) networkRotateRootCommand(operator *string) *cobra.Command {
	return e.changing(&cobra.Command{
		Use:   "rotate-root",
		Short: "Make new root keys; the present ones lose all power",
		Long: `Make two new root keys, signed by one in force; all present ones lose all power. Every
daemon and agent follows by itself. The new keys lie in the operator folder as
root-2.key and second-root-2.key. If root.key is lost, sign with the second:

  cosmicac network rotate-root --root-key /media/safe/second-root.key`,
		Args: cobra.NoArgs,
	}, operator, func(_ *session, _ *cobra.Command, _ []string, r *meshv1.ChangeRequest) error {
		r.RotateRootKeys = true
		return nil
	}, true)
}

func (e *environment) networkBootstrapsCommand(operator *string) *cobra.Command {
	c := &cobra.Command{
		Use: "bootstraps", Short: "Show where the network is found, and move that", Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			network, _, err := openNetwork(*operator)
			if err != nil {
				return err
			}
			type place struct {
				Name      string   `json:"name"`
				Key       string   `json:"key"`
				Addresses []string `json:"addresses"`
			}
			var all []place
			for _, b := range network.Info().GetBootstraps() {
				p := place{Key: b.GetKey(), Addresses: b.GetAddresses()}
				for _, m := range network.Roster().GetMembers() {
					if m.GetKey() == b.GetKey() {
						p.Name = m.GetName()
					}
				}
				all = append(all, p)
			}
			return e.print(map[string]any{"bootstraps": all}, func(t *tableWriter) {
				t.row("NAME", "KEY", "ADDRESSES")
				for _, p := range all {
					t.row(orDash(p.Name), p.Key, strings.Join(p.Addresses, " "))
				}
			})
		},
	}
	set := e.changing(&cobra.Command{
		Use:     "set NAME|KEY ADDRESS...",
		Short:   "Tell everyone that a bootstrap is at these addresses now",
		Example: "  cosmicac network bootstraps set bootstrap-1 /dns/boot1.example/tcp/4801 /dns/boot1.example/udp/4801/quic-v1",
		Args:    cobra.MinimumNArgs(2),
	}, operator, func(_ *session, _ *cobra.Command, args []string, r *meshv1.ChangeRequest) error {
		m, err := memberOf(r, args[0])
		if err != nil {
			return err
		}
		if !isBootstrap(m) {
			return fault.New(fault.FailedPrecondition, "%s is no bootstrap in the roster, it is %s", m.GetName(), rolesText(m.GetRoles()))
		}
		b := &meshv1.BootstrapAddress{Key: m.GetKey()}
		for _, a := range args[1:] {
			b.Addresses = append(b.Addresses, strings.TrimSuffix(a, "/p2p/"+m.GetKey()))
		}
		if i := slices.IndexFunc(r.Bootstraps, func(o *meshv1.BootstrapAddress) bool { return o.GetKey() == b.GetKey() }); i < 0 {
			r.Bootstraps = append(r.Bootstraps, b)
		} else {
			r.Bootstraps[i] = b
		}
		r.SignNetworkInfo = true
		return nil
	}, false)
	remove := e.changing(&cobra.Command{
		Use: "remove NAME|KEY", Short: "No longer tell anyone to find the network at a bootstrap", Args: cobra.ExactArgs(1),
	}, operator, func(_ *session, _ *cobra.Command, args []string, r *meshv1.ChangeRequest) error {
		key := args[0]
		if m, err := memberOf(r, args[0]); err == nil {
			key = m.GetKey()
		}
		before := len(r.Bootstraps)
		r.Bootstraps = slices.DeleteFunc(r.Bootstraps, func(b *meshv1.BootstrapAddress) bool { return b.GetKey() == key })
		if len(r.Bootstraps) == before {
			return fault.New(fault.NotFound, "%q is no bootstrap of the network info; see cosmicac network bootstraps", args[0])
		}
		r.SignNetworkInfo = true
		return nil
	}, false)
	c.AddCommand(set, remove)
	return c
}

func parseRoles(names []string) ([]meshv1.Role, error) {
	var roles []meshv1.Role
	for _, n := range names {
		role, err := parseRole(n)
		if err != nil {
			return nil, err
		}
		roles = append(roles, role)
	}
	return roles, nil
}

// newMember is an entry with the powers that its roles need.
func newMember(key, name string, roles []meshv1.Role) *meshv1.Member {
	return &meshv1.Member{Key: key, Name: name, Roles: roles, AdmittedAt: timestamppb.Now(),
		SignsCertificates: slices.Contains(roles, meshv1.Role_ROLE_ORK), SignsGrants: slices.Contains(roles, meshv1.Role_ROLE_APP_NODE)}
}
