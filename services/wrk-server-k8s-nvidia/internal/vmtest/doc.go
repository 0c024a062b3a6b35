// Package vmtest proves the agent's way in with a real virtual machine: what the
// worker renders, put into qemu as KubeVirt would, must bring an agent into a
// mesh. It holds tests only; `make test-vm` runs them. It does not test KubeVirt,
// CDI, or a GPU's passthrough, of which there are none.
package vmtest
