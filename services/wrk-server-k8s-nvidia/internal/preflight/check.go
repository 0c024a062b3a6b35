package preflight

import (
	"context"
	"encoding/json"
	"fmt"
	"sort"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kubevirt "kubevirt.io/api/core/v1"
	cdi "kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/capacity"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/cluster"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/overlay"
)

// Verdicts, short.
const (
	good    = workerv1.CheckVerdict_CHECK_VERDICT_OK
	warning = workerv1.CheckVerdict_CHECK_VERDICT_WARNING
	gate    = workerv1.CheckVerdict_CHECK_VERDICT_GATE
	unknown = workerv1.CheckVerdict_CHECK_VERDICT_UNKNOWN
)

// Bounds of a check.
const (
	// skewMost is how far the cluster's clock may be from this one.
	skewMost = time.Minute
	// nodesMost is how many nodes get a row each; of more only those that need a look.
	nodesMost = 40
)

// Target is the cluster that is looked at, as a rack would use it.
type Target struct {
	Client *cluster.Client
	// NodeSelector picks the rack's nodes; StorageClass is empty for the default.
	NodeSelector, StorageClass string
	GPUModels                  []string
	Tolerations                []corev1.Toleration
	// Fabric are the resources of InfiniBand adapters that the rack's worker names.
	Fabric []string
	// Overlay joins machines of several nodes; OverlayResource is the node resource of
	// its bridge. Nil and empty where there is none.
	Overlay         overlay.Driver
	OverlayResource string
	// Skew is how far the cluster's clock is ahead, false when it is not known.
	Skew func() (time.Duration, bool)
}

// check collects the rows of one run.
type check struct {
	Target
	ctx      context.Context
	findings []*workerv1.CheckFinding
}

func (c *check) add(row string, v workerv1.CheckVerdict, remedy, format string, a ...any) {
	c.findings = append(c.findings, &workerv1.CheckFinding{Row: row, Verdict: v, Message: cluster.Wordsf(format, a...), Remedy: remedy})
}

// failed adds a row for what could not be read.
func (c *check) failed(row, what string, err error) {
	remedy := "see that the API server answers"
	if apierrors.IsForbidden(err) {
		remedy = "apply deploy/kubernetes/rbac.yaml, or check with an administrator's kubeconfig"
	}
	c.add(row, unknown, remedy, "cannot read %s: %s", what, cluster.Words(err))
}

// Check goes through everything that a rack needs of its cluster and reads only.
// What cannot be read is said to be unknown and stops nothing. It starts no machine:
// whether one boots with a GPU a probe can tell, package probe.
func Check(ctx context.Context, t Target) []*workerv1.CheckFinding {
	c := &check{Target: t, ctx: ctx}
	if !c.api() {
		return c.findings
	}
	c.kinds()
	kv := c.kubevirt()
	c.gpus(kv)
	c.storage()
	c.importer()
	c.namespace()
	c.rights()
	c.clock()
	return c.findings
}

// Blocked says whether any row is a gate.
func Blocked(findings []*workerv1.CheckFinding) bool {
	for _, f := range findings {
		if f.Verdict == gate {
			return true
		}
	}
	return false
}

func (c *check) raw(path string) ([]byte, error) {
	return c.Client.Core.RESTClient().Get().AbsPath(path).SetHeader("Accept", "application/json").Do(c.ctx).Raw()
}

func (c *check) api() bool {
	raw, err := c.raw("/version")
	if err != nil {
		c.add("api", gate, "correct the kubeconfig, or bring the API server up", "the API server does not answer: %s", cluster.Words(err))
		return false
	}
	var v struct{ Major, Minor, GitVersion string }
	if err := json.Unmarshal(raw, &v); err != nil {
		c.add("api", unknown, "see that it is a Kubernetes API server", "the version cannot be read: %v", err)
		return true
	}
	minor, _ := strconv.Atoi(strings.TrimRight(v.Minor, "+"))
	if v.Major == "1" && minor < 33 {
		c.add("api", warning, "upgrade to 1.33 or newer", "Kubernetes %s is older than what is supported, 1.33", v.GitVersion)
		return true
	}
	c.add("api", good, "", "Kubernetes %s", v.GitVersion)
	return true
}

