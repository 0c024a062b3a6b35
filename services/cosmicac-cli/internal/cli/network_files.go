package cli

import (
	"bufio"
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/trust"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	"github.com/cosmicac/cosmicac/services/cosmicac-cli/internal/passphrase"
)

// readFile reads a file of trust.EncodeFile; "-" is standard input.
func (e *environment) readFile(path string) ([]byte, error) {
	from := e.in
	if path != "-" {
		f, err := os.Open(path)
		if err != nil {
			return nil, fault.Wrap(fault.Invalid, err, "read the file")
		}
		defer f.Close()
		from = f
	}
	data, err := io.ReadAll(io.LimitReader(from, trust.MaxFileBytes+1))
	if err != nil {
		return nil, fault.Wrap(fault.Unavailable, err, "read %s", path)
	}
	return data, nil
}

func (e *environment) networkSignCommand(operator *string) *cobra.Command {
	var rootKey, out string
	var yes bool
	c := &cobra.Command{
		Use:   "sign REQUEST",
		Short: "Where the root key is: show what a request would change, and sign it",
		Long: `Where the root key is: show what a request of --request would change, ask, and write the
signed change to REQUEST.signed, for "cosmicac network apply". It speaks to nobody. The
operator folder needs to hold nothing but a root key, or name one with --root-key; with a
network/ in it, requests that build on something older than that are refused.`,
		Args: cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			text, err := e.readFile(args[0])
			if err != nil {
				return err
			}
			r := &meshv1.ChangeRequest{}
			if err := trust.DecodeFile(text, r); err != nil {
				return fault.Wrap(fault.KindOf(err), err, "%s cannot be signed", args[0])
			}
			base, err := trust.OpenRecords(r.GetBase())
			if err != nil {
				return fault.Wrap(fault.KindOf(err), err, "%s builds on records that cannot be trusted", args[0])
			}
			dir, err := operatorDirectory(*operator)
			if err != nil {
				return err
			}
			held, err := trust.OpenDirectory(filepath.Join(dir, "network"))
			switch {
			case fault.Is(err, fault.NotFound):
				held = nil
			case err != nil:
				return err
			default:
				if err := notOlder(base, held); err != nil {
					return err
				}
			}
			key, path, err := signer(dir, rootKey, base, true)
			if err != nil {
				return err
			}
			g, err := trust.OpenGenesis(base.Genesis())
			if err != nil {
				return err
			}
			now := time.Now()
			fmt.Fprintf(e.out, "network %s (%s); signed, this\n", printable(g.GetName()), base.ID())
			e.show(describe(r, base, now.Add(trust.RosterLife), now))
			if !yes {
				fmt.Fprintf(e.out, "sign it with %s? [y/N] ", path)
				answer, err := bufio.NewReader(e.in).ReadString('\n')
				if err != nil && !errors.Is(err, io.EOF) {
					return fault.Wrap(fault.Invalid, err, "read the answer")
				}
				if a := strings.ToLower(strings.TrimSpace(answer)); a != "y" && a != "yes" {
					fmt.Fprintln(e.out)
					return fault.New(fault.Canceled, "nothing was signed")
				}
			}
			if out == "" {
				out = args[0] + ".signed"
			}
			if _, err := os.Lstat(out); err == nil {
				return fault.New(fault.Conflict, "%s exists already and is not overwritten; name another with --out", out)
			}
			signed, err := e.sign(r, key, dir, now)
			if err != nil {
				return err
			}
			text, err = trust.EncodeFile(signed)
			if err != nil {
				return err
			}
			if err := writeNew(out, text, 0o644); err != nil {
				return err
			}
			if held != nil {
				// This folder will refuse to sign on anything older from now on.
				if _, err := held.AdoptEach(base.RosterEnvelope(), base.InfoEnvelope()); err != nil && !base.Expired() {
					return err
				}
				if _, err := held.Apply(signed); err != nil {
					return err
				}
			}
			fmt.Fprintf(e.out, "wrote %s. Take it back, then: cosmicac network apply %s\n", out, filepath.Base(out))
			return nil
		},
	}
	c.Flags().StringVar(&rootKey, "root-key", "", "root key file (default: a root key in force in the operator folder)")
	c.Flags().StringVar(&out, "out", "", "file to write (default: REQUEST.signed)")
	c.Flags().BoolVar(&yes, "yes", false, "sign without asking")
	return c
}

