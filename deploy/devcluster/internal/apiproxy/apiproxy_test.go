package apiproxy

import (
	"context"
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	certutil "k8s.io/client-go/util/cert"
)

// lab is a proxy before a server that counts what reaches it.
type lab struct {
	t     *testing.T
	proxy *Proxy
	http  *http.Client
	mu    sync.Mutex
	got   map[string]int
}

func newLab(t *testing.T) *lab {
	t.Helper()
	l := &lab{t: t, got: map[string]int{}}
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		l.mu.Lock()
		l.got[r.Method+" "+r.URL.Path]++
		l.mu.Unlock()
		if r.URL.Query().Get("watch") != "" {
			fmt.Fprintln(w, "first")
			w.(http.Flusher).Flush()
			<-r.Context().Done()
			return
		}
		fmt.Fprint(w, r.Header.Get("Authorization"))
	}))
	t.Cleanup(server.Close)
	dir := t.TempDir()
	file := func(name string, raw []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, raw, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	cert, key, err := certutil.GenerateSelfSignedCertKey("127.0.0.1", []net.IP{net.IPv4(127, 0, 0, 1)}, nil)
	if err != nil {
		t.Fatal(err)
	}
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.proxy, err = Start(Options{
		Listener: listener, Server: server.URL, CAFile: file("ca", ca), CertFile: file("cert", cert), KeyFile: file("key", key), Log: hclog.NewNullLogger(),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.proxy.Stop)
	pool, err := certutil.NewPoolFromBytes(cert)
	if err != nil {
		t.Fatal(err)
	}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.TLSClientConfig.RootCAs = pool
	l.http = &http.Client{Transport: transport, Timeout: time.Minute}
	t.Cleanup(transport.CloseIdleConnections)
	return l
}

// ask returns the status and the body, or the error.
func (l *lab) ask(method, path string) (int, string, error) {
	l.t.Helper()
	req, err := http.NewRequest(method, l.proxy.URL+path, strings.NewReader("{}"))
	if err != nil {
		l.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer mine")
	res, err := l.http.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer res.Body.Close()
	raw, err := io.ReadAll(res.Body)
	return res.StatusCode, string(raw), err
}

func (l *lab) reached(what string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.got[what]
}

const (
	pods = "/api/v1/namespaces/n/pods"
	vmis = "/apis/kubevirt.io/v1/namespaces/n/virtualmachineinstances"
)

func TestWithoutRulesTheProxyIsADetour(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	if code, body, err := l.ask("POST", pods); err != nil || code != 200 || body != "Bearer mine" {
		t.Fatalf("%d %q %v", code, body, err)
	}
}

func TestALostReplyIsCarriedOutAndACutRequestIsNot(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.proxy.Set(map[string]string{"api-drop-reply": "verb=create resource=virtualmachineinstances count=1"})
	if _, _, err := l.ask("POST", vmis); err == nil {
		t.Error("the reply came")
	}
	if n := l.reached("POST " + vmis); n != 1 {
		t.Errorf("the lost one reached the server %d times", n)
	}
	if code, _, err := l.ask("POST", vmis); err != nil || code != 200 {
		t.Errorf("after its count: %d %v", code, err)
	}
	l.proxy.Set(map[string]string{"api-cut": "verb=create resource=pods"})
	if _, _, err := l.ask("POST", pods); err == nil {
		t.Error("the cut one was answered")
	}
	if n := l.reached("POST " + pods); n != 0 {
		t.Errorf("the cut one reached the server %d times", n)
	}
	if code, _, err := l.ask("POST", vmis); err != nil || code != 200 {
		t.Errorf("another resource: %d %v", code, err)
	}
}

func TestAnswersAreKubernetesOwn(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	for code, reason := range map[int]string{401: "Unauthorized", 409: "Conflict", 410: "Expired", 429: "TooManyRequests", 500: "InternalError"} {
		l.proxy.Set(map[string]string{"api-answer": fmt.Sprintf("code=%d resource=pods", code)})
		got, body, err := l.ask("GET", pods+"/x")
		if err != nil || got != code || !strings.Contains(body, reason) || !strings.Contains(body, "simulated") {
			t.Errorf("%d: %d %s %v", code, got, body, err)
		}
	}
	if l.reached("GET "+pods+"/x") != 0 {
		t.Error("an answered request was carried out")
	}
	// Each third one, for a while only.
	l.proxy.Set(map[string]string{"api-answer": "code=500 every=3 for=1h"})
	failed := 0
	for range 9 {
		if code, _, _ := l.ask("GET", pods); code == 500 {
			failed++
		}
	}
	if failed != 3 {
		t.Errorf("%d of 9 failed", failed)
	}
	l.proxy.Set(map[string]string{"api-answer": "code=500 for=1ms"})
	time.Sleep(5 * time.Millisecond)
	if code, _, _ := l.ask("GET", pods); code != 200 {
		t.Errorf("after its time: %d", code)
	}
}

func TestARunningWatchIsCutWhenTheSwitchComesAndOthersGoOn(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	watch := func(path string) (io.ReadCloser, context.CancelFunc) {
		ctx, cancel := context.WithCancel(t.Context())
		req, err := http.NewRequestWithContext(ctx, "GET", l.proxy.URL+path+"?watch=true", nil)
		if err != nil {
			t.Fatal(err)
		}
		res, err := l.http.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(res.Body, make([]byte, len("first\n"))); err != nil {
			t.Fatal(err)
		}
		return res.Body, cancel
	}
	cut, done := watch(pods)
	defer done()
	defer cut.Close()
	kept, cancel := watch(vmis)
	defer kept.Close()
	l.proxy.Set(map[string]string{"api-cut-watch": "resource=pods"})
	if _, err := cut.Read(make([]byte, 1)); err == nil {
		t.Error("the watch goes on")
	}
	ended := make(chan struct{})
	go func() { defer close(ended); _, _ = kept.Read(make([]byte, 1)) }()
	select {
	case <-ended:
		t.Error("another watch ended, too")
	case <-time.After(100 * time.Millisecond):
	}
	cancel()
	<-ended
}

func TestASlowRequestComesThrough(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.proxy.Set(map[string]string{"api-slow": "delay=200ms verb=list"})
	began := time.Now()
	if code, _, err := l.ask("GET", pods); err != nil || code != 200 || time.Since(began) < 200*time.Millisecond {
		t.Errorf("%d %v after %s", code, err, time.Since(began))
	}
}

func TestRequestsAreReadAsTheAPIServerReadsThem(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ method, path, verb, resource string }{
		{"GET", pods, "list", "pods"}, {"GET", pods + "?watch=true", "watch", "pods"}, {"GET", pods + "/x", "get", "pods"},
		{"POST", pods + "/x/eviction", "create", "pods/eviction"}, {"DELETE", vmis + "/x", "delete", "virtualmachineinstances"},
		{"GET", "/api/v1/nodes/x", "get", "nodes"}, {"PUT", "/api/v1/nodes/x/status", "update", "nodes/status"},
		{"GET", "/api/v1/namespaces/n", "get", "namespaces"}, {"GET", "/version", "get", ""}, {"PATCH", "/apis/g/v1/things/x", "patch", "things"},
	} {
		if q := classify(httptest.NewRequest(c.method, c.path, nil)); q.verb != c.verb || q.resource != c.resource {
			t.Errorf("%s %s is %+v", c.method, c.path, q)
		}
	}
}
