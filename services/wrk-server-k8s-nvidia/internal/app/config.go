package app

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/cosmicac/cosmicac/pkg/daemon"
	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/graph"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/label"
)

// Config is the worker's configuration file. Durations are written like "15m".
type Config struct {
	daemon.Base `yaml:",inline"`

	// Rack is what the worker is the worker of.
	Rack RackConfig `yaml:"rack"`
	// Kubeconfig is the file with the way to the cluster. It is read again when
	// it changes; exec credentials work.
	Kubeconfig string `yaml:"kubeconfig"`
	// Namespace holds the attempts' objects; one per network. [cosmicac]
	Namespace string `yaml:"namespace"`
	// NodeSelector is a label selector of the rack's nodes; empty for all.
	NodeSelector string `yaml:"node_selector"`
	// GPUModels are names that are GPUs beside the built-in table.
	GPUModels []string `yaml:"gpu_models"`
	// AgentImage is the containerDisk image that holds the agents. {version} is
	// this daemon's. [ghcr.io/cosmicac/agents:{version}]
	AgentImage string `yaml:"agent_image"`
	// ImagePullSecret is the registry secret of AgentImage; may be empty.
	ImagePullSecret string `yaml:"image_pull_secret"`
	// RuntimeImages gives the root disk image of each inference runtime.
	// [docker://ghcr.io/cosmicac/runtime-<runtime>:{version} for each]
	RuntimeImages map[string]string `yaml:"runtime_images"`
	// StorageClass of root disks; empty for the cluster's default.
	StorageClass string `yaml:"storage_class"`
	// VolumeMode is Filesystem, Block, or empty for the class's own. [Filesystem]
	VolumeMode string `yaml:"volume_mode"`
	// DefaultDiskGiB is a root disk's size when a job names none. [40]
	DefaultDiskGiB uint32 `yaml:"default_disk_gib"`
	// Registry is how CDI pulls root disk images.
	Registry RegistryConfig `yaml:"registry"`
	// DeniedCIDRs are the cluster's own networks, which guests may not reach.
	DeniedCIDRs []string `yaml:"denied_cidrs"`
	// Tolerations let machines onto tainted GPU nodes.
	Tolerations []Toleration `yaml:"tolerations"`
	// SerialLog keeps guests' serial consoles as pod logs. [true]
	SerialLog bool `yaml:"serial_log"`
	// Ports is how declared public ports are opened.
	Ports PortsConfig `yaml:"ports"`
	// Fabric is what joins nodes for replicas over several of them.
	Fabric FabricConfig `yaml:"fabric"`
	// Overlay gives replicas over several nodes a network of their own.
	Overlay OverlayConfig `yaml:"overlay"`
	// Relist is the greatest age of what is known of the cluster. [5m]
	Relist time.Duration `yaml:"relist"`
	// Deadlines bound how long a step of an attempt may take.
	Deadlines Deadlines `yaml:"deadlines"`
}

// RackConfig names the rack.
type RackConfig struct {
	// ID is the id of the operator's rack entry.
	ID string `yaml:"id"`
}

// RegistryConfig is how CDI pulls images.
type RegistryConfig struct {
	// Secret holds accessKeyId and secretKey (not a dockerconfigjson).
	Secret string `yaml:"secret"`
	// CAConfigMap holds the registry's CA certificates.
	CAConfigMap string `yaml:"ca_config_map"`
	// PullMethod is "pod", "node" or empty for CDI's default.
	PullMethod string `yaml:"pull_method"`
}

// PortsConfig is how declared public ports are opened.
type PortsConfig struct {
	// Service is NodePort or LoadBalancer. [NodePort]
	Service string `yaml:"service"`
	// Address is the name or IP address at which users reach them; empty for what
	// the cluster says: the load balancer's, or the node's.
	Address string `yaml:"address"`
}