// kinds looks for the definitions by discovery, which everybody may ask.
func (c *check) kinds() {
	for _, k := range []struct {
		row, path, what, remedy string
		missing                 workerv1.CheckVerdict
	}{
		{"kubevirt api", "/apis/kubevirt.io/v1", "kubevirt.io/v1", "install KubeVirt 1.7 to 1.9", gate},
		{"cdi api", "/apis/cdi.kubevirt.io/v1beta1", "cdi.kubevirt.io/v1beta1", "install CDI 1.62 or newer", gate},
		{"multus api", "/apis/k8s.cni.cncf.io/v1", "k8s.cni.cncf.io/v1", "install Multus if replicas are to span nodes", good},
	} {
		switch _, err := c.raw(k.path); {
		case apierrors.IsNotFound(err):
			c.add(k.row, k.missing, k.remedy, "%s is not served", k.what)
		case err != nil:
			c.failed(k.row, k.what, err)
		default:
			c.add(k.row, good, "", "%s is served", k.what)
		}
	}
}

func (c *check) kubevirt() *kubevirt.KubeVirt {
	list, err := c.Client.KubeVirt.KubeVirts(metav1.NamespaceAll).List(c.ctx, metav1.ListOptions{})
	if err != nil {
		c.failed("kubevirt", "the KubeVirt object", err)
		return nil
	}
	var k *kubevirt.KubeVirt
	if len(list.Items) > 0 {
		k = &list.Items[0]
	}
	if words := KubeVirt(k); words != "" {
		verdict := gate
		if k != nil && (strings.HasPrefix(words, "workloadUpdateMethods") || strings.HasPrefix(words, "memory overcommit")) {
			verdict = warning
		}
		c.add("kubevirt", verdict, "see deploy/README.md, what the cluster must have", "%s", words)
	} else {
		c.add("kubevirt", good, "", "KubeVirt %s is deployed", k.Status.ObservedKubeVirtVersion)
	}
	if k == nil {
		return nil
	}
	minor := 0
	if m := version.FindStringSubmatch(k.Status.ObservedKubeVirtVersion); m != nil {
		minor, _ = strconv.Atoi(m[1])
	}
	if minor > 9 {
		c.add("kubevirt version", warning, "watch the first jobs after the upgrade", "KubeVirt %s is newer than what was tried, 1.9", k.Status.ObservedKubeVirtVersion)
	}
	c.gates(k, minor)
	if s := k.Spec.Configuration.EvictionStrategy; s != nil && (*s == kubevirt.EvictionStrategyLiveMigrate) {
		c.add("eviction", warning, "nothing for our VMs, which say External; others with GPUs block drains", "the cluster's default eviction strategy is %s", *s)
	}
	return k
}

// gates reads the feature gates: from 1.9 on every Beta gate is on by itself.
func (c *check) gates(k *kubevirt.KubeVirt, minor int) {
	on := map[string]bool{}
	if dev := k.Spec.Configuration.DeveloperConfiguration; dev != nil {
		for _, g := range dev.FeatureGates {
			on[g] = true
		}
		if minor >= 9 && !on["ExternalNetResourceInjection"] {
			on["ExternalNetResourceInjection"] = true
			for _, g := range dev.DisabledFeatureGates {
				delete(on, g)
			}
		}
	} else if minor >= 9 {
		on["ExternalNetResourceInjection"] = true
	}
	if on["HostDevices"] {
		c.add("host devices", good, "", "the gate HostDevices is on")
	} else {
		c.add("host devices", good, "turn the gate HostDevices on if replicas are to span nodes over InfiniBand", "the gate HostDevices is off")
	}
	if on["ExternalNetResourceInjection"] {
		c.add("network resources", warning, "see that the network-resources-injector webhook runs, or disable the gate",
			"the gate ExternalNetResourceInjection is on: pods get the devices of their networks from a webhook")
	}
}

