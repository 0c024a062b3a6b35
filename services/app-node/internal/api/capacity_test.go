package api_test

import (
	"bytes"
	"testing"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

func TestRacksNodesGPUsAndLocations(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	_, token := l.user("ana@example.org")
	key := l.key.ID().String()
	l.ok(200, nil, "PUT", "/api/v1/racks/us-1", l.admin, map[string]any{"location": "US", "key": l.key.Hex(), "maximum_gpus": 8})
	l.ork.mu.Lock()
	l.ork.racks["us-1"].Nodes = []*orkv1.RackNode{
		{Name: "n1", Schedulable: true, Gpus: []*orkv1.GpuCapacity{{Model: "H100", Total: 8, Healthy: 8, Held: 6, Offerable: 2, Holders: map[string]uint32{"a-1": 6}}}},
		{Name: "n2", Schedulable: true, Gpus: []*orkv1.GpuCapacity{{Model: "H100", Total: 8, Healthy: 8, Held: 0, Offerable: 8}}},
	}
	l.ork.mu.Unlock()
	l.ok(200, nil, "POST", "/api/v1/racks/us-1/cordon", l.admin, map[string]any{"cordoned": true})
	var entry struct {
		Cordoned bool
		Key      string
	}
	l.ok(200, &entry, "PUT", "/api/v1/racks/us-1", l.admin, map[string]any{"location": "us", "key": key})
	if !entry.Cordoned || entry.Key != key {
		t.Errorf("changing an entry gave %+v", entry)
	}
	type gpu struct{ Total, Held, Offerable, Largest int }
	gpus := func() (out struct {
		GPUs []struct {
			Model, Location        string
			Total, Held, Offerable int
			Largest                int `json:"largest_node_offerable"`
		}
	}) {
		l.ok(200, &out, "GET", "/api/v1/gpus", token, nil)
		return out
	}
	if g := gpus().GPUs[0]; (gpu{g.Total, g.Held, g.Offerable, g.Largest}) != (gpu{16, 6, 0, 0}) {
		t.Errorf("cordoned: %+v", g)
	}
	l.ok(200, nil, "POST", "/api/v1/racks/us-1/cordon", l.admin, map[string]any{"cordoned": false})
	if g := gpus().GPUs[0]; (gpu{g.Total, g.Held, g.Offerable, g.Largest}) != (gpu{16, 6, 10, 8}) || g.Location != "us" {
		t.Errorf("open: %+v", g)
	}
	var nodes struct {
		Nodes []struct {
			Name, Location string
			RackID         string `json:"rack_id"`
		}
	}
	l.ok(200, &nodes, "GET", "/api/v1/nodes", token, nil)
	if len(nodes.Nodes) != 2 || nodes.Nodes[0].RackID != "us-1" || nodes.Nodes[0].Location != "us" {
		t.Errorf("nodes %+v", nodes)
	}
	var locations struct{ Locations []struct{ Code, Name string } }
	l.ok(200, &locations, "GET", "/api/v1/locations", token, nil)
	if len(locations.Locations) != 1 || locations.Locations[0].Code != "us" {
		t.Errorf("locations %+v", locations)
	}
	// Whose attempts hold GPUs is for administrators.
	if r := l.ok(200, nil, "GET", "/api/v1/racks", token, nil); bytes.Contains(r.body, []byte("a-1")) {
		t.Errorf("a user sees holders: %s", r.body)
	}
	if r := l.ok(200, nil, "GET", "/api/v1/racks", l.admin, nil); !bytes.Contains(r.body, []byte(`"holders":{"a-1":6}`)) {
		t.Errorf("an administrator sees no holders: %s", r.body)
	}
	l.ok(200, nil, "DELETE", "/api/v1/racks/us-1", l.admin, nil)
	l.refused("not_found", "POST", "/api/v1/racks/us-1/cordon", l.admin, map[string]any{"cordoned": true})
}

func TestHealthNamesDaemonsThatAreSilent(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	var out struct {
		Status   string
		Warnings []struct{ Daemon, Code, Severity, Remedy string }
	}
	l.ok(200, &out, "GET", "/api/v1/health", l.admin, nil)
	if out.Status != "error" || len(out.Warnings) != 2 || out.Warnings[0].Daemon != "wrk-monitor" || out.Warnings[0].Remedy == "" ||
		out.Warnings[1].Daemon != "app-node" || out.Warnings[1].Code != "roster_expires" {
		t.Errorf("unexpected health %+v", out)
	}
}

func TestTheNetworksRecordsCanBeRead(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	_, token := l.user("ana@example.org")
	var network struct {
		ID       string `json:"network_id"`
		Name     string
		RootKeys []string `json:"root_keys"`
		Genesis  []byte
		Roster   []byte
		Info     []byte `json:"network_info"`
	}
	l.ok(200, &network, "GET", "/api/v1/network", token, nil)
	if network.ID != l.network.ID().String() || network.Name != "lab" || len(network.RootKeys) != 2 ||
		!bytes.Equal(network.Roster, l.network.RosterEnvelope()) || !bytes.Equal(network.Genesis, l.network.Genesis()) || len(network.Info) == 0 {
		t.Errorf("unexpected network %+v", network)
	}
	for path, text := range map[string]string{"/models": "cosmicac/ngram-demo", "/images": "Ubuntu24.04/CUDA12.9"} {
		if r := l.ok(200, nil, "GET", "/api/v1"+path, token, nil); !bytes.Contains(r.body, []byte(text)) {
			t.Errorf("%s: %s", path, r.body)
		}
	}
}

func TestAnAdministratorSeesTheMeshAsFarAsItAnswers(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	_, token := l.user("ana@example.org")
	l.refused("denied", "GET", "/api/v1/mesh", token, nil)
	var out struct {
		Complete *bool
		Nodes    []struct {
			Key, Name, State, Reason string
			Roles                    []string
			PeersKnown               bool `json:"peers_known"`
			Warnings                 []any
		}
		Links []any
	}
	l.ok(200, &out, "GET", "/api/v1/mesh", l.admin, nil)
	if out.Complete == nil || *out.Complete || len(out.Nodes) != 2 || out.Links == nil {
		t.Fatalf("%+v", out)
	}
	for _, n := range out.Nodes { // nobody answers in this lab
		if n.Key == "" || n.Name == "" || n.State != "silent" || n.Reason == "" || len(n.Roles) != 1 || n.PeersKnown || n.Warnings == nil {
			t.Errorf("%+v", n)
		}
	}
}
