// Package preflight looks whether a cluster has what the worker needs: rights,
// KubeVirt, CDI, GPUs, storage. It reads only, repairs nothing, and stops nobody:
// what it finds is a table for operators and a health warning.
package preflight

import (
	"context"
	"fmt"
	"regexp"
	"strconv"
	"strings"

	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kubevirt "kubevirt.io/api/core/v1"

	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/capacity"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/cluster"
)

// Right is one row of what the worker must be allowed.
type Right struct {
	Group, Resource string
	Verbs           []string
	// ClusterWide rows are read-only; the others hold in the namespace.
	ClusterWide bool
}

// Rights is everything that the worker does to a cluster, and no more. The
// shipped Role says the same; a test compares them.
var Rights = []Right{
	{"", "nodes", []string{"list", "watch"}, true},
	{"", "pods", []string{"list", "watch"}, true},
	{"kubevirt.io", "kubevirts", []string{"list", "watch"}, true},
	{"cdi.kubevirt.io", "cdis", []string{"list"}, true},
	{"cdi.kubevirt.io", "cdiconfigs", []string{"get"}, true},
	{"cdi.kubevirt.io", "storageprofiles", []string{"list"}, true},
	{"storage.k8s.io", "storageclasses", []string{"list"}, true},
	{"kubevirt.io", "virtualmachineinstances", []string{"get", "list", "watch", "create", "delete"}, false},
	{"cdi.kubevirt.io", "datavolumes", []string{"get", "list", "watch", "create", "patch", "delete"}, false},
	{"", "persistentvolumeclaims", []string{"list", "watch", "delete"}, false},
	{"", "configmaps", []string{"get", "list", "watch", "create", "patch", "delete"}, false},
	{"", "secrets", []string{"get", "create", "delete"}, false},
	{"networking.k8s.io", "networkpolicies", []string{"get", "list", "create", "patch", "delete"}, false},
	{"", "services", []string{"get", "list", "create", "delete"}, false},
	{"k8s.cni.cncf.io", "network-attachment-definitions", []string{"get", "list", "create", "patch", "delete"}, false},
	{"coordination.k8s.io", "leases", []string{"get", "create", "update"}, false},
	{"", "namespaces", []string{"get"}, false},
	{"", "limitranges", []string{"list"}, false},
	{"", "resourcequotas", []string{"list"}, false},
}

// Missing asks the cluster for each right and names those it does not grant.
func Missing(ctx context.Context, c *cluster.Client) ([]string, error) {
	var missing []string
	for _, r := range Rights {
		var lacking []string
		for _, verb := range r.Verbs {
			review := &authorizationv1.SelfSubjectAccessReview{Spec: authorizationv1.SelfSubjectAccessReviewSpec{
				ResourceAttributes: &authorizationv1.ResourceAttributes{Group: r.Group, Resource: r.Resource, Verb: verb},
			}}
			if !r.ClusterWide {
				review.Spec.ResourceAttributes.Namespace = c.Namespace
			}
			got, err := c.Authorization.SelfSubjectAccessReviews().Create(ctx, review, metav1.CreateOptions{})
			if err != nil {
				return nil, fmt.Errorf("ask for the right to %s %s: %w", verb, r.Resource, err)
			}
			if !got.Status.Allowed {
				lacking = append(lacking, verb)
			}
		}
		if len(lacking) > 0 {
			where := "in namespace " + c.Namespace
			if r.ClusterWide {
				where = "in the whole cluster"
			}
			name := r.Resource
			if r.Group != "" {
				name += "." + r.Group
			}
			missing = append(missing, strings.Join(lacking, ", ")+" "+name+" "+where)
		}
	}
	return missing, nil
}

// PermittedBy is KubeVirt's list of devices; the object is nil when there is none.
func PermittedBy(k *kubevirt.KubeVirt) capacity.Permitted {
	if k == nil {
		return capacity.Permitted{}
	}
	list := k.Spec.Configuration.PermittedHostDevices
	p := capacity.Permitted{Known: true, Any: list == nil}
	if list != nil {
		for _, d := range list.PciHostDevices {
			p.Devices = append(p.Devices, capacity.Device{Resource: d.ResourceName, PCI: d.PCIVendorSelector})
		}
	}
	return p
}

var version = regexp.MustCompile(`^v?1\.(\d+)\.`)

// KubeVirt says in words what is wrong with the installation; empty when
// nothing is. The object is nil when there is none.
func KubeVirt(k *kubevirt.KubeVirt) string {
	if k == nil {
		return "there is no KubeVirt object: KubeVirt is not installed"
	}
	if k.Status.Phase != "" && k.Status.Phase != kubevirt.KubeVirtPhaseDeployed {
		return fmt.Sprintf("KubeVirt is in phase %s, not Deployed", k.Status.Phase)
	}
	if m := version.FindStringSubmatch(k.Status.ObservedKubeVirtVersion); m != nil {
		if minor, err := strconv.Atoi(m[1]); err == nil && minor < 7 {
			return fmt.Sprintf("KubeVirt %s is older than 1.7", k.Status.ObservedKubeVirtVersion)
		}
	}
	if dev := k.Spec.Configuration.DeveloperConfiguration; dev != nil && dev.MemoryOvercommit > 100 {
		return fmt.Sprintf("memory overcommit is %d %%: passthrough pins all guest memory, set it to 100", dev.MemoryOvercommit)
	}
	for _, m := range k.Spec.WorkloadUpdateStrategy.WorkloadUpdateMethods {
		if m == kubevirt.WorkloadUpdateMethodEvict {
			return "workloadUpdateMethods contains Evict: an upgrade of KubeVirt ends GPU machines"
		}
	}
	return ""
}
