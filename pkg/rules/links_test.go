package rules

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// links lists the packages that would be in the binary of a pattern.
func links(t *testing.T, pattern string) []string {
	t.Helper()
	cmd := exec.Command("go", "list", "-deps", pattern)
	cmd.Dir = root()
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list %s: %v: %s", pattern, err, stderr.String())
	}
	return strings.Fields(string(out))
}

// refuse fails for every linked package under one of the prefixes.
func refuse(t *testing.T, pattern, why string, prefixes ...string) {
	t.Helper()
	for _, p := range links(t, pattern) {
		for _, prefix := range prefixes {
			if p == prefix || strings.HasPrefix(p, prefix+"/") {
				t.Errorf("%s links %s: %s", pattern, p, why)
			}
		}
	}
}

var kubernetes = []string{"k8s.io", "sigs.k8s.io", "kubevirt.io"}

func TestAgentsAreSmallAndKnowNoKubernetes(t *testing.T) {
	t.Parallel()
	agents, err := filepath.Glob(filepath.Join(root(), "services", "wrk-agent-*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range agents {
		if files, _ := filepath.Glob(filepath.Join(dir, "*.go")); len(files) == 0 {
			continue
		}
		refuse(t, "./services/"+filepath.Base(dir), "an agent runs in a tenant's machine and has no business with the cluster", kubernetes...)
		refuse(t, "./services/"+filepath.Base(dir), "an agent keeps no database", "modernc.org/sqlite")
	}
}

func TestOnlyTheWorkerLinksAClusterClient(t *testing.T) {
	t.Parallel()
	refuse(t, "./pkg/...", "what daemons share knows no cluster", kubernetes...)
	for _, name := range []string{"cosmicac-cli", "wrk-ork", "mesh-bootstrap", "app-node"} {
		if _, err := os.Stat(filepath.Join(root(), "services", name, "main.go")); err != nil {
			continue
		}
		refuse(t, "./services/"+name, "only wrk-server-k8s-nvidia speaks to a cluster",
			"k8s.io/client-go", "k8s.io/api", "kubevirt.io", "sigs.k8s.io/controller-runtime")
	}
}
