package ssh

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/pkg/sftp"
	"golang.org/x/crypto/ssh"

	"github.com/cosmicac/cosmicac/pkg/fault"
)

const (
	clientPingEvery   = 4 * time.Second
	clientPingMissing = 8 * time.Second
)

// Client is one SSH connection to an agent. It is safe for concurrent use.
type Client struct {
	conn   net.Conn
	client *ssh.Client
	cancel context.CancelFunc
	tasks  sync.WaitGroup
	done   chan struct{}

	mu   sync.Mutex
	lost error
}

// Dial speaks SSH on conn and checks that the server holds hostKey, which is in
// authorized_keys form as cards and grants carry it. An empty user is the VM's
// default login. ctx bounds the handshake alone. The client owns conn from now
// on, also when Dial fails. A server that answers nothing for 12 s is given up.
func Dial(ctx context.Context, conn net.Conn, hostKey, user string) (*Client, error) {
	key, _, _, _, err := ssh.ParseAuthorizedKey([]byte(hostKey))
	if err != nil {
		conn.Close()
		return nil, fault.Wrap(fault.Invalid, err, "the agent's ssh host key is not in authorized_keys form")
	}
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	var banner string
	sshConn, channels, requests, err := ssh.NewClientConn(conn, "cosmicac", &ssh.ClientConfig{
		User: user,
		HostKeyCallback: func(_ string, _ net.Addr, have ssh.PublicKey) error {
			return ssh.FixedHostKey(key)("", nil, have)
		},
		HostKeyAlgorithms: []string{key.Type()},
		BannerCallback:    func(text string) error { banner = text[:min(len(text), 1024)]; return nil },
		ClientVersion:     "SSH-2.0-CosmicAC",
	})
	inTime := stop()
	if err == nil && !inTime {
		sshConn.Close()
		err = ctx.Err()
	}
	if err != nil {
		conn.Close()
		switch {
		case ctx.Err() != nil:
			return nil, fault.Wrap(fault.KindOf(ctx.Err()), ctx.Err(), "ssh handshake with the agent")
		case banner != "":
			return nil, fault.Wrap(fault.Denied, err, "the agent refused the login: %s", printable(banner))
		}
		return nil, fault.Wrap(fault.Unavailable, err, "ssh handshake with the agent")
	}
	alive, cancel := context.WithCancel(context.Background())
	c := &Client{conn: conn, client: ssh.NewClient(sshConn, channels, requests), cancel: cancel, done: make(chan struct{})}
	c.tasks.Go(func() { c.watch(alive) })
	c.tasks.Go(func() {
		if err := c.client.Wait(); fault.Is(err, fault.Denied) {
			c.setLost(err) // the agent cut this user off, and said so
		}
		cancel()
		close(c.done)
	})
	return c, nil
}

// watch closes the connection of a server that went silent, so that nothing
// hangs after this machine slept or lost its network.
func (c *Client) watch(ctx context.Context) {
	tick := time.NewTicker(clientPingEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		missing := time.AfterFunc(clientPingMissing, func() {
			c.setLost(fault.New(fault.Unreachable, "the connection to the VM is lost: no answer for %s; the session is gone", clientPingMissing))
			c.conn.Close()
		})
		_, _, err := c.client.SendRequest(keepAliveRequest, true, nil)
		missing.Stop()
		if err != nil {
			return
		}
	}
}

func (c *Client) setLost(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.lost == nil {
		c.lost = err
	}
}

// explain says why an operation of a connection failed.
func (c *Client) explain(err error, what string) error {
	c.mu.Lock()
	lost := c.lost
	c.mu.Unlock()
	if lost != nil {
		return lost
	}
	var refused *ssh.OpenChannelError
	if errors.As(err, &refused) {
		kind := fault.Unavailable
		switch refused.Reason {
		case ssh.Prohibited:
			kind = fault.Denied
		case ssh.ResourceShortage:
			kind = fault.Exhausted
		}
		return fault.Wrap(kind, err, "%s: %s", what, printable(refused.Message))
	}
	return fault.Wrap(fault.Unreachable, err, "%s: the connection to the VM broke", what)
}

// Close ends the connection; sessions that run get SIGHUP in the VM.
func (c *Client) Close() error {
	c.cancel()
	c.setLost(fault.New(fault.Canceled, "the ssh connection was closed here"))
	err := c.client.Close()
	c.conn.Close()
	c.tasks.Wait()
	return err
}

// Done is closed when the connection has ended, from either side.
func (c *Client) Done() <-chan struct{} { return c.done }

