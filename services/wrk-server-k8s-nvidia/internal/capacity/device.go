package capacity

import (
	"sort"
	"strings"
)

// prefix of the resource names that NVIDIA's KubeVirt device plugin advertises.
const prefix = "nvidia.com/"

// nvidiaVendor is the PCI vendor id of NVIDIA.
const nvidiaVendor = "10DE"

// Device is one entry of KubeVirt's permittedHostDevices.pciHostDevices.
type Device struct {
	// Resource is the full name, "nvidia.com/GH100_H100_SXM5_80GB".
	Resource string
	// PCI is "vendor:device" in hexadecimal, either case.
	PCI string
}

// Permitted is what KubeVirt lets into a virtual machine.
type Permitted struct {
	// Known is false until the KubeVirt object was read, or when there is none.
	Known bool
	// Any is true when the object has no list at all: KubeVirt then checks nothing.
	Any     bool
	Devices []Device
}

// gpus are the PCI device ids that are data centre GPUs, with the name that
// current device plugins give them. Names depend on the plugin's pci.ids, so
// they are compared without regard to case and never constructed.
var gpus = map[string]string{
	"1DB1": "GV100GL_TESLA_V100_SXM2_16GB", "1DB4": "GV100GL_TESLA_V100_PCIE_16GB", "1DB5": "GV100GL_TESLA_V100_SXM2_32GB",
	"1DB6": "GV100GL_TESLA_V100_PCIE_32GB", "1EB8": "TU104GL_TESLA_T4",
	"20B0": "GA100_A100_SXM4_40GB", "20B2": "GA100_A100_SXM4_80GB", "20B3": "GA100_A100SXM64GB", "20B5": "GA100_A100_PCIE_80GB",
	"20F1": "GA100_A100_PCIE_40GB", "2235": "GA102GL_A40", "2236": "GA102GL_A10", "25B6": "GA107GL_A2__A16",
	"26B5": "AD102GL_L40", "26B9": "AD102GL_L40S", "27B8": "AD104GL_L4",
	"2321": "GH100_H100L_94GB", "2330": "GH100_H100_SXM5_80GB", "2331": "GH100_H100_PCIE", "2335": "GH100_H200_SXM_141GB",
	"2339": "GH100_H100", "233B": "GH100_H200_NVL", "2901": "GB100_B200",
}

// notGPUs look like GPUs to the device plugin and are none.
var notGPUs = map[string]bool{"22A3": true, "1AF1": true, "29BC": true}

var gpuNames = func() map[string]bool {
	m := map[string]bool{}
	for _, n := range gpus {
		m[strings.ToLower(n)] = true
	}
	return m
}()

// Model is a resource's name as users know it: without "nvidia.com/".
func Model(resource string) string { return strings.TrimPrefix(resource, prefix) }

// excluded names are container or shared GPUs, slices, and switches: never
// whole GPUs for a virtual machine.
func excluded(resource string) bool {
	model := strings.ToLower(Model(resource))
	return model == "gpu" || strings.HasPrefix(model, "gpu.") || strings.HasPrefix(model, "mig-") ||
		strings.Contains(model, "nvswitch")
}

type class int

const (
	notOurs      class = iota // no business of a GPU rack
	whole                     // a whole GPU
	unclassified              // NVIDIA's, but nobody says what it is
	forbidden                 // a whole GPU that KubeVirt will not pass through
)

// classifier sorts resource names.
type classifier struct {
	permitted Permitted
	named     map[string]bool // models that the operator calls GPUs, lower case
}

func newClassifier(p Permitted, operator ...[]string) classifier {
	c := classifier{permitted: p, named: map[string]bool{}}
	for _, list := range operator {
		for _, m := range list {
			c.named[strings.ToLower(Model(m))] = true
		}
	}
	return c
}

func (c classifier) of(resource string) class {
	if excluded(resource) {
		return notOurs
	}
	model := strings.ToLower(Model(resource))
	known := c.named[model] || strings.HasPrefix(resource, prefix) && gpuNames[model]
	if c.permitted.Known && !c.permitted.Any {
		for _, d := range c.permitted.Devices {
			if d.Resource != resource {
				continue
			}
			vendor, device, _ := strings.Cut(strings.ToUpper(d.PCI), ":")
			if vendor != nvidiaVendor || notGPUs[device] {
				return notOurs
			}
			if known || gpus[device] != "" {
				return whole
			}
			return unclassified
		}
		if known {
			return forbidden
		}
		return notOurs
	}
	switch {
	case known && c.permitted.Known:
		return whole
	case known:
		return forbidden // nothing is passed through before KubeVirt said so
	case strings.HasPrefix(resource, prefix) && c.permitted.Known:
		return unclassified
	default:
		return notOurs
	}
}

// nearMiss names a permitted resource that differs only in case.
func (c classifier) nearMiss(resource string) string {
	for _, d := range c.permitted.Devices {
		if d.Resource != resource && strings.EqualFold(d.Resource, resource) {
			return d.Resource
		}
	}
	return ""
}

func sorted[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	sort.Strings(keys)
	return keys
}
