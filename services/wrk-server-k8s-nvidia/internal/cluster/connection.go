package cluster

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// pollPeriod is how often the kubeconfig file is looked at.
const pollPeriod = 2 * time.Second

// FaultCode says what is wrong with the way to the cluster.
type FaultCode string

// The ways in which a cluster cannot be asked.
const (
	FaultNone FaultCode = ""
	// FaultRefused: the API server answers 401 to the newest credentials.
	FaultRefused FaultCode = "credentials_refused"
	// FaultUnreachable: no answer, or the server says that it cannot serve.
	FaultUnreachable FaultCode = "unreachable"
)

// Fault is why the cluster cannot be asked, and since when by this host's clock.
type Fault struct {
	Code  FaultCode
	Words string
	Since time.Time
}

// ConnectionOptions are what a Connection is made of.
type ConnectionOptions struct {
	// Kubeconfig is the path of the file; its current context is used.
	Kubeconfig string
	// Now is the clock; time.Now when nil.
	Now func() time.Time
	Log hclog.Logger
	// Changed is called, without locks held, when the fault comes, changes or
	// goes. It must not block. May be nil.
	Changed func()
	// Observed is called after each request with the verb of HTTP and the class
	// of the answer ("2xx", "401", "error"). May be nil.
	Observed func(method, class string)
}

// Connection is an HTTP transport to the API server of a kubeconfig file. The
// file is read again when it changes, and at once after a 401; a request that
// met a 401 is sent once more with what was found. The old credentials stay in
// use while the new file cannot be read. Safe for concurrent use.
type Connection struct {
	o ConnectionOptions

	mu      sync.Mutex
	current *target
	badSum  [sha256.Size]byte // of the last file that could not be used
	fault   Fault
	lastOK  time.Time
	skew    time.Duration // of the newest answer's Date
	dated   bool
}

// target is one reading of the kubeconfig.
type target struct {
	sum       [sha256.Size]byte
	base      *url.URL
	transport http.RoundTripper
}

// NewConnection reads the kubeconfig. It does not dial.
func NewConnection(o ConnectionOptions) (*Connection, error) {
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Log == nil {
		o.Log = hclog.NewNullLogger()
	}
	c := &Connection{o: o}
	t, err := load(o.Kubeconfig)
	if err != nil {
		return nil, err
	}
	c.current = t
	return c, nil
}

// load makes a target of the file as it is now.
func load(path string) (*target, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read kubeconfig: %w", err)
	}
	loaded, err := clientcmd.LoadFromFile(path)
	if err != nil {
		return nil, fmt.Errorf("read kubeconfig %s: %w", path, err)
	}
	if err := clientcmd.ResolveLocalPaths(loaded); err != nil {
		return nil, fmt.Errorf("kubeconfig %s: %w", path, err)
	}
	config, err := clientcmd.NewDefaultClientConfig(*loaded, &clientcmd.ConfigOverrides{}).ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("kubeconfig %s: %w", path, err)
	}
	base, _, err := rest.DefaultServerUrlFor(config)
	if err != nil {
		return nil, fmt.Errorf("kubeconfig %s: server: %w", path, err)
	}
	transport, err := rest.TransportFor(config)
	if err != nil {
		return nil, fmt.Errorf("kubeconfig %s: %w", path, err)
	}
	return &target{sum: sha256.Sum256(raw), base: base, transport: transport}, nil
}

// Run looks at the file until ctx ends.
func (c *Connection) Run(ctx context.Context) error {
	tick := time.NewTicker(pollPeriod)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			c.reload(false)
		}
	}
}

// reload reads the file when its content differs from what is in use, or
// whenever force is set, and returns what is in use afterwards.
func (c *Connection) reload(force bool) *target {
	raw, err := os.ReadFile(c.o.Kubeconfig)
	sum := sha256.Sum256(raw)
	c.mu.Lock()
	defer c.mu.Unlock()
	if err == nil && !force && sum == c.current.sum {
		return c.current
	}
	if !force && sum == c.badSum {
		return c.current
	}
	var next *target
	if err == nil {
		next, err = load(c.o.Kubeconfig)
	}
	if err != nil {
		c.badSum = sum
		c.o.Log.Warn("kubeconfig cannot be used, the former one stays", "error", err)
		return c.current
	}
	if next.sum != c.current.sum {
		c.o.Log.Info("kubeconfig changed, using the new one", "server", next.base.Host)
	}
	old := c.current
	c.current, c.badSum = next, [sha256.Size]byte{}
	if old.transport != next.transport {
		utilnet.CloseIdleConnectionsFor(old.transport)
	}
	return next
}

