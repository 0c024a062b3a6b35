//go:build unix

package ssh

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
	"golang.org/x/term"

	"github.com/cosmicac/cosmicac/pkg/fault"
)

// Terminal is a person's own terminal for Attach.
type Terminal struct {
	// Input may be a terminal, which is then in raw mode for as long as the shell
	// runs, or a pipe or file.
	Input  *os.File
	Output io.Writer
	// Term names the terminal, as in $TERM.
	Term string
	// Environment passes LANG and LC_* only.
	Environment map[string]string
	// Line runs a command instead of the login's shell.
	Line string
	// NoEscape turns off "~." at the start of a line.
	NoEscape bool
}

// ErrEscaped is what Attach ends with when the person typed "~.".
var ErrEscaped = fault.New(fault.Canceled, "disconnected by ~.")

// Attach joins a person's terminal with a shell in the VM until one of them
// ends, and returns how the shell ended, as Exec does. Changes of size are
// passed on. At the start of a line, "~." gives the session up, "~~" types a
// tilde and "~?" says so; that works on a dead connection too. The terminal's
// mode is restored before it returns. All its goroutines have ended by then.
func (c *Client) Attach(ctx context.Context, t Terminal) (status int, err error) {
	fd := int(t.Input.Fd())
	size := Size{Columns: 80, Rows: 24}
	interactive := term.IsTerminal(fd)
	if interactive {
		if w, h, err := term.GetSize(fd); err == nil {
			size = Size{Columns: uint32(w), Rows: uint32(h)}
		}
	}
	shell, err := c.OpenShell(size, t.Term, t.Line, t.Environment)
	if err != nil {
		return 255, err
	}
	defer shell.Close()
	if interactive {
		old, err := term.MakeRaw(fd)
		if err != nil {
			return 255, fmt.Errorf("put the terminal in raw mode: %w", err)
		}
		defer func() { _ = term.Restore(fd, old) }()
	}
	input, err := newWakeReader(t.Input)
	if err != nil {
		return 255, err
	}
	defer input.close()
	ctx, cancel := context.WithCancelCause(ctx)
	var tasks sync.WaitGroup
	defer tasks.Wait()
	defer cancel(nil)
	context.AfterFunc(ctx, input.wake)
	typed := make(chan []byte, 256)
	tasks.Go(func() {
		defer close(typed)
		escape := escapeFilter{off: t.NoEscape || !interactive}
		buffer := make([]byte, 16<<10)
		for {
			n, err := input.Read(buffer)
			data, verdict := escape.filter(buffer[:n])
			if len(data) > 0 {
				select {
				case typed <- data:
				case <-ctx.Done():
					return
				}
			}
			switch verdict {
			case escapeLeave:
				cancel(ErrEscaped)
				return
			case escapeHelp:
				fmt.Fprint(os.Stderr, "~.  end the connection\r\n~~  type a tilde\r\n")
			}
			if err != nil {
				return
			}
		}
	})
	tasks.Go(func() {
		for data := range typed {
			if _, err := shell.Write(data); err != nil {
				for range typed { // the session's end is told elsewhere
				}
				return
			}
		}
		if ctx.Err() == nil {
			_ = shell.in.Close()
		}
	})
	if interactive {
		changed := make(chan os.Signal, 1)
		signal.Notify(changed, syscall.SIGWINCH)
		defer signal.Stop(changed)
		tasks.Go(func() {
			for {
				select {
				case <-ctx.Done():
					return
				case <-changed:
					if w, h, err := term.GetSize(fd); err == nil {
						_ = shell.Resize(Size{Columns: uint32(w), Rows: uint32(h)})
					}
				}
			}
		})
	}
	printed := make(chan struct{})
	tasks.Go(func() {
		defer close(printed)
		_, _ = io.Copy(t.Output, shell)
	})
	status, err = shell.Wait(ctx)
	if errors.Is(context.Cause(ctx), ErrEscaped) {
		return 255, ErrEscaped
	}
	if err == nil {
		<-printed // every byte before the prompt comes back
	}
	return status, err
}

type escapeVerdict int

const (
	escapeNone escapeVerdict = iota
	escapeLeave
	escapeHelp
)

// escapeFilter finds "~" at the start of a line of typed bytes.
type escapeFilter struct {
	off     bool
	middle  bool // a byte of the current line was typed
	pending bool // a tilde at the start waits for what follows
}

// filter returns a copy of what is to be sent. After a verdict the rest of p is dropped.
func (e *escapeFilter) filter(p []byte) ([]byte, escapeVerdict) {
	out := make([]byte, 0, len(p)+1)
	if e.off {
		return append(out, p...), escapeNone
	}
	for _, b := range p {
		if e.pending {
			e.pending = false
			switch b {
			case '.':
				return out, escapeLeave
			case '?':
				return out, escapeHelp
			case '~':
			default:
				out = append(out, '~')
			}
		} else if b == '~' && !e.middle {
			e.pending = true
			continue
		}
		out = append(out, b)
		e.middle = b != '\r' && b != '\n'
	}
	return out, escapeNone
}

// wakeReader reads a file that cannot be given up by closing it, as standard input.
type wakeReader struct {
	file          *os.File
	signal, woken *os.File
}

func newWakeReader(file *os.File) (*wakeReader, error) {
	woken, signal, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("make a pipe: %w", err)
	}
	return &wakeReader{file: file, signal: signal, woken: woken}, nil
}

func (w *wakeReader) wake() { _, _ = w.signal.Write([]byte{0}) }

func (w *wakeReader) close() {
	w.signal.Close()
	w.woken.Close()
}

// Read blocks for input, end of input, or wake, which gives io.EOF.
func (w *wakeReader) Read(p []byte) (int, error) {
	for {
		fds := []unix.PollFd{
			{Fd: int32(w.file.Fd()), Events: unix.POLLIN},
			{Fd: int32(w.woken.Fd()), Events: unix.POLLIN},
		}
		if _, err := unix.Poll(fds, -1); err != nil {
			if errors.Is(err, unix.EINTR) {
				continue
			}
			return 0, err
		}
		if fds[1].Revents != 0 {
			return 0, io.EOF
		}
		if fds[0].Revents != 0 {
			return w.file.Read(p)
		}
	}
}
