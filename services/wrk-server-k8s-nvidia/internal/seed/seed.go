// Package seed renders what a virtual machine is born with: cloud-init user
// data that writes the seed document and starts the agent from its disk, and
// network data. The same input always gives the same bytes.
//
// It keeps nothing and talks to nobody. A seed holds a one-time join token, so
// what it renders belongs in a Secret and in no log.
package seed

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"path"
	"strings"

	"google.golang.org/protobuf/encoding/protojson"

	agentv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
)

// Paths inside the guest.
const (
	SeedFile = "/etc/cosmicac/seed.json"
	UnitFile = "/etc/systemd/system/cosmicac-agent.service"
	AgentDir = "/run/cosmicac/agent"
	// DiskSerial is the virtio serial of the agent's disk.
	DiskSerial = "cosmicac-agent"
)

// MaximumUserData is the most that a Secret of one seed may take. Kubernetes
// takes 1 MiB for a Secret in all.
const MaximumUserData = 900 << 10

// Keys of the Secret, as KubeVirt reads them.
const (
	KeyUserData    = "userdata"
	KeyNetworkData = "networkdata"
)

// Agent is the program that a virtual machine runs.
type Agent string

// The agents on the agent disk.
const (
	AgentInstance  Agent = "cosmicac-wrk-agent-instance"
	AgentInference Agent = "cosmicac-wrk-agent-inference"
)

// Render gives the Secret's content for one virtual machine. Its network data is
// empty: the image then asks for an address on its first interface in its own
// way. A match by name, which an interface without a known address would need, is
// understood by netplan alone and leaves every other image without a network.
func Render(s *agentv1.Seed, agent Agent, hostname string) (map[string][]byte, error) {
	document, err := Document(s)
	if err != nil {
		return nil, err
	}
	name, err := json.Marshal(hostname) // a JSON string is a YAML string
	if err != nil {
		return nil, err
	}
	var b strings.Builder
	b.WriteString("#cloud-config\n")
	fmt.Fprintf(&b, "hostname: %s\n", name)
	b.WriteString("preserve_hostname: false\n")
	b.WriteString("write_files:\n")
	writeFile(&b, SeedFile, "0600", document)
	writeFile(&b, UnitFile, "0644", []byte(unit(agent)))
	b.WriteString("runcmd:\n")
	b.WriteString("- [systemctl, daemon-reload]\n")
	b.WriteString("- [systemctl, enable, cosmicac-agent.service]\n")
	b.WriteString("- [systemctl, restart, --no-block, cosmicac-agent.service]\n")
	if b.Len() > MaximumUserData {
		return nil, fmt.Errorf("the seed takes %d bytes as user data, at most %d are possible: shorten the start script or the environment", b.Len(), MaximumUserData)
	}
	return map[string][]byte{KeyUserData: []byte(b.String()), KeyNetworkData: {}}, nil
}

// Document is the seed as protobuf JSON with the names of the wire file, on
// one line. protojson alone varies its white space on purpose.
func Document(s *agentv1.Seed) ([]byte, error) {
	raw, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(s)
	if err != nil {
		return nil, fmt.Errorf("render the seed: %w", err)
	}
	var out bytes.Buffer
	if err := json.Compact(&out, raw); err != nil {
		return nil, fmt.Errorf("render the seed: %w", err)
	}
	out.WriteByte('\n')
	return out.Bytes(), nil
}

func writeFile(b *strings.Builder, name, mode string, content []byte) {
	fmt.Fprintf(b, "- path: %s\n  owner: root:root\n  permissions: '%s'\n  encoding: b64\n  content: %s\n",
		name, mode, base64.StdEncoding.EncodeToString(content))
}

// unit starts the agent from its read-only disk, in this boot and every later
// one. The mount is repeated only when it is missing, so a restart is harmless.
func unit(agent Agent) string {
	return strings.Join([]string{
		"[Unit]",
		"Description=CosmicAC agent",
		"Wants=network-online.target",
		"After=network-online.target",
		"StartLimitIntervalSec=0",
		"",
		"[Service]",
		"Type=exec",
		fmt.Sprintf("ExecStartPre=/bin/sh -c 'mkdir -p %[1]s && { mountpoint -q %[1]s || mount -o ro /dev/disk/by-id/virtio-%[2]s %[1]s; }'", AgentDir, DiskSerial),
		fmt.Sprintf("ExecStart=%s --seed %s", path.Join(AgentDir, string(agent)), SeedFile),
		"Restart=always",
		"RestartSec=2",
		"KillMode=mixed",
		"TimeoutStopSec=45",
		"",
		"[Install]",
		"WantedBy=multi-user.target",
		"",
	}, "\n")
}
