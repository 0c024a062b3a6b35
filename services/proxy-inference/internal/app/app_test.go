package app

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/goccy/go-yaml"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

func TestTheExampleConfigurationIsTheDefaults(t *testing.T) {
	t.Parallel()
	data := must(os.ReadFile("../../proxy-inference.example.yaml"))
	var example Config
	if err := yaml.UnmarshalWithOptions(data, &example, yaml.DisallowUnknownField()); err != nil {
		t.Fatal(err)
	}
	if faults := example.Validate(); len(faults) > 0 {
		t.Fatal(faults)
	}
	defaults := Defaults()
	if !slices.Equal(example.Mesh.Listen, defaults.Mesh.Listen) || example.StateDirectory != defaults.StateDirectory || example.Name != defaults.Name {
		t.Error("the common part differs")
	}
	example.Base = defaults.Base
	if a, b := must(json.Marshal(example)), must(json.Marshal(defaults)); !bytes.Equal(a, b) {
		t.Errorf("the example differs from the defaults:\n%s\n%s", a, b)
	}
}

func TestAWrongConfigurationNamesItsKeys(t *testing.T) {
	t.Parallel()
	cfg := Defaults()
	cfg.HTTP.Listen, cfg.HTTP.BodyLimitMiB, cfg.Timeouts.Idle, cfg.Routing.ReplicaInFlight, cfg.Routing.LoadingHold = "x", 0, 0, 1000, -1
	var fields []string
	for _, f := range cfg.Validate() {
		fields = append(fields, f.Field)
	}
	for _, want := range []string{"http.listen", "http.body_limit_mib", "timeouts.idle", "routing.replica_in_flight", "routing.loading_hold"} {
		if !slices.Contains(fields, want) {
			t.Errorf("%s is not named in %v", want, fields)
		}
	}
}

func TestTheDaemonServesOverTheMesh(t *testing.T) {
	t.Parallel()
	l := startLab(t)
	e := &engine{chunks: 50, pace: time.Millisecond}
	one, agent := l.replica(e)
	two, _ := l.replica(e)
	l.ork.put(endpointOf(one, two))
	eventually(t, "the endpoint is known", func() bool { return l.do("POST", chat, plainBody).status == 200 })

	for range 10 {
		if a := l.do("POST", chat, streamBody); a.body != e.whole() || a.err != nil {
			t.Fatalf("stream: %d %q %v", a.status, a.body, a.err)
		}
	}
	eventually(t, "usage reaches the ledger", func() bool {
		n := 0
		for _, u := range l.app.records() {
			if u.GetCompletionTokens() == 50 && u.GetPromptTokens() == 2 && u.GetApiKeyId() == "k-1" {
				n++
			}
		}
		return n == 10
	})

	// Clients that leave free the engine and their key's places.
	slow := &engine{chunks: 100000, pace: 5 * time.Millisecond}
	three, slowAgent := l.replica(slow)
	l.ork.put(endpointOf(three))
	eventually(t, "the slow one serves", func() bool {
		ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
		defer cancel()
		r := must(http.NewRequestWithContext(ctx, "POST", "http://proxy"+chat, strings.NewReader(streamBody)))
		r.Header.Set("X-API-Key", l.full)
		resp, err := l.client.Do(r)
		if err != nil {
			return false
		}
		defer resp.Body.Close()
		io.Copy(io.Discard, resp.Body)
		return slow.running.Load() > 0
	})
	eventually(t, "the engine is told that its client left", func() bool { return slow.running.Load() == 0 })
	l.close(slowAgent) // a request sent to it before the new table is in force would never end

	// An agent that goes away is not noticed while another serves.
	l.ork.put(endpointOf(one, two))
	eventually(t, "the fast ones serve", func() bool { return l.do("POST", chat, plainBody).status == 200 })
	l.close(agent)
	for i := range 20 {
		if a := l.do("POST", chat, streamBody); a.body != e.whole() || a.err != nil {
			t.Fatalf("request %d after an agent left: %d %q %v", i, a.status, a.body, a.err)
		}
	}
	l.ork.put(endpointOf(one))
	eventually(t, "nobody serves", func() bool { return l.do("POST", chat, plainBody).status == 503 })
	if a := l.do("POST", chat, plainBody); decode(t, a.body) != "replicas_unreachable" || a.header.Get("Retry-After") == "" {
		t.Errorf("without a replica: %d %s", a.status, a.body)
	}

	// With the orchestrator and the ledger away requests are served and counted.
	l.ork.put(endpointOf(two))
	eventually(t, "the second serves", func() bool { return l.do("POST", chat, plainBody).status == 200 })
	l.app.away.Store(true)
	l.close(l.orkNode)
	eventually(t, "the status says that ork is away", func() bool {
		return strings.Contains(l.status(), "ork_unreachable") && strings.Contains(l.status(), "stay in force")
	})
	before := len(l.app.records())
	for range 5 {
		if a := l.do("POST", chat, plainBody); a.status != 200 {
			t.Fatalf("without ork: %d %s", a.status, a.body)
		}
	}
	l.app.away.Store(false)
	eventually(t, "kept records arrive", func() bool { return len(l.app.records()) >= before+5 })

	l.stop()
	var files []string
	filepath.WalkDir(l.state, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			files = append(files, path)
		}
		return nil
	})
	l.noSecret(files...)
}

