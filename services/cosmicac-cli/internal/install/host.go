package install

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/user"
	"path/filepath"
	"regexp"
	"strconv"
	"time"

	"github.com/goccy/go-yaml"
	"github.com/google/renameio/v2"

	"github.com/cosmicac/cosmicac/pkg/fault"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

// Host is what `cosmicac bootstrap` needs to know of a production host.
type Host struct {
	// Root is put before every path; empty on a real host.
	Root string
	// Kubeconfig is the file with the rack's cluster credentials.
	Kubeconfig string
	// Rack and Location name the first rack.
	Rack, Location string
	// Namespace of the worker's objects in the cluster.
	Namespace string
	// Announce is the host's name or address as other hosts and VMs dial it.
	Announce string
	// Site is the address of the front door, as https://cosmicac.example.
	Site string
	// NetworkName is a name for people.
	NetworkName string
	Now         time.Time
}

// Mesh ports of a host's daemons, TCP and UDP alike; deploy/README.md has the
// whole table.
const (
	PortBootstrap = 4801
	PortAppNode   = 4810
	PortOrk       = 4811
	PortProxy     = 4812
	PortMonitor   = 4813
	PortWorker    = 4820
)

var label = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$`)

// check names every wrong field at once.
func (h Host) check() error {
	var bad []fault.Detail
	if !label.MatchString(h.Location) {
		bad = append(bad, fault.Detail{Field: "location", Rule: "1 to 32 lower-case letters, digits and hyphens, as us"})
	}
	if !label.MatchString(h.Rack) {
		bad = append(bad, fault.Detail{Field: "rack", Rule: "1 to 32 lower-case letters, digits and hyphens"})
	}
	if h.Announce == "" {
		bad = append(bad, fault.Detail{Field: "announce", Rule: "this host's name or address as other hosts and VMs reach it"})
	}
	if raw, err := os.ReadFile(h.Kubeconfig); err != nil {
		bad = append(bad, fault.Detail{Field: "kubeconfig", Rule: "a readable file: " + errors.Unwrap(err).Error()})
	} else if err := yaml.Unmarshal(raw, &struct {
		Clusters []any `yaml:"clusters"`
	}{}); err != nil {
		bad = append(bad, fault.Detail{Field: "kubeconfig", Rule: "valid YAML"})
	}
	if len(bad) > 0 {
		return fault.New(fault.Invalid, "bootstrap cannot begin; nothing was written").With(bad...)
	}
	return nil
}

// Daemons of a host, in start order.
func (h Host) Daemons() []Daemon {
	return []Daemon{
		{Name: "mesh-bootstrap", Service: "mesh-bootstrap", Role: meshv1.Role_ROLE_BOOTSTRAP, MeshPort: PortBootstrap},
		{Name: "wrk-ork", Service: "wrk-ork", Role: meshv1.Role_ROLE_ORK, MeshPort: PortOrk},
		{Name: "app-node", Service: "app-node", Role: meshv1.Role_ROLE_APP_NODE, MeshPort: PortAppNode},
		{Name: "worker-" + h.Rack, Service: "wrk-server-k8s-nvidia", Role: meshv1.Role_ROLE_WORKER, MeshPort: PortWorker, Extra: yaml.MapSlice{
			{Key: "rack", Value: yaml.MapSlice{{Key: "id", Value: h.Rack}}},
			{Key: "kubeconfig", Value: "/etc/cosmicac/kubeconfig-" + h.Rack},
			{Key: "namespace", Value: h.Namespace},
		}},
		{Name: "proxy-inference", Service: "proxy-inference", Role: meshv1.Role_ROLE_PROXY, MeshPort: PortProxy},
		{Name: "wrk-monitor", Service: "wrk-monitor", Role: meshv1.Role_ROLE_MONITOR, MeshPort: PortMonitor},
	}
}

// SystemUser of a daemon, as deploy/systemd/cosmicac.sysusers.conf makes it.
func (d Daemon) SystemUser() string {
	return map[string]string{"mesh-bootstrap": "cosmicac-bootstrap", "wrk-ork": "cosmicac-ork", "app-node": "cosmicac-app",
		"wrk-server-k8s-nvidia": "cosmicac-worker", "proxy-inference": "cosmicac-proxy", "wrk-monitor": "cosmicac-monitor"}[d.Service]
}

// Unit of a daemon.
func (d Daemon) Unit(rack string) string {
	if d.Service == "wrk-server-k8s-nvidia" {
		return "cosmicac-wrk-server-k8s-nvidia@" + rack + ".service"
	}
	return "cosmicac-" + d.Service + ".service"
}

// Files of a daemon below the host's root, as the units name them.
func (h Host) Files(d Daemon) Files {
	return Files{
		Config: "/etc/cosmicac/" + d.Name + ".yaml", State: "/var/lib/cosmicac/" + d.Name,
		Log: "/var/log/cosmicac/" + d.Name + "/" + d.Name + ".log", Status: "/run/cosmicac-" + d.Name + "/status.json",
	}
}

// OperatorDirectory of a host.
func (h Host) OperatorDirectory() string { return "/etc/cosmicac/operator" }

// Install makes the host's network, config files and credentials, and gives
// each daemon's files to its user. It starts nothing.
func (h Host) Install() (*Result, error) {
	if err := h.check(); err != nil {
		return nil, err
	}
	result, err := Make(Plan{
		NetworkName: h.NetworkName, Daemons: h.Daemons(), Root: h.Root, Layout: h.Files, OperatorDirectory: filepath.Join(h.Root, h.OperatorDirectory()),
		Listen: "0.0.0.0", Announce: h.Announce, LogLevel: "info", LogForm: "text", Now: h.Now,
	})
	if err != nil {
		return nil, err
	}
	raw, err := os.ReadFile(h.Kubeconfig)
	if err != nil {
		return nil, fault.Wrap(fault.Invalid, err, "read --kubeconfig %s", h.Kubeconfig)
	}
	etc := filepath.Join(h.Root, "etc", "cosmicac")
	if err := renameio.WriteFile(filepath.Join(etc, "kubeconfig-"+h.Rack), raw, 0o600); err != nil {
		return nil, fault.Wrap(fault.Invalid, err, "write the rack's kubeconfig")
	}
	env := fmt.Sprintf("COSMICAC_SITE=%s\nCOSMICAC_UI_ROOT=/usr/local/share/cosmicac/ui\nCOSMICAC_APP_NODE=127.0.0.1:8081\nCOSMICAC_PROXY=127.0.0.1:8082\nCOSMICAC_MONITOR=127.0.0.1:8083\n", h.Site)
	if err := renameio.WriteFile(filepath.Join(etc, "caddy.env"), []byte(env), 0o644); err != nil {
		return nil, fault.Wrap(fault.Invalid, err, "write caddy.env")
	}
	return result, h.giveAway()
}

// giveAway gives each daemon's state and log folder to its user. Without the
// users (a package build, a test) everything stays root's.
func (h Host) giveAway() error {
	for _, d := range h.Daemons() {
		u, err := user.Lookup(d.SystemUser())
		if err != nil {
			if h.Root != "" {
				continue
			}
			return fault.Wrap(fault.FailedPrecondition, err, "system user %s is missing; run make install, or systemd-sysusers cosmicac.conf", d.SystemUser())
		}
		uid, err := strconv.Atoi(u.Uid)
		if err != nil {
			return err
		}
		gid, err := strconv.Atoi(u.Gid)
		if err != nil {
			return err
		}
		f := h.Files(d)
		for _, dir := range []string{f.State, filepath.Dir(f.Log)} {
			err := filepath.WalkDir(filepath.Join(h.Root, dir), func(path string, _ fs.DirEntry, err error) error {
				if err != nil {
					return err
				}
				return os.Lchown(path, uid, gid)
			})
			if err != nil {
				return fault.Wrap(fault.Invalid, err, "give %s to %s", dir, d.SystemUser())
			}
		}
	}
	return nil
}
