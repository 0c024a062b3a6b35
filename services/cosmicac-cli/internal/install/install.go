// Package install makes a whole network on one host: keys, roster, network
// files and one config file a daemon. The demo uses it in a folder of its own,
// `cosmicac bootstrap` in the host's folders. It starts nothing.
package install

import (
	"crypto/rand"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/goccy/go-yaml"
	"github.com/google/renameio/v2"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/trust"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

// Daemon is one process of the plan.
type Daemon struct {
	// Name is unique in the network and names files: "wrk-ork", "worker-us".
	Name string
	// Service is the binary without its prefix: "wrk-server-k8s-nvidia".
	Service string
	Role    meshv1.Role
	// MeshPort is both TCP and UDP.
	MeshPort int
	// Extra are the service's own config keys, in order.
	Extra yaml.MapSlice
}

// Binary is the file name of the daemon's program.
func (d Daemon) Binary() string { return "cosmicac-" + d.Service }

// Files says where one daemon's files lie.
type Files struct{ Config, State, Log, Status string }

// Layout maps a daemon to its files.
type Layout func(Daemon) Files

// Plan is what to make.
type Plan struct {
	NetworkName string
	Daemons     []Daemon
	Layout      Layout
	// Root is put before the Layout's paths when files are written; config
	// files name the paths without it.
	Root string
	// OperatorDirectory gets root.key, operator.key and network/.
	OperatorDirectory string
	// Listen is the address that mesh ports listen on, as 127.0.0.1 or 0.0.0.0.
	Listen string
	// Announce is what other hosts dial; empty lets daemons find out.
	Announce string
	LogLevel string
	LogForm  string
	Now      time.Time
}

// Result is what was made.
type Result struct {
	NetworkID string
	// Keys are peer ids by daemon name, and "operator".
	Keys map[string]string
	// SecondRootKeyFile is to be moved to a safe place by the operator.
	SecondRootKeyFile string
}

// Make writes everything. It refuses to touch an operator directory that
// already holds a network, before writing anything.
func Make(p Plan) (*Result, error) {
	if _, err := os.Stat(filepath.Join(p.OperatorDirectory, "network")); err == nil {
		return nil, fault.New(fault.Conflict, "%s already holds a network; remove it, or name another folder", p.OperatorDirectory)
	}
	if err := os.MkdirAll(p.OperatorDirectory, 0o700); err != nil {
		return nil, fault.Wrap(fault.Invalid, err, "make operator folder %s", p.OperatorDirectory)
	}
	result := &Result{Keys: map[string]string{}}
	var members []*meshv1.Member
	var bootstraps []*meshv1.BootstrapAddress
	member := func(name string, key *identity.Key, role meshv1.Role) *meshv1.Member {
		m := &meshv1.Member{Key: key.ID().String(), Name: name, Roles: []meshv1.Role{role}, AdmittedAt: timestamppb.New(p.Now)}
		members = append(members, m)
		result.Keys[name] = m.Key
		return m
	}
	for _, d := range p.Daemons {
		f := p.Layout(d)
		state := filepath.Join(p.Root, f.State)
		// What lies above is everybody's way to its own: each daemon is a user.
		if err := os.MkdirAll(filepath.Dir(state), 0o755); err != nil {
			return nil, fault.Wrap(fault.Invalid, err, "make the folder of state folders")
		}
		if err := os.MkdirAll(state, 0o700); err != nil {
			return nil, fault.Wrap(fault.Invalid, err, "make state folder of %s", d.Name)
		}
		key, err := identity.LoadOrCreate(filepath.Join(state, "identity.key"))
		if err != nil {
			return nil, err
		}
		m := member(d.Name, key, d.Role)
		m.SignsCertificates = d.Role == meshv1.Role_ROLE_ORK
		m.SignsGrants = d.Role == meshv1.Role_ROLE_APP_NODE
		if d.Role == meshv1.Role_ROLE_BOOTSTRAP {
			bootstraps = append(bootstraps, &meshv1.BootstrapAddress{Key: m.Key, Addresses: multiaddresses(p.announceAddress(), d.MeshPort)})
		}
	}
	root, err := identity.LoadOrCreate(filepath.Join(p.OperatorDirectory, "root.key"))
	if err != nil {
		return nil, err
	}
	second, err := identity.LoadOrCreate(filepath.Join(p.OperatorDirectory, "second-root.key"))
	if err != nil {
		return nil, err
	}
	result.SecondRootKeyFile = filepath.Join(p.OperatorDirectory, "second-root.key")
	operator, err := identity.LoadOrCreate(filepath.Join(p.OperatorDirectory, "operator.key"))
	if err != nil {
		return nil, err
	}
	member("operator", operator, meshv1.Role_ROLE_OPERATOR)

	networkDirectory := filepath.Join(p.OperatorDirectory, "network")
	network, err := trust.Create(networkDirectory, p.NetworkName, root, second, members, bootstraps)
	if err != nil {
		return nil, err
	}
	result.NetworkID = network.ID().String()
	for _, d := range p.Daemons {
		f := p.Layout(d)
		if err := copyDirectory(networkDirectory, filepath.Join(p.Root, f.State, "network")); err != nil {
			return nil, err
		}
		if err := p.writeConfig(d, f); err != nil {
			return nil, err
		}
	}
	return result, nil
}

func (p Plan) announceAddress() string {
	if p.Announce != "" {
		return p.Announce
	}
	return p.Listen
}

func multiaddresses(host string, port int) []string {
	kind := "ip4"
	switch {
	case len(host) > 0 && (host[0] < '0' || host[0] > '9') && host[0] != ':':
		kind = "dns"
	default:
		for _, r := range host {
			if r == ':' {
				kind = "ip6"
			}
		}
	}
	return []string{fmt.Sprintf("/%s/%s/tcp/%d", kind, host, port), fmt.Sprintf("/%s/%s/udp/%d/quic-v1", kind, host, port)}
}

func (p Plan) writeConfig(d Daemon, f Files) error {
	mesh := yaml.MapSlice{{Key: "listen", Value: multiaddresses(p.Listen, d.MeshPort)}}
	if p.Announce != "" {
		mesh = append(mesh, yaml.MapItem{Key: "announce", Value: multiaddresses(p.Announce, d.MeshPort)})
	}
	document := yaml.MapSlice{
		{Key: "name", Value: d.Name},
		{Key: "state_directory", Value: f.State},
		{Key: "status_file", Value: f.Status},
		{Key: "log", Value: yaml.MapSlice{{Key: "file", Value: f.Log}, {Key: "level", Value: p.LogLevel}, {Key: "format", Value: p.LogForm}}},
		{Key: "mesh", Value: mesh},
	}
	raw, err := yaml.Marshal(append(document, d.Extra...))
	if err != nil {
		return err
	}
	head := fmt.Sprintf("# %s, made by `cosmicac bootstrap`. Every key is explained in %s.example.yaml.\n", d.Name, d.Service)
	for _, dir := range []string{filepath.Dir(f.Config), filepath.Dir(f.Log), filepath.Dir(f.Status)} {
		if err := os.MkdirAll(filepath.Join(p.Root, dir), 0o755); err != nil {
			return fault.Wrap(fault.Invalid, err, "make folder of %s", d.Name)
		}
	}
	if err := renameio.WriteFile(filepath.Join(p.Root, f.Config), append([]byte(head), raw...), 0o644); err != nil {
		return fault.Wrap(fault.Invalid, err, "write config of %s", d.Name)
	}
	return nil
}

func copyDirectory(from, to string) error {
	if err := os.MkdirAll(to, 0o700); err != nil {
		return fault.Wrap(fault.Invalid, err, "make %s", to)
	}
	entries, err := os.ReadDir(from)
	if err != nil {
		return fault.Wrap(fault.Invalid, err, "read %s", from)
	}
	for _, entry := range entries {
		info, err := entry.Info()
		if err != nil {
			return err
		}
		if !info.Mode().IsRegular() {
			continue
		}
		raw, err := os.ReadFile(filepath.Join(from, entry.Name()))
		if err != nil {
			return fault.Wrap(fault.Invalid, err, "read %s", entry.Name())
		}
		if err := renameio.WriteFile(filepath.Join(to, entry.Name()), raw, info.Mode().Perm()); err != nil {
			return fault.Wrap(fault.Invalid, err, "write %s", filepath.Join(to, entry.Name()))
		}
	}
	return nil
}

// Password makes a random password of 20 characters for a first login.
func Password() (string, error) {
	const letters = "abcdefghjkmnpqrstuvwxyzABCDEFGHJKMNPQRSTUVWXYZ23456789"
	raw := make([]byte, 20)
	if _, err := rand.Read(raw); err != nil {
		return "", err
	}
	for i, b := range raw {
		// 54 letters: the slight bias of the remainder costs under a tenth of a bit.
		raw[i] = letters[int(b)%len(letters)]
	}
	return string(raw), nil
}