// notOlder refuses a request that builds on older records than a folder holds.
func notOlder(base, held *trust.Network) error {
	if base.ID() != held.ID() {
		return fault.New(fault.Conflict, "the request is of network %s, this folder holds network %s", base.ID(), held.ID())
	}
	for _, c := range []struct {
		what       string
		from, here uint64
	}{{"roster version", base.Roster().GetVersion(), held.Roster().GetVersion()}, {"network info", base.Info().GetSequence(), held.Info().GetSequence()}} {
		if c.from < c.here {
			return fault.New(fault.Conflict, "the request builds on %s %d, this folder holds %d already: make the request anew", c.what, c.from, c.here)
		}
	}
	return nil
}

func (e *environment) networkApplyCommand(operator *string) *cobra.Command {
	return &cobra.Command{
		Use:   "apply [SIGNED]",
		Short: "Take a signed change into the folder and spread it; without a file, spread what the folder holds",
		Args:  cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			signed := &meshv1.NetworkRecords{}
			if len(args) == 1 {
				text, err := e.readFile(args[0])
				if err != nil {
					return err
				}
				if err := trust.DecodeFile(text, signed); err != nil {
					return fault.Wrap(fault.KindOf(err), err, "%s cannot be applied", args[0])
				}
			}
			return e.session(cmd.Context(), *operator, func(s *session) error {
				s.catchUp(cmd.Context())
				if len(args) == 0 {
					return s.handOut(cmd.Context(), true)
				}
				before := contentOf(s.network)
				if after, err := trust.OpenRecords(s.network.Records()); err == nil {
					if _, err := after.Apply(signed); err == nil {
						e.show(differences(before, contentOf(after)))
					}
				}
				return s.apply(cmd.Context(), signed)
			})
		},
	}
}

func (e *environment) networkExportCommand(operator *string) *cobra.Command {
	var withKeys bool
	var state string
	c := &cobra.Command{
		Use:   "export FILE|-",
		Short: "Write everything to found the network elsewhere into one file",
		Long: `Write the signed records of the network into one file, to build an operator folder or the
network folder of a daemon from with "cosmicac network restore". It holds no secret.

With --with-keys it also holds the private keys of the operator folder, the daemons'
shared key and the join tokens. It is then encrypted under a passphrase, in the form that
"age --decrypt" reads, too. With --state the records come from a daemon's state folder:
every daemon holds the newest.`,
		Args: cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			if state != "" && withKeys {
				return usageError{errors.New("a daemon's key stays in its folder: --with-keys is for an operator folder")}
			}
			network, dir, err := openNetwork(cmp.Or(state, *operator))
			if err != nil {
				return err
			}
			backup := &meshv1.Backup{Records: network.Records()}
			if !withKeys {
				text, err := trust.EncodeFile(backup)
				if err != nil {
					return err
				}
				return e.writeExport(args[0], text, 0o644)
			}
			backup.NetworkKey = network.NetworkKey()
			if backup.Files, err = privateFiles(dir); err != nil {
				return err
			}
			text, err := trust.EncodeFile(backup)
			if err != nil {
				return err
			}
			words, err := e.newPassphrase()
			if err != nil {
				return err
			}
			if text, err = passphrase.Encrypt(text, words, passphraseWork); err != nil {
				return err
			}
			for _, f := range backup.GetFiles() {
				fmt.Fprintf(e.err, "with %s\n", f.GetName())
			}
			return e.writeExport(args[0], text, 0o600)
		},
	}
	c.Flags().BoolVar(&withKeys, "with-keys", false, "with the private keys, encrypted under a passphrase")
	c.Flags().StringVar(&state, "state", "", "a daemon's state folder, in place of an operator folder")
	return c
}

func (e *environment) writeExport(path string, text []byte, mode os.FileMode) error {
	if path == "-" {
		_, err := e.out.Write(text)
		return err
	}
	if err := writeNew(path, text, mode); err != nil {
		return err
	}
	fmt.Fprintf(e.out, "wrote %s\n", path)
	return nil
}

// privateFiles are the keys and tokens of an operator's folder.
func privateFiles(dir string) ([]*meshv1.BackupFile, error) {
	paths, err := filepath.Glob(filepath.Join(dir, "*.key"))
	if err != nil {
		return nil, fault.Wrap(fault.Internal, err, "look for keys")
	}
	slices.Sort(paths)
	var files []*meshv1.BackupFile
	for _, path := range append(paths, filepath.Join(dir, tokenFile)) {
		content, err := os.ReadFile(path)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fault.Wrap(fault.Unavailable, err, "read a private file")
		}
		files = append(files, &meshv1.BackupFile{Name: filepath.Base(path), Content: content})
	}
	return files, nil
}

// passphraseWork is what one guess of a passphrase costs; tests are content with less.
var passphraseWork = passphrase.Work

// leastPassphrase is the shortest passphrase that a backup of keys is put under.
const leastPassphrase = 12

