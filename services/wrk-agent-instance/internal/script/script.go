// Package script runs a job's start script once for each attempt, as the login
// and with the job's environment.
//
// Once means once: a script that was running when the agent or the VM ended is
// not run again, since nobody knows how far it came; that is said instead. It
// does not time the script out, does not retry it, and does not judge its exit code.
package script

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/google/renameio/v2"

	"github.com/cosmicac/cosmicac/pkg/ssh"
)

// Script is the start script of one attempt.
type Script struct {
	// Attempt that it belongs to; a later one runs it anew.
	Attempt string
	// Text as the user wrote it; one that begins with "#!" names its interpreter.
	Text string
	// Directory keeps the note of what ran, and the script while it runs.
	Directory   string
	Account     ssh.Account
	Environment map[string]string
	// Output gets what it prints, both streams.
	Output io.Writer
}

// Outcome says what became of a script.
type Outcome struct {
	// Ran is false where there was nothing to run, or it had ended in an earlier start.
	Ran bool
	// Ended is false for a script that an earlier start left half-way.
	Ended    bool
	ExitCode int
}

// note is kept in the directory.
type note struct {
	Attempt  string `json:"attempt"`
	Ended    bool   `json:"ended"`
	ExitCode int    `json:"exit_code"`
}

const noteFile = "start-script.json"

// Run runs the script if it has not been run for this attempt, and waits for it.
// When ctx ends its process group gets SIGTERM, and SIGKILL after 5 s. The error
// says that it could not be started.
func (s *Script) Run(ctx context.Context) (Outcome, error) {
	if strings.TrimSpace(s.Text) == "" {
		return Outcome{Ended: true}, nil
	}
	had, err := s.read()
	if err != nil {
		return Outcome{}, err
	}
	if had.Attempt == s.Attempt {
		return Outcome{Ended: had.Ended, ExitCode: had.ExitCode}, nil
	}
	// The note comes first: better not run than run twice.
	if err := s.write(note{Attempt: s.Attempt}); err != nil {
		return Outcome{}, err
	}
	code, err := s.run(ctx)
	if err != nil {
		return Outcome{}, err
	}
	if ctx.Err() != nil {
		return Outcome{Ran: true}, nil // ended by us, not by itself
	}
	if err := s.write(note{Attempt: s.Attempt, Ended: true, ExitCode: code}); err != nil {
		return Outcome{}, err
	}
	return Outcome{Ran: true, Ended: true, ExitCode: code}, nil
}

func (s *Script) run(ctx context.Context) (int, error) {
	dir, err := os.MkdirTemp(s.Directory, "start-script-")
	if err != nil {
		return 0, fmt.Errorf("keep the start script: %w", err)
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "start")
	if err := os.WriteFile(path, []byte(s.Text), 0o700); err != nil {
		return 0, fmt.Errorf("keep the start script: %w", err)
	}
	if s.Account.Switch {
		if err := errors.Join(os.Chown(path, int(s.Account.UID), int(s.Account.GID)), os.Chown(dir, int(s.Account.UID), int(s.Account.GID))); err != nil {
			return 0, fmt.Errorf("give the start script to %s: %w", s.Account.Name, err)
		}
	}
	command, arguments := "/bin/sh", []string{path}
	if strings.HasPrefix(s.Text, "#!") {
		command, arguments = path, nil
	}
	cmd := exec.CommandContext(ctx, command, arguments...)
	cmd.Dir, cmd.Env = s.Account.Directory(), s.Account.Environment(s.Environment)
	cmd.Stdout, cmd.Stderr = s.Output, s.Output
	cmd.SysProcAttr = s.Account.Attributes()
	cmd.SysProcAttr.Setsid = true
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	// Also bounds the wait for output that a left-behind child holds open.
	cmd.WaitDelay = 5 * time.Second
	err = cmd.Run()
	if cmd.Process == nil {
		return 0, fmt.Errorf("start the start script: %w", err)
	}
	if ctx.Err() != nil {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
	}
	if code := cmd.ProcessState.ExitCode(); code >= 0 {
		return code, nil
	}
	if ws, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		return 128 + int(ws.Signal()), nil
	}
	return 255, nil
}

func (s *Script) read() (note, error) {
	var n note
	raw, err := os.ReadFile(filepath.Join(s.Directory, noteFile))
	if errors.Is(err, fs.ErrNotExist) {
		return n, nil
	}
	if err == nil {
		err = json.Unmarshal(raw, &n)
	}
	if err != nil {
		return n, fmt.Errorf("read what start script ran before: %w", err)
	}
	return n, nil
}

func (s *Script) write(n note) error {
	raw, err := json.Marshal(n)
	if err != nil {
		return err
	}
	if err := renameio.WriteFile(filepath.Join(s.Directory, noteFile), append(raw, '\n'), 0o600); err != nil {
		return fmt.Errorf("note the start script: %w", err)
	}
	return nil
}
