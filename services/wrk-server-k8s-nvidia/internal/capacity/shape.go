package capacity

// Bytes in powers of two.
const (
	MiB = int64(1) << 20
	GiB = int64(1) << 30
)

// Need is what one virtual machine takes from its node.
type Need struct {
	MilliCPU    int64
	MemoryBytes int64
}

// Shape is a virtual machine's size as its guest sees it.
type Shape struct {
	GPUs     int
	CPUCores int64
	// MemoryBytes is pinned in full as soon as a GPU is passed through.
	MemoryBytes int64
}

// ShapeOf sizes one node of an attempt. A machine without GPUs has the size of
// one GPU's share; nothing is smaller than one core and one GiB.
func ShapeOf(gpuCount, coresPerGPU, memoryGiBPerGPU uint32) Shape {
	shares := int64(max(1, gpuCount))
	return Shape{
		GPUs:        int(gpuCount),
		CPUCores:    max(1, shares*int64(coresPerGPU)),
		MemoryBytes: max(1, shares*int64(memoryGiBPerGPU)) * GiB,
	}
}

// Need adds what KubeVirt's launcher pod takes beside the guest: page tables,
// its own processes, per-core memory, and 1 GiB when any device is passed through.
func (s Shape) Need() Need {
	overhead := s.MemoryBytes/512 + 220*MiB + 8*MiB*s.CPUCores + 8*MiB + 100*MiB
	if s.GPUs > 0 {
		overhead += GiB
	}
	return Need{MilliCPU: s.CPUCores * 1000, MemoryBytes: s.MemoryBytes + overhead}
}
