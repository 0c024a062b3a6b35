package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	osuser "os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	"github.com/cosmicac/cosmicac/pkg/trust"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	"github.com/cosmicac/cosmicac/services/cosmicac-cli/internal/install"
)

const (
	askLimit               = 20 * time.Second // one request at one bootstrap
	askFirst, askMost      = time.Second, 10 * time.Second
	defaultState           = "/var/lib/cosmicac"
	joinLimit              = 30 * time.Minute
	identityFile, netFiles = "identity.key", "network"
)

func (e *environment) joinCommand() *cobra.Command {
	var j joiner
	var roles []string
	c := &cobra.Command{
		Use:   "join [TOKEN|-]",
		Short: "On a new host: ask the network to admit a daemon's key, and wait for it",
		Long: `On a new host: ask the network to admit a daemon's key, and wait for it. The token comes
from "cosmicac network token". Without it, or with "-", it is read from the terminal or
from standard input; other users of the host see what stands in a command line. An
interruption loses nothing: run the same command again, it says where the request stands.`,
		Example: "  cosmicac join < token\n  cosmicac join - --state /var/lib/cosmicac/wrk-ork --name ork-2 --roles ork < token",
		Args:    cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			text := strings.Join(args, "")
			inArgv := text != "" && text != "-"
			if !inArgv {
				var err error
				if text, err = e.readSecret("token"); err != nil {
					return err
				}
			}
			token, err := trust.DecodeJoinToken(text)
			if err != nil {
				return err
			}
			if inArgv && token.GetApproved() {
				return usageError{errors.New("whoever shows this token is admitted, so it must not stand in a command line: make another, and give it on standard input")}
			}
			if j.roles, err = parseRoles(roles); err != nil {
				return err
			}
			j.environment, j.token = e, token
			if err := j.complete(); err != nil {
				return err
			}
			return j.run(cmd.Context())
		},
	}
	f := c.Flags()
	f.StringVar(&j.state, "state", "", "the daemon's state folder (default: "+defaultState+"/NAME)")
	f.StringVar(&j.name, "name", "", "a unique name for it, DNS label (default: the token's)")
	f.StringSliceVar(&roles, "roles", nil, "the roles it asks for (default: the token's)")
	f.DurationVar(&j.wait, "wait", joinLimit, "how long to wait for admission")
	return c
}

// joiner is one run of join.
type joiner struct {
	*environment
	token       *meshv1.JoinToken
	state, name string
	roles       []meshv1.Role
	wait        time.Duration

	key     *identity.Key
	network *trust.Network
	node    *mesh.Node
	heard   time.Time // when a bootstrap first heard the request
	said    map[string]string
}

func (j *joiner) complete() error {
	j.name = cmp.Or(j.name, j.token.GetName())
	if len(j.roles) == 0 {
		j.roles = j.token.GetRoles()
	}
	if j.name == "" || len(j.roles) == 0 {
		return usageError{errors.New("the token says no name or no roles: name both with --name and --roles")}
	}
	if len(j.token.GetBootstraps()) == 0 {
		return fault.New(fault.Invalid, "the token names no bootstrap to ask: make another, after `cosmicac network bootstraps set`")
	}
	j.state = cmp.Or(j.state, filepath.Join(defaultState, j.name))
	j.said = make(map[string]string)
	return nil
}

func (j *joiner) run(ctx context.Context) error {
	if err := os.MkdirAll(j.state, 0o700); err != nil {
		return fault.Wrap(fault.Unavailable, err, "make state folder %s", j.state)
	}
	var err error
	if j.key, err = identity.LoadOrCreate(filepath.Join(j.state, identityFile)); err != nil {
		return err
	}
	if j.network, err = trust.Join(filepath.Join(j.state, netFiles), j.token); err != nil {
		return err
	}
	fmt.Fprintf(j.out, "this host's key  %s\nits words        %s\n", j.key.ID(), keyWords(j.key.ID()))
	if m, ok := j.network.Member(j.key.ID()); ok {
		fmt.Fprintf(j.out, "admitted before, as %s by roster version %d; the daemon can start\n", m.GetName(), j.network.Roster().GetVersion())
		return j.giveAway()
	}
	fmt.Fprintf(j.out, "asking to join as %s (%s). The operator compares the words, then:\n  cosmicac network admit %s\n", j.name, rolesText(j.roles), keyWords(j.key.ID()))

	limited, cancel := context.WithTimeout(ctx, j.wait)
	defer cancel()
	j.node, err = mesh.New(limited, mesh.Options{Key: j.key, Network: j.network, Credential: mesh.Guest(), Bootstraps: j.token.GetBootstraps()})
	if err != nil {
		return err
	}
	defer func() { _ = j.node.Close(context.WithoutCancel(ctx)) }() // nothing of it is kept
	if err := j.node.Start(limited); err != nil {
		return err
	}
	return j.ask(limited)
}

