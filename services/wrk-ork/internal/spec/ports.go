package spec

import (
	"fmt"
	"regexp"
	"strings"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

// Ports is how many public ports a job may declare.
const Ports = 16

// loginPort is left to the mesh: who may log in is said by grants, which end, and
// not by who can reach an address.
const loginPort = 22

var portNameForm = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,13}[a-z0-9])?$`)

// ports checks the declared public ports and names those that have no name. The
// agent listens on a port that its guest chooses at each start, so none is kept for it.
func (p *problems) ports(s *orkv1.JobSpec) {
	switch {
	case len(s.Ports) == 0:
		return
	case s.Kind == orkv1.JobKind_JOB_KIND_MANAGED_INFERENCE:
		p.add("ports", "are for gpu_container only: a model is reached at its endpoint, with a key")
		return
	case len(s.Ports) > Ports:
		p.add("ports", "has %d; at most %d are allowed", len(s.Ports), Ports)
		return
	}
	places, names := map[string]int{}, map[string]int{}
	for i, port := range s.Ports {
		field := fmt.Sprintf("ports[%d]", i)
		if port.Protocol = strings.ToLower(port.Protocol); port.Protocol == "" {
			port.Protocol = "tcp"
		}
		switch {
		case port.Port < 1 || port.Port > 65535:
			p.add(field+".port", "is %d; 1 to 65535 are allowed", port.Port)
			continue
		case port.Port == loginPort:
			p.add(field+".port", "is 22; shells need no port: cosmicac jobs shell, cosmicac ssh-proxy")
			continue
		case port.Protocol != "tcp" && port.Protocol != "udp":
			p.add(field+".protocol", "is tcp or udp")
			continue
		}
		place := fmt.Sprintf("%s-%d", port.Protocol, port.Port)
		if port.Name == "" {
			port.Name = place
		}
		if !portNameForm.MatchString(port.Name) || !strings.ContainsAny(port.Name, "abcdefghijklmnopqrstuvwxyz") || strings.Contains(port.Name, "--") {
			p.add(field+".name", "is 1 to 15 of a-z, 0-9 and single hyphens, with a letter in it")
		}
		if first, ok := places[place]; ok {
			p.add(field, "is declared twice, see ports[%d]", first)
		} else if first, ok := names[port.Name]; ok {
			p.add(field+".name", "is the name of ports[%d], too", first)
		}
		places[place], names[port.Name] = i, i
	}
}
