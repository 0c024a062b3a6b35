package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/spf13/cobra"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/trust"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

// joinRequest is one open request, as an operator sees it.
type joinRequest struct {
	Key       string    `json:"key"`
	Words     string    `json:"words"`
	Name      string    `json:"name"`
	Roles     []string  `json:"roles"`
	Since     time.Time `json:"since"`
	Address   string    `json:"address"`
	KnowToken bool      `json:"knows_a_token"`

	id    peer.ID
	proof []byte
}

// requests asks every bootstrap for the open requests, oldest first; a key that
// asked at several is listed once.
func (s *session) requests(ctx context.Context) ([]joinRequest, error) {
	known, err := tokens(s.dir)
	if err != nil {
		return nil, err
	}
	var mu sync.Mutex
	byKey := make(map[string]joinRequest)
	outcomes := s.each(ctx, s.bootstraps(), bootstrapLimit, func(ctx context.Context, c peerClient) error {
		answer, err := c.joining.ListJoinRequests(ctx, &meshv1.ListJoinRequestsRequest{})
		if err != nil {
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		for _, q := range answer.GetRequests() {
			id, err := identity.ParseID(q.GetKey())
			if err != nil {
				continue // no key, no request
			}
			r := joinRequest{Key: id.String(), Words: keyWords(id), Name: q.GetName(), Since: q.GetFirstSeenAt().AsTime(), Address: q.GetRemoteAddress(), id: id, proof: q.GetProof()}
			for _, role := range q.GetRoles() {
				r.Roles = append(r.Roles, roleText(role))
			}
			r.KnowToken = slices.ContainsFunc(known, func(t *meshv1.JoinToken) bool { return trust.CheckJoinProof(t.GetSecret(), id, q.GetProof()) })
			if old, ok := byKey[r.Key]; !ok || r.Since.Before(old.Since) {
				byKey[r.Key] = r
			}
		}
		return nil
	})
	all := make([]joinRequest, 0, len(byKey))
	for _, r := range byKey {
		all = append(all, r)
	}
	slices.SortFunc(all, func(a, b joinRequest) int { return cmp.Or(a.Since.Compare(b.Since), cmp.Compare(a.Key, b.Key)) })
	return all, failed(outcomes)
}

func (e *environment) networkRequestsCommand(operator *string) *cobra.Command {
	c := &cobra.Command{
		Use: "requests", Short: "Hosts that ask to join", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return e.session(cmd.Context(), *operator, func(s *session) error {
				all, err := s.requests(cmd.Context())
				if err != nil {
					return err
				}
				return e.print(map[string]any{"requests": all}, func(t *tableWriter) {
					t.row("NAME", "ROLES", "WORDS", "FROM", "SINCE", "HOLDS A TOKEN OF YOURS", "KEY")
					for _, q := range all {
						t.row(q.Name, strings.Join(q.Roles, ","), q.Words, q.Address, age(q.Since, time.Now()), yesNo(q.KnowToken), q.Key)
					}
				})
			})
		},
	}
	c.AddCommand(&cobra.Command{
		Use: "drop KEY|WORDS|NAME", Short: "Forget a request; its key may ask again", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return e.session(cmd.Context(), *operator, func(s *session) error {
				r, err := s.request(cmd.Context(), args[0])
				if err != nil {
					return err
				}
				outcomes := s.each(cmd.Context(), s.bootstraps(), bootstrapLimit, func(ctx context.Context, c peerClient) error {
					_, err := c.joining.DropJoinRequest(ctx, &meshv1.DropJoinRequestRequest{Key: r.Key})
					if fault.Is(err, fault.NotFound) {
						return nil // it asked elsewhere
					}
					return err
				})
				if err := failed(outcomes); err != nil {
					return err
				}
				fmt.Fprintf(e.out, "forgot the request of %s, key %s\n", printable(r.Name), r.Key)
				return nil
			})
		},
	})
	return c
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