// gpus joins KubeVirt's list with what the nodes advertise.
func (c *check) gpus(k *kubevirt.KubeVirt) {
	nodes, err := c.Client.Core.Nodes().List(c.ctx, metav1.ListOptions{LabelSelector: c.NodeSelector})
	if err != nil {
		c.failed("nodes", "nodes", err)
		return
	}
	pods, err := c.Client.Core.Pods(metav1.NamespaceAll).List(c.ctx, metav1.ListOptions{FieldSelector: "status.phase!=Succeeded,status.phase!=Failed"})
	if err != nil {
		c.failed("nodes", "pods", err)
		return
	}
	in := capacity.Input{Permitted: PermittedBy(k), Entry: &orkv1.RackEntry{}, GPUModels: c.GPUModels, Tolerations: c.Tolerations, Fabric: c.Fabric, Overlay: c.OverlayResource, HostDevices: HostDevices(k)}
	for i := range nodes.Items {
		in.Nodes = append(in.Nodes, &nodes.Items[i])
	}
	for i := range pods.Items {
		in.Pods = append(in.Pods, &pods.Items[i])
	}
	c.permitted(in)
	rack := capacity.Count(in)
	c.overlay(in.Nodes)
	c.fabric(rack)
	names := make([]string, 0, len(rack.Nodes))
	for name := range rack.Nodes {
		names = append(names, name)
	}
	sort.Strings(names)
	total, offerable, quiet := 0, 0, 0
	for _, name := range names {
		n := rack.Nodes[name]
		words, troubled := []string{}, !n.Schedulable || n.Message != ""
		for _, model := range sortedModels(n) {
			g := n.GPUs[model]
			total, offerable = total+g.Total, offerable+g.Offerable
			troubled = troubled || g.Message != ""
			text := fmt.Sprintf("%s: %d in all, %d healthy, %d held, %d offered", model, g.Total, g.Healthy, g.Held, g.Offerable)
			if g.Message != "" {
				text += " (" + g.Message + ")"
			}
			words = append(words, text)
		}
		if n.Message != "" {
			words = append(words, n.Message)
		}
		switch {
		case troubled:
			c.add("node "+name, warning, "kubectl describe node "+name, "%s", strings.Join(words, "; "))
		case len(n.GPUs) == 0 || len(names) > nodesMost:
			quiet++
		default:
			c.add("node "+name, good, "", "%s", strings.Join(words, "; "))
		}
	}
	switch {
	case len(names) == 0:
		c.add("gpus", gate, "correct node_selector, or label the nodes", "no node matches %q", c.NodeSelector)
	case total == 0:
		c.add("gpus", gate, "run NVIDIA's KubeVirt device plugin on the GPU nodes and list its resources in permittedHostDevices",
			"none of %d nodes has a GPU that KubeVirt may pass through", len(names))
	default:
		c.add("gpus", good, "", "%d GPUs, %d offered, on %d nodes; %d nodes have no row", total, offerable, len(names), quiet)
	}
}

