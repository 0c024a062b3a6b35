// Package agentdisk makes the disk from which virtual machines run their agent, and the container image that carries it
// to a cluster: one layer with /disk/agents.img, as KubeVirt reads a containerDisk. The disk is an ext4 file system
// without a journal, written once and mounted read-only; every cloud-init image can mount it.
//
// The same agents, built by the same toolchain, give the same bytes and so the same digest: no clock, no random number
// and no host name goes in. It runs no container engine and keeps no credentials.
package agentdisk
