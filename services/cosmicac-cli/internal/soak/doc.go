// Package soak tests the whole platform, every daemon a process of its own as
// in package demo, under trouble: random actions that a seed replays (make
// soak), and single stories of killed, frozen and cut off daemons. It looks at
// two sides only, the public HTTP API and the cluster's own objects, and holds
// what the first says against the second. It has no code of its own outside
// tests.
package soak
