package app

import (
	"bufio"
	"context"
	"crypto/rand"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/goccy/go-yaml"
	"golang.org/x/term"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/id"
	"github.com/cosmicac/cosmicac/services/app-node/internal/account"
	"github.com/cosmicac/cosmicac/services/app-node/internal/store"
)

// CreateAdministratorCommand is the sub-command that makes the first administrator.
const CreateAdministratorCommand = "create-administrator"

const administratorUsage = `usage: cosmicac-app-node create-administrator --email EMAIL [--config FILE] [--generate] [--force-reset]

Makes the first administrator. app-node must be stopped. The password is the first
line of standard input; with --generate one is made and printed once.

`

// CreateAdministrator runs the sub-command and returns the exit code.
func CreateAdministrator(args, environ []string, stdin io.Reader, stdout, stderr io.Writer) int {
	flags := flag.NewFlagSet(CreateAdministratorCommand, flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.Usage = func() {
		fmt.Fprint(stderr, administratorUsage)
		flags.PrintDefaults()
	}
	path := flags.String("config", "/etc/cosmicac/app-node.yaml", "app-node's configuration `FILE`")
	email := flags.String("email", "", "the administrator's `EMAIL`")
	generate := flags.Bool("generate", false, "make a password and print it once")
	reset := flags.Bool("force-reset", false, "set the password of the user with this email and make them administrator, although there is one")
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return 0
		}
		return 2
	}
	if flags.NArg() > 0 || *email == "" {
		flags.Usage()
		return 2
	}
	userID, password, err := createAdministrator(*path, *email, *generate, *reset, environ, stdin, stderr)
	if err != nil {
		fmt.Fprintf(stderr, "cosmicac-app-node: %s\n", err)
		return 1
	}
	fmt.Fprintf(stdout, "%s is administrator %s\n", *email, userID)
	if *generate {
		fmt.Fprintf(stdout, "password (shown once): %s\n", password)
	}
	return 0
}

func createAdministrator(path, email string, generate, reset bool, environ []string, stdin io.Reader, prompt io.Writer) (userID, password string, err error) {
	state, err := stateDirectory(path, environ)
	if err != nil {
		return "", "", err
	}
	if email, err = account.CheckEmail(email); err != nil {
		return "", "", err
	}
	if generate {
		password = rand.Text()
	} else if password, err = readPassword(stdin, prompt); err != nil {
		return "", "", err
	}
	if err := account.CheckPolicy(password, email); err != nil {
		return "", "", err
	}
	if err := openStateDirectory(state); err != nil {
		return "", "", err
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	db, err := store.Open(ctx, filepath.Join(state, databaseFile))
	if err != nil {
		return "", "", err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	hasher, err := account.NewHasher(rand.Reader, 1)
	if err != nil {
		return "", "", err
	}
	accounts := account.New(account.Options{Store: db, Hasher: hasher, IDs: id.NewSource(time.Now, rand.Reader), Random: rand.Reader, Now: time.Now})
	userID, err = accounts.EnsureAdministrator(ctx, email, password, reset)
	outcome := "ok"
	if err != nil {
		outcome = string(fault.KindOf(err))
	}
	audit := db.AddAudit(ctx, store.AuditEntry{Time: time.Now(), Actor: "bootstrap", Action: "administrator.create", Target: userID, Outcome: outcome, Address: "local"})
	return userID, password, errors.Join(err, audit)
}

// stateDirectory finds the state directory as the daemon does: configuration, then
// environment, then the default.
func stateDirectory(path string, environ []string) (string, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return "", fault.Wrap(fault.Invalid, err, "read configuration")
	}
	cfg := Defaults()
	if err := yaml.UnmarshalWithOptions(data, &cfg, yaml.DisallowUnknownField()); err != nil && !errors.Is(err, io.EOF) {
		var y yaml.Error
		if errors.As(err, &y) {
			// Without the excerpt of the file.
			return "", fault.New(fault.Invalid, "%s: %s", path, y.GetMessage())
		}
		return "", fault.Wrap(fault.Invalid, err, "%s", path)
	}
	for _, e := range environ {
		if value, ok := strings.CutPrefix(e, "COSMICAC_STATE_DIRECTORY="); ok {
			cfg.StateDirectory = value
		}
	}
	if cfg.StateDirectory == "" {
		cfg.StateDirectory = "/var/lib/cosmicac/app-node"
	}
	return cfg.StateDirectory, nil
}

// openStateDirectory makes the directory if needed. Files made by another user
// than the daemon's could not be opened by it later.
func openStateDirectory(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fault.Wrap(fault.Unavailable, err, "make state directory %s", dir)
	}
	info, err := os.Stat(dir)
	if err != nil {
		return fault.Wrap(fault.Unavailable, err, "state directory %s", dir)
	}
	if owner, ok := info.Sys().(*syscall.Stat_t); ok && int(owner.Uid) != os.Geteuid() {
		return fault.New(fault.Denied, "state directory %s belongs to user %d: run this as that user, for example with runuser -u", dir, owner.Uid)
	}
	return nil
}

// readPassword reads one line; from a terminal it asks twice without showing it.
func readPassword(stdin io.Reader, prompt io.Writer) (string, error) {
	if f, ok := stdin.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		var typed [2][]byte
		for i, question := range []string{"password: ", "again: "} {
			fmt.Fprint(prompt, question)
			line, err := term.ReadPassword(int(f.Fd()))
			fmt.Fprintln(prompt)
			if err != nil {
				return "", fault.Wrap(fault.Invalid, err, "read the password")
			}
			typed[i] = line
		}
		if string(typed[0]) != string(typed[1]) {
			return "", fault.New(fault.Invalid, "the two passwords differ")
		}
		return string(typed[0]), nil
	}
	line, err := bufio.NewReader(io.LimitReader(stdin, 4096)).ReadString('\n')
	if err != nil && !errors.Is(err, io.EOF) {
		return "", fault.Wrap(fault.Invalid, err, "read the password from standard input")
	}
	line = strings.TrimRight(line, "\r\n")
	if line == "" {
		return "", fault.New(fault.Invalid, "standard input holds no password: give it as the first line, or use --generate")
	}
	return line, nil
}
