// Package rules holds the rules of this repository as tests: one doc comment a
// package, names, file sizes, layering, what a binary may link, and a right on
// every method of the wire. A rule that is broken names the place and says why the
// rule is there.
//
// It holds no code for others and is not imported by anything. What a compiler,
// vet or a linter checks already is not repeated here.
package rules