// ask repeats the request at every bootstrap until one says that the key is
// admitted.
func (j *joiner) ask(ctx context.Context) error {
	request := &meshv1.RequestJoinRequest{Name: j.name, Roles: j.roles, Proof: trust.JoinProof(j.token.GetSecret(), j.key.ID())}
	for pause := askFirst; ; pause = min(pause*3/2, askMost) {
		for _, b := range j.token.GetBootstraps() {
			answer, err := j.askOne(ctx, b, request)
			if err != nil {
				if ctx.Err() == nil {
					j.say(b.GetKey(), fmt.Sprintf("bootstrap %s: %v", b.GetKey(), err))
				}
				continue
			}
			if answer.GetAdmitted() {
				return j.admitted(answer)
			}
			j.stands(b.GetKey(), answer)
		}
		select {
		case <-ctx.Done():
			return j.ended(ctx)
		case <-time.After(pause):
		}
	}
}

func (j *joiner) askOne(ctx context.Context, b *meshv1.BootstrapAddress, request *meshv1.RequestJoinRequest) (*meshv1.RequestJoinResponse, error) {
	p, err := identity.ParseID(b.GetKey())
	if err != nil {
		return nil, err
	}
	call, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	return meshv1.NewJoiningClient(j.node.Client(p, b.GetAddresses()...)).RequestJoin(call, request)
}

// say prints what a bootstrap came to, once until it changes.
func (j *joiner) say(bootstrap, text string) {
	if j.said[bootstrap] != text {
		j.said[bootstrap] = text
		fmt.Fprintln(j.err, text)
	}
}

func (j *joiner) stands(bootstrap string, answer *meshv1.RequestJoinResponse) {
	since := answer.GetFirstSeenAt()
	if since == nil { // a bootstrap of an earlier version
		j.heard = cmp.Or(j.heard, time.Now())
		j.say(bootstrap, fmt.Sprintf("bootstrap %s has the request; it is not admitted yet", bootstrap))
		return
	}
	if at := since.AsTime(); j.heard.IsZero() || at.Before(j.heard) {
		j.heard = at
	}
	j.say(bootstrap, fmt.Sprintf("bootstrap %s has the request since %s; it is not admitted yet", bootstrap, since.AsTime().Local().Format(time.DateTime)))
}

func (j *joiner) admitted(answer *meshv1.RequestJoinResponse) error {
	// The genesis last: it must lead to the root keys in force, by the rotations
	// in the NetworkInfo.
	if _, err := j.network.Adopt(answer.GetRosterEnvelope(), answer.GetNetworkInfoEnvelope()); err != nil {
		return err
	}
	if err := j.network.AdoptGenesis(answer.GetGenesisEnvelope()); err != nil {
		return err
	}
	m, ok := j.network.Member(j.key.ID())
	if !ok {
		return fault.New(fault.Denied, "a bootstrap says that this key is admitted, but roster version %d does not list it", j.network.Roster().GetVersion())
	}
	fmt.Fprintf(j.out, "admitted as %s (%s) by roster version %d; the daemon can start\n", m.GetName(), rolesText(m.GetRoles()), j.network.Roster().GetVersion())
	return j.giveAway()
}

// ended says how far the request has come when waiting ends without an admission.
func (j *joiner) ended(ctx context.Context) error {
	interrupted := !errors.Is(ctx.Err(), context.DeadlineExceeded)
	kind, how := fault.Timeout, fmt.Sprintf("not admitted within %s", j.wait)
	if interrupted {
		kind, how = fault.Canceled, "interrupted before an admission"
	}
	if j.heard.IsZero() {
		return fault.New(kind, "%s; no bootstrap took the request, run the same command again: %s", how, orDash(strings.Join(slices.Sorted(maps.Values(j.said)), "; ")))
	}
	return fault.New(kind, "%s; the request stands since %s, run the same command again to go on waiting", how, j.heard.Local().Format(time.DateTime))
}

// services are the daemons of the roles.
var services = map[meshv1.Role]string{
	meshv1.Role_ROLE_BOOTSTRAP: "mesh-bootstrap", meshv1.Role_ROLE_APP_NODE: "app-node", meshv1.Role_ROLE_ORK: "wrk-ork",
	meshv1.Role_ROLE_WORKER: "wrk-server-k8s-nvidia", meshv1.Role_ROLE_PROXY: "proxy-inference", meshv1.Role_ROLE_MONITOR: "wrk-monitor",
}

// giveAway gives the state folder to the daemon's system user where root has
// joined for it; without such a user the daemon runs as who joined.
func (j *joiner) giveAway() error {
	if os.Geteuid() != 0 || len(j.roles) != 1 {
		return nil
	}
	u, err := osuser.Lookup(install.Daemon{Service: services[j.roles[0]]}.SystemUser())
	if err != nil {
		return nil
	}
	uid, err := strconv.Atoi(u.Uid)
	if err != nil {
		return fault.Wrap(fault.Internal, err, "read the id of user %s", u.Username)
	}
	gid, err := strconv.Atoi(u.Gid)
	if err != nil {
		return fault.Wrap(fault.Internal, err, "read the group of user %s", u.Username)
	}
	err = filepath.WalkDir(j.state, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return os.Lchown(path, uid, gid)
	})
	if err != nil {
		return fault.Wrap(fault.Unavailable, err, "give %s to user %s", j.state, u.Username)
	}
	fmt.Fprintf(j.out, "%s belongs to user %s now\n", j.state, u.Username)
	return nil
}
