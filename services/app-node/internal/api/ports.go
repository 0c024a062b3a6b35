package api

import (
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

// Port is a port of a job's VM that the outside may reach.
type Port struct {
	Port     uint32 `json:"port" maximum:"4294967295" doc:"1 to 65535 but 22"`
	Protocol string `json:"protocol,omitempty" enum:"tcp,udp" doc:"tcp when left out"`
	Name     string `json:"name,omitempty" doc:"1 to 15 of a-z, 0-9 and hyphens; like tcp-8080 when left out"`
}

// PortAddress is where a declared port is reached.
type PortAddress struct {
	Port
	Hosts      []string `json:"hosts" doc:"Names or IP addresses: the rack's own, the load balancer's or the node's; empty while the cluster has not said"`
	PublicPort uint32   `json:"public_port" doc:"The port there; 0 while the cluster has not said"`
}

func wirePorts(all []Port) []*orkv1.PublicPort {
	var out []*orkv1.PublicPort
	for _, p := range all {
		out = append(out, &orkv1.PublicPort{Port: p.Port, Protocol: p.Protocol, Name: p.Name})
	}
	return out
}

func ports(all []*orkv1.PublicPort) []Port {
	out := []Port{}
	for _, p := range all {
		out = append(out, port(p))
	}
	return out
}

func port(p *orkv1.PublicPort) Port {
	return Port{Port: p.GetPort(), Protocol: p.GetProtocol(), Name: p.GetName()}
}

// portAddresses are those of a VM that may still be there.
func portAddresses(a *orkv1.Attempt, n *orkv1.AttemptNode) []PortAddress {
	out := []PortAddress{}
	if a.GetGone() {
		return out
	}
	for _, p := range n.GetPorts() {
		out = append(out, PortAddress{Port: port(p.GetPort()), Hosts: texts(p.GetHosts()), PublicPort: p.GetPublicPort()})
	}
	return out
}
