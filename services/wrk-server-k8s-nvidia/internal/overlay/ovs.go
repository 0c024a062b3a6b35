package overlay

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"sort"
	"strings"
	"sync"
	"time"

	nad "github.com/k8snetworkplumbingwg/network-attachment-definition-client/pkg/apis/k8s.cni.cncf.io/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	kubevirt "kubevirt.io/api/core/v1"

	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/label"
)

// Attachments is what an OVS asks of the cluster: Multus' NetworkAttachmentDefinitions
// of the worker's namespace.
type Attachments interface {
	Create(ctx context.Context, o *nad.NetworkAttachmentDefinition, opts metav1.CreateOptions) (*nad.NetworkAttachmentDefinition, error)
	Get(ctx context.Context, name string, opts metav1.GetOptions) (*nad.NetworkAttachmentDefinition, error)
	List(ctx context.Context, opts metav1.ListOptions) (*nad.NetworkAttachmentDefinitionList, error)
	Patch(ctx context.Context, name string, form types.PatchType, patch []byte, opts metav1.PatchOptions, subresources ...string) (*nad.NetworkAttachmentDefinition, error)
	Delete(ctx context.Context, name string, opts metav1.DeleteOptions) error
}

// Options of an OVS.
type Options struct {
	// Off keeps new attempts out; what older ones have is still given back.
	Off bool
	// Bridge is the Open vSwitch bridge that the operator made on every node and
	// joined by VXLAN.
	Bridge string
	// First and Last bound the VLANs that are ours on it.
	First, Last int
	MTU         int
	Subnet      netip.Prefix
	// Quarantine is how long a VLAN that was given back is given to nobody; 0 for not
	// at all.
	Quarantine time.Duration
	Now        func() time.Time
}

// OVS gives each attempt a VLAN of its own on an Open vSwitch bridge, by ovs-cni.
//
// A VLAN is taken by an object of its name: the API server lets one of two racers
// make it, whether they are two calls, two racks of the namespace or two lives of one
// worker. A VLAN that was given back rests first, as switches forget slowly: its object
// stays, says until when by the clock of the worker that gave it back, and is removed
// or replaced after that. Of the free ones the one that was taken longest ago comes
// first; a restart forgets that order alone.
type OVS struct {
	o           Options
	attachments Attachments

	mu   sync.Mutex
	next int
}

// NewOVS makes a driver. It asks nothing yet.
func NewOVS(a Attachments, o Options) *OVS {
	d := &OVS{o: o, attachments: a}
	if n := d.size(); n > 0 {
		d.next = int(uint64(o.Now().UnixNano()) % uint64(n))
	}
	return d
}

// Marker is the node resource by which ovs-cni says that a bridge is there.
func Marker(bridge string) string { return "ovs-cni.network.kubevirt.io/" + bridge }

// resourceName is the annotation by which a pod asks for the devices of its network.
const resourceName = "k8s.v1.cni.cncf.io/resourceName"

func (d *OVS) size() int { return d.o.Last - d.o.First + 1 }

func prefixOf(bridge string) string { return bridge + "-vlan-" }

// turn is the VLAN after the one of the last turn.
func (d *OVS) turn() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	v := d.o.First + d.next
	d.next = (d.next + 1) % d.size()
	return v
}

// Plan implements Driver.
func (d *OVS) Plan() *Plan {
	if d.o.Off {
		return nil
	}
	return &Plan{Bridge: d.o.Bridge, MTU: d.o.MTU, Subnet: d.o.Subnet}
}

