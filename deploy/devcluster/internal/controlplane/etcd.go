package controlplane

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"time"

	"go.etcd.io/etcd/server/v3/embed"
)

// startEtcd runs the one etcd member on unix sockets: no TCP port, and only the owner of the folder reaches it.
func (c *ControlPlane) startEtcd(ctx context.Context, dir string, fsync bool) (string, error) {
	sockets, err := socketDir(dir)
	if err != nil {
		return "", err
	}
	cfg := embed.NewConfig()
	cfg.Dir = filepath.Join(dir, "data")
	// Level error would show two harmless "use of closed network connection" lines at every stop.
	cfg.LogLevel = "panic"
	cfg.UnsafeNoFsync = !fsync
	// One member elects itself; the usual second of waiting for rivals is for nothing.
	cfg.TickMs, cfg.ElectionMs = 10, 100
	cfg.QuotaBackendBytes = 2 << 30
	cfg.AutoCompactionMode, cfg.AutoCompactionRetention = "periodic", "10m"
	client := url.URL{Scheme: "unix", Path: sockets + "/etcd-client.sock:0"}
	peer := url.URL{Scheme: "unix", Path: sockets + "/etcd-peer.sock:0"}
	cfg.ListenClientUrls, cfg.AdvertiseClientUrls = []url.URL{client}, []url.URL{client}
	// The peer listener reads the address from the host part alone; a member of one is never dialled there.
	cfg.ListenPeerUrls = []url.URL{{Scheme: "unix", Host: sockets + "/etcd-peer.sock:0"}}
	cfg.AdvertisePeerUrls = []url.URL{peer}
	cfg.InitialCluster = cfg.Name + "=" + peer.String()

	e, err := embed.StartEtcd(cfg)
	if err != nil {
		return "", fmt.Errorf("start etcd in %s: %w", cfg.Dir, err)
	}
	c.etcd = e
	c.cancel = append(c.cancel, e.Close)
	select {
	case <-e.Server.ReadyNotify():
	case err := <-e.Err():
		return "", fmt.Errorf("start etcd: %w", err)
	case <-time.After(time.Minute):
		return "", errors.New("start etcd: not ready after a minute")
	case <-ctx.Done():
		return "", context.Cause(ctx)
	}
	return client.String(), nil
}

// socketDir is dir itself, or a private folder of the system's temporary folder where dir's name is too long for the
// 108 bytes of a unix socket address.
func socketDir(dir string) (string, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", fmt.Errorf("make the etcd folder: %w", err)
	}
	if len(dir) < 70 {
		return dir, nil
	}
	short := filepath.Join(os.TempDir(), fmt.Sprintf("cosmicac-etcd-%x", sha256.Sum256([]byte(dir)))[:30])
	if err := os.MkdirAll(short, 0o700); err != nil {
		return "", fmt.Errorf("make the etcd socket folder: %w", err)
	}
	return short, nil
}
