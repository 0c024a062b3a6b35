package cli

import (
	"bufio"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/services/cosmicac-cli/internal/client"
)

type user struct {
	ID            string `json:"id"`
	Email         string `json:"email"`
	Administrator bool   `json:"administrator"`
}

func (e *environment) loginCommand() *cobra.Command {
	var email string
	c := &cobra.Command{
		Use:   "login [URL]",
		Short: "Log in to a control plane; the password is asked for, or read from standard input",
		Args:  cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			s, err := e.settings()
			if err != nil {
				return err
			}
			if len(args) == 1 {
				s.URL = args[0]
			}
			if email == "" {
				return usageError{fmt.Errorf("--email is missing")}
			}
			api, err := client.New(s.URL, "")
			if err != nil {
				return err
			}
			password, err := e.readSecret("password")
			if err != nil {
				return err
			}
			var answer struct {
				Token     string    `json:"token"`
				ExpiresAt time.Time `json:"expires_at"`
				User      user      `json:"user"`
			}
			in := map[string]string{"email": email, "password": password}
			if err := api.Call(cmd.Context(), "POST", "/api/v1/login", nil, nil, in, &answer); err != nil {
				return err
			}
			s.Token, s.Email = answer.Token, answer.User.Email
			if err := s.Save(); err != nil {
				return err
			}
			fmt.Fprintf(e.out, "logged in to %s as %s until %s\n", s.URL, answer.User.Email, answer.ExpiresAt.Local().Format(time.DateTime))
			return nil
		},
	}
	c.Flags().StringVar(&email, "email", "", "who logs in")
	return c
}

// readSecret asks without echo on a terminal, or takes the first line of
// standard input. Secrets are never arguments: other users see those.
func (e *environment) readSecret(what string) (string, error) {
	if f, ok := e.in.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		fmt.Fprintf(e.err, "%s: ", what)
		raw, err := term.ReadPassword(int(f.Fd()))
		fmt.Fprintln(e.err)
		if err != nil {
			return "", fault.Wrap(fault.Invalid, err, "read the %s", what)
		}
		return string(raw), nil
	}
	line, err := bufio.NewReader(e.in).ReadString('\n')
	line = strings.TrimRight(line, "\r\n")
	if line == "" {
		return "", fault.Wrap(fault.Invalid, err, "no %s on standard input", what)
	}
	return line, nil
}

func (e *environment) logoutCommand() *cobra.Command {
	var everywhere bool
	c := &cobra.Command{
		Use:   "logout",
		Short: "End the login here and at the control plane",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := e.settings()
			if err != nil {
				return err
			}
			if s.Token == "" {
				fmt.Fprintln(e.out, "not logged in")
				return nil
			}
			api, err := client.New(s.URL, s.Token)
			if err != nil {
				return err
			}
			path := "/api/v1/logout"
			if everywhere {
				path = "/api/v1/me/logout-everywhere"
			}
			callErr := api.Call(cmd.Context(), "POST", path, nil, nil, nil, nil)
			if everywhere && callErr != nil {
				// The token stays: it is what the next try needs.
				return fault.Wrap(fault.KindOf(callErr), callErr, "end every login and shell: nothing was ended")
			}
			s.Token = ""
			if err := s.Save(); err != nil {
				return err
			}
			if callErr != nil && fault.KindOf(callErr) != fault.Unauthenticated {
				return fault.Wrap(fault.KindOf(callErr), callErr, "forgot the token here, but the control plane did not end it")
			}
			fmt.Fprintln(e.out, "logged out")
			return nil
		},
	}
	c.Flags().BoolVar(&everywhere, "everywhere", false, "end your logins on every machine and close your shells")
	return c
}

func (e *environment) whoamiCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "whoami",
		Short: "Show the user of this login and its projects",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			api, err := e.client()
			if err != nil {
				return err
			}
			var me struct {
				User     user `json:"user"`
				Projects []struct {
					ID   string `json:"id"`
					Name string `json:"name"`
				} `json:"projects"`
			}
			if err := api.Call(cmd.Context(), "GET", "/api/v1/me", nil, nil, nil, &me); err != nil {
				return err
			}
			return e.print(me, func(t *tableWriter) {
				t.row("USER", "EMAIL", "ADMINISTRATOR", "PROJECTS")
				var names []string
				for _, p := range me.Projects {
					names = append(names, p.Name)
				}
				t.row(me.User.ID, me.User.Email, me.User.Administrator, strings.Join(names, ", "))
			})
		},
	}
}
