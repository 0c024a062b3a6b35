// Package e2e holds the tests that need a running development cluster. They run the built binary, from
// COSMICAC_DEVCLUSTER_BIN or built here, and speak plain HTTP with it, so that this package links no Kubernetes code
// and its test binary is small. There is no other code in it.
package e2e
