package daemon

import (
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
)

// heapRoomBytes is what may be allocated between two collections, at least. A daemon's
// live heap is a few MB while its calls allocate hundreds of MB a second: left alone it
// is collected many times a second, by threads that others wanted. With twice as much
// the memory of a thousand links is scattered: 91 KB each instead of 75 (make bench-mesh).
const heapRoomBytes = 32 << 20

// KeepHeapRoom has the collector wait until heapRoomBytes were allocated, also where
// the live heap is small; a live heap above that is collected as ever. Nothing is
// reserved, but garbage of up to that size may stay for the two minutes after which the
// runtime collects anyhow. It lasts for the life of the process, and leaves one alone
// whose GOGC is set.
func KeepHeapRoom() {
	if os.Getenv("GOGC") == "" {
		setCollection()
	}
}

// setCollection sets when the next collection comes, and again after each.
func setCollection() {
	debug.SetGCPercent(collectionPercent(liveHeapBytes()))
	// What is allocated here goes with the next collection. It is a pointer: the runtime
	// batches small things without any, which may keep them for longer.
	runtime.AddCleanup(new(*byte), func(struct{}) { setCollection() }, struct{}{})
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
