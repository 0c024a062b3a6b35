package crdgen

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

// TestCommittedDefinitionsAreFresh fails when the Go types in go.mod moved and the committed YAML did not.
func TestCommittedDefinitionsAreFresh(t *testing.T) {
	files, err := Generate()
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join("..", "crds", "yaml")
	for name, want := range files {
		got, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Errorf("read %s: %v", name, err)
			continue
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%s is stale: run `go run ./internal/crdgen/write` in deploy/devcluster", name)
		}
	}
	committed, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range committed {
		if files[e.Name()] == nil {
			t.Errorf("%s is committed but no longer generated", e.Name())
		}
	}
}