// DialTCP connects to address ("host:port") from inside the VM. It needs the
// right "forward". One connection's end leaves the others alone.
func (c *Client) DialTCP(ctx context.Context, address string) (net.Conn, error) {
	conn, err := c.client.DialContext(ctx, "tcp", address)
	if err != nil {
		if ctx.Err() != nil {
			return nil, fault.Wrap(fault.KindOf(ctx.Err()), ctx.Err(), "forward to %s", address)
		}
		return nil, c.explain(err, "forward to "+address)
	}
	return conn, nil
}

// Files opens SFTP as the VM's default user. It needs the right "files".
func (c *Client) Files() (*sftp.Client, error) {
	files, err := sftp.NewClient(c.client)
	if err != nil {
		return nil, fault.Wrap(fault.Denied, err, "open sftp on the agent: the grant does not hold the right \"files\", or the agent could not start it")
	}
	return files, nil
}

// Command is what Exec runs.
type Command struct {
	// Line is given to the login's shell with -c.
	Line string
	// Environment passes only LANG and LC_* and TERM at the other end.
	Environment map[string]string
	// Input may be nil. It is read until it ends; a reader that blocks is read
	// once more after the command has ended.
	Input          io.Reader
	Output, Errors io.Writer
	// Terminal asks for one; Output then gets both streams.
	Terminal *Size
	Term     string
}

// Exec runs a command and waits for it. The status is exact; a command that a
// signal ended has 128 and the signal's number, and the error says so in words.
// When the connection breaks the status is 255 with an error of kind unreachable.
// When ctx ends the session is closed, and the command gets SIGHUP.
func (c *Client) Exec(ctx context.Context, command Command) (status int, err error) {
	s, err := c.client.NewSession()
	if err != nil {
		return 255, c.explain(err, "open a session")
	}
	defer s.Close()
	stop := context.AfterFunc(ctx, func() { s.Close() })
	defer stop()
	for k, v := range command.Environment {
		_ = s.Setenv(k, v) // a refusal only means that it is not on the list
	}
	if command.Terminal != nil {
		if err := s.RequestPty(command.Term, int(command.Terminal.Rows), int(command.Terminal.Columns), ssh.TerminalModes{}); err != nil {
			return 255, fault.Wrap(fault.Denied, err, "the agent gave no terminal: the grant does not hold the right \"shell\"")
		}
	}
	s.Stdout, s.Stderr = command.Output, command.Errors
	input, err := s.StdinPipe()
	if err != nil {
		return 255, err
	}
	if err := s.Start(command.Line); err != nil {
		return 255, c.startError(err, "run a command", RightExec)
	}
	if command.Input == nil {
		_ = input.Close()
	} else {
		// Ends with the input, or at its first byte after the session ended.
		go func() {
			_, _ = io.Copy(input, command.Input)
			_ = input.Close()
		}()
	}
	return c.ending(ctx, s.Wait())
}

func (c *Client) startError(err error, what string, right Right) error {
	c.mu.Lock()
	lost := c.lost
	c.mu.Unlock()
	if lost != nil {
		return lost
	}
	return fault.Wrap(fault.Denied, err, "%s: the agent refused it; the grant must hold the right %q", what, string(right))
}

// ending turns what Wait of a session says into a status.
func (c *Client) ending(ctx context.Context, err error) (int, error) {
	var exit *ssh.ExitError
	switch {
	case err == nil:
		return 0, nil
	case errors.As(err, &exit) && exit.Signal() == "":
		return exit.ExitStatus(), nil
	case errors.As(err, &exit):
		return exit.ExitStatus(), fault.New(fault.FailedPrecondition, "the command was ended by signal %s", printable(exit.Signal()))
	case ctx.Err() != nil:
		return 255, fault.Wrap(fault.KindOf(ctx.Err()), ctx.Err(), "wait for the command")
	}
	return 255, c.explain(err, "wait for the command")
}

// printable takes control bytes out of a peer's text before a person's terminal sees it.
func printable(text string) string {
	out := make([]rune, 0, len(text))
	for _, r := range text {
		switch {
		case r == '\n' || r == '\r' || r == '\t':
			out = append(out, ' ')
		case r < 0x20 || r == 0x7f || r >= 0x80 && r < 0xa0:
			out = append(out, []rune(fmt.Sprintf("\\x%02x", r))...)
		default:
			out = append(out, r)
		}
	}
	for len(out) > 0 && out[len(out)-1] == ' ' {
		out = out[:len(out)-1]
	}
	return string(out)
}
