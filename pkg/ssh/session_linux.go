package ssh

import (
	"io"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/crypto/ssh"
)

const (
	maximumVariables = 64
	maximumValue     = 8 << 10
)

// session is one session channel: at most one process.
type session struct {
	*connection
	channel ssh.Channel
	pty     *ptyRequest
	env     []string
	process *process
	release func()
	input   sync.WaitGroup
}

// serve answers until the client closed the channel or the connection ended.
func (s *session) serve(requests <-chan *ssh.Request) {
	defer s.input.Wait()
	defer s.channel.Close()
	for {
		var done <-chan struct{}
		if s.process != nil {
			done = s.process.done
		}
		select {
		case r, open := <-requests:
			if !open {
				if s.process != nil {
					s.process.hangUp(s.server.options.HangUpGrace)
					s.release()
				}
				return
			}
			ok := s.answer(r)
			if r.WantReply {
				_ = r.Reply(ok, nil)
			}
			if ok && s.process == nil && starts(r.Type) {
				s.finish(255, nil) // it was asked for in good form, and failed
			}
		case <-done:
			status, signal := s.process.ending()
			s.process = nil
			s.release()
			s.finish(status, signal)
			// The channel lives until the client closes its side too.
			for r := range requests {
				if r.WantReply {
					_ = r.Reply(false, nil)
				}
			}
			return
		}
	}
}

func starts(request string) bool {
	return request == "shell" || request == "exec" || request == "subsystem"
}

func (s *session) finish(status uint32, signal *exitSignal) {
	if signal != nil {
		_, _ = s.channel.SendRequest("exit-signal", false, ssh.Marshal(signal))
	} else {
		_, _ = s.channel.SendRequest("exit-status", false, ssh.Marshal(exitStatus{status}))
	}
	_ = s.channel.CloseWrite()
	_ = s.channel.Close()
}

func (s *session) answer(r *ssh.Request) bool {
	switch r.Type {
	case "env":
		var e envRequest
		if ssh.Unmarshal(r.Payload, &e) != nil || !passes(e) || len(s.env) >= maximumVariables {
			return false
		}
		s.env = append(s.env, e.Name+"="+e.Value)
		return true
	case "pty-req":
		var p ptyRequest
		if ssh.Unmarshal(r.Payload, &p) != nil || s.process != nil || len(p.Term) > 256 || strings.ContainsRune(p.Term, 0) {
			return false
		}
		if !s.access.has(RightShell) {
			s.refuse(RightShell)
			return false
		}
		s.pty = &p
		return true
	case "shell":
		return s.run(RightShell, func(a Account) command {
			// A zeroth argument with a dash makes any shell a login shell.
			return command{path: a.Shell, arguments: []string{"-" + filepath.Base(a.Shell)}}
		})
	case "exec":
		var e execRequest
		if ssh.Unmarshal(r.Payload, &e) != nil || strings.ContainsRune(e.Command, 0) {
			return false
		}
		return s.run(RightExec, func(a Account) command {
			return command{path: a.Shell, arguments: []string{filepath.Base(a.Shell), "-c", e.Command}}
		})
	case "subsystem":
		var b subsystemRequest
		if ssh.Unmarshal(r.Payload, &b) != nil || b.Name != "sftp" {
			return false
		}
		s.pty = nil
		return s.run(RightFiles, func(Account) command {
			files := s.server.options.Files
			return command{path: files[0], arguments: files}
		})
	case "window-change":
		var w windowChange
		if ssh.Unmarshal(r.Payload, &w) != nil {
			return false
		}
		if s.process != nil {
			s.process.resize(w)
		} else if s.pty != nil {
			s.pty.Columns, s.pty.Rows, s.pty.WidthPixels, s.pty.HeightPix = w.Columns, w.Rows, w.WidthPixels, w.HeightPix
		}
		return true
	case "signal":
		var g signalRequest
		if ssh.Unmarshal(r.Payload, &g) != nil || s.process == nil {
			return false
		}
		number, known := signals[g.Signal]
		if known {
			s.process.signal(number)
		}
		return known
	case keepAliveRequest:
		return true
	default: // agent and X11 forwarding among them
		return false
	}
}

// passes is the allow-list of variables that a client may set.
func passes(e envRequest) bool {
	if len(e.Value) > maximumValue || strings.ContainsRune(e.Value, 0) || strings.ContainsAny(e.Name, "=\x00") {
		return false
	}
	return e.Name == "LANG" || e.Name == "TERM" || strings.HasPrefix(e.Name, "LC_") && len(e.Name) <= 64
}

// run starts the session's one process. It is false where the grant or the
// protocol forbids it; where the VM cannot do it, it is true, the reason stands
// on the error stream, and no process was made.
func (s *session) run(right Right, make func(Account) command) bool {
	if s.process != nil || s.release != nil {
		return false
	}
	if !s.access.has(right) {
		s.refuse(right)
		return false
	}
	release, err := s.server.takeSession()
	if err != nil {
		s.say(err.Error())
		return false
	}
	s.release = release
	account, err := FindAccount(s.server.options.Etc, s.server.options.User)
	if err != nil {
		s.say(err.Error())
		release()
		return true
	}
	c := make(account)
	c.account, c.pty = account, s.pty
	c.environment = account.Environment(s.server.options.Environment)
	if s.pty != nil && s.pty.Term != "" {
		c.environment = append(c.environment, "TERM="+s.pty.Term)
	}
	c.environment = append(c.environment, s.env...)
	p, err := start(c, s.channel, s.channel.Stderr())
	if err != nil {
		s.server.options.Log.Warn("ssh session could not start", "client", s.access.Client, "error", err)
		s.say(err.Error())
		release()
		return true
	}
	s.process = p
	s.server.options.Log.Info("ssh session started", "client", s.access.Client, "user", s.access.User,
		"right", string(right), "terminal", s.pty != nil, "login", account.Name, "pid", p.cmd.Process.Pid)
	s.input.Go(func() {
		// A process that closed its input does not end the session: the rest is read and dropped.
		if _, err := io.Copy(p.input, s.channel); err == nil {
			p.endInput()
			return
		}
		_, _ = io.Copy(io.Discard, s.channel)
	})
	return true
}

func (s *session) refuse(right Right) {
	s.say("the grant does not hold the right \"" + string(right) + "\"")
}

func (s *session) say(text string) {
	_, _ = io.WriteString(s.channel.Stderr(), "cosmicac: "+text+"\r\n")
}
