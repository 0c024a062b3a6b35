package app_test

import (
	"os/exec"
	"strings"
	"testing"
)

// The agents are copied into every VM and must stay small.
func TestAgentsLinkNoKubernetesCode(t *testing.T) {
	t.Parallel()
	for _, service := range []string{"wrk-agent-instance", "wrk-agent-inference"} {
		out, err := exec.Command("go", "list", "-deps", "github.com/cosmicac/cosmicac/services/"+service).Output()
		if err != nil {
			t.Fatalf("list what %s links: %v", service, err)
		}
		for line := range strings.Lines(string(out)) {
			if strings.HasPrefix(line, "k8s.io/") || strings.HasPrefix(line, "kubevirt.io/") || strings.HasPrefix(line, "sigs.k8s.io/") || strings.HasPrefix(line, "modernc.org/sqlite") {
				t.Errorf("%s links %s", service, strings.TrimSpace(line))
			}
		}
	}
}
