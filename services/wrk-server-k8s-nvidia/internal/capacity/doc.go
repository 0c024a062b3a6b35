// Package capacity counts what a rack has, holds and can offer. Count is a pure
// function of nodes, pods, claims, KubeVirt's list of permitted devices and the
// operator's rack entry: it keeps no counter, asks nobody and has no clock, so
// that a restart or a missed event cannot make it wrong for longer than one call.
//
// It grants nothing (package claim does) and knows nothing of a GPU that is not
// in the API: health inside a guest, NVLink partitions and which physical card
// a virtual machine got are invisible here.
package capacity
