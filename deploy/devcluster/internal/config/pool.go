package config

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
)

// Pool is a group of equal simulated GPU nodes in one region.
type Pool struct {
	Name     string            // region label and prefix of the node names
	Nodes    int               // how many nodes
	GPUs     int               // GPUs on each node
	Resource string            // extended resource name the simulated device plugin advertises
	PCI      string            // vendor:device id behind the resource, for permittedHostDevices
	CPUs     int               // logical CPUs on each node
	Memory   resource.Quantity // memory on each node

	HostDevice  string // extended resource beside the GPUs, as rdma/ib; empty for none
	HostDevices int    // how many of it on each node

	Bridge string // Open vSwitch bridge that ovs-cni's marker advertises on each node; empty for none
}

// Bounds of a pool. They catch slips of the keyboard, not real limits: the control plane holds a thousand nodes.
const (
	maxNodes = 1000
	maxGPUs  = 64
	maxCPUs  = 4096
)

var (
	minMemory = resource.MustParse("1Gi")
	maxMemory = resource.MustParse("64Ti")

	poolName     = regexp.MustCompile(`^[a-z]([-a-z0-9]{0,30}[a-z0-9])?$`)
	resourceName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$`)
	bridgeName   = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,13}[a-z0-9])?$`)
	pciID        = regexp.MustCompile(`^[0-9A-Fa-f]{4}:[0-9A-Fa-f]{4}$`)
)

// pciIDs names the device behind the resource names that NVIDIA's KubeVirt device plugin makes from pci.ids.
var pciIDs = map[string]string{
	"nvidia.com/GH100_H100_SXM5_80GB": "10DE:2330",
	"nvidia.com/GH100_H100_PCIE":      "10DE:2331",
	"nvidia.com/GH100_H200_SXM_141GB": "10DE:2335",
	"nvidia.com/GH100_H200_NVL":       "10DE:233B",
	"nvidia.com/GB100_B200":           "10DE:2901",
	"nvidia.com/GA100_A100_SXM4_80GB": "10DE:20B2",
	"nvidia.com/GA100_A100_PCIE_80GB": "10DE:20B5",
	"nvidia.com/AD102GL_L40S":         "10DE:26B9",
	"nvidia.com/AD104GL_L4":           "10DE:27B8",
	"nvidia.com/TU104GL_TESLA_T4":     "10DE:1EB8",
	"nvidia.com/GA100_A100SXM64GB":    "10DE:20B3",
	"nvidia.com/GH100_H100_NVSWITCH":  "10DE:22A3",
}

// DefaultPools is the small two-region cluster that starts when no --pool is given.
func DefaultPools() []Pool {
	return []Pool{
		{Name: "us", Nodes: 4, GPUs: 8, Resource: "nvidia.com/GH100_H100_SXM5_80GB", PCI: "10DE:2330", CPUs: 192, Memory: resource.MustParse("2Ti")},
		{Name: "in", Nodes: 2, GPUs: 4, Resource: "nvidia.com/GA100_A100_PCIE_80GB", PCI: "10DE:20B5", CPUs: 64, Memory: resource.MustParse("512Gi")},
	}
}

// ParsePool reads one --pool value: comma-separated key=value pairs, name and resource required.
func ParsePool(s string) (Pool, error) {
	p := Pool{Nodes: 1, GPUs: 8, CPUs: 192, Memory: resource.MustParse("2Ti")}
	seen := map[string]bool{}
	for _, pair := range strings.Split(s, ",") {
		key, value, ok := strings.Cut(strings.TrimSpace(pair), "=")
		if !ok || value == "" {
			return Pool{}, fmt.Errorf("want comma-separated key=value pairs, got %q", pair)
		}
		if seen[key] {
			return Pool{}, fmt.Errorf("%s is given twice", key)
		}
		seen[key] = true
		var err error
		switch key {
		case "name":
			p.Name = value
			if !poolName.MatchString(value) {
				err = fmt.Errorf("name must be lower-case letters, digits and hyphens, at most 32, got %q", value)
			}
		case "nodes":
			p.Nodes, err = count(key, value, maxNodes)
		case "gpus":
			p.GPUs, err = count(key, value, maxGPUs)
		case "cpus":
			p.CPUs, err = count(key, value, maxCPUs)
		case "resource":
			p.Resource = value
			if !resourceName.MatchString(value) {
				err = fmt.Errorf("resource must look like vendor.com/NAME, got %q", value)
			}
		case "pci":
			p.PCI = strings.ToUpper(value)
			if !pciID.MatchString(value) {
				err = fmt.Errorf("pci must look like 10DE:2330, got %q", value)
			}
		case "hostdev":
			p.HostDevice = value
			if !resourceName.MatchString(value) {
				err = fmt.Errorf("hostdev must look like vendor.com/NAME, got %q", value)
			}
		case "hostdevs":
			p.HostDevices, err = count(key, value, maxGPUs)
		case "bridge":
			p.Bridge = value
			if !bridgeName.MatchString(value) {
				err = fmt.Errorf("bridge must be lower-case letters, digits and hyphens, at most 15, got %q", value)
			}
		case "memory":
			p.Memory, err = resource.ParseQuantity(value)
			if err != nil || p.Memory.Cmp(minMemory) < 0 || p.Memory.Cmp(maxMemory) > 0 {
				err = fmt.Errorf("memory must be a quantity from %s to %s, got %q", &minMemory, &maxMemory, value)
			}
		default:
			err = fmt.Errorf("unknown key %q, known are name, nodes, gpus, resource, pci, hostdev, hostdevs, bridge, cpus, memory", key)
		}
		if err != nil {
			return Pool{}, err
		}
	}
	if p.Name == "" {
		return Pool{}, fmt.Errorf("name is required")
	}
	if p.Resource == "" {
		return Pool{}, fmt.Errorf("resource is required")
	}
	if (p.HostDevice == "") != (p.HostDevices == 0) {
		return Pool{}, fmt.Errorf("hostdev and hostdevs belong together")
	}
	if p.PCI == "" {
		if p.PCI = pciIDs[p.Resource]; p.PCI == "" {
			return Pool{}, fmt.Errorf("pci is required for resource %s, which is not in the built-in table", p.Resource)
		}
	}
	return p, nil
}

func count(key, value string, max int) (int, error) {
	n, err := strconv.Atoi(value)
	if err != nil || n < 1 || n > max {
		return 0, fmt.Errorf("%s must be a whole number from 1 to %d, got %q", key, max, value)
	}
	return n, nil
}

// checkPools applies the rules that hold across pools.
func checkPools(pools []Pool) error {
	names, ids, total := map[string]bool{}, map[string]string{}, 0
	for _, p := range pools {
		if names[p.Name] {
			return fmt.Errorf("name %q is used by two pools", p.Name)
		}
		names[p.Name] = true
		if id, ok := ids[p.Resource]; ok && id != p.PCI {
			return fmt.Errorf("resource %s has two pci ids, %s and %s", p.Resource, id, p.PCI)
		}
		ids[p.Resource] = p.PCI
		total += p.Nodes
	}
	if total > maxNodes {
		return fmt.Errorf("nodes of all pools must not exceed %d, got %d", maxNodes, total)
	}
	return nil
}
