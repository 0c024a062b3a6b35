package ssh

import (
	"context"
	"errors"
	"net"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/crypto/ssh"

	"github.com/cosmicac/cosmicac/pkg/fault"
)

// Bounds of a server. They hold whatever a client does.
const (
	// DefaultSessions is the cap on sessions with a process, over all connections.
	DefaultSessions = 64
	// channelsPerConnection bounds sessions and forwarded connections of one client.
	channelsPerConnection = 128
	handshakeTime         = 20 * time.Second
	keepAliveEvery        = 15 * time.Second
	keepAliveMissing      = 45 * time.Second
	// hangUpGrace lies between SIGHUP and SIGKILL.
	hangUpGrace = 5 * time.Second
)

// ServerOptions configure a Server. HostKey is required.
type ServerOptions struct {
	HostKey ssh.Signer
	// User is the login that sessions get; see FindAccount.
	User string
	// Etc is where passwd and group are; "/etc" when empty.
	Etc string
	// Environment of the job, given to every session.
	Environment map[string]string
	// Sessions is the cap on running sessions; DefaultSessions when zero.
	Sessions int
	// Files is the command that speaks SFTP on its standard input and output.
	// When empty, this binary again with the argument FilesCommand.
	Files []string
	// Dial makes forwarded connections; a net.Dialer when nil.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// HangUpGrace lies between SIGHUP and SIGKILL of a session whose client is gone; 5 s when zero.
	HangUpGrace time.Duration
	// Changed is called after the number of sessions changed; it must not block.
	Changed func()
	Log     hclog.Logger
}

// Server answers SSH on connections given to Serve. It is safe for concurrent use.
type Server struct {
	options ServerOptions

	mu          sync.Mutex
	sessions    int
	closing     bool
	connections map[*connection]struct{}
}

// NewServer makes a server. It opens nothing.
func NewServer(o ServerOptions) (*Server, error) {
	if o.HostKey == nil {
		return nil, fault.New(fault.Internal, "an ssh server needs a host key")
	}
	if o.Etc == "" {
		o.Etc = "/etc"
	}
	if o.Sessions <= 0 {
		o.Sessions = DefaultSessions
	}
	if len(o.Files) == 0 {
		// By the link and not by its target: the path may be closed to the login.
		o.Files = []string{"/proc/self/exe", FilesCommand}
	}
	if o.Dial == nil {
		o.Dial = (&net.Dialer{Timeout: 10 * time.Second}).DialContext
	}
	if o.HangUpGrace <= 0 {
		o.HangUpGrace = hangUpGrace
	}
	if o.Changed == nil {
		o.Changed = func() {}
	}
	if o.Log == nil {
		o.Log = hclog.NewNullLogger()
	}
	defaultSignals()
	return &Server{options: o, connections: map[*connection]struct{}{}}, nil
}

// defaultSignals makes processes that this one starts have the default action
// for every signal. A parent that ignores some, as a shell does for SIGINT of
// background jobs, hands that down to the last child, and Control-C would be
// dead in every terminal. This process goes on ignoring them.
var defaultSignals = sync.OnceFunc(func() {
	dropped := make(chan os.Signal, 1)
	for _, s := range []os.Signal{
		syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGPIPE, syscall.SIGTERM, syscall.SIGTSTP, syscall.SIGTTIN,
		syscall.SIGTTOU, syscall.SIGCHLD, syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGALRM,
	} {
		if signal.Ignored(s) {
			signal.Notify(dropped, s)
		}
	}
})

// HostKey is the public host key in authorized_keys form.
func (s *Server) HostKey() string { return PublicText(s.options.HostKey.PublicKey()) }

// Sessions is the number of sessions with a running process.
func (s *Server) Sessions() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sessions
}

// Drain refuses new connections and sessions; those that run go on.
func (s *Server) Drain() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closing = true
}

// connection is one client.
type connection struct {
	server   *Server
	access   Access
	conn     net.Conn
	ssh      *ssh.ServerConn
	channels chan struct{} // a slot for each open channel
	once     sync.Once
	tasks    sync.WaitGroup
}

func (c *connection) close() { c.once.Do(func() { c.conn.Close() }) }