// An agent of the same network, with a good certificate of its own, stands where
// the replica was and offers the same model.
func TestAnImpostorThatClaimsAModelGetsNoRequest(t *testing.T) {
	t.Parallel()
	l := startLab(t)
	e, stolen := &engine{chunks: 3}, &engine{chunks: 3}
	replica, agent := l.replica(e)
	impostor, _ := l.replica(stolen)
	l.ork.put(endpointOf(replica))
	eventually(t, "the endpoint serves", func() bool { return l.do("POST", chat, plainBody).status == 200 })

	l.close(agent)
	suffix := "/p2p/" + replica.GetAgentKey()
	moved := &orkv1.EndpointReplica{AttemptId: replica.GetAttemptId(), AgentKey: replica.GetAgentKey(), State: replica.GetState(), Ready: true}
	for _, a := range impostor.GetAgentAddresses() {
		address, _, _ := strings.Cut(a, "/p2p/")
		moved.AgentAddresses = append(moved.AgentAddresses, address+suffix)
	}
	if len(moved.AgentAddresses) == 0 {
		t.Fatal("the impostor has no address")
	}
	l.ork.put(endpointOf(moved))
	eventually(t, "nobody serves", func() bool { return l.do("POST", chat, plainBody).status == 503 })
	for range 20 {
		if a := l.do("POST", chat, plainBody); a.status != 503 {
			t.Fatalf("with an impostor at the replica's address: %d %s", a.status, a.body)
		}
	}
	if n := stolen.asked.Load(); n != 0 {
		t.Errorf("the impostor saw %d requests", n)
	}

	// The same agent under its own key, by ork's record, is served.
	l.ork.put(endpointOf(impostor))
	eventually(t, "the record decides", func() bool { return l.do("POST", chat, plainBody).status == 200 })
	if stolen.asked.Load() == 0 {
		t.Error("nothing reached the agent that the record names")
	}
}

func TestABlackHoleIsNotWaitedFor(t *testing.T) {
	t.Parallel()
	l := startLab(t)
	e := &engine{chunks: 3, pace: time.Millisecond}
	one, _ := l.replica(e)
	swallow := l.tunnel(one)
	two, _ := l.replica(e)
	l.ork.put(endpointOf(one))
	eventually(t, "the one in the tunnel serves", func() bool { return l.do("POST", chat, plainBody).status == 200 })
	l.ork.put(endpointOf(one, two))
	eventually(t, "both serve", func() bool {
		for range 10 {
			if l.do("POST", chat, plainBody).status != 200 {
				return false
			}
		}
		return true
	})

	swallow.Store(true)
	began := time.Now()
	answers := make(chan answer)
	for range 5 {
		go func() { answers <- l.do("POST", chat, streamBody) }()
	}
	for range 5 {
		if a := <-answers; a.body != e.whole() || a.err != nil {
			t.Errorf("into the black hole: %d %q %v", a.status, a.body, a.err)
		}
	}
	for i := range 15 {
		if a := l.do("POST", chat, plainBody); a.status != 200 {
			t.Errorf("request %d: %d %q", i, a.status, a.body)
		}
	}
	t.Logf("20 requests took %s", time.Since(began).Round(time.Millisecond))

	// Healed, it is used again without anybody's help.
	swallow.Store(false)
	l.ork.put(endpointOf(one))
	eventually(t, "the healed one serves", func() bool { return l.do("POST", chat, plainBody).status == 200 })
}
