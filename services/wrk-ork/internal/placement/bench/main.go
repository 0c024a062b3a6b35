// Command bench measures placement on one core: how fast plans are made on a large
// cluster that is 70 % full, how much memory that takes, and how many GPUs stay
// stranded beside first fit, best fit and what kube-scheduler does by default.
// Everything is seeded: the same seed gives the same work.
//
// It measures neither the record nor the workers, and starts no daemon.
package main

import (
	"fmt"
	"os"
)

func main() {
	if err := measure(); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}
