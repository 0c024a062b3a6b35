// Package controlplane runs the real parts of the development cluster in this process: etcd, kube-apiserver,
// kube-scheduler and the controllers that ownership, namespaces, accounts, quotas and volumes need. Nothing in here is
// simulated, and nothing in here knows of GPUs or virtual machines.
//
// One control plane a process: the libraries underneath keep process-wide registries (feature gates, metrics).
package controlplane

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/hashicorp/go-hclog"
	"go.etcd.io/etcd/server/v3/embed"
	"k8s.io/client-go/rest"
)

// Options says where and how to run.
type Options struct {
	Dir   string // state folder, exists and is writable
	Port  int    // 0 takes the remembered port, or a free one
	Fsync bool   // etcd syncs to disk
	Log   hclog.Logger
}

// ControlPlane is a running control plane.
type ControlPlane struct {
	URL    string
	CAFile string

	creds  credentials
	log    hclog.Logger
	etcd   *embed.Etcd
	cancel []func() // stops, in order of starting
	died   chan error
}

// Start brings everything up and returns when the API server says it is ready. On failure what was started is stopped.
func Start(ctx context.Context, o Options) (_ *ControlPlane, err error) {
	c := &ControlPlane{log: o.Log, died: make(chan error, 4)}
	defer func() {
		if err != nil {
			c.Stop()
		}
	}()
	if c.creds, err = loadCredentials(filepath.Join(o.Dir, "pki")); err != nil {
		return nil, err
	}
	listener, err := Listen(filepath.Join(o.Dir, "port"), o.Port)
	if err != nil {
		return nil, err
	}
	c.URL = "https://" + listener.Addr().String()
	c.CAFile = filepath.Join(o.Dir, "pki", "serving", "apiserver.crt")

	etcdURL, err := c.startEtcd(ctx, filepath.Join(o.Dir, "etcd"), o.Fsync)
	if err != nil {
		listener.Close()
		return nil, err
	}
	if err := c.startAPIServer(ctx, listener, etcdURL, filepath.Dir(c.CAFile)); err != nil {
		return nil, err
	}
	if err := c.startControllers(ctx); err != nil {
		return nil, err
	}
	if err := c.startScheduler(ctx); err != nil {
		return nil, err
	}
	return c, nil
}

// Died yields an error when a part ended without being asked to.
func (c *ControlPlane) Died() <-chan error { return c.died }

// Stop ends the parts in the reverse order of starting, so that none loses what it stands on, and etcd last.
func (c *ControlPlane) Stop() {
	for i := len(c.cancel) - 1; i >= 0; i-- {
		c.cancel[i]()
	}
	c.cancel = nil
}

// background runs f until the control plane stops. Stop waits for f at most as long as patience says: some of the
// libraries' loops do not return promptly, and after their context ended they do no more harm.
func (c *ControlPlane) background(ctx context.Context, name string, patience time.Duration, f func(context.Context) error) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	done := make(chan struct{})
	go func() {
		defer close(done)
		err := f(ctx)
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			err = errors.New("ended by itself")
		}
		select {
		case c.died <- fmt.Errorf("%s: %w", name, err):
		default:
		}
	}()
	c.cancel = append(c.cancel, func() {
		cancel()
		select {
		case <-done:
		case <-time.After(patience):
			c.log.Debug("part did not stop in time", "part", name)
		}
	})
}

// Config returns a client configuration for one of the two built-in users, both of system:masters.
func (c *ControlPlane) Config(user User) *rest.Config {
	return &rest.Config{
		Host:            c.URL,
		BearerToken:     c.creds.tokens[user],
		TLSClientConfig: rest.TLSClientConfig{CAFile: c.CAFile},
		QPS:             -1,
		UserAgent:       "cosmicac-devcluster/" + string(user),
	}
}

// Listen takes the wanted port, or the one remembered in file, or a free one that it then remembers: a restart must
// keep the URL that kubeconfigs carry.
func Listen(file string, port int) (net.Listener, error) {
	remembered := 0
	if raw, err := os.ReadFile(file); err == nil {
		remembered, _ = strconv.Atoi(strings.TrimSpace(string(raw)))
	}
	want, source := port, "--port"
	if want == 0 {
		want, source = remembered, "remembered in "+file
	}
	l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(want)))
	if err != nil {
		return nil, fmt.Errorf("listen on port %d (%s): %w", want, source, err)
	}
	got := l.Addr().(*net.TCPAddr).Port
	if got != remembered {
		if err := os.WriteFile(file, []byte(strconv.Itoa(got)+"\n"), 0o600); err != nil {
			l.Close()
			return nil, fmt.Errorf("remember the port: %w", err)
		}
	}
	return l, nil
}
