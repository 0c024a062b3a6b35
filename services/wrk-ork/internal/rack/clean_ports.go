package rack

import (
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/spec"
)

// mostHosts bounds the addresses of one port.
const mostHosts = 8

// cleanPorts bounds what a worker says of declared ports.
func cleanPorts(all []*orkv1.PortAddress) []*orkv1.PortAddress {
	if len(all) > spec.Ports {
		all = all[:spec.Ports]
	}
	var out []*orkv1.PortAddress
	for _, a := range all {
		if a.GetPort() == nil || a.Port.Port > 65535 || a.PublicPort > 65535 {
			continue
		}
		a.Port.Protocol, a.Port.Name = text(a.Port.Protocol), text(a.Port.Name)
		if len(a.Hosts) > mostHosts {
			a.Hosts = a.Hosts[:mostHosts]
		}
		for i := range a.Hosts {
			a.Hosts[i] = text(a.Hosts[i])
		}
		out = append(out, a)
	}
	return out
}
