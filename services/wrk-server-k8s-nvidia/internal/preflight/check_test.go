package preflight

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kubevirt "kubevirt.io/api/core/v1"

	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/capacity"
)

func rowsOf(findings []*workerv1.CheckFinding) string {
	var out []string
	for _, f := range findings {
		out = append(out, strings.TrimPrefix(f.Verdict.String(), "CHECK_VERDICT_")+" "+f.Row+": "+f.Message)
	}
	return strings.Join(out, "\n")
}

func TestADeviceThatNodesSpellOtherwiseIsNamed(t *testing.T) {
	t.Parallel()
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "gpu-07"}}
	node.Status.Capacity = corev1.ResourceList{"nvidia.com/TU104GL_Tesla_T4": resource.MustParse("4")}
	for _, c := range []struct {
		permitted capacity.Permitted
		want      string
	}{
		{capacity.Permitted{}, "GATE permitted devices: there is no KubeVirt object"},
		{capacity.Permitted{Known: true, Any: true}, "WARNING permitted devices: KubeVirt has no list"},
		{capacity.Permitted{Known: true, Devices: []capacity.Device{{Resource: "nvidia.com/TU104GL_TESLA_T4", PCI: "10de:1eb8"}}}, "the nodes advertise nvidia.com/TU104GL_Tesla_T4: the case differs"},
		{capacity.Permitted{Known: true, Devices: []capacity.Device{{Resource: "nvidia.com/AD104GL_L4", PCI: "10de:27b8"}}}, "WARNING permitted devices: KubeVirt permits nvidia.com/AD104GL_L4 (10de:27b8) and no node advertises it"},
		{capacity.Permitted{Known: true, Devices: []capacity.Device{{Resource: "nvidia.com/TU104GL_Tesla_T4", PCI: "10de:1eb8"}, {Resource: "x/cx7", PCI: "15b3:1021"}}}, "OK permitted devices: 2 devices"},
	} {
		k := &check{}
		k.permitted(capacity.Input{Permitted: c.permitted, Nodes: []*corev1.Node{node}})
		if got := rowsOf(k.findings); !strings.Contains(got, c.want) {
			t.Errorf("%s, want %s", got, c.want)
		}
	}
}

func TestGatesAreReadByTheirVersion(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		minor        int
		on, disabled []string
		want         string
	}{
		{7, nil, nil, "HostDevices is off"},
		{8, []string{"HostDevices"}, nil, "HostDevices is on"},
		{9, []string{"HostDevices"}, nil, "WARNING network resources"},
		{9, nil, []string{"ExternalNetResourceInjection"}, "HostDevices is off"},
	} {
		k := &kubevirt.KubeVirt{}
		k.Spec.Configuration.DeveloperConfiguration = &kubevirt.DeveloperConfiguration{FeatureGates: c.on, DisabledFeatureGates: c.disabled}
		got := &check{}
		got.gates(k, c.minor)
		text := rowsOf(got.findings)
		if !strings.Contains(text, c.want) || strings.Contains(text, "network resources") != (c.minor == 9 && c.disabled == nil) {
			t.Errorf("1.%d %v %v: %s", c.minor, c.on, c.disabled, text)
		}
	}
}

func TestTheClassOfRootDisks(t *testing.T) {
	t.Parallel()
	class := func(name, annotation string) storagev1.StorageClass {
		c := storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: name}}
		if annotation != "" {
			c.Annotations = map[string]string{annotation: "true"}
		}
		return c
	}
	all := []storagev1.StorageClass{class("slow", defaultClass[1]), class("plain", ""), class("virt", defaultClass[0])}
	for _, c := range []struct {
		all        []storagev1.StorageClass
		name, want string
	}{{all, "", "virt"}, {all[:2], "", "slow"}, {all, "plain", "plain"}, {all, "none", ""}, {all[1:2], "", ""}} {
		got := ""
		if found := chosenClass(c.all, c.name); found != nil {
			got = found.Name
		}
		if got != c.want {
			t.Errorf("%q of %d: %q, want %q", c.name, len(c.all), got, c.want)
		}
	}
}
