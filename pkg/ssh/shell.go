package ssh

import (
	"context"
	"io"

	"golang.org/x/crypto/ssh"

	"github.com/cosmicac/cosmicac/pkg/fault"
)

// Size of a terminal in characters.
type Size struct{ Columns, Rows uint32 }

// Shell is an interactive session with a terminal in the VM. Read gives what
// the terminal prints and Write types on it: bytes, never text. One goroutine
// may read while another writes.
type Shell struct {
	client  *Client
	session *ssh.Session
	in      io.WriteCloser
	out     *io.PipeReader
	ended   chan struct{}
	err     error // how it ended, once ended is closed
}

// OpenShell starts the login's shell on a new terminal, or line with -c when it
// is not empty. It needs the right "shell" (and "exec" for a line).
func (c *Client) OpenShell(size Size, term, line string, environment map[string]string) (*Shell, error) {
	s, err := c.client.NewSession()
	if err != nil {
		return nil, c.explain(err, "open a session")
	}
	in, err := s.StdinPipe()
	if err != nil {
		s.Close()
		return nil, err
	}
	out, printed := io.Pipe()
	// With a terminal the error stream has only the agent's own words, when it
	// cannot start a shell. They belong before the same eyes.
	s.Stdout, s.Stderr = printed, printed
	sh := &Shell{client: c, session: s, in: in, out: out, ended: make(chan struct{})}
	for k, v := range environment {
		_ = s.Setenv(k, v)
	}
	if term == "" {
		term = "xterm-256color"
	}
	if err := s.RequestPty(term, int(size.Rows), int(size.Columns), ssh.TerminalModes{42: 1}); err != nil { // IUTF8
		s.Close()
		return nil, c.startError(err, "open a terminal", RightShell)
	}
	right := RightShell
	if line == "" {
		err = s.Shell()
	} else {
		right, err = RightExec, s.Start(line)
	}
	if err != nil {
		s.Close()
		return nil, c.startError(err, "open a shell", right)
	}
	go func() { // ends with the session, which its end, Close or the connection's end brings
		sh.err = s.Wait()
		printed.Close()
		close(sh.ended)
	}()
	return sh, nil
}

// Read returns what the terminal printed; io.EOF when the session ended.
func (s *Shell) Read(p []byte) (int, error) { return s.out.Read(p) }

// Write types p.
func (s *Shell) Write(p []byte) (int, error) { return s.in.Write(p) }

// Resize tells the terminal its new size.
func (s *Shell) Resize(size Size) error {
	if err := s.session.WindowChange(int(size.Rows), int(size.Columns)); err != nil {
		return s.client.explain(err, "resize the terminal")
	}
	return nil
}

// signalNames are those of RFC 4254 section 6.10.
var signalNames = map[string]struct{}{
	"ABRT": {}, "ALRM": {}, "FPE": {}, "HUP": {}, "ILL": {}, "INT": {}, "KILL": {}, "PIPE": {}, "QUIT": {}, "SEGV": {}, "TERM": {}, "USR1": {}, "USR2": {},
}

// Signal sends a signal by its SSH name, such as "INT", to the terminal's foreground.
func (s *Shell) Signal(name string) error {
	if _, known := signalNames[name]; !known {
		return fault.New(fault.Invalid, "no signal %q", name)
	}
	if err := s.session.Signal(ssh.Signal(name)); err != nil {
		return s.client.explain(err, "send a signal")
	}
	return nil
}

// Wait returns how the shell ended, as Exec does; when ctx ends the shell is
// closed. Somebody must read until io.EOF, or the shell stays blocked in its output.
func (s *Shell) Wait(ctx context.Context) (status int, err error) {
	select {
	case <-s.ended:
	case <-ctx.Done():
		_ = s.Close()
		<-s.ended
	}
	return s.client.ending(ctx, s.err)
}

// Close ends the session; the shell gets SIGHUP. What it printed and nobody read is dropped.
func (s *Shell) Close() error {
	err := s.session.Close()
	_ = s.out.CloseWithError(io.EOF)
	return err
}
