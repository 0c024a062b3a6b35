// Package engine serves the n-gram model over the part of vLLM's HTTP surface
// that CosmicAC uses: health, models, chat and text completions with and without
// streaming, and metrics under vLLM's names. A request takes one of a bounded
// number of places, waits in order for one in a bounded queue, and ends as soon
// as its client is gone.
//
// It checks no key: whoever reaches its socket may use it, so it listens on a
// unix socket or on loopback only. It keeps nothing of a request, has no tools,
// no images, no embeddings and no log probabilities, and says so when asked.
package engine
