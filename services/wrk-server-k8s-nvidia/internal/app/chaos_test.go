package app

import (
	"context"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/label"
)

// chaos stands between a worker and the API server and makes trouble in a fixed
// rotation: every third request meets the next kind.
type chaos struct {
	proxy *httputil.ReverseProxy
	mu    sync.Mutex
	count int
	met   map[string]int
}

func (c *chaos) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	kind := ""
	c.mu.Lock()
	c.count++
	if c.count%3 == 0 {
		kind = []string{"lost reply", "429", "500", "cut before", "slow", "409"}[c.count/3%6]
	}
	watching := r.URL.Query().Get("watch") != ""
	if watching {
		kind = "cut watch"
	}
	c.met[kind]++
	c.mu.Unlock()
	status := func(code int, reason metav1.StatusReason) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(code)
		fmt.Fprintf(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":%q,"code":%d,"message":"made up"}`, reason, code)
	}
	switch kind {
	case "lost reply":
		c.proxy.ServeHTTP(httptest.NewRecorder(), r)
		panic(http.ErrAbortHandler)
	case "cut before":
		panic(http.ErrAbortHandler)
	case "429":
		w.Header().Set("Retry-After", "1")
		status(http.StatusTooManyRequests, metav1.StatusReasonTooManyRequests)
	case "500":
		status(http.StatusInternalServerError, metav1.StatusReasonInternalError)
	case "409":
		if r.Method != http.MethodDelete && r.Method != http.MethodPatch {
			c.proxy.ServeHTTP(w, r)
			return
		}
		status(http.StatusConflict, metav1.StatusReasonConflict)
	case "slow":
		time.Sleep(700 * time.Millisecond)
		c.proxy.ServeHTTP(w, r)
	case "cut watch":
		ctx, cancel := context.WithTimeout(r.Context(), 1500*time.Millisecond)
		defer cancel()
		c.proxy.ServeHTTP(w, r.WithContext(ctx))
	default:
		c.proxy.ServeHTTP(w, r)
	}
}

// proxyTo is a way to the cluster of a kubeconfig, with its credentials.
func proxyTo(t *testing.T, kubeconfig string) *httputil.ReverseProxy {
	t.Helper()
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	transport, err := rest.TransportFor(config)
	if err != nil {
		t.Fatal(err)
	}
	target, err := url.Parse(config.Host)
	if err != nil {
		t.Fatal(err)
	}
	return &httputil.ReverseProxy{
		Rewrite:       func(r *httputil.ProxyRequest) { r.SetURL(target) },
		Transport:     transport,
		FlushInterval: -1,
		ErrorLog:      log.New(io.Discard, "", 0),
		ErrorHandler:  func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) },
	}
}

func kubeconfigText(server string) string {
	return fmt.Sprintf(`apiVersion: v1
kind: Config
current-context: c
clusters: [{name: c, cluster: {server: %q}}]
contexts: [{name: c, context: {cluster: c}}]
`, server)
}

// plainKubeconfig leads to a server that adds the credentials itself.
func plainKubeconfig(t *testing.T, server string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(file, []byte(kubeconfigText(server)), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// TestABadWayToTheClusterMakesNothingTwiceAndLosesNothing lets replies get
// lost after the fact, refuses, delays and cuts.
func TestABadWayToTheClusterMakesNothingTwiceAndLosesNothing(t *testing.T) {
	t.Parallel()
	d := start(t)
	bad := &chaos{met: map[string]int{}, proxy: proxyTo(t, d.kubeconfig)}
	server := httptest.NewUnstartedServer(bad)
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	server.Start()
	defer server.Close()
	w := begin(t, d, "chaos", func(s *Setup) { s.Config.Kubeconfig = plainKubeconfig(t, server.URL) })
	defer w.end()
	w.serves()
	for range 3 {
		job, attempt := id(t, "j"), id(t, "a")
		req := request("chaos", job, attempt, 2)
		eventually(t, "the claim is answered", func() string {
			res, err := w.Server.ApplyAttempt(context.Background(), req)
			switch {
			case err != nil:
				time.Sleep(200 * time.Millisecond)
				return err.Error()
			case !res.Claimed:
				t.Fatalf("refused: %v %s", res.Reason, res.Message)
			}
			return ""
		})
		w.until(attempt, up1)
		all, err := d.admin.KubeVirt.VirtualMachineInstances(namespace).List(t.Context(), metav1.ListOptions{LabelSelector: label.Job + "=" + job})
		if err != nil || len(all.Items) != 1 {
			t.Fatalf("%d machines, %v", len(all.Items), err)
		}
		if g := w.gpu("chaos-gpu-00"); g.Held != 2 {
			t.Errorf("capacity %v", g)
		}
		eventually(t, "the removal is taken", func() string {
			if err := w.Server.Engine.Delete(context.Background(), attempt, 0); err != nil {
				return err.Error()
			}
			return ""
		})
		w.gone(attempt)
		if left := d.left(t, of(attempt)); len(left) > 0 {
			t.Fatalf("left %v", left)
		}
	}
	bad.mu.Lock()
	defer bad.mu.Unlock()
	if len(bad.met) < 7 {
		t.Errorf("met only %v", bad.met)
	}
}