// permitted finds entries of permittedHostDevices that no node answers to.
func (c *check) permitted(in capacity.Input) {
	if !in.Permitted.Known {
		c.add("permitted devices", gate, "install KubeVirt", "there is no KubeVirt object to permit devices")
		return
	}
	if in.Permitted.Any {
		c.add("permitted devices", warning, "list the GPUs in permittedHostDevices", "KubeVirt has no list of permitted devices and checks none")
		return
	}
	advertised := map[string]bool{}
	for _, n := range in.Nodes {
		for name := range n.Status.Capacity {
			advertised[string(name)] = true
		}
	}
	wrong := 0
	for _, d := range in.Permitted.Devices {
		if advertised[d.Resource] || !strings.HasPrefix(strings.ToUpper(d.PCI), "10DE:") {
			continue
		}
		wrong++
		text, remedy := fmt.Sprintf("KubeVirt permits %s (%s) and no node advertises it", d.Resource, d.PCI), "remove the entry, or look why the device plugin does not advertise it"
		for name := range advertised {
			if strings.EqualFold(name, d.Resource) {
				text, remedy = fmt.Sprintf("KubeVirt permits %s, the nodes advertise %s: the case differs", d.Resource, name), "write the name in permittedHostDevices as the nodes do"
			}
		}
		c.add("permitted devices", warning, remedy, "%s", text)
	}
	if wrong == 0 {
		c.add("permitted devices", good, "", "%d devices are permitted and all NVIDIA ones are advertised", len(in.Permitted.Devices))
	}
}

func sortedModels(n *capacity.Node) []string {
	out := make([]string, 0, len(n.GPUs))
	for m := range n.GPUs {
		out = append(out, m)
	}
	sort.Strings(out)
	return out
}

// Annotations that name a default storage class; the first one is for disks of
// virtual machines and goes before the other.
var defaultClass = []string{"storageclass.kubevirt.io/is-default-virt-class", "storageclass.kubernetes.io/is-default-class"}

func (c *check) storage() {
	const row = "storage class"
	list, err := c.Client.Storage.StorageClasses().List(c.ctx, metav1.ListOptions{})
	if err != nil {
		c.failed(row, "storage classes", err)
		return
	}
	class := chosenClass(list.Items, c.StorageClass)
	switch {
	case class == nil && c.StorageClass != "":
		c.add(row, gate, "correct storage_class of the rack's worker", "there is no storage class %q", c.StorageClass)
		return
	case class == nil:
		c.add(row, gate, "annotate one with "+defaultClass[0]+"=true, or set storage_class of the rack's worker", "none of %d storage classes is the default", len(list.Items))
		return
	}
	mode := "Immediate"
	if class.VolumeBindingMode != nil {
		mode = string(*class.VolumeBindingMode)
	}
	if class.ReclaimPolicy != nil && *class.ReclaimPolicy != corev1.PersistentVolumeReclaimDelete {
		c.add(row, warning, "use a class with reclaimPolicy Delete", "%s has reclaim policy %s: disks of deleted jobs stay, with their data", class.Name, *class.ReclaimPolicy)
	} else {
		c.add(row, good, "", "%s (%s, binding %s)", class.Name, class.Provisioner, mode)
	}
	profiles, err := c.Client.CDI.StorageProfiles().List(c.ctx, metav1.ListOptions{})
	if err != nil {
		c.failed("storage profile", "storage profiles", err)
		return
	}
	for i := range profiles.Items {
		p := &profiles.Items[i]
		if p.Name != class.Name {
			continue
		}
		if len(p.Status.ClaimPropertySets) == 0 {
			c.add("storage profile", good, "fill in claimPropertySets of the StorageProfile if imports stay pending", "CDI does not know how %s is best used; ReadWriteOnce is asked for", class.Name)
		} else {
			c.add("storage profile", good, "", "CDI knows how %s is used", class.Name)
		}
		return
	}
	c.add("storage profile", warning, "see that CDI runs", "CDI has no profile of %s", class.Name)
}

// chosenClass is the class that root disks get; nil when there is none.
func chosenClass(all []storagev1.StorageClass, name string) *storagev1.StorageClass {
	for i := range all {
		if name != "" && all[i].Name == name {
			return &all[i]
		}
	}
	if name != "" {
		return nil
	}
	for _, annotation := range defaultClass {
		for i := range all {
			if all[i].Annotations[annotation] == "true" {
				return &all[i]
			}
		}
	}
	return nil
}