// request finds the one open request of a key, words or name.
func (s *session) request(ctx context.Context, what string) (joinRequest, error) {
	all, err := s.requests(ctx)
	if err != nil {
		return joinRequest{}, err
	}
	id, _ := identity.ParseID(what)
	var found []joinRequest
	for _, r := range all {
		if r.id == id || r.Words == strings.ToLower(what) || r.Name == what {
			found = append(found, r)
		}
	}
	switch len(found) {
	case 0:
		return joinRequest{}, fault.New(fault.NotFound, "no open request is of %q; see cosmicac network requests", what)
	case 1:
		if r := found[0]; r.id != id && r.Words != strings.ToLower(what) && !r.KnowToken {
			return joinRequest{}, fault.New(fault.Denied, "who asks as %q holds no token of yours, and anybody can take that name: name it by its words %s once you have compared them", what, r.Words)
		}
		return found[0], nil
	}
	return joinRequest{}, fault.New(fault.Conflict, "%d keys ask as %q: name the one you mean by its words or its key; see cosmicac network requests", len(found), what)
}

func (e *environment) networkAdmitCommand(operator *string) *cobra.Command {
	var name string
	var roles []string
	c := &cobra.Command{
		Use:   "admit KEY|WORDS|NAME",
		Short: "Put a key into the roster",
		Long: `Put a key into the roster. One that asked to join is admitted as it asked, unless --name
or --roles say otherwise: compare its words with those that the new host shows, first. A
key that did not ask needs both.`,
		Example: "  cosmicac network admit legend-vapor-ozone-ripple-custom-hedgehog",
		Args:    cobra.ExactArgs(1),
	}
	c.Flags().StringVar(&name, "name", "", "a unique name, DNS label (default: the one it asks for)")
	c.Flags().StringSliceVar(&roles, "roles", nil, "what it may be: bootstrap, app-node, ork, worker, proxy, monitor, operator (default: what it asks for)")
	return e.changing(c, operator, func(s *session, cmd *cobra.Command, args []string, r *meshv1.ChangeRequest) error {
		wanted, err := parseRoles(roles)
		if err != nil {
			return err
		}
		key := ""
		if p, err := identity.ParseID(args[0]); err == nil {
			key = p.String()
			if m, err := memberOf(r, key); err == nil {
				return fault.New(fault.Conflict, "this key is in the roster already, as %s", m.GetName())
			}
		}
		if key == "" || name == "" || len(wanted) == 0 {
			q, err := s.request(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			key, name = q.Key, cmp.Or(name, q.Name)
			if len(wanted) == 0 {
				if wanted, err = parseRoles(q.Roles); err != nil {
					return err
				}
			}
		}
		r.SignRoster, r.Members = true, append(r.Members, newMember(key, name, wanted))
		if slices.Contains(wanted, meshv1.Role_ROLE_BOOTSTRAP) {
			fmt.Fprintf(e.err, "say where it is found, once it runs: cosmicac network bootstraps set %s ADDRESS...\n", name)
		}
		return nil
	}, false)
}

// approve waits for a host that shows a token, and admits the first one.
func (e *environment) approve(ctx context.Context, operator, rootKey string, token *meshv1.JoinToken, wait time.Duration) error {
	limited, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	return e.session(ctx, operator, func(s *session) error {
		// Before anyone waits for an admission that cannot come.
		if _, _, err := signer(s.dir, rootKey, s.network, false); err != nil {
			return err
		}
		said := ""
		for {
			all, err := s.requests(limited)
			if err != nil && limited.Err() == nil && err.Error() != said {
				said = err.Error()
				s.warn("%v", err)
			}
			for _, q := range all {
				if trust.CheckJoinProof(token.GetSecret(), q.id, q.proof) {
					return s.change(ctx, signing{operator: operator, rootKey: rootKey}, false, func(r *meshv1.ChangeRequest) error {
						r.SignRoster, r.Members = true, append(r.Members, newMember(q.Key, token.GetName(), token.GetRoles()))
						return nil
					})
				}
			}
			select {
			case <-limited.Done():
				if errors.Is(limited.Err(), context.DeadlineExceeded) {
					return fault.New(fault.Timeout, "no host showed the token within %s", wait)
				}
				return fault.New(fault.Canceled, "ended before a host showed the token; it can still ask with it")
			case <-time.After(2 * time.Second):
			}
		}
	})
}
