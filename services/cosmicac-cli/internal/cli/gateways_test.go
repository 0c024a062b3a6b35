package cli

import (
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
)

const (
	peerKey  = "cGVlcnBlZXJwZWVycGVlcnBlZXJwZWVycGVlcnBlZXI="
	aGateway = `{"job_id":"j-0000000000000","open":true,"port":51820,"endpoints":["203.0.113.7:30051"],"public_key":"GATEWAYKEY","address":"10.130.7.1","mtu":1280,
		"peers":[{"name":"laptop","public_key":"` + peerKey + `","address":"10.130.7.2","last_handshake":"2026-01-02T03:04:05Z","received_bytes":148,"sent_bytes":92}]}`
)

func TestGatewayPeerGetsAFileThatHoldsAllButItsPrivateKey(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var asked []string
	shown := aGateway
	api := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		raw, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		mu.Lock()
		asked = append(asked, strings.TrimSpace(r.Method+" "+r.URL.String()+" "+string(raw)))
		body := shown
		mu.Unlock()
		if r.Method == http.MethodDelete && strings.HasSuffix(r.URL.Path, "/gateway") {
			w.WriteHeader(http.StatusNoContent)
			return
		}
		answer(200, body)(w, r)
	})
	do := func(args ...string) string {
		t.Helper()
		status, out, errOut := run(t, api, "", args...)
		if status != 0 {
			t.Errorf("%v: status %d: %s%s", args, status, out, errOut)
		}
		return out
	}
	do("gateways", "create", "j-0000000000000", "--port", "51820")
	file := do("gateways", "add-peer", "j-0000000000000", "--public-key", peerKey)
	for _, line := range []string{"PrivateKey = " + pasteKey, "Address = 10.130.7.2/32", "MTU = 1280", "PublicKey = GATEWAYKEY", "Endpoint = 203.0.113.7:30051", "AllowedIPs = 10.130.7.1/32"} {
		if !strings.Contains(file, line+"\n") {
			t.Errorf("no line %q in\n%s", line, file)
		}
	}
	table := do("gateways", "get", "j-0000000000000")
	for _, word := range []string{"laptop", "10.130.7.2", "ago", "148", "92", peerKey} {
		if !strings.Contains(table, word) {
			t.Errorf("nothing of %q in\n%s", word, table)
		}
	}
	do("gateways", "remove-peer", "j-0000000000000", "laptop")
	do("gateways", "delete", "j-0000000000000")

	mu.Lock()
	shown = strings.Replace(aGateway, `"open":true`, `"open":true,"simulated":true`, 1)
	mu.Unlock()
	if file := do("gateways", "add-peer", "j-0000000000000", "--public-key", peerKey); !strings.Contains(file, "Endpoint = 127.0.0.1:51820\n") || !strings.Contains(file, "Simulated") {
		t.Errorf("a simulated VM's file does not say so:\n%s", file)
	}
	mu.Lock()
	shown = `{"job_id":"j-0000000000000","open":false,"endpoints":[],"peers":[]}`
	mu.Unlock()
	for _, verb := range []string{"get", "delete"} {
		if status, _, errOut := run(t, api, "", "gateways", verb, "j-0000000000000"); status == 0 || !strings.Contains(errOut, "gateways create") {
			t.Errorf("%s of a job without a gateway: %d, %s", verb, status, errOut)
		}
	}
	if status, _, errOut := run(t, api, "", "gateways", "create", "j-0000000000000", "--port", "0"); status != 3 || !strings.Contains(errOut, "1 to 65535") {
		t.Errorf("port 0: %d, %s", status, errOut)
	}
	all := strings.Join(asked, "\n")
	for _, want := range []string{
		`POST /api/v1/jobs/j-0000000000000/gateway {"port":51820}`,
		`POST /api/v1/jobs/j-0000000000000/gateway/peers {"name":"laptop","public_key":"` + peerKey + `"}`,
		`DELETE /api/v1/jobs/j-0000000000000/gateway/peers/laptop`,
		`DELETE /api/v1/jobs/j-0000000000000/gateway`,
	} {
		if !strings.Contains(all, want) {
			t.Errorf("%s was not asked:\n%s", want, all)
		}
	}
}

func TestGatewaysOfAllJobsAreListedAndAJobThatCannotBeAskedSaysWhy(t *testing.T) {
	t.Parallel()
	jobs := func(id, name, more string) string {
		return `{"jobs":[{"id":"` + id + `","name":"` + name + `","ports":[{"port":51820,"protocol":"udp"}]},{"id":"j-web","name":"web","ports":[{"port":80,"protocol":"tcp"}]}],"next_page_token":"` + more + `"}`
	}
	api := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch at := r.URL.Path; {
		case at == "/api/v1/jobs" && r.URL.Query().Get("page_token") == "":
			answer(200, jobs("j-open", "lab", "2"))(w, r)
		case at == "/api/v1/jobs":
			answer(200, jobs("j-closed", "shut", ""))(w, r)
		case at == "/api/v1/jobs/j-open/gateway":
			answer(200, strings.Replace(aGateway, "j-0000000000000", "j-open", 1))(w, r)
		case at == "/api/v1/jobs/j-closed/gateway":
			answer(200, `{"job_id":"j-closed","open":false,"endpoints":[],"peers":[]}`)(w, r)
		default:
			t.Errorf("%s was asked", at)
		}
	})
	status, out, errOut := run(t, api, "", "gateways", "list")
	if status != 0 || !strings.Contains(out, "j-open") || !strings.Contains(out, "203.0.113.7:30051") || strings.Contains(out, "j-closed") {
		t.Errorf("status %d: %s%s", status, out, errOut)
	}

	away := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/api/v1/jobs" {
			answer(200, jobs("j-away", "far", ""))(w, r)
			return
		}
		answer(503, `{"kind":"unavailable","detail":"the agent of job j-away cannot be asked now"}`)(w, r)
	})
	if status, out, errOut := run(t, away, "", "gateways", "list"); status != 0 || !strings.Contains(out, "j-away") || !strings.Contains(out, "cannot be asked now") {
		t.Errorf("status %d: %s%s", status, out, errOut)
	}
}
