package ssh

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// A process that left children behind can leave its output open for ever.
	// So after its exit output is read until it ends, or until none came for this long.
	pipeIdle     = 2 * time.Second
	terminalIdle = 250 * time.Millisecond
)

// command is what a session runs.
type command struct {
	account     Account
	path        string
	arguments   []string // with the zeroth
	environment []string
	pty         *ptyRequest // nil for pipes
}

// process is a running command: the leader of its own session and process group.
type process struct {
	cmd    *exec.Cmd
	tty    *os.File // the master, nil with pipes
	input  *os.File // where the client's bytes go; the master with a terminal
	exited chan struct{}
	done   chan struct{} // exited, and all its output was handed on
}

// start runs c and copies its output to stdout and stderr until done is closed.
// With a terminal all output goes to stdout.
func start(c command, stdout, stderr io.Writer) (*process, error) {
	p := &process{exited: make(chan struct{}), done: make(chan struct{})}
	var outputs []*os.File
	var err error
	if c.pty != nil {
		outputs, err = p.startTerminal(c)
	} else {
		outputs, err = p.startPipes(c)
	}
	if err != nil {
		return nil, err
	}
	idle := pipeIdle
	if p.tty != nil {
		idle = terminalIdle
	}
	var copies sync.WaitGroup
	for i, from := range outputs {
		to := stdout
		if i == 1 {
			to = stderr
		}
		copies.Go(func() { p.copyOut(to, from, idle) })
	}
	go func() {
		_ = p.cmd.Wait() // the state says how it ended
		close(p.exited)
		for _, o := range outputs {
			_ = o.SetReadDeadline(time.Now().Add(idle))
		}
		copies.Wait()
		for _, o := range outputs {
			o.Close()
		}
		p.input.Close()
		close(p.done)
	}()
	return p, nil
}

func (p *process) startTerminal(c command) ([]*os.File, error) {
	master, slave, name, err := openPTY()
	if err != nil {
		return nil, err
	}
	defer slave.Close()
	if err := applyModes(slave, c.pty.Modes); err != nil {
		master.Close()
		return nil, fmt.Errorf("set the modes of terminal %s: %w", name, err)
	}
	if err := resize(master, c.pty.Columns, c.pty.Rows, c.pty.WidthPixels, c.pty.HeightPix); err != nil {
		master.Close()
		return nil, fmt.Errorf("set the size of terminal %s: %w", name, err)
	}
	if c.account.Switch {
		// The login must be able to open its own terminal by name.
		if err := control(slave, func(fd int) error {
			return errors.Join(unix.Fchown(fd, int(c.account.UID), int(c.account.GID)), unix.Fchmod(fd, 0o620))
		}); err != nil {
			master.Close()
			return nil, fmt.Errorf("give terminal %s to %s: %w", name, c.account.Name, err)
		}
	}
	c.environment = append(c.environment, "SSH_TTY="+name)
	p.cmd, err = launch(c, slave, slave, slave, true)
	if err != nil {
		master.Close()
		return nil, err
	}
	p.tty, p.input = master, master
	return []*os.File{master}, nil
}

func (p *process) startPipes(c command) ([]*os.File, error) {
	var ours, theirs []*os.File
	closeAll := func(files []*os.File) {
		for _, f := range files {
			f.Close()
		}
	}
	for i := range 3 {
		r, w, err := os.Pipe()
		if err != nil {
			closeAll(append(ours, theirs...))
			return nil, fmt.Errorf("make pipes: %w", err)
		}
		if i == 0 {
			ours, theirs = append(ours, w), append(theirs, r)
		} else {
			ours, theirs = append(ours, r), append(theirs, w)
		}
	}
	cmd, err := launch(c, theirs[0], theirs[1], theirs[2], false)
	closeAll(theirs)
	if err != nil {
		closeAll(ours)
		return nil, err
	}
	p.cmd, p.input = cmd, ours[0]
	return ours[1:], nil
}

func launch(c command, stdin, stdout, stderr *os.File, terminal bool) (*exec.Cmd, error) {
	once := func(directory string) (*exec.Cmd, error) {
		cmd := &exec.Cmd{
			Path: c.path, Args: c.arguments, Env: c.environment, Dir: directory,
			Stdin: stdin, Stdout: stdout, Stderr: stderr, SysProcAttr: c.account.Attributes(),
		}
		cmd.SysProcAttr.Setsid = true
		cmd.SysProcAttr.Setctty = terminal
		return cmd, cmd.Start()
	}
	directory := c.account.Directory()
	cmd, err := once(directory)
	if err != nil && directory != "/" && errors.Is(err, fs.ErrPermission) {
		cmd, err = once("/") // a home that its owner may not enter
	}
	if err != nil {
		return nil, fmt.Errorf("start %s as %s: %w", c.path, c.account.Name, err)
	}
	return cmd, nil
}

func (p *process) copyOut(to io.Writer, from *os.File, idle time.Duration) {
	buffer := make([]byte, 32<<10)
	for {
		select {
		case <-p.exited:
			_ = from.SetReadDeadline(time.Now().Add(idle))
		default:
		}
		n, err := from.Read(buffer)
		if n > 0 {
			if _, err := to.Write(buffer[:n]); err != nil {
				return // the client is gone; the session's owner ends the process
			}
		}
		if err != nil {
			return
		}
	}
}

// endInput passes on that the client will send no more.
func (p *process) endInput() {
	if p.tty == nil {
		p.input.Close()
		return
	}
	if key := endOfFile(p.tty); key != nil {
		_, _ = p.tty.Write(key)
	}
}

func (p *process) resize(w windowChange) {
	if p.tty != nil {
		_ = resize(p.tty, w.Columns, w.Rows, w.WidthPixels, w.HeightPix)
	}
}

// signal reaches the foreground of the terminal, or the whole group.
func (p *process) signal(s syscall.Signal) {
	select {
	case <-p.exited:
		return
	default:
	}
	_ = syscall.Kill(-p.foreground(), s)
}

func (p *process) foreground() int {
	group := p.cmd.Process.Pid
	if p.tty != nil {
		_ = control(p.tty, func(fd int) error {
			g, err := unix.IoctlGetInt(fd, unix.TIOCGPGRP)
			if err == nil && g > 0 {
				group = g
			}
			return err
		})
	}
	return group
}

// hangUp ends a process whose client is gone: SIGHUP to its group and to the
// foreground of its terminal, SIGKILL to what is left of them after grace.
// Groups that it made for background jobs get what their shell gives them. It
// returns when the process is reaped.
func (p *process) hangUp(grace time.Duration) {
	groups := []int{p.cmd.Process.Pid}
	if f := p.foreground(); f != groups[0] {
		groups = append(groups, f)
	}
	send := func(s syscall.Signal) {
		for _, g := range groups {
			_ = syscall.Kill(-g, s)
		}
	}
	send(syscall.SIGHUP)
	if p.tty != nil {
		p.tty.Close()
	}
	timer := time.NewTimer(grace)
	defer timer.Stop()
	select {
	case <-p.exited:
	case <-timer.C:
	}
	send(syscall.SIGKILL)
	<-p.done
}

// ending says how the process ended: a status, or a signal by its SSH name.
func (p *process) ending() (status uint32, signal *exitSignal) {
	ws, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus)
	if !ok {
		return 255, nil
	}
	if ws.Signaled() {
		name := signalName(ws.Signal())
		return 0, &exitSignal{Signal: name, CoreDumped: ws.CoreDump(), Message: ws.Signal().String()}
	}
	return uint32(ws.ExitStatus()), nil
}

var signals = map[string]syscall.Signal{
	"ABRT": syscall.SIGABRT, "ALRM": syscall.SIGALRM, "FPE": syscall.SIGFPE, "HUP": syscall.SIGHUP, "ILL": syscall.SIGILL,
	"INT": syscall.SIGINT, "KILL": syscall.SIGKILL, "PIPE": syscall.SIGPIPE, "QUIT": syscall.SIGQUIT, "SEGV": syscall.SIGSEGV,
	"TERM": syscall.SIGTERM, "USR1": syscall.SIGUSR1, "USR2": syscall.SIGUSR2,
}

func signalName(s syscall.Signal) string {
	for name, have := range signals {
		if have == s {
			return name
		}
	}
	// Local names carry a domain, RFC 4254 section 6.10.
	return fmt.Sprintf("SIG%d@cosmicac.dev", int(s))
}
