package cli

import (
	"bytes"
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	"github.com/cosmicac/cosmicac/pkg/trust"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

const (
	bootstrapLimit = 15 * time.Second // one call to a bootstrap, dialing included
	memberLimit    = 5 * time.Second  // to any other member
	membersLimit   = 30 * time.Second // to all of them
	callsAtOnce    = 16
)

// session is one run of a command that speaks to the network: the operator's
// folder and a node of the mesh.
type session struct {
	*environment
	node    *mesh.Node
	network *trust.Network
	dir     string

	printing sync.Mutex
}

func (e *environment) session(ctx context.Context, operator string, f func(s *session) error) error {
	if _, _, err := openNetwork(operator); err != nil {
		return err
	}
	return withOperator(ctx, operator, func(node *mesh.Node, dir string) error {
		return f(&session{environment: e, node: node, network: node.Network(), dir: dir})
	})
}

// bootstraps are those of the roster, also of one that has expired.
func (s *session) bootstraps() []*meshv1.Member {
	return slices.DeleteFunc(slices.Clone(s.network.Roster().GetMembers()), func(m *meshv1.Member) bool { return !isBootstrap(m) })
}

func isBootstrap(m *meshv1.Member) bool {
	return slices.Contains(m.GetRoles(), meshv1.Role_ROLE_BOOTSTRAP)
}

// peerClient are the services of one peer that these commands call.
type peerClient struct {
	name    string
	node    meshv1.NodeClient
	joining meshv1.JoiningClient
}

// outcome is what came of calling one member.
type outcome struct {
	name string
	err  error
}

// each calls members at once, a few at a time, and returns the outcomes in their
// order. F may run at the same time for several.
func (s *session) each(ctx context.Context, members []*meshv1.Member, limit time.Duration, f func(ctx context.Context, c peerClient) error) []outcome {
	outcomes := make([]outcome, len(members))
	slots := make(chan struct{}, callsAtOnce)
	var calling sync.WaitGroup
	for i, m := range members {
		slots <- struct{}{}
		calling.Go(func() {
			defer func() { <-slots }()
			outcomes[i].name = m.GetName()
			p, err := peerOf(m)
			if err != nil {
				outcomes[i].err = err
				return
			}
			call, cancel := context.WithTimeout(ctx, limit)
			defer cancel()
			conn := s.node.Client(p)
			outcomes[i].err = f(call, peerClient{m.GetName(), meshv1.NewNodeClient(conn), meshv1.NewJoiningClient(conn)})
		})
	}
	calling.Wait()
	return outcomes
}

// failed is nil if at least one answered, else the first error.
func failed(outcomes []outcome) error {
	for _, o := range outcomes {
		if o.err == nil {
			return nil
		}
	}
	if len(outcomes) == 0 {
		return fault.New(fault.FailedPrecondition, "the roster has no bootstrap")
	}
	return fault.Wrap(fault.KindOf(outcomes[0].err), outcomes[0].err, "no bootstrap answers; %s", outcomes[0].name)
}

// catchUp takes what bootstraps hold that is newer than this folder: the last
// change may have been made on another machine. Without an answer it says so and
// goes on; what is signed on an older state is refused by who holds a newer one.
func (s *session) catchUp(ctx context.Context) {
	outcomes := s.each(ctx, s.bootstraps(), bootstrapLimit, s.compare)
	if err := failed(outcomes); err != nil && len(outcomes) > 0 {
		fmt.Fprintf(s.err, "%v\nthis builds on what %s holds: roster version %d\n", err, s.dir, s.network.Roster().GetVersion())
	}
}

// compare takes what a peer holds that is newer, and says where the peer holds
// something else of the same age: two operators signed at once.
func (s *session) compare(ctx context.Context, c peerClient) error {
	r, err := c.node.GetNetwork(ctx, &meshv1.GetNetworkRequest{})
	if err != nil {
		return err
	}
	if _, err := s.network.AdoptEach(r.GetRosterEnvelope(), r.GetNetworkInfoEnvelope()); err != nil {
		return fault.Wrap(fault.KindOf(err), err, "it holds what cannot be taken here")
	}
	if bytes.Equal(r.GetRosterEnvelope(), s.network.RosterEnvelope()) && bytes.Equal(r.GetNetworkInfoEnvelope(), s.network.InfoEnvelope()) {
		return nil
	}
	theirs, err := trust.OpenRecords(&meshv1.NetworkRecords{GenesisEnvelope: s.network.Genesis(), RosterEnvelope: r.GetRosterEnvelope(), NetworkInfoEnvelope: r.GetNetworkInfoEnvelope()})
	if err != nil {
		return err
	}
	ours := contentOf(s.network)
	other := ours
	if theirs.Roster().GetVersion() == s.network.Roster().GetVersion() {
		other.members = theirs.Roster().GetMembers()
	}
	if theirs.Info().GetSequence() == s.network.Info().GetSequence() {
		other.bootstraps, other.roots = theirs.Info().GetBootstraps(), theirs.RootKeys()
	}
	if lines := differences(other, ours); len(lines) > 0 {
		s.warn("%s holds a record of the same number that someone else signed at the same time; the next change signed here replaces it. Compared with it, what is held here\n  %s",
			c.name, strings.Join(lines, "\n  "))
	}
	return nil
}

// warn may be called by several at the same time.
func (s *session) warn(format string, a ...any) {
	s.printing.Lock()
	defer s.printing.Unlock()
	fmt.Fprintf(s.err, format+"\n", a...)
}

// handOut gives the newest records to the bootstraps, which spread them. What no
// bootstrap takes, or what says that they have moved, goes to every other member
// that can be reached from here.
func (s *session) handOut(ctx context.Context, moved bool) error {
	put := &meshv1.PutNetworkRequest{RosterEnvelope: s.network.RosterEnvelope(), NetworkInfoEnvelope: s.network.InfoEnvelope()}
	give := func(ctx context.Context, c peerClient) error {
		_, err := c.node.PutNetwork(ctx, put)
		return err
	}
	bootstraps := s.bootstraps()
	if len(bootstraps) == 0 {
		fmt.Fprintf(s.out, "kept in %s; the roster has no bootstrap to hand it to\n", s.dir)
		return nil
	}
	outcomes := s.each(ctx, bootstraps, bootstrapLimit, func(ctx context.Context, c peerClient) error {
		if err := give(ctx, c); err != nil {
			return err
		}
		return s.compare(ctx, c)
	})
	for _, o := range outcomes {
		if o.err != nil {
			fmt.Fprintf(s.err, "%s did not take it yet: %v\n", o.name, o.err)
		} else {
			fmt.Fprintf(s.out, "%s holds it\n", o.name)
		}
	}
	none := failed(outcomes)
	if none == nil && !moved {
		return nil
	}
	others := slices.DeleteFunc(slices.Clone(s.network.Roster().GetMembers()), func(m *meshv1.Member) bool {
		return isBootstrap(m) || m.GetKey() == s.node.ID().String()
	})
	// Who is refused as a stranger by the bootstraps is one to the others, too.
	if fault.Is(none, fault.Denied) {
		others = nil
	}
	limited, cancel := context.WithTimeout(ctx, membersLimit)
	defer cancel()
	took := 0
	for _, o := range s.each(limited, others, memberLimit, give) {
		if o.err == nil {
			took++
		}
	}
	if len(others) > 0 {
		fmt.Fprintf(s.out, "%d of %d other members took it from here\n", took, len(others))
	}
	if none != nil && took == 0 {
		return fault.Wrap(fault.KindOf(none), none, "it is kept in %s and nobody has it yet; hand it out with `cosmicac network apply` once a bootstrap can be reached, or take it to one by hand with export and restore --state", s.dir)
	}
	return nil
}

func rootKeyFlag(c *cobra.Command, rootKey *string) {
	c.Flags().StringVar(rootKey, "root-key", "", "key file that signs (default: a root key in force in the operator folder, else operator.key if it may)")
}

// signer finds the key that signs: the one named, else a root key in force that
// lies in the folder, else the operator's own where a root key lets it sign
// rosters.
func signer(dir, named string, network *trust.Network, rootOnly bool) (*identity.Key, string, error) {
	if named != "" {
		key, err := identity.Load(named)
		if err != nil {
			return nil, "", err
		}
		if !network.IsRoot(key.ID()) && (rootOnly || !maySign(network, key)) {
			return nil, "", fault.New(fault.Denied, "%s holds key %s, which is not a root key in force; those are %s", named, key, strings.Join(network.RootKeys(), ", "))
		}
		return key, named, nil
	}
	paths, err := filepath.Glob(filepath.Join(dir, "*root*.key"))
	if err != nil {
		return nil, "", fault.Wrap(fault.Internal, err, "look for root keys")
	}
	slices.Sort(paths) // root*.key before second-root*.key
	for _, path := range paths {
		key, err := identity.Load(path)
		if err != nil {
			return nil, "", err
		}
		if network.IsRoot(key.ID()) {
			return key, path, nil
		}
	}
	path := filepath.Join(dir, "operator.key")
	key, err := identity.Load(path)
	if err == nil && !rootOnly && maySign(network, key) {
		return key, path, nil
	}
	if err != nil && !fault.Is(err, fault.NotFound) {
		return nil, "", err
	}
	who := "and operator.key may not sign rosters"
	if rootOnly {
		who = "and only a root key signs this"
	}
	return nil, "", fault.New(fault.FailedPrecondition,
		"%s holds no root key in force, %s: name one with --root-key, or write a request with --request FILE and sign it where a root key is", dir, who)
}

func maySign(network *trust.Network, key *identity.Key) bool {
	m, ok := network.Member(key.ID())
	return ok && m.GetSignsRosters()
}
