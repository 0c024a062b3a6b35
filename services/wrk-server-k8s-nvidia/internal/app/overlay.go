package app

import (
	"fmt"
	"net/netip"
	"regexp"
	"time"

	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/cluster"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/overlay"
)

// OverlayConfig gives replicas over several nodes a network of their own.
type OverlayConfig struct {
	// Driver is "ovs", or empty for none.
	Driver string `yaml:"driver"`
	// Bridge is the Open vSwitch bridge that the operator made. [br-cosmicac]
	Bridge string `yaml:"bridge"`
	// VLANs are the first and the last that are ours on it. [100-199]
	VLANs string `yaml:"vlans"`
	// MTU of the machines' interfaces there, in bytes. [1450]
	MTU int `yaml:"mtu"`
	// Subnet holds the machines' addresses. [10.64.0.0/24]
	Subnet string `yaml:"subnet"`
	// VLANQuarantine is how long a VLAN that was given back is given to nobody; 0 for
	// not at all. [10m]
	VLANQuarantine time.Duration `yaml:"vlan_quarantine"`
}

const driverOVS = "ovs"

// maximumQuarantine keeps a slip of the pen from taking every VLAN for good.
const maximumQuarantine = 7 * 24 * time.Hour

var bridgeName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,13}[a-z0-9])?$`)

// vlans are the bounds of the range.
func (o OverlayConfig) vlans() (first, last int, err error) {
	if _, err := fmt.Sscanf(o.VLANs, "%d-%d", &first, &last); err != nil || fmt.Sprintf("%d-%d", first, last) != o.VLANs ||
		first < 1 || last > 4094 || first > last {
		return 0, 0, fmt.Errorf("%q is no range of VLANs", o.VLANs)
	}
	return first, last, nil
}

func (o OverlayConfig) validate(add func(field, format string, a ...any)) {
	if o.Driver != "" && o.Driver != driverOVS {
		add("overlay.driver", "is ovs, or empty for none")
	}
	if !bridgeName.MatchString(o.Bridge) {
		add("overlay.bridge", "is the name of a bridge: at most 15 of a-z, 0-9 and hyphens")
	}
	if _, _, err := o.vlans(); err != nil {
		add("overlay.vlans", "is a range like 100-199 within 1 to 4094")
	}
	if o.VLANQuarantine < 0 || o.VLANQuarantine > maximumQuarantine {
		add("overlay.vlan_quarantine", "is 0 to %s", maximumQuarantine)
	}
	if o.MTU < 1280 || o.MTU > 9216 {
		add("overlay.mtu", "is 1280 to 9216")
	}
	if p, err := netip.ParsePrefix(o.Subnet); err != nil || !p.Addr().Is4() || p.Bits() > overlay.MaximumBits || p.Masked() != p {
		add("overlay.subnet", "is an IPv4 network of /%d or larger, like 10.64.0.0/24", overlay.MaximumBits)
	}
}

// driver makes the driver of a checked configuration. One that is off still gives
// back what older attempts have.
func (o OverlayConfig) driver(client *cluster.Client, now func() time.Time) overlay.Driver {
	first, last, _ := o.vlans()
	subnet, _ := netip.ParsePrefix(o.Subnet)
	return overlay.NewOVS(client.Networks.NetworkAttachmentDefinitions(client.Namespace), overlay.Options{
		Off: o.Driver == "", Bridge: o.Bridge, First: first, Last: last, MTU: o.MTU, Subnet: subnet, Quarantine: o.VLANQuarantine, Now: now,
	})
}

// resource is the node resource of the bridge; empty without an overlay.
func (o OverlayConfig) resource() string {
	if o.Driver == "" {
		return ""
	}
	return overlay.Marker(o.Bridge)
}
