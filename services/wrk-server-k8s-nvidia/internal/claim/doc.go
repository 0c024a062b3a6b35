// Package claim is the rack's only granter of GPUs. Plans are checked against
// the count of the moment one after another, each with the claims of all before
// it, and a plan that holds is written down as the attempt's anchor, a ConfigMap,
// before it is granted: a restart reads the anchors and has lost nothing.
//
// A claim expires by itself only while nobody knows whether its anchor was
// written. After that it ends when package graph has seen everything of the
// attempt absent. Nothing here counts up or down: Book.Claims is the list that
// package capacity counts from.
//
// It makes no other object than the anchor and never decides which node a job
// should have: ork plans, this package says yes or why not.
package claim