// FabricConfig is what joins nodes for replicas over several of them.
type FabricConfig struct {
	// Devices are the resources of whole InfiniBand adapters that machines may get,
	// the best first; empty keeps every replica within one node.
	Devices []string `yaml:"devices"`
}

// Toleration is a Kubernetes toleration.
type Toleration struct {
	Key      string `yaml:"key"`
	Operator string `yaml:"operator"`
	Value    string `yaml:"value"`
	Effect   string `yaml:"effect"`
}

// Deadlines are those of package graph.
type Deadlines struct {
	Seed           time.Duration `yaml:"seed"`
	Bound          time.Duration `yaml:"bound"`
	ImportIdle     time.Duration `yaml:"import_idle"`
	Import         time.Duration `yaml:"import"`
	Pending        time.Duration `yaml:"pending"`
	Scheduling     time.Duration `yaml:"scheduling"`
	Scheduled      time.Duration `yaml:"scheduled"`
	ScheduledLarge time.Duration `yaml:"scheduled_large"`
	Deletion       time.Duration `yaml:"deletion"`
	Eviction       time.Duration `yaml:"eviction"`
	Orphan         time.Duration `yaml:"orphan"`
}

// Defaults is the configuration without a file.
func Defaults() Config {
	d := graph.DefaultDeadlines()
	return Config{
		Base:      daemon.Base{Name: "wrk-server-k8s-nvidia", StateDirectory: "/var/lib/cosmicac/wrk-server-k8s-nvidia"},
		Namespace: "cosmicac", VolumeMode: "Filesystem", DefaultDiskGiB: 40, SerialLog: true, Relist: 5 * time.Minute,
		DeniedCIDRs: []string{"10.96.0.0/12", "10.244.0.0/16"}, Ports: PortsConfig{Service: string(corev1.ServiceTypeNodePort)},
		Overlay:    OverlayConfig{Bridge: "br-cosmicac", VLANs: "100-199", MTU: 1450, Subnet: "10.64.0.0/24", VLANQuarantine: 10 * time.Minute},
		AgentImage: "ghcr.io/cosmicac/agents:{version}",
		RuntimeImages: map[string]string{
			"vllm":     "docker://ghcr.io/cosmicac/runtime-vllm:{version}",
			"parakeet": "docker://ghcr.io/cosmicac/runtime-parakeet:{version}",
			"embedded": "docker://ghcr.io/cosmicac/runtime-embedded:{version}",
			"command":  "docker://ghcr.io/cosmicac/runtime-command:{version}",
		},
		Deadlines: Deadlines(d),
	}
}