// newPassphrase asks for a passphrase, on a terminal twice.
func (e *environment) newPassphrase() (string, error) {
	p, err := e.readSecret("passphrase, 12 characters or more")
	if err != nil {
		return "", err
	}
	if len([]rune(p)) < leastPassphrase {
		return "", fault.New(fault.Invalid, "a passphrase of fewer than %d characters can be guessed: take several words", leastPassphrase)
	}
	if !e.onTerminal() {
		return p, nil
	}
	again, err := e.readSecret("the same again")
	if err == nil && again != p {
		err = fault.New(fault.Invalid, "the two passphrases differ; nothing was written")
	}
	return p, err
}

func (e *environment) onTerminal() bool {
	f, ok := e.in.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

func (e *environment) networkRestoreCommand(operator *string) *cobra.Command {
	var state string
	c := &cobra.Command{
		Use:   "restore FILE|-",
		Short: "Build an operator folder, or a daemon's network folder, from an export",
		Long: `Build an operator folder from an export, or with --state the network folder of a daemon,
which gets no key of anyone. A folder that holds the same network takes what is newer; no
private file is overwritten.`,
		Example: "  cosmicac network restore lab.export --state /var/lib/cosmicac/mesh-bootstrap",
		Args:    cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			text, err := e.readFile(args[0])
			if err != nil {
				return err
			}
			if passphrase.Encrypted(text) {
				if args[0] == "-" {
					return usageError{errors.New("the passphrase comes on standard input, so name the encrypted file")}
				}
				words, err := e.readSecret("passphrase")
				if err != nil {
					return err
				}
				if text, err = passphrase.Decrypt(text, words); err != nil {
					return err
				}
			}
			backup := &meshv1.Backup{}
			if err := trust.DecodeFile(text, backup); err != nil {
				return fault.Wrap(fault.KindOf(err), err, "%s cannot be restored", args[0])
			}
			dir := state
			if state == "" {
				if dir, err = operatorDirectory(*operator); err != nil {
					return err
				}
				if err := checkPrivate(dir, backup.GetFiles()); err != nil {
					return err
				}
			}
			if err := os.MkdirAll(dir, 0o700); err != nil {
				return fault.Wrap(fault.Unavailable, err, "make folder %s", dir)
			}
			network, err := trust.Restore(filepath.Join(dir, "network"), backup.GetRecords(), backup.GetNetworkKey())
			if err != nil {
				return err
			}
			fmt.Fprintf(e.out, "%s holds network %s, roster version %d (%s), network info %d\n", filepath.Join(dir, "network"), network.ID(),
				network.Roster().GetVersion(), goodUntil(network.RosterNotAfter(), time.Now()), network.Info().GetSequence())
			if state != "" {
				return nil
			}
			return e.restorePrivate(dir, network, backup.GetFiles())
		},
	}
	c.Flags().StringVar(&state, "state", "", "a daemon's state folder, in place of an operator folder")
	return c
}

// checkPrivate refuses before anything is written, if a private file would be
// overwritten by another one.
func checkPrivate(dir string, files []*meshv1.BackupFile) error {
	for _, f := range files {
		old, err := os.ReadFile(filepath.Join(dir, f.GetName()))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return fault.Wrap(fault.Unavailable, err, "look at private files")
		}
		if f.GetName() != tokenFile && !bytes.Equal(old, f.GetContent()) {
			return fault.New(fault.Conflict, "%s exists and is another one: restore into an empty folder", filepath.Join(dir, f.GetName()))
		}
	}
	return nil
}

func (e *environment) restorePrivate(dir string, network *trust.Network, files []*meshv1.BackupFile) error {
	for _, f := range files {
		path := filepath.Join(dir, f.GetName())
		err := writeNew(path, f.GetContent(), 0o600)
		if fault.Is(err, fault.Conflict) {
			continue // checkPrivate has seen it
		}
		if err != nil {
			return err
		}
		fmt.Fprintf(e.out, "restored %s\n", path)
	}
	return e.newOperator(dir, network)
}

// newOperator gives a restored folder a key of its own where the backup had none,
// and says how it gets into the roster.
func (e *environment) newOperator(dir string, network *trust.Network) error {
	key, err := identity.LoadOrCreate(filepath.Join(dir, "operator.key"))
	if err != nil {
		return err
	}
	if m, ok := network.Known(key.ID()); ok {
		fmt.Fprintf(e.out, "operator.key is %s of the roster\n", m.GetName())
		return nil
	}
	fmt.Fprintf(e.out, "operator.key is not in the roster. With a root key at hand:\n  cosmicac network admit %s --name NAME --roles operator --root-key FILE\n", key.ID())
	return nil
}
