package app

import (
	"os"
	"path/filepath"
	"reflect"
	"sort"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
)

func TestTheExampleHoldsEveryKeyWithItsDefault(t *testing.T) {
	t.Parallel()
	raw, err := os.ReadFile(filepath.Join("..", "..", "wrk-server-k8s-nvidia.example.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	got := Config{}
	if err := yaml.UnmarshalWithOptions(raw, &got, yaml.Strict()); err != nil {
		t.Fatal(err)
	}
	if bad := got.Validate(); len(bad) > 0 {
		t.Fatalf("the example is refused: %v", bad)
	}
	want := Defaults()
	want.Base = got.Base
	want.Rack, want.Kubeconfig = got.Rack, got.Kubeconfig
	want.GPUModels, want.Tolerations, want.Fabric = got.GPUModels, got.Tolerations, got.Fabric // empty lists
	if !reflect.DeepEqual(want, got) {
		t.Fatalf("the example:\n%+v\ndefaults:\n%+v", got, want)
	}
	// Every key of the configuration stands in the example.
	keys := map[string]any{}
	if err := yaml.Unmarshal(raw, &keys); err != nil {
		t.Fatal(err)
	}
	kind := reflect.TypeFor[Config]()
	for i := range kind.NumField() {
		name, _, _ := strings.Cut(kind.Field(i).Tag.Get("yaml"), ",")
		if _, ok := keys[name]; name != "" && !ok {
			t.Errorf("%s is missing", name)
		}
	}
}

func TestWhatAConfigurationCannotBe(t *testing.T) {
	t.Parallel()
	good := Defaults()
	good.Rack.ID, good.Kubeconfig = "us", "/k"
	if bad := good.Validate(); len(bad) > 0 {
		t.Fatalf("a good one is refused: %v", bad)
	}
	c := Defaults()
	c.Rack.ID, c.NodeSelector, c.VolumeMode, c.DeniedCIDRs, c.Relist = "No Label", "=x=", "Tape", []string{"10.0.0.0"}, 0
	c.Registry.PullMethod, c.AgentImage, c.Namespace, c.DefaultDiskGiB = "carrier pigeon", "", "", 0
	c.Tolerations = []Toleration{{Operator: "Perhaps"}}
	c.RuntimeImages["vllm"] = "two words"
	c.Ports, c.Fabric.Devices = PortsConfig{Service: "Ingress", Address: "host:80"}, []string{"cx7", "rdma/shared", "nvidia.com/mlnx_cx7"}
	c.Deadlines.Import, c.Deadlines.Eviction = 0, -1
	c.Overlay = OverlayConfig{Driver: "ovn", Bridge: "br_1", VLANs: "100-5000", MTU: 500, Subnet: "10.64.0.0/28", VLANQuarantine: -1}
	var fields []string
	for _, b := range c.Validate() {
		fields = append(fields, b.Field)
	}
	sort.Strings(fields)
	want := "agent_image deadlines.eviction deadlines.import default_disk_gib denied_cidrs[0] fabric.devices[0] fabric.devices[1] kubeconfig namespace node_selector " +
		"overlay.bridge overlay.driver overlay.mtu overlay.subnet overlay.vlan_quarantine overlay.vlans " +
		"ports.address ports.service rack.id " +
		"registry.pull_method relist runtime_images.vllm tolerations[0] volume_mode"
	if got := strings.Join(fields, " "); got != want {
		t.Fatalf("refused %s", got)
	}
}