// Allocate implements Driver.
func (d *OVS) Allocate(ctx context.Context, attempt string, plan *Plan, labels map[string]string) (string, error) {
	if plan.Network != "" {
		return plan.Network, d.again(ctx, attempt, plan, labels)
	}
	list, err := d.attachments.List(ctx, metav1.ListOptions{})
	if err != nil {
		return "", fmt.Errorf("list network attachments: %w", err)
	}
	taken, own := map[string]*nad.NetworkAttachmentDefinition{}, []string{}
	for i := range list.Items {
		o := &list.Items[i]
		taken[o.Name] = o
		if o.Labels[label.Attempt] == attempt && o.DeletionTimestamp == nil && strings.HasPrefix(o.Name, prefixOf(plan.Bridge)) {
			own = append(own, o.Name)
		}
	}
	if len(own) > 0 {
		sort.Strings(own)
		return own[0], nil
	}
	for range d.size() {
		vlan := d.turn()
		want, err := attachment(attempt, plan, vlan, labels)
		if err != nil {
			return "", err
		}
		if o := taken[want.Name]; o != nil {
			if !d.rested(o, labels[label.Network]) {
				continue
			}
			if err := d.remove(ctx, o); err != nil {
				return "", err
			}
		}
		_, err = d.attachments.Create(ctx, want, strict)
		switch {
		case err == nil:
			return want.Name, nil
		case !apierrors.IsAlreadyExists(err): // else another was faster
			return "", fmt.Errorf("make network attachment %s: %w", want.Name, err)
		}
	}
	return "", d.exhausted(list.Items)
}

// again makes sure that the attempt's network is there still.
func (d *OVS) again(ctx context.Context, attempt string, plan *Plan, labels map[string]string) error {
	found, err := d.attachments.Get(ctx, plan.Network, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		var vlan int
		if _, err := fmt.Sscanf(strings.TrimPrefix(plan.Network, prefixOf(plan.Bridge)), "%d", &vlan); err != nil {
			return fmt.Errorf("network attachment %s is of no VLAN of bridge %s: %w", plan.Network, plan.Bridge, err)
		}
		want, err := attachment(attempt, plan, vlan, labels)
		if err != nil {
			return err
		}
		if _, err := d.attachments.Create(ctx, want, strict); err != nil {
			return fmt.Errorf("make network attachment %s anew: %w", plan.Network, err)
		}
		return nil
	}
	if err != nil {
		return fmt.Errorf("read network attachment %s: %w", plan.Network, err)
	}
	if other := found.Labels[label.Attempt]; other != attempt {
		if Quarantined(found) {
			return &Lost{fmt.Sprintf("network attachment %s of attempt %s was given back and is in quarantine", plan.Network, attempt)}
		}
		return &Lost{fmt.Sprintf("network attachment %s of attempt %s was removed and is attempt %q's now", plan.Network, attempt, other)}
	}
	return nil
}

// Lost says that an attempt's network is another's now: somebody removed it by hand.
type Lost struct{ Words string }

func (e *Lost) Error() string { return e.Words }

// strict makes the API server refuse fields that its version of a kind lacks.
var strict = metav1.CreateOptions{FieldValidation: metav1.FieldValidationStrict, FieldManager: label.Manager}

// attachment is the object that takes a VLAN. It has no owner: it must outlive its
// attempt's anchor for as long as a machine is in the network.
func attachment(attempt string, plan *Plan, vlan int, labels map[string]string) (*nad.NetworkAttachmentDefinition, error) {
	config, err := json.Marshal(map[string]any{"cniVersion": "0.4.0", "type": "ovs", "bridge": plan.Bridge, "vlan": vlan, "mtu": plan.MTU})
	if err != nil {
		return nil, err
	}
	all := map[string]string{}
	for k, v := range labels {
		all[k] = v
	}
	all[label.Attempt] = attempt
	return &nad.NetworkAttachmentDefinition{
		ObjectMeta: metav1.ObjectMeta{
			Name: fmt.Sprint(prefixOf(plan.Bridge), vlan), Labels: all, Annotations: map[string]string{resourceName: Marker(plan.Bridge)},
		},
		Spec: nad.NetworkAttachmentDefinitionSpec{Config: string(config)},
	}, nil
}