func (c *check) importer() {
	list, err := c.Client.CDI.CDIs().List(c.ctx, metav1.ListOptions{})
	switch {
	case err != nil:
		c.failed("cdi", "the CDI object", err)
	case len(list.Items) == 0:
		c.add("cdi", gate, "install CDI 1.62 or newer", "there is no CDI object")
	case !strings.EqualFold(string(list.Items[0].Status.Phase), "Deployed"):
		c.add("cdi", gate, "look at CDI's operator", "CDI is in phase %q, not Deployed", list.Items[0].Status.Phase)
	default:
		c.add("cdi", good, "", "CDI %s is deployed", list.Items[0].Status.ObservedVersion)
	}
	config, err := c.Client.CDI.CDIConfigs().Get(c.ctx, "config", metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		c.add("scratch space", unknown, "see that CDI runs", "there is no CDIConfig")
	case err != nil:
		c.failed("scratch space", "the CDIConfig", err)
	default:
		c.scratch(config)
	}
}

func (c *check) scratch(config *cdi.CDIConfig) {
	name := config.Status.ScratchSpaceStorageClass
	if name == "" && config.Spec.ScratchSpaceStorageClass != nil {
		name = *config.Spec.ScratchSpaceStorageClass
	}
	if name == "" {
		c.add("scratch space", warning, "set scratchSpaceStorageClass in the CDI object, or registry.pull_method: node", "CDI names no class for the scratch space of imports and takes that of the disk, else the default")
		return
	}
	c.add("scratch space", good, "", "imports use class %s", name)
}

func (c *check) namespace() {
	ns, err := c.Client.Core.Namespaces().Get(c.ctx, c.Client.Namespace, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		c.add("namespace", gate, "kubectl apply -f deploy/kubernetes/", "there is no namespace %s", c.Client.Namespace)
		return
	case err != nil:
		c.failed("namespace", "namespace "+c.Client.Namespace, err)
		return
	}
	if level := ns.Labels["pod-security.kubernetes.io/enforce"]; level == "restricted" {
		c.add("namespace", warning, "enforce baseline, or set KubeVirt's seccomp profile", "%s enforces pod security %q, which launcher pods pass only with KubeVirt's seccomp profile", ns.Name, level)
	} else {
		c.add("namespace", good, "", "%s enforces pod security %q", ns.Name, level)
	}
	limits, err := c.Client.Core.LimitRanges(ns.Name).List(c.ctx, metav1.ListOptions{})
	switch {
	case err != nil:
		c.failed("limits", "limit ranges", err)
	case len(limits.Items) > 0:
		c.add("limits", warning, "see that it lets a pod's request equal its limit, as passthrough needs", "%s has LimitRange %s", ns.Name, limits.Items[0].Name)
	}
	quotas, err := c.Client.Core.ResourceQuotas(ns.Name).List(c.ctx, metav1.ListOptions{})
	switch {
	case err != nil:
		c.failed("quota", "resource quotas", err)
	case len(quotas.Items) > 0:
		c.add("quota", warning, "see that it leaves room for every GPU of the rack and for importer pods", "%s has ResourceQuota %s: jobs wait when it is used up", ns.Name, quotas.Items[0].Name)
	}
}

func (c *check) rights() {
	missing, err := Missing(c.ctx, c.Client)
	switch {
	case err != nil:
		c.failed("rights", "this account's rights", err)
	case len(missing) > 0:
		c.add("rights", gate, "apply deploy/kubernetes/rbac.yaml", "this account may not: %s", strings.Join(missing, "; "))
	default:
		c.add("rights", good, "", "this account may do what a worker does")
	}
}

func (c *check) clock() {
	if c.Skew == nil {
		return
	}
	switch skew, known := c.Skew(); {
	case !known:
	case skew.Abs() > skewMost:
		c.add("clock", warning, "run a time service on both", "the cluster's clock is %s off this host's", skew.Round(time.Second))
	default:
		c.add("clock", good, "", "the cluster's clock agrees with this host's")
	}
}
