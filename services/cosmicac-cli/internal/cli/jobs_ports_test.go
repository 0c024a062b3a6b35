package cli

import (
	"encoding/json"
	"net/http"
	"reflect"
	"strings"
	"testing"

	"github.com/cosmicac/cosmicac/services/cosmicac-cli/internal/client"
)

func TestPortsAreAskedForAndShownWithTheirAddress(t *testing.T) {
	t.Parallel()
	var asked struct {
		Ports []client.Port `json:"ports"`
	}
	api := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			if err := json.NewDecoder(r.Body).Decode(&asked); err != nil {
				t.Error(err)
			}
		}
		answer(200, `{"id":"j-0000000000000","state":"running","ports":[{"port":8080,"protocol":"tcp","name":"tcp-8080"},{"port":53,"protocol":"udp","name":"dns"}],
			"replica_list":[{"attempts":[{"number":1,"nodes":[{"node_name":"n","ports":[
				{"port":8080,"protocol":"tcp","name":"tcp-8080","hosts":["203.0.113.7","2001:db8::7"],"public_port":30080},
				{"port":53,"protocol":"udp","name":"dns","hosts":[],"public_port":30053}]}]}]}]}`)(w, r)
	})
	status, out, errOut := run(t, api, "", "jobs", "create", "--name", "x", "--port", "8080", "--port", "dns=53/udp")
	if status != 0 {
		t.Fatalf("exit status %d: %s", status, errOut)
	}
	if want := []client.Port{{Port: 8080}, {Port: 53, Protocol: "udp", Name: "dns"}}; !reflect.DeepEqual(asked.Ports, want) {
		t.Errorf("asked for %+v, want %+v", asked.Ports, want)
	}
	if _, shown, _ := run(t, api, "", "jobs", "show", "j-0000000000000"); shown != out {
		t.Errorf("show says %q, create said %q", shown, out)
	}
	for _, want := range []string{"8080/tcp at 203.0.113.7:30080, [2001:db8::7]:30080", "53/udp is reached nowhere yet"} {
		if !strings.Contains(out, want) {
			t.Errorf("nothing of %q in:\n%s", want, out)
		}
	}
	for _, bad := range []string{"http", "70000", "=80", "-1", "web="} {
		if status, _, errOut := run(t, api, "", "jobs", "create", "--port", bad); status != 2 || !strings.Contains(errOut, "--port") {
			t.Errorf("--port %s: exit status %d, %s", bad, status, errOut)
		}
	}
}
