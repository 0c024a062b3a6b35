// Package cluster talks to the rack's Kubernetes API: a connection whose
// credentials are re-read when they change, narrow typed clients on top of it,
// and a View that mirrors the few kinds of object the worker decides on.
//
// It decides nothing itself: what a node is worth, who gets a GPU and what an
// attempt's objects look like are other packages' business. It never writes an
// object, and it never judges anything absent: View says what the last list and
// the watch since showed, Synced says whether there was a list at all.
package cluster
