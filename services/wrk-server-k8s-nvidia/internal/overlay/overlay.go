// Package overlay gives the machines of one attempt a network of their own, beside
// the pod network: behind that one's address translation they do not reach each
// other.
//
// A Driver hands out networks, says what a machine needs to be in one, and takes
// them back. What is handed out is known from the cluster's own objects alone, so
// that a restart loses nothing. It builds no bridges and no tunnels: those are the
// operator's, and Preflight says whether they seem to be there.
package overlay

import (
	"context"
	"crypto/sha256"
	"fmt"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	kubevirt "kubevirt.io/api/core/v1"
)

// Driver is one way to build such networks. Safe for concurrent use.
type Driver interface {
	// Plan is what a new attempt gets; nil while there is no overlay.
	Plan() *Plan
	// Allocate gives the attempt a network that no other has, and its name. Asked
	// again it gives the same one; with plan.Network set exactly that one, made anew
	// if somebody removed it. *Exhausted says that all are in use or in quarantine. Any other error
	// leaves open whether one was made: ask again, or Release.
	Allocate(ctx context.Context, attempt string, plan *Plan, labels map[string]string) (string, error)
	// Render is the place of an attempt's k-th machine. It asks nobody.
	Render(plan *Plan, attempt string, k int) Place
	// Release gives back what the attempt has, and names what the cluster has not
	// removed yet. Only for an attempt whose machines and pods are gone. The network is
	// nobody's from then on, and given to nobody before its quarantine is over.
	Release(ctx context.Context, attempt string) ([]string, error)
	// Sweep removes what Release left of networks whose quarantine is over, of the
	// mesh's network with this id alone.
	Sweep(ctx context.Context, network string) error
	// Preflight says in words what these nodes have of it, and what to do if that
	// is not enough.
	Preflight(ctx context.Context, nodes []*corev1.Node) (words, remedy string, good bool)
}

// Plan is what the record of an attempt remembers of its network, whatever the
// worker's configuration says later.
type Plan struct {
	Bridge string `json:"bridge"`
	MTU    int    `json:"mtu"`
	// Subnet holds the machines' addresses. Networks do not see each other, so that
	// all of them may use the same.
	Subnet netip.Prefix `json:"subnet"`
	// Network is the name of the attachment; empty before Allocate.
	Network string `json:"network,omitempty"`
}

// Place is what a machine's spec and seed need.
type Place struct {
	Interfaces []kubevirt.Interface
	Networks   []kubevirt.Network
	// NetworkData is cloud-init's, for every interface of the machine.
	NetworkData []byte
}

// Addresses of machines begin here within the subnet; what is below is kept for a
// gateway.
const firstAddress = 10

// MaximumBits is the smallest subnet, which has room for the largest attempt.
const MaximumBits = 25

// Address is that of the k-th machine.
func (p *Plan) Address(k int) netip.Prefix {
	a := p.Subnet.Masked().Addr().As4()
	a[3] += byte(firstAddress + k)
	return netip.PrefixFrom(netip.AddrFrom4(a), p.Subnet.Bits())
}

// hardware is a locally administered address of an interface, the same each time.
func hardware(attempt string, k int, name string) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%s/%d/%s", attempt, k, name))
	return fmt.Sprintf("02:%02x:%02x:%02x:%02x:%02x", sum[0], sum[1], sum[2], sum[3], sum[4])
}

// Exhausted says that every network is in use.
type Exhausted struct{ Words string }

func (e *Exhausted) Error() string { return e.Words }
