package seed

import (
	"encoding/base64"
	"strings"
	"testing"

	agentv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
)

const wantDocument = `{"version":1,"network_id":"AAECAwQFBgcICQoLDA0ODw==","ork_key":"12D3KooW","job_id":"j-1","attempt_id":"a-1",` +
	`"join_token":"once","default_user":"ubuntu","gpu_count":8,"environment":{"A":"1","B":"two \"words\""},"start_script":"#!/bin/sh\necho hi\n"}` + "\n"

const wantUnit = `[Unit]
Description=CosmicAC agent
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=0

[Service]
Type=exec
ExecStartPre=/bin/sh -c 'mkdir -p /run/cosmicac/agent && { mountpoint -q /run/cosmicac/agent || mount -o ro /dev/disk/by-id/virtio-cosmicac-agent /run/cosmicac/agent; }'
ExecStart=/run/cosmicac/agent/cosmicac-wrk-agent-instance --seed /etc/cosmicac/seed.json
Restart=always
RestartSec=2
KillMode=mixed
TimeoutStopSec=45

[Install]
WantedBy=multi-user.target
`

func sample() *agentv1.Seed {
	return &agentv1.Seed{
		Version: 1, NetworkId: []byte{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, OrkKey: "12D3KooW", JobId: "j-1", AttemptId: "a-1",
		JoinToken: "once", DefaultUser: "ubuntu", GpuCount: 8, Environment: map[string]string{"B": `two "words"`, "A": "1"},
		StartScript: "#!/bin/sh\necho hi\n",
	}
}

func TestUserDataIsByteForByteTheSame(t *testing.T) {
	t.Parallel()
	want := "#cloud-config\n" +
		"hostname: \"a-1-n0\"\n" +
		"preserve_hostname: false\n" +
		"write_files:\n" +
		"- path: /etc/cosmicac/seed.json\n" +
		"  owner: root:root\n" +
		"  permissions: '0600'\n" +
		"  encoding: b64\n" +
		"  content: " + base64.StdEncoding.EncodeToString([]byte(wantDocument)) + "\n" +
		"- path: /etc/systemd/system/cosmicac-agent.service\n" +
		"  owner: root:root\n" +
		"  permissions: '0644'\n" +
		"  encoding: b64\n" +
		"  content: " + base64.StdEncoding.EncodeToString([]byte(wantUnit)) + "\n" +
		"runcmd:\n" +
		"- [systemctl, daemon-reload]\n" +
		"- [systemctl, enable, cosmicac-agent.service]\n" +
		"- [systemctl, restart, --no-block, cosmicac-agent.service]\n"
	for range 20 {
		got, err := Render(sample(), AgentInstance, "a-1-n0")
		if err != nil {
			t.Fatal(err)
		}
		if string(got[KeyUserData]) != want {
			t.Fatalf("user data:\n%s\nwant:\n%s", got[KeyUserData], want)
		}
		// KubeVirt mounts the key and makes no file of nothing.
		if got, there := got[KeyNetworkData]; !there || len(got) != 0 {
			t.Fatalf("network data: %q", got)
		}
	}
}

func TestAnAgentReadsTheSeedItWasGiven(t *testing.T) {
	t.Parallel()
	raw, err := Document(sample())
	if err != nil {
		t.Fatal(err)
	}
	var back agentv1.Seed
	if err := protojson.Unmarshal(raw, &back); err != nil {
		t.Fatal(err)
	}
	if !proto.Equal(&back, sample()) {
		t.Fatalf("read back %v", &back)
	}
}

func TestASeedThatNoSecretCanHoldIsRefused(t *testing.T) {
	t.Parallel()
	s := sample()
	s.StartScript = strings.Repeat("x", 1<<20)
	if _, err := Render(s, AgentInference, "a-1-n0"); err == nil || !strings.Contains(err.Error(), "start script") {
		t.Fatalf("error %v", err)
	}
}
