package app

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// caddy starts the real front door with the Caddyfile of this repository.
func (l *lab) caddy() (url, log string) {
	l.t.Helper()
	binary := os.Getenv("COSMICAC_CADDY_BIN")
	if binary == "" {
		binary = "../../../../build/bin/caddy"
	}
	if _, err := os.Stat(binary); err != nil {
		if os.Getenv("COSMICAC_CADDY_BIN") != "" {
			l.t.Fatalf("no Caddy at %s", binary)
		}
		l.t.Skip("Caddy is not built: run scripts/build.sh, or set COSMICAC_CADDY_BIN")
	}
	dir := l.t.TempDir()
	ui := filepath.Join(dir, "ui")
	os.MkdirAll(filepath.Join(ui, "assets"), 0o755)
	os.WriteFile(filepath.Join(ui, "index.html"), []byte("<title>page</title>"), 0o644)
	os.WriteFile(filepath.Join(ui, "assets", "a-1.js"), []byte("1"), 0o644)
	url = "http://localhost:" + freePort(l.t)
	log = filepath.Join(dir, "caddy.log")
	out := must(os.Create(log))
	defer out.Close()
	c := exec.Command(binary, "run", "--config", "../../../../deploy/caddy/Caddyfile", "--adapter", "caddyfile")
	c.Env = append(os.Environ(), "HOME="+dir, "XDG_DATA_HOME="+dir, "XDG_CONFIG_HOME="+dir, "COSMICAC_SITE="+url, "COSMICAC_BIND=127.0.0.1",
		"COSMICAC_PROXY=unix/"+l.socket, "COSMICAC_APP_NODE=127.0.0.1:1", "COSMICAC_MONITOR=127.0.0.1:1", "COSMICAC_UI_ROOT="+ui)
	c.Stderr = out
	if err := c.Start(); err != nil {
		l.t.Fatal(err)
	}
	l.t.Cleanup(func() {
		c.Process.Signal(syscall.SIGTERM)
		c.Wait()
		if l.t.Failed() {
			b, _ := os.ReadFile(log)
			l.t.Logf("Caddy said:\n%s", b[max(0, len(b)-8000):])
		}
	})
	return url, log
}

func TestRequestsThroughTheFrontDoor(t *testing.T) {
	t.Parallel()
	l := startLab(t)
	url, log := l.caddy()
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	client := &http.Client{Transport: transport}
	do := func(method, path, body string) answer {
		return ask(client, url+path, l.full, method, strings.NewReader(body), int64(len(body)))
	}
	e := &engine{chunks: 200, pace: time.Millisecond}
	replica, _ := l.replica(e)
	l.ork.put(endpointOf(replica))
	eventually(t, "an answer comes through", func() bool { return do("POST", "/inference"+chat+"?secret=in-the-query", plainBody).status == 200 })

	for _, path := range []string{"/inference" + chat, "/inference/e/ep-1" + chat} {
		if a := do("POST", path, streamBody); a.body != e.whole() || a.err != nil || a.header.Get("Content-Type") != "text/event-stream" {
			t.Errorf("%s: %d %q %v", path, a.status, a.body, a.err)
		}
	}
	if a := do("GET", "/inference/v1/models", ""); a.status != 200 || !strings.Contains(a.body, `"id":"m"`) {
		t.Errorf("models: %d %s", a.status, a.body)
	}

	// Tokens come one by one, and leaving reaches the engine.
	slow := &engine{chunks: 100000, pace: 50 * time.Millisecond}
	another, slowAgent := l.replica(slow)
	l.ork.put(endpointOf(another))
	eventually(t, "the slow one is asked", func() bool {
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		r := must(http.NewRequestWithContext(ctx, "POST", url+"/inference"+chat, strings.NewReader(streamBody)))
		r.Header.Set("Authorization", "Bearer "+l.full)
		resp, err := client.Do(r)
		if err != nil {
			return false
		}
		defer resp.Body.Close()
		first := make([]byte, len(slow.text(0)))
		_, err = io.ReadFull(resp.Body, first)
		return err == nil && string(first) == slow.text(0) && slow.running.Load() > 0
	})
	eventually(t, "the engine is told that its client left", func() bool { return slow.running.Load() == 0 })
	l.close(slowAgent) // a request sent to it before the new table is in force would never end

	// A break reaches the client as an error and an unclean end.
	broken := &engine{chunks: 10, die: 3}
	third, _ := l.replica(broken)
	l.ork.put(endpointOf(third))
	var a answer
	eventually(t, "the broken one is asked", func() bool {
		a = do("POST", "/inference"+chat, streamBody)
		return strings.HasPrefix(a.body, broken.text(0)+broken.text(1)+broken.text(2)) && !strings.HasPrefix(a.body, broken.text(0)+broken.text(1)+broken.text(2)+"data: {\"id\"")
	})
	if !strings.Contains(a.body, `data: {"error":`) || strings.Contains(a.body, "[DONE]") || a.err == nil {
		t.Errorf("a break: %q %v", a.body, a.err)
	}

	// A huge body is refused in OpenAI's words.
	const huge = 50 << 20
	a = ask(client, url+"/inference"+chat, l.full, "POST", io.LimitReader(zeros{}, huge), huge)
	if a.status != 413 || decode(t, a.body) != "request_too_large" {
		t.Errorf("50 MB: %d %s %v", a.status, a.body, a.err)
	}

	// The web interface, its headers, and daemons that are away.
	for path, want := range map[string]string{"/": "<title>", "/jobs/j-1": "<title>", "/assets/a-1.js": "1"} {
		a := do("GET", path, "")
		if a.status != 200 || !strings.HasPrefix(a.body, want) {
			t.Errorf("%s: %d %s", path, a.status, a.body)
		}
		if !strings.Contains(a.header.Get("Content-Security-Policy"), "frame-ancestors 'none'") || a.header.Get("X-Content-Type-Options") != "nosniff" ||
			a.header.Get("Referrer-Policy") == "" || a.header.Get("Server") != "" {
			t.Errorf("%s: headers %v", path, a.header)
		}
	}
	if a := do("GET", "/assets/none.js", ""); a.status != 404 {
		t.Errorf("a missing file: %d", a.status)
	}
	if a := do("GET", "/api/v1/me", ""); a.status != 502 || a.header.Get("Content-Type") != "application/problem+json" || !strings.Contains(a.body, `"kind":"unavailable"`) {
		t.Errorf("app-node away: %d %s", a.status, a.body)
	}
	l.stop()
	if a := do("POST", "/inference"+chat, plainBody); a.status != 502 || decode(t, a.body) != "proxy_unreachable" {
		t.Errorf("proxy away: %d %s", a.status, a.body)
	}
	l.noSecret(log, filepath.Join(l.state, "proxy-inference.log"))
	if b := must(os.ReadFile(log)); bytes.Contains(b, []byte("in-the-query")) || !bytes.Contains(b, []byte("/inference/v1/chat/completions")) {
		t.Error("Caddy's log holds a query string, or no requests at all")
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }
