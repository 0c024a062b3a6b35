package front_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/services/wrk-agent-inference/internal/front"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// pair is a stream's two ends.
func pair(t *testing.T) (client, server net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if client, err = net.Dial("tcp", l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	if server, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		client.Close()
		server.Close()
	})
	return client, server
}

func dialer(address string) func(context.Context) (net.Conn, error) {
	return func(ctx context.Context) (net.Conn, error) { return (&net.Dialer{}).DialContext(ctx, "tcp", address) }
}

func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if f() {
			return
		}
	}
	t.Fatalf("did not come to pass: %s", what)
}

func TestEngineThatClosesAnIdleConnectionClosesTheStream(t *testing.T) {
	t.Parallel()
	engine := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok") }))
	engine.Config.IdleTimeout = 50 * time.Millisecond
	engine.Start()
	defer engine.Close()
	f := front.New(dialer(engine.Listener.Addr().String()), time.Now)
	// A client that pools streams, as the proxy does, must never send into a closed one.
	var serving sync.WaitGroup
	defer serving.Wait()
	transport := &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) {
		client, server := pair(t)
		serving.Go(func() { _ = f.Serve(context.Background(), server) })
		return client, nil
	}}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport}
	for range 5 {
		r, err := client.Get("http://replica/")
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(r.Body)
		r.Body.Close()
		if string(body) != "ok" {
			t.Fatalf("%q", body)
		}
		eventually(t, "the idle stream is closed", func() bool { return f.Streams() == 0 })
	}
}

func TestProxyThatLeavesClosesTheEnginesConnection(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	f := front.New(dialer(l.Addr().String()), time.Now)
	client, server := pair(t)
	var serving sync.WaitGroup
	defer serving.Wait()
	serving.Go(func() { _ = f.Serve(context.Background(), server) })
	engine, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer engine.Close()
	if _, err := io.WriteString(client, "request"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the request counts as under way", func() bool { busy, _ := f.Traffic(); return busy == 1 })
	client.Close()
	all, err := io.ReadAll(engine)
	if err != nil || string(all) != "request" {
		t.Fatalf("%q, %v", all, err)
	}
}

func TestDrainingOrDeadEngineRefusesBeforeAnyByte(t *testing.T) {
	t.Parallel()
	down := front.New(func(context.Context) (net.Conn, error) { return nil, errors.New("no engine") }, time.Now)
	_, server := pair(t)
	if err := down.Serve(context.Background(), server); err == nil || !strings.Contains(err.Error(), "no engine") {
		t.Fatal(err)
	}
	down.Drain()
	if err := down.Serve(context.Background(), server); fault.KindOf(err) != fault.Unavailable {
		t.Fatal(err)
	}
	if down.Streams() != 0 {
		t.Fatal("a refused stream is counted")
	}
}
