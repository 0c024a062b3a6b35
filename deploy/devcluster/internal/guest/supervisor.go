package guest

import (
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// What systemd as process 1 understands, so that `kill -s RTMIN+4 1` in a machine is a power-off.
const (
	sigPowerOff = syscall.Signal(38) // SIGRTMIN+4
	sigReboot   = syscall.Signal(39) // SIGRTMIN+5
)

// supervisor is process 1 of a machine: it runs the agent unit, restarts it as the unit says, reaps orphans, and
// stops everything when the power button is pressed.
type supervisor struct {
	m       Machine
	root    string // host path of the root folder, for machines without namespaces
	console *console

	out     *os.File // write end of the pipe that feeds the console
	agent   int      // process id, 0 when it does not run
	restart <-chan time.Time
}

// run returns when the machine is off.
func (s *supervisor) run() error {
	signals := make(chan os.Signal, 64)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT, syscall.SIGPWR, syscall.SIGCHLD, sigPowerOff, sigReboot)
	signal.Ignore(syscall.SIGHUP, syscall.SIGPIPE)
	if !s.m.Isolated {
		// Orphans come to this process instead of the host's init, so that a stop can find them.
		_ = unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
	}
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	s.out = w
	go io.Copy(s.console, r)

	if s.m.Unit == nil {
		fmt.Fprintln(s.console, "simulated machine has no agent unit and only sleeps")
	}
	s.start()
	for {
		select {
		case sig := <-signals:
			switch sig {
			case syscall.SIGCHLD:
				s.reap()
			case sigReboot:
				fmt.Fprintln(s.console, "simulated machine reboots")
				s.stop()
				s.start()
			default:
				fmt.Fprintln(s.console, "simulated machine powers off")
				s.stop()
				return nil
			}
		case <-s.restart:
			s.restart = nil
			s.start()
		}
	}
}

func (s *supervisor) start() {
	u := s.m.Unit
	if u == nil || s.agent != 0 {
		return
	}
	for _, k := range u.Ignored {
		fmt.Fprintf(s.console, "simulated machine: %s= of the agent unit is not played\n", k)
	}
	home := s.inside("/root")
	env := append([]string{
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=" + home, "USER=root", "LOGNAME=root",
		"SHELL=/bin/bash", "LANG=C.UTF-8",
	}, u.Environment...)
	argv := make([]string, len(u.Exec))
	for i, a := range u.Exec {
		argv[i] = s.inside(a)
	}
	dir := s.inside(u.WorkingDir)
	if u.WorkingDir == "" {
		if dir = "/"; !s.m.Isolated {
			dir = home
		}
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		fmt.Fprintf(s.console, "simulated machine: %v\n", err)
		return
	}
	defer null.Close()
	attr := &syscall.SysProcAttr{Setsid: true}
	if !s.m.Isolated {
		// A plain machine that is killed takes its agent along. The signal is bound to the thread that forks, which
		// is the locked main thread.
		attr.Pdeathsig = syscall.SIGKILL
	}
	p, err := os.StartProcess(argv[0], argv, &os.ProcAttr{Dir: dir, Env: env, Files: []*os.File{null, s.out, s.out}, Sys: attr})
	if err != nil {
		fmt.Fprintf(s.console, "simulated machine: the agent does not start: %v\n", err)
		s.later(1)
		return
	}
	s.agent = p.Pid
	p.Release() // reaped by the loop, with all other children
}

// reap collects every ended child, the agent and the orphans that fell to process 1.
func (s *supervisor) reap() {
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, syscall.WNOHANG, nil)
		if err == syscall.EINTR {
			continue
		}
		if err != nil || pid <= 0 {
			return
		}
		if pid != s.agent {
			continue
		}
		s.agent = 0
		code := status.ExitStatus()
		if status.Signaled() {
			code = 128 + int(status.Signal())
		}
		fmt.Fprintf(s.console, "simulated machine: the agent ended with code %d\n", code)
		s.later(code)
	}
}

func (s *supervisor) later(code int) {
	if s.m.Unit.Restarts(code) {
		s.restart = time.After(s.m.Unit.RestartWait)
	}
}

// stop ends the agent and everything else in the machine: politely, and after the unit's time by force.
func (s *supervisor) stop() {
	s.restart = nil
	wait := 90 * time.Second
	if s.m.Unit != nil {
		wait = s.m.Unit.StopWait
	}
	if s.agent != 0 {
		_ = syscall.Kill(s.agent, syscall.SIGTERM)
		s.until(time.Now().Add(wait), func() bool { return s.agent == 0 })
	}
	s.all(syscall.SIGTERM)
	s.all(syscall.SIGHUP) // shells ignore SIGTERM
	s.until(time.Now().Add(2*time.Second), s.alone)
	s.all(syscall.SIGKILL)
	s.until(time.Now().Add(2*time.Second), s.alone)
	s.agent, s.restart = 0, nil
}

// all signals every process of the machine but this one.
func (s *supervisor) all(sig syscall.Signal) {
	if s.m.Isolated {
		_ = syscall.Kill(-1, sig)
		return
	}
	for _, d := range descendants(os.Getpid()) {
		d.signal(sig)
	}
}

// alone says whether no child is left. In a PID namespace every process ends up a child of this one.
func (s *supervisor) alone() bool {
	_, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
	return err == syscall.ECHILD
}

func (s *supervisor) until(deadline time.Time, done func() bool) {
	for time.Now().Before(deadline) {
		s.reap()
		if done() {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// inside translates a path of the machine for a machine without its own root: the agent disk is the host's folder,
// and what exists in, or belongs into, the machine's folder is taken from there.
func (s *supervisor) inside(p string) string {
	if s.m.Isolated || !strings.HasPrefix(p, "/") {
		return p
	}
	if rest, ok := strings.CutPrefix(p, agentMount); ok && (rest == "" || rest[0] == '/') && s.m.AgentDir != "" {
		return s.m.AgentDir + rest
	}
	for _, d := range []string{"/etc/cosmicac", "/run", "/home", "/root", "/tmp", "/var", "/mnt", "/srv"} {
		if p == d || strings.HasPrefix(p, d+"/") {
			return filepath.Join(s.root, p)
		}
	}
	if _, err := os.Lstat(filepath.Join(s.root, p)); err == nil {
		return filepath.Join(s.root, p)
	}
	return p
}
