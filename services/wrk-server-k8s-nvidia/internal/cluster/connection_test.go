package cluster

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// api is an API server that takes one token.
type api struct {
	*httptest.Server
	token    atomic.Value
	requests atomic.Int32
	bodies   sync.Map
}

func newAPI(t *testing.T, token string) *api {
	t.Helper()
	a := &api{}
	a.token.Store(token)
	a.Server = httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		a.requests.Add(1)
		w.Header().Set("Content-Type", "application/json")
		if r.Header.Get("Authorization") != "Bearer "+a.token.Load().(string) {
			w.WriteHeader(http.StatusUnauthorized)
			fmt.Fprint(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Unauthorized","code":401,"message":"Unauthorized"}`)
			return
		}
		if r.Method == http.MethodPost {
			buf, _ := io.ReadAll(r.Body)
			a.bodies.Store(string(buf), true)
		}
		fmt.Fprint(w, `{"kind":"ConfigMap","apiVersion":"v1","metadata":{"name":"x"}}`)
	}))
	t.Cleanup(a.Close)
	return a
}

func kubeconfig(t *testing.T, file, server, user string) {
	t.Helper()
	text := fmt.Sprintf("apiVersion: v1\nkind: Config\ncurrent-context: c\nclusters: [{name: c, cluster: {server: %q, insecure-skip-tls-verify: true}}]\n"+
		"contexts: [{name: c, context: {cluster: c, user: u}}]\nusers: [{name: u, user: %s}]\n", server, user)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func connect(t *testing.T, file string) (*Connection, *Client) {
	t.Helper()
	conn, err := NewConnection(ConnectionOptions{Kubeconfig: file})
	if err != nil {
		t.Fatal(err)
	}
	c, err := NewClient(conn, "cosmicac", "test")
	if err != nil {
		t.Fatal(err)
	}
	return conn, c
}

func ask(t *testing.T, c *Client) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	_, err := c.Core.ConfigMaps("cosmicac").Get(ctx, "x", metav1.GetOptions{})
	return err
}

func TestANewTokenInTheFileIsUsedAtOnceAfterARefusal(t *testing.T) {
	t.Parallel()
	server, file := newAPI(t, "one"), filepath.Join(t.TempDir(), "kubeconfig")
	kubeconfig(t, file, server.URL, "{token: one}")
	conn, c := connect(t, file)
	if err := ask(t, c); err != nil {
		t.Fatal(err)
	}
	server.token.Store("two")
	if err := ask(t, c); !apierrors.IsUnauthorized(err) {
		t.Fatalf("with the old token: %v", err)
	}
	fault := conn.Fault()
	if fault.Code != FaultRefused || fault.Since.IsZero() || strings.Contains(fault.Words, "one") {
		t.Fatalf("fault %+v", fault)
	}
	kubeconfig(t, file, server.URL, "{token: two}")
	// No caller sees a refusal, not even the first, and bodies are sent again whole.
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	if _, err := c.Core.ConfigMaps("cosmicac").Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "x"}, Data: map[string]string{"k": "v"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	whole := false
	server.bodies.Range(func(k, _ any) bool { whole = whole || strings.Contains(k.(string), `"k":"v"`); return true })
	if !whole {
		t.Error("the body was not sent again")
	}
	if fault := conn.Fault(); fault.Code != FaultNone {
		t.Fatalf("fault %+v", fault)
	}
}