// Names of a machine's interfaces in its guest.
const (
	podInterface     = "eth0"
	overlayInterface = "overlay0"
)

// Render implements Driver. Both interfaces get a hardware address: cloud-init
// matches by it in every image.
func (d *OVS) Render(plan *Plan, attempt string, k int) Place {
	pod, own := hardware(attempt, k, podInterface), hardware(attempt, k, overlayInterface)
	data := fmt.Sprintf(`version: 2
ethernets:
  %[1]s:
    match: {macaddress: "%[2]s"}
    set-name: %[1]s
    dhcp4: true
  %[3]s:
    match: {macaddress: "%[4]s"}
    set-name: %[3]s
    dhcp4: false
    addresses: [%[5]s]
    mtu: %[6]d
`, podInterface, pod, overlayInterface, own, plan.Address(k), plan.MTU)
	return Place{
		Interfaces: []kubevirt.Interface{
			{Name: "default", MacAddress: pod, InterfaceBindingMethod: kubevirt.InterfaceBindingMethod{Masquerade: &kubevirt.InterfaceMasquerade{}}},
			{Name: "overlay", MacAddress: own, InterfaceBindingMethod: kubevirt.InterfaceBindingMethod{Bridge: &kubevirt.InterfaceBridge{}}},
		},
		Networks: []kubevirt.Network{
			{Name: "default", NetworkSource: kubevirt.NetworkSource{Pod: &kubevirt.PodNetwork{}}},
			{Name: "overlay", NetworkSource: kubevirt.NetworkSource{Multus: &kubevirt.MultusNetwork{NetworkName: plan.Network}}},
		},
		NetworkData: []byte(data),
	}
}

// Release implements Driver.
func (d *OVS) Release(ctx context.Context, attempt string) ([]string, error) {
	of := metav1.ListOptions{LabelSelector: label.Attempt + "=" + attempt}
	for try := 0; ; try++ {
		list, err := d.attachments.List(ctx, of)
		if apierrors.IsNotFound(err) {
			return nil, nil // the cluster has no such kind any more
		}
		if err != nil {
			return nil, fmt.Errorf("list the network attachments of %s: %w", attempt, err)
		}
		var left []string
		for i := range list.Items {
			o := &list.Items[i]
			left = append(left, o.Name)
			if o.DeletionTimestamp != nil || try > 0 {
				continue
			}
			give := d.rest
			if d.o.Quarantine == 0 {
				give = d.remove
			}
			if err := give(ctx, o); err != nil {
				return left, err
			}
		}
		if len(left) == 0 || try > 0 {
			return left, nil
		}
	}
}

// Preflight implements Driver.
func (d *OVS) Preflight(ctx context.Context, nodes []*corev1.Node) (words, remedy string, good bool) {
	list, err := d.attachments.List(ctx, metav1.ListOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return "the cluster has no NetworkAttachmentDefinitions: no replica can span nodes", "install Multus and ovs-cni", false
	case err != nil:
		return fmt.Sprintf("network attachments cannot be listed: %v", err), "apply deploy/kubernetes/rbac.yaml", false
	}
	with := 0
	for _, n := range nodes {
		if q := n.Status.Capacity[corev1.ResourceName(Marker(d.o.Bridge))]; q.Value() > 0 {
			with++
		}
	}
	if with < 2 {
		return fmt.Sprintf("%d of %d nodes have bridge %s (resource %s): two are needed", with, len(nodes), d.o.Bridge, Marker(d.o.Bridge)),
			"make the bridge and its VXLAN tunnels on the rack's nodes and run ovs-cni with its marker", false
	}
	used, resting, _ := d.use(list.Items)
	return fmt.Sprintf("Multus is served; bridge %s is on %d of %d nodes; %d of %d VLANs are in use, %d in quarantine (whether its tunnels join the nodes is not tried)",
		d.o.Bridge, with, len(nodes), used-resting, d.size(), resting), "", true
}
