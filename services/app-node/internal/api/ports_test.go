package api_test

import (
	"testing"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

func TestDeclaredPortsAreShownWithWhereTheyAreReachedUntilTheAttemptIsGone(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	type port struct {
		Port       uint32
		Protocol   string
		Name       string
		Hosts      []string
		PublicPort uint32 `json:"public_port"`
	}
	var job struct {
		ID          string
		Ports       []port
		ReplicaList []struct {
			Attempts []struct {
				Nodes []struct{ Ports []port }
			}
		} `json:"replica_list"`
	}
	body := container("web server")
	body["ports"] = []map[string]any{{"port": 8080}, {"port": 53, "protocol": "udp", "name": "dns"}}
	l.ok(201, &job, "POST", "/api/v1/jobs", l.admin, body)
	spec := l.ork.spec(job.ID)
	if len(spec.GetPorts()) != 2 || spec.Ports[0].GetPort() != 8080 || spec.Ports[1].GetName() != "dns" || spec.Ports[1].GetProtocol() != "udp" {
		t.Fatalf("the orchestrator got %v", spec.GetPorts())
	}
	l.ork.run(job.ID, "")
	l.ork.change(job.ID, func(j *orkv1.Job) {
		j.Replicas[0].Attempts[0].Nodes = []*orkv1.AttemptNode{{NodeName: "n", Ports: []*orkv1.PortAddress{
			{Port: spec.Ports[1], Hosts: []string{"203.0.113.7"}, PublicPort: 30053},
		}}}
	})
	l.ok(200, &job, "GET", "/api/v1/jobs/"+job.ID, l.admin, nil)
	if len(job.Ports) != 2 || job.Ports[1].Name != "dns" {
		t.Errorf("declared %+v", job.Ports)
	}
	at := job.ReplicaList[0].Attempts[0].Nodes[0].Ports
	if len(at) != 1 || at[0].Port != 53 || at[0].Protocol != "udp" || at[0].Name != "dns" || at[0].PublicPort != 30053 || len(at[0].Hosts) != 1 || at[0].Hosts[0] != "203.0.113.7" {
		t.Errorf("reached at %+v", at)
	}
	l.ork.change(job.ID, func(j *orkv1.Job) { j.Replicas[0].Attempts[0].Gone = true })
	job.ReplicaList = nil
	l.ok(200, &job, "GET", "/api/v1/jobs/"+job.ID, l.admin, nil)
	if at := job.ReplicaList[0].Attempts[0].Nodes[0].Ports; len(at) != 0 {
		t.Errorf("reached at %+v, though nothing of it is left", at)
	}
	body["ports"] = []map[string]any{{"port": 8080, "protocol": "sctp"}}
	l.refused("invalid", "POST", "/api/v1/jobs", l.admin, body)
}
