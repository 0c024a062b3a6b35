package fault

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestAnAPIFaultIsRefusedWithoutTheProxyThatMakesIt(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	kubeconfig := "apiVersion: v1\nkind: Config\ncurrent-context: c\nclusters: [{name: c, cluster: {server: \"http://127.0.0.1:1\"}}]\n" +
		"contexts: [{name: c, context: {cluster: c}}]\n"
	if err := os.WriteFile(filepath.Join(dir, "admin.kubeconfig"), []byte(kubeconfig), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, s := range Switches {
		err := Command(t.Context(), []string{"set", "--dir", dir, s.Name, "*"}, &bytes.Buffer{})
		if refused := errors.Is(err, ErrUsage) && strings.Contains(err.Error(), "--api-proxy"); refused != (s.Kind == API) {
			t.Errorf("%s without the proxy: %v", s.Name, err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, ProxyPort), []byte("1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Command(t.Context(), []string{"set", "--dir", dir, APISlow, "delay=1s"}, &bytes.Buffer{}); err == nil || strings.Contains(err.Error(), "--api-proxy") {
		t.Errorf("with the proxy: %v", err)
	}
}
