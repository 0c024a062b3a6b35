package cli

import (
	"fmt"
	"net"
	"strconv"
	"strings"

	"github.com/cosmicac/cosmicac/services/cosmicac-cli/internal/client"
)

// readPorts reads --port values: [NAME=]PORT[/PROTOCOL]. What may be declared is
// the control plane's to say.
func readPorts(values []string) ([]client.Port, error) {
	var out []client.Port
	for _, v := range values {
		name, place, named := strings.Cut(v, "=")
		if !named {
			name, place = "", v
		}
		number, protocol, _ := strings.Cut(place, "/")
		n, err := strconv.ParseUint(number, 10, 16)
		if err != nil || named && name == "" {
			return nil, usageError{fmt.Errorf("--port %q: must be like 8080/tcp, 53/udp or web=443/tcp", v)}
		}
		out = append(out, client.Port{Port: uint32(n), Protocol: protocol, Name: name})
	}
	return out, nil
}

// portRows say where the declared ports of a job are reached.
func portRows(t *tableWriter, j *client.Job) {
	shown := map[string]bool{}
	for _, r := range j.ReplicaList {
		for _, a := range r.Attempts {
			for _, n := range a.Nodes {
				for _, p := range n.Ports {
					if len(p.Hosts) == 0 || p.PublicPort == 0 {
						continue
					}
					var at []string
					for _, h := range p.Hosts {
						at = append(at, net.JoinHostPort(h, strconv.Itoa(int(p.PublicPort))))
					}
					shown[p.Name] = true
					t.row("port "+p.Name, fmt.Sprintf("%d/%s at %s", p.Port.Port, p.Protocol, strings.Join(at, ", ")))
				}
			}
		}
	}
	for _, p := range j.Ports {
		if !shown[p.Name] {
			t.row("port "+p.Name, fmt.Sprintf("%d/%s is reached nowhere yet", p.Port, p.Protocol))
		}
	}
}
