package daemon

import (
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
)

// heapRoomBytes is what may be allocated between two collections, at least. A daemon's
// live heap is a few MB while its calls allocate hundreds of MB a second: left alone it
// is collected a hundred times a second, by threads that others wanted. Twice as much
// would save little more, and leave the memory of a thousand links scattered.
const heapRoomBytes = 32 << 20

// KeepHeapRoom has the collector wait until heapRoomBytes were allocated, also where
// the live heap is small; a live heap above that is collected as ever. Nothing is
// reserved: a process that allocates little stays as small as it was. It lasts for the
// life of the process, and leaves one alone whose GOGC is set.
func KeepHeapRoom() {
	if os.Getenv("GOGC") == "" {
		setCollection()
	}
}

// setCollection sets when the next collection comes, and again after each.
func setCollection() {
	debug.SetGCPercent(collectionPercent(liveHeapBytes()))
	// This goes with the next collection. It has a pointer: the runtime batches the
	// allocation of what has none, which may keep it for longer.
	runtime.AddCleanup(&struct{ self *byte }{new(byte)}, func(struct{}) { setCollection() }, struct{}{})
}

// collectionPercent is GOGC for a live heap.
func collectionPercent(live uint64) int {
	const least = 4 << 20 // the runtime takes a smaller one for this
	return int(max(100, heapRoomBytes*100/max(live, least)))
}

// liveHeapBytes is what the last collection left, 0 before the first.
func liveHeapBytes() uint64 {
	live := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	metrics.Read(live)
	return live[0].Value.Uint64()
}
