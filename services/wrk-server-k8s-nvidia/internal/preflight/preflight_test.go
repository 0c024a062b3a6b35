package preflight

import (
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	kubevirt "kubevirt.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

// rows flattens rules to "scope group/resource verb" lines.
func rows(scope string, rules []rbacv1.PolicyRule) (out []string) {
	for _, r := range rules {
		for _, g := range r.APIGroups {
			for _, res := range r.Resources {
				for _, v := range r.Verbs {
					out = append(out, fmt.Sprintf("%s %s/%s %s", scope, g, res, v))
				}
			}
		}
	}
	return out
}

func TestTheShippedRolesGrantExactlyWhatIsUsed(t *testing.T) {
	t.Parallel()
	raw, err := os.ReadFile(filepath.Join("..", "..", "..", "..", "deploy", "kubernetes", "rbac.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var shipped, used []string
	for _, doc := range strings.Split(string(raw), "\n---\n") {
		var role rbacv1.ClusterRole // a Role has the same fields
		if err := yaml.Unmarshal([]byte(doc), &role); err != nil {
			t.Fatal(err)
		}
		switch role.Kind {
		case "ClusterRole":
			shipped = append(shipped, rows("cluster", role.Rules)...)
		case "Role":
			shipped = append(shipped, rows("namespace", role.Rules)...)
		}
	}
	for _, r := range Rights {
		scope := "namespace"
		if r.ClusterWide {
			scope = "cluster"
		}
		used = append(used, rows(scope, []rbacv1.PolicyRule{{APIGroups: []string{r.Group}, Resources: []string{r.Resource}, Verbs: r.Verbs}})...)
	}
	sort.Strings(shipped)
	sort.Strings(used)
	if a, b := strings.Join(shipped, "\n"), strings.Join(used, "\n"); a != b {
		t.Fatalf("deploy/kubernetes/rbac.yaml:\n%s\n\nRights:\n%s", a, b)
	}
	for _, row := range shipped {
		if strings.Contains(row, "*") || strings.HasPrefix(row, "cluster") && !strings.HasSuffix(row, " get") && !strings.HasSuffix(row, " list") && !strings.HasSuffix(row, " watch") {
			t.Errorf("too much: %s", row)
		}
	}
}

func TestWhatIsWrongWithAKubeVirt(t *testing.T) {
	t.Parallel()
	with := func(f func(*kubevirt.KubeVirt)) *kubevirt.KubeVirt {
		k := &kubevirt.KubeVirt{}
		k.Status.Phase, k.Status.ObservedKubeVirtVersion = kubevirt.KubeVirtPhaseDeployed, "v1.8.1"
		f(k)
		return k
	}
	for _, c := range []struct {
		words string
		k     *kubevirt.KubeVirt
	}{
		{"", with(func(*kubevirt.KubeVirt) {})},
		{"not installed", nil},
		{"phase Deploying", with(func(k *kubevirt.KubeVirt) { k.Status.Phase = kubevirt.KubeVirtPhaseDeploying })},
		{"older than 1.7", with(func(k *kubevirt.KubeVirt) { k.Status.ObservedKubeVirtVersion = "v1.6.2" })},
		{"", with(func(k *kubevirt.KubeVirt) { k.Status.ObservedKubeVirtVersion = "v1.10.0" })},
		{"overcommit is 150 %", with(func(k *kubevirt.KubeVirt) {
			k.Spec.Configuration.DeveloperConfiguration = &kubevirt.DeveloperConfiguration{MemoryOvercommit: 150}
		})},
		{"contains Evict", with(func(k *kubevirt.KubeVirt) {
			k.Spec.WorkloadUpdateStrategy.WorkloadUpdateMethods = []kubevirt.WorkloadUpdateMethod{kubevirt.WorkloadUpdateMethodEvict}
		})},
	} {
		if got := KubeVirt(c.k); !strings.Contains(got, c.words) || (got == "") != (c.words == "") {
			t.Errorf("%q, want %q", got, c.words)
		}
	}
}