// RoundTrip implements http.RoundTripper. The request's scheme and host are
// replaced by those of the kubeconfig.
func (c *Connection) RoundTrip(req *http.Request) (*http.Response, error) {
	c.mu.Lock()
	used := c.current
	c.mu.Unlock()
	sent := c.o.Now()
	res, err := used.send(req, req.Body)
	if err == nil && res.StatusCode == http.StatusUnauthorized {
		if again, ok := rewind(req); ok {
			drain(res)
			res, err = c.fresher(used).send(req, again)
		}
	}
	c.observe(req, res, err, sent)
	return res, err
}

// fresher gives a target that is newer than the one that met a 401.
func (c *Connection) fresher(used *target) *target {
	c.mu.Lock()
	current := c.current
	c.mu.Unlock()
	if current != used {
		return current
	}
	return c.reload(true)
}

func (t *target) send(req *http.Request, body io.ReadCloser) (*http.Response, error) {
	out := req.Clone(req.Context())
	out.Body = body
	out.URL.Scheme, out.URL.Host, out.Host = t.base.Scheme, t.base.Host, t.base.Host
	out.URL.Path = strings.TrimSuffix(t.base.Path, "/") + req.URL.Path
	return t.transport.RoundTrip(out)
}

// rewind gives the body of a request anew, if that can be done.
func rewind(req *http.Request) (io.ReadCloser, bool) {
	if req.Body == nil || req.Body == http.NoBody {
		return req.Body, true
	}
	if req.GetBody == nil {
		return nil, false
	}
	body, err := req.GetBody()
	return body, err == nil
}

func drain(res *http.Response) {
	_, _ = io.Copy(io.Discard, io.LimitReader(res.Body, 64<<10))
	_ = res.Body.Close()
}

// observe keeps the fault up to date with one more answer, to a request that left at
// sent. A request that fails while the server has answered others since it left
// speaks of itself alone: a busy server lets some wait too long.
func (c *Connection) observe(req *http.Request, res *http.Response, err error, sent time.Time) {
	next := Fault{}
	class := "error"
	switch {
	case err != nil:
		if errors.Is(req.Context().Err(), context.Canceled) {
			return // our own doing says nothing of the cluster
		}
		next = Fault{Code: FaultUnreachable, Words: oneLine(err.Error())}
	case res.StatusCode == http.StatusUnauthorized:
		class = "401"
		next = Fault{Code: FaultRefused, Words: "the API server refuses our credentials (401)"}
	case res.StatusCode == http.StatusServiceUnavailable:
		class = "503"
		next = Fault{Code: FaultUnreachable, Words: "the API server says that it cannot serve (503)"}
	default:
		class = fmt.Sprintf("%dxx", res.StatusCode/100)
	}
	if c.o.Observed != nil {
		c.o.Observed(req.Method, class)
	}
	c.mu.Lock()
	if res != nil {
		if date, err := http.ParseTime(res.Header.Get("Date")); err == nil {
			c.skew, c.dated = date.Sub(c.o.Now()), true
		}
	}
	before := c.fault
	if err != nil && c.lastOK.After(sent) {
		c.mu.Unlock()
		return
	}
	switch {
	case next.Code == FaultNone:
		c.lastOK = c.o.Now()
	case next.Code == before.Code:
		next.Since = before.Since
	default:
		next.Since = c.o.Now()
	}
	c.fault = next
	c.mu.Unlock()
	if before.Code == next.Code {
		return
	}
	if next.Code == FaultNone {
		c.o.Log.Info("the cluster answers again", "after", c.o.Now().Sub(before.Since).Round(time.Second))
	} else {
		c.o.Log.Warn("the cluster cannot be asked; attempts keep their state", "code", next.Code, "why", next.Words)
	}
	if c.o.Changed != nil {
		c.o.Changed()
	}
}

// Fault is what stood in the way of the newest answer; its Code is FaultNone
// when nothing did.
func (c *Connection) Fault() Fault {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.fault
}

// Skew is how far the cluster's clock is ahead of this host's, to a second, by
// the newest answer; false when none came yet.
func (c *Connection) Skew() (time.Duration, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.skew, c.dated
}

// LastAnswer is when the cluster last answered well; zero for never.
func (c *Connection) LastAnswer() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.lastOK
}

// oneLine makes text fit for a log line and a report: no control characters,
// at most 500 bytes.
func oneLine(s string) string {
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(s, "?"))
	if len(s) > 500 {
		s = strings.ToValidUTF8(s[:497], "") + "..."
	}
	return strings.TrimSpace(s)
}

// Server is the API server's host and port, for people.
func (c *Connection) Server() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.current.base.Host
}