// Validate implements daemon.Validator.
func (c *Config) Validate() []fault.Detail {
	var bad []fault.Detail
	add := func(field, format string, a ...any) {
		bad = append(bad, fault.Detail{Field: field, Rule: fmt.Sprintf(format, a...)})
	}
	if !label.ID(c.Rack.ID) {
		add("rack.id", "is the id of the rack's entry: a DNS label of 1 to 40 characters")
	}
	if c.Kubeconfig == "" {
		add("kubeconfig", "is required: the path of a kubeconfig file")
	}
	if c.Namespace == "" {
		add("namespace", "is required")
	}
	if _, err := labels.Parse(c.NodeSelector); err != nil {
		add("node_selector", "is a Kubernetes label selector: %v", err)
	}
	if c.AgentImage == "" || strings.ContainsAny(c.AgentImage, " \t\n") {
		add("agent_image", "is the containerDisk image with the agents, like registry/agents:{version}")
	}
	if !slices.Contains([]string{"", "Filesystem", "Block"}, c.VolumeMode) {
		add("volume_mode", "is Filesystem, Block or empty")
	}
	if !slices.Contains([]string{"", "pod", "node"}, c.Registry.PullMethod) {
		add("registry.pull_method", "is pod, node or empty")
	}
	if c.DefaultDiskGiB == 0 {
		add("default_disk_gib", "is at least 1")
	}
	for i, text := range c.DeniedCIDRs {
		if p, err := netip.ParsePrefix(text); err != nil || p.Bits() == 0 {
			add(fmt.Sprintf("denied_cidrs[%d]", i), "is a network like 10.96.0.0/12")
		}
	}
	for i, name := range c.Fabric.Devices {
		field := fmt.Sprintf("fabric.devices[%d]", i)
		if domain, _, ok := strings.Cut(name, "/"); !ok || len(validation.IsQualifiedName(name)) > 0 {
			add(field, "is a resource like nvidia.com/mlnx_cx7")
		} else if domain == "rdma" {
			add(field, "is shared among containers; a machine needs whole adapters, from a plugin that binds them to vfio-pci")
		}
	}
	if !slices.Contains([]string{string(corev1.ServiceTypeNodePort), string(corev1.ServiceTypeLoadBalancer)}, c.Ports.Service) {
		add("ports.service", "is NodePort or LoadBalancer")
	}
	if len(c.Ports.Address) > 253 || strings.ContainsAny(c.Ports.Address, " \t\n:/") && net.ParseIP(c.Ports.Address) == nil {
		add("ports.address", "is a host name or an IP address without a port, or empty")
	}
	for i, t := range c.Tolerations {
		if !slices.Contains([]string{"", "Exists", "Equal"}, t.Operator) || !slices.Contains([]string{"", "NoSchedule", "PreferNoSchedule", "NoExecute"}, t.Effect) {
			add(fmt.Sprintf("tolerations[%d]", i), "operator is Exists or Equal, effect is NoSchedule, PreferNoSchedule or NoExecute")
		}
	}
	for name := range c.RuntimeImages {
		if c.RuntimeImages[name] == "" || strings.ContainsAny(c.RuntimeImages[name], " \t\n") {
			add("runtime_images."+name, "is an image reference like docker://registry/name:tag")
		}
	}
	c.Overlay.validate(add)
	if c.Relist < 10*time.Second {
		add("relist", "is at least 10s")
	}
	d := c.Deadlines
	for key, v := range map[string]time.Duration{
		"seed": d.Seed, "bound": d.Bound, "import_idle": d.ImportIdle, "import": d.Import, "pending": d.Pending, "scheduling": d.Scheduling,
		"scheduled": d.Scheduled, "scheduled_large": d.ScheduledLarge, "deletion": d.Deletion, "orphan": d.Orphan,
	} {
		if v <= 0 {
			add("deadlines."+key, "is longer than zero, like 5m")
		}
	}
	if d.Eviction < 0 {
		add("deadlines.eviction", "is not negative; 0 leaves drained jobs to the operator")
	}
	return bad
}

// settings are the configuration as package graph takes it.
func (c *Config) settings(network, version string) graph.Settings {
	tagged := func(image string) string { return strings.ReplaceAll(image, "{version}", version) }
	s := graph.Settings{
		Rack: c.Rack.ID, Network: network, AgentImage: tagged(c.AgentImage), ImagePullSecret: c.ImagePullSecret,
		RuntimeImages: map[string]string{}, StorageClass: c.StorageClass, VolumeMode: c.VolumeMode,
		RegistrySecret: c.Registry.Secret, RegistryCA: c.Registry.CAConfigMap, PullMethod: c.Registry.PullMethod,
		DefaultDiskGiB: c.DefaultDiskGiB, DeniedCIDRs: c.DeniedCIDRs, SerialLog: c.SerialLog, Deadlines: graph.Deadlines(c.Deadlines),
		PortService: corev1.ServiceType(c.Ports.Service), PortAddress: c.Ports.Address,
	}
	for runtime, image := range c.RuntimeImages {
		s.RuntimeImages[runtime] = tagged(image)
	}
	for _, t := range c.Tolerations {
		s.Tolerations = append(s.Tolerations, corev1.Toleration{
			Key: t.Key, Operator: corev1.TolerationOperator(t.Operator), Value: t.Value, Effect: corev1.TaintEffect(t.Effect),
		})
	}
	return s
}
