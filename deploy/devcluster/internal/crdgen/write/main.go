// Command write regenerates the CustomResourceDefinitions committed beside package crds. It changes files only when the
// versions of the Go types in go.mod changed; a test of package crdgen says when that is due.
package main

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/cosmicac/cosmicac/deploy/devcluster/internal/crdgen"
)

func main() {
	if err := run(filepath.Join("internal", "crds", "yaml")); err != nil {
		fmt.Fprintln(os.Stderr, "crdgen:", err)
		os.Exit(1)
	}
}

func run(dir string) error {
	files, err := crdgen.Generate()
	if err != nil {
		return err
	}
	for name, raw := range files {
		if err := os.WriteFile(filepath.Join(dir, name), raw, 0o644); err != nil {
			return err
		}
	}
	return nil
}
