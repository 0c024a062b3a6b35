package daemon

import (
	"path/filepath"
	"regexp"

	"github.com/multiformats/go-multiaddr"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/log"
)

// LogConfig is the configuration of pkg/log.
type LogConfig = log.Config

// Base is the part of the configuration that every daemon has. A daemon's own
// struct embeds it with the tag `yaml:",inline"`.
type Base struct {
	// Name is the daemon's name in the roster. [the service's name]
	Name string `yaml:"name"`
	// StateDirectory holds key, network and data; one daemon each.
	// [/var/lib/cosmicac/<service>]
	StateDirectory string `yaml:"state_directory"`
	// Log says where lines go. Its file is [<state>/<name>.log].
	Log LogConfig `yaml:"log"`
	// StatusFile is written every 5 s and on change. [<state>/status.json]
	StatusFile string `yaml:"status_file"`
	// Mesh is the daemon's place in the mesh.
	Mesh MeshConfig `yaml:"mesh"`
}

// MeshConfig is a daemon's place in the mesh.
type MeshConfig struct {
	// Listen are multiaddresses: /ip4/0.0.0.0/tcp/4811, /ip4/0.0.0.0/udp/4811/quic-v1.
	Listen []string `yaml:"listen"`
	// Announce replaces the listen addresses in what others are told.
	Announce []string `yaml:"announce"`
	// NetworkDirectory holds the signed records. [<state>/network]
	NetworkDirectory string `yaml:"network_directory"`
	// Private says that nobody reaches this daemon from outside: it keeps relay
	// reservations at the bootstraps and punches holes. [false]
	Private bool `yaml:"private"`
}

// dnsLabel is the form of a name in the roster.
var dnsLabel = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)

func (b *Base) fill(service string) {
	if b.Name == "" {
		b.Name = service
	}
	if b.StateDirectory == "" {
		b.StateDirectory = filepath.Join("/var/lib/cosmicac", service)
	}
	if b.StatusFile == "" {
		b.StatusFile = filepath.Join(b.StateDirectory, "status.json")
	}
	if b.Log.File == "" {
		b.Log.File = filepath.Join(b.StateDirectory, b.Name+".log")
	}
	b.Log.Fill()
	if b.Mesh.NetworkDirectory == "" {
		b.Mesh.NetworkDirectory = filepath.Join(b.StateDirectory, "network")
	}
}

func (b *Base) validate() (faults []fault.Detail) {
	bad := func(key, rule string) { faults = append(faults, fault.Detail{Field: key, Rule: rule}) }
	if !dnsLabel.MatchString(b.Name) {
		bad("name", "must be a DNS label: a-z, 0-9 and -, at most 63")
	}
	for _, d := range b.Log.Validate() {
		bad("log."+d.Field, d.Rule)
	}
	for key, list := range map[string][]string{"mesh.listen": b.Mesh.Listen, "mesh.announce": b.Mesh.Announce} {
		for _, a := range list {
			if _, err := multiaddr.NewMultiaddr(a); err != nil {
				bad(key, "must be multiaddresses such as /ip4/0.0.0.0/tcp/4811 or /ip4/0.0.0.0/udp/4811/quic-v1, not \""+a+"\"")
			}
		}
	}
	return faults
}