func TestTheFileMayNameAnotherServer(t *testing.T) {
	t.Parallel()
	first, second, file := newAPI(t, "one"), newAPI(t, "two"), filepath.Join(t.TempDir(), "kubeconfig")
	kubeconfig(t, file, first.URL, "{token: one}")
	conn, c := connect(t, file)
	kubeconfig(t, file, second.URL+"/proxied", "{token: two}")
	conn.reload(false)
	if err := ask(t, c); err != nil || second.requests.Load() != 1 {
		t.Fatalf("%v, %d requests", err, second.requests.Load())
	}
	if !strings.HasSuffix(second.URL, conn.Server()) {
		t.Errorf("server %s", conn.Server())
	}
	// A broken file changes nothing.
	if err := os.WriteFile(file, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	conn.reload(false)
	if err := ask(t, c); err != nil {
		t.Fatalf("after a broken file: %v", err)
	}
}

func TestExecCredentialsAreRenewedWithoutAFailedCall(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	server, file, login := newAPI(t, "one"), filepath.Join(dir, "kubeconfig"), filepath.Join(dir, "login")
	script := fmt.Sprintf("#!/bin/sh\nprintf '{\"kind\":\"ExecCredential\",\"apiVersion\":\"client.authentication.k8s.io/v1\",\"status\":{\"token\":\"%%s\"}}' \"$(cat %s/token)\"\n", dir)
	if err := os.WriteFile(login, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	token := func(s string) {
		if err := os.WriteFile(filepath.Join(dir, "token"), []byte(s), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	token("one")
	kubeconfig(t, file, server.URL, fmt.Sprintf("{exec: {apiVersion: client.authentication.k8s.io/v1, command: %q, interactiveMode: Never}}", login))
	conn, c := connect(t, file)
	if err := ask(t, c); err != nil {
		t.Fatal(err)
	}
	token("two")
	server.token.Store("two")
	if err := ask(t, c); err != nil {
		t.Fatalf("after the login changed: %v", err)
	}
	if fault := conn.Fault(); fault.Code != FaultNone {
		t.Fatalf("fault %+v", fault)
	}
}

func TestASilentServerIsAFaultAndOurOwnCancelIsNot(t *testing.T) {
	t.Parallel()
	server, file := newAPI(t, "one"), filepath.Join(t.TempDir(), "kubeconfig")
	kubeconfig(t, file, server.URL, "{token: one}")
	conn, c := connect(t, file)
	server.Close()
	if err := ask(t, c); err == nil {
		t.Fatal("a closed server answers")
	}
	fault := conn.Fault()
	if fault.Code != FaultUnreachable || fault.Words == "" {
		t.Fatalf("fault %+v", fault)
	}
	time.Sleep(time.Millisecond)
	_ = ask(t, c)
	if again := conn.Fault(); !again.Since.Equal(fault.Since) {
		t.Errorf("since %s, then %s", fault.Since, again.Since)
	}

	fresh := newAPI(t, "one")
	kubeconfig(t, file, fresh.URL, "{token: one}")
	conn, c = connect(t, file)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, _ = c.Core.ConfigMaps("cosmicac").Get(ctx, "x", metav1.GetOptions{})
	if fault := conn.Fault(); fault.Code != FaultNone {
		t.Fatalf("our own cancel is a fault: %+v", fault)
	}
}

func TestARequestThatWaitsTooLongIsNoFaultWhileOthersAreAnswered(t *testing.T) {
	t.Parallel()
	waits, goes := make(chan struct{}), make(chan struct{})
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/slow") {
			close(waits)
			select {
			case <-goes:
			case <-r.Context().Done():
			}
			return
		}
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprint(w, `{"kind":"ConfigMap","apiVersion":"v1","metadata":{"name":"x"}}`)
	}))
	t.Cleanup(server.Close)
	t.Cleanup(func() { close(goes) })
	file := filepath.Join(t.TempDir(), "kubeconfig")
	kubeconfig(t, file, server.URL, "{token: one}")
	conn, c := connect(t, file)

	// One request is under way and gets no answer; another one is answered meanwhile.
	late := make(chan error, 1)
	timeout, stop := context.WithTimeout(t.Context(), 5*time.Second)
	defer stop()
	go func() {
		_, err := c.Core.ConfigMaps("cosmicac").Get(timeout, "slow", metav1.GetOptions{})
		late <- err
	}()
	<-waits
	if err := ask(t, c); err != nil {
		t.Fatal(err)
	}
	if err := <-late; err == nil {
		t.Fatal("a request without an answer went well")
	}
	if fault := conn.Fault(); fault.Code != FaultNone {
		t.Fatalf("one late answer is a fault of the cluster: %+v", fault)
	}
	// With nothing answered since, it is one.
	if err := server.Listener.Close(); err != nil {
		t.Fatal(err)
	}
	server.CloseClientConnections()
	if err := ask(t, c); err == nil {
		t.Fatal("a closed server answers")
	}
	if fault := conn.Fault(); fault.Code != FaultUnreachable {
		t.Fatalf("a server that is gone is no fault: %+v", fault)
	}
}

func TestWhatTheClusterWillNeverTake(t *testing.T) {
	t.Parallel()
	group := corev1.Resource("secrets")
	for _, c := range []struct {
		err  error
		want bool
	}{
		{apierrors.NewForbidden(group, "x", fmt.Errorf("no rights")), true},
		{apierrors.NewForbidden(group, "x", fmt.Errorf("exceeded quota: gpus")), false},
		{apierrors.NewBadRequest(`unknown field "spec.x"`), true},
		{apierrors.NewNotFound(group, "x"), true},
		{apierrors.NewTooManyRequests("slow down", 1), false},
		{apierrors.NewInternalError(fmt.Errorf("failed calling webhook")), false},
		{apierrors.NewServerTimeout(group, "post", 1), false},
		{apierrors.NewUnauthorized("x"), false},
		{context.DeadlineExceeded, false},
	} {
		if got := Refused(c.err); got != c.want {
			t.Errorf("%v: refused %v", c.err, got)
		}
	}
	if w := Words(fmt.Errorf("a\nb\x1b[31m %s", strings.Repeat("é", 400))); len(w) > 500 || strings.ContainsAny(w, "\n\x1b") {
		t.Errorf("words %q", w)
	}
}