// Serve answers one connection until it ends or ctx ends; whoever gave it cuts it
// when its grant is revoked. It returns after every process that the connection started was reaped or, if
// it had ended by itself, was left alone. It closes conn. The connection must
// have been authenticated: whoever speaks on it gets the access.
func (s *Server) Serve(ctx context.Context, conn net.Conn, access Access) error {
	c := &connection{server: s, access: access, conn: conn, channels: make(chan struct{}, channelsPerConnection)}
	defer c.close()
	if err := s.enter(c); err != nil {
		return err
	}
	defer s.leave(c)
	stop := context.AfterFunc(ctx, c.close)
	defer stop()

	config := &ssh.ServerConfig{
		NoClientAuth:         true,
		NoClientAuthCallback: c.admit,
		MaxAuthTries:         3,
		ServerVersion:        "SSH-2.0-CosmicAC",
	}
	config.AddHostKey(s.options.HostKey)
	late := time.AfterFunc(handshakeTime, c.close)
	sshConn, channels, requests, err := ssh.NewServerConn(conn, config)
	late.Stop()
	if err != nil {
		return fault.Wrap(fault.Unavailable, err, "ssh handshake with client %s", access.Client)
	}
	c.ssh = sshConn
	log := s.options.Log.With("client", access.Client, "user", access.User)
	log.Info("ssh connection opened", "rights", access.Rights)

	inner, cancel := context.WithCancel(ctx)
	defer cancel()
	c.tasks.Go(func() { c.global(requests) })
	c.tasks.Go(func() { c.keepAlive(inner) })
	for n := range channels {
		c.accept(inner, n)
	}
	cancel()
	c.close()
	c.tasks.Wait()
	log.Info("ssh connection closed")
	return nil
}

func (s *Server) enter(c *connection) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closing {
		return fault.New(fault.Unavailable, "this agent drains and opens no new shells")
	}
	if len(s.connections) >= s.options.Sessions {
		return fault.New(fault.Exhausted, "this agent has its %d ssh connections open", s.options.Sessions)
	}
	s.connections[c] = struct{}{}
	return nil
}

func (s *Server) leave(c *connection) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.connections, c)
}

// admit refuses a login name that would silently become another. An empty one is the default.
func (c *connection) admit(meta ssh.ConnMetadata) (*ssh.Permissions, error) {
	want, have := meta.User(), c.server.options.User
	if want == "" || want == have || os.Geteuid() != 0 || have == "" && want == "root" {
		return nil, nil
	}
	if have == "" {
		have = "root"
	}
	return nil, &ssh.BannerError{
		Err:     errors.New("unknown login"),
		Message: "cosmicac: this VM gives shells to the user \"" + have + "\" only; use sudo inside it\r\n",
	}
}

// global answers requests that belong to no channel; remote listeners are refused.
func (c *connection) global(requests <-chan *ssh.Request) {
	for r := range requests {
		if r.WantReply {
			_ = r.Reply(r.Type == keepAliveRequest, nil)
		}
	}
}

// keepAlive closes a connection whose client answers nothing. A refusal is an answer.
func (c *connection) keepAlive(ctx context.Context) {
	tick := time.NewTicker(keepAliveEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		missing := time.AfterFunc(keepAliveMissing, func() {
			c.server.options.Log.Info("ssh connection closed, the client is silent", "client", c.access.Client)
			c.close()
		})
		_, _, err := c.ssh.SendRequest(keepAliveRequest, true, nil)
		missing.Stop()
		if err != nil {
			return
		}
	}
}

func (c *connection) accept(ctx context.Context, n ssh.NewChannel) {
	select {
	case c.channels <- struct{}{}:
	default:
		_ = n.Reject(ssh.ResourceShortage, "too many channels on this connection")
		return
	}
	release := func() { <-c.channels }
	switch n.ChannelType() {
	case "session":
		ch, requests, err := n.Accept()
		if err != nil {
			release()
			return
		}
		c.tasks.Go(func() {
			defer release()
			(&session{connection: c, channel: ch}).serve(requests)
		})
	case "direct-tcpip":
		c.tasks.Go(func() {
			defer release()
			c.forward(ctx, n)
		})
	default:
		release()
		_ = n.Reject(ssh.UnknownChannelType, "this agent does not open channels of type "+n.ChannelType())
	}
}

// takeSession counts a session in; release counts it out, once.
func (s *Server) takeSession() (release func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closing {
		return nil, fault.New(fault.Unavailable, "this agent drains and opens no new shells")
	}
	if s.sessions >= s.options.Sessions {
		return nil, fault.New(fault.Exhausted, "all %d sessions of this agent are in use", s.options.Sessions)
	}
	s.sessions++
	s.options.Changed()
	return sync.OnceFunc(func() {
		s.mu.Lock()
		s.sessions--
		s.mu.Unlock()
		s.options.Changed()
	}), nil
}
